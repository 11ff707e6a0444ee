package restart

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sync/errgroup"
)

const (
	maxSteps   = 4               // containers that are inspected or started at a time
	lookTime   = 5 * time.Second // for an inspection, which waits while files are copied out of the container
	retryEvery = time.Second     // after the engine or the store failed; doubles up to maxBackoff
)

// Options configure a Supervisor.
type Options struct {
	Engine   Engine                // mandatory
	Store    Store                 // nil: rows are lost with the process
	Logger   *slog.Logger          // nil discards
	Registry prometheus.Registerer // nil: metrics are kept but not exported
}

// Supervisor restarts containers. It is safe for concurrent use.
type Supervisor struct {
	opts     Options
	log      *slog.Logger
	restarts *prometheus.CounterVec
	kick     chan struct{} // wakes the loop
	life     string        // the engine's life when its containers were last listed; only list uses it

	writing sync.Mutex // held while the store is written; acquired before mu
	mu      sync.Mutex
	entries map[string]*entry // by container ID
	steps   int               // steps under way
}

// entry is a container's row, and its state in this process.
type entry struct {
	row    Row
	stored bool          // the row is in the store, or would be with one
	look   bool          // the container may have changed: inspect it
	boot   bool          // the next inspection is the first since the engine or Berm started
	off    bool          // no restarts until the next start by hand
	hands  int           // starts by hand under way
	after  time.Time     // no step before that
	retry  time.Duration // the last delay after a failed step
	busy   chan struct{} // closed at the end of the current step; nil if there is none
}

// New reads the rows. The engine needn't be up.
func New(ctx context.Context, opts Options) (*Supervisor, error) {
	if opts.Engine == nil {
		return nil, errors.New("restart: Engine is mandatory")
	}
	s := &Supervisor{opts: opts, log: cmp.Or(opts.Logger, slog.New(slog.DiscardHandler)), kick: make(chan struct{}, 1), entries: map[string]*entry{}}
	if opts.Store != nil {
		rows, err := opts.Store.Restarts(ctx)
		if err != nil {
			return nil, err
		}
		for _, r := range rows {
			s.entries[r.ContainerID] = &entry{row: r, stored: true}
		}
	}
	metrics := promauto.With(opts.Registry) // which may be nil
	s.restarts = metrics.NewCounterVec(prometheus.CounterOpts{
		Name: "berm_engine_api_restarts_total", Help: "Restarts of containers with bind mounts by their restart policy, by what they came to.",
	}, []string{"result"})
	s.restarts.WithLabelValues("started")
	s.restarts.WithLabelValues("failed")
	metrics.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "berm_engine_api_restarts_waiting", Help: "Containers with bind mounts that wait for their restart.",
	}, func() float64 { return float64(s.Waiting()) })
	return s, nil
}

// Waiting returns how many containers wait for their restart.
func (s *Supervisor) Waiting() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		if !e.row.Next.IsZero() {
			n++
		}
	}
	return n
}

// Row returns a container's row, if it has one.
func (s *Supervisor) Row(id string) (Row, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[id]; e != nil && e.stored {
		return e.row, true
	}
	return Row{}, false
}

// entryLocked returns a container's entry, and makes it if there is none.
func (s *Supervisor) entryLocked(id string) *entry {
	if s.entries[id] == nil {
		s.entries[id] = &entry{row: Row{ContainerID: id}}
	}
	return s.entries[id]
}

// adopt makes the row of a container that has none.
func (e *entry) adopt(p Policy, stopped bool) {
	if !e.stored {
		e.row.Policy, e.row.Stopped, e.stored = p, stopped, true
	}
}

// Set gives a container a policy. Stopped says whether a container without a row counts as
// stopped by hand.
func (s *Supervisor) Set(ctx context.Context, id string, p Policy, stopped bool) error {
	s.mu.Lock()
	e := s.entryLocked(id)
	e.adopt(p, stopped)
	if e.row.Policy = p; p.None() {
		e.row.Next = time.Time{}
	}
	s.mu.Unlock()
	return s.save(ctx, id)
}

// Stopping is called before a container is stopped or killed by hand. Off says that no restart
// follows until the container is started by hand. Stopping waits for a step under way, such as
// a start. If off is true, it cancels a waiting restart. It then reports whether a restart was
// waiting, or happened before: the container may have ended by itself.
func (s *Supervisor) Stopping(ctx context.Context, id string, off bool) (waited bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[id]
	if e == nil {
		return false, nil
	}
	restarted := e.row.Count > 0 && !e.row.Stopped
	e.row.Stopped, e.boot = true, false
	e.off = e.off || off
	if err := s.idleLocked(ctx, e); err != nil {
		return false, err
	}
	if off {
		waited = (!e.row.Next.IsZero() || restarted) && e.hands == 0
		e.row.Next = time.Time{}
	}
	s.mu.Unlock()
	err = s.save(ctx, id)
	s.mu.Lock()
	if err != nil { // stop the container even if the row can't be written
		s.log.ErrorContext(ctx, "restart_row_not_written", "container_id", id, "error", err)
	}
	return waited, nil
}

// Starting is called before a container is started or restarted by hand, and over after
// it. In between the Supervisor leaves the container alone.
func (s *Supervisor) Starting(ctx context.Context, id string) (over func(), err error) {
	s.mu.Lock()
	e := s.entries[id]
	if e == nil {
		s.mu.Unlock()
		return func() {}, nil
	}
	if err = s.idleLocked(ctx, e); err == nil {
		e.hands++
		e.row.Count, e.row.Stopped, e.row.Backoff, e.off, e.boot = 0, false, 0, false, false
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	over = func() {
		s.mu.Lock()
		e.hands--
		s.mu.Unlock()
		s.changed(id)
	}
	if err := s.save(ctx, id); err != nil {
		over()
		return nil, err
	}
	return over, nil
}

// idleLocked waits until no step of a container is under way. It releases s.mu meanwhile.
func (s *Supervisor) idleLocked(ctx context.Context, e *entry) error {
	for e.busy != nil && ctx.Err() == nil {
		busy := e.busy
		s.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
	return context.Cause(ctx)
}

// save writes a container's row as it is now, or removes it with the container's entry.
func (s *Supervisor) save(ctx context.Context, id string) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	var row Row
	e := s.entries[id]
	if e != nil {
		row = e.row
	}
	unsaved := s.opts.Store == nil || e != nil && !e.stored
	s.mu.Unlock()
	switch {
	case unsaved:
		return nil
	case e == nil:
		return s.opts.Store.DeleteRestart(ctx, id)
	}
	return s.opts.Store.PutRestart(ctx, row)
}

// forget removes a container that is gone, or that has no policy.
func (s *Supervisor) forget(ctx context.Context, id string) {
	s.mu.Lock()
	delete(s.entries, id)
	s.mu.Unlock()
	if err := s.save(ctx, id); err != nil { // the next start lists it
		s.log.WarnContext(ctx, "restart_row_not_removed", "container_id", id, "error", err)
	}
}

// changed makes the loop inspect a container.
func (s *Supervisor) changed(id string) {
	s.mu.Lock()
	if e := s.entries[id]; e != nil {
		e.look = true
	}
	s.mu.Unlock()
	s.wake()
}

func (s *Supervisor) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Run restarts containers until ctx ends. It retries while the engine is unavailable. When it
// returns, no start is under way.
func (s *Supervisor) Run(ctx context.Context) error {
	for last := ""; ; {
		err := s.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err.Error() != last {
			last = err.Error()
			s.log.WarnContext(ctx, "restart_policies_suspended", "error", err)
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return nil
		}
	}
}

// follow restarts containers until the engine goes away. It subscribes before it lists, so
// that no exit is missed.
func (s *Supervisor) follow(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	watching := make(chan string, 1)
	g.Go(func() error {
		err := s.opts.Engine.Watch(ctx, func(life string) { watching <- life }, s.changed)
		if err == nil {
			err = errors.New("the engine's event stream ended")
		}
		return err
	})
	g.Go(func() error {
		var life string
		select {
		case life = <-watching:
		case <-ctx.Done():
			return nil
		}
		if err := s.list(ctx, life); err != nil {
			return err
		}
		s.loop(ctx)
		return nil
	})
	return g.Wait()
}

// list marks all containers for an inspection, and forgets those that are gone. The rules of a
// boot apply to the first list of a life of the engine or of Berm. If the engine's lives can't
// be told apart, they apply to every list.
func (s *Supervisor) list(ctx context.Context, life string) error {
	s.mu.Lock()
	gone := maps.Clone(s.entries) // containers that are made later may be missing in the list
	s.mu.Unlock()
	ids, err := s.opts.Engine.List(ctx)
	if err != nil {
		return err
	}
	boot := life == "" || life != s.life
	s.life = life
	s.mu.Lock()
	for _, id := range ids {
		delete(gone, id)
		e := s.entryLocked(id)
		e.look, e.boot, e.after, e.retry = true, e.boot || boot, time.Time{}, 0
	}
	s.mu.Unlock()
	for id := range gone {
		s.forget(ctx, id)
	}
	return nil
}

// loop runs the steps that are due until ctx ends. It waits for those under way before it
// returns.
func (s *Supervisor) loop(ctx context.Context) {
	var steps sync.WaitGroup
	defer steps.Wait()
	for ctx.Err() == nil {
		e, wait := s.claim(time.Now())
		if e != nil {
			steps.Go(func() { s.step(ctx, e) })
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-s.kick:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// claim marks a container whose step is due as busy, and returns it. Otherwise it returns how
// long to wait. With maxSteps under way, no step is due, as the end of a step wakes the loop.
func (s *Supervisor) claim(now time.Time) (due *entry, wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if wait = maxBackoff; s.steps == maxSteps {
		return nil, wait
	}
	for _, e := range s.entries {
		at := e.row.Next
		if e.busy != nil || e.hands > 0 || at.IsZero() && !e.look {
			continue
		}
		if e.look {
			at = now
		}
		if at.Before(e.after) {
			at = e.after
		}
		if left := at.Sub(now); left > 0 {
			wait = min(wait, left)
			continue
		}
		e.busy = make(chan struct{})
		s.steps++
		return e, 0
	}
	return nil, wait
}

// step inspects a container, applies its policy, and starts it if that is due.
func (s *Supervisor) step(ctx context.Context, e *entry) {
	s.mu.Lock()
	id := e.row.ContainerID
	e.look = false
	s.mu.Unlock()
	looking, cancel := context.WithTimeout(ctx, lookTime)
	c, err := s.opts.Engine.Inspect(looking, id)
	cancel()
	if errdefs.IsNotFound(err) {
		s.forget(ctx, id)
		err = nil
	} else if err == nil {
		err = s.judge(ctx, e, c)
	}
	if err != nil && ctx.Err() == nil {
		s.log.WarnContext(ctx, "restart_delayed", "container_id", id, "error", err)
	}
	s.mu.Lock()
	if err == nil {
		e.retry = 0
	} else {
		e.retry = min(max(2*e.retry, retryEvery), maxBackoff) // let steps of others go first
		e.look, e.after = true, time.Now().Add(e.retry)
	}
	close(e.busy)
	e.busy = nil
	s.steps--
	s.mu.Unlock()
	s.wake()
}

// judge applies a container's policy, and starts the container if that is due. A container of
// an older version, or one that lost its row, gets a row first. If the engine has a restart
// policy for it and it doesn't run, it must have been stopped by hand.
func (s *Supervisor) judge(ctx context.Context, e *entry, c Container) error {
	s.mu.Lock()
	id, was, now := e.row.ContainerID, e.row, time.Now()
	adopted := !e.stored
	if adopted && c.Policy.None() {
		s.mu.Unlock()
		s.forget(ctx, id)
		return nil
	}
	e.adopt(c.Policy, c.EngineRestart && !c.Running)
	boot := e.boot
	e.off, e.boot = e.off && !boot, false
	e.row = e.row.decide(c, e.off, boot, now)
	row := e.row
	s.mu.Unlock()
	if adopted || row != was {
		if err := s.save(ctx, id); err != nil {
			return err
		}
	}
	if c.EngineRestart {
		if err := s.opts.Engine.TakeOver(ctx, id); err != nil {
			return err
		}
	}
	if row.Next.IsZero() || row.Next.After(now) {
		return nil
	}
	// Give up after a failed start, as the engine does, unless the engine couldn't be reached.
	err := s.opts.Engine.StartContainer(ctx, id)
	if errdefs.IsUnavailable(err) || err != nil && ctx.Err() != nil {
		return err
	}
	result := "started"
	if err != nil {
		result = "failed"
		s.log.WarnContext(ctx, "restart_failed", "container_id", id, "exit_code", c.ExitCode, "restart_count", row.Count, "error", err)
	} else {
		s.log.InfoContext(ctx, "container_restarted", "container_id", id, "exit_code", c.ExitCode, "restart_count", row.Count)
	}
	s.restarts.WithLabelValues(result).Inc()
	s.mu.Lock()
	e.row.Next = time.Time{}
	s.mu.Unlock()
	return s.save(ctx, id)
}
