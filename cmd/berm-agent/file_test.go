package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	goruntime "runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// fileTalk is a connection with this process, for one operation. Ended gets what its handler returns. If
// late is set, the handler isn't told to go before Berm has hung up.
func fileTalk(t *testing.T, late bool) (k *talk, ended chan error) {
	t.Helper()
	here, there := socketPair(t)
	srv := &server{tidy: time.NewTimer(time.Hour)}
	ended = make(chan error, 1)
	srv.other = func(op wire.Op) handler {
		return func(c *conn, req *wire.Request) (any, error) {
			if late {
				c.r = wire.NewReader(awaitsEnd{c})
			}
			result, err := fileHandler(op)(c, req)
			ended <- err
			return result, err
		}
	}
	go func() {
		c := newConn(there)
		payload, err := c.request()
		srv.talk(c, payload, err)
	}()
	return &talk{t: t, first: here, late: 20 * time.Second}, ended
}

// awaitsEnd reads what Berm sent once Berm has hung up.
type awaitsEnd struct{ *conn }

func (c awaitsEnd) Read(p []byte) (int, error) {
	for !c.gone() {
		goruntime.Gosched()
	}
	return c.conn.Read(p)
}

// socketPair is Berm's end of a connection, and the agent's.
func socketPair(t *testing.T) (net.Conn, *pollable) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	mine := os.NewFile(uintptr(fds[0]), "mine")
	here, err := net.FileConn(mine)
	must(t, err, mine.Close())
	t.Cleanup(func() { _ = here.Close() }) // it may be closed
	return here, socket(os.NewFile(uintptr(fds[1]), "its"))
}

// begun is a fileTalk in which an operation has begun.
func begun(t *testing.T, req *wire.Request) (*talk, *outcome, chan error) {
	t.Helper()
	k, ended := fileTalk(t, false)
	a, ok := k.begin(req)
	if !ok {
		t.Fatal(a.failure)
	}
	return k, a, ended
}

func fileRequest(op wire.Op, f wire.File, path string) *wire.Request {
	f.Path = []byte(path)
	return &wire.Request{Op: op, File: &f}
}

// TestFile has an upload and a watch, each with an End, and a slot for others meanwhile.
func TestFile(t *testing.T) {
	dir := t.TempDir()
	var watches []*talk
	for range cap(disk) + 1 {
		k, a, _ := begun(t, fileRequest(wire.OpWatch, wire.File{}, dir))
		for len(a.items) == 0 {
			k.next(a)
		}
		watches = append(watches, k)
	}
	k, _, _ := begun(t, fileRequest(wire.OpWrite, wire.File{}, dir+"/f"))
	data := bytes.Repeat([]byte("data"), 50_000)
	for _, part := range [][]byte{data[:50_000], data[50_000:100_000], data[100_000:150_000], data[150_000:]} {
		must(t, k.w.Send(wire.KindData, part))
	}
	k.end()
	if got, err := os.ReadFile(dir + "/f"); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	for _, k := range watches {
		must(t, k.w.Send(wire.KindEnd, nil))
		a := new(outcome)
		for k.next(a) {
		}
		if a.failure != nil {
			t.Error(a.failure)
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
	ends := func(t *testing.T, ended chan error) {
		t.Helper()
		if err := <-ended; !errors.Is(err, errGone) {
			t.Errorf("%v", err)
		}
	}
	for _, req := range []*wire.Request{
		fileRequest(wire.OpRead, wire.File{Length: -1}, dir+"/big"), fileRequest(wire.OpTarRead, wire.File{}, dir),
		fileRequest(wire.OpDir, wire.File{Depth: 100}, dir), fileRequest(wire.OpWrite, wire.File{}, dir+"/new"),
		fileRequest(wire.OpTarWrit, wire.File{}, dir), fileRequest(wire.OpWatch, wire.File{Recursive: true}, dir),
	} {
		t.Run(string(req.Op), func(t *testing.T) {
			k, _, ended := begun(t, req)
			must(t, k.stream.Close())
			ends(t, ended)
		})
	}
	// These say little or nothing meanwhile: they look.
	for _, req := range []*wire.Request{
		fileRequest(wire.OpGlob, wire.File{Pattern: "**/nothing"}, dir), fileRequest(wire.OpSearch, wire.File{Pattern: "nothing"}, dir+"/many"),
		fileRequest(wire.OpCopy, wire.File{To: []byte(dir + "/copy")}, dir+"/many"), fileRequest(wire.OpRemove, wire.File{Recursive: true}, dir+"/many"),
	} {
		t.Run(string(req.Op), func(t *testing.T) {
			k, ended := fileTalk(t, true)
			if a, ok := k.begin(req); !ok {
				t.Fatal(a.failure)
			}
			must(t, k.stream.Close())
			ends(t, ended)
		})
	}
	t.Run("before Go", func(t *testing.T) {
		k, ended := fileTalk(t, false)
		_, _ = k.request(fileRequest(wire.OpRemove, wire.File{}, dir+"/big"))
		must(t, k.stream.Close())
		ends(t, ended)
	})
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 || left[0].Name() != "big" || left[1].Name() != "many" {
		t.Errorf("%v, %v", left, err)
	}
}
