package hostdir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// Sizes adds up the sizes, in bytes, of the regular files and symbolic links below root. A
// file with several links counts once, and a sum that doesn't fit is math.MaxInt64. It is
// bounded as Walk is, but to 10 seconds; with ErrUnbounded it returns what it found.
func Sizes(ctx context.Context, root *os.Root) (int64, error) {
	return measure(ctx, root, usual, func(st *unix.Stat_t) int64 { return st.Size })
}

// Allocated is Sizes, but counts for each file at most the bytes that the file system has
// allocated. For a sparse file, these are the written bytes.
func Allocated(ctx context.Context, root *os.Root) (int64, error) {
	return measure(ctx, root, usual, AllocatedBy)
}

// AllocatedBy returns the bytes that Allocated counts for a file with one link.
func AllocatedBy(st *unix.Stat_t) int64 {
	const block = 512 // bytes; stat's unit on every file system
	if st.Blocks > st.Size/block {
		return st.Size
	}
	return block * st.Blocks
}

func measure(ctx context.Context, root *os.Root, b bounds, count func(*unix.Stat_t) int64) (used int64, err error) {
	var linked map[inode]struct{}
	w := walk{bounds: b, restart: func() { used, linked = 0, map[inode]struct{}{} }}
	w.File = func(e *Entry) error {
		if e.Stat.Nlink > 1 {
			id := inode{e.Stat.Dev, e.Stat.Ino}
			if _, seen := linked[id]; seen {
				return nil
			}
			if len(linked) < b.linked {
				linked[id] = struct{}{}
			}
		}
		if n := count(&e.Stat); n > math.MaxInt64-used {
			used = math.MaxInt64
		} else {
			used += n
		}
		return nil
	}
	err = With(root, func(dir *os.File) error { return w.whole(ctx, dir) })
	return used, unreadable(err)
}

// unreadable returns ErrUnbounded for an error that says that a directory may not be read.
func unreadable(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w: %w", ErrUnbounded, err)
	}
	return err
}
