package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/runtime"
)

// stop stops a process. Once begun, it goes on when ctx ends.
func (m *monitor) stop(ctx context.Context, sb Sandbox, proc string) error {
	r := m.registry
	done := make(chan error, 1)
	r.mu.Lock()
	if r.closing {
		r.mu.Unlock()
		return errClosing
	}
	work, cancel := context.WithTimeout(trace.ContextWithSpanContext(r.base, trace.SpanContextFromContext(ctx)), stopMost)
	r.tasks.Go(func() {
		defer cancel()
		done <- m.engine.guard("process_stop", func() error { return m.stopNow(work, sb, proc) })
	})
	r.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *monitor) stopNow(ctx context.Context, sb Sandbox, proc string) error {
	input, cancel := context.WithTimeout(ctx, stopInput)
	if h, err := m.openHub(input, sb, proc, -1, processRing, false); err == nil {
		_ = h.write(input, nil, true) // it may be closed, or never read: the signal follows
		defer h.release()
	}
	cancel()
	err := m.insist(ctx, func(ctx context.Context) error {
		return m.engine.call(ctx, "process_signal", func(ctx context.Context) error {
			return m.insider.Signal(ctx, sb.ContainerID, proc, 15)
		})
	})
	if err == nil {
		_ = m.insist(ctx, func(ctx context.Context) error {
			_, err := m.awaitEnd(ctx, sb, proc)
			return err
		})
	}
	if err := m.killOrEnd(ctx, sb, proc); err != nil { // its descendants too
		return err
	}
	if info, err := m.ask(ctx, sb, proc); err == nil { // else it went with its sandbox
		m.seen(info)
	}
	return nil
}

// insist retries f while the sandbox doesn't answer, for as long as a process has to end by
// itself: a short silence is no reason to kill it sooner.
func (m *monitor) insist(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	for wait := askFirst; ; {
		err := f(ctx)
		if !errdefs.IsUnavailable(err) && !errors.Is(err, runtime.ErrInterrupted) {
			return err
		}
		if m.sleep(ctx, &wait, nil) != nil {
			return err
		}
	}
}

// awaitEnd waits until a process has ended.
func (m *monitor) awaitEnd(ctx context.Context, sb Sandbox, proc string) (runtime.ProcessInfo, error) {
	for wait := askFirst; ; {
		info, err := m.ask(ctx, sb, proc)
		if err != nil {
			return info, err
		}
		m.seen(info)
		if !info.Running {
			return info, nil
		}
		m.registry.mu.Lock()
		var done <-chan struct{}
		if t := m.tracked[proc]; t != nil {
			done = t.done
		}
		m.registry.mu.Unlock()
		if err := m.sleep(ctx, &wait, done); err != nil {
			return info, err
		}
	}
}

// Limits of a Readiness.
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

// awaitReady waits until a process is ready. It returns false if the process ends before, or the
// time is up.
func (m *monitor) awaitReady(ctx context.Context, sb Sandbox, proc string, r Readiness) bool {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(r.Timeout, readyWait))
	defer cancel()
	defer context.AfterFunc(m.registry.running, cancel)()
	results, n := make(chan bool, 2), 0
	await := func(ready func() bool) {
		n++
		go func() {
			yes := false
			_ = m.engine.guard("process_ready", func() error { yes = ready(); return nil })
			results <- yes
		}()
	}
	if r.Port != 0 {
		await(func() bool { return m.listens(ctx, sb, proc, r.Port) })
	}
	if r.Line != "" {
		await(func() bool { return m.prints(ctx, sb, proc, r.Line) })
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

// listens waits until a port accepts a connection.
func (m *monitor) listens(ctx context.Context, sb Sandbox, proc string, port int) bool {
	for wait := askFirst; ; {
		if c, err := m.insider.Dial(ctx, sb.ContainerID, port); err == nil {
			_ = c.Close()
			return true
		}
		if info, err := m.ask(ctx, sb, proc); err == nil && !info.Running || errdefs.IsNotFound(err) {
			return false
		}
		if m.sleep(ctx, &wait, nil) != nil {
			return false
		}
	}
}

// prints waits until a process has printed a text, on either stream. It only follows, so that it
// isn't in the way of a caller that attaches.
func (m *monitor) prints(ctx context.Context, sb Sandbox, proc, text string) bool {
	h, err := m.openHub(ctx, sb, proc, -1, processRing, false)
	if err != nil {
		return false
	}
	s := newStream(h, -1, false, true)
	defer s.Close()
	defer context.AfterFunc(ctx, func() { s.Close() })()
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
