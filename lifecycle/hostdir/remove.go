package hostdir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Remove removes what a single name in root stands for, with all below it. That it is
// missing is no error. It may be ended at any instant, by the context or otherwise, and
// called again.
//
// However deep and wide the tree is, three handles are open at once, and time grows with
// what there is to remove: a directory in a directory of the tree's top is moved to the
// top before it is emptied, so that nothing ever lies deeper than that.
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
	number int   // the last one that was given as a name
	steps  int   // what was moved or removed
	stuck  error // why the last one that couldn't be moved wasn't
}

// all removes what is in top, once for each level of directories: those of the next one are
// in top when one is done.
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

// remove removes an entry of top. A directory that holds others which can't be moved now
// stays, for the next round.
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
		// A directory that changes while it is read may not have shown all.
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
