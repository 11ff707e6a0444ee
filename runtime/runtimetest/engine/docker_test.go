package engine

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"
)

const probeImage = "berm.local/enginetest:latest"

// private is an engine of either kind.
type private interface {
	io.Closer
	own() *place
}

func (g *ground) own() *place { return g.place }

// startOwn starts an engine for a test, and checks that it leaves nothing.
func startOwn[E private](t *testing.T, kind string, start func(context.Context, Options) (E, error), opts Options) E {
	t.Helper()
	Require(t, kind)
	if opts.Log == nil {
		opts.Log = t.Output()
	}
	e, err := start(t.Context(), opts)
	if err != nil {
		Lacking(t, kind, err)
	}
	t.Cleanup(func() {
		must(t, e.Close())
		for _, what := range leftovers(t, e.own()) {
			t.Errorf("left behind: %s", what)
		}
	})
	return e
}

// run starts a container that sleeps.
func run(t *testing.T, d *Docker) string {
	t.Helper()
	must(t, with(d.Host(), func(c *client.Client) error {
		config := &container.Config{Image: probeImage, Cmd: []string{"sleep", "1000"}}
		if _, err := c.ContainerCreate(t.Context(), config, nil, nil, nil, "probe"); err != nil {
			return err
		}
		return c.ContainerStart(t.Context(), "probe", container.StartOptions{})
	}))
	return "probe"
}

// leftovers looks for whatever carries the engine's name.
func leftovers(t *testing.T, p *place) []string {
	t.Helper()
	var found []string
	for _, pattern := range []string{p.dir, "/sys/fs/cgroup/" + p.name, "/sys/fs/cgroup/*/" + p.name, cniResultDir + "/" + p.name + "*"} {
		paths, err := filepath.Glob(pattern)
		must(t, err)
		found = append(found, paths...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, p.name) {
			found = append(found, line)
		}
	}
	cmdlines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, f := range cmdlines {
		program, _ := os.Readlink(filepath.Join(filepath.Dir(f), "exe"))
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b)+program, p.dir) {
			found = append(found, f+" "+string(b))
		}
	}
	notes, err := cniResults(p.dir)
	must(t, err)
	found = append(found, notes...)
	return found
}

func TestDocker(t *testing.T) {
	d := startOwn(t, "docker", StartDocker, Options{})
	must(t, d.ImportBusybox(t.Context(), probeImage, "USER 1000:1000"))
	if ok, err := HasImage(t.Context(), d.Host(), probeImage); err != nil || !ok {
		t.Fatalf("HasImage after the import: %t, %v", ok, err)
	}
	run(t, d)
	links, err := exec.Command("nsenter", "--net="+d.Netns(), "ip", "-o", "link").CombinedOutput()
	if err != nil || !strings.Contains(string(links), "docker0") {
		t.Errorf("links in the engine's namespace: %s %v", links, err)
	}
	c, err := newClient(d.Host())
	must(t, err)
	defer func() { _ = c.Close() }()
	must(t, c.ContainerPause(t.Context(), "probe")) // and left so: Close has to cope

	d.Kill()
	if err := Ping(t.Context(), d.Host()); err == nil || d.Pid() != 0 {
		t.Errorf("the engine answers after Kill, pid %d", d.Pid())
	}
	must(t, d.Start(t.Context()))
	if _, err := c.ContainerInspect(t.Context(), "probe"); err != nil {
		t.Errorf("the container after a restart: %v", err)
	}
	if err := RemoveImage(t.Context(), d.Host(), "no.such/image:latest"); err == nil {
		t.Error("removing an image that isn't there succeeded")
	}
	must(t, c.ContainerStart(t.Context(), "probe", container.StartOptions{}))
	must(t, d.Close())
	if err := d.Start(t.Context()); err == nil {
		t.Error("a closed engine was started")
	}
}

func TestDockerOwnerKilled(t *testing.T) {
	Require(t, "docker")
	testOwnerKilled(t, unix.SIGTERM, func(dir string) {
		d, err := StartDocker(context.Background(), Options{Dir: dir, Image: probeImage})
		must(t, err)
		run(t, d)
	}, func(dir string) { startOwn(t, "docker", StartDocker, Options{Dir: dir}) })
}

func TestBusyboxRootfs(t *testing.T) {
	if _, err := findBusybox(); err != nil {
		Lacking(t, "docker", err)
	}
	a, err := busyboxRootfs(t.Context())
	must(t, err)
	b, err := busyboxRootfs(t.Context())
	if err != nil || string(a) != string(b) {
		t.Errorf("two builds differ: %v", err)
	}
}
