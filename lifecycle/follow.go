package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
)

// inputStall is how long a piece of input waits for its command to take it, and how
// much that is: who waits keeps the others from writing, and may have left unseen.
const (
	inputStall = 2 * time.Minute
	inputPiece = 32 << 10
)

var errNotTaken = errors.New("the command doesn't read its input")

// WriteExec copies r to a command's input, beside those who follow its output, until r
// or ctx ends; end closes the input then. What the command doesn't take holds it up, for
// two minutes at most for each 32 KiB.
// A *ProcessError in the FailedPrecondition class says that its input is closed, or
// that it has none; one in the Aborted class that some of what was written may be lost,
// as the command doesn't read it, or another took the output over from a place that only
// the sandbox had.
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
	buf := make([]byte, inputPiece)
	for {
		n, err := r.Read(buf)
		last := errors.Is(err, io.EOF)
		if n > 0 || last && end {
			piece, cancel := context.WithTimeoutCause(ctx, inputStall, errNotTaken)
			werr := h.write(piece, buf[:n], last && end)
			cancel()
			if errors.Is(werr, errNotTaken) {
				return &ProcessError{ID: execID, Class: errdefs.ErrAborted, Message: fmt.Sprintf(
					"command %q hasn't read its input for %s; some of what was written may be lost", execID, inputStall)}
			}
			if werr != nil {
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
