package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/hashicorp/yamux"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// engine is one in memory, whose containers' first process is this one, or another.
type engine struct {
	*runtimetest.Fake
	mu   sync.Mutex
	pid  int
	spec runtime.Spec // of the last that was made
	// serves answers what the engine's programs are asked; nil: there is no program.
	serves func(*program, *wire.Request)
	says   func(net.Conn) // in place of serves, after Hello
	starts []runtime.Program
	code   int      // of a program that isn't there, or of "kill"
	lose   chan int // ends one that serves, with a code
}

func (*engine) Import(context.Context, io.Reader) ([]runtime.Image, error) {
	return nil, runtime.WithClass(errdefs.ErrNotImplemented, errors.New("no images"))
}

func (e *engine) setPid(pid int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pid = pid
}

func (e *engine) setSays(f func(net.Conn)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.says = f
}

func (e *engine) with(c runtime.Container, err error) (runtime.Container, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.Pid != 0 {
		c.Pid = e.pid
	}
	return c, err
}

func (e *engine) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	e.mu.Lock()
	e.spec = spec
	e.mu.Unlock()
	return e.with(e.Fake.Create(ctx, spec))
}

func (e *engine) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	return e.with(e.Fake.Inspect(ctx, id))
}

// Start starts a program that serves, or one that ends.
func (e *engine) Start(ctx context.Context, id string, p runtime.Program) (runtime.Stdio, error) {
	c, err := e.Inspect(ctx, id)
	if err == nil && c.State != runtime.StateRunning {
		err = runtime.Precondition("it doesn't run")
	}
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.starts = append(e.starts, p)
	serves, says := e.serves, e.says
	ours, theirs := net.Pipe()
	s := &stdio{Conn: ours, ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		defer func() { _ = theirs.Close() }()
		if serves == nil && says == nil || p.Command[1] != "serve" {
			s.code = e.code
			return
		}
		uid, _ := strconv.Atoi(p.User)
		d := &dialled{nc: theirs, r: wire.NewReader(theirs), w: wire.NewWriter(theirs)}
		d.json(wire.KindHello, wire.Hello{Version: wire.Version, UID: uid, PID: 7, Begun: 8})
		over := make(chan struct{})
		defer close(over)
		go func() {
			select {
			case s.code = <-e.lose:
				_ = theirs.Close()
			case <-over:
			}
		}()
		if says != nil {
			says(theirs)
			return
		}
		d.mux(serves)
	}()
	return s, nil
}

func (e *engine) started(what string) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.starts {
		if p.Command[1] == what {
			n++
		}
	}
	return n
}

// stdio is that of a program in memory.
type stdio struct {
	net.Conn
	ended chan struct{}
	code  int
}

func (s *stdio) Wait(ctx context.Context) (int, string, error) {
	select {
	case <-s.ended:
		return s.code, "", nil
	case <-ctx.Done():
		return 0, "", runtime.Ended(ctx)
	}
}

// hurry is a pace for tests: what is waited for in vain takes little, and what is to
// come has long.
var hurry = pace{
	reject: time.Millisecond, dial: 300 * time.Millisecond, brief: 10 * time.Millisecond,
	look: 50 * time.Millisecond, ready: 300 * time.Millisecond,
	kill: time.Second, drain: 200 * time.Millisecond, rejoin: 2 * time.Second, answer: time.Second,
	leave: 100 * time.Millisecond, linger: 50 * time.Millisecond, ping: 20 * time.Millisecond, pong: 200 * time.Millisecond,
}

// fixture is a Runtime over an engine in memory.
type fixture struct {
	*Runtime
	engine *engine
	root   string
	pace   pace
}

func newFixture(t testing.TB) *fixture { return newFixtureOf(t, hurry) }

func newFixtureOf(t testing.TB, p pace) *fixture {
	t.Helper()
	root, err := os.MkdirTemp("", "berm") // a short path
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	b := &fixture{engine: &engine{Fake: runtimetest.NewFake(runtimetest.FakeOptions{}), pid: os.Getpid(), lose: make(chan int), code: 127}, root: root, pace: p}
	b.open(t)
	return b
}

// open makes the Runtime, the next one after it was closed.
func (b *fixture) open(t testing.TB) {
	t.Helper()
	r, err := newRuntime(Options{Engine: b.engine, Program: "/berm-agent", Root: b.root}, b.pace)
	must(t, err)
	b.Runtime = r
	t.Cleanup(func() { _ = r.Close() })
}

func (b *fixture) create(t testing.TB, name string) string {
	t.Helper()
	c, err := b.Create(t.Context(), runtime.Spec{Name: name, Image: runtimetest.DefaultImage, Command: []string{"sleep", "100000"}})
	must(t, err)
	return c.ID
}

// dialled is a connection of the program in a container.
type dialled struct {
	t  testing.TB
	nc net.Conn
	r  *wire.Reader
	w  *wire.Writer
}

// dial dials as the program in a container does.
func (b *fixture) dial(t testing.TB, name string) *dialled {
	t.Helper()
	d, err := b.tryDial(t, name)
	must(t, err)
	return d
}

func (b *fixture) tryDial(t testing.TB, name string) (*dialled, error) {
	nc, err := net.Dial("unix", filepath.Join(b.root, dirName(name), wire.Socket))
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = nc.Close() })
	return &dialled{t: t, nc: nc, r: wire.NewReader(nc), w: wire.NewWriter(nc)}, nil
}

// greeted is a connection of a program that has said Hello.
func (b *fixture) greeted(t testing.TB, name string) *dialled {
	t.Helper()
	p := b.dial(t, name)
	p.greet()
	return p
}

func (d *dialled) greet() {
	d.json(wire.KindHello, wire.Hello{Version: wire.Version, UID: 1000, GID: 1000})
}

// serve runs a program that answers requests with f. It dials again whenever a connection gets its first.
func (b *fixture) serve(t testing.TB, name string, f func(p *program, req *wire.Request)) *dialled {
	t.Helper()
	return b.serveAfter(t, name, 0, f)
}

// serveAfter is serve for a program that dials again only after a delay.
func (b *fixture) serveAfter(t testing.TB, name string, delay time.Duration, f func(p *program, req *wire.Request)) *dialled {
	t.Helper()
	first := b.greeted(t, name)
	var serve func(d *dialled)
	serve = func(d *dialled) {
		defer func() { _ = d.nc.Close() }()
		p := &program{t: t, nc: d.nc, r: d.r, w: d.w}
		req := p.next()
		if req == nil {
			return
		}
		go func() {
			select {
			case <-time.After(delay):
			case <-t.Context().Done():
				return
			}
			if next, err := b.tryDial(t, name); err == nil { // else Berm has closed
				next.greet()
				serve(next)
			}
		}()
		for f(p, req); p.result; f(p, req) {
			if req = p.next(); req == nil {
				return
			}
			p.result = false
		}
	}
	go serve(first)
	return first
}

// mux answers each request on a stream of its own, until the session ends.
func (d *dialled) mux(f func(p *program, req *wire.Request)) {
	mux, err := yamux.Server(d.nc, wire.Mux(time.Minute, 0))
	if err != nil {
		return
	}
	defer func() { _ = mux.Close() }()
	for {
		nc, err := mux.Accept()
		if err != nil {
			return
		}
		p := &program{t: d.t, nc: nc, r: wire.NewReader(nc), w: wire.NewWriter(nc)}
		go func() {
			defer func() { _ = nc.Close() }()
			if req := p.next(); req != nil {
				f(p, req)
			}
		}()
	}
}

func (d *dialled) json(kind wire.Kind, v any) { _ = d.w.SendJSON(kind, v) }

func (d *dialled) hangUp() { _ = d.nc.Close() }

// hungUp waits until Berm has closed the connection.
func (d *dialled) hungUp() bool { return closed(d.nc) }

func closed(nc net.Conn) bool {
	_ = nc.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err := io.Copy(io.Discard, nc)
	var late net.Error
	return !errors.As(err, &late) || !late.Timeout()
}

// program is what is at the other end of an operation.
type program struct {
	t      testing.TB
	nc     net.Conn
	r      *wire.Reader
	w      *wire.Writer
	result bool // it was sent
}

// Sends may fail: Berm hangs up on who misbehaves.
func (p *program) send(kind wire.Kind, payload string) {
	p.result = kind == wire.KindResult
	_ = p.w.Send(kind, []byte(payload))
}

func (p *program) json(kind wire.Kind, v any) {
	p.result = kind == wire.KindResult
	_ = p.w.SendJSON(kind, v)
}

func (p *program) output(seq int64, data string) {
	var frame wire.OutputFrame
	_ = p.w.SendFrame(&frame, wire.Output{Seq: seq, Data: frame.Data()[:copy(frame.Data(), data)]})
}

// next is the next request; nil when Berm has hung up.
func (p *program) next() *wire.Request {
	payload, err := p.r.Expect(wire.KindRequest)
	if err != nil {
		return nil
	}
	req := new(wire.Request)
	if err := wire.Decode(payload, req); err != nil {
		p.t.Error(err)
	}
	return req
}

// ready says so, and tells whether Berm says go.
func (p *program) ready() bool {
	p.send(wire.KindReady, "")
	_, err := p.r.Expect(wire.KindGo)
	return err == nil
}

// hungUp waits until Berm has closed the stream.
func (p *program) hungUp() bool { return closed(p.nc) }

// begun says that the process has been started, or is followed.
func (p *program) begun(id string) { p.json(wire.KindItem, wire.ProcessInfo{ID: id, Running: true}) }

// started says that a command has been started, if Berm waits for that.
func (p *program) started(req *wire.Request) {
	if req.Start.Stdin {
		p.begun(req.Start.ID)
	}
}

// prints answers a command with output and an exit code.
func prints(out string, code int) func(*program, *wire.Request) {
	return func(p *program, req *wire.Request) {
		if req.Op != wire.OpStart || !p.ready() {
			_ = p.nc.Close()
			return
		}
		p.started(req)
		if out != "" {
			p.output(int64(len(out)), out)
		}
		p.json(wire.KindResult, wire.ProcessInfo{ID: req.Start.ID, ExitCode: code, NextSeq: int64(len(out))})
	}
}

var must = check.Must // ends a test if a step of its own fails
