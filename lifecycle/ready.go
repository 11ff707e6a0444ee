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

// stop stops a process. The stop goes on when ctx ends.
func (h *handle) stop(ctx context.Context) error {
	r := h.registry
	done := make(chan error, 1)
	r.mu.Lock()
	if r.closing {
		r.mu.Unlock()
		return errClosing
	}
	work, cancel := context.WithTimeout(trace.ContextWithSpanContext(r.base, trace.SpanContextFromContext(ctx)), stopMost)
	r.tasks.Go(func() {
		defer cancel()
		done <- h.engine.guard("process_stop", func() error { return h.stopNow(work) })
	})
	r.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (h *handle) stopNow(ctx context.Context) error {
	input, cancel := context.WithTimeout(ctx, stopInput)
	_ = h.write(input, nil, true) // may fail if the input is closed or not read
	cancel()
	err := h.insist(ctx, func(ctx context.Context) error {
		return h.signal(ctx, 15)
	})
	if err == nil {
		_ = h.insist(ctx, func(ctx context.Context) error {
			_, err := h.awaitEnd(ctx)
			return err
		})
	}
	if err := h.killOrEnd(ctx); err != nil { // also kills its descendants
		return err
	}
	if info, err := h.ask(ctx); err == nil { // else it ended with its sandbox
		h.seen(info)
	}
	return nil
}

// insist retries f for up to stopGrace while the sandbox doesn't answer. A short silence must not
// shorten the time that a process has to end by itself.
func (h *handle) insist(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	for wait := askFirst; ; {
		err := f(ctx)
		if !errdefs.IsUnavailable(err) && !errors.Is(err, runtime.ErrInterrupted) {
			return err
		}
		if h.sleep(ctx, &wait, nil) != nil {
			return err
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

// awaitReady waits until a process is ready. It returns false if the process ends before that, or
// after the timeout. It reads output to find the Line of a Readiness.
func (h *handle) awaitReady(ctx context.Context, r Readiness, output *stream) bool {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(r.Timeout, readyWait))
	defer cancel()
	defer context.AfterFunc(h.registry.running, cancel)()
	results, n := make(chan bool, 2), 0
	await := func(ready func() bool) {
		n++
		go func() {
			yes := false
			_ = h.engine.guard("process_ready", func() error { yes = ready(); return nil })
			results <- yes
		}()
	}
	if r.Port != 0 {
		await(func() bool { return h.listens(ctx, r.Port) })
	}
	if r.Line != "" && output != nil {
		await(func() bool { return output.prints(ctx, r.Line) })
	}
	ready := false
	for range n {
		if <-results {
			ready = true
		}
		cancel() // the first condition that ends the wait decides
	}
	return ready
}

// listens waits until a port accepts a connection.
func (h *handle) listens(ctx context.Context, port int) bool {
	for wait := askFirst; ; {
		if c, err := h.insider.Dial(ctx, h.sb.ContainerID, port); err == nil {
			_ = c.Close()
			return true
		}
		if info, err := h.ask(ctx); err == nil && !info.Running || errdefs.IsNotFound(err) {
			return false
		}
		if h.sleep(ctx, &wait, nil) != nil {
			return false
		}
	}
}

// prints waits until a process has printed a text, on either stream.
func (s *stream) prints(ctx context.Context, text string) bool {
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	var tails [2]string // the end of each stream, too short to contain the text
	for {
		c, err := s.Next()
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
