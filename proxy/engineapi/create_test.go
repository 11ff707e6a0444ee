package engineapi

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/lifecycle"
)

// dockerCLI runs a real Docker client against a caller's listener.
func dockerCLI(t *testing.T, binary, host string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	if _, err := os.Stat(binary); err != nil {
		t.Skipf("%s isn't here", binary)
	}
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+host, "DOCKER_CONFIG="+t.TempDir(), "DOCKER_CONTEXT=")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// sweepOwn removes in the end what the door's callers made, and gives what there is.
func sweepOwn(t *testing.T, direct *client.Client, d *testDoor) (left func() []string) {
	t.Helper()
	owned := dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))
	left = func() (all []string) {
		t.Helper()
		ctx := context.Background()
		list, err := direct.ContainerList(ctx, container.ListOptions{All: true, Filters: owned})
		if err != nil {
			t.Error(err)
		}
		for _, ct := range list {
			all = append(all, "container "+ct.ID)
		}
		networks, err := direct.NetworkList(ctx, network.ListOptions{Filters: owned})
		if err != nil {
			t.Error(err)
		}
		for _, n := range networks {
			all = append(all, "network "+n.ID)
		}
		volumes, err := direct.VolumeList(ctx, volume.ListOptions{Filters: owned})
		if err != nil {
			t.Error(err)
		}
		for _, v := range volumes.Volumes {
			all = append(all, "volume "+v.Name)
		}
		return all
	}
	t.Cleanup(func() {
		ctx := context.Background()
		for _, what := range left() {
			kind, id, _ := strings.Cut(what, " ")
			var err error
			switch kind {
			case "container":
				err = direct.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
			case "network":
				err = direct.NetworkRemove(ctx, id)
			case "volume":
				err = direct.VolumeRemove(ctx, id, true)
			}
			if err != nil && !client.IsErrNotFound(err) {
				t.Error(err)
			}
		}
	})
	return left
}

// finish starts a container, waits for its end, and gives its output and exit code.
func finish(t *testing.T, c, direct *client.Client, id string) (string, int64) {
	t.Helper()
	if err := c.ContainerStart(t.Context(), id, container.StartOptions{}); err != nil {
		t.Fatal(err)
	}
	return finished(t, direct, id)
}

func finished(t *testing.T, direct *client.Client, id string) (string, int64) {
	t.Helper()
	done, failed := direct.ContainerWait(t.Context(), id, container.WaitConditionNotRunning)
	var code int64
	select {
	case r := <-done:
		code = r.StatusCode
	case err := <-failed:
		t.Fatal(err)
	}
	r, err := direct.ContainerLogs(t.Context(), id, container.LogsOptions{ShowStdout: true, ShowStderr: true})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	return readStream(t, r), code
}

func inspect(t *testing.T, direct *client.Client, id string) container.InspectResponse {
	t.Helper()
	ct, err := direct.ContainerInspect(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return ct
}

// workRules allow binds below dir, and what most tests want.
func workRules(dir string) string {
	return basePolicy + "mounts: {allowed_roots: [" + dir + `], hold: auto}
env: {deny: ["SECRET*"], pin: {PINNED: "yes"}}
ttl: {default: 1h, max_lifetime: 2h}
profiles:
  default:
    max_memory_mb: 256
    memory_mb: 64
    engine_api: {ports: loopback, dns: "on"}
`
}

func workDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "berm-engineapi-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestCreateWhole(t *testing.T) {
	host, direct := testEngine(t)
	dir := workDir(t)
	if err := os.MkdirAll(dir+"/ro", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir+"/rw", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/ro/f", []byte("from the host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	d := doorTo(t, host, workRules(dir))
	left := sweepOwn(t, direct, d)
	c := d.client("whole")
	net, err := c.NetworkCreate(t.Context(), "whole-net", network.CreateOptions{Internal: true})
	if err != nil {
		t.Fatal(err)
	}
	stop, init := 3, true
	script := `cat /ro/f; echo x > /rw/g; echo $A $PINNED; touch /ro/h 2>/dev/null || echo read-only; touch /vol/v /anon/a /tmpfs/t && echo written; hostname; pwd`
	ct, err := c.ContainerCreate(t.Context(), &container.Config{
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
	}, &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{net.ID[:12]: {Aliases: []string{"web"}}}}, nil, "whole")
	if err != nil {
		t.Fatal(err)
	}
	t.Log(ct.Warnings)
	out, code := finish(t, c, direct, ct.ID)
	if want := "from the host\n2 yes\nread-only\nwritten\nbox\n/work\n"; out != want || code != 0 {
		t.Errorf("it said %q with %d, want %q", out, code, want)
	}
	if b, err := os.ReadFile(dir + "/rw/g"); err != nil || string(b) != "x\n" {
		t.Errorf("on the host: %q, %v", b, err)
	}
	got := inspect(t, direct, ct.ID)
	h := got.HostConfig
	if h.Memory != 100<<20 || h.MemorySwap != 100<<20 || h.NanoCPUs != 5e8 || h.PidsLimit == nil || *h.PidsLimit != 128 || h.Privileged {
		t.Errorf("limits: %+v", h.Resources)
	}
	if !slices.Equal(h.SecurityOpt, []string{"no-new-privileges"}) || !slices.Equal(h.CapDrop, []string{"ALL"}) || slices.Contains(h.CapAdd, "CAP_KILL") ||
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
	if err := c.ContainerRemove(t.Context(), ct.ID, container.RemoveOptions{RemoveVolumes: true}); err != nil {
		t.Fatal(err)
	}
	if l := left(); len(l) != 2 { // the network and the volume with a name
		t.Errorf("left: %v", l)
	}
}

// rawCreate posts a body as it is.
func rawCreate(t *testing.T, address, query, body string) (int, string) {
	t.Helper()
	resp, err := raw(address).Post("http://docker/v1.41/containers/create"+query, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var told struct {
		Message string
		ID      string `json:"Id"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&told); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, told.Message + told.ID
}
