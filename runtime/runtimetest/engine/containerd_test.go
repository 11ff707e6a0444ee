package engine

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// runTask starts a container that sleeps.
func runTask(t *testing.T, c *Containerd, name string) {
	t.Helper()
	_, err := c.Store().ctr(context.Background(), nil, "run", "--detach", "--null-io",
		"--cgroup", c.CgroupParent()+"/"+name, probeImage, name, "sleep", "1000")
	must(t, err)
}

// litter leaves what users of an engine may leave: a process that writes logs, a
// network namespace, and libcni's notes.
func litter(t *testing.T, c *Containerd) {
	t.Helper()
	busybox, err := findBusybox()
	must(t, err)
	b, err := os.ReadFile(busybox)
	must(t, err)
	program := filepath.Join(c.Root(), "writer")
	must(t, os.WriteFile(program, b, 0o755))
	writer := exec.Command(program)
	writer.Args = []string{"sleep", "1000"} // they don't tell where it is
	must(t, writer.Start())
	go func() { _ = writer.Wait() }() // else it stays as a zombie
	netns := filepath.Join(c.Root(), "container")
	must(t, makeNetns(netns))
	must(t, os.MkdirAll(cniResultDir, 0o700))
	for name, note := range map[string]map[string]any{
		"netns":  {"result": map[string]any{"interfaces": []map[string]string{{"sandbox": netns}}}},
		"config": {"config": []byte(`{"ipam":{"dataDir":"` + c.Root() + `/ipam"}}`)},
	} {
		b, err := json.Marshal(note)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(cniResultDir, c.place.name+"-"+name), b, 0o600))
	}
}

func tasks(t *testing.T, c *Containerd) string {
	t.Helper()
	out, err := c.Store().ctr(t.Context(), nil, "tasks", "list")
	must(t, err)
	return string(out)
}

func TestContainerd(t *testing.T) {
	c := startOwn(t, "containerd", StartContainerd, Options{})
	must(t, c.ImportBusybox(t.Context(), probeImage, "USER 1000:1000"))
	if ok, err := c.Store().HasImage(t.Context(), probeImage); err != nil || !ok {
		t.Fatalf("HasImage after the import: %t, %v", ok, err)
	}
	runTask(t, c, "probe")
	litter(t, c)
	out, err := c.Store().ctr(t.Context(), nil, "tasks", "exec", "--exec-id", "who", "probe", "id", "-u")
	if err != nil || strings.TrimSpace(string(out)) != "1000" {
		t.Errorf("the user in the container: %q, %v", out, err)
	}
	links, err := exec.Command("nsenter", "--net="+c.Netns(), "ip", "-o", "link").CombinedOutput()
	if err != nil || !strings.Contains(string(links), "out@") {
		t.Errorf("links in the engine's namespace: %s %v", links, err)
	}

	c.Kill()
	if err := c.Store().Ping(t.Context()); err == nil || c.Pid() != 0 {
		t.Errorf("the engine answers after Kill, pid %d", c.Pid())
	}
	must(t, c.Start(t.Context()))
	if got := tasks(t, c); !strings.Contains(got, "RUNNING") {
		t.Errorf("the container after a restart: %s", got)
	}
	must(t, c.Store().RemoveImage(t.Context(), probeImage))
	if ok, err := c.Store().HasImage(t.Context(), probeImage); err != nil || ok {
		t.Errorf("HasImage after the removal: %t, %v", ok, err)
	}
	if _, err := c.Store().ctr(t.Context(), nil, "tasks", "pause", "probe"); err != nil {
		t.Error(err) // left frozen on purpose: Close has to cope
	}
	// A shim that is being started hasn't written down where it listens.
	must(t, os.Remove(c.place.path("state/io.containerd.runtime.v2.task/berm/probe/address")))
	elsewhere := elsewhere(c.place)
	must(t, c.Close())
	for _, path := range elsewhere {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("left behind: %s", path)
		}
	}
	if len(elsewhere) != 2 {
		t.Errorf("outside of its directory the engine had %v", elsewhere)
	}
	if err := c.Start(t.Context()); err == nil {
		t.Error("a closed engine was started")
	}
}

func TestContainerdOwnerKilled(t *testing.T) {
	Require(t, "containerd")
	testOwnerKilled(t, unix.SIGKILL, func(dir string) {
		c, err := StartContainerd(context.Background(), Options{Dir: dir, Image: probeImage})
		must(t, err)
		runTask(t, c, "probe")
		litter(t, c)
	}, func(dir string) { startOwn(t, "containerd", StartContainerd, Options{Dir: dir}) })
}

func TestContainerdSideBySide(t *testing.T) {
	Require(t, "containerd")
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			c, err := StartContainerd(context.Background(), Options{NoNetns: i == 0, Image: probeImage})
			if err != nil {
				t.Errorf("engine %d: %v", i, err)
				return
			}
			// Its name is the engine's, as all engines share runcStateDir.
			if _, err := c.Store().ctr(context.Background(), nil, "run", "--rm", "--cgroup", c.CgroupParent()+"/one", probeImage, c.place.name, "true"); err != nil {
				t.Error(err)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			for _, what := range leftovers(t, c.place) {
				t.Errorf("left behind: %s", what)
			}
		})
	}
	wg.Wait()
}

func TestImageSettings(t *testing.T) {
	for _, tt := range []struct {
		name    string
		changes []string
		want    ocispec.ImageConfig
	}{
		{"env", []string{"ENV A=1 B=2", "ENV A=3"}, ocispec.ImageConfig{Env: []string{"B=2", "A=3"}}},
		{"volumes", []string{"VOLUME /a /b", `VOLUME ["/c"]`}, ocispec.ImageConfig{Volumes: map[string]struct{}{"/a": {}, "/b": {}, "/c": {}}}},
		{"command", []string{`ENTRYPOINT ["a", "b"]`, "CMD exec c"}, ocispec.ImageConfig{Entrypoint: []string{"a", "b"}, Cmd: []string{"/bin/sh", "-c", "exec c"}}},
		{"rest", []string{"USER 1:2", "WORKDIR /x", "LABEL k=v"}, ocispec.ImageConfig{User: "1:2", WorkingDir: "/x", Labels: map[string]string{"k": "v"}}},
	} {
		var got ocispec.ImageConfig
		for _, change := range tt.changes {
			if err := apply(&got, change); err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: -want +got\n%s", tt.name, diff)
		}
	}
	for _, change := range []string{"COPY a b", "", `CMD ["a`} {
		if err := apply(new(ocispec.ImageConfig), change); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", change, err)
		}
	}
}
