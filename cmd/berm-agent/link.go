package main

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// bermDir is where a container has the directory of Berm's socket, if it serves.
const bermDir = "/run/berm"

const (
	minIdle  = 2    // connections that wait for an operation
	maxIdle  = 8    // no more of them are kept
	maxConns = 1024 // with those at work

	minRedial = 20 * time.Millisecond
	maxRedial = 500 * time.Millisecond
)

// link keeps connections with Berm.
type link struct {
	srv  *server
	path string

	mu     sync.Mutex
	change sync.Cond // of what is below
	idle   int
	all    int
	// Before the next is dialled: because nobody listens, or because whoever does
	// drops what it takes. 0 is none.
	unheard, dropped time.Duration
}

func newLink(srv *server, path string) *link {
	l := &link{srv: srv, path: path}
	l.change.L = &l.mu
	return l
}

// run dials for ever.
func (l *link) run() {
	for {
		l.mu.Lock()
		for l.idle >= minIdle || l.all >= maxConns {
			l.change.Wait()
		}
		delay := max(l.unheard, l.dropped)
		l.mu.Unlock()
		time.Sleep(delay)
		f, err := dialUnix(l.path)
		l.mu.Lock()
		if err != nil {
			l.unheard = longer(l.unheard)
		} else {
			l.unheard = 0
			l.idle++
			l.all++
			go l.serve(f)
		}
		l.mu.Unlock()
	}
}

func longer(delay time.Duration) time.Duration { return min(max(2*delay, minRedial), maxRedial) }

// serve serves a connection, which counts as idle, to its end.
func (l *link) serve(f *socket) {
	begun, used, idle := time.Now(), false, true
	l.srv.serve(newConn(f, f, f), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		used, idle, l.dropped = true, false, 0
		l.idle--
		l.change.Signal()
	}, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.idle >= maxIdle {
			return false
		}
		idle = true
		l.idle++
		return true
	})
	_ = f.Close() // nothing is lost that anybody waits for
	l.srv.tidy.Reset(quiet)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !used && time.Since(begun) < time.Second {
		l.dropped = longer(l.dropped)
	}
	if idle {
		l.idle--
	}
	l.all--
	l.change.Signal()
}

func dialUnix(path string) (*socket, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return newSocket(os.NewFile(uintptr(fd), "berm"))
}

// serving is whether this container is Berm's to work in.
func serving() bool {
	info, err := os.Stat(bermDir)
	return err == nil && info.IsDir()
}

const bermSocket = bermDir + "/" + wire.Socket
