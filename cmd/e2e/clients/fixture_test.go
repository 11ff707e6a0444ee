package clients

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	dockerimage "github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	dockerclient "github.com/docker/docker/client"

	"github.com/bermhq/berm/cmd/e2e/program"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	image  = "berm.local/busybox:latest"
	spare  = "berm.local/spare:latest" // never removed by a case
	ownNet = "berm-clients"            // Berm's
)

// images are the names that every case finds.
var images = []string{image, spare, "busybox:latest", "alpine:latest", "alpine:3.20", "cafe:latest", "deadbeef:latest"}

// fixture is a private engine with Berm before it.
type fixture struct {
	engine          *engine.Docker
	docker          *dockerclient.Client // of the engine itself
	registry, login *engine.Registry
	berm            string // as in DOCKER_HOST
	work            string // may be mounted
	path, plugins   string // of the client
	classic         bool   // of the client
	buildkit        bool   // Berm offers it on this engine
	cases           int
}

// newFixture starts an engine and Berm for a client, which end with the test.
func newFixture(t *testing.T, c client, engineName string) *fixture {
	ctx := t.Context()
	e, err := engine.StartDocker(context.WithoutCancel(ctx), engine.Options{})
	if err != nil {
		engine.Lacking(t, "docker", err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	root := filepath.Join(e.Dir(), "root")
	f := &fixture{engine: e, buildkit: engineName != "20.10", classic: c.classic, work: filepath.Join(root, "work"), berm: "unix://" + root + "/docker.sock"}
	must(t, os.MkdirAll(f.work, 0o755))
	must(t, os.Chmod(f.work, 0o755))
	f.docker, err = dockerclient.NewClientWithOpts(dockerclient.WithHost(e.Host()), dockerclient.WithAPIVersionNegotiation())
	must(t, err)
	must(t, e.ImportBusybox(ctx, spare))
	f.clean(t)
	f.registry, err = engine.StartRegistry(ctx, engine.RegistryOptions{Netns: e.Netns()})
	must(t, err)
	must(t, f.registry.Push(ctx, "hello:1"))
	f.login, err = engine.StartRegistry(ctx, engine.RegistryOptions{Netns: e.Netns(), User: "user", Password: "password"})
	must(t, err)
	t.Cleanup(func() { _ = errors.Join(f.docker.Close(), f.registry.Close(), f.login.Close()) })
	f.clientPath(t, c)
	f.serve(t, root)
	return f
}

var must = check.Must // ends a test if a step of its own fails

// serve starts Berm, with the policy of testdata.
func (f *fixture) serve(t *testing.T, root string) {
	bin, err := engine.Berm()
	must(t, err)
	policy, err := os.ReadFile("testdata/policy.yaml")
	must(t, err)
	values := strings.NewReplacer("WORK", f.work, "CGROUP", "/"+filepath.Base(f.engine.Dir())+"/builds", "REGISTRY", f.registry.Host(), "LOGIN", f.login.Host())
	must(t, os.WriteFile(filepath.Join(root, "policy.yaml"), []byte(values.Replace(string(policy))), 0o600))
	must(t, os.WriteFile(filepath.Join(root, "berm.yaml"), []byte(`
http: {listen: none}
state_dir: `+root+`/state
policy_file: `+root+`/policy.yaml
engine: {address: "`+f.engine.Host()+`", call_timeout: 2m}
sandbox: {image: "`+image+`", network: `+ownNet+`}
engine_api:
  archive_fixed: true # the cases are of clients, whatever the engine
  audit_log: `+root+`/audit.log
  listeners:
    - address: `+f.berm+`
      callers: [{name: client, tenant: client}]
`), 0o600))
	berm, err := program.Start(exec.Command(bin, "serve", "--config", filepath.Join(root, "berm.yaml")), program.NewOutput())
	must(t, err)
	t.Cleanup(func() {
		if err := berm.Stop(); err != nil {
			t.Errorf("Berm ended with %v:\n%s", err, berm.Log)
		}
	})
	must(t, berm.Ready(t.Context(), func() bool { return engine.Ping(t.Context(), f.berm) == nil }))
}

// clientPath makes the PATH of a client, and finds its plugins.
func (f *fixture) clientPath(t *testing.T, c client) {
	if name := "buildx"; slices.Contains(c.programs, name) {
		f.plugins = filepath.Join(engine.NewerDir(), name, "bin")
	}
	bin := t.TempDir()
	for _, path := range []string{"/usr/bin/docker", "/usr/bin/docker-compose"} {
		name := filepath.Base(path)
		for _, p := range c.programs {
			if built := filepath.Join(engine.NewerDir(), p, "bin", name); exists(built) {
				path = built
			}
		}
		must(t, os.Symlink(path, filepath.Join(bin, name)))
	}
	f.path = bin + ":/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

// clean removes what cases have made, at the engine itself.
func (f *fixture) clean(t *testing.T) {
	ctx := context.WithoutCancel(t.Context())
	var errs []error
	containers, err := f.docker.ContainerList(ctx, container.ListOptions{All: true})
	errs = append(errs, err)
	for _, c := range containers {
		_ = f.docker.ContainerRemove(ctx, c.ID, container.RemoveOptions{Force: true, RemoveVolumes: true}) // it may be going
	}
	networks, err := f.docker.NetworkList(ctx, network.ListOptions{})
	errs = append(errs, err)
	for _, n := range networks {
		if !slices.Contains([]string{"bridge", "host", "none", ownNet}, n.Name) {
			_ = f.docker.NetworkRemove(ctx, n.ID)
		}
	}
	volumes, err := f.docker.VolumeList(ctx, volume.ListOptions{})
	errs = append(errs, err)
	for _, v := range volumes.Volumes {
		_ = f.docker.VolumeRemove(ctx, v.Name, true)
	}
	errs = append(errs, f.cleanImages(ctx))
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// cleanImages removes images, and makes the names anew that every case finds.
func (f *fixture) cleanImages(ctx context.Context) error {
	base, err := f.docker.ImageInspect(ctx, spare)
	if err != nil {
		return err
	}
	found, err := f.docker.ImageList(ctx, dockerimage.ListOptions{})
	if err != nil {
		return err
	}
	has := map[string]bool{}
	for _, i := range found {
		for _, name := range append(i.RepoTags, i.ID) {
			switch {
			case i.ID == base.ID && (name == i.ID || slices.Contains(images, name)):
				has[name] = true
			case name != "<none>:<none>":
				_, _ = f.docker.ImageRemove(ctx, strings.TrimPrefix(name, "docker.io/library/"), dockerimage.RemoveOptions{Force: true, PruneChildren: true})
			}
		}
	}
	for _, name := range images {
		if !has[name] {
			if err := f.docker.ImageTag(ctx, base.ID, name); err != nil {
				return err
			}
		}
	}
	return nil
}
