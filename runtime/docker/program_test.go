package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// TestStoredProgram checks that the engine's volume gets the program, that containers
// can't write it, and that one which was changed runs nowhere.
func TestStoredProgram(t *testing.T) {
	d := shared.Get(t)
	file, err := engine.PutAgent(t.Context(), t.TempDir())
	must(t, err)
	program, err := os.ReadFile(file)
	must(t, err)
	r := newRuntimeWith(t, Options{Host: d.Host(), Program: func() ([]byte, error) { return program, nil }})
	s, err := r.connect(t.Context())
	must(t, err)
	// Of other programs' volumes, the one that nothing uses goes, and no other.
	kept := map[string]bool{programVolume + "unused": false, programVolume + "used": true, programVolume + "others": true, "others": true}
	for name := range kept {
		labels := programLabels()
		if name == programVolume+"others" {
			labels = nil
		}
		v, err := s.VolumeCreate(t.Context(), volume.CreateOptions{Name: name, Labels: labels})
		must(t, err)
		t.Cleanup(func() { _ = s.VolumeRemove(context.WithoutCancel(t.Context()), name, true) })
		if name == programVolume+"used" { // by a bind, as a sandbox does
			sandbox(t, r, func(s *runtime.Spec) { s.Mounts = []runtime.Mount{{Source: v.Mountpoint, Target: "/v"}} })
		}
	}
	name, err := r.programName()
	must(t, err)
	stored := func(s *runtime.Spec) { s.Agent = &runtime.Agent{Stored: true} }
	runs := func() {
		t.Helper()
		c := sandbox(t, r, stored)
		out, stderr, code := runtimetest.Shell(t, r, c.ID, "(echo x >>/sbin/berm-init) 2>/dev/null || echo kept; test -e /run/berm || echo alone")
		if code != 0 || out != "kept\nalone\n" {
			t.Errorf("%q %q, code %d", out, stderr, code)
		}
		must(t, r.Remove(t.Context(), c.ID))
	}
	runs()
	runs()
	for name, want := range kept {
		if _, err := s.VolumeInspect(t.Context(), name); (err == nil) != want {
			t.Errorf("volume %s: %v", name, err)
		}
	}
	v, err := s.VolumeInspect(t.Context(), name)
	must(t, err)
	// Somebody else writes to the volume, as the engine's owner can.
	other, err := s.ContainerCreate(t.Context(), &container.Config{Image: testImage}, &container.HostConfig{
		Mounts: []mount.Mount{{Type: mount.TypeVolume, Source: v.Name, Target: "/v"}},
	}, nil, nil, "")
	must(t, err)
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	must(t, w.WriteHeader(&tar.Header{Name: programFile, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))}))
	program[len(program)-1]++
	_, err = w.Write(program)
	program[len(program)-1]--
	must(t, err)
	must(t, w.Close())
	must(t, s.CopyToContainer(t.Context(), other.ID, "/v", &archive, container.CopyToContainerOptions{}))
	must(t, remove(t.Context(), s, other.ID))
	spec := runtime.Spec{Name: "changed", Image: testImage, Command: []string{"sleep", "100000"}}
	stored(&spec)
	if _, err := r.Create(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "changed") {
		t.Errorf("a program that was changed: %v", err)
	}
	if left, err := r.List(t.Context(), nil); err != nil || len(left) != 1 { // the one with a volume in use
		t.Errorf("left: %+v, %v", left, err)
	}
	runs() // it is put there anew
	must(t, s.VolumeRemove(t.Context(), v.Name, true))
	runs()
	// A volume that leads elsewhere isn't used.
	must(t, s.VolumeRemove(t.Context(), v.Name, true))
	if _, err := s.VolumeCreate(t.Context(), volume.CreateOptions{Name: v.Name, Labels: programLabels(), DriverOpts: map[string]string{
		"type": "none", "o": "bind", "device": filepath.Dir(file),
	}}); err != nil {
		t.Fatal(err)
	}
	spec.Name = "elsewhere"
	if _, err := r.Create(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("a volume that leads elsewhere: %v", err)
	}
	must(t, s.VolumeRemove(t.Context(), v.Name, true))
}

// TestFillVolumeCopiesNoImage checks that nothing of an image gets into the volume, to which
// engines copy what the image has at the same place.
func TestFillVolumeCopiesNoImage(t *testing.T) {
	f := newFakeEngine(t)
	var made struct{ HostConfig container.HostConfig }
	f.on("POST /containers/create", func(w http.ResponseWriter, req *http.Request) {
		if err := json.NewDecoder(req.Body).Decode(&made); err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusTeapot)
	})
	r := newRuntimeWith(t, Options{Host: f.host(), Program: func() ([]byte, error) { return []byte("x"), nil }})
	s, err := r.connect(t.Context())
	must(t, err)
	if err := r.fillVolume(t.Context(), s, "v", "i"); err == nil {
		t.Error("the engine refused, and nobody cared")
	}
	mounts := made.HostConfig.Mounts
	if len(mounts) != 1 || mounts[0].VolumeOptions == nil || !mounts[0].VolumeOptions.NoCopy || mounts[0].VolumeOptions.Labels[programLabel] == "" {
		t.Errorf("mounts %+v", mounts)
	}
}

// TestStoredProgramRefused checks that no program goes where it can't run, or into a volume
// that isn't Berm's.
func TestStoredProgramRefused(t *testing.T) {
	for name, tt := range map[string]struct{ info, volume, want string }{
		"another machine":    {`{"Architecture":"riscv64"}`, "", "riscv64"},
		"a volume of others": {`{"Architecture":"` + goruntime.GOARCH + `"}`, `{"Driver":"local","Mountpoint":"/m"}`, "remove it"},
	} {
		f := newFakeEngine(t)
		f.on("GET /info", answer(http.StatusOK, tt.info))
		r := newRuntimeWith(t, Options{Host: f.host(), Program: func() ([]byte, error) { return []byte("x"), nil }})
		program, err := r.programName()
		must(t, err)
		f.on("GET /volumes/"+program, answer(http.StatusOK, tt.volume))
		s, err := r.connect(t.Context())
		must(t, err)
		if _, err := r.storedProgram(t.Context(), s, "i"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
