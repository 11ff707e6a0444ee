package engineapi

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	filters2 "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/client"
)

// dockerCLI runs a real Docker client against a caller's listener.
func dockerCLI(t *testing.T, binary, host string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+host, "DOCKER_CONFIG="+t.TempDir(), "DOCKER_CONTEXT=")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// sweepOwn removes what the test's callers left.
func sweepOwn(t *testing.T, direct *client.Client, d *testDoor) {
	t.Helper()
	t.Cleanup(func() {
		ctx := context.Background()
		list, err := direct.ContainerList(ctx, container.ListOptions{All: true, Filters: ownerFilter(d)})
		if err != nil {
			t.Error(err)
		}
		for _, ct := range list {
			if err := direct.ContainerRemove(ctx, ct.ID, container.RemoveOptions{Force: true, RemoveVolumes: true}); err != nil && !client.IsErrNotFound(err) {
				t.Error(err)
			}
		}
	})
}

func TestRunByCLI(t *testing.T) {
	host, direct := testEngine(t)
	d := doorTo(t, host, "")
	sweepOwn(t, direct, d)
	address := d.listen(Caller{Name: "cli", Tenant: "cli"})
	for _, binary := range []string{"/usr/bin/docker", "/usr/local/bin/docker"} {
		if _, err := os.Stat(binary); err != nil {
			continue
		}
		t.Run(strings.ReplaceAll(binary, "/", "_"), func(t *testing.T) {
			out, errs, err := dockerCLI(t, binary, address, "run", "--rm", "-e", "A=1", testImage, "sh", "-c", "echo $A; id -u")
			if err != nil || out != "1\n0\n" {
				t.Errorf("docker run: %q, %q, %v", out, errs, err)
			}
		})
	}
}

func ownerFilter(d *testDoor) filters2.Args {
	return filters2.NewArgs(filters2.Arg("label", "berm.owner="+d.opts.Owner))
}
