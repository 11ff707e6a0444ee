package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/logs"
)

const (
	defaultLogBytes = 10 << 20

	// lostTick is how often the engine is asked for a main process that it has lost.
	lostTick = time.Second
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
	if opts.Follow && !over {
		err = logs.Follow(ctx, dir, opts, stdout, stderr, func(ctx context.Context) error {
			if err := r.awaitEnd(ctx, id); err != nil {
				return err
			}
			return r.finishLog(ctx, id, dir)
		})
		if ctx.Err() != nil {
			return nil
		}
	} else {
		err = logs.Print(ctx, dir, opts, stdout, stderr)
	}
	return failure(ctx, op, err)
}

// over reports whether a container's main process has ended, or never ran.
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

// finishLog waits until the log of a container that has ended has all that it printed.
// The engine keeps the writer waiting for more until it deletes the process.
func (r *Runtime) finishLog(ctx context.Context, id, dir string) error {
	err := r.call(ctx, "settle", func(ctx context.Context) error { return r.settle(ctx, id) })
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return logs.AwaitWriter(ctx, dir)
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
		case <-time.After(lostTick):
		case <-ctx.Done():
			return runtime.Ended(ctx)
		}
	}
}
