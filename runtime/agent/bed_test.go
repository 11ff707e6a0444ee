package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// engine is one in memory, whose containers' first process is this one, or another.
type engine struct {
	*runtimetest.Fake
	mu   sync.Mutex
	pid  int
	spec runtime.Spec // of the last that was made
	exec func(context.Context, runtime.Exec) (runtime.ExecResult, error)
}

func (*engine) Import(context.Context, io.Reader) ([]runtime.Image, error) {
	return nil, runtime.WithClass(errdefs.ErrNotImplemented, errors.New("no images"))
}

func (e *engine) setPid(pid int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pid = pid
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

func (e *engine) Exec(ctx context.Context, id string, x runtime.Exec) (runtime.ExecResult, error) {
	if e.exec != nil {
		return e.exec(ctx, x)
	}
	return e.Fake.Exec(ctx, id, x)
}

// hurry is a pace for tests: what is waited for in vain takes little, and what is to
// come has long.
var hurry = pace{
	hello: 200 * time.Millisecond, reject: time.Millisecond, dial: 300 * time.Millisecond, brief: 10 * time.Millisecond,
	look: 50 * time.Millisecond, ready: 300 * time.Millisecond,
	kill: time.Second, drain: 200 * time.Millisecond, rejoin: 2 * time.Second, answer: time.Second,
	leave: 100 * time.Millisecond,
}

// bed is a Runtime over an engine in memory.
type bed struct {
	*Runtime
	engine *engine
	root   string
	pace   pace
}

func newBed(t testing.TB) *bed { return newBedOf(t, hurry) }

func newBedOf(t testing.TB, p pace) *bed {
	t.Helper()
	root, err := os.MkdirTemp("", "berm") // a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	b := &bed{engine: &engine{Fake: runtimetest.NewFake(runtimetest.FakeOptions{}), pid: os.Getpid()}, root: root, pace: p}
	b.open(t)
	return b
}

// open makes the Runtime, the next one after it was closed.
func (b *bed) open(t testing.TB) {
	t.Helper()
	r, err := newRuntime(Options{Engine: b.engine, Program: "/berm-agent", Root: b.root}, b.pace)
	if err != nil {
		t.Fatal(err)
	}
	b.Runtime = r
	t.Cleanup(func() { _ = r.Close() })
}

func (b *bed) create(t testing.TB, name string) string {
	t.Helper()
	c, err := b.Create(t.Context(), runtime.Spec{Name: name, Image: runtimetest.DefaultImage, Command: []string{"sleep", "100000"}})
	if err != nil {
		t.Fatal(err)
	}
	return c.ID
}

// program is what is at the other end of a connection.
type program struct {
	t  testing.TB
	nc net.Conn
	r  *wire.Reader
	w  *wire.Writer

	gone bool // Berm has said Go in this operation
}

// dial dials as the program in a container does.
func (b *bed) dial(t testing.TB, name string) *program {
	t.Helper()
	nc, err := net.Dial("unix", filepath.Join(b.root, dirName(name), wire.Socket))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	return &program{t: t, nc: nc, r: wire.NewReader(nc), w: wire.NewWriter(nc)}
}

// greeted is a connection of a program that has said Hello.
func (b *bed) greeted(t testing.TB, name string) *program {
	t.Helper()
	p := b.dial(t, name)
	p.json(wire.KindHello, wire.Hello{Version: wire.Version, UID: 1000, GID: 1000})
	return p
}

// serve has a program that answers each request as it is told to.
func (b *bed) serve(t testing.TB, name string, f func(p *program, req *wire.Request)) *program {
	t.Helper()
	p := b.greeted(t, name)
	go p.serve(f)
	return p
}

// Sends may fail: Berm hangs up on who misbehaves.
func (p *program) send(kind wire.Kind, payload string) { _ = p.w.Send(kind, []byte(payload)) }
func (p *program) json(kind wire.Kind, v any)          { _ = p.w.SendJSON(kind, v) }

func (p *program) output(seq int64, data string) {
	_ = p.w.SendOutput(wire.Output{Seq: seq, Data: []byte(data)})
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
	p.gone = err == nil
	return p.gone
}

// end waits for the end of an operation's input; false if something else comes.
func (p *program) end() bool {
	for {
		switch kind, _, err := p.r.Next(); {
		case err != nil:
			return false
		case kind != wire.KindData:
			return kind == wire.KindEnd
		}
	}
}

func (p *program) serve(f func(*program, *wire.Request)) {
	defer func() { _ = p.nc.Close() }()
	for {
		req := p.next()
		if req == nil {
			return
		}
		p.gone = false
		f(p, req)
		if p.gone && (req.Op == wire.OpRun || req.Op == wire.OpAttach) && !p.end() {
			return
		}
	}
}

// hungUp waits until Berm has closed the connection.
func (p *program) hungUp() bool {
	_ = p.nc.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err := io.Copy(io.Discard, p.nc)
	return err == nil || !errors.Is(err, os.ErrDeadlineExceeded)
}

// prints answers OpRun with output and an exit code.
func prints(out string, code int) func(*program, *wire.Request) {
	return func(p *program, req *wire.Request) {
		if req.Op != wire.OpRun || !p.ready() {
			_ = p.nc.Close()
			return
		}
		if out != "" {
			p.output(int64(len(out)), out)
		}
		p.json(wire.KindResult, wire.ProcessInfo{ID: req.Start.ID, ExitCode: code, NextSeq: int64(len(out))})
	}
}
