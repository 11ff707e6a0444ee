package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Bounds of processes.
const (
	maxListed   = 1024
	maxCommand  = 4 << 10 // of what is told of one: its bytes, and a separator for each argument
	maxLabel    = 1 << 10
	maxKeep     = 4 << 20
	maxTerminal = math.MaxUint16
	maxSignal   = 64
)

var processPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$`)

func validateProcess(p runtime.Process) error {
	switch {
	case !processPattern.MatchString(p.ID) || strings.HasPrefix(p.ID, runPrefix):
		return runtime.Invalid("the process ID %.200q isn't of the form [A-Za-z0-9][A-Za-z0-9_.:-]{0,127}, or begins with %q", p.ID, runPrefix)
	case len(p.Label) > maxLabel:
		return runtime.Invalid("the process' label has %d bytes, and may have %d", len(p.Label), maxLabel)
	case len(p.Command) == 0:
		return runtime.Invalid("the command is empty")
	case p.WorkingDir != "" && !path.IsAbs(p.WorkingDir):
		return runtime.Invalid("the working directory %q is not absolute", p.WorkingDir)
	case p.Timeout < 0 || p.KeepBytes < 0 || p.KeepBytes > maxKeep:
		return runtime.Invalid("a timeout of %s and %d bytes of output: neither may be negative, nor the output more than %d", p.Timeout, p.KeepBytes, maxKeep)
	}
	if err := validateSize(p.Rows, p.Cols); err != nil {
		return err
	}
	return validateText(slices.Concat(p.Command, p.Env, []string{p.WorkingDir, p.Label}))
}

func validateSize(rows, cols int) error {
	if rows < 0 || rows > maxTerminal || cols < 0 || cols > maxTerminal {
		return runtime.Invalid("a terminal of %d rows and %d columns: each can be 0 to %d", rows, cols, maxTerminal)
	}
	return nil
}

func wireStart(p runtime.Process) *wire.Start {
	start := &wire.Start{
		ID: p.ID, Label: p.Label, Command: p.Command, Env: p.Env, Dir: p.WorkingDir, Stdin: p.Stdin,
		TTY: p.TTY, Rows: p.Rows, Cols: p.Cols, Hold: p.Hold, Once: p.Once, KeepBytes: p.KeepBytes,
	}
	if p.Timeout > 0 {
		start.TimeoutMS = max(p.Timeout.Milliseconds(), 1)
	}
	return start
}

// plausible reports whether what the program says of a process can be true. Every number
// that it lets through is bounded.
func plausible(p *wire.ProcessInfo) bool {
	size := 0
	for _, arg := range p.Command {
		size += len(arg) + 1
	}
	return size <= maxCommand+1 && p.ExitCode >= 0 && p.ExitCode <= 255 && p.Signal >= 0 && p.Signal <= maxSignal && len(p.Label) <= maxLabel &&
		bounded(p.CPUTime, p.PeakMemoryBytes, p.FirstSeq, p.NextSeq) && p.FirstSeq <= p.NextSeq && p.StartedAt >= 0 && p.EndedAt >= 0
}

// bounded reports whether numbers are from 0 to wire.MaxNumber.
func bounded(numbers ...int64) bool {
	return !slices.ContainsFunc(numbers, func(n int64) bool { return n < 0 || n > wire.MaxNumber })
}

// parseProcess reads what is said of the process of that ID; empty is of any.
func parseProcess(payload []byte, id string) (runtime.ProcessInfo, error) {
	var p wire.ProcessInfo
	if err := wire.Decode(payload, &p); err != nil {
		return runtime.ProcessInfo{}, err
	}
	return processInfo(&p, id)
}

func processInfo(p *wire.ProcessInfo, id string) (runtime.ProcessInfo, error) {
	if !plausible(p) || id != "" && p.ID != id || !processPattern.MatchString(p.ID) {
		return runtime.ProcessInfo{}, fmt.Errorf("%w: what a process is", wire.ErrProtocol)
	}
	return runtime.ProcessInfo{
		ID: p.ID, Label: p.Label, Command: p.Command, Running: p.Running, TTY: p.TTY,
		StartedAt: fromNanoseconds(p.StartedAt), EndedAt: fromNanoseconds(p.EndedAt),
		ExitCode: p.ExitCode, Signal: p.Signal, TimedOut: p.TimedOut, Killed: p.Killed, OOMKilled: p.OOMKilled, NotKilled: p.NotKilled,
		CPUTime: time.Duration(p.CPUTime), PeakMemoryBytes: p.PeakMemoryBytes, FirstSeq: p.FirstSeq, NextSeq: p.NextSeq,
	}, nil
}

func fromNanoseconds(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

// about is an operation on a process: it says what failed.
func about(what, id, process string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s process %q in container %s: %w", what, process, id, err)
}

// errNoProcess is for a process that nobody knows.
var errNoProcess = runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such process"))

// owner gives the served session of a process, with a use of it; nil if it isn't of any.
func (b *container) owner(process string) *session {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.owners[process]
	if s != nil {
		b.useLocked(s)
	}
	return s
}

// reach begins an operation on a process, which only the program that started it knows.
func (r *Runtime) reach(ctx context.Context, id string, req *wire.Request) (*call, error) {
	if ctx.Err() != nil {
		return nil, runtime.Ended(ctx)
	}
	b, err := r.container(ctx, id)
	if err != nil {
		return nil, err
	}
	request, err := encode(req)
	if err != nil {
		return nil, err
	}
	if s := b.owner(req.Process.ID); s != nil {
		x, err := b.begin(ctx, id, s, request)
		if errors.Is(err, errDead) || errors.Is(err, errSilent) {
			return nil, b.lost(ctx, s, err)
		}
		return x, classed(err)
	}
	if b.socketless() {
		return nil, errNoProcess
	}
	x, err := b.start(ctx, id, request, b.take)
	if errors.Is(err, errAbsent) {
		if why := b.excuse(ctx); why != nil {
			return nil, why
		}
	}
	return x, classed(err)
}

// lost waits until nothing of a session runs that has ended, or whose program is silent. The
// error says what became of its processes.
func (b *container) lost(ctx context.Context, s *session, err error) error {
	if errors.Is(err, errSilent) && !b.runs(ctx) {
		if why := b.excuse(ctx); why != nil { // it is paused
			return why
		}
		return errLost // it was
	}
	if why := s.fail(); why != nil {
		return notKilled(interrupted("out of reach"), why)
	}
	return errVanished
}

// errVanished is for a process whose session has ended, and nothing of which runs.
var errVanished = interrupted("lost")

// Start starts a process. Below a program that the engine started, it ends with this Runtime.
func (r *Runtime) Start(ctx context.Context, id string, p runtime.Process) (runtime.ProcessInfo, error) {
	info, err := r.start(ctx, id, p)
	return info, about("start", id, p.ID, err)
}

func (r *Runtime) start(ctx context.Context, id string, p runtime.Process) (runtime.ProcessInfo, error) {
	if err := validateProcess(p); err != nil {
		return runtime.ProcessInfo{}, err
	}
	if ctx.Err() != nil {
		return runtime.ProcessInfo{}, runtime.Ended(ctx)
	}
	b, err := r.container(ctx, id)
	if err != nil {
		return runtime.ProcessInfo{}, err
	}
	unlock, err := r.naming.Lock(ctx, servedKey{id, p.ID})
	if err != nil {
		return runtime.ProcessInfo{}, runtime.Ended(ctx)
	}
	defer unlock()
	if p.User != "" || b.hasServed() { // else the program refuses an ID that it knows
		switch _, err := r.Process(ctx, id, p.ID); {
		case err == nil:
			return runtime.ProcessInfo{}, runtime.WithClass(errdefs.ErrAlreadyExists, errors.New("there is one of this ID; forget it first"))
		case !errdefs.IsNotFound(err):
			return runtime.ProcessInfo{}, err
		}
	}
	x, err := b.open(ctx, id, p.User, &wire.Request{Op: wire.OpStart, Start: wireStart(p)}, false)
	if err != nil {
		return runtime.ProcessInfo{}, err
	}
	s := x.s
	b.own(s, p.ID)
	info, err := x.process(p.ID)
	if err != nil {
		b.disown(p.ID)
	}
	return info, err
}

// own notes that a process is of a session, if that is a served one.
func (b *container) own(s *session, process string) {
	if s.served == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.owners[process] = s
	s.served.processes++
}

// disown forgets whose a process is.
func (b *container) disown(process string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.owners[process]; s != nil {
		delete(b.owners, process)
		s.served.processes--
		s.lingerLocked()
	}
}

// process waits for a Result that is a ProcessInfo.
func (x *call) process(id string) (runtime.ProcessInfo, error) {
	x.within(time.Now().Add(x.b.r.pace.answer))
	kind, payload, err := x.next()
	if err != nil {
		return runtime.ProcessInfo{}, err
	}
	if kind != wire.KindResult {
		return runtime.ProcessInfo{}, x.unexpected("something else than a result")
	}
	info, err := parseProcess(payload, id)
	if err != nil {
		return runtime.ProcessInfo{}, x.unexpected(err.Error())
	}
	x.done()
	return info, nil
}

// Process tells of a process.
func (r *Runtime) Process(ctx context.Context, id, process string) (runtime.ProcessInfo, error) {
	x, err := r.reach(ctx, id, &wire.Request{Op: wire.OpProcess, Process: &wire.Process{ID: process}})
	var info runtime.ProcessInfo
	if err == nil {
		info, err = x.process(process)
	}
	return info, about("look at", id, process, err)
}

// ListProcesses tells of all processes.
func (r *Runtime) ListProcesses(ctx context.Context, id string) ([]runtime.ProcessInfo, error) {
	out, err := r.list(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("list the processes of container %s: %w", id, err)
	}
	slices.SortStableFunc(out, func(a, b runtime.ProcessInfo) int { return a.StartedAt.Compare(b.StartedAt) })
	return out, nil
}

func (r *Runtime) list(ctx context.Context, id string) (out []runtime.ProcessInfo, err error) {
	if ctx.Err() != nil {
		return nil, runtime.Ended(ctx)
	}
	b, err := r.container(ctx, id)
	if err != nil {
		return nil, err
	}
	request, err := encode(&wire.Request{Op: wire.OpList})
	if err != nil {
		return nil, err
	}
	collect := func(x *call) error {
		x.within(time.Now().Add(r.pace.answer))
		s := x.s
		return x.items(maxListed, func(payload []byte) error {
			info, err := parseProcess(payload, "")
			if err == nil && !strings.HasPrefix(info.ID, runPrefix) && b.lists(s, info.ID) {
				out = append(out, info)
			}
			return err
		})
	}
	if !b.socketless() {
		x, err := b.start(ctx, id, request, b.take)
		if errors.Is(err, errAbsent) {
			if why := b.excuse(ctx); why != nil {
				return nil, why
			}
		}
		if err == nil {
			err = collect(x)
		}
		if err != nil {
			return nil, classed(err)
		}
	}
	serving := b.serving()
	for i, s := range serving {
		x, err := b.begin(ctx, id, s, request)
		if err == nil {
			err = collect(x)
		}
		// One that has ended has no processes any more.
		if err != nil && !errors.Is(err, errDead) && !s.mux.IsClosed() {
			for _, s := range serving[i+1:] {
				s.release()
			}
			return nil, classed(err)
		}
	}
	return out, nil
}

// lists reports whether a process can be of a session.
func (b *container) lists(s *session, process string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	owner := b.owners[process]
	return owner == s || owner == nil && s.served == nil
}

// serving gives the served sessions that have processes, with a use of each.
func (b *container) serving() (out []*session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.served {
		if s.served.processes > 0 {
			b.useLocked(s)
			out = append(out, s)
		}
	}
	return out
}

// hasServed reports whether there is any process of a served session.
func (b *container) hasServed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.owners) > 0
}

// control is an operation on a process that has no answer.
func (r *Runtime) control(ctx context.Context, what, id string, req *wire.Request, within time.Duration) error {
	x, err := r.reach(ctx, id, req)
	if err == nil {
		x.within(time.Now().Add(within))
		err = x.result(nil)
	}
	return about(what, id, req.Process.ID, err)
}

// Signal sends a signal to a process' group.
func (r *Runtime) Signal(ctx context.Context, id, process string, signal int) error {
	if signal < 1 || signal > maxSignal {
		return about("signal", id, process, runtime.Invalid("there is no signal %d: 1 to %d are", signal, maxSignal))
	}
	req := &wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: process, Signal: signal}}
	return r.control(ctx, "signal", id, req, r.pace.answer)
}

// Kill kills a process with all its descendants.
func (r *Runtime) Kill(ctx context.Context, id, process string) error {
	x, err := r.reach(ctx, id, &wire.Request{Op: wire.OpKill, Process: &wire.Process{ID: process}})
	if err == nil {
		x.within(time.Now().Add(r.pace.answer))
		if err = x.result(nil); x.s.served != nil && errors.Is(err, runtime.ErrInterrupted) {
			err = x.b.lost(ctx, x.s, err)
		}
	}
	if errors.Is(err, errVanished) {
		err = nil
	}
	return about("kill", id, process, err)
}

// Resize sets the size of a process' terminal.
func (r *Runtime) Resize(ctx context.Context, id, process string, rows, cols int) error {
	if err := validateSize(rows, cols); err != nil {
		return about("resize the terminal of", id, process, err)
	}
	req := &wire.Request{Op: wire.OpResize, Process: &wire.Process{ID: process, Rows: rows, Cols: cols}}
	return r.control(ctx, "resize the terminal of", id, req, r.pace.answer)
}

// Forget drops what is kept of a process that has ended.
func (r *Runtime) Forget(ctx context.Context, id, process string) error {
	err := r.control(ctx, "forget", id, &wire.Request{Op: wire.OpForget, Process: &wire.Process{ID: process}}, r.pace.answer)
	if errdefs.IsNotFound(err) && errors.Is(err, errNoProcess) {
		return nil
	}
	if b := r.known(id); b != nil && err == nil {
		b.disown(process)
	}
	return err
}

// Attach takes a process over, from a place in its output on. Its context is for that
// alone: the attachment lasts until it is closed, and outlives a connection that breaks.
func (r *Runtime) Attach(ctx context.Context, id, process string, from int64) (runtime.Attachment, error) {
	a, err := r.attach(ctx, id, process, from)
	if err != nil {
		return nil, about("attach to", id, process, err)
	}
	return a, nil
}

func (r *Runtime) attach(ctx context.Context, id, process string, from int64) (runtime.Attachment, error) {
	if from < -1 {
		return nil, runtime.Invalid("output can't be had from %d on: 0 is the beginning, and -1 all that there is", from)
	}
	x, err := r.reach(ctx, id, &wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: process, From: from}})
	if err != nil {
		return nil, err
	}
	if !x.release() {
		x.drop()
		return nil, runtime.Ended(ctx)
	}
	a := &attachment{r: r, id: id, process: process, seq: from}
	a.ctx, a.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	a.x.Store(x.under(a.ctx))
	return a, nil
}

// attachment is one to a process that the program knows.
type attachment struct {
	r           *Runtime
	id, process string
	ctx         context.Context // ends with Close
	cancel      context.CancelCauseFunc
	x           atomic.Pointer[call]
	writing     sync.Mutex

	// Of Next alone.
	seq  int64 // -1 before the first output of all that there is
	info runtime.ProcessInfo
	err  error
}

var errDetached = errors.New("the attachment was closed")

func (a *attachment) Next() (runtime.Chunk, error) {
	for a.err == nil {
		x := a.x.Load()
		kind, payload, err := x.r.Next()
		switch {
		case err == nil && kind == wire.KindOutput:
			o, perr := wire.ParseOutput(payload)
			if perr == nil && len(o.Data) == 0 {
				continue
			}
			if perr == nil && (a.seq == -1 || o.Seq-int64(len(o.Data)) == a.seq) {
				a.seq = o.Seq
				return runtime.Chunk{Seq: o.Seq, Stderr: o.Stderr, Data: o.Data}, nil
			}
			err = fmt.Errorf("%w: output of another place than %d", wire.ErrProtocol, a.seq)
		case err == nil && kind == wire.KindResult:
			if a.info, err = parseProcess(payload, a.process); err == nil && !a.info.Running {
				a.err = io.EOF
				x.drop()
				continue
			}
			err = fmt.Errorf("%w: the end of a process that runs", wire.ErrProtocol)
		case err == nil && kind == wire.KindFailure:
			var f *wire.Failure
			if f, err = parseFailure(payload); err == nil {
				a.err = about("follow", a.id, a.process, failed(f))
				x.drop()
				continue
			}
		case err == nil:
			err = fmt.Errorf("%w: a frame of kind %d", wire.ErrProtocol, kind)
		}
		x.drop()
		a.err = a.again(x, err)
	}
	return runtime.Chunk{}, a.err
}

// again attaches once more after the connection broke.
func (a *attachment) again(x *call, err error) error {
	if a.ctx.Err() != nil {
		return errDetached
	}
	if errors.Is(err, wire.ErrProtocol) {
		return about("follow", a.id, a.process, x.broken(err))
	}
	if x.s.served != nil {
		return about("follow", a.id, a.process, x.b.lost(a.ctx, x.s, err))
	}
	next, err := x.b.rejoin(a.ctx, a.id, a.process, a.seq, x.s.pid)
	var refusal *wire.Failure
	switch {
	case errors.As(err, &refusal):
		err = failed(refusal)
	case errors.Is(err, errAbsent):
		err = errLost
	case a.ctx.Err() != nil:
		if next != nil {
			next.drop()
		}
		return errDetached
	}
	if err != nil {
		return about("follow", a.id, a.process, err)
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	a.x.Store(next)
	if a.ctx.Err() != nil { // closed meanwhile, with the one before
		next.drop()
		return errDetached
	}
	return nil
}

func (a *attachment) Info() runtime.ProcessInfo { return a.info }

// Write sends input. What was on its way when the connection broke may be lost.
func (a *attachment) Write(p []byte) (int, error) {
	a.writing.Lock()
	x := a.x.Load()
	a.writing.Unlock()
	n, err := x.input(p)
	if err != nil {
		err = about("write to", a.id, a.process, runtime.Precondition("%w", err))
	}
	return n, err
}

func (a *attachment) CloseWrite() error {
	a.writing.Lock()
	x := a.x.Load()
	a.writing.Unlock()
	if err := x.w.Send(wire.KindEnd); err != nil {
		return about("close the input of", a.id, a.process, runtime.Precondition("%w", err))
	}
	return nil
}

func (a *attachment) Close() error {
	a.cancel(errDetached)
	a.x.Load().drop()
	return nil
}
