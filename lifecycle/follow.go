package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/errdefs"
)

// WriteExec copies r to a command's input, beside those who follow its output, until r
// or ctx ends; end closes the input then. What the command doesn't take holds it up.
// A *ProcessError in the FailedPrecondition class says that its input is closed, or
// that it has none; one in the Aborted class that some of what was written may be lost,
// as another took the output over from a place that only the sandbox had.
func (m *Manager) WriteExec(ctx context.Context, tenant, key, execID string, r io.Reader, end bool) error {
	rec, info, err := m.find(ctx, tenant, key, kindExec, execID)
	if err != nil {
		return err
	}
	if !info.Running || !parseLabel(info.Label).Stdin {
		return &ProcessError{ID: execID, Class: errdefs.ErrFailedPrecondition, Message: fmt.Sprintf("command %q has ended, or was started without an open input", execID)}
	}
	sb := m.snapshot(rec)
	h, err := m.openHub(ctx, rec, sb, info.ID, -1, execRing, false)
	if err != nil {
		return m.explain(ctx, rec, sb, execID, err)
	}
	defer h.release()
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		last := errors.Is(err, io.EOF)
		if n > 0 || last && end {
			if werr := h.write(ctx, buf[:n], last && end); werr != nil {
				return m.explain(ctx, rec, sb, execID, werr)
			}
		}
		if last {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// FollowProcess gives a process' output from a place on, beside whoever is attached. It
// takes no input, and doesn't hold the process up: Next is a *GoneError when it prints
// more than is kept before that is taken.
func (m *Manager) FollowProcess(ctx context.Context, tenant, key, id string, from int64) (ProcessStream, error) {
	return m.readProcess(ctx, tenant, key, cmp.Or(id, defaultProcess), from, false, true)
}
