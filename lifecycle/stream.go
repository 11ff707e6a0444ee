package lifecycle

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Bounds of a command that is followed.
const (
	keepBytes    = 1 << 20 // of output, unless the caller says otherwise
	maxKeepBytes = 4 << 20
	maxScreen    = 4096 // rows or columns of a terminal
)

// idPattern is what the caller's own names of commands and processes are like.
var idPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,122}$`)

func checkID(field, id string) error {
	if !idPattern.MatchString(id) {
		return &InvalidError{Field: field, Message: "must match [A-Za-z0-9][A-Za-z0-9_.:-]{0,122}"}
	}
	return nil
}

func checkScreen(rows, cols int) error {
	if rows < 0 || rows > maxScreen || cols < 0 || cols > maxScreen {
		return &InvalidError{Field: "rows", Message: fmt.Sprintf("rows and columns must be from 1 to %d", maxScreen)}
	}
	return nil
}

func checkSignal(signal int) error {
	if signal < 1 || signal > 64 {
		return &InvalidError{Field: "signal", Message: "must be from 1 to 64"}
	}
	return nil
}

// StartExec starts a command whose output is followed while it runs. It answers once
// the command runs; with Serialize, once its turn has come. Asked again with an ExecID
// that is there, it answers that command, if the request is the same.
//
// Errors: those of Exec, and *UnsupportedError when the sandbox has no agent, and
// *ProcessError in the AlreadyExists class when the ExecID is another command's.
func (m *Manager) StartExec(ctx context.Context, req StartRequest) (Execution, error) {
	ctx, span := m.tracer.Start(ctx, "sandbox.exec_start", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	e, err := m.startExec(ctx, req)
	if err != nil {
		failSpan(span, err)
		m.metrics.commands.WithLabelValues("error").Inc()
		return e, err
	}
	span.SetAttributes(attribute.String("berm.session_id", e.SessionID))
	return e, nil
}

func (m *Manager) startExec(ctx context.Context, req StartRequest) (e Execution, err error) {
	req.OpenStdin = req.OpenStdin || req.TTY
	fed := false
	defer func() {
		if !fed && req.Taken != nil {
			req.Taken()
		}
	}()
	cmd, err := m.checkStart(req)
	if err != nil {
		return e, err
	}
	if err := m.available(); err != nil {
		return e, err
	}
	id, err := req.keyID()
	if err != nil {
		return e, err
	}
	if m.insider == nil {
		return e, &UnsupportedError{Key: id.key}
	}
	if req.ExecID == "" {
		req.ExecID, req.NewID = uuid.NewString(), true
	}
	named := !req.NewID
	if named {
		if e, found, err := m.existing(ctx, id, req); found || err != nil {
			return e, err
		}
	}
	turn := false
	if req.Serialize {
		if err := m.takeTurn(ctx, id); err != nil {
			return e, err
		}
		turn = true
		defer func() {
			if turn {
				m.passTurn(id)
			}
		}()
	}
	err = m.inSandbox(ctx, req.ExecRequest, kindExec, func(rec *record, sb Sandbox, made ExecResult) (bool, error) {
		p, overridden, err := m.processFor(ctx, cmd, req, sb)
		if err != nil {
			return false, err
		}
		info, err := m.startIn(ctx, sb, p)
		if errdefs.IsAlreadyExists(err) && named { // somebody has just been quicker
			var found bool
			if e, found, err = m.existing(ctx, id, req); err == nil && !found {
				err = &ProcessError{ID: req.ExecID, Class: errdefs.ErrAlreadyExists, Message: "another command has this ID"}
			}
			return false, err
		}
		if err != nil {
			return false, m.startFailed(ctx, rec, sb, req.ExecID, err)
		}
		goesOn := m.started(rec, info, turn)
		turn = turn && !goesOn
		e = m.execution(rec, info)
		e.Overridden, e.Created, e.Recreated = slices.Concat(made.Overridden, overridden), made.Created, made.Recreated
		if info.Running && (req.Follow || len(req.Stdin) > 0) {
			fed, err = m.takeHold(ctx, rec, sb, p.ID, req)
		}
		return goesOn, err
	})
	return e, err
}

// checkStart checks what can be checked without a sandbox.
func (m *Manager) checkStart(req StartRequest) (*command, error) {
	if req.ExecID != "" {
		if err := checkID("exec_id", req.ExecID); err != nil {
			return nil, err
		}
	}
	if err := checkScreen(req.Rows, req.Cols); err != nil {
		return nil, err
	}
	if req.KeepBytes < 0 || req.KeepBytes > maxKeepBytes {
		return nil, &InvalidError{Field: "keep_bytes", Message: fmt.Sprintf("must be from 0 to %d", maxKeepBytes)}
	}
	exec := req.ExecRequest
	exec.OutputLimit = nil
	return m.checkCommand(exec)
}

// hash is of all that makes a request the same when it comes again.
func (r StartRequest) hash() string {
	input := r.Stdin
	if len(input) > sha256.Size { // rather than copy it
		sum := sha256.Sum256(input)
		input = sum[:]
	}
	b, _ := json.Marshal(struct { // strings and numbers can't fail
		Command    []string
		Env        map[string]string
		WorkingDir string
		Stdin      []byte
		Timeout    *int64
		Serialize  bool
		OpenStdin  bool
		TTY        bool
		KeepBytes  int
	}{r.Command, r.Env, r.WorkingDir, input, r.Timeout, r.Serialize, r.OpenStdin, r.TTY, r.KeepBytes})
	sum := sha256.Sum256(b)
	return base64.RawURLEncoding.EncodeToString(sum[:16])
}

// processFor is the command as a sandbox is to run it.
func (m *Manager) processFor(ctx context.Context, cmd *command, req StartRequest, sb Sandbox) (runtime.Process, []policy.Override, error) {
	cwd, err := m.prepare(ctx, cmd, sb)
	if err != nil {
		return runtime.Process{}, nil, err
	}
	timeout, clamped, err := m.opts.Policy().ExecTimeout(sb.Spec.Profile, req.Timeout)
	if err != nil {
		return runtime.Process{}, nil, err
	}
	l := label{Hash: req.hash(), TimeoutMS: timeout.Milliseconds(), Stdin: req.OpenStdin, Serialized: req.Serialize}
	return runtime.Process{
		ID: string(kindExec) + req.ExecID, Label: l.String(), Command: req.Command, Env: m.traced(ctx, cmd, sb), WorkingDir: cwd,
		Stdin: req.OpenStdin || len(req.Stdin) > 0, TTY: req.TTY, Rows: req.Rows, Cols: req.Cols,
		Hold: req.Follow, Once: req.Once, Timeout: timeout, KeepBytes: cmp.Or(req.KeepBytes, keepBytes),
	}, slices.Concat(cmd.overridden, clamped), nil
}

func (m *Manager) startIn(ctx context.Context, sb Sandbox, p runtime.Process) (info runtime.ProcessInfo, err error) {
	err = m.call(ctx, "process_start", func(ctx context.Context) error {
		info, err = m.insider.Start(ctx, sb.ContainerID, p)
		return err
	})
	return info, err
}

// startFailed says what the error of a start means. Whether the process runs all the
// same will be seen.
func (m *Manager) startFailed(ctx context.Context, rec *record, sb Sandbox, id string, err error) error {
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		return m.whyNotStarted(ctx, rec, sb, err)
	}
	if ctx.Err() != nil || errdefs.IsUnavailable(err) || errdefs.IsDeadlineExceeded(err) {
		m.mu.Lock()
		if m.aliveLocked(rec) {
			rec.inside.unsure, rec.inside.since = true, time.Now()
			m.tendLocked(rec)
		}
		m.mu.Unlock()
	}
	return m.explain(ctx, rec, sb, id, err)
}

// started notes what Start answered, and tells whether the process is counted from now
// on, and has the turn.
func (m *Manager) started(rec *record, info runtime.ProcessInfo, turn bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.aliveLocked(rec) {
		return false
	}
	m.trackLocked(rec, info, true, turn)
	if !info.Running {
		m.seenLocked(rec, info)
	}
	return true
}

// takeHold takes hold of a command that was just started, for the one who is to read it,
// and gives it the input that came with it. It tells whether it calls req.Taken.
func (m *Manager) takeHold(ctx context.Context, rec *record, sb Sandbox, proc string, req StartRequest) (fed bool, err error) {
	h, err := m.openHub(ctx, rec, sb, proc, 0, execRing, req.Follow)
	switch {
	case err != nil && len(req.Stdin) == 0:
		return false, nil // a follower gets the error
	case err != nil:
		return false, m.explain(ctx, rec, sb, req.ExecID, err)
	}
	if req.Follow {
		h.expectSoon()
	}
	if len(req.Stdin) == 0 {
		h.release()
		return false, nil
	}
	if err := h.takeInput(ctx); err != nil { // at once, so that nobody retires the hub before
		h.release()
		return false, m.explain(ctx, rec, sb, req.ExecID, err)
	}
	if !m.goTend(func() {
		defer h.release()
		if req.Taken != nil {
			defer req.Taken()
		}
		_ = h.feed(m.tending, req.Stdin, !req.OpenStdin) // what it doesn't take is lost with it
	}) {
		<-h.input
		h.release()
		return false, errClosing
	}
	return true, nil
}

// existing looks for a command under the ID of a request.
func (m *Manager) existing(ctx context.Context, id keyID, req StartRequest) (e Execution, found bool, err error) {
	rec := m.recordOf(id)
	if rec == nil {
		return e, false, nil
	}
	sb := m.snapshot(rec)
	hash := req.hash()
	var theirs string
	switch sb.Status {
	case StatusStopped:
		l, ok := m.lastOf(rec, req.ExecID)
		if !ok {
			return e, false, nil
		}
		e, theirs = l.execution, l.hash
	case StatusRunning:
		if req.Create != nil { // a sandbox of another spec is a conflict
			if _, _, err := m.sandboxFor(ctx, req.ExecRequest); err != nil {
				return e, false, err
			}
		}
		info, err := m.ask(ctx, sb, string(kindExec)+req.ExecID)
		switch {
		case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err): // the start will tell
			return e, false, nil
		case err != nil:
			return e, false, m.explain(ctx, rec, sb, req.ExecID, err)
		}
		m.seen(rec, info)
		e, theirs = m.execution(rec, info), parseLabel(info.Label).Hash
	default:
		return e, false, nil
	}
	if theirs != hash {
		return e, false, &ProcessError{ID: req.ExecID, Class: errdefs.ErrAlreadyExists, Message: fmt.Sprintf("command %q is there already, and was asked for differently", req.ExecID)}
	}
	e.Existing = true
	return e, true, nil
}

func (m *Manager) lastOf(rec *record, id string) (lastOf, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, ok := rec.inside.last[id]
	return l, ok
}

// Execution tells of a command that StartExec started; a *ProcessError in the NotFound
// class if there is none.
func (m *Manager) Execution(ctx context.Context, tenant, key, execID string) (Execution, error) {
	rec, info, err := m.find(ctx, tenant, key, kindExec, execID)
	if err == nil {
		return m.execution(rec, info), nil
	}
	if rec != nil {
		if l, ok := m.lastOf(rec, execID); ok { // it ended with its container
			return l.execution, nil
		}
	}
	return Execution{}, err
}

// Executions lists the sandbox's commands in the order they were started: those that
// run, and those that ended lately.
func (m *Manager) Executions(ctx context.Context, tenant, key string) ([]Execution, error) {
	rec, sb, err := m.within(tenant, key)
	var all []Execution
	if rec != nil && sb.Status == StatusStopped {
		m.mu.Lock()
		for _, l := range rec.inside.last {
			all = append(all, l.execution)
		}
		m.mu.Unlock()
		slices.SortFunc(all, func(a, b Execution) int { return a.StartedAt.Compare(b.StartedAt) })
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	infos, err := m.list(ctx, sb)
	if err != nil {
		return nil, m.explain(ctx, rec, sb, "", err)
	}
	for _, info := range infos {
		m.seen(rec, info)
		if k, _ := kindOf(info.ID); k == kindExec {
			all = append(all, m.execution(rec, info))
		}
	}
	return all, nil
}

// AttachExec follows a command from a place on: the Seq after which to go on, 0 for the
// beginning, -1 for all that is kept. It takes the place of who followed before. The
// error is *GoneError when some of what should follow isn't kept any more. While the
// command's input is written, less may be kept.
func (m *Manager) AttachExec(ctx context.Context, tenant, key, execID string, from int64) (ExecStream, error) {
	rec, info, err := m.find(ctx, tenant, key, kindExec, execID)
	if err != nil {
		return nil, err
	}
	sb := m.snapshot(rec)
	anywhere := from == -1
	from, err = m.place(rec, info, from)
	if err != nil {
		return nil, err
	}
	var h *hub
	for range startAttempts {
		if h, err = m.openHub(ctx, rec, sb, info.ID, from, execRing, true); err != nil {
			return nil, m.explain(ctx, rec, sb, execID, err)
		}
		first, _ := h.bounds()
		fed := len(h.input) > 0 // a new attachment would cut the input off
		if fed && anywhere {
			from = -1
		}
		if from == -1 || from >= first {
			break
		}
		// What is wanted is kept in the sandbox only: whoever follows makes way.
		h.expect(false)
		if fed {
			h.release()
			return nil, &GoneError{Message: fmt.Sprintf("output is kept from %d on only while the command's input is written", first), FirstSeq: first}
		}
		h.retire()
		h.release()
		h = nil
	}
	if h == nil {
		return nil, &GoneError{Message: "others follow the command from another place", FirstSeq: -1}
	}
	m.touch(rec)
	return &execStream{stream: newStream(h, from, true, false), m: m, id: execID, info: info}, nil
}

// place is where a reader begins. Output is kept in the sandbox, and what has been taken
// from there in the hub.
func (m *Manager) place(rec *record, info runtime.ProcessInfo, from int64) (int64, error) {
	first, next := max(info.FirstSeq, 0), info.NextSeq
	m.mu.Lock()
	if h := rec.inside.hubs[info.ID]; h != nil {
		if f, n := h.bounds(); f >= 0 {
			first, next = min(first, f), max(next, n)
		}
	}
	m.mu.Unlock()
	switch {
	case from == -1:
		return first, nil
	case from < -1:
		return 0, &InvalidError{Field: "from", Message: "must be -1 or more"}
	case from < first, from > next:
		return 0, &GoneError{Message: fmt.Sprintf("output is kept from %d to %d", first, next), FirstSeq: first}
	}
	return from, nil
}

// SignalExec sends a signal to a command's process group. A *ProcessError in the
// FailedPrecondition class says that it has ended.
func (m *Manager) SignalExec(ctx context.Context, tenant, key, execID string, signal int) error {
	return m.signal(ctx, tenant, key, kindExec, execID, signal)
}

// KillExec kills a command with all its descendants. One that has ended is no error. If
// they can't be killed, the sandbox is removed.
func (m *Manager) KillExec(ctx context.Context, tenant, key, execID string) (Execution, error) {
	rec, info, err := m.find(ctx, tenant, key, kindExec, execID)
	if err != nil || !info.Running {
		return m.Execution(ctx, tenant, key, execID)
	}
	sb := m.snapshot(rec)
	if err := m.killOrEnd(ctx, rec, sb, info.ID); err != nil {
		return Execution{}, m.explain(ctx, rec, sb, execID, err)
	}
	if after, err := m.ask(ctx, sb, info.ID); err == nil {
		m.seen(rec, after)
		return m.execution(rec, after), nil
	}
	if l, ok := m.lastOf(rec, execID); ok {
		return l.execution, nil
	}
	info.Running, info.Killed, info.EndedAt = false, true, time.Now().UTC()
	return m.execution(rec, info), nil
}

// killOrEnd kills a process, or ends its sandbox if that fails.
func (m *Manager) killOrEnd(ctx context.Context, rec *record, sb Sandbox, proc string) error {
	err := m.kill(ctx, sb, proc)
	if errors.Is(err, runtime.ErrNotKilled) {
		return m.terminate(ctx, rec, sb)
	}
	return err
}

// ResizeExec sets the size of a command's terminal.
func (m *Manager) ResizeExec(ctx context.Context, tenant, key, execID string, rows, cols int) error {
	return m.resize(ctx, tenant, key, kindExec, execID, rows, cols)
}

// execution is a process as its caller knows it.
func (m *Manager) execution(rec *record, info runtime.ProcessInfo) Execution {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.executionLocked(rec, info)
}

func (m *Manager) executionLocked(rec *record, info runtime.ProcessInfo) Execution {
	_, id := kindOf(info.ID)
	e := Execution{
		ID: id, SessionID: rec.sb.SessionID, Backend: m.info.Backend, Path: runtime.PathAgent,
		Command: info.Command, TTY: info.TTY, Status: ExecRunning,
		StartedAt: info.StartedAt, Timeout: parseLabel(info.Label).timeout(),
		FirstSeq: info.FirstSeq, NextSeq: info.NextSeq, QuotaEnforcement: rec.sb.Enforcement.WorkspaceQuota,
	}
	if info.Running {
		return e
	}
	e.Status = statusOfEnd(info)
	e.Signal, e.EndedAt, e.CPUTime, e.PeakMemoryBytes = info.Signal, info.EndedAt, info.CPUTime, info.PeakMemoryBytes
	if e.Status == ExecCompleted {
		e.ExitCode = &info.ExitCode
	}
	return e
}

// statusOfEnd says how a process ended, as Exec would.
func statusOfEnd(info runtime.ProcessInfo) ExecStatus {
	switch {
	case info.TimedOut:
		return ExecTimedOut
	case info.OOMKilled:
		return ExecOOMKilled
	case info.Killed:
		return ExecKilled
	}
	return ExecCompleted
}

// execStream is an ExecStream.
type execStream struct {
	*stream
	m     *Manager
	id    string
	info  runtime.ProcessInfo // when it was attached to
	ended *Execution
}

// Next implements ExecStream.
func (s *execStream) Next() (runtime.Chunk, error) {
	if s.ended != nil {
		return runtime.Chunk{}, io.EOF
	}
	c, err := s.next()
	if err == nil {
		return c, nil
	}
	info, over, err := s.m.streamEnded(s.stream, s.id, s.info, err)
	if errors.Is(err, io.EOF) {
		e := s.m.execution(s.h.rec, info)
		if l, ok := s.m.lastOf(s.h.rec, s.id); ok {
			e = l.execution
		}
		e.QuotaExceeded = e.QuotaExceeded || over
		s.ended = &e
	}
	return runtime.Chunk{}, err
}

// Ended implements ExecStream.
func (s *execStream) Ended() Execution {
	if s.ended == nil {
		return s.m.execution(s.h.rec, s.info)
	}
	return *s.ended
}

// Close implements ExecStream.
func (s *execStream) Close() error {
	s.close()
	return nil
}
