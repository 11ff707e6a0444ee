package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

const (
	defaultLogBytes = 10 << 20

	// writerTimeout is how long a log's writer may take to write down what the engine
	// has let go of, and writerTick how often it is looked for.
	writerTimeout = 5 * time.Second
	writerTick    = 10 * time.Millisecond

	// A follower looks at the log when the kernel tells of a change, and now and then,
	// which is often where the kernel has no watch left to give.
	followTick      = time.Second
	followTickBlind = 50 * time.Millisecond
)

// logIO sends a main process's output to a writer of its own, which keeps it in
// directory dir and outlives this process. maxBytes is Spec.LogMaxBytes.
func (r *Runtime) logIO(dir string, maxBytes int64, owner int) (cio.Creator, error) {
	agent, err := r.agentPath()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the log's directory: %w", err)
	}
	return cio.BinaryIO(agent, map[string]string{
		"log":   dir,
		"max":   strconv.FormatInt(cmp.Or(maxBytes, defaultLogBytes), 10),
		"owner": strconv.Itoa(owner),
	}), nil
}

// Logs copies what the container's main process printed, as far as it is still kept.
func (r *Runtime) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	op := "read logs of container " + id
	var over bool
	err := r.call(ctx, op, func(ctx context.Context) (err error) {
		over, err = r.over(ctx, id)
		return err
	})
	if err != nil {
		return err
	}
	dir := r.path("containers", id, "log")
	if over {
		if err := r.finishLog(ctx, id, dir); err != nil {
			return failure(ctx, op, err)
		}
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return failure(ctx, op, runtime.Precondition("it has no log here: it is being removed, or another root's"))
	}
	p := &logPrinter{opts: opts}
	p.streams[0].w, p.streams[1].w = stdout, stderr
	if opts.Follow && !over {
		err = r.follow(ctx, id, dir, p)
		if ctx.Err() != nil {
			return nil
		}
	} else {
		err = printLog(ctx, dir, p)
	}
	return failure(ctx, op, err)
}

// over tells whether a container's main process has ended, or never ran.
func (r *Runtime) over(ctx context.Context, id string) (bool, error) {
	task, err := r.task(ctx, id)
	if errdefs.IsFailedPrecondition(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	status, err := task.Status(ctx)
	if errdefs.IsNotFound(err) {
		return true, nil
	}
	return status.Status == client.Stopped, err
}

// finishLog sees to it that all that a container printed, whose main process has
// ended, is in its log. The engine keeps the writer waiting for more until it is told
// to let go of the process.
func (r *Runtime) finishLog(ctx context.Context, id, dir string) error {
	err := r.call(ctx, "settle", func(ctx context.Context) error { return r.settle(ctx, id) })
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return awaitWriter(ctx, dir)
}

// awaitWriter waits until a log's writer has ended, which holds a lock till then.
func awaitWriter(ctx context.Context, dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) { // it never began, or the container is being removed
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for the log's writer: %w", err)
	}
	defer func() { _ = f.Close() }() // unlocks it too
	timeout := time.NewTimer(writerTimeout)
	defer timeout.Stop()
	tick := time.NewTicker(writerTick)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("look for the log's writer: %w", err)
		}
		select {
		case <-tick.C:
		case <-timeout.C:
			return runtime.Unavailable(errors.New("the log's writer doesn't come to its end"))
		case <-ctx.Done():
			return runtime.Ended(ctx)
		}
	}
}

// awaitEnd waits for the end of a container's main process.
func (r *Runtime) awaitEnd(ctx context.Context, id string) error {
	for {
		var ended <-chan client.ExitStatus
		err := r.call(ctx, "look for the main process", func(callCtx context.Context) error {
			task, err := r.task(callCtx, id)
			if err == nil {
				ended, err = task.Wait(r.namespaced(ctx))
			}
			return err
		})
		if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case status := <-ended:
			if status.Error() == nil {
				return nil
			}
		case <-ctx.Done():
			return runtime.Ended(ctx)
		}
		select { // the engine has lost it, or has gone
		case <-time.After(followTick):
		case <-ctx.Done():
			return runtime.Ended(ctx)
		}
	}
}

// follow prints a log until the container's main process has ended and all of it is
// there, until the log is removed, or until ctx ends.
func (r *Runtime) follow(ctx context.Context, id, dir string, p *logPrinter) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed, stop := watchDir(dir)
	defer stop()
	interval := followTick
	if changed == nil {
		interval = followTickBlind
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	ended := make(chan error, 1)
	go func() { ended <- r.awaitEnd(ctx, id) }()

	f, err := followLog(dir, p)
	if err != nil {
		return err
	}
	defer f.close()
	for over := false; ; {
		if err := f.copy(ctx); err != nil {
			return err
		}
		if over || f.gone() {
			return nil
		}
		select {
		case <-changed:
		case <-tick.C:
		case err := <-ended:
			if err == nil {
				err = r.finishLog(ctx, id, dir)
			}
			if err != nil {
				return err
			}
			over = true
		case <-ctx.Done():
			return nil
		}
	}
}

// watchDir gives a channel that tells of changes in a directory, nil if the kernel
// can't: it has a bound on watches.
func watchDir(dir string) (changed <-chan struct{}, stop func()) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, func() {}
	}
	if err := w.Add(dir); err != nil {
		_ = w.Close()
		return nil, func() {}
	}
	out, done := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case _, ok := <-w.Events:
				if !ok {
					return
				}
			case _, ok := <-w.Errors: // it has missed some
				if !ok {
					return
				}
			}
			select {
			case out <- struct{}{}:
			default:
			}
		}
	}()
	return out, func() {
		_ = w.Close() // closes its channels
		<-done
	}
}
