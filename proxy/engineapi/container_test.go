package engineapi

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func TestListsOnlyOwn(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {show_labels: true}}}\n")
	mine := d.made(direct, "mine", "list-mine", container.Config{})
	d.made(direct, "other", "list-other", container.Config{})
	c := d.client("mine")
	for name, args := range map[string]dockerfilters.Args{
		"all":                  dockerfilters.NewArgs(),
		"by a label of others": dockerfilters.NewArgs(dockerfilters.Arg("label", "berm.tenant=mine")),
		"by status":            dockerfilters.NewArgs(dockerfilters.Arg("status", "running")),
		"by name":              dockerfilters.NewArgs(dockerfilters.Arg("name", "list-")),
	} {
		got, err := c.ContainerList(t.Context(), container.ListOptions{All: true, Filters: args})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(got) != 1 || got[0].ID != mine {
			t.Errorf("%s: %d containers", name, len(got))
		}
	}
	got, err := c.ContainerList(t.Context(), container.ListOptions{Filters: dockerfilters.NewArgs(dockerfilters.Arg("label", "berm.tenant=other"))})
	if err != nil || len(got) != 0 {
		t.Errorf("another's tenant label: %d containers, %v", len(got), err)
	}
	for _, since := range []string{"list-other", "nobody"} {
		_, err := c.ContainerList(t.Context(), container.ListOptions{Since: since, Filters: dockerfilters.NewArgs(dockerfilters.Arg("since", since))})
		if !errdefs.IsNotFound(err) {
			t.Errorf("since %s: %v", since, err)
		}
	}
}

func TestContainerLife(t *testing.T) {
	d, direct := engineDoor(t, "")
	id := d.made(direct, "mine", "life", container.Config{})
	d.made(direct, "other", "life-other", container.Config{})
	c, ctx := d.client("mine"), t.Context()
	state := func() container.State {
		ct := must(direct.ContainerInspect(ctx, id))(t)
		return *ct.State
	}
	if err := c.ContainerPause(ctx, "life"); err != nil || !state().Paused {
		t.Errorf("pause: %v, %+v", err, state())
	}
	if err := c.ContainerUnpause(ctx, id[:12]); err != nil || state().Paused {
		t.Errorf("unpause: %v, %+v", err, state())
	}
	err := c.ContainerRename(ctx, id, "life-other")
	if !errdefs.IsConflict(err) || strings.Contains(err.Error(), "by container") {
		t.Errorf("rename to a name that is taken: %v", err)
	}
	report(t, c.ContainerRename(ctx, id, "life-2"))
	report(t, c.ContainerKill(ctx, "life-2", "KILL"))
	report(t, c.ContainerRemove(ctx, "life-2", container.RemoveOptions{Force: true, RemoveVolumes: true}))
	if _, err := direct.ContainerInspect(ctx, id); !errdefs.IsNotFound(err) {
		t.Errorf("removed, and still there: %v", err)
	}
	if _, err := c.ContainersPrune(ctx, dockerfilters.NewArgs()); err != nil {
		t.Error(err)
	}
}

func TestPruneLeavesOthers(t *testing.T) {
	d, direct := engineDoor(t, "")
	mine := d.made(direct, "mine", "prune-mine", container.Config{Cmd: []string{"true"}})
	other := d.made(direct, "other", "prune-other", container.Config{Cmd: []string{"true"}})
	for _, id := range []string{mine, other} {
		waited, failed := direct.ContainerWait(t.Context(), id, container.WaitConditionNotRunning)
		select {
		case <-waited:
		case err := <-failed:
			t.Fatal(err)
		}
	}
	report, err := d.client("mine").ContainersPrune(t.Context(), dockerfilters.NewArgs())
	if err != nil || !slices.Equal(report.ContainersDeleted, []string{mine}) {
		t.Errorf("prune: %+v, %v", report, err)
	}
	if _, err := direct.ContainerInspect(t.Context(), other); err != nil {
		t.Errorf("another's container: %v", err)
	}
}

func TestInspectHidesWhatThePolicyHides(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {redact_env: [\"*_TOKEN\"]}}}\n")
	id := d.made(direct, "mine", "redact", container.Config{Env: []string{"API_TOKEN=hunter2", "PLAIN=seen"}})
	ct, raw, err := d.client("mine").ContainerInspectWithRaw(t.Context(), id, true)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(raw, []byte("hunter2")) || !slices.Contains(ct.Config.Env, "API_TOKEN=[redacted]") || !slices.Contains(ct.Config.Env, "PLAIN=seen") {
		t.Errorf("env: %q", ct.Config.Env)
	}
	want := must(direct.ContainerInspect(t.Context(), id))(t)
	if ct.ID != want.ID || ct.Config.Image != want.Config.Image || ct.HostConfig.NetworkMode != want.HostConfig.NetworkMode || ct.SizeRootFs == nil {
		t.Errorf("inspect lost something: %+v", ct)
	}
}

func tarOf(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	noError(t, w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o755}))
	must(io.WriteString(w, content))(t)
	noError(t, w.Close())
	return b.Bytes()
}

func TestArchive(t *testing.T) {
	d, direct := engineDoor(t, "")
	id := d.made(direct, "mine", "archive", container.Config{})
	c, ctx := d.client("mine"), t.Context()
	noError(t, c.CopyToContainer(ctx, id, "/tmp", bytes.NewReader(tarOf(t, "f", "content")), container.CopyToContainerOptions{}))
	stat, err := c.ContainerStatPath(ctx, "archive", "/tmp/f")
	if err != nil || stat.Size != 7 {
		t.Errorf("stat: %+v, %v", stat, err)
	}
	r, _, err := c.CopyFromContainer(ctx, id, "/tmp/f")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	tr := tar.NewReader(r)
	must(tr.Next())(t)
	if got, err := io.ReadAll(tr); err != nil || string(got) != "content" {
		t.Errorf("came back as %q, %v", got, err)
	}
	if _, _, err := c.CopyFromContainer(ctx, id, "/nowhere"); !errdefs.IsNotFound(err) {
		t.Errorf("a path that isn't there: %v", err)
	}
}

func TestArchiveIsPlain(t *testing.T) {
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write(tarOf(t, "f", strings.Repeat("x", 5000)))
	_ = z.Close()
	padded := func(begin string) []byte { return append([]byte(begin), make([]byte, 1024)...) }
	for name, tt := range map[string]struct {
		body []byte
		ok   bool
	}{
		"tar":               {tarOf(t, "f", "x"), true},
		"empty tar":         {make([]byte, 1024), true},
		"gzip":              {append(zipped.Bytes(), make([]byte, 1024)...), false},
		"bzip2":             {padded("BZh91AY"), false},
		"a name like bzip2": {tarOf(t, "BZhello", "x"), false},
		"xz":                {padded("\xfd7zXZ\x00"), false},
		"zstd":              {padded("\x28\xb5\x2f\xfd"), false},
		"skippable zstd":    {padded("\x5a\x2a\x4d\x18"), false},
		"nothing":           {nil, false},
		"text":              {bytes.Repeat([]byte("hello "), 200), false},
		"a wrong check sum": {append(append([]byte{}, 'X'), tarOf(t, "f", "x")[1:]...), false},
	} {
		r, err := plainTar(bytes.NewReader(tt.body))
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, tt.body) {
				t.Errorf("%s: came through changed", name)
			}
		}
	}
}

func TestSwitchedOff(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {archive: \"off\"}}}\n")
	id := d.made(direct, "mine", "off", container.Config{})
	_, _, err := d.client("mine").CopyFromContainer(t.Context(), id, "/etc/passwd")
	if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "archive") {
		t.Errorf("copy with archive off: %v", err)
	}
	auditing := newClient(t, d.listen(Caller{Name: "auditor", Tenant: "mine", Audit: true}))
	r, _, err := auditing.CopyFromContainer(t.Context(), id, "/etc/passwd")
	if err != nil {
		t.Fatalf("copy in mode audit: %v", err)
	}
	_ = r.Close()
}

// TestUnknown goes through what no route takes.
func TestUnknown(t *testing.T) {
	host, _ := testEngine(t)
	address := doorTo(t, host, "").listen(Caller{Name: "a", Tenant: "a"})
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
		{"GET", "/v01.41/containers/json", 403},
		{"GET", "/v1.041/containers/json", 403},
		{"GET", "//containers/json", 400},
		{"GET", "/./containers/json", 400},
		{"GET", "/v1.41/../containers/json", 400},
		{"GET", "/%2e/containers/json", 400},
		{"GET", "/%63ontainers/json", 403},
		{"GET", "/containers/%6ason", 403},
		{"GET", "/containers%2fjson", 400},
		{"GET", "/containers/json/", 400},
		{"GET", "/Containers/json", 403},
		{"GET", "/containers/json%00", 400},
		{"GET", "/containers/json%253f", 400},
		{"GET", "/containers/json?all=1&all=1", 200},
		{"GET", "/containers/json?ALL=1", 200},
		{"GET", "/containers/json?filters=%7B%22label%22%3A%5B%22a%22%5D%2C%22label%22%3A%5B%5D%7D", 400},
		{"GET", "/containers/json?filters=%7B%22is-tasks%22%3A%5B%22a%22%5D%7D", 403},
		{"GET", "/containers/json?filters=%7B%22label%22%3A%7B%22a%22%3Afalse%7D%7D", 400},
		{"POST", "/containers/json", 403},
		{"POST", "/swarm/init", 403},
		{"GET", "/debug/pprof/", 400},
		{"GET", "/plugins", 200},
		{"POST", "/session", 403},
		{"POST", "/grpc", 403},
		{"POST", "/auth", 403},
		{"TRACE", "/_ping", 403},
	} {
		req := must(http.NewRequest(tt.method, "http://docker", nil))(t)
		req.URL.Opaque = tt.target
		resp, err := raw(address).Do(req)
		if err != nil {
			t.Errorf("%s %s: %v", tt.method, tt.target, err)
			continue
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != tt.status {
			t.Errorf("%s %s: %d %s, want %d", tt.method, tt.target, resp.StatusCode, body, tt.status)
		}
	}
}

// What callers make is marked as Berm's, unless they mark it as their own; as a part of
// Berm's own they can't.
func TestFurtherLabels(t *testing.T) {
	d, direct := engineDoor(t, "")
	d.opts.Labels = map[string]string{"stack": "own", "part": "made"}
	c := newClient(t, d.listen(Caller{Name: "a", Tenant: "a"}))
	for name, tt := range map[string]struct{ given, stack, part string }{
		"none":  {"", "own", "made"},
		"given": {"another", "another", ""},
	} {
		cfg := &container.Config{Image: testImage}
		if tt.given != "" {
			cfg.Labels = map[string]string{"stack": tt.given}
		}
		ct := must(c.ContainerCreate(t.Context(), cfg, nil, nil, nil, ""))(t)
		if got := inspect(t, direct, ct.ID).Config.Labels; got["stack"] != tt.stack || got["part"] != tt.part {
			t.Errorf("%s: %v", name, got)
		}
		report(t, c.ContainerRemove(t.Context(), ct.ID, container.RemoveOptions{}))
	}
	_, err := c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Labels: map[string]string{"stack": "own"}}, nil, nil, nil, "")
	deniedBy(t, err, "labels.reserved")
	_, err = c.VolumeCreate(t.Context(), volume.CreateOptions{Name: "of-the-stack", Labels: map[string]string{"stack": "own"}})
	deniedBy(t, err, "labels.reserved")
}

// A container that the operator makes of a caller's image has its labels, and is the
// operator's all the same.
func TestContainersOfCallersImages(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {commit: \"on\", tags: [\"inherit.local/*\"]}}}\n")
	c := d.client("inherit")
	mine := must(c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"sleep", "1000"}}, nil, nil, nil, ""))(t)
	img := must(c.ContainerCommit(t.Context(), mine.ID, container.CommitOptions{Reference: "inherit.local/made:1"}))(t)
	t.Cleanup(func() { _, _ = direct.ImageRemove(context.Background(), img.ID, image.RemoveOptions{Force: true}) })
	if _, err := c.ImageInspect(t.Context(), img.ID); err != nil {
		t.Errorf("the caller's own image: %v", err)
	}
	theirs := must(direct.ContainerCreate(t.Context(), &container.Config{Image: img.ID, Cmd: []string{"sleep", "1000"}}, nil, nil, nil, ""))(t)
	t.Cleanup(func() {
		_ = direct.ContainerRemove(context.Background(), theirs.ID, container.RemoveOptions{Force: true})
	})
	if _, err := c.ContainerInspect(t.Context(), theirs.ID); !errdefs.IsNotFound(err) {
		t.Errorf("the operator's container: %v", err)
	}
	list, err := c.ContainerList(t.Context(), container.ListOptions{All: true})
	if err != nil || len(list) != 1 || list[0].ID != mine.ID {
		t.Errorf("the list: %+v, %v", list, err)
	}
	if _, err := c.ContainerCreate(t.Context(), &container.Config{Image: "inherit.local/made:1"}, nil, nil, nil, ""); err != nil {
		t.Errorf("one of the caller's own: %v", err)
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
		made := must(makers[before].ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"/" + name}}, &container.HostConfig{SecurityOpt: options}, nil, nil, ""))(t)
		noError(t, direct.CopyToContainer(t.Context(), made.ID, "/", bytes.NewReader(tarOf(t, name, string(programs[name]))), container.CopyToContainerOptions{}))
		shown, err := c.ContainerInspect(t.Context(), made.ID)
		if err != nil || !slices.Equal(shown.HostConfig.SecurityOpt, []string{body.NoNewPrivileges}) {
			t.Errorf("inspect: %q, %v", shown.HostConfig.SecurityOpt, err)
		}
		noError(t, c.ContainerStart(t.Context(), made.ID, container.StartOptions{}))
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
	listener := must(direct.ContainerCreate(ctx, &container.Config{Image: testImage, Cmd: serve}, &container.HostConfig{NetworkMode: "host"}, nil, nil, "inner-host"))(t)
	defer func() {
		report(t, direct.ContainerRemove(t.Context(), listener.ID, container.RemoveOptions{Force: true}))
	}()
	noError(t, direct.ContainerStart(ctx, listener.ID, container.StartOptions{}))
	docker := mustDocker(t, address)
	docker("network", "create", "inner")
	docker(append([]string{"run", "-d", "--name", "inner-1", "--network", "inner", testImage}, serve...)...)
	docker("run", "-d", "--name", "inner-2", "--network", "inner", testImage, "sleep", "1000")
	fetch := func(tries, from string) string {
		return docker("exec", "inner-2", "sh", "-c", "for i in "+tries+"; do timeout 3 wget -q -O - http://"+from+":17777/f && break; sleep 1; done; true")
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
	if got := fetch("1 2", gateway); got != "" {
		t.Errorf("the d.host, at %s, says %q", gateway, got)
	}
}
