package main

import (
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
	mu     sync.Mutex
	byID   map[string]*process // nil: about to be started
	change sync.Cond           // of what is nil there
	ended  []*process          // the first to have ended first
	last   int                 // order of the newest
	closed bool
}

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

// room says why there can't be another process of an ID.
func (t *table) room(id string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.roomLocked(id)
}

func (t *table) roomLocked(id string) error {
	t.trimLocked(time.Now())
	if _, ok := t.byID[id]; ok {
		return &wire.Failure{Class: wire.ClassExists, Message: "process " + id + " is there already"}
	}
	if len(t.byID) >= maxProcesses && t.oldestEnded() < 0 {
		return &wire.Failure{Class: wire.ClassExhausted, Message: "1,024 processes are running, and no more can be kept"}
	}
	if t.closed {
		return &wire.Failure{Class: wire.ClassPrecondition, Message: "nothing is started any more"}
	}
	return nil
}

// reserve takes an ID for a process that is about to be started.
func (t *table) reserve(id string) (order int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.roomLocked(id); err != nil {
		return 0, err
	}
	if len(t.byID) >= maxProcesses {
		t.dropEnded(t.oldestEnded())
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
}

// forget drops a process, if it is that of its ID.
func (t *table) forget(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byID[p.id] != p {
		return
	}
	delete(t.byID, p.id)
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
// are attached and so in use; -1 if there is none.
func (t *table) oldestEnded() int {
	return slices.IndexFunc(t.ended, func(p *process) bool { return !p.inUse() })
}

// dropEnded forgets the one in this place among the ended.
func (t *table) dropEnded(i int) {
	if p := t.ended[i]; t.byID[p.id] == p {
		delete(t.byID, p.id)
	}
	t.ended = slices.Delete(t.ended, i, i+1)
}

// all are in the order they were started.
func (t *table) all() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(time.Now())
	var out []*process
	for _, p := range t.byID {
		if p != nil {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *process) int { return a.order - b.order })
	return out
}

// close lets nothing be started any more.
func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
}

// inUse is whether a connection is attached to it.
func (p *process) inUse() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.attached != nil
}

// begin starts a process, with an attachment if it is to have one from the first byte.
func (srv *server) begin(s *wire.Start, at *attachment) (*process, error) {
	order, err := srv.processes.reserve(s.ID)
	if err != nil {
		return nil, err
	}
	p := newProcess(srv, s)
	p.order, p.attached = order, at
	if err := srv.launch(p, s); err != nil {
		srv.processes.put(s.ID, nil)
		return nil, err
	}
	srv.processes.put(s.ID, p)
	return p, nil
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

// check looks at a request to start a process.
func (srv *server) check(s *wire.Start) error {
	if err := checkStart(s); err != nil {
		return err
	}
	return srv.processes.room(s.ID)
}

// find gives the process that a request names.
func (srv *server) find(req *wire.Request) (*process, error) {
	if req.Process == nil {
		return nil, invalid("the request names no process")
	}
	if err := checkID(req.Process.ID); err != nil {
		return nil, err
	}
	return srv.processes.find(req.Process.ID)
}

// run is OpRun.
func (srv *server) run(c *conn, req *wire.Request) (any, error) {
	if err := srv.check(req.Start); err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	at := &attachment{}
	p, err := srv.begin(req.Start, at)
	if err != nil {
		return nil, err
	}
	info, err := p.follow(c, at)
	if err != nil {
		return nil, err
	}
	c.sent = func() { srv.processes.forget(p) }
	return info, nil
}

// holdFor is how long output waits for the first attachment.
const holdFor = 5 * time.Second

// start is OpStart.
func (srv *server) start(c *conn, req *wire.Request) (any, error) {
	if err := srv.check(req.Start); err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	var at *attachment
	if req.Start.Hold {
		at = &attachment{}
	}
	p, err := srv.begin(req.Start, at)
	if err != nil {
		return nil, err
	}
	if at != nil { // in the place of the one that is to come
		time.AfterFunc(holdFor, func() { p.release(at) })
	}
	return p.tell(), nil
}

// attach is OpAttach.
func (srv *server) attach(c *conn, req *wire.Request) (any, error) {
	p, err := srv.find(req)
	if err != nil {
		return nil, err
	}
	turn, err := p.ask(req.Process.From)
	if err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	at, err := p.hold(req.Process.From, turn)
	if err != nil {
		return nil, err
	}
	info, err := p.follow(c, at)
	if err != nil {
		return nil, err
	}
	c.sent = p.told
	return info, nil
}

// process is OpProcess.
func (srv *server) process(c *conn, req *wire.Request) (any, error) {
	p, err := srv.find(req)
	if err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	return p.tell(), nil
}

// list is OpList.
func (srv *server) list(c *conn, _ *wire.Request) (any, error) {
	if err := c.ready(); err != nil {
		return nil, err
	}
	for _, p := range srv.processes.all() {
		if c.w.SendJSON(wire.KindItem, p.tell()) != nil {
			return nil, errGone
		}
	}
	return nil, nil
}

// signal is OpSignal.
func (srv *server) signal(c *conn, req *wire.Request) (any, error) {
	p, err := srv.find(req)
	if err != nil {
		return nil, err
	}
	if err := checkSignal(req.Process.Signal); err != nil {
		return nil, err
	}
	if err := p.mustRun(); err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	return nil, p.send(unix.Signal(req.Process.Signal))
}

func checkSignal(sig int) error {
	if sig < 1 || sig > maxSignal {
		return invalid("there is no signal %d, only 1 to %d", sig, maxSignal)
	}
	return nil
}

// kill is OpKill.
func (srv *server) kill(c *conn, req *wire.Request) (any, error) {
	p, err := srv.find(req)
	if err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	if !p.killTree(false) {
		return nil, &wire.Failure{Class: wire.ClassNotKilled, Message: "some of process " + p.id + " could not be killed"}
	}
	return nil, nil
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
