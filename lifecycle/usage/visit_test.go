package usage

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
		Directory: func(fd int) error {
			name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
			seen = append(seen, "dir "+name[len(dir):])
			return err
		},
		File: func(at int, name string, st *unix.Stat_t) error {
			seen = append(seen, fmt.Sprintf("%o %s", st.Mode&unix.S_IFMT, name))
			return unix.Faccessat(at, name, unix.F_OK, unix.AT_SYMLINK_NOFOLLOW)
		},
	}
	must(t, Walk(t.Context(), f, v))
	slices.Sort(seen[3:]) // a directory's entries come in any order
	if want := []string{"dir ", "dir /a", "dir /a/b", "100000 f", "120000 l"}; !slices.Equal(seen, want) {
		t.Errorf("%q, want %q", seen, want)
	}
	for _, give := range []unix.Errno{unix.EPERM, unix.ENOENT} {
		v.File = func(int, string, *unix.Stat_t) error { return fmt.Errorf("file: %w", give) }
		if err := Walk(t.Context(), f, v); errors.Is(err, ErrUnbounded) || errors.Is(err, give) != (give == unix.EPERM) {
			t.Errorf("%v of a file became %v", give, err)
		}
	}
}
