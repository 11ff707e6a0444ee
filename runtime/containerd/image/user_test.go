package image

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	testPasswd = "root:x:0:0:root:/root:/bin/sh\ndev:x:1000:100:Dev:/home/dev:/bin/sh\nbroken\n1234:x:77:77::/:\nfar:x:4294967296:1::/:\nless:x:1:-1::/:\n"
	testGroup  = "root:x:0:root\nusers:x:100:\nwheel:x:10:root,dev\naudio:x:29:dev,dev\nsame:x:100:dev\nfar:x:4294967296:1234\n"
)

func TestResolveUser(t *testing.T) {
	files := &accountFiles{[]byte(testPasswd), []byte(testGroup)}
	for _, tc := range []struct {
		user string
		want *Account // nil is InvalidArgument
	}{
		{"", &Account{0, 0, []uint32{0, 10}}},
		{"root", &Account{0, 0, []uint32{0, 10}}},
		{"0", &Account{0, 0, []uint32{0, 10}}},
		{"dev", &Account{1000, 100, []uint32{100, 10, 29}}},
		{"1000", &Account{1000, 100, []uint32{100, 10, 29}}},
		{"1000:1000", &Account{1000, 1000, []uint32{1000}}},
		{"dev:wheel", &Account{1000, 10, []uint32{10}}},
		{"5000", &Account{5000, 0, []uint32{0}}},
		{"5000:users", &Account{5000, 100, []uint32{100}}},
		{"1234", &Account{1234, 0, []uint32{0}}}, // an id, though a user is called so
		{"nobody", nil},
		{"dev:nogroup", nil},
		{"far", nil},
		{"less", nil},
		{"dev:far", nil},
		{"-1", nil},
		{"4294967295", nil},
		{"2147483648:0", nil},
		{"0:99999999999999999999", nil},
	} {
		got, err := files.resolve(tc.user)
		if tc.want == nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("%q: %+v, %v", tc.user, got, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", tc.user, err)
		}
		if d := cmp.Diff(*tc.want, got); d != "" {
			t.Errorf("%q: %s", tc.user, d)
		}
	}
}

// A root file system may be made so that whoever reads it is led out, waits for ever
// or runs out of memory.
func TestReadRoot(t *testing.T) {
	engine.Require(t, "containerd") // for the rights to mount
	outside := t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "passwd"), []byte(testPasswd), 0o600))
	leads := func(target string) func(*testing.T, string) error {
		return func(_ *testing.T, passwd string) error { return os.Symlink(target, passwd) }
	}
	bind := func(t *testing.T, from, to string) error {
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		t.Cleanup(func() {
			must(t, unix.Unmount(to, unix.MNT_DETACH))
		})
		return nil
	}
	for _, tc := range []struct {
		name string
		make func(t *testing.T, passwd string) error
		want string
	}{
		{"file", func(_ *testing.T, passwd string) error { return os.WriteFile(passwd, []byte(testPasswd), 0o600) }, testPasswd},
		{"link", func(_ *testing.T, passwd string) error {
			return errors.Join(os.WriteFile(passwd+".real", []byte(testPasswd), 0o600), os.Symlink("/etc/passwd.real", passwd))
		}, testPasswd},
		{"link up", func(_ *testing.T, passwd string) error {
			return errors.Join(os.WriteFile(passwd+".real", []byte(testPasswd), 0o600), os.Symlink("../../../../etc/passwd.real", passwd))
		}, testPasswd},
		{"nothing", func(_ *testing.T, passwd string) error { return os.Remove(filepath.Dir(passwd)) }, ""},
		{"etc a file", func(_ *testing.T, passwd string) error {
			return errors.Join(os.Remove(filepath.Dir(passwd)), os.WriteFile(filepath.Dir(passwd), nil, 0o600))
		}, ""},
		{"directory", func(_ *testing.T, passwd string) error { return os.Mkdir(passwd, 0o700) }, ""},
		{"out", leads(outside + "/passwd"), ""},
		{"out and up", leads(strings.Repeat("../", 30) + outside[1:] + "/passwd"), ""},
		{"loop", leads("passwd"), ""},
		{"dangling", leads("/nowhere"), ""},
		{"pipe", func(_ *testing.T, passwd string) error { return unix.Mkfifo(passwd, 0o600) }, ""},
		{"socket", func(t *testing.T, passwd string) error {
			l, err := new(net.ListenConfig).Listen(t.Context(), "unix", passwd)
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
			return err
		}, ""},
		{"large", func(_ *testing.T, passwd string) error {
			return errors.Join(os.WriteFile(passwd, []byte(testPasswd), 0o600), os.Truncate(passwd, maxAccountFile+1))
		}, ""},
		{"another mount", func(t *testing.T, passwd string) error {
			return errors.Join(os.WriteFile(passwd, nil, 0o600), bind(t, outside+"/passwd", passwd))
		}, ""},
		{"in another mount", func(t *testing.T, passwd string) error { return bind(t, outside, filepath.Dir(passwd)) }, ""},
		{"in proc", func(t *testing.T, passwd string) error {
			root := filepath.Dir(filepath.Dir(passwd))
			return errors.Join(os.Mkdir(root+"/proc", 0o700), bind(t, "/proc", root+"/proc"), os.Symlink("/proc/kmsg", passwd))
		}, ""},
		{"through proc", func(t *testing.T, passwd string) error {
			root := filepath.Dir(filepath.Dir(passwd))
			return errors.Join(os.Mkdir(root+"/proc", 0o700), bind(t, "/proc", root+"/proc"), os.Symlink("/proc/self/root"+outside+"/passwd", passwd))
		}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			etc := filepath.Join(root, "etc")
			must(t, os.Mkdir(etc, 0o700))
			must(t, tc.make(t, filepath.Join(etc, "passwd")))
			var files *accountFiles
			done := make(chan error, 1)
			go func() {
				var err error
				files, err = readRoot(root)
				done <- err
			}()
			select {
			case err := <-done:
				must(t, err)
			case <-time.After(10 * time.Second):
				t.Fatal("it hangs")
			}
			if d := cmp.Diff(tc.want, string(files.passwd)); d != "" {
				t.Error(d)
			}
		})
	}
}

// Nobody else ever sees the mount of an image.
func TestWithMounts(t *testing.T) {
	engine.Require(t, "containerd") // for the rights to mount
	over, upper, lower := t.TempDir(), t.TempDir(), t.TempDir()
	for dir, content := range map[string]string{upper: "upper", lower: "lower"} {
		must(t, os.WriteFile(filepath.Join(dir, "file"), []byte(content), 0o600))
	}
	overlay := []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"ro", "lowerdir=" + upper + ":" + lower}}}
	failed := errors.New("failed")
	err := withMounts(overlay, over, func(root string) error {
		if b, err := os.ReadFile(filepath.Join(root, "file")); err != nil || string(b) != "upper" {
			t.Errorf("inside: %q, %v", b, err)
		}
		if seen := mounts(t, "thread-self", over); len(seen) != 1 {
			t.Errorf("on the thread: %q", seen)
		}
		if seen := mounts(t, "self", over); len(seen) != 0 {
			t.Errorf("in the process: %q", seen)
		}
		return failed
	})
	if !errors.Is(err, failed) {
		t.Error(err)
	}
	if seen := mounts(t, "self", over); len(seen) != 0 {
		t.Errorf("afterwards: %q", seen)
	}
}

// mounts lists what is mounted below a directory, as a process sees it.
func mounts(t *testing.T, process, dir string) (out []string) {
	t.Helper()
	b, err := os.ReadFile("/proc/" + process + "/mounts")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, dir) {
			out = append(out, line)
		}
	}
	return out
}

func TestProcessAccount(t *testing.T) {
	engine.Require(t, "containerd") // for busybox, and the rights to change the root
	busybox, err := exec.LookPath("busybox")
	must(t, err)
	program, err := os.ReadFile(busybox)
	must(t, err)
	root := t.TempDir()
	for _, err := range []error{
		os.Mkdir(filepath.Join(root, "etc"), 0o700),
		os.WriteFile(filepath.Join(root, "etc/passwd"), []byte(testPasswd), 0o600),
		os.WriteFile(filepath.Join(root, "etc/group"), []byte(testGroup), 0o600),
		os.WriteFile(filepath.Join(root, "busybox"), program, 0o700), //nolint:gosec // a program
	} {
		must(t, err)
	}
	cmd := exec.CommandContext(t.Context(), "/busybox", "sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Pdeathsig: syscall.SIGKILL}
	cmd.Dir = "/"
	must(t, cmd.Start())
	pid := uint32(cmd.Process.Pid) //nolint:gosec // no pid is negative
	for user, want := range map[string]*Account{
		"dev": {1000, 100, []uint32{100, 10, 29}}, "": {0, 0, []uint32{0, 10}}, "7:8": {7, 8, []uint32{8}}, "nobody": nil,
	} {
		got, err := ProcessAccount(pid, user)
		if want == nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("%q: %+v, %v", user, got, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", user, err)
		}
		if d := cmp.Diff(*want, got); d != "" {
			t.Errorf("%q: %s", user, d)
		}
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	if _, err := ProcessAccount(pid, "dev"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("of a process that is gone: %v", err)
	}
	if got, err := ProcessAccount(pid, "7:8"); err != nil || got.UID != 7 {
		t.Errorf("numbers need no process: %+v, %v", got, err)
	}
}

func FuzzResolveUser(f *testing.F) {
	f.Add("dev:wheel", testPasswd, testGroup)
	f.Add("", "", "")
	f.Add("0", "root:x:-1:99999999999", "x:x:-1:root")
	f.Fuzz(func(t *testing.T, user, passwd, group string) {
		got, err := (&accountFiles{[]byte(passwd), []byte(group)}).resolve(user)
		if err == nil && (got.UID > 1<<31-1 || got.GID > 1<<31-1 || len(got.Groups) == 0 || got.Groups[0] != got.GID) {
			b, _ := json.Marshal([]string{user, passwd, group})
			t.Errorf("%s: %+v", b, got)
		}
	})
}

var must = check.Must // ends a test if a step of its own fails
