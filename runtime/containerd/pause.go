package containerd

import (
	"context"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// Pause freezes a container's processes. It waits for the start of a program that is under way.
func (r *Runtime) Pause(ctx context.Context, id string) error {
	return r.call(ctx, "pause container "+id, func(ctx context.Context) error {
		unlock, err := r.starts.Lock(ctx, id)
		if err != nil {
			return ctx.Err()
		}
		defer unlock()
		return r.bring(ctx, id, runtime.StatePaused, func() error {
			return runtime.Freeze(ctx, func() error {
				_, err := r.client.TaskService().Pause(ctx, &tasks.PauseTaskRequest{ContainerID: id})
				return native(err)
			})
		})
	})
}

// Resume lets a container's processes go on.
func (r *Runtime) Resume(ctx context.Context, id string) error {
	return r.call(ctx, "resume container "+id, func(ctx context.Context) error {
		return r.bring(ctx, id, runtime.StateRunning, func() error {
			_, err := r.client.TaskService().Resume(ctx, &tasks.ResumeTaskRequest{ContainerID: id})
			return native(err)
		})
	})
}

// bring calls f to bring a container to a state, unless it is in that state. So it doesn't rely on the
// engine's error or event for a needless call, which depend on the OCI runtime.
func (r *Runtime) bring(ctx context.Context, id string, want runtime.State, f func() error) error {
	there := func() (bool, error) {
		p, err := r.taskProcess(ctx, id)
		if err != nil {
			return false, err
		}
		now := state(p.Status)
		if now != runtime.StateRunning && now != runtime.StatePaused {
			return false, runtime.Precondition("it is %s", now)
		}
		return now == want, nil
	}
	if ok, err := there(); ok || err != nil {
		return err
	}
	err := f()
	if err == nil || errdefs.IsUnavailable(err) || ctx.Err() != nil {
		return err
	}
	if ok, why := there(); ok || why != nil {
		return why
	}
	return err
}
