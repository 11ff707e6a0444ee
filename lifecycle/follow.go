package lifecycle

import (
	"context"
	"io"
)

// WriteExec copies r to a command's input, beside those who follow its output, until r
// or ctx ends; end closes the input then. What the command doesn't take holds it up.
// A *ProcessError in the FailedPrecondition class says that its input is closed, or
// that it has none.
func (m *Manager) WriteExec(ctx context.Context, tenant, key, execID string, r io.Reader, end bool) error {
	return errNotBuilt
}

// FollowProcess gives a process' output from a place on, beside whoever is attached. It
// takes no input.
func (m *Manager) FollowProcess(ctx context.Context, tenant, key, id string, from int64) (ProcessStream, error) {
	return nil, errNotBuilt
}
