package engineapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestCreateWhole(t *testing.T) {
	dir := workDir(t)
	must(t, os.MkdirAll(dir+"/ro", 0o755))
	must(t, os.MkdirAll(dir+"/rw", 0o755))
	must(t, os.WriteFile(dir+"/ro/f", []byte("from the host\n"), 0o644))
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("whole")
	net := check.Value(c.NetworkCreate(t.Context(), "whole-net", network.CreateOptions{Internal: true}))(t)
	stop, init := 3, true
	script := `cat /ro/f; echo x > /rw/g; echo $A $PINNED; touch /ro/h 2>/dev/null || echo read-only; touch /vol/v /anon/a /tmpfs/t && echo written; hostname; pwd`
	ct := check.Value(c.ContainerCreate(t.Context(), &container.Config{
		Image: testImage, Cmd: []string{"sh", "-c", script}, Env: []string{"A=1", "A=2", "PATH"}, Hostname: "box", Domainname: "example", WorkingDir: "/work",
		Labels: map[string]string{"mine": "1", "berm.ttl": "90m"}, StopSignal: "SIGINT", StopTimeout: &stop, ExposedPorts: nat.PortSet{"80/tcp": {}},
		Volumes: map[string]struct{}{"/anon": {}, "/vol": {}}, Healthcheck: &container.HealthConfig{Test: []string{"CMD", "true"}, Interval: time.Minute},
	}, &container.HostConfig{
		Binds:        []string{dir + "/ro:/ro:ro", dir + "/rw:/rw:rw", "whole-vol:/vol"},
		Tmpfs:        map[string]string{"/tmpfs": "size=1m,mode=700"},
		Mounts:       []mount.Mount{{Type: mount.TypeTmpfs, Target: "/tmpfs2", TmpfsOptions: &mount.TmpfsOptions{SizeBytes: 4096}}},
		NetworkMode:  "whole-net",
		PortBindings: nat.PortMap{"80/tcp": {{HostPort: ""}}},
		Resources:    container.Resources{Memory: 100 << 20, NanoCPUs: 5e8, MemorySwap: 300 << 20},
		Init:         &init, CapDrop: []string{"KILL"}, CapAdd: []string{"net_bind_service"},
		DNS: []string{"192.0.2.53"}, ExtraHosts: []string{"db:192.0.2.7"},
	}, &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{net.ID[:12]: {Aliases: []string{"web"}}}}, nil, "whole"))(t)
	t.Log(ct.Warnings)
	out, code := finish(t, c, direct, ct.ID)
	if want := "from the host\n2 yes\nread-only\nwritten\nbox\n/work\n"; out != want || code != 0 {
		t.Errorf("it said %q with %d, want %q", out, code, want)
	}
	if b, err := os.ReadFile(dir + "/rw/g"); err != nil || string(b) != "x\n" {
		t.Errorf("on the host: %q, %v", b, err)
	}
	got := inspect(t, direct, ct.ID)
	profile := check.Value(runtime.SeccompOption(goruntime.GOARCH))(t)
	h := got.HostConfig
	if h.Memory != 100<<20 || h.MemorySwap != 100<<20 || h.NanoCPUs != 5e8 || h.PidsLimit == nil || *h.PidsLimit != 128 || h.Privileged {
		t.Errorf("limits: %+v", h.Resources)
	}
	if !slices.Equal(h.SecurityOpt, []string{"no-new-privileges", profile}) || !slices.Equal(h.CapDrop, []string{"ALL"}) || slices.Contains(h.CapAdd, "CAP_KILL") ||
		slices.Contains(h.CapAdd, "CAP_NET_RAW") || h.IpcMode != "private" || h.CgroupnsMode != "private" || h.LogConfig.Config["max-size"] == "" {
		t.Errorf("privileges: %+v", h)
	}
	if len(h.Binds) != 0 || h.PortBindings["80/tcp"][0].HostIP != "127.0.0.1" || got.Config.StopSignal != "SIGINT" || *got.Config.StopTimeout != 3 {
		t.Errorf("host config: %+v", h)
	}
	labels := got.Config.Labels
	expires, _ := time.Parse(time.RFC3339Nano, labels[lifecycle.LabelExpiresAt])
	if labels[lifecycle.LabelOwner] != d.opts.Owner || labels[lifecycle.LabelTenant] != "whole" || labels["mine"] != "1" || labels["berm.ttl"] != "90m" ||
		time.Until(expires) < 80*time.Minute || time.Until(expires) > 91*time.Minute {
		t.Errorf("labels: %v", labels)
	}
	if e := got.NetworkSettings.Networks["whole-net"]; e == nil || e.NetworkID != net.ID || !slices.Contains(e.Aliases, "web") || len(got.NetworkSettings.Networks) != 1 {
		t.Errorf("networks: %+v", got.NetworkSettings.Networks)
	}
	volumes := 0
	for _, m := range got.Mounts {
		if m.Type == mount.TypeVolume {
			volumes++
			v, err := direct.VolumeInspect(t.Context(), m.Name)
			if err != nil || v.Labels[lifecycle.LabelOwner] != d.opts.Owner || v.Labels[lifecycle.LabelExpiresAt] == "" {
				t.Errorf("volume %s: %v, %v", m.Name, v.Labels, err)
			}
		}
	}
	if volumes != 2 {
		t.Errorf("volumes: %+v", got.Mounts)
	}
	must(t, c.ContainerRemove(t.Context(), ct.ID, container.RemoveOptions{RemoveVolumes: true}))
	if l := d.left(); len(l) != 2 { // the network and the volume with a name
		t.Errorf("left: %v", l)
	}
}

// create posts a body as it is. It returns the status, and the message or the ID.
func (s *rehearsal) create(t *testing.T, query, body string) (int, string) {
	t.Helper()
	status, text := say(t, s.address, http.MethodPost, "/v1.41/containers/create"+query, s.words.Replace(body))
	var told struct {
		Message string
		ID      string `json:"Id"`
	}
	must(t, json.Unmarshal([]byte(text), &told))
	return status, told.Message + told.ID
}

// TestCreateRefused sends what no client of ours would, beside the payloads of attackCreate.
// The engine isn't asked for any of it.
func TestCreateRefused(t *testing.T) {
	s := rehearse(t, "1.41")
	bodies := map[string]string{
		"an array":                `"HostConfig":[{"Privileged":true}]`,
		"no type":                 `"HostConfig":{"Mounts":[{"Source":"/","Target":"/x"}]}`,
		"volume of a path":        `"HostConfig":{"Mounts":[{"Type":"volume","Source":"/etc","Target":"/x"}]}`,
		"tmpfs of a kind":         `"HostConfig":{"Mounts":[{"Type":"tmpfs","Target":"/x","TmpfsOptions":{"Options":[["mpol","bind:0"]]}}]}`,
		"tmpfs with a setuid bit": `"HostConfig":{"Tmpfs":{"/x":"mode=4777"}}`,
		"mount over the root":     `"HostConfig":{"Tmpfs":{"/":""}}`,
		"host beside none":        `"HostConfig":{"NetworkMode":"none"},"NetworkingConfig":{"EndpointsConfig":{"host":{}}}`,
		"unknown beside networks": `"NetworkingConfig":{"endpointsconfig":{"host":{}}}`,
		"unknown in an endpoint":  `"NetworkingConfig":{"EndpointsConfig":{"none":{"aliases":[]}}}`,
		"network twice":           `"NetworkingConfig":{"EndpointsConfig":{"none":{},"none":{}}}`,
		"runtime elsewhere":       `"Runtime":"other"`,
		"port by name":            `"HostConfig":{"PortBindings":{"http/tcp":[{"HostPort":"8080"}]}}`,
		"negative health check":   `"Healthcheck":{"Test":["CMD","x"],"Interval":-1}`,
		"fast health check":       `"Healthcheck":{"Test":["CMD","x"],"Interval":1000000}`,
		"busy health check":       `"Healthcheck":{"Test":["CMD","x"],"Interval":999000000}`,
		"busy at the start":       `"Healthcheck":{"Test":["CMD","x"],"StartInterval":999000000}`,
		"hostname":                `"Hostname":"a\nb"`,
		"working place":           `"WorkingDir":"a"`,
		"a descriptor's place":    `"WorkingDir":"/proc/self/fd/7"`,
		"NUL":                     `"Cmd":["a\u0000b"]`,
		"environment":             `"Env":["A=\u0000"]`,
		"secret":                  `"Env":["SECRET_A=1"]`,
	}
	for name, body := range bodies {
		t.Run(name, func(t *testing.T) {
			status, message := s.create(t, "", `{"Image":"`+testImage+`",`+body+`}`)
			if status != 400 && status != 403 && status != 404 {
				t.Errorf("%d: %s", status, message)
			}
			if strings.Contains(message, "SECRET_A=1") {
				t.Errorf("the message tells a value: %s", message)
			}
		})
	}
	for name, tt := range map[string]struct{ query, body string }{
		"trailing":     {"", `{"Image":"` + testImage + `"}{}`},
		"repeated":     {"?name=a/b&name=b", `{"Image":"` + testImage + `"}`},
		"name":         {"?name=a/b", `{"Image":"` + testImage + `"}`},
		"name as ID":   {"?name=" + strings.Repeat("a", 64), `{"Image":"` + testImage + `"}`},
		"no image":     {"", `{"Image":""}`},
		"image's path": {"", `{"Image":"../containers/x"}`},
		"image dots":   {"", `{"Image":"a/../../b"}`},
		"other image":  {"", `{"Image":"alpine"}`},
		"missing":      {"", `{"Image":"berm.local/missing"}`},
		"not JSON":     {"", `Image=x`},
		"platform":     {"?platform=../x", `{"Image":"` + testImage + `"}`},
		"many mounts":  {"", `{"Image":"` + testImage + `","Volumes":{` + many(200_000/8, `"/%x":{}`) + `}}`},
		"many nets":    {"", `{"Image":"` + testImage + `","NetworkingConfig":{"EndpointsConfig":{` + many(1000, `"n%x":{}`) + `}}}`},
		"many ports":   {"", `{"Image":"` + testImage + `","HostConfig":{"PublishAllPorts":true},"ExposedPorts":{` + many(30_000, `"1%d/tcp":{}`) + `}}`},
		"many names":   {"", `{"Image":"` + testImage + `","Env":[` + many(50_000, `"A%x"`) + `]}`},
		"large":        {"", `{"Image":"` + testImage + `","Cmd":["` + strings.Repeat("x", 1<<20) + `"]}`},
	} {
		if status, message := s.create(t, tt.query, tt.body); status < 400 || status >= 500 {
			t.Errorf("%s: %d: %s", name, status, message)
		}
	}
	if status, message := s.create(t, "", `{"Image":"berm.local/missing"}`); status != 404 || message != "No such image: berm.local/missing:latest" {
		t.Errorf("an image that isn't there: %d, %s", status, message)
	}
	if asked := s.take(); len(asked) != 0 {
		t.Errorf("the engine was asked for %s", asked)
	}
}

// many joins n of a form, each with a number of its own.
func many(n int, form string) string {
	list := make([]string, n)
	for i := range list {
		list[i] = fmt.Sprintf(form, i)
	}
	return strings.Join(list, ",")
}

// TestCreateOthers names what others have, beside what TestAttack does.
func TestCreateOthers(t *testing.T) {
	d, direct := engineDoor(t, "")
	c, other := d.client("mine"), d.client("theirs")
	theirs, own := makeOne(t, other, nil, "others-name"), makeOne(t, c, nil, "mine-1")
	_, err := c.ContainerCreate(t.Context(), sleeper, nil, nil, nil, "others-name")
	for what, err := range map[string]error{"create": err, "rename": c.ContainerRename(t.Context(), own, "others-name")} {
		if !errdefs.IsConflict(err) || !strings.Contains(err.Error(), "already in use") || strings.Contains(err.Error(), theirs[:12]) || strings.Contains(err.Error(), "by container") {
			t.Errorf("%s: a taken name: %v", what, err)
		}
	}
	// A volume that no door made.
	check.Value(direct.VolumeCreate(t.Context(), volume.CreateOptions{Name: "others-host"}))(t)
	t.Cleanup(func() { _ = direct.VolumeRemove(context.Background(), "others-host", true) })
	deniedBy(t, makeOneOr(t, c, &container.HostConfig{Mounts: []mount.Mount{{Type: mount.TypeVolume, Source: "others-host", Target: "/v"}}}), "mounts.volume_foreign")
	shared := makeOne(t, c, &container.HostConfig{NetworkMode: "container:mine-1"}, "")
	if mode := inspect(t, direct, shared).HostConfig.NetworkMode; mode != container.NetworkMode("container:"+own) {
		t.Errorf("network mode: %s", mode)
	}
}

func TestCreateNetworks(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"networks: {on: {engine_network: create-on}, team: {engine_network: create-team}}\nprofiles: {default: {network: \"on\", engine_api: {networks: own}}}\n")
	c := d.client("nets")
	deniedBy(t, errOf(c.ContainerCreate(t.Context(), sleeper, nil, nil, nil, "")), "networks.missing")
	made := 0
	d.opts.EnsureNetwork = func(ctx context.Context, name string) error {
		made++
		_, err := direct.NetworkCreate(ctx, name, network.CreateOptions{Driver: "bridge", Labels: d.policyNetworkLabels()})
		return err
	}
	t.Cleanup(func() {
		for _, name := range []string{"create-on", "create-team"} {
			_ = direct.NetworkRemove(context.Background(), name)
		}
	})
	joined := func(id string) (names []string) {
		for name := range inspect(t, direct, id).NetworkSettings.Networks {
			names = append(names, name)
		}
		return names
	}
	first := makeOne(t, c, nil, "")
	if got := joined(first); !slices.Equal(got, []string{"create-on"}) || made != 1 {
		t.Errorf("by default: %v, made %d", got, made)
	}
	report(t, startIt(t, c, first))
	team := makeOne(t, c, &container.HostConfig{NetworkMode: "create-team"}, "")
	if got := joined(team); !slices.Equal(got, []string{"create-team"}) {
		t.Errorf("by name: %v", got)
	}
	own := check.Value(c.NetworkCreate(t.Context(), "create-own", network.CreateOptions{}))(t)
	peer := makeOne(t, c, &container.HostConfig{NetworkMode: "create-own"}, "create-peer")
	ct := check.Value(c.ContainerCreate(t.Context(), sleeper, nil, &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{
		own.ID: {Aliases: []string{"web.example"}, Links: []string{peer[:12] + ":db"}},
	}}, nil, ""))(t)
	if got := joined(ct.ID); !slices.Equal(got, []string{"create-own"}) {
		t.Errorf("by endpoint: %v", got)
	}
	if e := inspect(t, direct, ct.ID).NetworkSettings.Networks["create-own"]; e.NetworkID != own.ID {
		t.Errorf("the engine would look for the network by its name: %+v", e)
	}
	for _, id := range []string{peer, ct.ID} {
		report(t, startIt(t, c, id))
	}
	e := inspect(t, direct, ct.ID).NetworkSettings.Networks["create-own"]
	if !slices.Contains(e.Aliases, "web.example") || !slices.Equal(e.Links, []string{"create-peer:db"}) {
		t.Errorf("endpoint: %+v", e)
	}
	// Names on a network that others are on, too.
	at := func(e *network.EndpointSettings) *network.NetworkingConfig {
		return &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{"create-team": e}}
	}
	for name, e := range map[string]*network.EndpointSettings{
		"alias": {Aliases: []string{"pypi.org"}}, "options": {DriverOpts: map[string]string{"a": "b"}}, "links": {Links: []string{"create-peer:x"}},
		"address": {IPAMConfig: &network.EndpointIPAMConfig{IPv4Address: "172.18.0.9"}}, "MAC": {MacAddress: "02:42:ac:11:00:02"},
	} {
		if name == "MAC" {
			continue // the client of this version sends it elsewhere
		}
		_, err := c.ContainerCreate(t.Context(), sleeper, nil, at(e), nil, "")
		if err == nil || !strings.Contains(err.Error(), "networks.options") {
			t.Errorf("%s: %v", name, err)
		}
	}
	deniedBy(t, errOf(c.ContainerCreate(t.Context(), sleeper, nil, at(&network.EndpointSettings{}), nil, "pypi.org")), "request.name")
	cfg := *sleeper
	cfg.Hostname = "pypi.org"
	deniedBy(t, errOf(c.ContainerCreate(t.Context(), &cfg, nil, nil, nil, "")), "request.name")
	dotted := makeOne(t, c, &container.HostConfig{NetworkMode: "create-own"}, "nets.example")
	deniedBy(t, c.NetworkConnect(t.Context(), "create-team", dotted, nil), "request.name")
	deniedBy(t, c.NetworkConnect(t.Context(), "create-team", ct.ID, &network.EndpointSettings{Aliases: []string{"pypi.org"}}), "networks.options")
	report(t, c.NetworkConnect(t.Context(), "create-team", ct.ID, nil))
	if err := restartIt(t, c, ct.ID); err != nil {
		t.Errorf("restart of one that was connected since: %v", err)
	}
	deniedBy(t, c.ContainerRename(t.Context(), ct.ID, "pypi.org"), "request.name")
	deniedBy(t, c.ContainerRename(t.Context(), ct.ID, ct.ID[:12]), "request.name")
	report(t, c.ContainerRemove(t.Context(), ct.ID, container.RemoveOptions{Force: true}))
	// Another caller's network of the name of one of the policy's.
	must(t, direct.ContainerRemove(t.Context(), team, container.RemoveOptions{Force: true}))
	must(t, direct.NetworkRemove(t.Context(), "create-team"))
	check.Value(direct.NetworkCreate(t.Context(), "create-team", network.CreateOptions{Labels: d.labels(lifecycle.ObjectNetwork, "other")}))(t)
	deniedBy(t, errOf(c.ContainerCreate(t.Context(), sleeper, &container.HostConfig{NetworkMode: "create-team"}, nil, nil, "")), "networks.foreign")
}

func TestCreateImages(t *testing.T) {
	d, direct := engineDoor(t, workRules(workDir(t)))
	c := d.client("images")
	img := check.Value(direct.ImageInspect(t.Context(), testImage))(t)
	cfg := func(image string) *container.Config { return &container.Config{Image: image, Cmd: []string{"true"}} }
	hex := strings.TrimPrefix(img.ID, "sha256:")
	for _, ref := range []string{img.ID, hex, hex[:12], testImage, strings.TrimSuffix(testImage, ":latest")} {
		ct, err := c.ContainerCreate(t.Context(), cfg(ref), nil, nil, nil, "")
		if err != nil {
			t.Errorf("%s: %v", ref, err)
			continue
		}
		if got := inspect(t, direct, ct.ID); got.Image != img.ID {
			t.Errorf("%s: %s", ref, got.Image)
		}
	}
	// Images that a container of the host's was committed to, with labels of all kinds.
	base := check.Value(direct.ContainerCreate(t.Context(), cfg(testImage), nil, nil, nil, ""))(t)
	t.Cleanup(func() {
		_ = direct.ContainerRemove(context.Background(), base.ID, container.RemoveOptions{Force: true})
	})
	commit := func(name string, cfg container.Config) string {
		t.Helper()
		made := check.Value(direct.ContainerCommit(t.Context(), base.ID, container.CommitOptions{Reference: name, Config: &cfg}))(t)
		t.Cleanup(func() {
			for _, what := range d.left() {
				if id, ok := strings.CutPrefix(what, "container "); ok {
					_ = direct.ContainerRemove(context.Background(), id, container.RemoveOptions{Force: true, RemoveVolumes: true})
				}
			}
			_, _ = direct.ImageRemove(context.Background(), made.ID, image.RemoveOptions{Force: true})
		})
		return made.ID
	}
	trusted := commit("elsewhere.local/mine:1", container.Config{Labels: d.labels(lifecycle.ObjectImage, "images", "berm.ttl", "5m"), User: "1000"})
	for _, ref := range []string{"elsewhere.local/mine:1", trusted, trusted[7:19]} {
		ct, err := c.ContainerCreate(t.Context(), &container.Config{Image: ref, Cmd: []string{"true"}}, nil, nil, nil, "")
		if err != nil {
			t.Errorf("the caller's own by %s: %v", ref, err)
			continue
		}
		if got := inspect(t, direct, ct.ID); got.Config.User != "1000" || got.Image != trusted {
			t.Errorf("the caller's own by %s: %+v", ref, got.Config)
		}
	}
	foreign := commit("elsewhere.local/theirs:1", container.Config{Labels: d.labels(lifecycle.ObjectImage, "other")})
	for _, ref := range []string{"elsewhere.local/theirs:1", foreign, foreign[7:19]} {
		if _, err := c.ContainerCreate(t.Context(), cfg(ref), nil, nil, nil, ""); err == nil || !strings.Contains(err.Error(), "denied by policy") && !strings.Contains(err.Error(), "No such image") {
			t.Errorf("another's by %s: %v", ref, err)
		}
	}
	unsealed, resealed := d.labels(lifecycle.ObjectImage, "images"), d.labels(lifecycle.ObjectImage, "other")
	delete(unsealed, lifecycle.LabelSeal)
	resealed[lifecycle.LabelTenant] = "images"
	for name, labels := range map[string]map[string]string{
		"labelled": {"berm.key": "x"}, "unsealed": unsealed, "resealed": resealed, "container": d.labels(lifecycle.ObjectContainer, "images"),
	} {
		ref := "berm.local/" + name + ":1"
		commit(ref, container.Config{Labels: labels})
		deniedBy(t, errOf(c.ContainerCreate(t.Context(), cfg(ref), nil, nil, nil, "")), "labels.reserved")
	}
	commit("berm.local/volumes:1", container.Config{Volumes: map[string]struct{}{"/data": {}, "/taken": {}}, ExposedPorts: nat.PortSet{"80/tcp": {}}, Env: []string{"GONE=1", "KEPT=1", "SECRET_A=1", "BERM_X=2", "PLAIN=3", "PINNED=no"}, Cmd: []string{"sh", "-c", "echo [$GONE$SECRET_A$BERM_X] $KEPT $PLAIN $PINNED"}})
	ct := check.Value(c.ContainerCreate(t.Context(), &container.Config{Image: "berm.local/volumes:1", Env: []string{"GONE"}}, &container.HostConfig{Tmpfs: map[string]string{"/taken/": ""}}, nil, nil, ""))(t)
	got := inspect(t, direct, ct.ID)
	if len(got.Mounts) != 1 || got.Mounts[0].Destination != "/data" {
		t.Errorf("mounts: %+v", got.Mounts)
	} else if v, err := direct.VolumeInspect(t.Context(), got.Mounts[0].Name); err != nil || v.Labels[lifecycle.LabelTenant] != "images" {
		t.Errorf("the image's volume: %+v, %v", v, err)
	}
	if !slices.ContainsFunc(ct.Warnings, func(w string) bool { return strings.Contains(w, "SECRET_A") && strings.Contains(w, "env.deny") }) {
		t.Errorf("warnings: %q", ct.Warnings)
	}
	if out, _ := finish(t, c, direct, ct.ID); out != "[] 1 3 yes\n" {
		t.Errorf("it said %q", out)
	}
}

// TestCreateOwnLife asks for what harms nobody else: no shared memory, a limit of its own
// stack, labels in its log; and for a weight, which isn't passed on.
func TestCreateOwnLife(t *testing.T) {
	d, direct := engineDoor(t, "")
	c := d.client("own")
	h := &container.HostConfig{IpcMode: container.IPCModeNone, LogConfig: container.LogConfig{Type: "json-file", Config: map[string]string{"labels": "a", "max-size": "1m"}}}
	h.BlkioWeight, h.Ulimits = 300, []*container.Ulimit{{Name: "stack", Soft: 1 << 20, Hard: -1}}
	cfg := &container.Config{Image: testImage, Cmd: []string{"sh", "-c", "ulimit -s; grep -c ' /dev/shm ' /proc/mounts"}, Labels: map[string]string{"a": "b"}}
	ct := check.Value(c.ContainerCreate(t.Context(), cfg, h, nil, nil, ""))(t)
	if len(ct.Warnings) != 1 || !strings.Contains(ct.Warnings[0], "BlkioWeight: 300 isn't passed on") {
		t.Errorf("warnings: %q", ct.Warnings)
	}
	if out, _ := finish(t, c, direct, ct.ID); out != "1024\n0\n" {
		t.Errorf("it said %q", out)
	}
	if h := inspect(t, c, ct.ID).HostConfig; h.IpcMode != "none" || h.BlkioWeight != 0 || h.LogConfig.Config["max-size"] != "1m" {
		t.Errorf("inspected: %+v", h)
	}
}
