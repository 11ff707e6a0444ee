package hostdir

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestWalk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/a/b", 0o700), os.WriteFile(dir+"/a/b/f", nil, 0o600), os.Symlink("..", dir+"/a/b/l"), unix.Mkfifo(dir+"/p", 0o600))
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	var seen []string
	v := Visitor{
		Directory: func(fd int, _ string) error {
			name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
			seen = append(seen, "dir "+name[len(dir):])
			return err
		},
		File: func(e *Entry) error {
			seen = append(seen, fmt.Sprintf("%o %s", e.Stat.Mode&unix.S_IFMT, e.Name))
			return unix.Faccessat(e.Dir, e.Name, unix.F_OK, unix.AT_SYMLINK_NOFOLLOW)
		},
	}
	must(t, Walk(t.Context(), f, v))
	slices.Sort(seen[3:]) // a directory's entries come in any order
	if want := []string{"dir ", "dir /a", "dir /a/b", "100000 f", "120000 l"}; !slices.Equal(seen, want) {
		t.Errorf("%q, want %q", seen, want)
	}
	for _, give := range []unix.Errno{unix.EPERM, unix.ENOENT} {
		v.File = func(*Entry) error { return fmt.Errorf("file: %w", give) }
		if err := Walk(t.Context(), f, v); errors.Is(err, ErrUnbounded) || errors.Is(err, give) != (give == unix.EPERM) {
			t.Errorf("%v of a file became %v", give, err)
		}
	}
}

// A name may have become something else's since it was read.
func TestEntryChanged(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, unix.Mkfifo(dir+"/fifo", 0o600), os.Symlink("/etc/passwd", dir+"/link"), os.Mkdir(dir+"/dir", 0o700))
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	for _, name := range []string{"fifo", "link", "dir", "gone"} {
		e := Entry{Dir: int(f.Fd()), Name: name}
		if _, _, err := e.Open(); !errors.Is(err, unix.ENOENT) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
