package engineapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestUnknown goes through what no route takes, one of each kind of paths and posts.
func TestUnknown(t *testing.T) {
	_, s, address := scripted(t, "1.41", "")
	s.answers["GET /containers/json"] = "[]"
	for _, tt := range []struct {
		method, target string
		status         int
	}{
		{"GET", "/containers/json", 200},
		{"GET", "/v1.41/containers/json", 200},
		{"GET", "/v1.24/containers/json", 200},
		{"GET", "/v1.23/containers/json", 400},
		{"GET", "/v1.99/containers/json", 400},
		{"GET", "/v1.41.0/containers/json", 403},
		{"GET", "//containers/json", 400},
		{"GET", "/%63ontainers/json", 403},
		{"GET", "/containers%2fjson", 400},
		{"GET", "/containers/json/", 400},
		{"GET", "/Containers/json", 403},
		{"GET", "/containers/json%00", 400},
		{"GET", "/containers/json?all=1&all=1", 200},
		{"GET", "/containers/json?ALL=1", 200},
		{"GET", "/containers/json?filters=%7B%22label%22%3A%5B%22a%22%5D%2C%22label%22%3A%5B%5D%7D", 400},
		{"GET", "/containers/json?filters=%7B%22is-tasks%22%3A%5B%22a%22%5D%7D", 403},
		{"GET", "/containers/json?filters=%7B%22label%22%3A%7B%22a%22%3Afalse%7D%7D", 400},
		{"POST", "/containers/json", 403},
		{"GET", "/debug/pprof/", 400},
		{"GET", "/plugins", 200},
		{"POST", "/auth", 403},
		{"TRACE", "/_ping", 403},
	} {
		if status, told := say(t, address, tt.method, tt.target, ""); status != tt.status {
			t.Errorf("%s %s: %d %s, want %d", tt.method, tt.target, status, told, tt.status)
		}
	}
}

// What callers make is marked as Berm's, unless they mark it as their own; as a part of
// Berm's own they can't.
func TestFurtherLabels(t *testing.T) {
	s := rehearse(t, "1.41")
	s.d.opts.Labels = map[string]string{"stack": "own", "part": "made"}
	for given, want := range map[string]string{``: "own made", `,"Labels":{"stack":"another"}`: "another "} {
		s.create(t, "", `{"Image":"`+testImage+`"`+given+`}`)
		var asked container.Config
		must(t, json.Unmarshal(s.take()[0], &asked))
		if got := asked.Labels["stack"] + " " + asked.Labels["part"]; got != want {
			t.Errorf("%s: %v", given, asked.Labels)
		}
	}
	for kind, body := range map[string]string{"containers": `{"Image":"` + testImage + `","Labels":{"stack":"own"}}`, "volumes": `{"Name":"v","Labels":{"stack":"own"}}`} {
		if status, told := say(t, s.address, http.MethodPost, "/"+kind+"/create", body); status != http.StatusForbidden || !strings.Contains(told, "labels.reserved") {
			t.Errorf("%s: %d %s", kind, status, told)
		}
	}
}

// TestSeccomp makes system calls in containers that this version made, and one before it.
func TestSeccomp(t *testing.T) {
	d, direct := engineDoor(t, "")
	c := d.client("seccomp")
	l := startLiar(t, d.host) // behind it Berm makes containers as the version before did
	l.set(func(l *liar) { l.change = put("SecurityOptions", []string{}) })
	older := doorTo(t, l.host, "")
	older.opts.Owner, older.opts.Sealer = d.opts.Owner, d.opts.Sealer
	makers := map[bool]*client.Client{false: c, true: older.client("seccomp")}
	programs := map[string][]byte{"getpid": runtimetest.SyscallProgram(t, 39, 0, 0), "io_setup": runtimetest.SyscallProgram(t, 206, 1, 0)}
	code := func(name string, before bool, options ...string) int64 {
		t.Helper()
		made := check.Value(makers[before].ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"/" + name}}, &container.HostConfig{SecurityOpt: options}, nil, nil, ""))(t)
		must(t, direct.CopyToContainer(t.Context(), made.ID, "/", bytes.NewReader(tarOf(t, name, string(programs[name]))), container.CopyToContainerOptions{}))
		shown, err := c.ContainerInspect(t.Context(), made.ID)
		if err != nil || !slices.Equal(shown.HostConfig.SecurityOpt, []string{body.NoNewPrivileges}) {
			t.Errorf("inspect: %q, %v", shown.HostConfig.SecurityOpt, err)
		}
		must(t, c.ContainerStart(t.Context(), made.ID, container.StartOptions{}))
		ended, failed := direct.ContainerWait(t.Context(), made.ID, container.WaitConditionNotRunning)
		select {
		case end := <-ended:
			return end.StatusCode
		case err := <-failed:
			t.Fatal(err)
		}
		return 0
	}
	const eperm = 1
	if n := code("io_setup", false); n != eperm {
		t.Errorf("io_setup: error number %d, want EPERM", n)
	}
	if n := code("io_setup", false, "seccomp=builtin"); n != eperm {
		t.Errorf("io_setup with the built-in profile: error number %d, want EPERM", n)
	}
	if n := code("getpid", false); n == eperm {
		t.Error("getpid is refused, too: the programs prove nothing")
	}
	if n := code("io_setup", true); n == eperm {
		t.Error("a container of the version before refuses io_setup, so it isn't one")
	}
	d.left()
}

// TestInternalNetworksLackTheHost: what listens on all of the host's addresses can't be
// reached from a caller's network without a way out, and another container can.
func TestInternalNetworksLackTheHost(t *testing.T) {
	d, direct := engineDoor(t, "")
	ctx, address := t.Context(), d.listen(Caller{Name: "inner", Tenant: "inner"})
	serve := []string{"sh", "-c", "mkdir -p /w; echo reached > /w/f; httpd -f -p 17777 -h /w"}
	listener := check.Value(direct.ContainerCreate(ctx, &container.Config{Image: testImage, Cmd: serve}, &container.HostConfig{NetworkMode: "host"}, nil, nil, "inner-host"))(t)
	defer func() {
		report(t, direct.ContainerRemove(t.Context(), listener.ID, container.RemoveOptions{Force: true}))
	}()
	must(t, direct.ContainerStart(ctx, listener.ID, container.StartOptions{}))
	docker := mustDocker(t, address)
	docker("network", "create", "inner")
	docker(append([]string{"run", "-d", "--name", "inner-1", "--network", "inner", testImage}, serve...)...)
	docker("run", "-d", "--name", "inner-2", "--network", "inner", testImage, "sleep", "1000")
	fetch := func(tries, from string) string {
		return docker("exec", "inner-2", "sh", "-c", "for i in "+tries+"; do timeout 2 wget -q -O - http://"+from+":17777/f && break; sleep 1; done; true")
	}
	if got := fetch("1 2 3 4 5 6 7 8 9", "inner-1"); got != "reached" {
		t.Errorf("the other container says %q", got)
	}
	n, err := direct.NetworkInspect(ctx, "inner", network.InspectOptions{})
	if err != nil || len(n.IPAM.Config) != 1 {
		t.Fatalf("%+v, %v", n.IPAM, err)
	}
	gateway := n.IPAM.Config[0].Gateway
	if gateway == "" {
		gateway = strings.Replace(n.IPAM.Config[0].Subnet, ".0/", ".1/", 1)
		gateway, _, _ = strings.Cut(gateway, "/")
	}
	if got := fetch("1", gateway); got != "" {
		t.Errorf("the host, at %s, says %q", gateway, got)
	}
}
