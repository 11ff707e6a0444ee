package agent

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	goruntime "runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Where the program makes no answer, or none that can be understood, before it was told to
// go, one that the engine starts does it.
func TestExecFallsBack(t *testing.T) {
	frame := func(kind wire.Kind, size uint32) string {
		return string(binary.BigEndian.AppendUint32([]byte{byte(kind)}, size))
	}
	raw := func(s string) func(*program) { return func(p *program) { _, _ = io.WriteString(p.nc, s) } }
	for name, answer := range map[string]func(p *program){
		"silent":            func(p *program) { p.hungUp() },
		"hangs up":          func(*program) {},
		"garbage":           raw(strings.Repeat("garbage ", 1000)),
		"huge length":       raw(frame(wire.KindResult, 1<<32-1)),
		"no such kind":      raw(frame(200, 0)),
		"half a frame":      raw(frame(wire.KindFailure, 100) + "{"),
		"result, not ready": func(p *program) { p.json(wire.KindResult, wire.ProcessInfo{}) },
		"output, not ready": func(p *program) { p.output(2, "hi") },
		"second hello":      func(p *program) { p.json(wire.KindHello, wire.Hello{Version: wire.Version}) },
		"unreadable":        func(p *program) { p.send(wire.KindFailure, "}") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			id := b.create(t, "x")
			b.engine.serves = prints("hi\n", 0)
			var asked atomic.Int64
			b.serve(t, "x", func(p *program, _ *wire.Request) {
				asked.Add(1)
				answer(p)
			})
			var out bytes.Buffer
			res, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"echo", "hi"}, Stdout: &out})
			if err != nil || b.engine.started("serve") != 1 || out.String() != "hi\n" {
				t.Errorf("%+v, %v, %q", res, err, &out)
			}
			if asked.Load() == 0 {
				t.Error("the program wasn't asked")
			}
		})
	}
}

// Once it was told to go, nobody else runs the command.
func TestExecMisled(t *testing.T) {
	for name, tt := range map[string]struct {
		answer func(p *program, id string)
		out    string
	}{
		"hangs up": {func(*program, string) {}, ""},
		"given up": {func(p *program, _ string) {
			p.output(1, "x")
			p.json(wire.KindFailure, wire.Failure{Class: wire.ClassExhausted})
		}, "x"},
		"garbage":          {func(p *program, _ string) { _, _ = io.WriteString(p.nc, "garbage garbage") }, ""},
		"seq backwards":    {func(p *program, _ string) { p.output(4, "abcd"); p.output(3, "c") }, "abcd"},
		"seq jumps":        {func(p *program, _ string) { p.output(1<<40, "c") }, ""},
		"data":             {func(p *program, _ string) { p.send(wire.KindData, "x") }, ""},
		"items":            {func(p *program, _ string) { p.send(wire.KindItem, "{}") }, ""},
		"still running":    {func(p *program, id string) { p.json(wire.KindResult, wire.ProcessInfo{ID: id, Running: true}) }, ""},
		"unreadable end":   {func(p *program, _ string) { p.send(wire.KindResult, "[") }, ""},
		"ready once more":  {func(p *program, _ string) { p.send(wire.KindReady, "") }, ""},
		"large and broken": {func(p *program, _ string) { p.output(1<<16, strings.Repeat("x", 1<<16)) }, strings.Repeat("x", 1<<16)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			id := b.create(t, "x")
			var kills atomic.Int64
			b.serve(t, "x", func(p *program, req *wire.Request) {
				switch req.Op {
				case wire.OpStart:
					if p.ready() {
						tt.answer(p, req.Start.ID)
					}
				case wire.OpKill:
					kills.Add(1)
					if p.ready() {
						p.send(wire.KindResult, "null")
					}
				}
			})
			var out bytes.Buffer
			_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"echo", "hi"}, Stdout: &out})
			if !errdefs.IsFailedPrecondition(err) || !errors.Is(err, runtime.ErrInterrupted) || errors.Is(err, runtime.ErrNotKilled) {
				t.Error(err)
			}
			if out.String() != tt.out || kills.Load() == 0 {
				t.Errorf("%d bytes of output, %d kills", out.Len(), kills.Load())
			}
			if b.engine.started("serve") != 0 {
				t.Errorf("another program was asked, too")
			}
		})
	}
}

// A command that never began, for want of room, is no broken one.
func TestExecNoRoom(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	b.serve(t, "x", func(p *program, _ *wire.Request) {
		if p.ready() {
			p.json(wire.KindFailure, wire.Failure{Class: wire.ClassExhausted, Message: "full"})
		}
	})
	_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}, Stdin: strings.NewReader("y")})
	if !errors.Is(err, runtime.ErrNoRoom) || !errdefs.IsResourceExhausted(err) || errors.Is(err, runtime.ErrInterrupted) || !strings.Contains(err.Error(), "full") {
		t.Error(err)
	}
}

// runner answers as the program does, for commands that end when they are killed.
type runner struct {
	mu      sync.Mutex
	killed  map[string]chan struct{}
	refusal *wire.Failure // of kills
}

func (s *runner) of(id string) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.killed == nil {
		s.killed = map[string]chan struct{}{}
	}
	if s.killed[id] == nil {
		s.killed[id] = make(chan struct{})
	}
	return s.killed[id]
}

func (s *runner) answer(p *program, req *wire.Request) {
	if !p.ready() {
		return
	}
	switch req.Op {
	case wire.OpStart:
		p.started(req)
		p.output(7, "partial")
		<-s.of(req.Start.ID)
		p.output(11, "last")
		p.json(wire.KindResult, wire.ProcessInfo{ID: req.Start.ID, ExitCode: 137, Signal: 9, Killed: true})
	case wire.OpKill:
		if s.refusal != nil {
			p.json(wire.KindFailure, s.refusal)
			return
		}
		close(s.of(req.Process.ID))
		p.send(wire.KindResult, "null")
	}
}

// TestExecNotKilled checks that a canceled command whose kill fails is an error of both kinds.
func TestExecNotKilled(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	s := &runner{refusal: &wire.Failure{Class: wire.ClassNotKilled, Message: "some survived"}}
	b.serve(t, "x", s.answer)
	cause := errors.New("the cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	_, err := b.Exec(ctx, id, runtime.Exec{Command: []string{"x"}, Stdout: writerFunc(func(p []byte) (int, error) {
		cancel(cause)
		return len(p), nil
	})})
	if !errors.Is(err, cause) || !errdefs.IsCanceled(err) || !errors.Is(err, runtime.ErrNotKilled) {
		t.Error(err)
	}
}

// A command that is killed while a frame is on its way can't pass its output off as
// anything else.
func TestExecCanceledInMidFrame(t *testing.T) {
	frame := func(say func(*program)) string {
		var buf bytes.Buffer
		say(&program{w: wire.NewWriter(&buf)})
		return buf.String()
	}
	forged := frame(func(p *program) { p.output(12, "forged") }) +
		frame(func(p *program) { p.json(wire.KindResult, wire.ProcessInfo{}) }) +
		frame(func(p *program) { p.send(wire.KindReady, "") })
	first := frame(func(p *program) { p.output(6, "first ") })
	seq := int64(6 + len(forged))
	second := frame(func(p *program) { p.output(seq, forged) })
	for _, cut := range []int{1, 5, 6, 14, len(second) - len(forged), len(second) - 1} {
		b := newFixture(t)
		id := b.create(t, "x")
		killed := make(chan struct{})
		answer := func(p *program, req *wire.Request) {
			switch {
			case !p.ready():
				return
			case req.Op == wire.OpKill:
				close(killed)
				p.send(wire.KindResult, "null")
				return
			case req.Op != wire.OpStart:
				t.Errorf("cut at %d: it was asked to %s", cut, req.Op)
				return
			}
			_, _ = io.WriteString(p.nc, first+second[:cut])
			<-killed
			_, _ = io.WriteString(p.nc, second[cut:])
			p.json(wire.KindResult, wire.ProcessInfo{ID: req.Start.ID, ExitCode: 137})
		}
		b.serve(t, "x", answer)
		ctx, cancel := context.WithCancel(t.Context())
		var out bytes.Buffer
		_, err := b.Exec(ctx, id, runtime.Exec{Command: []string{"x"}, Stdout: writerFunc(func(p []byte) (int, error) {
			cancel()
			return out.Write(p)
		})})
		if !errdefs.IsCanceled(err) || errors.Is(err, runtime.ErrNotKilled) || out.String() != "first "+forged {
			t.Errorf("cut at %d: %v, %q", cut, err, &out)
		}
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// Output that can't be delivered ends the command.
func TestExecWriterFails(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	s := new(runner)
	b.serve(t, "x", s.answer)
	full := errors.New("full")
	_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}, Stdout: writerFunc(func([]byte) (int, error) { return 0, full })})
	if !errors.Is(err, full) || errors.Is(err, runtime.ErrNotKilled) {
		t.Error(err)
	}
}

// Before it was told to go the command never was, and hanging up is enough.
func TestExecCanceledBeforeReady(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	asked, gone := make(chan struct{}), make(chan bool, 1)
	b.serve(t, "x", func(p *program, _ *wire.Request) {
		close(asked)
		gone <- p.hungUp()
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	_, err := b.Exec(ctx, id, runtime.Exec{Command: []string{"x"}})
	if !errdefs.IsCanceled(err) || errors.Is(err, runtime.ErrNotKilled) || !<-gone {
		t.Error(err)
	}
	if b.engine.started("serve") != 0 {
		t.Error("another program was asked")
	}
}

func TestExecContainerEnds(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	b.serve(t, "x", func(p *program, _ *wire.Request) {
		if p.ready() {
			if err := b.engine.Remove(context.WithoutCancel(t.Context()), id); err != nil {
				t.Error(err)
			}
			_ = p.nc.Close()
		}
	})
	_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}})
	if !errdefs.IsFailedPrecondition(err) || !errors.Is(err, runtime.ErrInterrupted) || errors.Is(err, runtime.ErrNotKilled) {
		t.Error(err)
	}
}

// A command whose input can't be opened doesn't wait for it.
func TestExecStdinRefused(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	s := new(runner)
	b.serve(t, "x", func(p *program, req *wire.Request) {
		if req.Op == wire.OpInput {
			p.json(wire.KindFailure, wire.Failure{Class: wire.ClassExhausted, Message: "full"})
			return
		}
		s.answer(p, req)
	})
	_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}, Stdin: strings.NewReader("y")})
	if !errdefs.IsResourceExhausted(err) || errors.Is(err, runtime.ErrNotKilled) || !strings.Contains(err.Error(), "full") {
		t.Error(err)
	}
}

func (b *container) connections() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.spare) + len(b.warm) + len(b.used)
}

// A command of another user than the program's goes over a session of that user's.
func TestExecUser(t *testing.T) {
	for user, other := range map[string]bool{
		"": false, "1000": false, "1000:1000": false, "1000:0": true, "0": true, "0:0": true,
	} {
		b := newFixture(t)
		id := b.create(t, "x")
		b.serve(t, "x", prints("", 1))
		b.engine.serves = prints("", 2)
		for range 2 { // in one session
			res, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"true"}, User: user})
			if err != nil || (res.ExitCode == 2) != other {
				t.Errorf("user %q: %+v, %v", user, res, err)
			}
		}
		if n := b.engine.started("serve"); (n == 1) != other || other && b.engine.starts[0].User != user {
			t.Errorf("user %q: %d were started", user, n)
		}
	}
}

func TestExecRefused(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	for name, e := range map[string]runtime.Exec{
		"no command":         {},
		"relative directory": {Command: []string{"x"}, WorkingDir: "y"},
		"zero byte":          {Command: []string{"x\x00"}},
		"not UTF-8":          {Command: []string{"x"}, Env: []string{"A=\xff"}},
	} {
		if _, err := b.Exec(t.Context(), id, e); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b.serve(t, "x", func(p *program, _ *wire.Request) {
		p.json(wire.KindFailure, wire.Failure{Class: wire.ClassInvalid, Message: strings.Repeat("é", maxReason)})
	})
	_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}, WorkingDir: "/no"})
	if !errdefs.IsInvalidArgument(err) || len(err.Error()) > 2*maxReason {
		t.Error(err)
	}
}

// Only the container's first process is heard.
func TestPeer(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	b.engine.setPid(1)
	b.known(id).ask(t.Context())
	if p := b.dial(t, "x"); !p.hungUp() {
		t.Error("another process was taken in")
	}
	// One that came before the engine told who is the first is found out.
	other := newFixture(t)
	other.engine.setPid(1)
	c := other.create(t, "y")
	other.known(c).meet(runtime.Container{})
	other.engine.serves = prints("true\n", 0)
	p := other.serve(t, "y", prints("forged\n", 0))
	var out bytes.Buffer
	res, err := other.Exec(t.Context(), c, runtime.Exec{Command: []string{"echo", "true"}, Stdout: &out})
	if err != nil || out.String() != "true\n" || !p.hungUp() {
		t.Errorf("%+v, %v, %q", res, err, &out)
	}
	// And one whose process is the first only now is taken.
	other.engine.setPid(os.Getpid())
	for end := time.Now().Add(20 * time.Second); !other.known(c).pidIs(os.Getpid()); other.greeted(t, "y").hangUp() {
		if time.Now().After(end) {
			t.Fatal("the engine isn't asked who the first process is")
		}
		if _, err := other.Exec(t.Context(), c, runtime.Exec{Command: []string{"echo"}}); err != nil {
			t.Fatal(err)
		}
	}
	other.serve(t, "y", prints("", 5))
	if res, err = other.Exec(t.Context(), c, runtime.Exec{Command: []string{"echo"}}); err != nil || res.ExitCode != 5 {
		t.Errorf("%+v, %v", res, err)
	}
}

// A program that this process can't see may be any process of the sandbox. It isn't
// believed, and the engine serves the container.
func TestPeerUnseen(t *testing.T) {
	for _, pid := range []int{os.Getpid(), 0} { // of the first process; 0 isn't known yet
		b := newFixture(t)
		b.engine.setPid(pid)
		b.peer = func(*net.UnixConn) (int, error) { return 0, nil }
		id := b.create(t, "x")
		if p := b.greeted(t, "x"); pid != 0 && !p.hungUp() || b.known(id).connections() > 0 {
			t.Error("an unseen process was taken in")
		}
		b.engine.serves = func(p *program, _ *wire.Request) {
			if p.ready() {
				p.json(wire.KindResult, aFile)
			}
		}
		if err := stat(t.Context(), b, id); err != nil {
			t.Errorf("stat: %v", err)
		}
	}
}

func (b *container) pidIs(pid int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pid == pid
}

func TestHello(t *testing.T) {
	for name, say := range map[string]func(*dialled){
		"nothing":       func(*dialled) {},
		"garbage":       func(p *dialled) { _, _ = io.WriteString(p.nc, "GET / HTTP/1.1\r\n\r\n") },
		"other version": func(p *dialled) { p.json(wire.KindHello, wire.Hello{Version: 1}) },
		"no user":       func(p *dialled) { p.json(wire.KindHello, wire.Hello{Version: wire.Version, UID: -1}) },
		"request":       func(p *dialled) { p.json(wire.KindRequest, wire.Request{Op: wire.OpEvents}) },
		"long": func(p *dialled) {
			_, _ = p.nc.Write(binary.BigEndian.AppendUint32([]byte{byte(wire.KindHello)}, wire.MaxHello+1))
			_, _ = fmt.Fprintf(p.nc, "%-*s", wire.MaxHello+1, `{"version":4}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			id := b.create(t, "x")
			p := b.dial(t, "x")
			await(t, "it to be taken in", b.known(id).waits)
			say(p)
			_, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"true"}})
			if !p.hungUp() {
				t.Error("it was believed")
			}
			if old := name == "other version"; errdefs.IsFailedPrecondition(err) != old || errdefs.IsNotImplemented(err) == old {
				t.Error(err)
			}
		})
	}
}

// However many connections a container makes, few are kept.
func TestFlood(t *testing.T) {
	b := newFixture(t)
	box := b.known(b.create(t, "x"))
	for range 2 * wire.Spares {
		b.dial(t, "x") // and says nothing
		b.greeted(t, "x")
	}
	await(t, "the connections to be looked at", func() bool { return box.connections() == wire.Spares })
	last := b.dial(t, "x")
	if !last.hungUp() || box.connections() != wire.Spares {
		t.Errorf("%d are kept", box.connections())
	}
}

// What an agent never sends, and would cost memory, ends its session.
func TestInbound(t *testing.T) {
	frame := func(kind byte, flags uint16, id, size uint32) string {
		head := binary.BigEndian.AppendUint16([]byte{0, kind}, flags)
		return string(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(head, id), size))
	}
	for name, said := range map[string]string{
		"a stream":           frame(1, 1, 2, 0),
		"a stream with data": frame(0, 1, 2, 1) + "x",
		"a ping":             frame(2, 1, 0, 1),
		"a known stream":     frame(1, 1, 1, 0),
		"much data":          frame(0, 2, 1, 1<<30),
		"an odd kind":        frame(4, 0, 0, 0),
		"an odd version":     "\x01" + frame(1, 0, 1, 0)[1:],
		"after data":         frame(0, 0, 99, 12) + frame(2, 1, 0, 1) + frame(2, 1, 0, 1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			id := b.create(t, "x")
			hungUp := make(chan bool, maxRetries)
			b.engine.says = func(nc net.Conn) {
				_, _ = nc.Read(make([]byte, 1)) // a stream was opened
				_, _ = io.WriteString(nc, said)
				hungUp <- closed(nc)
			}
			if _, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}}); !errdefs.IsUnavailable(err) {
				t.Error(err)
			}
			if !<-hungUp {
				t.Error("the session goes on")
			}
		})
	}
}

func await(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// A new Runtime finds the containers of the one before.
func TestRestart(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	if _, err := New(Options{Engine: b.engine, Program: "/p", Root: b.root}); err == nil {
		t.Error("two have one root")
	}
	must(t, b.Close())
	b.open(t)
	b.serve(t, "x", prints("", 5))
	if res, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}}); err != nil || res.ExitCode != 5 {
		t.Errorf("%+v, %v", res, err)
	}
	// Without its directory the engine starts the program.
	must(t, b.Close())
	must(t, os.RemoveAll(filepath.Join(b.root, dirName("x"))))
	b.open(t)
	b.engine.serves = prints("", 6)
	if res, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"true"}}); err != nil || res.ExitCode != 6 {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestNothingLeaks(t *testing.T) {
	files := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(entries)
	}
	goroutines, open := goruntime.NumGoroutine(), files()
	t.Run("used", testUsed) // what it opened itself, it has closed after
	await(t, "the goroutines to end", func() bool { return goruntime.NumGoroutine() <= goroutines })
	await(t, "the files to be closed", func() bool { return files() <= open })
}

func testUsed(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	s := new(runner)
	for range 5 {
		b.serve(t, "x", s.answer)
		b.dial(t, "x").hangUp()
	}
	running := func(commands int) {
		await(t, "the command to run", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.killed) == commands
		})
	}
	underWay := make(chan error)
	run := func(ctx context.Context) {
		_, err := b.Exec(ctx, id, runtime.Exec{Command: []string{"x"}})
		underWay <- err
	}
	for i := range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		go run(ctx)
		running(i + 1)
		cancel()
		if err := <-underWay; !errdefs.IsCanceled(err) {
			t.Error(err)
		}
	}
	go run(context.Background())
	running(4)
	must(t, b.Close())
	if err := <-underWay; !errdefs.IsUnavailable(err) || !errors.Is(err, runtime.ErrNotKilled) {
		t.Errorf("a command under way: %v", err)
	}
	for _, done := range s.killed {
		select {
		case <-done:
		default:
			close(done)
		}
	}
}

// FuzzNumbers puts any number into each field of what a container says.
func FuzzNumbers(f *testing.F) {
	var fields []string
	for _, said := range []any{wire.Hello{}, wire.ProcessInfo{}, wire.FileInfo{}, wire.FileMatch{}, wire.FileEvent{}, wire.Failure{}} {
		for field := range reflect.TypeOf(said).Fields() {
			if field.Type.Kind() >= reflect.Int && field.Type.Kind() <= reflect.Float64 {
				name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
				fields = append(fields, name)
			}
		}
	}
	for i := range fields {
		for _, n := range []string{"-1", "0", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "1152921504606846977", "1e400"} {
			f.Add(uint8(i), n)
		}
	}
	sound := func(numbers ...int64) bool {
		return slices.Min(numbers) >= 0 && slices.Max(numbers) <= 1<<60
	}
	f.Fuzz(func(t *testing.T, field uint8, number string) {
		name := fields[int(field)%len(fields)]
		say := func(more string) []byte { return fmt.Appendf(nil, `{%s"%s":%s}`, more, name, number) }
		for _, more := range []string{"", `"next_seq":1152921504606846976,`, `"first_seq":9223372036854775806,`} {
			p, err := parseProcess(say(`"id":"p",`+more), "p")
			if err == nil && (!sound(p.FirstSeq, p.NextSeq, p.PeakMemoryBytes, int64(p.CPUTime), int64(p.ExitCode), int64(p.Signal)) ||
				p.FirstSeq > p.NextSeq || p.ExitCode > 255 || p.Signal > wire.MaxSignal || p.EndedAt.Year() > 2262) {
				t.Errorf("%+v", p)
			}
		}
		if i, err := parseFile(say(`"path":"Lw==",`)); err == nil && (!sound(i.Size, int64(i.UID), int64(i.GID)) || i.ModTime.Year() > 2262) {
			t.Errorf("%+v", i)
		}
		if m, err := parseMatch(say(`"path":"Lw==",`)); err == nil && !sound(int64(m.Line)) {
			t.Errorf("%+v", m)
		}
		var hello bytes.Buffer
		_ = wire.NewWriter(&hello).Send(wire.KindHello, say(fmt.Sprintf(`"version":%d,`, wire.Version)))
		ours, theirs := net.Pipe()
		go func() { _, _ = theirs.Write(hello.Bytes()); _ = theirs.Close() }()
		s := &session{b: &container{r: &Runtime{}}, served: new(served), carrier: ours}
		if err := s.greet(time.Minute); err == nil && !sound(int64(s.hello.UID), int64(s.hello.GID), int64(s.hello.PID)) {
			t.Errorf("%+v", s.hello)
		}
		_ = ours.Close()
	})
}

// FuzzAgentSays has a container say anything: before it is asked, and after.
func FuzzAgentSays(f *testing.F) {
	seed := func(frames ...func(*program)) []byte {
		var buf bytes.Buffer
		p := &program{w: wire.NewWriter(&buf)}
		for _, frame := range frames {
			frame(p)
		}
		return buf.Bytes()
	}
	ready := func(p *program) { p.send(wire.KindReady, "") }
	f.Add([]byte(nil), uint8(0))
	f.Add([]byte("garbage"), uint8(1))
	begun := func(p *program) { p.begun("p") }
	f.Add(seed(ready, func(p *program) { p.output(2, "hi") }, func(p *program) { p.json(wire.KindResult, wire.ProcessInfo{ID: "x"}) }), uint8(0))
	f.Add(seed(ready, begun, func(p *program) { p.output(2, "hi") }, func(p *program) { p.json(wire.KindResult, wire.ProcessInfo{ID: "p"}) }), uint8(6))
	f.Add(seed(ready, ready, ready, ready), uint8(8))
	f.Add(seed(ready, begun, ready, begun, ready, ready), uint8(9))
	f.Add(seed(ready, func(p *program) { p.json(wire.KindItem, wire.FileInfo{Path: []byte("/x")}) }, func(p *program) { p.send(wire.KindResult, "null") }), uint8(2))
	f.Add(seed(ready, func(p *program) { p.json(wire.KindFailure, wire.Failure{Class: wire.ClassExists}) }), uint8(3))
	f.Add(seed(ready, func(p *program) { p.json(wire.KindItem, wire.FileEvent{Type: "ready"}) }), uint8(4))
	b := newFixtureOf(f, pace{
		reject: time.Millisecond, dial: time.Millisecond, brief: time.Millisecond, look: 5 * time.Millisecond,
		ready: 10 * time.Millisecond, kill: 10 * time.Millisecond, drain: time.Millisecond, rejoin: 10 * time.Millisecond, answer: 20 * time.Millisecond,
		leave: time.Millisecond, linger: time.Millisecond, ping: time.Second, pong: 5 * time.Millisecond,
	})
	id := b.create(f, "x")
	box := b.known(id)
	debug.SetTraceback("all")
	f.Fuzz(func(t *testing.T, said []byte, op uint8) { // op's highest bit: over the stdio of the engine's program
		hangs := time.AfterFunc(2*time.Minute, func() { panic("it doesn't end") }) // which nothing else would tell
		defer hangs.Stop()
		speak := func(nc net.Conn) {
			_, _ = nc.Read(make([]byte, 1))
			_, _ = nc.Write(said)
			_ = nc.Close()
		}
		b.engine.setSays(nil)
		if op < 128 {
			p := b.greeted(t, "x")
			await(t, "it to be taken in", box.waits)
			go speak(p.nc)
		} else {
			b.engine.setSays(speak)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var err error
		switch op % 128 % 10 {
		case 0:
			_, err = b.Exec(ctx, id, runtime.Exec{Command: []string{"x"}})
		case 1:
			err = stat(ctx, b, id)
		case 2:
			n := 0
			err = glob(ctx, b, id, 3, func(f runtime.FileInfo) error {
				if n++; n > 3 || len(f.Path) > runtime.MaxPath || f.Path[0] != '/' || f.Size < 0 {
					t.Errorf("number %d: %+v", n, f)
				}
				return nil
			})
		case 3:
			_, err = b.Process(ctx, id, "p")
		case 4:
			err = watch(ctx, b, id)
		case 5:
			var out bytes.Buffer
			err = read(ctx, b, id, 10, &out)
			if out.Len() > 10 {
				t.Errorf("%d bytes of 10", out.Len())
			}
		case 6:
			var a runtime.Follower
			if a, err = b.Follow(ctx, id, "p", runtime.Follow{}); err == nil {
				var seq int64
				for err == nil {
					var c runtime.Chunk
					if c, err = a.Next(); err == nil && c.Seq <= seq {
						t.Errorf("%d after %d", c.Seq, seq)
					}
					seq = c.Seq
				}
				_ = a.Close()
			}
		case 7:
			_, err = b.ListProcesses(ctx, id)
		case 8:
			var in runtime.Input
			if in, err = b.Input(ctx, id, "p"); err == nil {
				_, err = in.Write(make([]byte, 1<<20))
				err = errors.Join(err, in.CloseWrite(), in.Close())
			}
		case 9:
			var events runtime.Events
			if events, err = b.Events(ctx, id); err == nil {
				for err == nil {
					var all []runtime.ProcessInfo
					if all, err = events.Next(); len(all) > 2*maxListed {
						t.Errorf("%d processes", len(all))
					}
				}
				_ = events.Close()
			}
		}
		if ctx.Err() != nil {
			t.Errorf("it took too long: %v", err)
		}
	})
}

// TestVersion holds the two names of the protocol's version together: wire imports nothing of ours.
func TestVersion(t *testing.T) {
	if wire.Version != runtime.AgentVersion {
		t.Errorf("wire.Version is %d, runtime.AgentVersion %d", wire.Version, runtime.AgentVersion)
	}
}
