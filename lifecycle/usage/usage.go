// Package usage measures what a directory holds that somebody else may be changing, with
// bounded time, memory and file descriptors.
package usage

import (
	"context"
	"errors"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// ErrUnbounded says that a tree can't be measured: it has more entries than are looked
// at, takes too long, is in motion all the time, or a directory in it can't be read. Where
// there is a quota, that counts as more than it: nobody must escape one by being hard to
// count.
var ErrUnbounded = errors.New("it can't be measured within bounds")

// bounds of one measurement.
type bounds struct {
	entries int           // looked at
	time    time.Duration // taken, but for a system call that hangs
	depth   int           // of directories
	handles int           // open at once; at least 2
	linked  int           // files with several links that are remembered; more count once per link
	walks   int           // of a tree that is moved meanwhile
	pace    int           // entries between two looks at the clock
}

// usual bounds let a measurement use some 16 MiB of memory, of which an ordinary tree
// needs next to nothing.
var usual = bounds{
	entries: 1_000_000, time: 10 * time.Second, depth: 1 << 17, handles: 64, linked: 1 << 18, walks: 3, pace: 128,
}

// Sizes adds up the sizes, in bytes, of the regular files and symbolic links below root.
// A file with several links counts once, links are never followed, nothing but directories
// is opened, and what vanishes meanwhile is skipped. What is mounted below root counts as
// well, as whoever fills root may fill that, too. At most 64 directories are open at once,
// however deep the tree, and a sum that doesn't fit is math.MaxInt64.
//
// The error is ErrUnbounded, with what was found by then, or the context's cause, or the
// file system's. It is safe for many goroutines.
func Sizes(ctx context.Context, root *os.Root) (int64, error) {
	return measure(ctx, root, usual, func(st *unix.Stat_t) int64 { return st.Size })
}

// Allocated is like Sizes, but a file counts no more bytes than the file system has
// allocated for it, as it tells at the time: a sparse file takes what was written of it.
func Allocated(ctx context.Context, root *os.Root) (int64, error) {
	return measure(ctx, root, usual, allocated)
}

func allocated(st *unix.Stat_t) int64 {
	const block = 512 // bytes, whatever the file system's own are
	if st.Blocks > st.Size/block {
		return st.Size
	}
	return block * st.Blocks
}

func measure(ctx context.Context, root *os.Root, b bounds, room func(*unix.Stat_t) int64) (int64, error) {
	dir, err := root.OpenFile(".", os.O_RDONLY|dirFlags, 0)
	if err != nil {
		return 0, unreadable(err)
	}
	defer dir.Close()
	w := walk{bounds: b, room: room}
	w.File = func(_ int, _ string, st *unix.Stat_t) error {
		w.count(st)
		return nil
	}
	err = w.whole(ctx, dir)
	return w.used, unreadable(err)
}

// Visitor is what Walk calls.
type Visitor struct {
	// Directory is called with the handle of every directory, of the first one too, before
	// anything in it is looked at; nil isn't. The handle is valid during the call.
	Directory func(fd int) error
	// File is called with every regular file and symbolic link, mandatory. By the time, the
	// name may be something else's.
	File func(dir int, name string, st *unix.Stat_t) error
}

// Walk goes through the tree below an open directory as Sizes does, but for up to a
// minute, and once more if a directory in it was moved. An error of the Visitor ends it,
// unless that is one of what has vanished: ENOENT, ENOTDIR and ELOOP. It is safe for many
// goroutines.
func Walk(ctx context.Context, dir *os.File, v Visitor) error {
	b := usual
	b.time = time.Minute
	defer runtime.KeepAlive(dir)
	return (&walk{bounds: b, Visitor: v}).whole(ctx, dir)
}
