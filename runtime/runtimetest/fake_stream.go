package runtimetest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// queue is events on their way to one who watches.
type queue[E any] struct {
	events []E           // with f.mu
	wake   chan struct{} // has room for one
}

func newQueue[E any]() queue[E] { return queue[E]{wake: make(chan struct{}, 1)} }

// add appends an event; f.mu is held.
func (q *queue[E]) add(e E) {
	q.events = append(q.events, e)
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// hand hands all events there are to a function, until ctx ends, or its first error.
func (q *queue[E]) hand(ctx context.Context, f *Fake, handle func(E) error) error {
	f.mu.Lock()
	events := q.events
	q.events = nil
	f.mu.Unlock()
	for _, e := range events {
		if ctx.Err() != nil {
			break
		}
		if err := handle(e); err != nil {
			return err
		}
	}
	return nil
}

type fakeWatcher struct {
	labels map[string]string
	queue[runtime.Event]
}

// emit queues an event for those that watch; f.mu is held.
func (f *Fake) emit(e runtime.Event) {
	for w := range f.watchers {
		if runtime.HasLabels(e.Labels, w.labels) {
			w.add(e)
		}
	}
}

// Watch implements runtime.Runtime.
func (f *Fake) Watch(ctx context.Context, labels map[string]string, ready func(), handle func(runtime.Event)) error {
	down, err := f.begin(ctx, "watch", "")
	if err != nil {
		return err
	}
	w := &fakeWatcher{labels: labels, queue: newQueue[runtime.Event]()}
	f.mu.Lock()
	f.watchers[w] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.watchers, w)
	}()
	if ready != nil {
		ready()
	}
	for {
		select {
		case <-w.wake:
		case <-down:
			return fmt.Errorf("watch: %w", errDown)
		case <-ctx.Done():
			return f.after("watch", "")
		}
		_ = w.hand(ctx, f, func(e runtime.Event) error { handle(e); return nil })
	}
}

type logLine struct {
	number int // lines before it, dropped ones included
	time   time.Time
	stderr bool
	text   string // with its newline
}

// print adds to the log, and drops its oldest lines when it is full; f.mu is held.
func (c *fakeContainer) print(out *bytes.Buffer, stderr bool) {
	for line := range bytes.Lines(out.Bytes()) {
		c.log = append(c.log, logLine{c.printed, time.Now(), stderr, string(line)})
		c.printed++
		c.logSize += len(line)
	}
	limit := cmp.Or(c.spec.LogMaxBytes, 10<<20)
	for len(c.log) > 1 && int64(c.logSize) > limit {
		c.logSize -= len(c.log[0].text)
		c.log = c.log[1:]
	}
	c.notify()
}

func (c *fakeContainer) notify() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// Logs implements runtime.Runtime.
func (f *Fake) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	down, err := f.begin(ctx, "logs", id)
	if err != nil {
		return err
	}
	f.mu.Lock()
	c, err := f.find(id)
	f.mu.Unlock()
	if err != nil {
		return err
	}
	next := 0
	for first := true; ; first = false {
		f.mu.Lock()
		lines := c.log
		live := c.info.State == runtime.StateRunning || c.info.State == runtime.StatePaused
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		f.mu.Unlock()

		for len(lines) > 0 && (lines[0].number < next || lines[0].time.Before(opts.Since)) {
			lines = lines[1:]
		}
		if first && opts.Tail > 0 {
			lines = lines[max(0, len(lines)-opts.Tail):]
		}
		for _, line := range lines {
			next = line.number + 1
			if err := line.copy(opts, stdout, stderr); err != nil {
				return fmt.Errorf("logs of %s: %w", id, err)
			}
		}
		if !opts.Follow || !live {
			return f.after("logs", id)
		}
		select {
		case <-changed:
		case <-down:
			return fmt.Errorf("logs of %s: %w", id, errDown)
		case <-ctx.Done():
			return f.after("logs", id)
		}
	}
}

func (l logLine) copy(opts runtime.LogOptions, stdout, stderr io.Writer) error {
	w := stdout
	if l.stderr {
		w = stderr
	}
	if w == nil {
		return nil
	}
	text := l.text
	if opts.Timestamps {
		text = l.time.UTC().Format(time.RFC3339Nano) + " " + text
	}
	_, err := io.WriteString(w, text)
	return err
}

// Stats implements runtime.Runtime. A container uses a MiB, and a process more per
// command that runs in it.
func (f *Fake) Stats(ctx context.Context, id string) (runtime.Stats, error) {
	return call(ctx, f, "stats", id, func() (runtime.Stats, error) {
		c, err := f.find(id)
		if err != nil {
			return runtime.Stats{}, err
		}
		if c.info.State != runtime.StateRunning && c.info.State != runtime.StatePaused {
			return runtime.Stats{}, fmt.Errorf("stats of %s, which is %s: %w", id, c.info.State, errdefs.ErrFailedPrecondition)
		}
		return runtime.Stats{
			Time: time.Now(), CPUUsage: time.Millisecond, MemoryBytes: 1 << 20,
			MemoryLimitBytes: c.spec.MemoryBytes, Pids: 1 + int64(len(c.execs)) + c.running(),
		}, nil
	})
}
