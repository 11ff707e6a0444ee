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
	maxProcesses = 1024      // that are known
	maxEnded     = 256       // that have ended and are kept
	keepEnded    = time.Hour // and for how long
)

// table is the processes that are known.
type table struct {
	mu       sync.Mutex
	byID     map[string]*process // nil: about to be started
	change   sync.Cond           // of what is nil there, and of watchers
	ended    []*process          // the first to have ended first
	last     int                 // order of the newest
	closed   bool
	watchers map[*watcher]bool
}

// watcher is a connection that gets the starts and ends of processes.
type watcher struct {
	changed map[*process]bool
	gone    bool
}

// watch adds a watcher, which begins with all processes.
func (t *table) watch() *watcher {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	w := &watcher{changed: map[*process]bool{}}
	for _, p := range t.byID {
		w.note(p)
	}
	if t.watchers == nil {
		t.watchers = map[*watcher]bool{}
	}
	t.watchers[w] = true
	return w
}

// note notes that a process has started or ended.
func (w *watcher) note(p *process) {
	if p != nil && !p.exec {
		w.changed[p] = true
	}
}

func (t *table) unwatch(w *watcher) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w.gone = true
	delete(t.watchers, w)
	t.change.Broadcast()
}

// noteLocked tells all watchers of a process.
func (t *table) noteLocked(p *process) {
	for w := range t.watchers {
		w.note(p)
	}
	t.change.Broadcast()
}

// changes returns the processes that have changed, in the order they were started. It waits
// for one, if it is to. False: the watcher is gone.
func (t *table) changes(w *watcher, wait bool) ([]*process, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.change.L = &t.mu
	for wait && len(w.changed) == 0 && !w.gone {
		t.change.Wait()
	}
	out := slices.SortedFunc(maps.Keys(w.changed), byOrder)
	clear(w.changed)
	return out, !w.gone
}

func byOrder(a, b *process) int { return a.order - b.order }

// find gives a process. One that is being started is waited for.
func (t *table) find(id string) (*process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	p, ok := t.byID[id]
	for t.change.L = &t.mu; ok && p == nil; p, ok = t.byID[id] {
		t.change.Wait()
	}
	if ok {
		return p, nil
	}
	return nil, &wire.Failure{Class: wire.ClassNotFound, Message: "there is no process " + id}
}

// reserve takes an ID for a process that is about to be started.
func (t *table) reserve(id string) (order int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	if _, ok := t.byID[id]; ok {
		return 0, &wire.Failure{Class: wire.ClassExists, Message: "process " + id + " is there already"}
	}
	if t.closed {
		return 0, precondition("nothing is started any more")
	}
	if len(t.byID) >= maxProcesses {
		oldest := t.oldestEnded()
		if oldest < 0 {
			return 0, &wire.Failure{Class: wire.ClassExhausted, Message: "1,024 processes are running, and no more can be kept"}
		}
		t.dropEnded(oldest)
	}
	if t.byID == nil {
		t.byID = map[string]*process{}
	}
	t.byID[id] = nil
	t.last++
	return t.last, nil
}

// put makes a process known that was started; nil gives its ID up.
func (t *table) put(id string, p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.change.Broadcast()
	if p == nil {
		delete(t.byID, id)
		return
	}
	t.byID[id] = p
	t.noteLocked(p)
}

// forget drops a process, if it is that of its ID.
func (t *table) forget(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byID[p.id] != p {
		return
	}
	t.dropLocked(p)
	for i, e := range slices.Backward(t.ended) { // it is mostly the last
		if e == p {
			t.ended = slices.Delete(t.ended, i, i+1)
			return
		}
	}
}

// over notes that a process has ended, with all its output, and forgets others that did
// so long ago, or before too many.
func (t *table) over(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known, ok := t.byID[p.id]; ok && (known == p || known == nil) { // nil: it is about to be put there
		t.ended = append(t.ended, p)
		t.noteLocked(p)
	}
	t.trimLocked(time.Now())
}

func (t *table) trimLocked(now time.Time) {
	for {
		i := t.oldestEnded()
		if i < 0 || len(t.ended)-i <= maxEnded && now.Sub(t.ended[i].endedAt) <= keepEnded {
			return
		}
		t.dropEnded(i)
	}
}

// oldestEnded is the place of the one among the ended that has first, but for those that
// are in use; -1 if there is none.
func (t *table) oldestEnded() int {
	return slices.IndexFunc(t.ended, func(p *process) bool { return !p.inUse() })
}

// dropEnded forgets the one in this place among the ended.
func (t *table) dropEnded(i int) {
	if p := t.ended[i]; t.byID[p.id] == p {
		t.dropLocked(p)
	}
	t.ended = slices.Delete(t.ended, i, i+1)
}

// dropLocked makes a process unknown. A watcher that is slow doesn't keep it.
func (t *table) dropLocked(p *process) {
	delete(t.byID, p.id)
	for w := range t.watchers {
		delete(w.changed, p)
	}
}

// all returns the processes in the order they were started, also those without a name. It
// waits for those that are being started.
func (t *table) all() (out []*process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	for t.change.L = &t.mu; ; t.change.Wait() {
		out = slices.Collect(maps.Values(t.byID))
		if !slices.Contains(out, nil) {
			slices.SortFunc(out, byOrder)
			return out
		}
	}
}

// close lets nothing be started any more.
func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
}

// inUse is whether somebody follows it, or writes to it.
func (p *process) inUse() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.followers) > 0 || p.writer != nil
}

// begin starts a process, with its follower if it is to have one, unless Berm has hung up. A
// kill that comes after that finds no process, or the one that is started.
func (srv *server) begin(c *conn, s *wire.Start) (p *process, f *follower, err error) {
	order, err := srv.processes.reserve(s.ID)
	if err != nil {
		return nil, nil, err
	}
	if c.gone() {
		srv.processes.put(s.ID, nil)
		return nil, nil, errGone
	}
	p = newProcess(srv, s)
	p.order = order
	if s.Follow != nil {
		how := *s.Follow
		how.From = 0
		f, err = p.join(how)
	}
	if err == nil {
		err = srv.launch(p, s)
	}
	if err != nil {
		srv.processes.put(s.ID, nil)
		return nil, nil, err
	}
	srv.processes.put(s.ID, p)
	return p, f, nil
}

// killAll kills what is running, and lets nothing be started any more. False: some of it
// isn't gone.
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

// find gives the process that a request names.
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
		return p.tell(), nil
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
	for !p.ended {
		p.change.Wait()
	}
}

// events is OpEvents.
func (srv *server) events(c *conn, _ *wire.Request) (any, error) {
	if err := c.ready(); err != nil {
		return nil, err
	}
	w := srv.processes.watch()
	defer srv.processes.unwatch(w)
	go func() {
		_, _, _ = c.r.Next() // nothing is to come
		srv.processes.unwatch(w)
	}()
	for first := true; ; first = false {
		changed, there := srv.processes.changes(w, !first)
		for _, p := range changed {
			there = there && c.w.SendJSON(wire.KindItem, p.tell()) == nil
		}
		if !there || c.w.Send(wire.KindReady, nil) != nil {
			return nil, errGone
		}
	}
}

// controls are the operations on a process, once they have begun.
var controls = map[wire.Op]func(c *conn, p *process, req *wire.Process) (any, error){
	wire.OpProcess: func(_ *conn, p *process, _ *wire.Process) (any, error) { return p.tell(), nil },
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
	if p != nil && p.tell().Running {
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
