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

	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/logs"
)

const (
	defaultLogBytes = 10 << 20

	// lostTick is how often a follower asks for a main process that the engine has lost.
	lostTick = time.Second
)

// logIO makes the engine send the main process's output to a log writer, which outlives this process.
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

// Logs copies what is kept of the main process's output.
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
	p, err := x.r.taskProcess(ctx, x.id)
	if errdefs.IsFailedPrecondition(err) {
		return true, nil
	}
	return p.GetStatus() == tasktypes.Status_STOPPED, err
}

// finish waits until the log of a container that has ended is complete. The engine keeps the log writer
// waiting for more until it deletes the process.
func (x logReader) finish(ctx context.Context) error {
	err := x.r.call(ctx, "settle", func(ctx context.Context) error { return x.r.settle(ctx, x.id) })
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return logs.AwaitWriter(ctx, x.dir)
}

// awaitEnd waits for the end of a container's main process.
func (x logReader) awaitEnd(ctx context.Context) error {
	return runtime.Poll(ctx, lostTick, func() (bool, error) {
		var over bool
		err := x.r.call(ctx, "look for the main process", func(ctx context.Context) (err error) {
			over, err = x.over(ctx)
			return err
		})
		if over || err != nil {
			return true, absent(err)
		}
		// Wait fails if the engine loses the process or ends.
		_, err = x.r.client.TaskService().Wait(x.r.namespaced(ctx), &tasks.WaitRequest{ContainerID: x.id})
		return err == nil, nil
	})
}
