package lifecycle

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/containerd/errdefs"
)

// inputStall is how long a piece of input waits for its command to take it, and inputPiece how
// large a piece is. A caller that waits keeps the others from writing, and may have left.
const (
	inputStall = 2 * time.Minute
	inputPiece = 32 << 10
)

var errNotTaken = errors.New("the command doesn't read its input")

// WriteExec copies r to a command's input, while others follow its output, until r or ctx ends.
// End closes the input then. It waits at most two minutes for the command to take 32 KiB.
// A *ProcessError in the FailedPrecondition class says that the input is closed, or that there
// is none. One in the Aborted class says that some of what was written may be lost: the command
// doesn't read it, or another caller took the output over from a place that only the sandbox
// had.
func (p *processes) WriteExec(ctx context.Context, tenant, key, execID string, r io.Reader, end bool) error {
	h, info, err := p.find(ctx, tenant, key, kindExec, execID)
	if err != nil {
		return err
	}
	if !info.Running || !parseLabel(info.Label).Stdin {
		return processError(execID, errdefs.ErrFailedPrecondition, "command %q has ended, or was started without an open input", execID)
	}
	hub, err := h.openHub(ctx, -1, execRing, false)
	if err != nil {
		return h.explain(ctx, err)
	}
	defer hub.release()
	buf := make([]byte, inputPiece)
	for {
		n, err := r.Read(buf)
		last := errors.Is(err, io.EOF)
		if n > 0 || last && end {
			piece, cancel := context.WithTimeoutCause(ctx, inputStall, errNotTaken)
			werr := hub.write(piece, buf[:n], last && end)
			cancel()
			if errors.Is(werr, errNotTaken) {
				return processError(execID, errdefs.ErrAborted,
					"command %q hasn't read its input for %s; some of what was written may be lost", execID, inputStall)
			}
			if werr != nil {
				return h.explain(ctx, werr)
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
