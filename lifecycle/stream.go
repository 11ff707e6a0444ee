package lifecycle

import (
	"context"
	"errors"
)

var errNotBuilt = &UnavailableError{Err: errors.New("streamed commands aren't built yet")}

// StartExec starts a command whose output is followed while it runs.
func (m *Manager) StartExec(ctx context.Context, req StartRequest) (Execution, error) {
	return Execution{}, errNotBuilt
}

// Execution tells of a command that StartExec started.
func (m *Manager) Execution(ctx context.Context, tenant, key, execID string) (Execution, error) {
	return Execution{}, errNotBuilt
}

// Executions lists the sandbox's commands in the order they were started.
func (m *Manager) Executions(ctx context.Context, tenant, key string) ([]Execution, error) {
	return nil, errNotBuilt
}

// AttachExec follows a command from a place on.
func (m *Manager) AttachExec(ctx context.Context, tenant, key, execID string, from int64) (ExecStream, error) {
	return nil, errNotBuilt
}

// SignalExec sends a signal to a command's process group.
func (m *Manager) SignalExec(ctx context.Context, tenant, key, execID string, signal int) error {
	return errNotBuilt
}

// KillExec kills a command with all its descendants.
func (m *Manager) KillExec(ctx context.Context, tenant, key, execID string) (Execution, error) {
	return Execution{}, errNotBuilt
}

// ResizeExec sets the size of a command's terminal.
func (m *Manager) ResizeExec(ctx context.Context, tenant, key, execID string, rows, cols int) error {
	return errNotBuilt
}
