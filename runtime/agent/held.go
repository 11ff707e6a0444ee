package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	maxHeld   = 64 // processes of a container
	usualKeep = 64 << 10
	holdFor   = 5 * time.Second // that output waits for the first attachment
)

// holding are a container's processes whose connection is here, by ID.
type holding struct {
	mu     sync.Mutex
	m      map[string]*held
	closed bool // with the box
}

// held is a process that runs below a program which the engine started. All that is
// known of it is here.
type held struct {
	b *box
	x *call // of which only the input is used by others than pump: by feed

	mu       sync.Mutex
	changed  sync.Cond
	about    runtime.ProcessInfo
	ring     *wire.Ring
	keep     int64
	attached *heldAttachment // nil while nobody is
	killed   bool
	err      error // how it was lost, in place of an end

	input  []byte // written, and not yet sent; MaxData bytes at most
	ended  bool   // no more is to come
	closed bool   // and that was sent
	unsent error  // why nothing can be sent any more

	control bool // as in wire.Start; what follows is for that alone
	unready bool // Ready hasn't come since input was sent
	wish    *wish
}

var errNoProcess = runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such process"))

// find gives a process that is held here; or err, if that isn't errAbsent.
func (b *box) find(process string, err error) (*held, error) {
	b.held.mu.Lock()
	defer b.held.mu.Unlock()
	if h := b.held.m[process]; h != nil {
		return h, nil
	}
	switch {
	case !errors.Is(err, errAbsent):
		return nil, err
	case !b.socketless():
		return nil, errLost
	}
	return nil, errNoProcess
}

func (b *box) heldInfos() []runtime.ProcessInfo {
	b.held.mu.Lock()
	defer b.held.mu.Unlock()
	var out []runtime.ProcessInfo
	for _, h := range b.held.m {
		out = append(out, h.info())
	}
	return out
}

// forget drops a process that has ended.
func (b *box) forget(process string) error {
	b.held.mu.Lock()
	defer b.held.mu.Unlock()
	h := b.held.m[process]
	if h == nil {
		return nil
	}
	if h.info().Running {
		return runtime.Precondition("it runs")
	}
	delete(b.held.m, process)
	return nil
}

// letGo ends all waiting for attachments, for good.
func (b *box) letGo() {
	b.held.mu.Lock()
	defer b.held.mu.Unlock()
	b.held.closed = true
	for _, h := range b.held.m {
		h.mu.Lock()
		h.killed = true
		h.changed.Broadcast()
		h.mu.Unlock()
	}
}

// startServed starts a process below a program that the engine starts for it.
func (r *Runtime) startServed(ctx context.Context, b *box, id string, p runtime.Process) (runtime.ProcessInfo, error) {
	h := &held{b: b, keep: int64(p.KeepBytes)}
	if h.keep == 0 {
		h.keep = usualKeep
	}
	h.ring, h.changed.L = wire.NewRing(int(h.keep)), &h.mu
	h.about = runtime.ProcessInfo{ID: p.ID, Label: p.Label, Command: slices.Clone(p.Command), Running: true, TTY: p.TTY, StartedAt: time.Now().UTC()}

	if p.Hold {
		soon := &heldAttachment{h: h} // in the place of the one that is to come
		h.attached = soon
		time.AfterFunc(holdFor, func() { _ = soon.Close() })
	}

	b.held.mu.Lock()
	switch {
	case b.held.closed:
		b.held.mu.Unlock()
		return runtime.ProcessInfo{}, runtime.Unavailable(errors.New("the container is gone, or this client of the engine is closed"))
	case b.held.m[p.ID] != nil:
		b.held.mu.Unlock()
		return runtime.ProcessInfo{}, runtime.WithClass(errdefs.ErrAlreadyExists, errors.New("there is one of this ID; forget it first"))
	case len(b.held.m) >= maxHeld:
		b.held.mu.Unlock()
		return runtime.ProcessInfo{}, runtime.WithClass(errdefs.ErrResourceExhausted, fmt.Errorf("there are %d processes already", maxHeld))
	case b.held.m == nil:
		b.held.m = map[string]*held{}
	}
	b.held.m[p.ID] = h
	b.held.mu.Unlock()

	err := h.begin(ctx, r, id, p)
	if err != nil {
		b.held.mu.Lock()
		delete(b.held.m, p.ID)
		b.held.mu.Unlock()
		return runtime.ProcessInfo{}, err
	}
	return h.info(), nil
}

func (h *held) begin(ctx context.Context, r *Runtime, id string, p runtime.Process) error {
	start := wireStart(p)
	start.Control = true // a program that doesn't know it won't
	request, err := json.Marshal(&wire.Request{Op: wire.OpRun, Start: start})
	if err != nil {
		return err
	}
	c, err := r.serve(ctx, id)
	if err != nil {
		return err
	}
	x, err := h.b.begin(ctx, id, c, request)
	var failure *wire.Failure
	switch {
	case errors.As(err, &failure):
		return failed(failure)
	case err != nil:
		return err
	case !x.release():
		c.served.cancel()
		x.drop()
		return runtime.Ended(ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errClosed // and the program is being killed
	}
	h.mu.Lock()
	h.x, h.control = x.under(context.WithoutCancel(ctx)), c.control
	h.mu.Unlock()
	r.tasks.Go(h.pump)
	r.tasks.Go(h.feed)
	return nil
}

// pump takes what the process prints until it ends.
func (h *held) pump() {
	var info runtime.ProcessInfo
	err := h.b.r.guard(func() (err error) { info, err = h.read(); return err })
	if err != nil {
		// What is left of it has nobody any more, and what it says no reader.
		h.x.served.cancel()
		h.x.served.end()
		<-h.x.served.done
	}
	h.x.drop()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.about.Running, h.about.EndedAt = false, time.Now().UTC()
	switch {
	case err == nil:
		started := h.about.StartedAt
		h.about, h.about.StartedAt = info, started
		h.about.Killed = info.Killed || h.killed
	case h.killed:
		h.about.Killed, h.about.Signal, h.about.ExitCode = true, 9, 128+9
	default:
		h.err = err
	}
	h.changed.Broadcast()
}

func (h *held) read() (runtime.ProcessInfo, error) {
	for {
		kind, payload, err := h.x.r.Next()
		if err != nil {
			return runtime.ProcessInfo{}, interrupted("out of reach")
		}
		switch kind {
		case wire.KindOutput:
			o, err := wire.ParseOutput(payload)
			if err != nil {
				return runtime.ProcessInfo{}, err
			}
			h.add(o)
		case wire.KindReady:
			if err := h.ready(); err != nil {
				return runtime.ProcessInfo{}, err
			}
		case wire.KindResult:
			info, err := parseProcess(payload, h.about.ID)
			if err == nil && info.Running {
				err = fmt.Errorf("%w: the end of a process that runs", wire.ErrProtocol)
			}
			return info, err
		case wire.KindFailure:
			f, err := parseFailure(payload)
			if err == nil {
				err = failed(f)
			}
			return runtime.ProcessInfo{}, err
		default:
			return runtime.ProcessInfo{}, fmt.Errorf("%w: a frame of kind %d", wire.ErrProtocol, kind)
		}
	}
}

// add keeps output. While somebody is attached, it waits until there is room that
// wouldn't be taken from them.
func (h *held) add(o wire.Output) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(o.Data) > 0 {
		part := o.Data[:min(int64(len(o.Data)), h.keep)]
		for h.attached != nil && !h.killed {
			if _, next := h.ring.Bounds(); next+int64(len(part))-h.attached.seq <= h.keep || next == h.attached.seq {
				break
			}
			h.changed.Wait()
		}
		h.ring.Add(o.Stderr, part)
		o.Data = o.Data[len(part):]
		h.changed.Broadcast()
	}
}

func (h *held) info() runtime.ProcessInfo {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := h.about
	out.FirstSeq, out.NextSeq = h.ring.Bounds()
	return out
}

// kill has the engine kill the program with all that is below it.
func (h *held) kill(ctx context.Context) error {
	h.mu.Lock()
	x := h.x
	if !h.about.Running || x == nil {
		h.mu.Unlock()
		return nil
	}
	h.killed = true
	h.changed.Broadcast()
	h.mu.Unlock()
	s := x.served
	s.cancel()
	select {
	case <-s.done:
	case <-ctx.Done():
		return runtime.Ended(ctx)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.about.Running {
		h.changed.Wait() // pump is about to end
	}
	if errors.Is(s.err, runtime.ErrNotKilled) {
		return s.err
	}
	return nil
}

func (h *held) attach(from int64) (runtime.Attachment, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	first, next := h.ring.Bounds()
	switch {
	case h.x == nil:
		return nil, errNoProcess // it is being started
	case from == -1:
		from = first
	case from < first || from > next:
		return nil, runtime.WithClass(errdefs.ErrOutOfRange, fmt.Errorf("output is kept from %d to %d, and not from %d on", first, next, from))
	}
	h.attached = &heldAttachment{h: h, seq: from}
	h.changed.Broadcast()
	return h.attached, nil
}

// heldAttachment is one to a process that is held here.
type heldAttachment struct {
	h      *held
	seq    int64 // with h.mu
	closed bool  // with h.mu
	buf    []byte
}

func (a *heldAttachment) Next() (runtime.Chunk, error) {
	h := a.h
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		if a.closed {
			return runtime.Chunk{}, errDetached
		}
		if h.attached != a {
			return runtime.Chunk{}, runtime.WithClass(errdefs.ErrAborted, errors.New("another has taken the process over"))
		}
		o, kept := h.ring.After(a.seq)
		switch {
		case !kept:
			return runtime.Chunk{}, runtime.WithClass(errdefs.ErrOutOfRange, errors.New("some output is gone"))
		case len(o.Data) > 0:
			a.buf, a.seq = append(a.buf[:0], o.Data...), o.Seq
			h.changed.Broadcast()
			return runtime.Chunk{Seq: o.Seq, Stderr: o.Stderr, Data: a.buf}, nil
		case !h.about.Running && h.err != nil:
			return runtime.Chunk{}, h.err
		case !h.about.Running:
			return runtime.Chunk{}, io.EOF
		}
		h.changed.Wait()
	}
}

func (a *heldAttachment) Info() runtime.ProcessInfo { return a.h.info() }

// own says whether the process' input is still this attachment's; the lock is held.
func (a *heldAttachment) own() error {
	switch {
	case a.closed:
		return errDetached
	case a.h.attached != a:
		return runtime.WithClass(errdefs.ErrAborted, errors.New("another has taken the process over"))
	case !a.h.about.Running:
		return runtime.Precondition("the process has ended")
	case a.h.unsent != nil:
		return runtime.Precondition("%w", a.h.unsent)
	}
	return nil
}

// Write waits for room for the last of p. Close, and who takes the process over, end it.
func (a *heldAttachment) Write(p []byte) (int, error) {
	h := a.h
	h.mu.Lock()
	defer h.mu.Unlock()
	for sent := 0; ; {
		err := a.own()
		if err == nil && h.ended {
			err = runtime.Precondition("the process' input has ended")
		}
		switch {
		case err != nil || sent == len(p):
			return sent, err
		case len(h.input) > 0:
			h.changed.Wait()
		default:
			part := p[sent:min(sent+wire.MaxData, len(p))]
			h.input = append(h.input, part...)
			sent += len(part)
			h.changed.Broadcast()
			if sent == len(p) {
				return sent, nil
			}
		}
	}
}

// CloseWrite ends the input after what was written, and doesn't wait for it to be sent.
func (a *heldAttachment) CloseWrite() error {
	h := a.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := a.own(); err != nil {
		return err
	}
	h.ended = true
	h.changed.Broadcast()
	return nil
}

func (a *heldAttachment) Close() error {
	h := a.h
	h.mu.Lock()
	defer h.mu.Unlock()
	a.closed = true
	if h.attached == a {
		h.attached = nil
	}
	h.changed.Broadcast()
	return nil
}
