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

// Bounds of a container.
const (
	maxSessions = 16               // sessions that its program dialled
	youth       = 10 * time.Second // how long its program is expected to dial, once its first process is met
)

// container holds the directory, socket and sessions of a container. Without a directory, its name is
// empty.
type container struct {
	r      *Runtime
	name   string
	dir    string
	ctx    context.Context // ends with close
	cancel context.CancelFunc

	// Guarded by Runtime.mu.
	id      string // the container's; empty while unknown
	creates int    // calls of Create under way
	fresh   bool   // the directory was made by this Runtime

	missed  atomic.Bool  // it was logged that the program doesn't answer
	opening atomic.Int32 // streams that are being opened

	mu       sync.Mutex
	ln       *net.UnixListener   // nil: there is no socket
	pid      int                 // of the container's first process; 0 while unknown
	accepts  bool                // accept runs: the pid has been known
	until    time.Time           // its program is expected to dial until then
	refused  bool                // a connection was refused since the engine was last asked
	outdated bool                // the last program that dialled had another version
	unseen   bool                // the last process that dialled isn't visible here
	dialled  []*session          // oldest first; includes those without a Hello yet
	arrived  chan struct{}       // closed and replaced at each Hello, of any version
	served   map[string]*session // by user
	owners   map[string]*session // served sessions, by the IDs of their processes
	events   map[*events]bool
}

func (r *Runtime) newContainer(name string) *container {
	b := &container{r: r, name: name, arrived: make(chan struct{}), served: map[string]*session{}, owners: map[string]*session{}, events: map[*events]bool{}}
	b.ctx, b.cancel = context.WithCancel(context.Background())
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

// listen makes the socket. It uses a path in /proc, as the directory's own may be too long
// for a socket. The directories above decide who can reach the socket.
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
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ln = ln
	return nil
}

// close ends the container's sessions, goroutines and listener. It keeps the directory.
func (b *container) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cancel()
	if b.ln != nil {
		_ = b.ln.Close()
	}
	b.hangUp()
}

// taskLocked runs f in a goroutine, which must end with b.ctx. It returns false if b.ctx has ended.
func (b *container) taskLocked(f func()) bool {
	if b.ctx.Err() != nil {
		return false
	}
	b.r.tasks.Go(f)
	return true
}

func (b *container) task(f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.taskLocked(f)
}

// hangUp ends all sessions. The caller holds b.mu.
func (b *container) hangUp() {
	for _, s := range b.dialled {
		s.hangUp()
	}
	for _, s := range b.served {
		s.endLocked()
	}
}

// part forgets the first process, and ends all sessions.
func (b *container) part() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pid = 0
	b.hangUp()
}

// meet records what the engine says of the container. Once the first process is known, meet
// starts to accept connections.
func (b *container) meet(c runtime.Container) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.Pid != 0 && c.Pid != b.pid {
		b.until = time.Now().Add(youth)
	}
	b.pid, b.refused = c.Pid, false
	if b.pid != 0 && b.ln != nil && !b.accepts {
		b.accepts = b.taskLocked(b.accept)
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
	return b.ln == nil || b.unseen
}

// accept accepts connections until the container is closed.
func (b *container) accept() {
	for {
		nc, err := b.ln.AcceptUnix()
		if err == nil && b.admit(nc) {
			continue
		}
		if err == nil {
			_ = nc.Close()
		}
		// A container that dials without end, or uses up all file descriptors, is slowed down.
		select {
		case <-b.ctx.Done():
			return
		case <-time.After(b.r.pace.reject):
		}
	}
}

// admit starts a session on a new connection. It returns false if it refuses the connection:
// only the container's first process may dial.
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
	if b.unseen || s.pid != b.pid {
		b.refused = true
		return false
	}
	if len(b.dialled) >= maxSessions || !b.taskLocked(func() { b.hold(s) }) {
		return false
	}
	b.dialled = append(b.dialled, s)
	return true
}

// peer returns the pid of the process that dialled. It is 0 for a process in a PID namespace that this
// one can't see into. Any process of the sandbox may have dialled then.
func peer(nc *net.UnixConn) (int, error) {
	cred, err := runtime.PeerOf(nc)
	return int(cred.Pid), err
}

// hold waits for the Hello of a session that was dialled, and keeps the session until it ends.
func (b *container) hold(s *session) {
	err := b.r.guard(func() error { return s.greet(b.r.pace.hello) })
	b.mu.Lock()
	if err == nil {
		s.greeted, b.until, b.outdated = true, time.Now().Add(farAway), false
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

// take returns the latest session that the container's first process dialled. It waits a
// little for one. The error is errLost, errOutdated, or that of ctx.
func (b *container) take(ctx context.Context) (*session, error) {
	var late <-chan time.Time
	for asked := false; ; {
		b.mu.Lock()
		s := b.pickLocked()
		arrived := b.arrived
		patience := b.r.pace.brief
		if time.Now().Before(b.until) {
			patience = b.r.pace.dial
		}
		unsure, outdated := b.refused || b.pid == 0, b.outdated
		b.mu.Unlock()
		switch {
		case s != nil:
			return s, nil
		case unsure && !asked: // the container may have been restarted
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
				b.until = time.Time{}
			}
			b.mu.Unlock()
			return nil, errLost
		case <-b.ctx.Done():
			return nil, errLost
		case <-ctx.Done():
			return nil, runtime.Ended(ctx)
		}
	}
}

// pickLocked returns the latest open session of the first process, or nil.
func (b *container) pickLocked() *session {
	for _, s := range slices.Backward(b.dialled) {
		if s.greeted && s.pid == b.pid && !s.mux.IsClosed() {
			return s
		}
	}
	return nil
}

// ask asks the engine for the first process.
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
	return b.pickLocked() != nil
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
