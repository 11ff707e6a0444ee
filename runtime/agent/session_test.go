package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// hostile opens a stream of a session, and gives it with the connection that the program
// has. What comes there is dropped.
func hostile(t *testing.T) (*call, net.Conn) {
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	s := &session{b: (&Runtime{pace: hurry}).newContainer(""), carrier: near, served: new(served)}
	go func() {
		_ = wire.NewWriter(far).SendJSON(wire.KindHello, wire.Hello{Version: wire.Version})
		_, _ = io.Copy(io.Discard, far)
	}()
	must(t, s.greet(time.Minute))
	nc, err := s.open(wire.OpProcess)
	must(t, err)
	return &call{s: s, nc: nc, r: wire.NewReader(nc)}, far
}

// muxFrame gives the head of a frame of the first stream.
func muxFrame(kind byte, number uint32) []byte {
	head := []byte{0, kind, 0, 0, 0, 0, 0, 1}
	return binary.BigEndian.AppendUint32(head, number)
}

// TestHalfMuxFrame checks that a frame whose rest never comes holds up no deadline.
func TestHalfMuxFrame(t *testing.T) {
	c, far := hostile(t)
	for _, b := range [][]byte{muxFrame(0, 100), {1}, {2}} { // the pipe passes on one after the other
		if _, err := far.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	_ = c.nc.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	ended := make(chan error, 1)
	go func() {
		_, _, err := c.r.Next()
		ended <- err
	}()
	select {
	case err := <-ended:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the deadline passed, and the read goes on")
	}
}

// TestLargeWindow checks that no frame is longer than a piece, however much room the program
// says it has: yamux copies a whole frame, and queues many.
func TestLargeWindow(t *testing.T) {
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	s := &session{b: (&Runtime{pace: hurry}).newContainer(""), carrier: near, served: new(served)}
	go func() { _ = wire.NewWriter(far).SendJSON(wire.KindHello, wire.Hello{Version: wire.Version}) }()
	must(t, s.greet(time.Minute))
	longest := make(chan uint32, 1)
	const size = 1 << 20
	go func() {
		var most uint32
		defer func() { longest <- most }()
		for got := uint32(0); got < size; {
			var head [12]byte
			if _, err := io.ReadFull(far, head[:]); err != nil {
				return
			}
			n := binary.BigEndian.Uint32(head[8:])
			if head[1] != 0 { // the stream is opened
				_, _ = far.Write(muxFrame(1, 1<<30))
				_, _ = far.Write(muxFrame(2, 1)) // an answer to no ping: the frame before was read
				continue
			}
			_, _ = io.CopyN(io.Discard, far, int64(n))
			got, most = got+n, max(most, n)
		}
	}()
	nc, err := s.open(wire.OpProcess)
	must(t, err)
	if _, err := nc.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if n := <-longest; n > maxPiece {
		t.Errorf("a frame of %d bytes", n)
	}
}

// stated is an engine whose container is in one state after the other, and stays in the last.
type stated struct {
	Engine
	states []runtime.State
}

func (e *stated) Inspect(context.Context, string) (runtime.Container, error) {
	now := e.states[0]
	if len(e.states) > 1 {
		e.states = e.states[1:]
	}
	return runtime.Container{State: now}, nil
}

// TestLostWhileResumed checks that a session that was silent in a pause is an error after it.
func TestLostWhileResumed(t *testing.T) {
	engine := &stated{states: []runtime.State{runtime.StatePaused, runtime.StateRunning}}
	b := (&Runtime{Engine: engine, pace: hurry}).newContainer("")
	b.id = "x"
	if err := b.lost(t.Context(), &session{b: b, served: new(served)}, errSilent); !errors.Is(err, errLost) {
		t.Error(err)
	}
}

// TestStreamsOfAllSessions checks that a container has no more streams by having more sessions.
func TestStreamsOfAllSessions(t *testing.T) {
	first, _ := hostile(t)
	second, _ := hostile(t)
	b := first.s.b
	second.s.b = b
	b.served = map[string]*session{"first": first.s, "second": second.s}
	for range 5 {
		b.used[new(session)] = true
	}
	for range wire.MaxStreams - 2 - len(b.used) {
		if _, err := first.s.open(wire.OpProcess); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := second.s.open(wire.OpProcess); !errors.Is(err, errBusy) {
		t.Errorf("one more stream: %v", err)
	}
	third := &session{b: b}
	b.used[third] = true
	if _, err := third.open(wire.OpProcess); !errors.Is(err, errBusy) {
		t.Errorf("one more over the socket: %v", err)
	}
	delete(b.used, third)
	for op, spare := range map[wire.Op]bool{wire.OpKill: true, wire.OpProcess: false} {
		if _, err := second.s.open(op); (err == nil) != spare {
			t.Errorf("one more to %s: %v", op, err)
		}
	}
}

// TestStreamCantBeOpened checks that a stream that a paused container takes no more isn't
// counted, and that not many are tried.
func TestStreamCantBeOpened(t *testing.T) {
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	engine := &stated{states: []runtime.State{runtime.StatePaused}}
	b := (&Runtime{Engine: engine, pace: hurry}).newContainer("")
	s := &session{b: b, carrier: near, served: new(served)}
	b.id, b.served = "x", map[string]*session{"": s}
	go func() { _ = wire.NewWriter(far).SendJSON(wire.KindHello, wire.Hello{Version: wire.Version}) }()
	must(t, s.greet(time.Minute))
	first, err := s.open(wire.OpProcess) // goes out with what is written to it
	must(t, err)
	if _, err := first.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	for range 5 {
		if _, err := s.open(wire.OpProcess); !errors.Is(err, errSilent) {
			t.Fatal(err)
		}
	}
	if n := streams(b); n != 1 || s.mux.NumStreams() != 2 {
		t.Errorf("%d are counted, and %d are there", n, s.mux.NumStreams())
	}
	engine.states = []runtime.State{runtime.StateRunning}
	go func() { _, _ = io.Copy(io.Discard, far) }()
	if _, err := s.open(wire.OpProcess); err != nil || streams(b) != 2 || s.stuck.Load() {
		t.Errorf("%v, and %d are counted", err, streams(b))
	}
}

// TestTake checks how long a connection is waited for: longer while others get theirs, and not as long
// once the program hasn't dialled in time, unless the container was paused.
func TestTake(t *testing.T) {
	slow := hurry
	slow.dial = time.Second
	b := newFixtureOf(t, slow)
	id := b.create(t, "x")
	b.serveAfter(t, "x", time.Hour, func(p *program, req *wire.Request) { // all over one connection
		time.Sleep(slow.dial / 10)
		prints("", 5)(p, req)
	})
	var all errgroup.Group
	for range 15 {
		all.Go(func() error {
			_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}})
			return err
		})
	}
	must(t, all.Wait())
	if n := b.engine.started("serve"); n != 0 {
		t.Errorf("%d were done by another program", n)
	}
	for state, expected := range map[runtime.State]bool{runtime.StatePaused: true, runtime.StateRunning: false} {
		b := (&Runtime{Engine: &stated{states: []runtime.State{state}}, pace: hurry}).newContainer("")
		b.id, b.pid, b.until = "x", 1, time.Now().Add(farAway)
		if _, err := b.take(t.Context()); !errors.Is(err, errLost) {
			t.Error(err)
		}
		if b.until.IsZero() == expected {
			t.Errorf("%s: it is expected until %s", state, b.until)
		}
	}
}

// TestRestarted checks that the program of a restarted container is reached, however many connections of the
// one before are left, and that commands one after the other need few.
func TestRestarted(t *testing.T) {
	b := newFixture(t)
	var pid atomic.Int32
	b.peer = func(*net.UnixConn) (int, error) { return int(pid.Load()), nil }
	start := func(n int) {
		pid.Store(int32(n))
		b.engine.setPid(n)
	}
	start(1)
	id := b.create(t, "x")
	box := b.known(id)
	for range wire.Spares {
		b.greeted(t, "x").hangUp()
	}
	await(t, "all to be taken in", func() bool { return box.connections() == wire.Spares })
	start(2)
	ended := make(chan struct{})
	var program sync.WaitGroup
	program.Go(func() {
		for !box.pidIs(2) {
			b.dial(t, "x").hangUp()
			select {
			case <-ended:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
		b.serve(t, "x", prints("", 5))
	})
	for range 30 {
		if res, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}}); err != nil || res.ExitCode != 5 {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	close(ended)
	program.Wait()
	await(t, "a used and a spare connection alone", func() bool { return box.connections() == 2 })
}

// TestAnotherProcess checks that a connection ends, in use or not, when another process is the container's first.
func TestAnotherProcess(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	ended := make(chan bool, 1)
	b.serve(t, "x", func(p *program, _ *wire.Request) {
		if p.ready() {
			p.begun("p")
			ended <- p.hungUp()
		}
	})
	f, err := b.Follow(t.Context(), id, "p", runtime.Follow{})
	must(t, err)
	spare := b.greeted(t, "x")
	await(t, "both to be taken in", func() bool { return b.known(id).connections() == 3 })
	b.engine.setPid(1)
	b.known(id).ask(t.Context())
	if !<-ended || !spare.hungUp() {
		t.Error("it goes on")
	}
	if _, err := f.Next(); err == nil {
		t.Error("it is followed")
	}
	must(t, f.Close())
}

// TestEventsBeforeNext checks that what a session tells waits for Next, also while another one
// keeps that waiting.
func TestEventsBeforeNext(t *testing.T) {
	told, silent := new(session), new(session)
	e := &events{sessions: map[*session]bool{told: true, silent: true}, changed: map[string]runtime.ProcessInfo{}}
	e.change.L = &e.mu
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for n := range 10 {
			var batch []runtime.ProcessInfo
			for i := range maxListed {
				batch = append(batch, runtime.ProcessInfo{ID: fmt.Sprint(n, "-", i)})
			}
			e.put(told, batch)
		}
	}()
	kept := func() int {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.changed)
	}
	await(t, "the first", func() bool { return kept() == maxListed })
	select {
	case <-ended:
		t.Error("all were taken")
	case <-time.After(50 * time.Millisecond):
	}
	e.put(silent, []runtime.ProcessInfo{{ID: "x"}})
	for n := 0; n < 10*maxListed+1; {
		if kept() > 2*maxListed {
			t.Fatalf("%d are kept", kept())
		}
		all, err := e.Next()
		must(t, err)
		n += len(all)
	}
	<-ended
}

// TestFollowAtAPace checks that a program that ends each stream at once isn't asked without end.
func TestFollowAtAPace(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "a")
	const times = 5
	var asked atomic.Int32
	enough := make(chan struct{})
	b.serve(t, "a", func(p *program, req *wire.Request) {
		if asked.Add(1) == times {
			close(enough)
		}
		if p.ready() {
			p.begun(req.Process.ID)
		}
	})
	begun := time.Now()
	f, err := b.Follow(t.Context(), id, "p", runtime.Follow{})
	must(t, err)
	ended := make(chan struct{})
	go func() {
		_, _ = f.Next()
		close(ended)
	}()
	<-enough
	if took := time.Since(begun); took < (times-1)*20*time.Millisecond {
		t.Errorf("it was asked %d times in %v", times, took)
	}
	must(t, f.Close())
	<-ended
}
