package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// session is an operation as Berm sees it.
type session struct {
	t    *testing.T
	r    *wire.Reader
	w    *wire.Writer
	file *yamux.Stream
	its  *yamux.Stream // the agent's side
	// ended gets what the handler came back with.
	ended chan error
}

// begin starts an operation.
func begin(t *testing.T, req *wire.Request) *session {
	t.Helper()
	s := newSession(t)
	s.start(req)
	return s
}

func newSession(t *testing.T) *session {
	t.Helper()
	here, there := net.Pipe()
	berm, err := yamux.Client(here, wire.Mux(time.Minute, time.Second))
	must(t, err)
	agent, err := yamux.Server(there, wire.Mux(time.Minute, 0))
	must(t, err)
	t.Cleanup(func() { _, _ = berm.Close(), agent.Close() })
	mine, err := berm.OpenStream()
	must(t, err)
	its, err := agent.AcceptStream()
	must(t, err)
	must(t, mine.SetDeadline(time.Now().Add(30*time.Second)))
	return &session{t: t, r: wire.NewReader(mine), w: wire.NewWriter(mine), file: mine, its: its, ended: make(chan error, 1)}
}

// start starts an operation, as the agent does.
func (s *session) start(req *wire.Request) {
	s.t.Helper()
	h, c := fileHandler(req.Op), newConn(s.its)
	if h == nil {
		s.t.Fatalf("there is no %s", req.Op)
	}
	go func() {
		defer func() { _ = c.c.Close() }()
		_, err := h(c, req)
		switch {
		case errors.Is(err, errGone):
		case err != nil:
			_ = c.w.SendJSON(wire.KindFailure, failureOf(err))
		default:
			_ = c.w.Send(wire.KindResult, []byte("{}"))
		}
		s.ended <- err
	}()
}

// reply is all that an operation sent.
type reply struct {
	ready   bool
	items   [][]byte
	data    []byte
	end     bool
	failure *wire.Failure
}

// next reads a frame into the answer; false at the end.
func (s *session) next(a *reply) bool {
	s.t.Helper()
	kind, payload, err := s.r.Next()
	if err != nil {
		s.t.Fatalf("the operation broke off: %v", err)
	}
	switch kind {
	case wire.KindReady:
		a.ready = true
		must(s.t, s.w.Send(wire.KindGo, nil))
	case wire.KindItem:
		a.items = append(a.items, bytes.Clone(payload))
	case wire.KindData:
		a.data = append(a.data, payload...)
	case wire.KindEnd:
		a.end = true
	case wire.KindResult:
		return false
	case wire.KindFailure:
		a.failure = new(wire.Failure)
		must(s.t, wire.Decode(payload, a.failure))
		return false
	default:
		s.t.Fatalf("a frame of kind %d", kind)
	}
	return true
}

// wait waits for the handler's end.
func (s *session) wait() error {
	s.t.Helper()
	select {
	case err := <-s.ended:
		return err
	case <-time.After(20 * time.Second):
		s.t.Fatal("the operation doesn't end")
		return nil
	}
}

// fails checks that an operation failed in a certain way.
func (a *reply) fails(t *testing.T, class wire.Class, word string) {
	t.Helper()
	if a.failure == nil || a.failure.Class != class || !strings.Contains(a.failure.Message, word) {
		t.Errorf("%+v; want %s, %q", a.failure, class, word)
	}
}

func (a *reply) succeeds(t *testing.T) {
	t.Helper()
	if a.failure != nil {
		t.Errorf("%s: %s", a.failure.Class, a.failure.Message)
	}
}

func fileRequest(op wire.Op, f wire.File, path string) *wire.Request {
	f.Path = []byte(path)
	return &wire.Request{Op: op, File: &f}
}

// TestFile has an upload and a watch, each with an End, and a slot for others meanwhile.
func TestFile(t *testing.T) {
	dir := t.TempDir()
	var watches []*session
	for range cap(disk) + 1 {
		s := begin(t, fileRequest(wire.OpWatch, wire.File{}, dir))
		for a := new(reply); len(a.items) == 0; {
			s.next(a)
		}
		watches = append(watches, s)
	}
	s, a := begin(t, fileRequest(wire.OpWrite, wire.File{}, dir+"/f")), new(reply)
	s.next(a)
	data := bytes.Repeat([]byte("data"), 50_000)
	for _, part := range [][]byte{data[:50_000], data[50_000:100_000], data[100_000:150_000], data[150_000:]} {
		must(t, s.w.Send(wire.KindData, part))
	}
	must(t, s.w.Send(wire.KindEnd, nil))
	for s.next(a) {
	}
	a.succeeds(t)
	if got, err := os.ReadFile(dir + "/f"); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	for _, s := range watches {
		a := new(reply)
		must(t, s.w.Send(wire.KindEnd, nil))
		for s.next(a) {
		}
		if a.succeeds(t); s.wait() != nil {
			t.Error("the watch didn't end well")
		}
	}
}

// TestHangUp has Berm hang up at any time.
func TestHangUp(t *testing.T) {
	dir := t.TempDir()
	big := bytes.Repeat([]byte("x"), 20<<20)
	must(t, errors.Join(os.Mkdir(dir+"/many", 0o755), os.WriteFile(dir+"/big", big, 0o644)))
	for i := range 3000 {
		must(t, os.WriteFile(fmt.Sprint(dir, "/many/", i), []byte("x"), 0o644))
	}
	ends := func(t *testing.T, s *session) {
		t.Helper()
		if err := s.wait(); !errors.Is(err, errGone) {
			t.Errorf("%v", err)
		}
	}
	for _, req := range []*wire.Request{
		fileRequest(wire.OpRead, wire.File{Length: -1}, dir+"/big"), fileRequest(wire.OpTarRead, wire.File{}, dir),
		fileRequest(wire.OpDir, wire.File{Depth: 100}, dir), fileRequest(wire.OpWrite, wire.File{}, dir+"/new"),
		fileRequest(wire.OpTarWrit, wire.File{}, dir), fileRequest(wire.OpWatch, wire.File{Recursive: true}, dir),
	} {
		t.Run(string(req.Op), func(t *testing.T) {
			s := begin(t, req)
			if s.next(&reply{}); s.file.Close() != nil {
				t.Fatal("it can't be closed")
			}
			ends(t, s)
		})
	}
	// These say little or nothing meanwhile: they look.
	for _, req := range []*wire.Request{
		fileRequest(wire.OpGlob, wire.File{Pattern: "**/nothing"}, dir), fileRequest(wire.OpSearch, wire.File{Pattern: "nothing"}, dir+"/many"),
		fileRequest(wire.OpCopy, wire.File{To: []byte(dir + "/copy")}, dir+"/many"), fileRequest(wire.OpRemove, wire.File{Recursive: true}, dir+"/many"),
	} {
		t.Run(string(req.Op), func(t *testing.T) {
			s := newSession(t)
			if err := errors.Join(s.w.Send(wire.KindGo, nil), s.file.Close()); err != nil { // it waits there
				t.Fatal(err)
			}
			s.start(req)
			ends(t, s)
		})
	}
	t.Run("before Go", func(t *testing.T) {
		s := begin(t, fileRequest(wire.OpRemove, wire.File{}, dir+"/big"))
		if _, err := s.r.Expect(wire.KindReady); err != nil {
			t.Fatal(err)
		}
		must(t, s.file.Close())
		ends(t, s)
	})
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 || left[0].Name() != "big" || left[1].Name() != "many" {
		t.Errorf("%v, %v", left, err)
	}
}
