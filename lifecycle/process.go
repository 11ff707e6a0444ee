package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/runtime"
)

// Bounds of managed processes.
const (
	defaultProcess = "default"
	stopInput      = 200 * time.Millisecond // for what still writes to it
	stopGrace      = 5 * time.Second        // from TERM to KILL
	stopMost       = 30 * time.Second       // for all of a stop
	stderrWait     = time.Second            // for the sandbox to send it
	askFirst       = 10 * time.Millisecond  // after a wait began; each question doubles it
	askMost        = 500 * time.Millisecond
)

// The states of a managed process.
const (
	ProcessRunning = "running"
	ProcessExited  = "exited"
)

// StartProcess starts a managed process, and waits until it is ready if that is asked
// for. One that doesn't become ready, or ends instead, isn't an error: Ready is false.
//
// Errors: those of Create when it comes along, *InvalidError, *policy.DeniedError,
// *NotFoundError, *StateError, *QuotaError, *CapacityError, *UnsupportedError,
// *UnavailableError, and *ProcessError in the AlreadyExists class when one of the ID
// runs.
func (m *Manager) StartProcess(ctx context.Context, req ProcessRequest) (Process, error) {
	ctx, span := m.tracer.Start(ctx, "sandbox.process_start", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	p, err := m.startProcess(ctx, req)
	if err != nil {
		failSpan(span, err)
	}
	return p, err
}

func (m *Manager) startProcess(ctx context.Context, req ProcessRequest) (Process, error) {
	req.ID = cmp.Or(req.ID, defaultProcess)
	exec := ExecRequest{
		Tenant: req.Tenant, Key: req.Key, Create: req.Create,
		Command: append([]string{req.Command}, req.Args...), Env: req.Env, WorkingDir: req.WorkingDir,
	}
	cmd, err := m.checkCommand(exec)
	if err != nil {
		return Process{}, err
	}
	for _, err := range []error{checkID("process_id", req.ID), checkScreen(req.Rows, req.Cols), req.Ready.check()} {
		if err != nil {
			return Process{}, err
		}
	}
	if err := m.available(); err != nil {
		return Process{}, err
	}
	id, err := exec.keyID()
	if err != nil {
		return Process{}, err
	}
	if m.insider == nil {
		return Process{}, &UnsupportedError{Key: id.key}
	}
	rec, info, err := m.startOnly(ctx, processID{id, req.ID}, exec, cmd, req)
	if err != nil {
		return Process{}, err
	}
	m.log.InfoContext(ctx, "process_started", append(sandboxAttrs(m.snapshot(rec)), "process_id", req.ID)...)
	if req.Ready != nil {
		sb := m.snapshot(rec)
		ready := m.awaitReady(ctx, rec, sb, info.ID, *req.Ready)
		if ctx.Err() != nil {
			return Process{}, fmt.Errorf("wait for process %s: %w", req.ID, context.Cause(ctx))
		}
		m.mu.Lock()
		if rec.inside.ready == nil {
			rec.inside.ready = map[string]bool{}
		}
		rec.inside.ready[info.ID] = ready
		m.mu.Unlock()
		if now, err := m.ask(ctx, sb, info.ID); err == nil {
			info = now
			m.seen(rec, info)
		}
	}
	return m.process(rec, info), nil
}

// processID is a managed process of a key.
type processID struct {
	keyID
	process string
}

// startOnly starts a process, unless another call is about to start it.
func (m *Manager) startOnly(ctx context.Context, id processID, exec ExecRequest, cmd *command, req ProcessRequest) (rec *record, info runtime.ProcessInfo, err error) {
	m.mu.Lock()
	_, taken := m.starting[id]
	if !taken {
		m.starting[id] = struct{}{}
	}
	m.mu.Unlock()
	if taken {
		return nil, info, processRuns(req.ID)
	}
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.starting, id)
	}()
	// First, as the one that is replaced makes room for the new one.
	if rec := m.recordOf(id.keyID); rec != nil && m.snapshot(rec).Status == StatusRunning {
		if req.Replace { // nothing is stopped for one that may not start
			if err := m.mayStart(ctx, exec, cmd); err != nil {
				return nil, info, err
			}
		}
		if err := m.makeRoom(ctx, rec, m.snapshot(rec), req); err != nil {
			return nil, info, err
		}
	}
	err = m.inSandbox(ctx, exec, kindProcess, func(in *record, sb Sandbox, _ ExecResult) (bool, error) {
		cwd, err := m.prepare(ctx, cmd, sb)
		if err != nil {
			return false, err
		}
		p := runtime.Process{
			ID: string(kindProcess) + req.ID, Command: exec.Command, Env: cmd.env, WorkingDir: cwd,
			Stdin: true, TTY: req.TTY, Rows: req.Rows, Cols: req.Cols, KeepBytes: processRing,
			Hold: req.Ready != nil && req.Ready.Line != "",
		}
		info, err = m.startIn(ctx, sb, p)
		for n := 0; errdefs.IsAlreadyExists(err) && n < startAttempts; n++ {
			if err = m.makeRoom(ctx, in, sb, req); err != nil {
				return false, err
			}
			info, err = m.startIn(ctx, sb, p)
		}
		if errdefs.IsAlreadyExists(err) {
			return false, processRuns(req.ID)
		}
		if err != nil {
			return false, m.startFailed(ctx, in, sb, req.ID, err)
		}
		rec = in
		return m.started(in, info, false), nil
	})
	return rec, info, err
}

// mayStart checks what a start checks before it starts something.
func (m *Manager) mayStart(ctx context.Context, exec ExecRequest, cmd *command) error {
	rec, _, err := m.sandboxFor(ctx, exec)
	if err == nil {
		_, err = m.prepare(ctx, cmd, m.snapshot(rec))
	}
	return err
}

func processRuns(id string) error {
	return &ProcessError{
		ID: id, Class: errdefs.ErrAlreadyExists,
		Message: fmt.Sprintf("process %q runs; stop it first, or ask for it to be replaced", id),
	}
}

// makeRoom sees to it that no process of the ID is there: one that has ended is
// forgotten, one that runs is stopped if it is to be replaced.
func (m *Manager) makeRoom(ctx context.Context, rec *record, sb Sandbox, req ProcessRequest) error {
	proc := string(kindProcess) + req.ID
	info, err := m.ask(ctx, sb, proc)
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err):
		return nil // the start will tell
	case err != nil:
		return m.explain(ctx, rec, sb, req.ID, err)
	case info.Running && !req.Replace:
		return processRuns(req.ID)
	case info.Running:
		if err := m.stop(ctx, rec, sb, proc); err != nil {
			return m.explain(ctx, rec, sb, req.ID, err)
		}
	default:
		m.seen(rec, info)
	}
	m.mu.Lock()
	delete(rec.inside.ready, proc)
	if h := rec.inside.hubs[proc]; h != nil {
		h.forgetLocked() // who reads the old one doesn't read the new
	}
	m.mu.Unlock()
	if err := m.forget(ctx, sb, proc); err != nil {
		if errdefs.IsFailedPrecondition(err) { // another has started it again
			return processRuns(req.ID)
		}
		return m.explain(ctx, rec, sb, req.ID, err)
	}
	return nil
}

// Process tells of a managed process, with the last of its standard error; a
// *ProcessError in the NotFound class if there is none.
func (m *Manager) Process(ctx context.Context, tenant, key, id string) (Process, error) {
	rec, info, err := m.find(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess))
	if err != nil {
		return Process{}, err
	}
	p := m.process(rec, info)
	if info.NextSeq > info.FirstSeq && !info.TTY {
		ctx, cancel := context.WithTimeout(ctx, stderrWait)
		defer cancel()
		if h, err := m.openHub(ctx, rec, m.snapshot(rec), info.ID, -1, processRing, false); err == nil {
			p.Stderr = h.stderr(ctx, info.NextSeq)
			h.release()
		}
	}
	return p, nil
}

// Processes lists the sandbox's managed processes in the order they were started,
// without their output.
func (m *Manager) Processes(ctx context.Context, tenant, key string) ([]Process, error) {
	rec, sb, err := m.within(tenant, key)
	if rec != nil && sb.Status == StatusStopped {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	infos, err := m.list(ctx, sb)
	if err != nil {
		return nil, m.explain(ctx, rec, sb, "", err)
	}
	var all []Process
	for _, info := range infos {
		m.seen(rec, info)
		if k, _ := kindOf(info.ID); k == kindProcess {
			all = append(all, m.process(rec, info))
		}
	}
	return all, nil
}

// AttachProcess gives a process' output from a place on, as AttachExec does, and takes
// its input. One is attached at a time: a *ProcessError in the AlreadyExists class says
// that another is, unless its place is to be taken.
func (m *Manager) AttachProcess(ctx context.Context, tenant, key, id string, from int64, takeOver bool) (ProcessStream, error) {
	return m.readProcess(ctx, tenant, key, cmp.Or(id, defaultProcess), from, takeOver, false)
}

func (m *Manager) readProcess(ctx context.Context, tenant, key, id string, from int64, takeOver, follow bool) (ProcessStream, error) {
	rec, info, err := m.find(ctx, tenant, key, kindProcess, id)
	if err != nil {
		return nil, err
	}
	from, err = m.place(rec, info, from)
	if err != nil {
		return nil, err
	}
	sb := m.snapshot(rec)
	h, err := m.openHub(ctx, rec, sb, info.ID, -1, processRing, !follow)
	if err != nil {
		return nil, m.explain(ctx, rec, sb, id, err)
	}
	s := newStream(h, from, takeOver, follow)
	if s == nil {
		h.release()
		return nil, &ProcessError{
			ID: id, Class: errdefs.ErrAlreadyExists,
			Message: fmt.Sprintf("another is attached to process %q; its place can be taken over", id),
		}
	}
	m.touch(rec)
	return &processStream{stream: s, m: m, id: id, info: info}, nil
}

// SignalProcess sends a signal to a process' group. A *ProcessError in the
// FailedPrecondition class says that it has ended.
func (m *Manager) SignalProcess(ctx context.Context, tenant, key, id string, signal int) error {
	return m.signal(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess), signal)
}

// ResizeProcess sets the size of a process' terminal.
func (m *Manager) ResizeProcess(ctx context.Context, tenant, key, id string, rows, cols int) error {
	return m.resize(ctx, tenant, key, kindProcess, cmp.Or(id, defaultProcess), rows, cols)
}

// StopProcess ends a process: it closes its input, sends TERM to its group, and kills
// what is left of it and its descendants after 5 s. When ctx ends, that goes on. One that
// has ended is no error.
func (m *Manager) StopProcess(ctx context.Context, tenant, key, id string) (Process, error) {
	id = cmp.Or(id, defaultProcess)
	rec, info, err := m.find(ctx, tenant, key, kindProcess, id)
	if err != nil {
		return Process{}, err
	}
	if !info.Running {
		return m.process(rec, info), nil
	}
	sb := m.snapshot(rec)
	if err := m.stop(ctx, rec, sb, info.ID); err != nil {
		return Process{}, m.explain(ctx, rec, sb, id, err)
	}
	after, err := m.ask(ctx, sb, info.ID)
	if err != nil {
		return m.lostProcess(rec, info), nil // it went with its sandbox
	}
	m.seen(rec, after)
	return m.process(rec, after), nil
}

// stop stops a process, to the end once it has begun.
func (m *Manager) stop(ctx context.Context, rec *record, sb Sandbox, proc string) error {
	done := make(chan error, 1)
	m.mu.Lock()
	if m.closing {
		m.mu.Unlock()
		return errClosing
	}
	work, cancel := context.WithTimeout(trace.ContextWithSpanContext(m.base, trace.SpanContextFromContext(ctx)), stopMost)
	m.wg.Go(func() {
		defer cancel()
		done <- m.guard("process_stop", func() error { return m.stopNow(work, rec, sb, proc) })
	})
	m.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *Manager) stopNow(ctx context.Context, rec *record, sb Sandbox, proc string) error {
	input, cancel := context.WithTimeout(ctx, stopInput)
	if h, err := m.openHub(input, rec, sb, proc, -1, processRing, false); err == nil {
		_ = h.write(input, nil, true) // it may be closed, or never read: the signal follows
		defer h.release()
	}
	cancel()
	err := m.insist(ctx, func(ctx context.Context) error {
		return m.call(ctx, "process_signal", func(ctx context.Context) error {
			return m.insider.Signal(ctx, sb.ContainerID, proc, 15)
		})
	})
	if err == nil {
		_ = m.insist(ctx, func(ctx context.Context) error {
			_, err := m.awaitEnd(ctx, rec, sb, proc)
			return err
		})
	}
	if err := m.killOrEnd(ctx, rec, sb, proc); err != nil { // what its end has left behind, too
		return err
	}
	if info, err := m.ask(ctx, sb, proc); err == nil { // else it went with its sandbox
		m.seen(rec, info)
	}
	return nil
}

// insist asks a sandbox that doesn't answer again, for as long as a process has to end by
// itself: that nobody hears of it for a moment is no reason to kill it sooner.
func (m *Manager) insist(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	for wait := askFirst; ; wait = min(2*wait, askMost) {
		err := f(ctx)
		if !errdefs.IsUnavailable(err) && !errors.Is(err, runtime.ErrInterrupted) {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
			continue
		case <-m.tending.Done():
		case <-ctx.Done():
		}
		timer.Stop()
		return err
	}
}

// WaitProcess waits for a process' end.
func (m *Manager) WaitProcess(ctx context.Context, tenant, key, id string) (Process, error) {
	id = cmp.Or(id, defaultProcess)
	rec, info, err := m.find(ctx, tenant, key, kindProcess, id)
	if err != nil {
		return Process{}, err
	}
	if !info.Running {
		return m.process(rec, info), nil
	}
	sb := m.snapshot(rec)
	after, err := m.awaitEnd(ctx, rec, sb, info.ID)
	m.mu.Lock()
	alive := m.aliveLocked(rec)
	m.mu.Unlock()
	switch {
	case err == nil:
		return m.process(rec, after), nil
	case ctx.Err() == nil && (!alive || m.dead(ctx, rec, sb)):
		return m.lostProcess(rec, info), nil
	}
	return Process{}, m.explain(ctx, rec, sb, id, err)
}

// awaitEnd waits until a process has ended.
func (m *Manager) awaitEnd(ctx context.Context, rec *record, sb Sandbox, proc string) (runtime.ProcessInfo, error) {
	for wait := askFirst; ; wait = min(2*wait, askMost) {
		info, err := m.ask(ctx, sb, proc)
		if err != nil {
			return info, err
		}
		m.seen(rec, info)
		if !info.Running {
			return info, nil
		}
		m.mu.Lock()
		var done <-chan struct{}
		if t := rec.inside.running[proc]; t != nil {
			done = t.done
		}
		m.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-done:
		case <-m.tending.Done():
			err = errClosing
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		timer.Stop()
		if err != nil {
			return info, err
		}
	}
}

// process is a process as its caller knows it.
func (m *Manager) process(rec *record, info runtime.ProcessInfo) Process {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, id := kindOf(info.ID)
	p := Process{
		ID: id, SessionID: rec.sb.SessionID, Command: info.Command, TTY: info.TTY, State: ProcessRunning,
		StartedAt: info.StartedAt, FirstSeq: info.FirstSeq, NextSeq: info.NextSeq,
	}
	if ready, ok := rec.inside.ready[info.ID]; ok {
		p.Ready = &ready
	}
	if h := rec.inside.hubs[info.ID]; h != nil {
		h.mu.Lock()
		p.Attached = h.reader != nil
		h.mu.Unlock()
	}
	if !info.Running {
		p.State, p.ExitCode, p.Signal, p.EndedAt = ProcessExited, &info.ExitCode, info.Signal, info.EndedAt
	}
	return p
}

// lostProcess is a process whose container went away under it. It has no exit code.
func (m *Manager) lostProcess(rec *record, info runtime.ProcessInfo) Process {
	info.Running, info.EndedAt = false, time.Now().UTC()
	p := m.process(rec, info)
	p.ExitCode = nil
	return p
}

// processStream is a ProcessStream.
type processStream struct {
	*stream
	m     *Manager
	id    string
	info  runtime.ProcessInfo // when it was attached to
	ended *Process
}

// Next implements ProcessStream.
func (s *processStream) Next() (runtime.Chunk, error) {
	if s.ended != nil {
		return runtime.Chunk{}, io.EOF
	}
	c, err := s.next()
	if err == nil {
		return c, nil
	}
	known := s.h.ended()
	info, _, err := s.m.streamEnded(s.stream, s.id, s.info, err)
	if errors.Is(err, io.EOF) {
		p := s.m.process(s.h.rec, info)
		if !known {
			p = s.m.lostProcess(s.h.rec, info)
		}
		s.ended = &p
	}
	return runtime.Chunk{}, err
}

// Ended implements ProcessStream.
func (s *processStream) Ended() Process {
	if s.ended == nil {
		return s.m.process(s.h.rec, s.info)
	}
	return *s.ended
}

// Close implements ProcessStream.
func (s *processStream) Close() error {
	s.close()
	return nil
}

// Readiness of a process.
const (
	readyWait    = 30 * time.Second
	maxReadyWait = 10 * time.Minute
	maxReadyLine = 1024
)

func (r *Readiness) check() error {
	switch {
	case r == nil:
	case r.Port == 0 && r.Line == "":
		return &InvalidError{Field: "ready", Message: "must have a port or a line"}
	case r.Port < 0 || r.Port > 65535:
		return &InvalidError{Field: "ready.port", Message: "must be from 1 to 65535"}
	case len(r.Line) > maxReadyLine || strings.ContainsAny(r.Line, "\r\n"):
		return &InvalidError{Field: "ready.line", Message: fmt.Sprintf("must be part of one line, at most %d bytes", maxReadyLine)}
	case r.Timeout < 0 || r.Timeout > maxReadyWait:
		return &InvalidError{Field: "ready.timeout", Message: fmt.Sprintf("must be at most %s", maxReadyWait)}
	}
	return nil
}

// awaitReady waits until a process is ready. False: it has ended, or the time is up.
func (m *Manager) awaitReady(ctx context.Context, rec *record, sb Sandbox, proc string, r Readiness) bool {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(r.Timeout, readyWait))
	defer cancel()
	defer context.AfterFunc(m.tending, cancel)()
	results, n := make(chan bool, 2), 0
	await := func(ready func() bool) {
		n++
		go func() {
			yes := false
			_ = m.guard("process_ready", func() error { yes = ready(); return nil })
			results <- yes
		}()
	}
	if r.Port != 0 {
		await(func() bool { return m.listens(ctx, sb, proc, r.Port) })
	}
	if r.Line != "" {
		await(func() bool { return m.says(ctx, rec, sb, proc, r.Line) })
	}
	ready := false
	for range n {
		if <-results {
			ready = true
		}
		cancel() // the first decides
	}
	return ready
}

// listens waits until somebody listens at a port.
func (m *Manager) listens(ctx context.Context, sb Sandbox, proc string, port int) bool {
	for wait := askFirst; ; wait = min(2*wait, askMost) {
		if c, err := m.insider.Dial(ctx, sb.ContainerID, port); err == nil {
			_ = c.Close()
			return true
		}
		if info, err := m.ask(ctx, sb, proc); err == nil && !info.Running || errdefs.IsNotFound(err) {
			return false
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false
		}
	}
}

// says waits until a process has printed a text, on either stream. It only follows, so
// that whoever attaches meanwhile is not in its way.
func (m *Manager) says(ctx context.Context, rec *record, sb Sandbox, proc, text string) bool {
	h, err := m.openHub(ctx, rec, sb, proc, -1, processRing, false)
	if err != nil {
		return false
	}
	s := newStream(h, -1, false, true)
	defer s.close()
	defer context.AfterFunc(ctx, func() { s.close() })()
	var tails [2]string // the end of each stream, too short to contain the text
	for {
		c, err := s.next()
		if err != nil {
			return false
		}
		tail := &tails[0]
		if c.Stderr {
			tail = &tails[1]
		}
		*tail += string(c.Data)
		if strings.Contains(*tail, text) {
			return true
		}
		*tail = (*tail)[max(0, len(*tail)-len(text)+1):]
	}
}
