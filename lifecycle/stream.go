package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// StartExec starts a command whose output is followed while it runs. It returns once the command
// runs; with Serialize, once its turn has come. If there is a command of the ExecID, it returns
// that one, if the request is the same.
//
// Errors: those of Exec, and *UnsupportedError when the sandbox has no agent, and
// *ProcessError in the AlreadyExists class when the ExecID is another command's.
func (p *processes) StartExec(ctx context.Context, req StartRequest) (Execution, error) {
	ctx, span := p.engine.tracer.Start(ctx, "sandbox.exec_start", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	fed := false
	defer func() {
		if !fed && req.Taken != nil {
			req.Taken()
		}
	}()
	e, err := p.startExec(ctx, req, &fed)
	if err != nil {
		failSpan(span, err)
		p.engine.metrics.commands.WithLabelValues("error").Inc()
		return e, err
	}
	span.SetAttributes(attribute.String("berm.session_id", e.SessionID))
	return e, nil
}

// startExec is StartExec. It sets fed if req.Taken is called later.
func (p *processes) startExec(ctx context.Context, req StartRequest, fed *bool) (e Execution, err error) {
	req.OpenStdin = req.OpenStdin || req.TTY
	cmd, err := req.check(p.opts.Policy())
	if err != nil {
		return e, err
	}
	id, err := p.mayAsk(req.Tenant, req.Key)
	if err != nil {
		return e, err
	}
	if req.ExecID == "" {
		req.ExecID, req.NewID = uuid.NewString(), true
	}
	named := !req.NewID
	if named {
		if e, found, err := p.existing(ctx, id, req); found || err != nil {
			return e, err
		}
	}
	var unlock func()
	if req.Serialize {
		if unlock, err = p.takeTurn(ctx, id); err != nil {
			return e, err
		}
		defer func() {
			if unlock != nil {
				unlock()
			}
		}()
	}
	err = p.inSandbox(ctx, req.ExecRequest, useCommand, func(a *Access, made ExecResult) (bool, error) {
		h := monitorOf(a.rec).handle(a.sb, kindExec, req.ExecID)
		proc, overridden, err := p.processFor(ctx, cmd, req, a.sb)
		if err != nil {
			return false, err
		}
		info, err := h.start(ctx, proc)
		if errdefs.IsAlreadyExists(err) && named { // another caller was quicker
			var found bool
			if e, found, err = p.existing(ctx, id, req); err == nil && !found {
				err = processError(req.ExecID, errdefs.ErrAlreadyExists, "another command has this ID")
			}
			return false, err
		}
		if err != nil {
			return false, h.startFailed(ctx, err)
		}
		goesOn := h.started(info, unlock)
		if goesOn {
			unlock = nil // the process has the turn
		}
		e = h.execution(info)
		e.Overridden, e.Created, e.Recreated = slices.Concat(made.Overridden, overridden), made.Created, made.Recreated
		if info.Running && (req.Follow || len(req.Stdin) > 0) {
			*fed, err = h.attachFirst(ctx, req)
		}
		return goesOn, err
	})
	return e, err
}

// processFor returns the command as a sandbox is to run it.
func (p *processes) processFor(ctx context.Context, cmd *command, req StartRequest, sb Sandbox) (runtime.Process, []policy.Override, error) {
	cwd, err := p.prepare(ctx, cmd, sb)
	if err != nil {
		return runtime.Process{}, nil, err
	}
	timeout, clamped, err := p.opts.Policy().ExecTimeout(sb.Spec.Profile, req.Timeout)
	if err != nil {
		return runtime.Process{}, nil, err
	}
	l := label{Hash: req.hash(), TimeoutMS: timeout.Milliseconds(), Stdin: req.OpenStdin, Serialized: req.Serialize}
	return runtime.Process{
		Label: l.String(), Command: req.Command, Env: cmd.traced(ctx, p.opts, sb), WorkingDir: cwd,
		Stdin: req.OpenStdin || len(req.Stdin) > 0, TTY: req.TTY, Rows: req.Rows, Cols: req.Cols,
		Hold: req.Follow, Once: req.Once, Timeout: timeout, KeepBytes: cmp.Or(req.KeepBytes, keepBytes),
	}, slices.Concat(cmd.overridden, clamped), nil
}

// attachFirst attaches to a command that has just started, for the caller that is about to read
// it, and writes the input that came with the request. It returns true if it calls req.Taken.
func (h *handle) attachFirst(ctx context.Context, req StartRequest) (fed bool, err error) {
	hub, err := h.openHub(ctx, 0, execRing, req.Follow)
	switch {
	case err != nil && len(req.Stdin) == 0:
		return false, nil // the follower gets the error
	case err != nil:
		return false, h.explain(ctx, err)
	}
	if req.Follow {
		hub.expectSoon()
	}
	if len(req.Stdin) == 0 {
		hub.release()
		return false, nil
	}
	if err := hub.takeInput(ctx); err != nil { // at once, before another caller can retire the hub
		hub.release()
		return false, h.explain(ctx, err)
	}
	if !h.registry.work(func() {
		defer hub.release()
		if req.Taken != nil {
			defer req.Taken()
		}
		_ = hub.feed(h.registry.running, req.Stdin, !req.OpenStdin) // the command loses what it doesn't take
	}) {
		<-hub.input
		hub.release()
		return false, errClosing
	}
	return true, nil
}

// existing looks for a command of the ID of a request.
func (p *processes) existing(ctx context.Context, id keyID, req StartRequest) (e Execution, found bool, err error) {
	rec := p.registry.recordOf(id)
	if rec == nil {
		return e, false, nil
	}
	h := monitorOf(rec).handle(p.registry.snapshot(rec), kindExec, req.ExecID)
	hash := req.hash()
	var theirs string
	switch h.sb.Status {
	case StatusStopped:
		l, ok := h.lastOf(req.ExecID)
		if !ok {
			return e, false, nil
		}
		e, theirs = l.execution, l.hash
	case StatusRunning:
		if req.Create != nil { // a sandbox of another spec is a conflict
			if _, _, err := p.sandboxFor(ctx, req.ExecRequest); err != nil {
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
		e, theirs = h.execution(info), parseLabel(info.Label).Hash
	default:
		return e, false, nil
	}
	if theirs != hash {
		return e, false, processError(req.ExecID, errdefs.ErrAlreadyExists, "command %q is there already, and was asked for differently", req.ExecID)
	}
	e.Existing = true
	return e, true, nil
}

// Execution returns a command that StartExec started. It fails with a *ProcessError in the
// NotFound class if there is none.
func (p *processes) Execution(ctx context.Context, tenant, key, execID string) (Execution, error) {
	h, info, err := p.find(ctx, tenant, key, kindExec, execID)
	if err == nil {
		return h.execution(info), nil
	}
	if h != nil {
		if l, ok := h.lastOf(execID); ok { // it ended with its container
			return l.execution, nil
		}
	}
	return Execution{}, err
}

// Executions lists the commands of a sandbox in the order in which they were started: those that
// run, and the last of those that ended.
func (p *processes) Executions(ctx context.Context, tenant, key string) ([]Execution, error) {
	m, sb, err := p.within(tenant, key)
	var all []Execution
	if m != nil && sb.Status == StatusStopped {
		m.registry.mu.Lock()
		for _, l := range m.last {
			all = append(all, l.execution)
		}
		m.registry.mu.Unlock()
		slices.SortFunc(all, func(a, b Execution) int { return a.StartedAt.Compare(b.StartedAt) })
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	infos, err := m.listSeen(ctx, sb, kindExec)
	for _, info := range infos {
		all = append(all, m.execution(info))
	}
	return all, err
}

// AttachExec follows a command from a place: the Seq after which to go on, 0 for the beginning,
// -1 for all that is kept. It takes over from the reader before. The error is a *GoneError if
// some of the output isn't kept any more. While another caller writes the command's input,
// less may be kept.
func (p *processes) AttachExec(ctx context.Context, tenant, key, execID string, from int64) (ExecStream, error) {
	h, info, err := p.find(ctx, tenant, key, kindExec, execID)
	if err != nil {
		return nil, err
	}
	anywhere := from == -1
	from, err = h.place(info, from)
	if err != nil {
		return nil, err
	}
	for range startAttempts {
		hub, err := h.openHub(ctx, from, execRing, true)
		if err != nil {
			return nil, h.explain(ctx, err)
		}
		first, _ := hub.bounds()
		fed := len(hub.input) > 0 // a new attachment would cut the input off
		if fed && anywhere {
			from = -1
		}
		if from == -1 || from >= first {
			p.registry.touch(h.rec)
			return &reader[Execution]{stream: newStream(hub, from, true, false), info: info, view: h.executionAt}, nil
		}
		// Only the sandbox has the output before first, so the hub is replaced.
		hub.expect(false)
		if fed {
			hub.release()
			return nil, goneError(first, "output is kept from %d on only while the command's input is written", first)
		}
		hub.retire()
		hub.release()
	}
	return nil, goneError(-1, "others follow the command from another place")
}

// SignalExec sends a signal to a command's process group. A *ProcessError in the
// FailedPrecondition class says that it has ended.
func (p *processes) SignalExec(ctx context.Context, tenant, key, execID string, signal int) error {
	return p.signal(ctx, tenant, key, kindExec, execID, signal)
}

// KillExec kills a command with all its descendants. It is no error if it has ended. If they
// can't be killed, the sandbox is removed.
func (p *processes) KillExec(ctx context.Context, tenant, key, execID string) (Execution, error) {
	h, info, err := p.find(ctx, tenant, key, kindExec, execID)
	if err != nil || !info.Running {
		return p.Execution(ctx, tenant, key, execID)
	}
	if err := h.killOrEnd(ctx); err != nil {
		return Execution{}, h.explain(ctx, err)
	}
	if after, err := h.ask(ctx); err == nil {
		h.seen(after)
		return h.execution(after), nil
	}
	if l, ok := h.lastOf(execID); ok {
		return l.execution, nil
	}
	info.Running, info.Killed, info.EndedAt = false, true, time.Now().UTC()
	return h.execution(info), nil
}

// ResizeExec sets the size of a command's terminal.
func (p *processes) ResizeExec(ctx context.Context, tenant, key, execID string, rows, cols int) error {
	return p.resize(ctx, tenant, key, kindExec, execID, rows, cols)
}

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
