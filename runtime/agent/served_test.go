package agent

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// table is what a program knows of processes.
type table struct {
	mu sync.Mutex
	m  map[string]bool // by ID: whether it runs
}

func (s *table) answer(p *program, req *wire.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m = map[string]bool{}
	}
	id := ""
	if req.Process != nil {
		id = req.Process.ID
	}
	if _, known := s.m[id]; req.Process != nil && !known && req.Op != wire.OpForget {
		p.json(wire.KindFailure, wire.Failure{Class: wire.ClassNotFound, Message: "there is none"})
		return
	}
	if !p.ready() {
		return
	}
	switch req.Op {
	case wire.OpStart:
		id = req.Start.ID
		s.m[id] = true
	case wire.OpEvents:
		for id, runs := range s.m {
			p.item(wire.ProcessInfo{ID: id, Running: runs})
		}
		p.send(wire.KindReady, "")
		s.mu.Unlock()
		p.hungUp()
		s.mu.Lock()
		return
	case wire.OpKill:
		s.m[id] = false
	case wire.OpForget:
		delete(s.m, id)
		id = ""
	}
	if id == "" {
		p.send(wire.KindResult, "{}")
		return
	}
	p.json(wire.KindResult, wire.ProcessInfo{ID: id, Running: s.m[id]})
}

// servedFixture is a container whose program has user 1000, and an engine that starts others.
func servedFixture(t *testing.T) (b *fixture, id string, own, other *table) {
	b = newFixture(t)
	id = b.create(t, "x")
	own, other = new(table), new(table)
	b.serve(t, "x", own.answer)
	b.engine.serves = other.answer
	return b, id, own, other
}

func (b *container) sessions() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.served)
}

// Processes of all users are listed together, and each is reached over its own session,
// which lives as long as any of its processes is known.
func TestServedProcesses(t *testing.T) {
	b, id, _, other := servedFixture(t)
	for process, user := range map[string]string{"mine": "", "its": "33"} {
		if _, _, err := b.Start(t.Context(), id, runtime.Process{ID: process, Command: []string{"x"}, User: user}); err != nil {
			t.Fatal(err)
		}
	}
	for _, user := range []string{"", "33", "44"} {
		for _, process := range []string{"mine", "its"} {
			if _, _, err := b.Start(t.Context(), id, runtime.Process{ID: process, Command: []string{"x"}, User: user}); !errdefs.IsAlreadyExists(err) {
				t.Errorf("%s once more, of user %q: %v", process, user, err)
			}
		}
	}
	list, err := b.ListProcesses(t.Context(), id)
	if err != nil || len(list) != 2 {
		t.Errorf("%+v, %v", list, err)
	}
	if info, err := b.Process(t.Context(), id, "its"); err != nil || !info.Running || !other.m["its"] {
		t.Errorf("%+v, %v", info, err)
	}
	box := b.known(id)
	time.Sleep(3 * hurry.linger)
	if n := box.sessions(); n != 1 {
		t.Fatalf("%d sessions", n)
	}
	must(t, errors.Join(b.Kill(t.Context(), id, "its"), b.Forget(t.Context(), id, "its"), b.Forget(t.Context(), id, "its")))
	await(t, "the session to end", func() bool { return box.sessions() == 0 })
	if list, err := b.ListProcesses(t.Context(), id); err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
}

// Events has the processes of all users, and ends with a session that had some.
func TestServedEvents(t *testing.T) {
	b, id, _, _ := servedFixture(t)
	b.engine.code = 0
	open := func() runtime.Events {
		events, err := b.Events(t.Context(), id)
		must(t, err)
		t.Cleanup(func() { _ = events.Close() })
		return events
	}
	events := open()
	if all, err := events.Next(); err != nil || len(all) != 0 {
		t.Fatalf("%+v, %v", all, err)
	}
	start := runtime.Process{ID: "its", Command: []string{"x"}, User: "33"}
	for range 2 {
		if _, _, err := b.Start(t.Context(), id, start); err != nil {
			t.Fatal(err)
		}
		if all, err := events.Next(); err != nil || len(all) != 1 || all[0].ID != "its" || all[0].User != "33:0" {
			t.Fatalf("%+v, %v", all, err)
		}
		if all, err := open().Next(); err != nil || len(all) != 1 {
			t.Errorf("from the beginning: %+v, %v", all, err)
		}
		must(t, errors.Join(b.Kill(t.Context(), id, "its"), b.Forget(t.Context(), id, "its")))
		await(t, "the session to end", func() bool { return b.known(id).sessions() == 0 })
	}
	if _, _, err := b.Start(t.Context(), id, start); err != nil {
		t.Fatal(err)
	}
	if all, err := events.Next(); err != nil || len(all) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
	b.engine.lose <- 137
	if all, err := events.Next(); !errdefs.IsUnavailable(err) {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestServedListFails checks that a failed list uses no session any longer.
func TestServedListFails(t *testing.T) {
	b, id, _, other := servedFixture(t)
	b.engine.serves = func(p *program, req *wire.Request) {
		if req.Op == wire.OpEvents {
			p.json(wire.KindFailure, wire.Failure{Class: wire.ClassInternal, Message: "no"})
			return
		}
		other.answer(p, req)
	}
	for process, user := range map[string]string{"one": "33", "two": "44", "three": "55"} {
		if _, _, err := b.Start(t.Context(), id, runtime.Process{ID: process, Command: []string{"x"}, User: user}); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := b.ListProcesses(t.Context(), id); err == nil {
		t.Errorf("%+v", list)
	}
	for _, process := range []string{"one", "two", "three"} {
		must(t, errors.Join(b.Kill(t.Context(), id, process), b.Forget(t.Context(), id, process)))
	}
	box := b.known(id)
	await(t, "the sessions to end", func() bool { return box.sessions() == 0 })
}

// A program can't list processes that are another's.
func TestServedForges(t *testing.T) {
	b, id, own, other := servedFixture(t)
	if _, _, err := b.Start(t.Context(), id, runtime.Process{ID: "its", Command: []string{"x"}, User: "33"}); err != nil {
		t.Fatal(err)
	}
	own.mu.Lock() // it has answered that it doesn't know "its"
	own.m = map[string]bool{"mine": true, "its": true}
	own.mu.Unlock()
	other.mu.Lock()
	other.m["mine"], other.m["made-up"] = true, true
	other.mu.Unlock()
	list, err := b.ListProcesses(t.Context(), id)
	if err != nil || len(list) != 2 {
		t.Errorf("%+v, %v", list, err)
	}
}

// When a session ends, and some of its processes can't be killed, that is said.
func TestServedLost(t *testing.T) {
	b, id, _, _ := servedFixture(t)
	begun := make(chan struct{})
	b.engine.serves = func(p *program, req *wire.Request) {
		if p.ready() && req.Op == wire.OpStart {
			close(begun)
			p.hungUp()
		}
	}
	b.engine.code = 1
	go func() {
		<-begun
		b.engine.lose <- 137
	}()
	_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}, User: "33"})
	if !errors.Is(err, runtime.ErrInterrupted) || !errors.Is(err, runtime.ErrNotKilled) {
		t.Error(err)
	}
	if n := b.engine.started("kill"); n != 1 {
		t.Errorf("%d kills", n)
	}
}

// A process that went with its session is no more.
func TestServedProcessLost(t *testing.T) {
	b, id, _, _ := servedFixture(t)
	b.engine.code = 0
	if _, _, err := b.Start(t.Context(), id, runtime.Process{ID: "its", Command: []string{"x"}, User: "33"}); err != nil {
		t.Fatal(err)
	}
	b.engine.lose <- 137
	if err := b.Kill(t.Context(), id, "its"); err != nil && !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	await(t, "it to be lost", func() bool { _, err := b.Process(t.Context(), id, "its"); return errdefs.IsNotFound(err) })
	if list, err := b.ListProcesses(t.Context(), id); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
}

// There are not more sessions than there may be, and they end with the Runtime.
func TestServedMany(t *testing.T) {
	b, id, _, _ := servedFixture(t)
	for n := range maxServed + 2 {
		_, _, err := b.Start(t.Context(), id, runtime.Process{ID: fmt.Sprint("p", n), Command: []string{"x"}, User: fmt.Sprint(n)})
		if n < maxServed && err != nil || n >= maxServed && !errdefs.IsResourceExhausted(err) {
			t.Errorf("%d: %v", n, err)
		}
	}
	must(t, b.Close())
}

// Nothing is started in a paused container.
func TestServedPause(t *testing.T) {
	b, id, _, _ := servedFixture(t)
	must(t, b.Pause(t.Context(), id))
	if _, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}, User: "33"}); !errdefs.IsFailedPrecondition(err) || b.engine.started("serve") != 0 {
		t.Error(err)
	}
}
