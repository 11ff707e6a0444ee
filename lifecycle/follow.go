package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// How a Stream ends before its process does.
var (
	errClosed   = fmt.Errorf("the stream is closed: %w", context.Canceled)
	errNoInput  = errdefs.ErrFailedPrecondition.WithMessage("a follower has no input")
	errNotTaken = errors.New("the process doesn't read its input")
)

// Bounds of a write of input. A stuck write blocks all other callers' input.
const (
	inputStall = 2 * time.Minute // for a piece to be taken
	inputPiece = 32 << 10
)

// Follow follows a process. The error is a *GoneError if some of the output isn't kept any more,
// and a *ProcessError in the AlreadyExists class if another caller is attached.
func (p *processes) Follow(ctx context.Context, ref ProcessRef, req FollowRequest) (Stream, error) {
	h, info, err := p.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	first, next := max(info.FirstSeq, 0), info.NextSeq
	switch from := req.From; {
	case from < -1:
		return nil, &InvalidError{Field: "from", Message: "must be -1 or more"}
	case from >= 0 && (from < first || from > next):
		return nil, goneError(first, "output is kept from %d to %d", first, next)
	}
	f, err := h.follow(ctx, runtime.Follow{From: req.From, Lossless: req.Attach, Exclusive: req.Attach, TakeOver: req.TakeOver})
	switch {
	case errdefs.IsAlreadyExists(err):
		return nil, processError(h.id, errdefs.ErrAlreadyExists, "another is attached to process %q; its place can be taken over", h.id)
	case errdefs.IsResourceExhausted(err):
		return nil, &CapacityError{Message: fmt.Sprintf("%q has as many followers as it may", h.id), RetryAfter: time.Second}
	case err != nil:
		return nil, h.explain(ctx, err)
	}
	p.registry.touch(h.rec)
	return h.stream(f, info, req.From, req.Attach), nil
}

func (h *handle) follow(ctx context.Context, f runtime.Follow) (runtime.Follower, error) {
	return ask(ctx, h.engine, "process_follow", func(ctx context.Context) (runtime.Follower, error) {
		return h.insider.Follow(ctx, h.sb.ContainerID, h.proc, f)
	})
}

// stream is a Stream.
type stream struct {
	*handle
	follower runtime.Follower
	info     runtime.ProcessInfo // when it began
	attached bool
	next     int64 // the seq after which the next output must begin
	anywhere bool  // the next output may also begin later
	ended    *Process

	ctx    context.Context // of input; ends with Close, or Run
	cancel context.CancelFunc
	stop   func() bool
	close  sync.Once
}

// stream returns a Stream that reads f.
func (h *handle) stream(f runtime.Follower, info runtime.ProcessInfo, from int64, attached bool) *stream {
	s := &stream{handle: h, follower: f, info: info, next: from, attached: attached}
	if from < 0 {
		s.next, s.anywhere = max(info.FirstSeq, 0), true
	}
	s.ctx, s.cancel = context.WithCancel(h.registry.running)
	h.registry.mu.Lock()
	if h.streams[h.proc] == nil {
		h.streams[h.proc] = map[*stream]struct{}{}
	}
	h.streams[h.proc][s] = struct{}{}
	h.registry.mu.Unlock()
	s.stop = context.AfterFunc(s.ctx, func() { _ = f.Close() })
	return s
}

// Next implements Stream.
func (s *stream) Next() (runtime.Chunk, error) {
	if s.ended != nil {
		return runtime.Chunk{}, io.EOF
	}
	var c runtime.Chunk
	var err error
	for err == nil && len(c.Data) == 0 {
		err = s.engine.guard("process_output", func() (err error) {
			c, err = s.follower.Next()
			return err
		})
	}
	size := int64(len(c.Data))
	switch {
	case err == nil && (c.Seq-size < s.next || c.Seq-size > s.next && !s.anywhere):
		err = errdefs.ErrUnavailable.WithMessage("the sandbox sends output out of order")
	case err == nil:
		s.next, s.anywhere = c.Seq, false
		return c, nil
	case errors.Is(err, io.EOF):
	case s.registry.running.Err() != nil:
		return runtime.Chunk{}, errClosing
	case s.ctx.Err() != nil:
		return runtime.Chunk{}, errClosed
	}
	return runtime.Chunk{}, s.end(err)
}

// end translates the error of the follower that ended the output. If it returns io.EOF, it has set
// ended.
func (s *stream) end(err error) error {
	ctx, cancel := context.WithTimeout(s.registry.running, lookTimeout)
	defer cancel()
	info := s.info
	if errors.Is(err, io.EOF) {
		if told := s.follower.Info(); told.ID == info.ID {
			info = told
		}
		info.Label, info.Running = s.info.Label, false
		over := s.endSeen(ctx, info)
		p := s.process(info)
		if l, ok := s.lastOf(); ok {
			p = l.process
		}
		p.QuotaExceeded = p.QuotaExceeded || over
		s.ended = &p
		return io.EOF
	}
	if errdefs.IsOutOfRange(err) {
		if now, err := s.ask(ctx); err == nil {
			return goneError(now.FirstSeq, "output is kept from %d on only", now.FirstSeq)
		}
	}
	err = s.explain(ctx, err)
	if s.alive() && !(errdefs.IsUnavailable(err) && s.dead(ctx)) {
		return err
	}
	p := s.lost(info)
	s.ended = &p
	return io.EOF
}

// Ended implements Stream.
func (s *stream) Ended() Process {
	if s.ended == nil {
		return s.process(s.info)
	}
	return *s.ended
}

// Write implements io.Writer.
func (s *stream) Write(b []byte) (int, error) {
	if err := s.write(b, false); err != nil {
		return 0, err
	}
	return len(b), nil
}

// CloseWrite implements Stream.
func (s *stream) CloseWrite() error { return s.write(nil, true) }

func (s *stream) write(b []byte, end bool) error {
	if !s.attached {
		return errNoInput
	}
	s.registry.mu.Lock()
	same := s.isLocked(s.info)
	s.registry.mu.Unlock()
	if !same { // another process has its ID
		return processError(s.id, errdefs.ErrFailedPrecondition, "%q has ended", s.id)
	}
	err := s.handle.write(s.ctx, b, end)
	if err != nil && s.ctx.Err() != nil {
		return errClosed
	}
	return err
}

// Close implements io.Closer.
func (s *stream) Close() error {
	s.close.Do(func() {
		stopped := s.stop()
		s.cancel() // first, or Next wouldn't know why the follower ends
		if stopped {
			_ = s.follower.Close() // now, so that another caller can attach
		}
		s.registry.mu.Lock()
		defer s.registry.mu.Unlock()
		delete(s.streams[s.proc], s)
		if len(s.streams[s.proc]) == 0 {
			delete(s.streams, s.proc)
			if s.over { // enforce waits for the last reader
				s.startLocked()
			}
		}
	})
	return nil
}

// Write copies r to the input of a process until r or ctx ends. End closes the input then. It
// waits at most two minutes for the process to take 32 KiB.
//
// A *ProcessError in the FailedPrecondition class says that the input is closed or doesn't exist.
// One in the Aborted class says that some input may be lost, since the process doesn't read it.
func (p *processes) Write(ctx context.Context, ref ProcessRef, r io.Reader, end bool) error {
	h, info, err := p.find(ctx, ref)
	if err != nil {
		return err
	}
	if !info.Running || h.kind == KindExec && !parseLabel(info.Label).Stdin {
		return processError(h.id, errdefs.ErrFailedPrecondition, "command %q has ended, or was started without an open input", h.id)
	}
	buf := make([]byte, inputPiece)
	for {
		n, err := r.Read(buf)
		last := errors.Is(err, io.EOF)
		if n > 0 || last && end {
			piece, cancel := context.WithTimeoutCause(ctx, inputStall, errNotTaken)
			werr := h.write(piece, buf[:n], last && end)
			cancel()
			if errors.Is(werr, errNotTaken) {
				return processError(h.id, errdefs.ErrAborted,
					"command %q hasn't read its input for %s; some of what was written may be lost", h.id, inputStall)
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

// write writes input once no other caller of this Berm does. When ctx ends, some of it may have
// been written.
func (h *handle) write(ctx context.Context, b []byte, end bool) error {
	unlock, err := h.inputs.Lock(ctx, h.processID())
	if err != nil {
		return context.Cause(ctx)
	}
	defer unlock()
	return h.input(ctx, b, end)
}

// input is write for a caller that holds the input.
func (h *handle) input(ctx context.Context, b []byte, end bool) error {
	err := h.engine.guard("process_input", func() error {
		for wait := askFirst; ; {
			in, err := h.insider.Input(ctx, h.sb.ContainerID, h.proc)
			if errdefs.IsAlreadyExists(err) && h.sleep(ctx, &wait, nil) == nil { // say by an earlier Berm
				continue
			}
			if err != nil {
				return err
			}
			defer func() { _ = in.Close() }()
			defer context.AfterFunc(ctx, func() { _ = in.Close() })()
			if len(b) > 0 {
				_, err = in.Write(b)
			}
			if end && err == nil {
				err = in.CloseWrite()
			}
			return err
		}
	})
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// stderr returns the end of what a process has written to its standard error.
func (h *handle) stderr(ctx context.Context, info runtime.ProcessInfo) string {
	ctx, cancel := context.WithTimeout(ctx, stderrWait)
	defer cancel()
	f, err := h.follow(ctx, runtime.Follow{From: runtime.FromFirst})
	if err != nil {
		return ""
	}
	s := h.stream(f, info, -1, false)
	defer s.Close()
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	var text []byte
	for s.next < info.NextSeq {
		c, err := s.Next()
		if err != nil {
			break
		}
		if c.Stderr {
			text = append(text, c.Data...)
			text = text[max(0, len(text)-maxStderr):]
		}
	}
	return strings.ToValidUTF8(string(text), "\ufffd")
}
