package sandboxapi_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// tape is a command or process: its output, which can be played from anywhere, and its
// input.
type tape struct {
	mu      sync.Mutex
	changed chan struct{} // closed at the next change
	chunks  []runtime.Chunk
	first   int64 // what is not after it is gone
	last    int64
	end     error // after the last chunk; nil: it runs
	endless func(read int64) runtime.Chunk

	input   bytes.Buffer
	closed  bool // the input
	stuck   bool // it doesn't take input
	playing int  // streams that are open
	played  int64
	holder  *play // who is attached
}

func newTape() *tape { return &tape{changed: make(chan struct{})} }

// change does something, and tells those who wait.
func (t *tape) change(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *tape) print(stderr bool, text string) {
	t.change(func() {
		t.last += int64(len(text))
		t.chunks = append(t.chunks, runtime.Chunk{Seq: t.last, Stderr: stderr, Data: []byte(text)})
	})
}

func (t *tape) finish(err error) { t.change(func() { t.end = err }) }

// read looks at the tape's state.
func (t *tape) read(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
}

// play is one who follows a tape.
type play struct {
	t      *tape
	pos    int64
	quit   chan struct{}
	once   sync.Once
	ousted bool
	quiet  bool // takes no input
	buf    []byte
}

func (t *tape) play(from int64) (*play, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if from >= 0 && from < t.first {
		return nil, &lifecycle.GoneError{Message: "the output is kept from further on only", FirstSeq: t.first}
	}
	t.playing++
	return &play{t: t, pos: max(from, t.first), quit: make(chan struct{})}, nil
}

func (p *play) Next() (runtime.Chunk, error) {
	for {
		p.t.mu.Lock()
		changed := p.t.changed
		c, err, ok := p.next()
		p.t.mu.Unlock()
		select {
		case <-p.quit:
			return runtime.Chunk{}, net.ErrClosed
		default:
		}
		if ok {
			return c, err
		}
		select {
		case <-changed:
		case <-p.quit:
		}
	}
}

func (p *play) next() (runtime.Chunk, error, bool) { //nolint:revive // the last tells whether the others mean anything
	for i := range p.buf {
		p.buf[i] = 'X' // who has kept the last chunk's bytes will see
	}
	if p.ousted {
		return runtime.Chunk{}, errdefs.ErrAborted, true
	}
	if p.t.endless != nil {
		c := p.t.endless(p.t.played)
		if len(c.Data) == 0 {
			return c, io.EOF, true
		}
		p.t.played += int64(len(c.Data))
		c.Seq = p.t.played
		return c, nil, true
	}
	for _, c := range p.t.chunks {
		if c.Seq > p.pos {
			skip := int64(len(c.Data)) - (c.Seq - p.pos)
			p.pos = c.Seq
			p.buf = append(p.buf[:0], c.Data[skip:]...)
			c.Data = p.buf
			return c, nil, true
		}
	}
	return runtime.Chunk{}, p.t.end, p.t.end != nil
}

var errInputClosed = &lifecycle.ProcessError{ID: "job", Class: errdefs.ErrFailedPrecondition, Message: "its input is closed"}

func (p *play) Write(b []byte) (int, error) {
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	for p.t.stuck {
		changed := p.t.changed
		p.t.mu.Unlock()
		select {
		case <-changed:
		case <-p.quit:
			p.t.mu.Lock()
			return 0, net.ErrClosed
		}
		p.t.mu.Lock()
	}
	if p.t.closed || p.quiet {
		return 0, errInputClosed
	}
	return p.t.input.Write(b)
}

func (p *play) CloseWrite() error {
	p.t.change(func() { p.t.closed = true })
	return nil
}

func (p *play) Close() error {
	p.once.Do(func() {
		close(p.quit)
		p.t.change(func() {
			p.t.playing--
			if p.t.holder == p {
				p.t.holder = nil
			}
		})
	})
	return nil
}

// ended is a play of a process, and how that ends.
type ended struct {
	*play
	process lifecycle.Process
}

func (p ended) Ended() lifecycle.Process { return p.process }

// streams are the commands and processes of a scripted manager: one of each, which
// share a tape.
type streams struct {
	tape         *tape
	execution    lifecycle.Process
	ended        lifecycle.Process
	process      lifecycle.Process
	processEnded lifecycle.Process

	mu       sync.Mutex
	started  lifecycle.StartRequest
	asked    lifecycle.StartRequest // of a managed process
	signals  []int
	sizes    [][2]int
	killed   int
	attachAt int64
	waiting  int // calls that wait for an end
}

func newStreams() *streams {
	code := 0
	start := time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)
	s := &streams{
		tape: newTape(),
		execution: lifecycle.Process{
			ID: "job-1", SessionID: sessionID, Backend: "fake", Command: []string{"make"},
			Status: lifecycle.ExecRunning, StartedAt: start, Timeout: 30 * time.Second,
		},
		process: lifecycle.Process{ID: "tools", SessionID: sessionID, Command: []string{"a", "b"}, Status: lifecycle.ExecRunning, StartedAt: start},
	}
	s.ended, s.processEnded = s.execution, s.process
	s.ended.Status, s.ended.ExitCode, s.ended.EndedAt = lifecycle.ExecCompleted, &code, start.Add(1500*time.Millisecond)
	s.ended.CPUTime, s.ended.PeakMemoryBytes = 12*time.Millisecond, 4096
	s.processEnded.Status, s.processEnded.ExitCode, s.processEnded.EndedAt = lifecycle.ExecCompleted, &code, start.Add(time.Second)
	return s
}

// of returns the one of a kind, as it runs and as it ends.
func (s *streams) of(k lifecycle.Kind) (runs, ends lifecycle.Process) {
	if k == lifecycle.KindManaged {
		return s.process, s.processEnded
	}
	return s.execution, s.ended
}

// note remembers what was asked for.
func (s *streams) note(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *scripted) Start(_ context.Context, req lifecycle.StartRequest) (lifecycle.Process, lifecycle.Stream, error) {
	s.streams.note(func() {
		if req.Kind == lifecycle.KindManaged {
			s.streams.asked = req
		} else {
			s.streams.started = req
		}
	})
	_, err := s.outcome()
	if req.Kind != lifecycle.KindManaged {
		err = errors.Join(err, s.execErr)
	}
	p, end := s.streams.of(req.Kind)
	if err != nil || !req.Follow {
		return p, nil, err
	}
	f, err := s.streams.tape.play(-1)
	if err != nil {
		return p, nil, err
	}
	return p, ended{f, end}, nil
}

func (s *scripted) Process(_ context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error) {
	_, err := s.outcome()
	p, _ := s.streams.of(ref.Kind)
	return p, err
}

func (s *scripted) Processes(_ context.Context, ref lifecycle.ProcessRef) ([]lifecycle.Process, error) {
	_, err := s.outcome()
	p, _ := s.streams.of(ref.Kind)
	return []lifecycle.Process{p}, err
}

func (s *scripted) Follow(_ context.Context, ref lifecycle.ProcessRef, req lifecycle.FollowRequest) (lifecycle.Stream, error) {
	if _, err := s.outcome(); err != nil {
		return nil, err
	}
	t := s.streams.tape
	s.streams.note(func() { s.streams.attachAt = req.From })
	p, err := t.play(req.From)
	if err != nil {
		return nil, err
	}
	p.quiet = !req.Attach
	taken := false
	t.change(func() {
		switch {
		case !req.Attach || ref.Kind != lifecycle.KindManaged: // the tape is both's
			return
		case t.holder != nil && req.TakeOver:
			t.holder.ousted = true
		case t.holder != nil:
			taken = true
			return
		}
		t.holder = p
	})
	if taken {
		_ = p.Close()
		return nil, &lifecycle.ProcessError{ID: ref.ID, Class: errdefs.ErrAlreadyExists, Message: "somebody is attached"}
	}
	_, end := s.streams.of(ref.Kind)
	return ended{p, end}, nil
}

func (s *scripted) Write(ctx context.Context, _ lifecycle.ProcessRef, r io.Reader, end bool) error {
	if _, err := s.outcome(); err != nil {
		return err
	}
	p, err := s.streams.tape.play(-1)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = p.Close() })()
	defer func() { _ = p.Close() }()
	if _, err := io.Copy(struct{ io.Writer }{p}, r); err != nil {
		return err
	}
	if end {
		return p.CloseWrite()
	}
	return nil
}

func (s *scripted) Signal(_ context.Context, _ lifecycle.ProcessRef, signal int) error {
	s.streams.note(func() { s.streams.signals = append(s.streams.signals, signal) })
	_, err := s.outcome()
	return err
}

func (s *scripted) Resize(_ context.Context, _ lifecycle.ProcessRef, rows, cols int) error {
	s.streams.note(func() { s.streams.sizes = append(s.streams.sizes, [2]int{rows, cols}) })
	_, err := s.outcome()
	return err
}

func (s *scripted) Kill(_ context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error) {
	s.streams.note(func() { s.streams.killed++ })
	_, err := s.outcome()
	p, _ := s.streams.of(ref.Kind)
	return p, err
}

func (s *scripted) Stop(_ context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error) {
	_, err := s.outcome()
	_, p := s.streams.of(ref.Kind)
	return p, err
}

func (s *scripted) Wait(ctx context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error) {
	if _, err := s.outcome(); err != nil {
		return lifecycle.Process{}, err
	}
	s.streams.note(func() { s.streams.waiting++ })
	defer s.streams.note(func() { s.streams.waiting-- })
	t := s.streams.tape
	for {
		var changed chan struct{}
		over := false
		t.read(func() { changed, over = t.changed, t.end != nil })
		if over {
			_, p := s.streams.of(ref.Kind)
			return p, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return lifecycle.Process{}, ctx.Err()
		}
	}
}

var (
	must       = check.Must // ends a test if a step of its own fails
	eventually = check.Eventually
)
