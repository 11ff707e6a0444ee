package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Bounds of what a container can have of Berm.
const (
	maxSessions = 16 // that it dialled
	// Connections that are taken in at once while nobody knows who the first process is.
	maxStrangers = 4
	youth        = 10 * time.Second // since a container was made, in which its program is expected
)

// container is what there is of a container here: its directory and socket, and the sessions
// with its program. One without a directory has no name.
type container struct {
	r    *Runtime
	name string
	dir  string

	// With the Runtime's lock.
	id      string // the container's; empty while that isn't known
	creates int    // calls of Create under way
	uses    uint64 // how many there ever were
	fresh   bool   // the directory was made by this Runtime

	paused  atomic.Bool  // the container may be
	missed  atomic.Bool  // that the program didn't answer has been told
	opening atomic.Int32 // streams that are opened

	mu       sync.Mutex
	ln       *net.UnixListener
	done     chan struct{}       // closed with the container
	pid      int                 // of the container's first process; 0 while that isn't known
	until    time.Time           // until then its program is expected
	met      bool                // it has said Hello, and not been missing since
	refused  bool                // a connection was, since the engine was last asked
	outdated bool                // the last one that dialled was of another version
	unseen   bool                // the last one that dialled can't be seen from here
	strange  int                 // connections taken in since the pid was known
	dialled  []*session          // the oldest first; those too that haven't said Hello
	arrived  chan struct{}       // closed when one has said Hello, of any version
	served   map[string]*session // by user
	owners   map[string]*session // of processes, by their ID, if that is a served one
	events   map[*events]bool
}

func (r *Runtime) newContainer(name string) *container {
	b := &container{r: r, name: name, done: make(chan struct{}), arrived: make(chan struct{}), served: map[string]*session{}, owners: map[string]*session{}, events: map[*events]bool{}}
	if name != "" {
		b.dir = filepath.Join(r.opts.Root, name)
	}
	return b
}

// make makes the directory, and listens in it.
func (b *container) make() error {
	if err := os.Mkdir(b.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	err := os.Chmod(b.dir, 0o755) // whatever the umask
	if err == nil {
		err = b.listen()
	}
	if err != nil {
		_ = os.RemoveAll(b.dir)
	}
	return err
}

// listen makes the socket, by a path that is never too long for one. Who can reach it
// is up to the directories above.
func (b *container) listen() error {
	dir, err := os.OpenFile(b.dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	path := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), wire.Socket)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		return err
	}
	ln.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o666); err != nil {
		_ = ln.Close()
		return err
	}
	b.ln = ln
	b.until = time.Now().Add(youth)
	b.r.tasks.Go(func() { b.accept(ln) })
	return nil
}

// close ends all that there is of it but the directory.
func (b *container) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.done:
		return
	default:
	}
	close(b.done)
	if b.ln != nil {
		_ = b.ln.Close()
	}
	b.hangUp()
}

// taskLocked runs f in a goroutine that ends with the container, unless that has ended.
func (b *container) taskLocked(f func()) bool {
	select {
	case <-b.done:
		return false
	default:
	}
	b.r.tasks.Go(f)
	return true
}

func (b *container) task(f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.taskLocked(f)
}

// hangUp ends all sessions; the lock is held.
func (b *container) hangUp() {
	for _, s := range b.dialled {
		s.hangUp()
	}
	for _, s := range b.served {
		s.endLocked()
	}
}

// part forgets the container.
func (b *container) part() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pid, b.met = 0, false
	b.hangUp()
}

// meet takes note of what the engine says of the container.
func (b *container) meet(c runtime.Container) {
	b.paused.Store(c.State == runtime.StatePaused)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pid, b.refused = c.Pid, false
	if b.pid != 0 {
		b.strange = 0
	}
	for _, s := range b.dialled {
		if s.pid != b.pid {
			s.hangUp()
		}
	}
}

// socketless reports whether the program can't be reached by a socket: there is none,
// or Berm can't see who dials.
func (b *container) socketless() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.name == "" || b.unseen
}

// accept takes connections in until the listener is closed.
func (b *container) accept(ln *net.UnixListener) {
	for {
		nc, err := ln.AcceptUnix()
		admitted := err == nil && b.admit(nc)
		if admitted && !b.crowded() {
			continue
		}
		if err == nil && !admitted {
			_ = nc.Close()
		}
		// Who knocks without end, or takes all files there are, waits.
		select {
		case <-b.done:
			return
		case <-time.After(b.r.pace.reject):
		}
	}
}

// admit looks at a new connection; false refuses it.
func (b *container) admit(nc *net.UnixConn) bool {
	pid, err := b.r.peer(nc)
	if err != nil {
		return false
	}
	if pid == 0 && !b.r.unseen.Swap(true) {
		b.r.log.Warn("agent_unseen", "dir", b.dir, "remedy", "run Berm in the host's process namespace (--pid host)")
	}
	s := &session{b: b, carrier: nc, pid: pid}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unseen = pid == 0
	if b.unseen || b.pid != 0 && s.pid != b.pid {
		b.refused = true
		return false
	}
	if len(b.dialled) >= maxSessions || !b.taskLocked(func() { b.hold(s) }) {
		return false
	}
	if b.pid == 0 {
		b.strange++
	}
	b.dialled = append(b.dialled, s)
	return true
}

// crowded tells whether many came that may be anybody.
func (b *container) crowded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.strange >= maxStrangers
}

// peer returns the pid of the process that dialled. It is 0 for a process of a PID
// namespace that this one can't see into: any process of the sandbox may be that.
func peer(nc *net.UnixConn) (int, error) {
	cred, err := runtime.PeerOf(nc)
	return int(cred.Pid), err
}

// hold waits for the Hello of a session that was dialled, and keeps it until it ends.
func (b *container) hold(s *session) {
	err := b.r.guard(func() error { return s.greet(b.r.pace.hello) })
	b.mu.Lock()
	if err == nil {
		s.greeted, b.met, b.outdated = true, true, false
		b.wakeLocked()
		b.mu.Unlock()
		<-s.mux.CloseChan()
		b.mu.Lock()
	} else {
		if s.pid == b.pid && errors.Is(err, errOutdated) {
			b.outdated = true
			b.wakeLocked()
		}
		b.r.log.Debug("agent_refused", "dir", b.dir, "error", err)
	}
	defer b.mu.Unlock()
	b.dialled = slices.DeleteFunc(b.dialled, func(other *session) bool { return other == s })
}

// wakeLocked wakes all calls of take.
func (b *container) wakeLocked() {
	close(b.arrived)
	b.arrived = make(chan struct{})
}

// take gives the latest session that the container's first process dialled, and waits a
// little for one. The error is errLost, errOutdated, or that of ctx.
func (b *container) take(ctx context.Context) (*session, error) {
	var late <-chan time.Time
	for asked := false; ; {
		b.mu.Lock()
		s, unsure := b.pickLocked()
		arrived := b.arrived
		patience := b.r.pace.brief
		if b.met || time.Now().Before(b.until) {
			patience = b.r.pace.dial
		}
		heard, outdated := b.ln != nil, b.outdated
		b.mu.Unlock()
		switch {
		case s != nil:
			return s, nil
		case !heard:
			return nil, errLost
		case unsure && !asked: // another process may be the first by now
			asked = true
			b.ask(ctx)
			continue
		case outdated:
			return nil, errOutdated
		}
		if late == nil {
			timer := time.NewTimer(patience)
			defer timer.Stop()
			late = timer.C
		}
		select {
		case <-arrived:
		case <-late:
			b.mu.Lock()
			if len(b.dialled) == 0 {
				b.met, b.until = false, time.Time{}
			}
			b.mu.Unlock()
			return nil, errLost
		case <-b.done:
			return nil, errLost
		case <-ctx.Done():
			return nil, runtime.Ended(ctx)
		}
	}
}

// pickLocked gives a session of the first process. Unsure: that may have changed.
func (b *container) pickLocked() (s *session, unsure bool) {
	unsure = b.refused
	for _, s := range slices.Backward(b.dialled) {
		switch {
		case !s.greeted || s.mux.IsClosed():
		case s.pid == b.pid:
			return s, false
		default:
			unsure = true
		}
	}
	return nil, unsure
}

// ask asks the engine who the first process is.
func (b *container) ask(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, b.r.pace.ready)
	defer cancel()
	if c, err := b.inspect(ctx); err == nil {
		b.meet(c)
	}
}

// connected reports whether the program has a session.
func (b *container) connected() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, _ := b.pickLocked()
	return s != nil
}

// streams counts the streams of all sessions of a container.
func streams(b *container) (n int) {
	b.mu.Lock()
	all := slices.AppendSeq(slices.Clone(b.dialled), maps.Values(b.served))
	all = slices.DeleteFunc(all, func(s *session) bool { return s.served == nil && !s.greeted })
	b.mu.Unlock()
	for _, s := range all {
		n += s.mux.NumStreams() - int(s.lost.Load())
	}
	return n
}
