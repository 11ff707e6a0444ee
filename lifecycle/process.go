package lifecycle

import (
	"cmp"
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/runtime"
)

// StartProcess starts a managed process, and waits until it is ready if the request says so. If
// it doesn't become ready, or ends instead, that isn't an error: Ready is false.
//
// Errors: those of Create if the request has one, *InvalidError, *policy.DeniedError,
// *NotFoundError, *StateError, *QuotaError, *CapacityError, *UnsupportedError,
// *UnavailableError, and *ProcessError in the AlreadyExists class when one of the ID runs.
func (p *processes) StartProcess(ctx context.Context, req ProcessRequest) (Process, error) {
	ctx, span := p.engine.tracer.Start(ctx, "sandbox.process_start", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	proc, err := p.startProcess(ctx, req)
	if err != nil {
		failSpan(span, err)
	}
	return proc, err
}

func (p *processes) startProcess(ctx context.Context, req ProcessRequest) (Process, error) {
	req.ID = cmp.Or(req.ID, defaultProcess)
	exec := ExecRequest{
		Tenant: req.Tenant, Key: req.Key, Create: req.Create,
		Command: append([]string{req.Command}, req.Args...), Env: req.Env, WorkingDir: req.WorkingDir,
	}
	cmd, err := checkCommand(p.opts.Policy(), exec)
	if err != nil {
		return Process{}, err
	}
	for _, err := range []error{checkID("process_id", req.ID), checkScreen(req.Rows, req.Cols), req.Ready.check()} {
		if err != nil {
			return Process{}, err
		}
	}
	id, err := p.mayAsk(req.Tenant, req.Key)
	if err != nil {
		return Process{}, err
	}
	h, info, err := p.startOnly(ctx, processID{id, req.ID}, cmd, req)
	if err != nil {
		return Process{}, err
	}
	p.engine.log.InfoContext(ctx, "process_started", append(sandboxAttrs(h.sb), "process_id", req.ID)...)
	if req.Ready != nil {
		ready := h.awaitReady(ctx, *req.Ready)
		if ctx.Err() != nil {
			return Process{}, fmt.Errorf("wait for process %s: %w", req.ID, context.Cause(ctx))
		}
		p.registry.mu.Lock()
		if h.ready == nil {
			h.ready = map[string]bool{}
		}
		h.ready[h.proc] = ready
		p.registry.mu.Unlock()
		if now, err := h.ask(ctx); err == nil {
			info = now
			h.seen(info)
		}
	}
	return h.process(info), nil
}

// startOnly starts a process, unless another call is about to start it.
func (p *processes) startOnly(ctx context.Context, id processID, cmd *command, req ProcessRequest) (h *handle, info runtime.ProcessInfo, err error) {
	unlock, free := p.starting.TryLock(id)
	if !free {
		return nil, info, processRuns(req.ID)
	}
	defer unlock()
	// First, because the process that is replaced makes room for the new one.
	if rec := p.registry.recordOf(id.keyID); rec != nil && p.registry.snapshot(rec).Status == StatusRunning {
		if req.Replace { // nothing is stopped for one that may not start
			rec, _, err := p.sandboxFor(ctx, cmd.req)
			if err == nil {
				_, err = p.prepare(ctx, cmd, p.registry.snapshot(rec))
			}
			if err != nil {
				return nil, info, err
			}
		}
		if err := monitorOf(rec).handle(p.registry.snapshot(rec), kindProcess, req.ID).makeRoom(ctx, req.Replace); err != nil {
			return nil, info, err
		}
	}
	err = p.inSandbox(ctx, cmd.req, useProcess, func(a *Access, _ ExecResult) (bool, error) {
		cwd, err := p.prepare(ctx, cmd, a.sb)
		if err != nil {
			return false, err
		}
		h = monitorOf(a.rec).handle(a.sb, kindProcess, req.ID)
		proc := runtime.Process{
			Command: cmd.req.Command, Env: cmd.env, WorkingDir: cwd,
			Stdin: true, TTY: req.TTY, Rows: req.Rows, Cols: req.Cols, KeepBytes: processRing,
			Hold: req.Ready != nil && req.Ready.Line != "",
		}
		info, err = h.start(ctx, proc)
		for n := 0; errdefs.IsAlreadyExists(err) && n < startAttempts; n++ {
			if err = h.makeRoom(ctx, req.Replace); err != nil {
				return false, err
			}
			info, err = h.start(ctx, proc)
		}
		if errdefs.IsAlreadyExists(err) {
			return false, processRuns(req.ID)
		}
		if err != nil {
			return false, h.startFailed(ctx, err)
		}
		return h.started(info, nil), nil
	})
	return h, info, err
}

func processRuns(id string) error {
	return processError(id, errdefs.ErrAlreadyExists, "process %q runs; stop it first, or ask for it to be replaced", id)
}

// makeRoom makes sure that there is no process of the ID: it forgets one that has ended, and stops
// one that runs, with replace.
func (h *handle) makeRoom(ctx context.Context, replace bool) error {
	info, err := h.ask(ctx)
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err):
		return nil // start returns the reason
	case err != nil:
		return h.explain(ctx, err)
	case info.Running && !replace:
		return processRuns(h.id)
	case info.Running:
		if err := h.stop(ctx); err != nil {
			return h.explain(ctx, err)
		}
	default:
		h.seen(info)
	}
	h.registry.mu.Lock()
	delete(h.ready, h.proc)
	if hub := h.hubs[h.proc]; hub != nil {
		h.forgetHubLocked(hub) // its readers don't read the new process
	}
	h.registry.mu.Unlock()
	if err := h.forget(ctx); err != nil {
		if errdefs.IsFailedPrecondition(err) { // another has started it again
			return processRuns(h.id)
		}
		return h.explain(ctx, err)
	}
	return nil
}

// Process returns a managed process, with the end of its standard error. It fails with a
// *ProcessError in the NotFound class if there is none.
func (p *processes) Process(ctx context.Context, tenant, key, id string) (Process, error) {
	h, info, err := p.find(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess))
	if err != nil {
		return Process{}, err
	}
	proc := h.process(info)
	if info.NextSeq > info.FirstSeq && !info.TTY {
		ctx, cancel := context.WithTimeout(ctx, stderrWait)
		defer cancel()
		if hub, err := h.openHub(ctx, -1, processRing, false); err == nil {
			proc.Stderr = hub.stderr(ctx, info.NextSeq)
			hub.release()
		}
	}
	return proc, nil
}

// Processes lists the managed processes of a sandbox in the order in which they were started,
// without their output.
func (p *processes) Processes(ctx context.Context, tenant, key string) ([]Process, error) {
	m, sb, err := p.within(tenant, key)
	if m != nil && sb.Status == StatusStopped {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	infos, err := m.listSeen(ctx, sb, kindProcess)
	var all []Process
	for _, info := range infos {
		all = append(all, m.process(info))
	}
	return all, err
}

// AttachProcess reads the output of a process from a place, as AttachExec does, and writes its
// input. One caller is attached at a time: a *ProcessError in the AlreadyExists class says that
// another is, unless takeOver.
func (p *processes) AttachProcess(ctx context.Context, tenant, key, id string, from int64, takeOver bool) (ProcessStream, error) {
	return p.readProcess(ctx, tenant, key, cmp.Or(id, defaultProcess), from, takeOver, false)
}

// FollowProcess reads the output of a process from a place, beside the attached caller. It has no
// input, and doesn't hold the process up: Next is a *GoneError if the process prints more than
// is kept.
func (p *processes) FollowProcess(ctx context.Context, tenant, key, id string, from int64) (ProcessStream, error) {
	return p.readProcess(ctx, tenant, key, cmp.Or(id, defaultProcess), from, false, true)
}

func (p *processes) readProcess(ctx context.Context, tenant, key, id string, from int64, takeOver, follow bool) (ProcessStream, error) {
	h, info, err := p.find(ctx, tenant, key, kindProcess, id)
	if err != nil {
		return nil, err
	}
	from, err = h.place(info, from)
	if err != nil {
		return nil, err
	}
	hub, err := h.openHub(ctx, -1, processRing, !follow)
	if err != nil {
		return nil, h.explain(ctx, err)
	}
	s := newStream(hub, from, takeOver, follow)
	if s == nil {
		hub.release()
		return nil, processError(id, errdefs.ErrAlreadyExists, "another is attached to process %q; its place can be taken over", id)
	}
	p.registry.touch(h.rec)
	return &reader[Process]{stream: s, info: info, view: h.processAt}, nil
}

// SignalProcess sends a signal to a process' group. A *ProcessError in the
// FailedPrecondition class says that it has ended.
func (p *processes) SignalProcess(ctx context.Context, tenant, key, id string, signal int) error {
	return p.signal(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess), signal)
}

// ResizeProcess sets the size of a process' terminal.
func (p *processes) ResizeProcess(ctx context.Context, tenant, key, id string, rows, cols int) error {
	return p.resize(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess), rows, cols)
}

// StopProcess ends a process: it closes its input, sends TERM to its group, and kills what is
// left of it and its descendants after 5 s. When ctx ends, that goes on. It is no error if the
// process has ended.
func (p *processes) StopProcess(ctx context.Context, tenant, key, id string) (Process, error) {
	h, info, err := p.find(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess))
	if err != nil {
		return Process{}, err
	}
	if !info.Running {
		return h.process(info), nil
	}
	if err := h.stop(ctx); err != nil {
		return Process{}, h.explain(ctx, err)
	}
	after, err := h.ask(ctx)
	if err != nil {
		return h.lostProcess(info), nil // it went with its sandbox
	}
	h.seen(after)
	return h.process(after), nil
}

// WaitProcess waits until a process has ended.
func (p *processes) WaitProcess(ctx context.Context, tenant, key, id string) (Process, error) {
	h, info, err := p.find(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess))
	if err != nil {
		return Process{}, err
	}
	if !info.Running {
		return h.process(info), nil
	}
	after, err := h.awaitEnd(ctx)
	switch {
	case err == nil:
		return h.process(after), nil
	case ctx.Err() == nil && (!h.alive() || h.dead(ctx)):
		return h.lostProcess(info), nil
	}
	return Process{}, h.explain(ctx, err)
}
