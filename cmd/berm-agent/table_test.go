package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// bounded is a server whose processes run until they are ended by hand.
func bounded() *server {
	return &server{processes: newTable(), tidy: time.NewTimer(time.Hour), launch: func(*process, *wire.Start) error { return nil }}
}

func (srv *server) mustBegin(t *testing.T, id string) *process {
	t.Helper()
	p, _, err := srv.begin(newConn(new(script)), &wire.Start{ID: id, Command: []string{"x"}})
	must(t, err)
	return p
}

func TestTableIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := bounded()
		for i := range maxEnded + 10 {
			srv.mustBegin(t, fmt.Sprint("ended", i)).fail(unix.ENOENT, &wire.Start{Command: []string{"x"}})
			time.Sleep(time.Second)
		}
		if all := srv.processes.all(); len(all) != maxEnded || all[0].id != "ended10" {
			t.Fatalf("%d are kept, the first is %s", len(all), all[0].id)
		}
		for i := range maxProcesses {
			srv.mustBegin(t, fmt.Sprint("running", i))
		}
		if all := srv.processes.all(); len(all) != maxProcesses || all[0].id != "running0" || all[0].order > all[1].order {
			t.Fatalf("%d are known, the first is %s", len(all), all[0].id)
		}
		_, _, err := srv.begin(newConn(new(script)), &wire.Start{ID: "more", Command: []string{"x"}})
		if err == nil || failureOf(err).Class != wire.ClassExhausted {
			t.Errorf("one more: %v", err)
		}
	})
}

func TestEndedAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := bounded()
		srv.mustBegin(t, "running")
		srv.mustBegin(t, "ended").fail(unix.ENOENT, &wire.Start{Command: []string{"x"}})
		time.Sleep(keepEnded)
		if _, err := srv.processes.find("ended"); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Millisecond)
		if _, err := srv.processes.find("ended"); err == nil {
			t.Error("it is kept for longer than an hour")
		}
		if _, err := srv.processes.find("running"); err != nil {
			t.Error(err)
		}
	})
}

// TestChanges checks that each change is reported once, and none of a process that was forgotten.
func TestChanges(t *testing.T) {
	srv, since, gone := bounded(), 0, false
	told := func() (ids string) {
		changed, now, _ := srv.processes.changes(since, &gone)
		since = now
		for _, p := range changed {
			ids += p.id
		}
		return ids
	}
	none := told()
	a, b := srv.mustBegin(t, "a"), srv.mustBegin(t, "b")
	started := told()
	a.fail(unix.ENOENT, &wire.Start{Command: []string{"x"}})
	ended := told()
	b.fail(unix.ENOENT, &wire.Start{Command: []string{"x"}})
	srv.processes.forget(b)
	srv.processes.leave(&gone)
	if got := []string{none, started, ended, told()}; !slices.Equal(got, []string{"", "ab", "a", ""}) {
		t.Errorf("%q", got)
	}
}

func TestNothingStartsAtTheEnd(t *testing.T) {
	srv := bounded()
	srv.processes.close()
	if _, _, err := srv.begin(newConn(new(script)), &wire.Start{ID: "x", Command: []string{"x"}}); err == nil {
		t.Error("a process was started")
	}
}

// What is being started when all is killed is killed, too.
func TestAllWaitsForStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, begun := bounded(), time.Now()
		srv.launch = func(*process, *wire.Start) error { time.Sleep(time.Second); return nil }
		go func() { _, _, _ = srv.begin(newConn(new(script)), &wire.Start{ID: "x", Command: []string{"x"}}) }()
		synctest.Wait()
		if all := srv.processes.all(); len(all) != 1 || time.Since(begun) != time.Second {
			t.Errorf("%d after %s", len(all), time.Since(begun))
		}
	})
}

// Nothing is started for a connection that has hung up.
func TestNothingStartsForNobody(t *testing.T) {
	near, far := net.Pipe()
	client, err := yamux.Client(near, wire.Mux(time.Minute, 0))
	server, err2 := yamux.Server(far, wire.Mux(time.Minute, 0))
	must(t, errors.Join(err, err2))
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	stream, err := client.OpenStream()
	must(t, err)
	its, err := server.AcceptStream()
	must(t, err)
	ours, socket := socketPair(t)
	for name, tt := range map[string]struct {
		ours io.Closer
		its  carrier
	}{"stream": {stream, muxStream{its}}, "socket": {ours, socket}} {
		srv, c, start := bounded(), newConn(tt.its), &wire.Start{ID: "x", Command: []string{"x"}}
		if c.gone() {
			t.Errorf("%s: it is gone from the start", name)
		}
		must(t, tt.ours.Close())
		await(t, "the end of the "+name, c.gone)
		if _, _, err := srv.begin(c, start); !errors.Is(err, errGone) {
			t.Errorf("%s: it was started, or %v", name, err)
		}
		if _, err := srv.processes.find("x"); err == nil {
			t.Errorf("%s: it is known", name)
		}
	}
}
