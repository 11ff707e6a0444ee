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

// logIO sends the main process's output to a writer of its own, which outlives this process.
func (c *creation) logIO() (cio.Creator, error) {
	dir := c.place.file("log")
	agent, err := c.r.agentPath()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the log's directory: %w", err)
	}
	return cio.BinaryIO(agent, map[string]string{
		"log":   dir,
		"max":   strconv.FormatInt(cmp.Or(c.spec.LogMaxBytes, defaultLogBytes), 10),
		"owner": strconv.Itoa(c.ids),
	}), nil
}

// Logs copies what the container's main process printed, as far as it is still kept.
func (r *Runtime) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	op := "read logs of container " + id
	x := logReader{r, id, r.root.path("containers", id, "log")}
	var over bool
	err := r.call(ctx, op, func(ctx context.Context) (err error) {
		over, err = x.over(ctx)
		return err
	})
	if err != nil {
		return err
	}
	if over {
		if err := x.finish(ctx); err != nil {
			return failure(ctx, op, err)
		}
	}
	if _, err := os.Stat(x.dir); errors.Is(err, fs.ErrNotExist) {
		return failure(ctx, op, runtime.Precondition("it has no log here: it is being removed, or another root's"))
	}
	if opts.Follow && !over {
		err = logs.Follow(ctx, x.dir, opts, stdout, stderr, func(ctx context.Context) error {
			if err := x.awaitEnd(ctx); err != nil {
				return err
			}
			return x.finish(ctx)
		})
		if ctx.Err() != nil {
			return nil
		}
	} else {
		err = logs.Print(ctx, x.dir, opts, stdout, stderr)
	}
	return failure(ctx, op, err)
}

// logReader reads the log of a container.
type logReader struct {
	r       *Runtime
	id, dir string
}

// over reports whether a container's main process has ended, or never ran.
func (x logReader) over(ctx context.Context) (bool, error) {
	task, err := x.r.task(ctx, x.id)
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

// finish waits until the log of a container that has ended has all that it printed.
// The engine keeps the writer waiting for more until it deletes the process.
func (x logReader) finish(ctx context.Context) error {
	err := x.r.call(ctx, "settle", func(ctx context.Context) error { return x.r.settle(ctx, x.id) })
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return logs.AwaitWriter(ctx, x.dir)
}

// awaitEnd waits for the end of a container's main process.
func (x logReader) awaitEnd(ctx context.Context) error {
	for {
		var ended <-chan client.ExitStatus
		err := x.r.call(ctx, "look for the main process", func(callCtx context.Context) error {
			task, err := x.r.task(callCtx, x.id)
			if err == nil {
				ended, err = task.Wait(x.r.namespaced(ctx))
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
