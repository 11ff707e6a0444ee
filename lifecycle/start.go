package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Start starts a process, and returns once it runs. With Serialize, it first waits for its turn.
// With Ready, it also waits until the process is ready, has ended, or the timeout is over. The
// Stream is nil unless the request is to Follow. If a command of the ID was started by the same
// request, Start returns that command without a Stream.
//
// Errors: those of Exec, *UnsupportedError if the sandbox has no agent, and *ProcessError in the
// AlreadyExists class if another request started a process of the ID.
func (p *processes) Start(ctx context.Context, req StartRequest) (Process, Stream, error) {
	req.Kind = cmp.Or(req.Kind, KindExec)
	key := trace.WithAttributes(attribute.String("berm.key", req.Key))
	var span trace.Span
	if req.Kind == KindManaged {
		ctx, span = p.engine.tracer.Start(ctx, "sandbox.process_start", key)
	} else {
		ctx, span = p.engine.tracer.Start(ctx, "sandbox.exec_start", key)
	}
	defer span.End()
	s := &start{processes: p, req: req}
	done := false
	defer func() { // also if the backend panics
		if !s.fed && req.Taken != nil {
			req.Taken()
		}
		if !done && s.stream != nil {
			_ = s.stream.Close()
		}
	}()
	proc, err := s.run(ctx)
	if err != nil {
		failSpan(span, err)
		if req.Kind == KindExec {
			p.engine.metrics.commands.WithLabelValues("error").Inc()
		}
		return proc, nil, err
	}
	span.SetAttributes(attribute.String("berm.session_id", proc.SessionID))
	done = true
	if s.stream == nil {
		return proc, nil, nil
	}
	return proc, s.stream, nil
}

// start is one call of Start.
type start struct {
	*processes
	req    StartRequest
	cmd    *command
	handle *handle // of the started process, as are the next two
	info   runtime.ProcessInfo
	stream *stream
	fed    bool // req.Taken is called later
}

func (s *start) run(ctx context.Context) (Process, error) {
	req := &s.req
	managed := req.Kind == KindManaged
	req.OpenStdin = req.OpenStdin || req.TTY || managed
	if managed {
		req.ID = cmp.Or(req.ID, defaultProcess)
		req.Timeout, req.Serialize = nil, false
	} else {
		req.Replace, req.Ready = false, nil
	}
	req.Follow = req.Follow && req.Ready == nil
	var err error
	if s.cmd, err = req.check(s.opts.Policy()); err != nil {
		return Process{}, err
	}
	id, err := s.registry.open(req.Tenant, req.Key)
	if err != nil {
		return Process{}, err
	}
	if req.ID == "" {
		req.ID, req.NewID = uuid.NewString(), true
	}
	if managed {
		return s.managed(ctx, id)
	}
	if !req.NewID {
		if e, found, err := s.existing(ctx, id); found || err != nil {
			return e, err
		}
	}
	var unlock func()
	if req.Serialize {
		if unlock, err = s.takeTurn(ctx, id); err != nil {
			return Process{}, err
		}
	}
	defer func() {
		if unlock != nil {
			unlock()
		}
	}()
	proc, err := s.launch(ctx, &unlock)
	if s.handle != nil || !errdefs.IsAlreadyExists(err) || req.NewID {
		return proc, err
	}
	proc, found, err := s.existing(ctx, id) // another caller may have started it meanwhile
	if err == nil && !found {
		err = processError(req.ID, errdefs.ErrAlreadyExists, "another command has this ID")
	}
	return proc, err
}

// managed starts a managed process, and waits until it is ready.
func (s *start) managed(ctx context.Context, id keyID) (Process, error) {
	unlock, free := s.starting.TryLock(processID{id, s.req.ID})
	if !free {
		return Process{}, processRuns(s.req.ID)
	}
	defer func() { unlock() }()
	if err := s.removeOld(ctx, id); err != nil {
		return Process{}, err
	}
	var turn func()
	proc, err := s.launch(ctx, &turn)
	if err != nil {
		return proc, err
	}
	s.engine.log.InfoContext(ctx, "process_started", append(sandboxAttrs(s.handle.sb), "process_id", s.req.ID)...)
	if s.req.Ready == nil {
		return proc, nil
	}
	unlock() // so that another call can replace it during the wait
	unlock = func() {}
	ready, err := s.ready(ctx)
	ready.Overridden, ready.Created, ready.Recreated = proc.Overridden, proc.Created, proc.Recreated
	return ready, err
}

// launch starts the process in its sandbox, and feeds it. If *unlock isn't nil, it ends a turn. The
// process takes over the turn, and launch then sets *unlock to nil.
func (s *start) launch(ctx context.Context, unlock *func()) (proc Process, err error) {
	err = s.inSandbox(ctx, s.req.ExecRequest, s.req.Kind.use(), func(rec *record, sb Sandbox, made ExecResult) (bool, error) {
		h := monitorOf(rec).handle(sb, s.req.Kind, s.req.ID)
		info, overridden, err := s.startIn(ctx, h)
		if err != nil {
			return false, err
		}
		s.handle, s.info = h, info
		goesOn := h.started(info, *unlock)
		if goesOn {
			*unlock = nil
		}
		proc = h.process(info)
		proc.Overridden, proc.Created, proc.Recreated = slices.Concat(made.Overridden, overridden), made.Created, made.Recreated
		if info.Running && len(s.req.Stdin) > 0 {
			if s.fed = h.feed(&s.req); !s.fed {
				err = errClosing
			}
		}
		return goesOn, err
	})
	return proc, err
}

// startIn starts the process in a sandbox, and follows it if a caller or its Readiness needs the
// output.
func (s *start) startIn(ctx context.Context, h *handle) (info runtime.ProcessInfo, overridden []policy.Override, err error) {
	proc, overridden, err := s.processFor(ctx, h.sb)
	if err != nil {
		return info, nil, err
	}
	info, f, err := h.start(ctx, proc)
	if f != nil {
		s.stream = h.stream(f, info, 0, s.req.Follow)
	}
	switch {
	case err == nil:
		return info, overridden, nil
	case !errdefs.IsAlreadyExists(err):
		return info, nil, h.startFailed(ctx, err)
	case s.req.Kind == KindManaged:
		return info, nil, processRuns(s.req.ID)
	}
	return info, nil, err
}

// processFor returns the process for the runtime to start in a sandbox.
func (s *start) processFor(ctx context.Context, sb Sandbox) (runtime.Process, []policy.Override, error) {
	req := &s.req
	cwd, err := s.prepare(ctx, s.cmd, sb)
	if err != nil {
		return runtime.Process{}, nil, err
	}
	proc := runtime.Process{
		Command: req.Command, Env: s.cmd.env, WorkingDir: cwd, Once: req.Once,
		Stdin: req.OpenStdin || len(req.Stdin) > 0, TTY: req.TTY, Rows: req.Rows, Cols: req.Cols,
	}
	if req.Follow || req.Ready != nil && req.Ready.Line != "" {
		proc.Follow = &runtime.Follow{Lossless: true, Exclusive: req.Follow}
	}
	if req.Kind == KindManaged {
		proc.KeepBytes = cmp.Or(req.KeepBytes, keepManaged)
		return proc, s.cmd.overridden, nil
	}
	timeout, clamped, err := s.opts.Policy().ExecTimeout(sb.Spec.Profile, req.Timeout)
	if err != nil {
		return proc, nil, err
	}
	l := label{Hash: req.hash(), TimeoutMS: timeout.Milliseconds(), Stdin: req.OpenStdin, Serialized: req.Serialize}
	proc.Label, proc.Env, proc.Timeout, proc.KeepBytes = l.String(), s.cmd.traced(ctx, s.opts, sb), timeout, cmp.Or(req.KeepBytes, keepBytes)
	return proc, slices.Concat(s.cmd.overridden, clamped), nil
}

// existing looks for a command of the ID of the request.
func (s *start) existing(ctx context.Context, id keyID) (e Process, found bool, err error) {
	req := &s.req
	rec, sb := s.registry.recordOf(id)
	if rec == nil {
		return e, false, nil
	}
	h := monitorOf(rec).handle(sb, KindExec, req.ID)
	var theirs string
	switch h.sb.Status {
	case StatusStopped:
		l, ok := h.lastOf()
		if !ok {
			return e, false, nil
		}
		e, theirs = l.process, l.hash
	case StatusRunning:
		if req.Create != nil { // a sandbox of another spec is a conflict
			if _, _, err := s.sandboxFor(ctx, req.ExecRequest); err != nil {
				return e, false, err
			}
		}
		info, err := h.ask(ctx)
		switch {
		case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err): // Start returns the reason
			return e, false, nil
		case err != nil:
			return e, false, h.explain(ctx, err)
		}
		h.seen(info)
		e, theirs = h.process(info), parseLabel(info.Label).Hash
	default:
		return e, false, nil
	}
	if theirs != req.hash() {
		return e, false, processError(req.ID, errdefs.ErrAlreadyExists, "command %q is there already, and was asked for differently", req.ID)
	}
	e.Existing = true
	return e, true, nil
}

func processRuns(id string) error {
	return processError(id, errdefs.ErrAlreadyExists, "process %q runs; stop it first, or ask for it to be replaced", id)
}

// removeOld removes an earlier managed process of the ID from a running sandbox. Otherwise that
// would still count, and could make the sandbox exceed its limit.
func (s *start) removeOld(ctx context.Context, id keyID) error {
	rec, sb := s.registry.recordOf(id)
	if sb.Status != StatusRunning {
		return nil
	}
	if s.req.Replace { // don't stop the old one if the new one may not start
		rec, _, err := s.sandboxFor(ctx, s.req.ExecRequest)
		if err == nil {
			_, err = s.prepare(ctx, s.cmd, s.registry.snapshot(rec))
		}
		if err != nil {
			return err
		}
	}
	return monitorOf(rec).handle(sb, KindManaged, s.req.ID).makeRoom(ctx, s.req.Replace)
}

// makeRoom removes an earlier process of the ID. It makes the sandbox forget an ended one. With
// replace, it stops a running one first.
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
	if err := h.forget(ctx); err != nil {
		if errdefs.IsFailedPrecondition(err) { // another caller has started it again
			return processRuns(h.id)
		}
		return h.explain(ctx, err)
	}
	return nil
}

// feed writes the input that came with the request, before any other. It returns true if it
// calls req.Taken.
func (h *handle) feed(req *StartRequest) bool {
	running := h.registry.running
	unlock, free := h.inputs.TryLock(h.processID())
	fed := h.registry.work(func() {
		if req.Taken != nil {
			defer req.Taken()
		}
		if !free { // a writer to an earlier process of the ID still holds it
			var err error
			if unlock, err = h.inputs.Lock(running, h.processID()); err != nil {
				return
			}
		}
		defer unlock()
		_ = h.input(running, req.Stdin, !req.OpenStdin) // input that the command doesn't read is lost
	})
	if free && !fed {
		unlock()
	}
	return fed
}

// ready waits until the process is ready, and records whether it is.
func (s *start) ready(ctx context.Context) (Process, error) {
	h := s.handle
	ready := h.awaitReady(ctx, *s.req.Ready, s.stream)
	if s.stream != nil {
		_ = s.stream.Close()
		s.stream = nil
	}
	if ctx.Err() != nil {
		return Process{}, fmt.Errorf("wait for process %s: %w", h.id, context.Cause(ctx))
	}
	h.registry.mu.Lock()
	if h.isLocked(s.info) { // else it was replaced
		h.procs[h.proc].ready = &ready
	}
	h.registry.mu.Unlock()
	now, err := h.ask(ctx)
	if err == nil {
		h.seen(now)
	}
	p := h.process(s.info)
	switch {
	case err == nil && now.StartedAt.Equal(s.info.StartedAt):
		p = h.process(now)
	case err == nil || errdefs.IsNotFound(err): // it was replaced
		p = h.lost(s.info)
	}
	p.Ready = &ready
	return p, nil
}
