package docker

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/runtime"
)

// tinyELF is a program of a few instructions.
func tinyELF(t *testing.T, bits int, code []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	put := func(values ...any) {
		for _, v := range values {
			if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
				t.Fatal(err)
			}
		}
	}
	const base = 0x400000
	ident := func(class byte) []byte { return append([]byte{0x7f, 'E', 'L', 'F', class, 1, 1}, make([]byte, 9)...) }
	if bits == 32 {
		const head = 52 + 32
		size := uint32(head + len(code))
		put(ident(1), uint16(2), uint16(3), uint32(1), uint32(base+head), uint32(52), uint32(0), uint32(0),
			uint16(52), uint16(32), uint16(1), uint16(0), uint16(0), uint16(0),
			uint32(1), uint32(0), uint32(base), uint32(base), size, size, uint32(5), uint32(0x1000))
	} else {
		const head = 64 + 56
		size := uint64(head + len(code))
		put(ident(2), uint16(2), uint16(62), uint32(1), uint64(base+head), uint64(64), uint64(0), uint32(0),
			uint16(64), uint16(56), uint16(1), uint16(0), uint16(0), uint16(0),
			uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), size, size, uint64(0x1000))
	}
	b.Write(code)
	return b.Bytes()
}

// TestForeignSyscalls: the doors of other architectures are shut.
func TestForeignSyscalls(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	if info, err := r.Info(t.Context()); err != nil || info.Architecture != "amd64" {
		t.Skipf("needs an amd64 kernel: %+v, %v", info, err)
	}
	dir := t.TempDir()
	for name, program := range map[string][]byte{
		// exit(42), by syscall, by int 0x80 in 64 and 32 bits, and as x32.
		"native": tinyELF(t, 64, []byte{0xb8, 60, 0, 0, 0, 0xbf, 42, 0, 0, 0, 0x0f, 0x05, 0x0f, 0x0b}),
		"int80":  tinyELF(t, 64, []byte{0xb8, 1, 0, 0, 0, 0xbb, 42, 0, 0, 0, 0xcd, 0x80, 0x0f, 0x0b}),
		"i386":   tinyELF(t, 32, []byte{0xb8, 1, 0, 0, 0, 0xbb, 42, 0, 0, 0, 0xcd, 0x80, 0x0f, 0x0b}),
		"x32":    tinyELF(t, 64, []byte{0xb8, 60, 0, 0, 0x40, 0xbf, 42, 0, 0, 0, 0x0f, 0x05, 0x0f, 0x0b}),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), program, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c := sandbox(t, r, func(s *runtime.Spec) { s.Mounts = []runtime.Mount{{Source: dir, Target: "/t", ReadOnly: true}} })
	for name, want := range map[string]int{"native": 42, "int80": 128 + 31, "i386": 128 + 31, "x32": 128 + 31} {
		res, err := r.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{"/t/" + name}})
		if err != nil || res.ExitCode != want {
			t.Errorf("%s: %+v, %v; want exit code %d", name, res, err, want)
		}
	}
}

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

// TestMountsBelow: a file system that is mounted below a bind's source stays outside.
func TestMountsBelow(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	c := sandbox(t, r, func(s *runtime.Spec) { s.Mounts = []runtime.Mount{{Source: "/dev", Target: "/t", ReadOnly: true}} })
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(mounts, []byte(" /dev/shm ")) && !bytes.Contains(mounts, []byte(" /dev/pts ")) {
		t.Skip("nothing is mounted below /dev")
	}
	if out, _, _ := sh(t, r, c.ID, "grep ' /t' /proc/mounts"); strings.Count(out, "\n") != 1 || !strings.Contains(out, "ro") {
		t.Errorf("mounts:\n%s", out)
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
