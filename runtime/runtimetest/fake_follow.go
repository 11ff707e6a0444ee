package runtimetest

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// fakeOutputOf is what a process prints to.
type fakeOutputOf struct {
	p      *fakeProcess
	stderr bool
}

func (o fakeOutputOf) Write(b []byte) (int, error) {
	p := o.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	written := 0
	for written < len(b) {
		if p.ctx.Err() != nil {
			return written, context.Cause(p.ctx)
		}
		room := fakeChunk
		for w := range p.followers {
			if w.how.Lossless {
				room = min(room, p.out.Room(o.stderr, w.at))
			}
		}
		if room <= 0 {
			p.wait(p.ctx)
			continue
		}
		part := b[written:min(len(b), written+room)]
		p.out.Add(o.stderr, part)
		written += len(part)
		p.notify()
	}
	return written, nil
}

// wait waits for something to change about the process, or for ctx; f.mu is held, but
// not meanwhile.
func (p *fakeProcess) wait(ctx context.Context) {
	changed := p.changed
	p.f.mu.Unlock()
	select {
	case <-changed:
	case <-ctx.Done():
	}
	p.f.mu.Lock()
}

// fakeInputOf is what a process reads from.
type fakeInputOf struct{ p *fakeProcess }

func (i fakeInputOf) Read(b []byte) (int, error) {
	p := i.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	for len(p.in) == 0 {
		if p.inEnded || p.ctx.Err() != nil {
			return 0, io.EOF
		}
		p.wait(p.ctx)
	}
	n := copy(b, p.in)
	p.in = p.in[n:]
	p.notify()
	return n, nil
}

// fakeFollower is a runtime.Follower. Its fields belong to f.mu.
type fakeFollower struct {
	p    *fakeProcess
	ctx  context.Context // ends when it is closed, or its output has ended
	end  context.CancelCauseFunc
	how  runtime.Follow
	at   int64
	buf  []byte
	info runtime.ProcessInfo // set once Next has returned io.EOF
}

const fakeFollowers = 64 // of a process, at most

var (
	errTaken  = fmt.Errorf("another follower took the process over: %w", errdefs.ErrAborted)
	errClosed = fmt.Errorf("it is closed: %w", errdefs.ErrFailedPrecondition)
)

// Follow implements runtime.Processes.
func (f *Fake) Follow(ctx context.Context, id, process string, how runtime.Follow) (runtime.Follower, error) {
	if how.From < runtime.FromFirst {
		return nil, runtime.Invalid("output after %d", how.From)
	}
	return with(ctx, f, "process_follow", id, process, func(p *fakeProcess) (runtime.Follower, error) {
		w, err := p.follow(how)
		if err != nil {
			err = fmt.Errorf("follow process %q in %s: %w", process, id, err)
		}
		return w, err
	})
}

// follow adds a follower; f.mu is held.
func (p *fakeProcess) follow(how runtime.Follow) (*fakeFollower, error) {
	first, next := p.out.Bounds()
	if how.From == runtime.FromFirst {
		how.From = first
	}
	how.Exclusive = how.Exclusive || how.TakeOver
	if how.From < first || how.From > next {
		return nil, fmt.Errorf("output after %d: %d to %d are kept: %w", how.From, first, next, errdefs.ErrOutOfRange)
	}
	for other := range p.followers {
		if how.Exclusive && other.how.Exclusive {
			if !how.TakeOver {
				return nil, fmt.Errorf("it has an exclusive follower: %w", errdefs.ErrAlreadyExists)
			}
			other.leave(errTaken)
		}
	}
	if len(p.followers) >= fakeFollowers {
		return nil, fmt.Errorf("it has %d followers: %w", len(p.followers), errdefs.ErrResourceExhausted)
	}
	w := &fakeFollower{p: p, how: how, at: how.From}
	w.ctx, w.end = context.WithCancelCause(context.Background())
	p.followers[w] = true
	p.notify()
	return w, nil
}

// leave ends it with the error that Next returns from now on; f.mu is held.
func (w *fakeFollower) leave(err error) {
	delete(w.p.followers, w)
	w.end(err)
	w.p.notify()
}

// Next implements runtime.Follower.
func (w *fakeFollower) Next() (runtime.Chunk, error) {
	p := w.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	for {
		if w.ctx.Err() != nil {
			return runtime.Chunk{}, context.Cause(w.ctx)
		}
		if w.buf == nil {
			w.buf = make([]byte, fakeChunk)
		}
		o, kept := p.out.Read(w.at, w.buf)
		switch {
		case !kept:
			w.leave(fmt.Errorf("output after %d isn't kept any more: %w", w.at, errdefs.ErrOutOfRange))
		case len(o.Data) > 0:
			w.at = o.Seq
			p.notify()
			return runtime.Chunk{Seq: o.Seq, Stderr: o.Stderr, Data: o.Data}, nil
		case !p.info.Running:
			w.info = p.tell()
			w.leave(io.EOF)
			if p.spec.Once && len(p.followers) == 0 {
				p.out.Clear()
			}
		default:
			p.wait(w.ctx)
		}
	}
}

// Info implements runtime.Follower.
func (w *fakeFollower) Info() runtime.ProcessInfo {
	w.p.f.mu.Lock()
	defer w.p.f.mu.Unlock()
	return w.info
}

// Close implements runtime.Follower.
func (w *fakeFollower) Close() error {
	w.p.f.mu.Lock()
	defer w.p.f.mu.Unlock()
	w.leave(errClosed)
	return nil
}

// fakeInput is a runtime.Input.
type fakeInput struct {
	p   *fakeProcess
	ctx context.Context // ends when it is closed, or its process has ended
	end context.CancelCauseFunc
}

// Input implements runtime.Processes.
func (f *Fake) Input(ctx context.Context, id, process string) (runtime.Input, error) {
	return with(ctx, f, "process_input", id, process, func(p *fakeProcess) (runtime.Input, error) {
		switch {
		case p.inEnded:
			return nil, p.noInput()
		case p.writer != nil:
			return nil, fmt.Errorf("process %q in %s has a writer: %w", process, id, errdefs.ErrAlreadyExists)
		}
		in := &fakeInput{p: p}
		in.ctx, in.end = context.WithCancelCause(context.Background())
		p.writer = in
		return in, nil
	})
}

func (p *fakeProcess) noInput() error {
	return fmt.Errorf("process %q takes no input: %w", p.spec.ID, errdefs.ErrFailedPrecondition)
}

// Write implements runtime.Input.
func (in *fakeInput) Write(b []byte) (int, error) {
	p := in.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	written := 0
	for written < len(b) {
		if in.ctx.Err() != nil {
			return written, context.Cause(in.ctx)
		}
		if p.inEnded {
			return written, p.noInput()
		}
		room := min(fakeInputSize-len(p.in), len(b)-written)
		if room <= 0 {
			p.wait(in.ctx)
			continue
		}
		p.in = append(p.in, b[written:written+room]...)
		written += room
		p.notify()
	}
	return written, nil
}

// CloseWrite implements runtime.Input.
func (in *fakeInput) CloseWrite() error {
	p := in.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	if in.ctx.Err() != nil {
		return context.Cause(in.ctx)
	}
	p.inEnded = true
	p.notify()
	return nil
}

// Close implements runtime.Input.
func (in *fakeInput) Close() error {
	in.p.f.mu.Lock()
	defer in.p.f.mu.Unlock()
	in.leave(errClosed)
	return nil
}

// leave ends it with an error; f.mu is held.
func (in *fakeInput) leave(err error) {
	in.end(err)
	if in.p.writer == in {
		in.p.writer = nil
	}
}

// fakeEvents is a runtime.Events. Its fields belong to f.mu.
type fakeEvents struct {
	f       *Fake
	c       *fakeContainer
	ctx     context.Context // ends when it is closed
	end     context.CancelCauseFunc
	begun   bool // Next has returned all
	changed map[*fakeProcess]bool
	wake    chan struct{} // has room for one
}

// Events implements runtime.Processes.
func (f *Fake) Events(ctx context.Context, id string) (runtime.Events, error) {
	return inside(ctx, f, "process_events", id, func(c *fakeContainer) (runtime.Events, error) {
		e := &fakeEvents{f: f, c: c, changed: map[*fakeProcess]bool{}, wake: make(chan struct{}, 1)}
		e.ctx, e.end = context.WithCancelCause(context.Background())
		if c.events == nil {
			c.events = map[*fakeEvents]bool{}
		}
		c.events[e] = true
		return e, nil
	})
}

// tellOf tells those who follow the processes of one that has started or ended; f.mu is
// held.
func (c *fakeContainer) tellOf(p *fakeProcess) {
	for e := range c.events {
		e.changed[p] = true
		select {
		case e.wake <- struct{}{}:
		default:
		}
	}
}

// Next implements runtime.Events.
func (e *fakeEvents) Next() ([]runtime.ProcessInfo, error) {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	for {
		if e.ctx.Err() != nil {
			return nil, context.Cause(e.ctx)
		}
		out := []runtime.ProcessInfo{}
		for _, p := range e.c.processes {
			if !e.begun || e.changed[p] {
				out = append(out, p.tell())
			}
		}
		clear(e.changed)
		if !e.begun || len(out) > 0 {
			e.begun = true
			return out, nil
		}
		e.f.mu.Unlock()
		select {
		case <-e.wake:
		case <-e.ctx.Done():
		}
		e.f.mu.Lock()
	}
}

// Close implements runtime.Events.
func (e *fakeEvents) Close() error {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	e.leave(errClosed)
	return nil
}

func (e *fakeEvents) leave(err error) {
	delete(e.c.events, e)
	e.end(err)
}

// leaveProcesses ends all that follows a container's processes, and writes to them; f.mu
// is held.
func (c *fakeContainer) leaveProcesses(err error) {
	for _, p := range c.processes {
		for w := range p.followers {
			w.leave(fmt.Errorf("follow process %q: %w", p.spec.ID, err))
		}
		if p.writer != nil {
			p.writer.leave(fmt.Errorf("write to process %q: %w", p.spec.ID, err))
		}
	}
	for e := range c.events {
		e.leave(fmt.Errorf("follow processes: %w", err))
	}
}
