package lifecycle

import "context"

// StartProcess starts a managed process.
func (m *Manager) StartProcess(ctx context.Context, req ProcessRequest) (Process, error) {
	return Process{}, errNotBuilt
}

// Process tells of a managed process.
func (m *Manager) Process(ctx context.Context, tenant, key, id string) (Process, error) {
	return Process{}, errNotBuilt
}

// Processes lists the sandbox's managed processes in the order they were started.
func (m *Manager) Processes(ctx context.Context, tenant, key string) ([]Process, error) {
	return nil, errNotBuilt
}

// AttachProcess gives a process' output from a place on, and takes its input.
func (m *Manager) AttachProcess(ctx context.Context, tenant, key, id string, from int64, takeOver bool) (ProcessStream, error) {
	return nil, errNotBuilt
}

// SignalProcess sends a signal to a process' group.
func (m *Manager) SignalProcess(ctx context.Context, tenant, key, id string, signal int) error {
	return errNotBuilt
}

// ResizeProcess sets the size of a process' terminal.
func (m *Manager) ResizeProcess(ctx context.Context, tenant, key, id string, rows, cols int) error {
	return errNotBuilt
}

// StopProcess ends a process: it closes its input, sends TERM, and kills what is left
// after 5 s.
func (m *Manager) StopProcess(ctx context.Context, tenant, key, id string) (Process, error) {
	return Process{}, errNotBuilt
}

// WaitProcess waits for a process' end.
func (m *Manager) WaitProcess(ctx context.Context, tenant, key, id string) (Process, error) {
	return Process{}, errNotBuilt
}
