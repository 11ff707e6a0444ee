package hostdir

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

var must = check.Must // ends a test if a step of its own fails

// sizes is the sum of the sizes below dir within bounds that change says.
func sizes(t testing.TB, ctx context.Context, dir string, change func(*bounds)) (int64, error) { //nolint:revive // t comes first in tests
	t.Helper()
	b := usual
	if change != nil {
		change(&b)
	}
	return measure(ctx, rootOf(t, dir), b, func(st *unix.Stat_t) int64 { return st.Size })
}

// hooked has f called whenever the walk looks whether anybody still waits for it.
type hooked struct {
	context.Context
	f func()
}

func (h hooked) Err() error {
	h.f()
	return h.Context.Err()
}

// fastDir is a directory in memory, if there is such a place, for trees that take long to
// make and remove elsewhere.
func fastDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "berm-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// deepTree makes a chain of n directories called d below dir, with a byte in the last, and
// removes it at the end of the test: os.RemoveAll holds a handle for each level.
func deepTree(t *testing.T, dir string, n int) {
	t.Helper()
	at, err := openDir(unix.AT_FDCWD, dir)
	must(t, err)
	for range n {
		must(t, unix.Mkdirat(at, "d", 0o700))
		below, err := openDir(at, "d")
		must(t, err, unix.Close(at))
		at = below
	}
	f, err := unix.Openat(at, "f", unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	must(t, err)
	_, err = unix.Write(f, []byte("x"))
	must(t, err, unix.Close(f))
	must(t, unix.Close(at))
	root := rootOf(t, dir)
	t.Cleanup(func() { must(t, Remove(context.Background(), root, "d")) })
}

func openFiles(t testing.TB) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(fds)
}

func TestWhatCounts(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		make             func(dir string) error
		sizes, allocated int64 // -1 is a block or more, but less than the size
	}{
		"nothing":    {func(string) error { return nil }, 0, 0},
		"a file":     {func(dir string) error { return os.WriteFile(dir+"/f", make([]byte, 5000), 0o600) }, 5000, 5000},
		"empty file": {func(dir string) error { return os.WriteFile(dir+"/f", nil, 0o600) }, 0, 0},
		"one that may not be read": {func(dir string) error {
			return os.WriteFile(dir+"/f", make([]byte, 5000), 0)
		}, 5000, 5000},
		"below": {func(dir string) error {
			return errors.Join(os.MkdirAll(dir+"/a/b/c", 0o700), os.WriteFile(dir+"/a/b/c/f", make([]byte, 100), 0o600), os.WriteFile(dir+"/a/f", make([]byte, 10), 0o600))
		}, 110, 110},
		"hidden": {func(dir string) error {
			return errors.Join(os.Mkdir(dir+"/...", 0o700), os.WriteFile(dir+"/.../.f", make([]byte, 100), 0o600))
		}, 100, 100},
		"names of any bytes": {func(dir string) error {
			return errors.Join(os.Mkdir(dir+"/\xff\n", 0o700), os.WriteFile(dir+"/\xff\n/\xfe", make([]byte, 100), 0o600))
		}, 100, 100},
		"hard links": {func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/f", make([]byte, 5000), 0o600), os.Mkdir(dir+"/sub", 0o700),
				os.Link(dir+"/f", dir+"/g"), os.Link(dir+"/f", dir+"/sub/f"))
		}, 5000, 5000},
		"a hole": {func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/f", nil, 0o600), os.Truncate(dir+"/f", 1<<30))
		}, 1 << 30, 0},
		"mostly a hole": {func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/f", []byte("x"), 0o600), os.Truncate(dir+"/f", 1<<30))
		}, 1 << 30, -1},
		"nothing but special ones": {func(dir string) error {
			return errors.Join(unix.Mkfifo(dir+"/fifo", 0o600), unix.Mknod(dir+"/socket", unix.S_IFSOCK|0o600, 0))
		}, 0, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			must(t, tt.make(dir))
			root := rootOf(t, dir)
			if got, err := Sizes(t.Context(), root); got != tt.sizes || err != nil {
				t.Errorf("sizes are %d, %v; want %d", got, err, tt.sizes)
			}
			got, err := Allocated(t.Context(), root)
			if tt.allocated < 0 && 0 < got && got < 1<<20 {
				got = tt.allocated
			}
			if got != tt.allocated || err != nil {
				t.Errorf("allocated are %d, %v; want %d", got, err, tt.allocated)
			}
		})
	}
}

// Links are what they are themselves, wherever they lead.
func TestLinks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "big")
	must(t, os.WriteFile(outside, make([]byte, 1<<20), 0o600), os.Mkdir(dir+"/sub", 0o700))
	var want int64
	for i, target := range []string{outside, filepath.Dir(outside), ".", "..", "../..", "sub", "nowhere", "l6", "sub/to-itself"} {
		must(t, os.Symlink(target, fmt.Sprintf("%s/l%d", dir, i)))
		want += int64(len(target))
	}
	must(t, os.Symlink("to-itself", dir+"/sub/to-itself"))
	want += int64(len("to-itself"))
	root := rootOf(t, dir)
	if got, err := Sizes(t.Context(), root); got != want || err != nil {
		t.Errorf("%d, %v; want %d", got, err, want)
	}
	if got, err := Allocated(t.Context(), root); got > want || err != nil {
		t.Errorf("allocated are %d, %v; sizes %d", got, err, want)
	}
}

// A sum that doesn't fit mustn't pass for a small one.
func TestSumIsTooLarge(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	used, err := measure(t.Context(), rootOf(t, dir), usual, func(*unix.Stat_t) int64 { return math.MaxInt64 - 1 })
	if err != nil || used != math.MaxInt64 {
		t.Errorf("%d, %v", used, err)
	}
	for _, tt := range []struct{ size, blocks, want int64 }{
		{math.MaxInt64, math.MaxInt64, math.MaxInt64}, {math.MaxInt64, 1, 512}, {1, 8, 1}, {512, 1, 512}, {513, 1, 512}, {0, 8, 0},
	} {
		if got := AllocatedBy(&unix.Stat_t{Size: tt.size, Blocks: tt.blocks}); got != tt.want {
			t.Errorf("%+v: %d", tt, got)
		}
	}
}

func TestBounds(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 10 {
		must(t, os.WriteFile(fmt.Sprintf("%s/f%d", dir, i), []byte("x"), 0o600), os.Link(fmt.Sprintf("%s/f%d", dir, i), fmt.Sprintf("%s/g%d", dir, i)))
	}
	deepTree(t, dir, 10)
	tests := map[string]struct {
		change    func(*bounds)
		want      int64 // -1 is any
		unbounded bool
	}{
		"none":            {func(*bounds) {}, 11, false},
		"just enough":     {func(b *bounds) { b.entries, b.depth, b.linked = 31, 11, 10 }, 11, false},
		"entries":         {func(b *bounds) { b.entries = 30 }, -1, true},
		"depth":           {func(b *bounds) { b.depth = 10 }, -1, true},
		"time":            {func(b *bounds) { b.time = -1 }, 0, true},
		"few handles":     {func(b *bounds) { b.handles = 2 }, 11, false},
		"links forgotten": {func(b *bounds) { b.linked = 4 }, 17, false}, // more, but never less
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := sizes(t, t.Context(), dir, tt.change)
			if errors.Is(err, ErrUnbounded) != tt.unbounded || err != nil && !tt.unbounded || tt.want >= 0 && got != tt.want {
				t.Errorf("%d, %v", got, err)
			}
		})
	}
}

// A tree costs no more handles, and no more than a step per level, however deep it is.
func TestDeepTree(t *testing.T) {
	dir := fastDir(t)
	const depth = 5000
	deepTree(t, dir, depth)
	if _, err := sizes(t, hooked{t.Context(), func() { openFiles(t) }}, t.TempDir(), nil); err != nil { // what Go opens for itself
		t.Fatal(err)
	}
	before, most := openFiles(t), 0
	looks := 0
	ctx := hooked{t.Context(), func() {
		looks++
		most = max(most, openFiles(t))
	}}
	if got, err := sizes(t, ctx, dir, nil); got != 1 || err != nil {
		t.Errorf("%d, %v", got, err)
	}
	// The two that measure opens, and the one that looks.
	if extra := most - before; extra < usual.handles || extra > usual.handles+4 {
		t.Errorf("%d handles at most", extra)
	}
	if steps := looks * usual.pace; steps > 3*depth {
		t.Errorf("%d steps", steps)
	}
	if after := openFiles(t); after > before+1 { // the test's own root
		t.Errorf("%d handles before, %d afterwards", before, after)
	}
}

// Directories that are found again, far down, go on where they were.
func TestWideAndDeepTree(t *testing.T) {
	t.Parallel()
	dir := fastDir(t)
	const wide, deep = 100, 6
	var want int64
	for i := range wide {
		long := fmt.Sprintf("%s/%s%d", dir, strings.Repeat("n", 200), i) // several lists long
		for j := range deep {
			must(t, os.MkdirAll(long, 0o700))
			must(t, os.WriteFile(long+"/f", make([]byte, i+j), 0o600))
			want += int64(i + j)
			long += "/" + string(rune('a'+j))
		}
	}
	for _, handles := range []int{2, 3, 5, 64} {
		if got, err := sizes(t, t.Context(), dir, func(b *bounds) { b.handles = handles }); got != want || err != nil {
			t.Errorf("with %d handles: %d, %v; want %d", handles, got, err, want)
		}
	}
}

// A directory is never held in memory as a whole.
func TestWideDirectory(t *testing.T) {
	dir := fastDir(t)
	const files = 200_000
	at, err := openDir(unix.AT_FDCWD, dir)
	must(t, err)
	defer func() { _ = unix.Close(at) }()
	for i := range files {
		must(t, unix.Mknodat(at, fmt.Sprintf("a-file-of-many-%d", i), unix.S_IFREG|0o600, 0))
	}
	must(t, os.Truncate(dir+"/a-file-of-many-77777", 7))
	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var most uint64
	looks := 0
	ctx := hooked{t.Context(), func() {
		if looks++; looks%400 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&now)
			most = max(most, now.HeapAlloc)
		}
	}}
	if got, err := sizes(t, ctx, dir, func(b *bounds) { b.time = 0 }); got != 7 || err != nil { // however busy the machine is
		t.Errorf("%d, %v", got, err)
	}
	if grown := int64(most) - int64(before.HeapAlloc); looks < 1000 || grown > 1<<20 {
		t.Errorf("it held %d bytes more; looked %d times", grown, looks)
	}
}

// What takes a directory's place meanwhile is neither opened nor followed.
func TestPlaceIsTaken(t *testing.T) {
	outside := t.TempDir()
	must(t, os.WriteFile(outside+"/big", make([]byte, 1<<20), 0o600))
	for name, take := range map[string]func(path string) error{
		"fifo":    func(path string) error { return unix.Mkfifo(path, 0o600) },
		"link":    func(path string) error { return os.Symlink(outside, path) },
		"file":    func(path string) error { return os.WriteFile(path, []byte("xyz"), 0o600) },
		"nothing": func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			dir, aside := t.TempDir(), t.TempDir()
			must(t, take(dir+"/taken"))
			if fd, err := openDir(unix.AT_FDCWD, dir+"/taken"); err == nil {
				t.Fatalf("it opened as %d", fd)
			}
			_ = os.Remove(dir + "/taken")
			for i := range 50 {
				must(t, os.Mkdir(fmt.Sprintf("%s/%d", dir, i), 0o700))
			}
			place := func(i int) (string, string) { return fmt.Sprintf("%s/%d", dir, i), fmt.Sprintf("%s/%d", aside, i) }
			var stop atomic.Bool
			var mover sync.WaitGroup
			mover.Go(func() {
				for !stop.Load() {
					for i := range 50 {
						in, out := place(i)
						err := errors.Join(os.Rename(in, out), take(in))
						_ = os.Remove(in)
						if err = errors.Join(err, os.Rename(out, in)); err != nil {
							t.Error(err)
							return
						}
					}
				}
			})
			for range 60 {
				if got, err := sizes(t, t.Context(), dir, nil); got > 50*int64(len(outside)) || err != nil {
					t.Errorf("%d, %v", got, err)
					break
				}
			}
			stop.Store(true)
			mover.Wait()
		})
	}
}

// A directory that was moved while its way back was closed isn't followed to its new
// place: the tree is measured anew, and counts as too much if it never stands still.
func TestTreeIsMoved(t *testing.T) {
	t.Parallel()
	// Each step down the chain is a look.
	const depth, far = 20, 15
	tests := map[string]struct {
		walks     int
		move      func(in, out string) error
		want      int64
		unbounded bool
	}{
		"once":         {3, os.Rename, 1000, false},
		"and back":     {1, func(in, out string) error { return errors.Join(os.Rename(in, out), os.Rename(out, in)) }, 1001, false},
		"all the time": {1, os.Rename, 0, true},
		"another comes": {1, func(in, out string) error {
			return errors.Join(os.Rename(in, out), os.MkdirAll(in+"/d/d", 0o700))
		}, 0, true},
		"removed": {2, func(in, _ string) error { return os.RemoveAll(in) }, 1000, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, aside := t.TempDir(), t.TempDir()
			must(t, os.MkdirAll(dir+strings.Repeat("/d", depth), 0o700), os.WriteFile(dir+strings.Repeat("/d", depth)+"/f", []byte("x"), 0o600))
			must(t, os.WriteFile(dir+"/top", make([]byte, 1000), 0o600), os.WriteFile(aside+"/big", make([]byte, 1<<20), 0o600))
			looks := 0
			got, err := sizes(t, hooked{t.Context(), func() {
				if looks++; looks == far {
					must(t, tt.move(dir+"/d/d/d", aside+"/d"))
				}
			}}, dir, func(b *bounds) { b.walks, b.handles, b.pace = tt.walks, 2, 1 })
			if errors.Is(err, ErrUnbounded) != tt.unbounded || err != nil && !tt.unbounded || got >= 1<<20 || !tt.unbounded && got != tt.want {
				t.Errorf("%d, %v", got, err)
			}
		})
	}
}

func TestCancellation(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	gone := errors.New("the caller has gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	if _, err := Sizes(ctx, rootOf(t, dir)); !errors.Is(err, gone) {
		t.Errorf("before: %v", err)
	}
	for i := range 300 {
		must(t, os.WriteFile(fmt.Sprintf("%s/%d", dir, i), []byte("x"), 0o600))
	}
	ctx, cancel = context.WithCancelCause(t.Context())
	looks := 0
	got, err := sizes(t, hooked{ctx, func() {
		if looks++; looks == 2 {
			cancel(gone)
		}
	}}, dir, nil)
	if !errors.Is(err, gone) || got >= 300 {
		t.Errorf("meanwhile: %d, %v", got, err)
	}
}

// A directory that Berm may not read might hold anything.
func TestUnreadable(t *testing.T) {
	t.Parallel()
	if err := unreadable(&os.PathError{Err: unix.EACCES}); !errors.Is(err, ErrUnbounded) {
		t.Error(err)
	}
	if err := unreadable(unix.EMFILE); errors.Is(err, ErrUnbounded) {
		t.Error(err)
	}
	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/sub", 0))
	if fd, err := openDir(unix.AT_FDCWD, dir+"/sub"); err == nil {
		_ = unix.Close(fd)
		t.Skip("whoever runs this may read everything")
	}
	if _, err := Sizes(t.Context(), rootOf(t, dir)); !errors.Is(err, ErrUnbounded) {
		t.Error(err)
	}
}

// A chat's directory may be removed before it is measured.
func TestRemovedRoot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir() + "/dir"
	must(t, os.Mkdir(dir, 0o700))
	root := rootOf(t, dir)
	must(t, os.Remove(dir))
	if got, err := Sizes(t.Context(), root); got != 0 || err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%d, %v", got, err)
	}
}
