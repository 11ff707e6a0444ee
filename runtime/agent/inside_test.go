package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// answers has the container answer every request so, once it was told to go.
func answers(t *testing.T, frames func(p *program)) (*fixture, string) {
	t.Helper()
	b := newFixture(t)
	id := b.create(t, "x")
	b.serve(t, "x", func(p *program, _ *wire.Request) {
		if p.ready() {
			frames(p)
		}
	})
	return b, id
}

func (p *program) item(v any) { p.json(wire.KindItem, v) }

var aFile = wire.FileInfo{Path: []byte("/x"), Mode: 0o100644}

func stat(ctx context.Context, files runtime.Insider, id string) error {
	return files.File(ctx, id, runtime.FileOp{Verb: runtime.FileStat, Path: "/x"}, runtime.FileIO{})
}

func glob(ctx context.Context, files runtime.Insider, id string, limit int, f func(runtime.FileInfo) error) error {
	return files.File(ctx, id, runtime.FileOp{Verb: runtime.FileGlob, Path: "/", Pattern: "*", Limit: limit}, runtime.FileIO{Info: f})
}

func read(ctx context.Context, files runtime.Insider, id string, length int64, out io.Writer) error {
	return files.File(ctx, id, runtime.FileOp{Verb: runtime.FileRead, Path: "/x", Length: length}, runtime.FileIO{Out: out})
}

func watch(ctx context.Context, files runtime.Insider, id string) error {
	ignore := func(runtime.FileEvent) error { return nil }
	return files.File(ctx, id, runtime.FileOp{Verb: runtime.FileWatch, Path: "/", Recursive: true}, runtime.FileIO{Event: ignore})
}

// TestMisled checks that an operation ends where what comes can't be believed.
func TestMisled(t *testing.T) {
	file := func(change func(*wire.FileInfo)) func(*program) {
		return func(p *program) {
			f := aFile
			change(&f)
			p.json(wire.KindResult, f)
		}
	}
	glob := func(b *fixture, id string) error {
		n := 0
		return glob(context.Background(), b, id, 5, func(runtime.FileInfo) error {
			if n++; n > 5 {
				return errors.New("too many")
			}
			return nil
		})
	}
	stat := func(b *fixture, id string) error { return stat(context.Background(), b, id) }
	read := func(b *fixture, id string) error {
		var out bytes.Buffer
		err := read(context.Background(), b, id, 4, &out)
		if out.Len() > 4 {
			err = errors.New("more was handed on than was asked for")
		}
		return err
	}
	search := func(b *fixture, id string) error {
		return b.File(context.Background(), id, runtime.FileOp{Verb: runtime.FileSearch, Path: "/", Pattern: "x"},
			runtime.FileIO{Match: func(runtime.FileMatch) error { return nil }})
	}
	watch := func(b *fixture, id string) error { return watch(context.Background(), b, id) }
	said := func(change func(*wire.ProcessInfo)) func(*program) {
		return func(p *program) {
			info := wire.ProcessInfo{ID: "p", Running: true}
			change(&info)
			p.json(wire.KindResult, info)
		}
	}
	look := func(b *fixture, id string) error {
		_, err := b.Process(t.Context(), id, "p")
		return err
	}
	list := func(b *fixture, id string) error {
		_, err := b.ListProcesses(t.Context(), id)
		return err
	}
	signal := func(b *fixture, id string) error { return b.Signal(t.Context(), id, "p", 15) }
	follow := func(b *fixture, id string) error {
		w, err := b.Follow(t.Context(), id, "p", runtime.Follow{})
		if err == nil {
			_, err = w.Next()
		}
		return err
	}
	write := func(b *fixture, id string) error {
		in, err := b.Input(t.Context(), id, "p")
		if err == nil {
			_, err = in.Write([]byte("x"))
		}
		return err
	}
	told := func(b *fixture, id string) error {
		events, err := b.Events(t.Context(), id)
		for err == nil {
			_, err = events.Next()
		}
		return err
	}
	endless := func(p *program) {
		p.endless(func() error { return p.w.SendJSON(wire.KindItem, wire.ProcessInfo{ID: "p"}) })
	}
	for name, tt := range map[string]struct {
		answer func(*program)
		call   func(*fixture, string) error
	}{
		"relative path":     {file(func(f *wire.FileInfo) { f.Path = []byte("x") }), stat},
		"no path":           {file(func(f *wire.FileInfo) { f.Path = nil }), stat},
		"long path":         {file(func(f *wire.FileInfo) { f.Path = []byte("/" + strings.Repeat("x", runtime.MaxPath)) }), stat},
		"zero in path":      {file(func(f *wire.FileInfo) { f.Path = []byte("/\x00") }), stat},
		"long target":       {file(func(f *wire.FileInfo) { f.Target = make([]byte, runtime.MaxPath+1) }), stat},
		"output for result": {func(p *program) { p.output(1, "x") }, stat},
		"not JSON":          {func(p *program) { p.send(wire.KindResult, "x") }, stat},
		"hangs up":          {func(*program) {}, stat},
		"endless items":     {func(p *program) { p.endless(func() error { return p.w.SendJSON(wire.KindItem, aFile) }) }, glob},
		"items of garbage":  {func(p *program) { p.send(wire.KindItem, "[]") }, glob},
		"data without item": {func(p *program) { p.send(wire.KindData, "x") }, read},
		"more than asked":   {func(p *program) { p.item(aFile); p.send(wire.KindData, "12345") }, read},
		"endless data": {func(p *program) {
			p.item(aFile)
			p.endless(func() error { return p.w.Send(wire.KindData, []byte("1")) })
		}, read},
		"second item":        {func(p *program) { p.item(aFile); p.item(aFile) }, read},
		"line 0":             {func(p *program) { p.item(wire.FileMatch{Path: []byte("/x")}) }, search},
		"long line":          {func(p *program) { p.item(wire.FileMatch{Path: []byte("/x"), Line: 1, Text: make([]byte, maxLine+1)}) }, search},
		"matches of nothing": {func(p *program) { p.item(wire.FileMatch{Line: 1}) }, search},
		"odd event":          {func(p *program) { p.item(wire.FileEvent{Type: "odd", Path: []byte("/x")}) }, watch},
		"event of nothing":   {func(p *program) { p.item(wire.FileEvent{Type: "modify"}) }, watch},

		"another ID":     {said(func(p *wire.ProcessInfo) { p.ID = "q" }), look},
		"places":         {said(func(p *wire.ProcessInfo) { p.FirstSeq, p.NextSeq = 2, 1 }), look},
		"many arguments": {said(func(p *wire.ProcessInfo) { p.Command = make([]string, maxCommand+2) }), look},
		"long command":   {said(func(p *wire.ProcessInfo) { p.Command = []string{strings.Repeat("x", maxCommand+1)} }), look},
		"label":          {said(func(p *wire.ProcessInfo) { p.Label = strings.Repeat("x", wire.MaxLabel+1) }), look},
		"time":           {said(func(p *wire.ProcessInfo) { p.StartedAt = -1 }), look},
		"endless list":   {endless, list},
		"no answer":      {func(p *program) { p.hungUp() }, signal}, // for longer than is waited

		"another process":      {func(p *program) { p.begun("q") }, follow},
		"another place":        {func(p *program) { p.json(wire.KindItem, wire.ProcessInfo{ID: "p", FirstSeq: 1, NextSeq: 2}) }, follow},
		"output at first":      {func(p *program) { p.output(1, "x") }, follow},
		"end of another":       {func(p *program) { p.begun("p"); p.json(wire.KindResult, wire.ProcessInfo{ID: "q"}) }, follow},
		"end of one that runs": {func(p *program) { p.begun("p"); p.json(wire.KindResult, wire.ProcessInfo{ID: "p", Running: true}) }, follow},
		"another item":         {func(p *program) { p.begun("p"); p.begun("p") }, follow},
		"result at first":      {func(p *program) { p.send(wire.KindResult, "{}") }, write},
		"result for data":      {func(p *program) { p.send(wire.KindReady, ""); p.send(wire.KindResult, "{}") }, write},
		"result of events":     {func(p *program) { p.send(wire.KindResult, "{}") }, told},
		"unreadable events":    {func(p *program) { p.send(wire.KindItem, "[]") }, told},
		"endless events":       {endless, told},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, id := answers(t, tt.answer)
			if name != "no answer" {
				b.Runtime.pace.answer = time.Minute
			}
			err := tt.call(b, id)
			if !errdefs.IsFailedPrecondition(err) || !errors.Is(err, runtime.ErrInterrupted) {
				t.Fatal(err)
			}
			if ended := name == "hangs up" || name == "no answer"; strings.Contains(err.Error(), wire.ErrProtocol.Error()) == ended {
				t.Error(err)
			}
		})
	}
}

// endless repeats until Berm has hung up.
func (p *program) endless(f func() error) {
	for f() == nil {
	}
}

func TestClasses(t *testing.T) {
	for class, is := range map[wire.Class]func(error) bool{
		wire.ClassNotFound: errdefs.IsNotFound, wire.ClassExists: errdefs.IsAlreadyExists, wire.ClassInvalid: errdefs.IsInvalidArgument,
		wire.ClassPrecondition: errdefs.IsFailedPrecondition, wire.ClassPermission: errdefs.IsPermissionDenied,
		wire.ClassExhausted: errdefs.IsResourceExhausted, wire.ClassOutOfRange: errdefs.IsOutOfRange, wire.ClassAborted: errdefs.IsAborted,
		wire.ClassUnsupported: errdefs.IsNotImplemented, wire.ClassInternal: errdefs.IsInternal, "made up": errdefs.IsInternal,
		wire.ClassNotKilled: errdefs.IsInternal, // but for a kill
	} {
		b := newFixture(t)
		id := b.create(t, "x")
		b.serve(t, "x", func(p *program, _ *wire.Request) {
			p.json(wire.KindFailure, wire.Failure{Class: class, Message: "why"})
		})
		if err := stat(t.Context(), b, id); !is(err) || !strings.Contains(err.Error(), "why") {
			t.Errorf("%s: %v", class, err)
		}
	}
}

// An upload whose other side has given up ends, and the rest of it isn't sent.
func TestUploadRefused(t *testing.T) {
	b, id := answers(t, func(p *program) {
		_, _, _ = p.r.Next()
		p.json(wire.KindFailure, wire.Failure{Class: wire.ClassExhausted, Message: "no space"})
	})
	var read atomic.Int64
	endless := readerFunc(func(p []byte) (int, error) { read.Add(int64(len(p))); return len(p), nil })
	write := runtime.FileOp{Verb: runtime.FileWrite, Path: "/x"}
	if err := b.File(t.Context(), id, write, runtime.FileIO{In: endless}); !errdefs.IsResourceExhausted(err) {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	c, id := answers(t, func(p *program) { p.hungUp() }) // takes all, and says nothing
	if err := c.File(ctx, id, write, runtime.FileIO{In: endless}); !errdefs.IsDeadlineExceeded(err) {
		t.Error(err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// A follower goes on over another session, and believes no place twice.
func TestFollower(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	b.serve(t, "x", func(p *program, req *wire.Request) {
		if !p.ready() {
			return
		}
		switch req.Process.Follow.From {
		case runtime.FromFirst:
			p.json(wire.KindItem, wire.ProcessInfo{ID: "p", FirstSeq: 100, NextSeq: 200})
		case 100:
			p.json(wire.KindItem, wire.ProcessInfo{ID: "p", FirstSeq: 100, NextSeq: 200})
			p.output(105, "first")
		case 105:
			p.json(wire.KindItem, wire.ProcessInfo{ID: "p", FirstSeq: 105, NextSeq: 200})
			p.output(111, "second")
			p.output(111, "second")
			p.hungUp()
		}
	})
	w, err := b.Follow(t.Context(), id, "p", runtime.Follow{From: runtime.FromFirst})
	must(t, err)
	for _, want := range []string{"first", "second"} {
		if c, err := w.Next(); err != nil || string(c.Data) != want {
			t.Errorf("%+v, %v", c, err)
		}
	}
	for range 2 {
		if c, err := w.Next(); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%+v, %v", c, err)
		}
	}
	must(t, w.Close())
}

// TestFollowerRejoins checks what comes of a follower whose connection broke.
func TestFollowerRejoins(t *testing.T) {
	refuses := func(class wire.Class) func(*program, int64) {
		return func(p *program, _ int64) { p.json(wire.KindFailure, wire.Failure{Class: class}) }
	}
	for name, tt := range map[string]struct {
		answer func(p *program, tries int64)
		is     func(error) bool
	}{
		"output is lost":    {refuses(wire.ClassOutOfRange), errdefs.IsOutOfRange},
		"it is forgotten":   {refuses(wire.ClassNotFound), errdefs.IsNotFound},
		"another took over": {refuses(wire.ClassAborted), errdefs.IsAborted},
		"it still follows": {func(p *program, tries int64) {
			if tries < 4 {
				refuses(wire.ClassExists)(p, tries)
				return
			}
			p.begun("p")
			p.json(wire.KindResult, wire.ProcessInfo{ID: "p"})
		}, func(err error) bool { return errors.Is(err, io.EOF) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			id := b.create(t, "x")
			var tries atomic.Int64
			b.serve(t, "x", func(p *program, req *wire.Request) {
				n := tries.Add(1)
				switch {
				case !p.ready():
				case n == 1:
					p.begun("p")
				case !req.Process.Follow.Exclusive || req.Process.Follow.From != 0:
					t.Errorf("%+v", req.Process.Follow)
				default:
					tt.answer(p, n)
				}
			})
			w, err := b.Follow(t.Context(), id, "p", runtime.Follow{Exclusive: true})
			must(t, err)
			if _, err := w.Next(); !tt.is(err) {
				t.Error(err)
			}
		})
	}
}

// A follower that is closed ends, whatever the program does.
func TestFollowerClosed(t *testing.T) {
	b, id := answers(t, func(p *program) {
		p.begun("p")
		p.hungUp()
	})
	w, err := b.Follow(t.Context(), id, "p", runtime.Follow{})
	must(t, err)
	failed := make(chan error)
	go func() { _, err := w.Next(); failed <- err }()
	select {
	case err := <-failed:
		t.Fatal(err)
	case <-time.After(50 * time.Millisecond):
	}
	must(t, w.Close())
	if err := <-failed; !errors.Is(err, errLeft) {
		t.Error(err)
	}
}

// TestEventsAreBounded checks that of a program that tells without end, little is kept.
func TestEventsAreBounded(t *testing.T) {
	var n atomic.Int64
	b, id := answers(t, func(p *program) {
		p.endless(func() error {
			p.item(wire.ProcessInfo{ID: fmt.Sprint("p", n.Add(1)), Label: strings.Repeat("x", wire.MaxLabel)})
			return p.w.Send(wire.KindReady, nil)
		})
	})
	events, err := b.Events(t.Context(), id)
	must(t, err)
	for range 3 {
		all, err := events.Next()
		if err != nil || len(all) > maxListed {
			t.Fatalf("%d, %v", len(all), err)
		}
		asked := n.Load()
		await(t, "the program to wait", func() bool {
			if n.Load() > asked+3*maxListed {
				t.Fatalf("%d were taken while nobody asked", n.Load()-asked)
			}
			before := n.Load()
			time.Sleep(50 * time.Millisecond)
			return n.Load() == before && before >= maxListed
		})
	}
	must(t, events.Close())
}

func TestDialBrokenOff(t *testing.T) {
	b, id := answers(t, func(p *program) {
		p.send(wire.KindData, "half")
	})
	nc, err := b.Dial(t.Context(), id, 80)
	must(t, err)
	if got, err := io.ReadAll(nc); string(got) != "half" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%q, %v", got, err)
	}
	_ = nc.Close()
}

// Close ends a Read and a Write that wait.
func TestDialClosed(t *testing.T) {
	b, id := answers(t, func(p *program) { <-p.t.Context().Done() }) // it takes and sends nothing
	nc, err := b.Dial(t.Context(), id, 80)
	must(t, err)
	read, written := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := nc.Read(make([]byte, 1))
		read <- err
	}()
	go func() {
		_, err := nc.Write(make([]byte, 1<<20)) // more than the window
		written <- err
	}()
	must(t, nc.Close())
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("read: %v", err)
	}
	if <-written == nil {
		t.Error("all was written")
	}
}

// A container without the program is told from one whose program fails.
func TestNoProgram(t *testing.T) {
	for code, is := range map[int]func(error) bool{
		2: errdefs.IsNotImplemented, 126: errdefs.IsNotImplemented, 127: errdefs.IsNotImplemented, 1: errdefs.IsFailedPrecondition,
	} {
		b := newFixture(t)
		b.engine.code = code
		c, err := b.Create(t.Context(), runtime.Spec{Name: "x", Image: "berm.local/busybox:latest", Agent: &runtime.Agent{}})
		must(t, err)
		if err := stat(t.Context(), b, c.ID); !is(err) {
			t.Errorf("code %d: %v", code, err)
		}
		if _, _, err := b.Start(t.Context(), c.ID, runtime.Process{ID: "p", Command: []string{"x"}}); !is(err) {
			t.Errorf("code %d: %v", code, err)
		}
		if list, err := b.ListProcesses(t.Context(), c.ID); err != nil || len(list) != 0 {
			t.Errorf("%+v, %v", list, err)
		}
	}
}
