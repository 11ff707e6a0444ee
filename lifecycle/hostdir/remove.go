package hostdir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Remove removes the file or the tree at a single name in root. It is no error if there is none.
// Remove may be interrupted at any moment, by the context or otherwise, and called again.
//
// It opens three handles at most, however deep and wide the tree is, and its time is linear in
// the tree's size. Before it empties a directory in a directory of the tree's top, it moves that
// directory to the top, so that it never works deeper.
func Remove(ctx context.Context, root *os.Root, name string) error {
	if !single(name) {
		return fmt.Errorf("remove tree: %q isn't a single name", name)
	}
	parent, err := Top(root)
	if err != nil {
		return err
	}
	defer parent.Close()
	done, err := Unlink(parent, name)
	if done || err != nil {
		return err
	}
	top, err := openDirAt(parent, name)
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer top.Close()
	r := &removal{ctx: ctx, top: top}
	if err := r.all(); err != nil {
		return fmt.Errorf("remove tree %q: %w", name, err)
	}
	if err := unlinkAt(parent, name, unix.AT_REMOVEDIR); err != nil && !missing(err) {
		return err
	}
	return nil
}

// removal empties a tree's top.
type removal struct {
	ctx    context.Context // of the one call
	top    *os.File
	number int   // the last number that lift used as a name
	steps  int   // entries moved or removed
	stuck  error // the last error of a move to top
}

// all removes everything in top, in one round for each level of directories. A round moves the
// directories of the next level to top.
func (r *removal) all() error {
	for {
		steps, some := r.steps, false
		err := Each(r.top, func(name string) error {
			some = true
			return r.remove(name)
		})
		if err != nil || !some {
			return err
		}
		if r.steps == steps {
			return errors.Join(errors.New("nothing more can be removed"), r.stuck)
		}
	}
}

// remove removes an entry of top. It leaves a directory for the next round if directories in it
// can't be moved now.
func (r *removal) remove(name string) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	done, err := Unlink(r.top, name)
	if done || err != nil {
		r.steps++
		return err
	}
	dir, err := openDirAt(r.top, name)
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	for {
		before, left := r.steps, false
		err := Each(dir, func(name string) error {
			if r.ctx.Err() != nil {
				return context.Cause(r.ctx)
			}
			done, err := Unlink(dir, name)
			if err == nil && !done {
				done, err = r.lift(dir, name)
			}
			if done {
				r.steps++
			}
			left = left || !done
			return err
		})
		if err != nil {
			return err
		}
		// Each may have missed entries, since the directory changes while it is read.
		err = unlinkAt(r.top, name, unix.AT_REMOVEDIR)
		switch {
		case err == nil || missing(err):
			r.steps++
			return nil
		case !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST):
			return err
		case left || r.steps == before:
			return nil
		}
	}
}

// lift removes an empty directory in dir, and moves another to the top, if there is room.
func (r *removal) lift(dir *os.File, name string) (done bool, err error) {
	err = unlinkAt(dir, name, unix.AT_REMOVEDIR)
	if err == nil || missing(err) {
		return true, nil
	}
	if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return false, err
	}
	for {
		r.number++
		to := strconv.Itoa(r.number)
		err := retry(func() error { return unix.Renameat(int(dir.Fd()), name, int(r.top.Fd()), to) })
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return true, nil
		case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOTDIR): // the name is taken
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EMLINK):
			r.stuck = err // until something has been removed from top
			return false, nil
		default:
			return false, &os.LinkError{Op: "rename", Old: name, New: to, Err: err}
		}
	}
}
