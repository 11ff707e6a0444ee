package docker

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// TestAgentAndVolumes checks that volumes of an image at the agent's program, and above it,
// aren't in its way, and that they go with their containers. The contract has other volumes.
func TestAgentAndVolumes(t *testing.T) {
	d := shared.Get(t)
	r, s := connected(t)
	program, err := engine.PutAgent(t.Context(), t.TempDir())
	must(t, err)
	const ref = "berm.local/in-the-way:latest"
	must(t, d.ImportBusybox(t.Context(), ref, "VOLUME /sbin /sbin/berm-init"))
	img, err := r.Image(t.Context(), ref)
	must(t, err)
	for image, readOnly := range map[string]bool{ref: true, img.ID: false} {
		c := sandbox(t, r, func(s *runtime.Spec) {
			s.Image, s.ReadOnlyRootfs, s.Agent = image, readOnly, &runtime.Agent{Program: program}
		})
		if _, msg, code := runtimetest.Shell(t, r, c.ID, "test -x /sbin/berm-init"); code != 0 {
			t.Errorf("read-only root %t: code %d, %s", readOnly, code, msg)
		}
		must(t, r.Remove(t.Context(), c.ID))
	}
	list, err := s.VolumeList(t.Context(), volume.ListOptions{})
	if err != nil || len(list.Volumes) != 0 {
		t.Errorf("left behind: %+v, %v", list.Volumes, err)
	}
}

// TestNameCollision: whoever has the name keeps it.
func TestNameCollision(t *testing.T) {
	r, s := connected(t)
	c := sandbox(t, r, nil)
	must(t, removeLost(context.Background(), s, c.Name, "another"))
	if got, err := r.Inspect(t.Context(), c.ID); err != nil || got.State != runtime.StateRunning {
		t.Errorf("%+v, %v", got, err)
	}
	nonce, err := s.ContainerInspect(t.Context(), c.ID)
	must(t, err)
	must(t, removeLost(context.Background(), s, c.Name, nonce.Config.Labels[createLabel]))
	if _, err := r.Inspect(t.Context(), c.ID); err == nil {
		t.Error("its own container was not found again")
	}
}

// TestCrun makes a container with another runtime than the engine's own.
func TestCrun(t *testing.T) {
	if _, err := exec.LookPath("crun"); err != nil {
		engine.Lacking(t, "docker", err)
	}
	d := engine.Own(t, "docker", engine.StartDocker, engine.Options{Runtimes: map[string]string{"crun": "crun"}, Image: testImage})
	r := newRuntime(t, d.Host())
	c := sandbox(t, r, func(s *runtime.Spec) { s.RuntimeClass, s.MemoryBytes = "crun", 64<<20 })
	out, said, code := runtimetest.Shell(t, r, c.ID, `
		cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null
		find /sys/fs/cgroup -type f | while read -r f; do (: >>"$f") 2>/dev/null && echo "$f"; done
		find /sys/fs/cgroup -type d | while read -r d; do mkdir "$d/new" 2>/dev/null && echo "$d"; done; true`)
	if code != 0 || strings.TrimSpace(out) != "67108864" {
		t.Errorf("code %d: %s%s", code, out, said)
	}
}
