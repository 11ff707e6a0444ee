package runtimetest

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// outputRing keeps the last of a process' output.
type outputRing struct {
	most  int
	parts []outputPart // oldest first
	bytes int
	next  int64
}

type outputPart struct {
	stderr bool
	data   []byte
}

func (r *outputRing) first() int64 { return r.next - int64(r.bytes) }

func (r *outputRing) add(stderr bool, data []byte) {
	r.next += int64(len(data))
	r.bytes += len(data)
	r.parts = append(r.parts, outputPart{stderr, append([]byte(nil), data...)})
	for over := r.bytes - r.most; over > 0; over = r.bytes - r.most {
		drop := min(over, len(r.parts[0].data))
		r.parts[0].data = r.parts[0].data[drop:]
		r.bytes -= drop
		if len(r.parts[0].data) == 0 {
			r.parts = r.parts[1:]
		}
	}
}

// after gives what follows a place that isn't before the first; no data if nothing does.
func (r *outputRing) after(seq int64) runtime.Chunk {
	at := r.first()
	for _, part := range r.parts {
		end := at + int64(len(part.data))
		if seq < end {
			return runtime.Chunk{Seq: end, Stderr: part.stderr, Data: append([]byte(nil), part.data[seq-at:]...)}
		}
		at = end
	}
	return runtime.Chunk{}
}

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
		if p.attached != nil {
			room = min(room, p.out.most-int(p.out.next-p.attached.at))
		}
		if room <= 0 {
			p.wait(p.ctx)
			continue
		}
		part := b[written:min(len(b), written+room)]
		p.out.add(o.stderr, part)
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

// fakeAttachment is a runtime.Attachment. Its fields belong to f.mu.
type fakeAttachment struct {
	p    *fakeProcess
	ctx  context.Context // ends when it is closed, or another took over
	end  context.CancelCauseFunc
	down <-chan struct{} // closed when the engine goes down
	at   int64
	info runtime.ProcessInfo // set once Next has said io.EOF
}

var (
	errTaken  = fmt.Errorf("another has attached to the process: %w", errdefs.ErrAborted)
	errClosed = fmt.Errorf("the attachment is closed: %w", errdefs.ErrFailedPrecondition)
)

// Attach implements runtime.Processes.
func (f *Fake) Attach(ctx context.Context, id, process string, from int64) (runtime.Attachment, error) {
	if from < -1 {
		return nil, runtime.Invalid("output after %d", from)
	}
	_, p, err := f.process(ctx, "process_attach", id, process)
	if err != nil {
		return nil, err
	}
	if from == -1 {
		from = p.out.first()
	}
	if from < p.out.first() || from > p.out.next {
		err = fmt.Errorf("output of process %q after %d: %d to %d are kept: %w", process, from, p.out.first(), p.out.next, errdefs.ErrOutOfRange)
		f.mu.Unlock()
		return nil, err
	}
	a := p.attach(f.down, from)
	f.mu.Unlock()
	if err := f.after("process_attach", id); err != nil {
		_ = a.Close()
		return nil, err
	}
	return a, nil
}

// attach takes a process over; f.mu is held.
func (p *fakeProcess) attach(down <-chan struct{}, at int64) *fakeAttachment {
	a := &fakeAttachment{p: p, down: down, at: at}
	a.ctx, a.end = context.WithCancelCause(context.Background())
	if old := p.attached; old != nil {
		old.end(errTaken)
	}
	p.attached = a
	p.notify()
	return a
}

// over is why an attachment is of no use any more; f.mu is held.
func (a *fakeAttachment) over() error {
	switch {
	case a.ctx.Err() != nil:
		return context.Cause(a.ctx)
	case a.p.gone != nil:
		return fmt.Errorf("process %q: %w", a.p.spec.ID, a.p.gone)
	case isClosed(a.down):
		return fmt.Errorf("process %q: %w", a.p.spec.ID, errDown)
	}
	return nil
}

// wait waits for something to change; f.mu is held, but not meanwhile.
func (a *fakeAttachment) wait() {
	changed := a.p.changed
	a.p.f.mu.Unlock()
	select {
	case <-changed:
	case <-a.ctx.Done():
	case <-a.down:
	}
	a.p.f.mu.Lock()
}

// Next implements runtime.Attachment.
func (a *fakeAttachment) Next() (runtime.Chunk, error) {
	p := a.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	for {
		if err := a.over(); err != nil {
			return runtime.Chunk{}, err
		}
		if chunk := p.out.after(a.at); len(chunk.Data) > 0 {
			a.at = chunk.Seq
			p.notify()
			return chunk, nil
		}
		if !p.info.Running {
			a.info = p.tell()
			return runtime.Chunk{}, io.EOF
		}
		a.wait()
	}
}

// Info implements runtime.Attachment.
func (a *fakeAttachment) Info() runtime.ProcessInfo {
	a.p.f.mu.Lock()
	defer a.p.f.mu.Unlock()
	return a.info
}

// Write implements runtime.Attachment.
func (a *fakeAttachment) Write(b []byte) (int, error) {
	p := a.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	written := 0
	for written < len(b) {
		if err := a.over(); err != nil {
			return written, err
		}
		if p.inEnded {
			return written, fmt.Errorf("process %q takes no input: %w", p.spec.ID, errdefs.ErrFailedPrecondition)
		}
		room := min(fakeInput-len(p.in), len(b)-written)
		if room <= 0 {
			a.wait()
			continue
		}
		p.in = append(p.in, b[written:written+room]...)
		written += room
		p.notify()
	}
	return written, nil
}

// CloseWrite implements runtime.Attachment.
func (a *fakeAttachment) CloseWrite() error {
	p := a.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	if err := a.over(); err != nil {
		return err
	}
	p.inEnded = true
	p.notify()
	return nil
}

// Close implements runtime.Attachment.
func (a *fakeAttachment) Close() error {
	p := a.p
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	a.end(errClosed)
	if p.attached == a {
		p.attached = nil
		p.notify()
	}
	return nil
}
