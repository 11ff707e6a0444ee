package docker

import (
	"context"

	"github.com/bermhq/berm/runtime"
)

// Pause freezes a container's processes. It waits for the start of a program that is under way.
func (r *Runtime) Pause(ctx context.Context, id string) error {
	return r.callOn(ctx, "pause container", id, func(ctx context.Context, s *session) error {
		unlock, err := r.starts.Lock(ctx, id)
		if err != nil {
			return ctx.Err()
		}
		defer unlock()
		err = runtime.Freeze(ctx, func() error { return s.ContainerPause(ctx, id) })
		return unlessIn(ctx, s, id, runtime.StatePaused, err)
	})
}

// Resume lets a container's processes go on.
func (r *Runtime) Resume(ctx context.Context, id string) error {
	return r.callOn(ctx, "resume container", id, func(ctx context.Context, s *session) error {
		return unlessIn(ctx, s, id, runtime.StateRunning, s.ContainerUnpause(ctx, id))
	})
}

// unlessIn drops the error of a call if the container already is in the wanted state. Engines
// refuse such a call in different ways.
func unlessIn(ctx context.Context, s *session, id string, want runtime.State, err error) error {
	if err == nil || !answered(err) {
		return err
	}
	c, inspectErr := inspect(ctx, s, id)
	switch {
	case inspectErr != nil:
		return err
	case c.State == want:
		return nil
	case c.State != runtime.StateRunning && c.State != runtime.StatePaused:
		return runtime.Precondition("it is %s", c.State)
	}
	return err
}
