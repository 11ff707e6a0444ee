package buildkit

import (
	"bytes"
	"errors"
	"net"
	"sync"
	"testing"
)

// relay passes what Berm and the engine say to each other, and holds it on demand.
type relay struct {
	engine string // a socket's path
	listen net.Listener

	mu       sync.Mutex
	trap     *trap
	sessions int // of clients, open at the engine
}

// trap holds the connection on which a text comes for the nth time.
type trap struct {
	up   bool // the text is Berm's, else the engine's
	text string
	nth  int
	hit  chan struct{} // closed when it has come
	open chan struct{} // to be closed, so that it goes on
}

func newRelay(t *testing.T, path, engine string) *relay {
	l, err := net.Listen("unix", path)
	must(t, err)
	r := &relay{engine: engine, listen: l}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { r.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait() // Berm has ended, and so has each connection
	})
	return r
}

// set makes a trap, in the place of the one before.
func (r *relay) set(up bool, text string, nth int) *trap {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.trap = &trap{up: up, text: text, nth: nth, hit: make(chan struct{}), open: make(chan struct{})}
	return r.trap
}

func (r *relay) serve(near net.Conn) {
	far, err := net.Dial("unix", r.engine)
	if err != nil {
		_ = near.Close()
		return
	}
	var both sync.WaitGroup
	both.Go(func() { r.pass(far, near, true) })
	both.Go(func() { r.pass(near, far, false) })
	both.Wait()
}

// pass copies until one side ends.
func (r *relay) pass(to, from net.Conn, up bool) {
	defer func() { _ = errors.Join(to.Close(), from.Close()) }()
	var seen []byte // the end of what has passed, as a text may come in two parts
	session := false
	for buf := make([]byte, 64<<10); ; {
		n, err := from.Read(buf)
		if up && !session && bytes.Contains(buf[:n], []byte("X-Docker-Expose-Session-Uuid: ")) {
			session = true
			r.count(1)
			defer r.count(-1)
		}
		seen = r.watch(append(seen, buf[:n]...), up)
		if _, werr := to.Write(buf[:n]); err != nil || werr != nil {
			return
		}
	}
}

func (r *relay) count(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sessions += n
}

// watch waits if the trap holds what has come. It returns the part that belongs to what comes next.
func (r *relay) watch(seen []byte, up bool) []byte {
	r.mu.Lock()
	t := r.trap
	if t == nil || t.up != up {
		r.mu.Unlock()
		return nil
	}
	t.nth -= bytes.Count(seen, []byte(t.text))
	held := t.nth <= 0
	if held {
		r.trap = nil
		close(t.hit)
	}
	r.mu.Unlock()
	if held {
		<-t.open
		return nil
	}
	return bytes.Clone(seen[max(0, len(seen)-len(t.text)+1):])
}
