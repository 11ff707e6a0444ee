package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// Bounds of a hub.
const (
	execRing     = 128 << 10 // bytes of a command's output kept for attached callers
	processRing  = 256 << 10 // of a managed process'; as much as the sandbox keeps
	maxStderr    = 64 << 10  // bytes of a managed process' standard error that callers see
	maxParts     = 4096
	partSize     = 4 << 10  // a part below this size takes in the output that follows it
	spareSize    = 16 << 10 // the memory of a part from this size on is used again
	maxSpare     = 2
	followedWait = 5 * time.Second
)

// hub is Berm's one attachment to a process. The runtime allows one at a time, so all callers that
// read the output or write the input share it. It lasts as long as any of them.
//
// Its reader, if it has one, holds the process up until it has taken the output. Followers
// don't, and lose what they don't take in time.
type hub struct {
	*handle
	limit  int // bytes kept
	refs   int // guarded by records.mu
	cancel context.CancelFunc
	input  chan struct{} // holds one while a caller writes

	opened  chan struct{} // closed when the next two are set
	openErr error
	att     runtime.Attachment

	mu       sync.Mutex
	changed  *sync.Cond
	parts    []part   // oldest first
	spare    [][]byte // of large parts that were dropped
	bytes    int
	next     int64 // where the output goes on; -1 until that is known
	reader   *stream
	reserved bool // a reader is expected
	closing  bool
	err      error // why there is no more; io.EOF when the process has ended
	info     runtime.ProcessInfo
}

type part struct {
	end    int64
	stderr bool
	data   []byte
}

// openHub returns the hub of the process, and opens one that begins at from if there is none. The
// caller must release it. A caller that is about to become its reader expects to; the output
// waits for it.
func (h *handle) openHub(ctx context.Context, from int64, limit int, expect bool) (*hub, error) {
	h.registry.mu.Lock()
	u := h.hubs[h.proc]
	if u == nil {
		if h.registry.closing {
			h.registry.mu.Unlock()
			return nil, errClosing
		}
		u = &hub{
			handle: h, limit: limit, next: from, reserved: expect,
			input: make(chan struct{}, 1), opened: make(chan struct{}),
		}
		u.changed = sync.NewCond(&u.mu)
		if h.hubs == nil {
			h.hubs = map[string]*hub{}
		}
		h.hubs[h.proc] = u
		var hubCtx context.Context
		hubCtx, u.cancel = context.WithCancel(h.registry.running)
		h.registry.workers.Go(func() { u.run(hubCtx, from) })
	}
	u.refs++
	h.registry.mu.Unlock()
	if expect {
		u.expect(true)
	}
	select {
	case <-u.opened:
	case <-ctx.Done():
		u.expect(false)
		u.release()
		return nil, context.Cause(ctx)
	}
	if u.openErr != nil {
		u.release()
		return nil, u.openErr
	}
	return u, nil
}

// place checks where a reader begins. A sandbox keeps output, and a hub what it has taken from
// there.
func (h *handle) place(info runtime.ProcessInfo, from int64) (int64, error) {
	first, next := max(info.FirstSeq, 0), info.NextSeq
	h.registry.mu.Lock()
	if u := h.hubs[h.proc]; u != nil {
		if f, n := u.bounds(); f >= 0 {
			first, next = min(first, f), max(next, n)
		}
	}
	h.registry.mu.Unlock()
	switch {
	case from == -1:
		return first, nil
	case from < -1:
		return 0, &InvalidError{Field: "from", Message: "must be -1 or more"}
	case from < first, from > next:
		return 0, goneError(first, "output is kept from %d to %d", first, next)
	}
	return from, nil
}

// retire makes the next caller open a new hub, which takes the process over.
func (h *hub) retire() {
	h.registry.mu.Lock()
	defer h.registry.mu.Unlock()
	h.forgetHubLocked(h)
}

// release ends a caller's use of the hub. The last one closes it.
func (h *hub) release() {
	h.registry.mu.Lock()
	h.refs--
	last := h.refs == 0
	if last {
		h.forgetHubLocked(h)
	}
	h.registry.mu.Unlock()
	if last {
		h.cancel()
	}
}

// run attaches, and reads the output until the process ends or the hub is closed.
func (h *hub) run(ctx context.Context, from int64) {
	defer h.cancel()
	h.openErr = h.engine.guard("process_attach", func() error {
		return h.engine.call(ctx, "process_attach", func(ctx context.Context) (err error) {
			h.att, err = h.insider.Attach(ctx, h.sb.ContainerID, h.proc, from)
			return err
		})
	})
	if h.openErr != nil {
		h.retire()
	}
	close(h.opened)
	if h.openErr != nil {
		return
	}
	stop := context.AfterFunc(ctx, func() {
		h.mu.Lock()
		h.closing = true
		h.changed.Broadcast()
		h.mu.Unlock()
		_ = h.att.Close()
	})
	defer func() {
		if stop() {
			_ = h.att.Close()
		}
	}()
	for h.mayRead() {
		more := false
		if err := h.engine.guard("process_output", func() error { more = h.add(h.att.Next()); return nil }); err != nil {
			h.add(runtime.Chunk{}, err)
		}
		if !more {
			h.retire() // the next caller asks the sandbox
			return
		}
	}
}

// mayRead waits until the reader has taken enough.
func (h *hub) mayRead() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for !h.closing && h.heldLocked() {
		h.changed.Wait()
	}
	return !h.closing
}

// heldLocked reports whether a reader holds the process up.
func (h *hub) heldLocked() bool {
	return h.reserved || h.reader != nil && h.next-max(h.reader.pos, h.firstLocked()) >= int64(h.limit/2)
}

// add adds what the attachment returned. It returns false at the end.
func (h *hub) add(c runtime.Chunk, err error) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.changed.Broadcast()
	size := int64(len(c.Data))
	switch {
	case err == nil && (c.Seq < size || h.next >= 0 && c.Seq-size < h.next):
		err = errdefs.ErrUnavailable.WithMessage("the sandbox sends output out of order")
	case errors.Is(err, io.EOF):
		h.info = h.att.Info()
	}
	if err != nil {
		h.err = err
		return false
	}
	if size == 0 {
		return true
	}
	if h.next >= 0 && c.Seq-size > h.next { // some is missing
		h.parts, h.bytes = nil, 0
	}
	h.next = c.Seq
	h.bytes += len(c.Data)
	if last := len(h.parts) - 1; last >= 0 && h.parts[last].stderr == c.Stderr && len(h.parts[last].data)+len(c.Data) <= partSize {
		h.parts[last].data = append(h.parts[last].data, c.Data...)
		h.parts[last].end = c.Seq
	} else {
		h.parts = append(h.parts, part{c.Seq, c.Stderr, append(h.roomLocked(len(c.Data)), c.Data...)})
	}
	drop := 0
	for drop < len(h.parts)-1 && (h.bytes-len(h.parts[drop].data) >= h.limit || len(h.parts)-drop > maxParts) {
		if h.reader != nil && h.parts[drop].end > h.reader.pos {
			break
		}
		data := h.parts[drop].data
		h.bytes -= len(data)
		if cap(data) >= spareSize && len(h.spare) < maxSpare {
			h.spare = append(h.spare, data[:0])
		}
		drop++
	}
	h.parts = slices.Delete(h.parts, 0, drop)
	return true
}

// roomLocked returns the memory of a dropped part for a new one, or nil.
func (h *hub) roomLocked(size int) []byte {
	last := len(h.spare) - 1
	if size < spareSize || last < 0 || cap(h.spare[last]) < size {
		return nil
	}
	data := h.spare[last]
	h.spare = h.spare[:last]
	return data
}

// firstLocked returns the place where the kept output begins.
func (h *hub) firstLocked() int64 {
	if len(h.parts) == 0 {
		return h.next
	}
	return h.parts[0].end - int64(len(h.parts[0].data))
}

// bounds returns the places between which output is kept; -1 if they aren't known yet.
func (h *hub) bounds() (first, next int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.firstLocked(), h.next
}

// expect makes the output wait for a reader, or no longer.
func (h *hub) expect(reader bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reserved = reader && h.reader == nil
	h.changed.Broadcast()
}

// expectSoon makes the output wait for a reader for followedWait at most.
func (h *hub) expectSoon() {
	h.registry.mu.Lock()
	h.refs++
	h.registry.mu.Unlock()
	time.AfterFunc(followedWait, func() {
		h.expect(false)
		h.release()
	})
}

// How a stream ends before its process does.
var (
	errClosed = fmt.Errorf("the stream is closed: %w", context.Canceled)
	errOver   = errdefs.ErrAborted.WithMessage("another has taken it over")
)

// stderr returns the end of what a process wrote to its standard error. It waits for the output
// up to a place, unless a reader holds it up.
func (h *hub) stderr(ctx context.Context, upTo int64) string {
	defer context.AfterFunc(ctx, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.changed.Broadcast()
	})()
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.next < upTo && h.err == nil && !h.closing && !h.heldLocked() && ctx.Err() == nil {
		h.changed.Wait()
	}
	var text []byte
	for _, p := range slices.Backward(h.parts) {
		if p.stderr {
			text = append(slices.Clone(p.data), text...)
		}
		if len(text) >= maxStderr {
			text = text[len(text)-maxStderr:]
			break
		}
	}
	return strings.ToValidUTF8(string(text), "\ufffd")
}

// write writes a copy of p to the input of the process. It returns when ctx ends; the process may
// still take the rest later.
func (h *hub) write(ctx context.Context, p []byte, end bool) error {
	if err := h.takeInput(ctx); err != nil {
		return err
	}
	return h.feed(ctx, slices.Clone(p), end)
}

// takeInput waits until no other caller writes.
func (h *hub) takeInput(ctx context.Context) error {
	select {
	case h.input <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// feed is write for a caller that has taken the input, which feed gives back. It keeps p.
func (h *hub) feed(ctx context.Context, p []byte, end bool) error {
	done := make(chan error, 1)
	go func() { // ends with the hub at the latest
		err := h.engine.guard("process_input", func() (err error) {
			if len(p) > 0 {
				_, err = h.att.Write(p)
			}
			if end && err == nil {
				err = h.att.CloseWrite()
			}
			return err
		})
		<-h.input
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stream is one reader or follower of a hub.
type stream struct {
	h      *hub
	follow bool
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	chunk  []byte // the last one returned

	// Guarded by the hub's mu.
	pos    int64 // -1 is where the output begins
	over   bool  // another reader took over
	closed bool
}

// newStream returns a follower, or a reader. A reader takes over from the one before; without
// takeOver, it is nil if there is one. The stream releases the hub for the caller.
func newStream(h *hub, from int64, takeOver, follow bool) *stream {
	s := &stream{h: h, follow: follow, pos: from}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	h.mu.Lock()
	defer h.mu.Unlock()
	if !follow {
		if h.reader != nil {
			if !takeOver {
				s.cancel()
				return nil
			}
			h.reader.over = true
		}
		h.reader, h.reserved = s, false
	}
	h.changed.Broadcast()
	return s
}

// next waits for output. The error is io.EOF once the process has ended.
func (s *stream) next() (runtime.Chunk, error) {
	h := s.h
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		switch {
		case s.closed:
			return runtime.Chunk{}, errClosed
		case s.over:
			return runtime.Chunk{}, errOver
		}
		if first := h.firstLocked(); s.pos < first {
			if s.pos >= 0 {
				return runtime.Chunk{}, &GoneError{Message: fmt.Sprintf("output is kept from %d on only", first), FirstSeq: first}
			}
			s.pos = first
		}
		if i, _ := slices.BinarySearchFunc(h.parts, s.pos+1, func(p part, at int64) int { return cmp.Compare(p.end, at) }); i < len(h.parts) {
			p := h.parts[i]
			s.chunk = append(s.chunk[:0], p.data[len(p.data)-int(p.end-s.pos):]...)
			s.pos = p.end
			h.changed.Broadcast()
			return runtime.Chunk{Seq: p.end, Stderr: p.stderr, Data: s.chunk}, nil
		}
		switch {
		case h.closing && !errors.Is(h.err, io.EOF):
			return runtime.Chunk{}, errClosing
		case h.err != nil:
			return runtime.Chunk{}, h.err
		}
		h.changed.Wait()
	}
}

// Write implements io.Writer.
func (s *stream) Write(p []byte) (int, error) {
	if err := s.input(p, false); err != nil {
		return 0, err
	}
	return len(p), nil
}

// CloseWrite ends the input.
func (s *stream) CloseWrite() error { return s.input(nil, true) }

func (s *stream) input(p []byte, end bool) error {
	if s.follow {
		return errdefs.ErrFailedPrecondition.WithMessage("a follower has no input")
	}
	err := s.h.write(s.ctx, p, end)
	if errors.Is(err, context.Canceled) {
		return errClosed
	}
	return err
}

// Close implements io.Closer. The process goes on.
func (s *stream) Close() error {
	h := s.h
	h.mu.Lock()
	open := !s.closed
	s.closed = true
	if h.reader == s {
		h.reader = nil
	}
	h.changed.Broadcast()
	h.mu.Unlock()
	if open {
		s.cancel()
		h.release()
	}
	return nil
}

// reader is a Stream.
type reader[T any] struct {
	*stream
	info  runtime.ProcessInfo                        // when it was attached to
	view  func(info runtime.ProcessInfo, at state) T // what callers see of the process
	ended *T
}

// state is what the end of a stream says about its process.
type state struct {
	ended bool // it ended by itself, and its output was given
	over  bool // it left the workspace over its quota
}

// Next implements Stream.
func (r *reader[T]) Next() (runtime.Chunk, error) {
	if r.ended != nil {
		return runtime.Chunk{}, io.EOF
	}
	c, err := r.next()
	if err == nil {
		return c, nil
	}
	info, at, err := r.end(r.info, err)
	if errors.Is(err, io.EOF) {
		v := r.view(info, at)
		r.ended = &v
	}
	return runtime.Chunk{}, err
}

// Ended implements Stream.
func (r *reader[T]) Ended() T {
	if r.ended == nil {
		return r.view(r.info, state{ended: true})
	}
	return *r.ended
}

// end returns the meaning of the end of a stream: io.EOF with what is known of the process then,
// or an error.
func (s *stream) end(info runtime.ProcessInfo, err error) (runtime.ProcessInfo, state, error) {
	h := s.h
	ctx, cancel := context.WithTimeout(h.registry.running, lookTimeout)
	defer cancel()
	switch {
	case errors.Is(err, io.EOF):
		h.mu.Lock()
		label := info.Label
		if h.info.ID == info.ID {
			info = h.info
		}
		info.Label, info.Running = label, false
		h.mu.Unlock()
		return info, state{ended: true, over: h.endSeen(ctx, info)}, io.EOF
	case errdefs.IsCanceled(err):
		return info, state{}, err
	}
	err = h.explain(ctx, err)
	if !h.alive() || errdefs.IsUnavailable(err) && h.dead(ctx) {
		info.Running, info.Killed, info.EndedAt = false, true, time.Now().UTC()
		return info, state{}, io.EOF
	}
	return info, state{}, err
}

// executionAt is execution for a stream.
func (h *handle) executionAt(info runtime.ProcessInfo, at state) Execution {
	e := h.execution(info)
	if l, ok := h.lastOf(h.id); ok && !info.Running {
		e = l.execution
	}
	e.QuotaExceeded = e.QuotaExceeded || at.over
	return e
}

// processAt is process for a stream.
func (h *handle) processAt(info runtime.ProcessInfo, at state) Process {
	if at.ended {
		return h.process(info)
	}
	return h.lostProcess(info)
}
