package engineapi

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	private "github.com/bermhq/berm/runtime/runtimetest/engine"
)

// dockerCLI runs a real Docker client against a caller's listener.
func dockerCLI(t *testing.T, binary, host string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	if _, err := os.Stat(binary); err != nil {
		private.Lacking(t, "docker", err)
	}
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+host, "DOCKER_CONFIG="+t.TempDir(), "DOCKER_CONTEXT=")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// mustDocker is dockerCLI for what has to succeed.
func mustDocker(t *testing.T, binary, host string) func(args ...string) string {
	return func(args ...string) string {
		t.Helper()
		out, errs, err := dockerCLI(t, binary, host, args...)
		if err != nil {
			t.Fatalf("docker %v: %v: %s", args, err, errs)
		}
		return strings.TrimSpace(out)
	}
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
			if err != nil && !errdefs.IsNotFound(err) {
				t.Error(err)
			}
		}
	})
	return left
}

// finish starts a container, waits for its end, and gives its output and exit code.
func finish(t *testing.T, c, direct *client.Client, id string) (string, int64) {
	t.Helper()
	noError(t, c.ContainerStart(t.Context(), id, container.StartOptions{}))
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
	r := must(direct.ContainerLogs(t.Context(), id, container.LogsOptions{ShowStdout: true, ShowStderr: true}))(t)
	defer r.Close()
	return readStream(t, r), code
}

func inspect(t *testing.T, direct *client.Client, id string) container.InspectResponse {
	t.Helper()
	ct := must(direct.ContainerInspect(t.Context(), id))(t)
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
	dir := must(os.MkdirTemp("/var/tmp", "berm-engineapi-"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return must(filepath.EvalSymlinks(dir))(t)
}
