package docker

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

func TestImageVolumes(t *testing.T) {
	d := testEngine(t)
	r := newRuntime(t, d.Host())
	const ref = "berm.local/volumes:latest"
	if err := d.ImportBusybox(t.Context(), ref, "VOLUME /home /var/data"); err != nil {
		t.Fatal(err)
	}
	img, err := r.Image(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	for _, readOnly := range []bool{true, false} {
		for _, image := range []string{ref, img.ID} {
			t.Run("", func(t *testing.T) {
				c := sandbox(t, r, func(s *runtime.Spec) {
					s.Image, s.ReadOnlyRootfs = image, readOnly
					s.Tmpfs = []runtime.Tmpfs{{Target: "/home", SizeBytes: 1 << 20}}
				})
				if _, msg, code := sh(t, r, c.ID, "touch /home/x && test -d /var/data"); code != 0 {
					t.Errorf("tmpfs over a volume: %s", msg)
				}
				if _, _, code := sh(t, r, c.ID, "touch /var/data/x"); (code == 0) == readOnly {
					t.Errorf("read-only root %t: touch ended with %d", readOnly, code)
				}
			})
		}
	}
	s, err := r.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	list, err := s.VolumeList(t.Context(), volume.ListOptions{})
	if err != nil || len(list.Volumes) != 0 {
		t.Errorf("left behind: %+v, %v", list.Volumes, err)
	}
}

// An image's volumes aren't in the agent's way.
func TestAgentAndVolumes(t *testing.T) {
	d := testEngine(t)
	r := newRuntime(t, d.Host())
	program, err := engine.PutAgent(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "s"), []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, volumes := range []string{"/run", "/sbin", "/run/berm", "/sbin/berm-init", "/run /sbin /run/berm"} {
		ref := "berm.local/in-the-way:" + strconv.Itoa(len(volumes))
		if err := d.ImportBusybox(t.Context(), ref, "VOLUME "+volumes); err != nil {
			t.Fatal(err)
		}
		for _, readOnly := range []bool{true, false} {
			t.Run(volumes, func(t *testing.T) {
				c := sandbox(t, r, func(s *runtime.Spec) {
					s.Image, s.ReadOnlyRootfs, s.Agent = ref, readOnly, &runtime.Agent{Program: program, Dir: dir}
				})
				if out, msg, code := sh(t, r, c.ID, "cat /run/berm/s && ! touch /run/berm/x && test -x /sbin/berm-init"); out != "hello" || code != 0 {
					t.Errorf("%q, %s", out, msg)
				}
			})
		}
	}
}

// TestNameCollision: whoever has the name keeps it.
func TestNameCollision(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	c := sandbox(t, r, nil)
	s, err := r.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := removeLost(context.Background(), s, c.Name, "another"); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Inspect(t.Context(), c.ID); err != nil || got.State != runtime.StateRunning {
		t.Errorf("%+v, %v", got, err)
	}
	nonce, err := s.ContainerInspect(t.Context(), c.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := removeLost(context.Background(), s, c.Name, nonce.Config.Labels[createLabel]); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Inspect(t.Context(), c.ID); err == nil {
		t.Error("its own container was not found again")
	}
}

// TestCrun makes a container with another runtime than the engine's own.
func TestCrun(t *testing.T) {
	if _, err := exec.LookPath("crun"); err != nil {
		engine.Lacking(t, "docker", err)
	}
	engine.Require(t, "docker")
	d, err := startEngine(t.Context(), engine.Options{Runtimes: map[string]string{"crun": "crun"}})
	if err != nil {
		engine.Lacking(t, "docker", err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	r := newRuntime(t, d.Host())
	c, err := r.Create(t.Context(), runtime.Spec{
		Name: "crun", Image: testImage, Command: []string{"sleep", "100000"}, RuntimeClass: "crun", MemoryBytes: 64 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	out, said, code := sh(t, r, c.ID, `
		cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null
		find /sys/fs/cgroup -type f | while read -r f; do (: >>"$f") 2>/dev/null && echo "$f"; done
		find /sys/fs/cgroup -type d | while read -r d; do mkdir "$d/new" 2>/dev/null && echo "$d"; done; true`)
	if code != 0 || strings.TrimSpace(out) != "67108864" {
		t.Errorf("code %d: %s%s", code, out, said)
	}
	if err := r.Remove(t.Context(), c.ID); err != nil {
		t.Error(err)
	}
}
