package main

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	maxProcesses = 1024      // processes in the table
	maxEnded     = 256       // ended processes in the table
	keepEnded    = time.Hour // how long an ended process is kept
)

// table holds the processes of a server, and those that are being started.
type table struct {
	mu     sync.Mutex
	byID   map[string]*process
	change sync.Cond // a process started, ended or was dropped, or a waiter left
	clock  int       // counts reservations, starts and ends, from 1
	closed bool
}

func newTable() *table {
	t := &table{byID: map[string]*process{}, clock: 1}
	t.change.L = &t.mu
	return t
}

// noteLocked notes that a process has started or ended.
func (t *table) noteLocked(p *process) {
	t.clock++
	p.changed = t.clock
	t.change.Broadcast()
}

// changes returns the processes that started or ended after the time since, in the order of their
// starts, and the clock's time. If since is 0, it returns all processes. Otherwise it waits until there
// is one, or until leave. It returns false after leave.
func (t *table) changes(since int, gone *bool) (out []*process, now int, there bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	for {
		for _, p := range t.byID {
			if p.changed > since && !p.exec {
				out = append(out, p)
			}
		}
		if len(out) > 0 || since == 0 || *gone {
			slices.SortFunc(out, byOrder)
			return out, t.clock, !*gone
		}
		t.change.Wait()
	}
}

// leave makes the call of changes with the same gone return.
func (t *table) leave(gone *bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	*gone = true
	t.change.Broadcast()
}

func byOrder(a, b *process) int { return a.order - b.order }

// find returns a process. It waits for one that is being started.
func (t *table) find(id string) (*process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	for p := t.byID[id]; p != nil; p = t.byID[id] {
		if p.changed > 0 {
			return p, nil
		}
		t.change.Wait()
	}
	return nil, &wire.Failure{Class: wire.ClassNotFound, Message: "there is no process " + id}
}

// reserve adds a process that is about to be started, if its ID is free.
func (t *table) reserve(p *process) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	if t.byID[p.id] != nil {
		return &wire.Failure{Class: wire.ClassExists, Message: "process " + p.id + " is there already"}
	}
	if t.closed {
		return precondition("nothing is started any more")
	}
	if len(t.byID) >= maxProcesses {
		_, oldest := t.endedLocked()
		if oldest == nil {
			return &wire.Failure{Class: wire.ClassExhausted, Message: "1,024 processes are running, and no more can be kept"}
		}
		t.dropLocked(oldest)
	}
	t.byID[p.id] = p
	t.clock++
	p.order = t.clock
	return nil
}

// put makes a reserved process known, after launch.
func (t *table) put(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.noteLocked(p)
}

// forget drops a process, unless another one has its ID by now.
func (t *table) forget(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byID[p.id] == p {
		t.dropLocked(p)
	}
}

// over records that a process has ended, with all its output. It drops processes that ended
// long ago, and the oldest ones if there are too many.
func (t *table) over(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.over = true
	if p.changed > 0 {
		t.noteLocked(p)
	}
	t.trimLocked(time.Now())
}

func (t *table) trimLocked(now time.Time) {
	for {
		n, oldest := t.endedLocked()
		if oldest == nil || n <= maxEnded && now.Sub(oldest.endedAt) <= keepEnded {
			return
		}
		t.dropLocked(oldest)
	}
}

// endedLocked counts the processes that have ended and aren't in use. It returns the one that
// ended first.
func (t *table) endedLocked() (n int, oldest *process) {
	for _, p := range t.byID {
		if p.changed == 0 || !p.over || p.inUse() {
			continue
		}
		if n++; oldest == nil || p.endedAt.Before(oldest.endedAt) {
			oldest = p
		}
	}
	return n, oldest
}

// dropLocked removes a process from the table.
func (t *table) dropLocked(p *process) {
	delete(t.byID, p.id)
	t.change.Broadcast()
}

// all returns the processes in the order of their starts, including those with exec. It waits for those
// that are being started.
func (t *table) all() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	for {
		out := slices.SortedFunc(maps.Values(t.byID), byOrder)
		if !slices.ContainsFunc(out, func(p *process) bool { return p.changed == 0 }) {
			return out
		}
		t.change.Wait()
	}
}

// close makes reserve fail from now on.
func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
}

// inUse reports whether the process has a follower or a writer.
func (p *process) inUse() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.followers) > 0 || p.writer != nil
}

// begin starts a process, and its follower if the request has a Follow, unless Berm has hung
// up. A later kill finds the process, or none if the start failed.
func (srv *server) begin(c *conn, s *wire.Start) (p *process, f *follower, err error) {
	p = newProcess(srv, s)
	if err := srv.processes.reserve(p); err != nil {
		return nil, nil, err
	}
	if c.gone() {
		err = errGone
	} else if s.Follow != nil {
		how := *s.Follow
		how.From = 0
		f, err = p.join(how)
	}
	if err == nil {
		err = srv.launch(p, s)
	}
	if err != nil {
		srv.processes.forget(p)
		return nil, nil, err
	}
	srv.processes.put(p)
	return p, f, nil
}

// killAll kills all processes, and makes later starts fail. It returns false if some processes aren't
// gone.
func (srv *server) killAll() bool {
	srv.processes.close()
	var all sync.WaitGroup
	var left atomic.Bool
	for _, p := range srv.processes.all() {
		all.Go(func() {
			if !p.killTree(false) {
				left.Store(true)
			}
		})
	}
	all.Wait()
	return !left.Load()
}

// find returns the process that a request names.
func (srv *server) find(req *wire.Request) (*process, error) {
	if req.Process == nil {
		return nil, invalid("the request names no process")
	}
	if err := wire.CheckID(req.Process.ID); err != nil {
		return nil, invalid("%s", err)
	}
	return srv.processes.find(req.Process.ID)
}

// start is OpStart.
func (srv *server) start(c *conn, req *wire.Request) (any, error) {
	if err := req.Start.Check(); err != nil {
		return nil, invalid("%s", err)
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	p, f, err := srv.begin(c, req.Start)
	switch {
	case err != nil:
		return nil, err
	case f == nil:
		return p.snapshot(), nil
	}
	info, err := p.serve(c, f)
	if p.exec {
		if err != nil {
			p.killTree(false)
			p.awaitEnd()
		}
		c.after = func(bool) { srv.processes.forget(p) }
	}
	return info, err
}

// awaitEnd waits for the end of a process, and of its output.
func (p *process) awaitEnd() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.info.Running {
		p.change.Wait()
	}
}

// events is OpEvents.
func (srv *server) events(c *conn, _ *wire.Request) (any, error) {
	if err := c.ready(); err != nil {
		return nil, err
	}
	gone := false
	c.watch(func() { srv.processes.leave(&gone) })
	for since := 0; ; {
		changed, now, there := srv.processes.changes(since, &gone)
		since = now
		for _, p := range changed {
			there = there && c.w.SendJSON(wire.KindItem, p.snapshot()) == nil
		}
		if !there || c.w.Send(wire.KindReady, nil) != nil {
			return nil, errGone
		}
	}
}

// controls has the operations on a process. They run after Berm has sent Go.
var controls = map[wire.Op]func(c *conn, p *process, req *wire.Process) (any, error){
	wire.OpProcess: func(_ *conn, p *process, _ *wire.Process) (any, error) { return p.snapshot(), nil },
	wire.OpFollow:  (*conn).follow,
	wire.OpInput:   (*conn).feed,
	wire.OpSignal: func(_ *conn, p *process, req *wire.Process) (any, error) {
		if err := wire.CheckSignal(req.Signal); err != nil {
			return nil, invalid("%s", err)
		}
		return nil, p.send(unix.Signal(req.Signal))
	},
	wire.OpKill: func(_ *conn, p *process, _ *wire.Process) (any, error) {
		if !p.killTree(false) {
			return nil, &wire.Failure{Class: wire.ClassNotKilled, Message: "some of process " + p.id + " could not be killed"}
		}
		return nil, nil
	},
	wire.OpResize: func(_ *conn, p *process, req *wire.Process) (any, error) {
		if err := wire.CheckSize(req.Rows, req.Cols); err != nil {
			return nil, invalid("%s", err)
		}
		if !p.tty {
			return nil, precondition("process %s has no terminal", p.id)
		}
		return nil, p.control(func(fd int) error { return setSize(fd, req.Rows, req.Cols) })
	},
}

// control does an operation on a process.
func (srv *server) control(c *conn, req *wire.Request) (any, error) {
	p, err := srv.find(req)
	if err == nil {
		err = c.ready()
	}
	if err != nil {
		return nil, err
	}
	return controls[req.Op](c, p, req.Process)
}

// forget is OpForget.
func (srv *server) forget(c *conn, req *wire.Request) (any, error) {
	p, err := srv.find(req)
	if err != nil && failureOf(err).Class != wire.ClassNotFound {
		return nil, err
	}
	if p != nil && p.snapshot().Running {
		return nil, precondition("process %s has not ended", p.id)
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	if p != nil {
		srv.processes.forget(p)
	}
	return nil, nil
}
