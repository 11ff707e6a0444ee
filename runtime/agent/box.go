package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Bounds of what a container can have of Berm.
const (
	maxHellos = 64 // connections that haven't said Hello
	maxConns  = 1024
	maxIdle   = 16
	keptIdle  = 3 // of them however long none is used: what the program wants there, and one that was in use
	// Connections that are taken in at once while nobody knows who the first process is.
	maxStrangers = 4
	youth        = 10 * time.Second // since a container was made, in which its program is expected
)

// box is what there is of a container here: its directory and socket, and the
// connections to its program. One without a directory has no name.
type box struct {
	r    *Runtime
	name string
	dir  string

	// With the Runtime's lock.
	id      string // the container's; empty while that isn't known
	creates int    // calls of Create under way
	uses    uint64 // how many there ever were
	fresh   bool   // the directory was made by this Runtime
	// The program may still know commands of an earlier Runtime.
	inherited bool

	paused atomic.Bool // the container may be
	missed atomic.Bool // that the program didn't answer has been told

	mu      sync.Mutex
	ln      *net.UnixListener
	done    chan struct{} // closed with the box
	pid     int           // of the container's first process; 0 while that isn't known
	until   time.Time     // until then its program is expected
	met     bool          // it has said Hello, and not been missing since
	refused bool          // a connection was, since the engine was last asked
	unseen  bool          // the last one that dialled can't be seen from here
	hellos  int
	strange int // connections taken in since the pid was known
	conns   map[*conn]struct{}
	idle    []*conn // the one that was used last is the last
	sparing bool    // spare is to be called
	waiting []chan *conn
	held    holding // processes whose connection is here
}

func (r *Runtime) newBox(name string) *box {
	b := &box{r: r, name: name, done: make(chan struct{}), conns: map[*conn]struct{}{}}
	if name != "" {
		b.dir = filepath.Join(r.opts.Root, name)
	}
	return b
}

// make makes the directory, and listens in it.
func (b *box) make() error {
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
func (b *box) listen() error {
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
func (b *box) close() {
	b.letGo()
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

// hangUp closes all connections; the lock is held.
func (b *box) hangUp() {
	for c := range b.conns {
		_ = c.nc.Close()
		delete(b.conns, c)
	}
	b.idle = nil
}

// part forgets the container.
func (b *box) part() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pid, b.met = 0, false
	b.hangUp()
}

// meet takes note of what the engine says of the container.
func (b *box) meet(c runtime.Container) {
	b.paused.Store(c.State == runtime.StatePaused)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pid, b.refused = c.Pid, false
	if b.pid != 0 {
		b.strange = 0
	}
	for i := len(b.idle) - 1; i >= 0; i-- {
		if !b.owns(b.idle[i]) {
			b.shut(b.idle[i])
		}
	}
}

// owns reports whether a connection is of the container's first process. The lock is held.
func (b *box) owns(c *conn) bool { return c.pid == b.pid }

// socketless reports whether the program can't be reached by a socket: the box has none,
// or Berm can't see who dials.
func (b *box) socketless() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.name == "" || b.unseen
}

// shut closes a connection; the lock is held.
func (b *box) shut(c *conn) {
	_ = c.nc.Close()
	delete(b.conns, c)
	for i, other := range b.idle {
		if other == c {
			b.idle = append(b.idle[:i], b.idle[i+1:]...)
			return
		}
	}
}

// accept takes connections in until the listener is closed.
func (b *box) accept(ln *net.UnixListener) {
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
func (b *box) admit(nc *net.UnixConn) bool {
	pid, err := b.r.peer(nc)
	if err != nil {
		return false
	}
	if pid == 0 && !b.r.unseen.Swap(true) {
		b.r.log.Warn("agent_unseen", "dir", b.dir, "remedy", "run Berm in the host's process namespace (--pid host)")
	}
	c := newConn(nc)
	c.pid = pid
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.done:
		return false
	default:
	}
	b.unseen = pid == 0
	if b.unseen || b.pid != 0 && !b.owns(c) {
		b.refused = true
		return false
	}
	if b.hellos >= maxHellos || len(b.conns) >= maxConns {
		return false
	}
	b.hellos++
	if b.pid == 0 {
		b.strange++
	}
	b.conns[c] = struct{}{}
	b.r.tasks.Go(func() { b.greet(c) })
	return true
}

// crowded tells whether many came that may be anybody.
func (b *box) crowded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.strange >= maxStrangers
}

// peer returns the pid of the process that dialled. It is 0 for a process of a PID
// namespace that this one can't see into: any process of the sandbox may be that.
func peer(nc *net.UnixConn) (int, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, failed); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}

// greet waits for a new connection's Hello.
func (b *box) greet(c *conn) {
	err := b.r.guard(func() error { return c.greet(b.r.pace.hello) })
	b.mu.Lock()
	b.hellos--
	if err != nil {
		b.shut(c)
		b.mu.Unlock()
		b.r.log.Debug("agent_refused", "dir", b.dir, "error", err)
		return
	}
	b.met = true
	b.mu.Unlock()
	b.put(c)
}

// put makes a connection available.
func (b *box) put(c *conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, open := b.conns[c]; !open {
		_ = c.nc.Close()
		return
	}
	if len(b.waiting) > 0 {
		b.waiting[0] <- c // has room for it
		b.waiting = b.waiting[1:]
		return
	}
	if len(b.idle) >= maxIdle {
		if !b.owns(c) { // the first process' own may be among them
			b.shut(c)
			return
		}
		b.shut(b.idle[0]) // the likeliest to be dead
	}
	c.since = time.Now()
	b.idle = append(b.idle, c)
	b.spareLater()
}

// spareLater sees to it that connections are closed which aren't used: at the program's side
// each takes 50 KB. The lock is held.
func (b *box) spareLater() {
	if b.sparing || len(b.idle) <= keptIdle || b.r.pace.spare == 0 {
		return
	}
	b.sparing = true
	time.AfterFunc(time.Until(b.idle[0].since.Add(b.r.pace.spare)), b.spare)
}

func (b *box) spare() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sparing = false
	for len(b.idle) > keptIdle && time.Since(b.idle[0].since) >= b.r.pace.spare {
		b.shut(b.idle[0])
	}
	b.spareLater()
}

// lose closes a connection.
func (b *box) lose(c *conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shut(c)
}

// errAbsent says that the program doesn't answer.
var errAbsent = errors.New("the program doesn't answer")

// take gives a connection of the container's first process, and waits a little for one.
// The error is errAbsent, or that of ctx.
func (b *box) take(ctx context.Context) (*conn, error) {
	asked := false
	for {
		c, owned, err := b.pick(ctx, &asked)
		if err != nil {
			return nil, err
		}
		if !owned && !asked {
			asked = true
			b.ask(ctx)
			b.mu.Lock()
			owned = b.owns(c)
			b.mu.Unlock()
		}
		if owned {
			return c, nil
		}
		b.lose(c)
	}
}

// ask asks the engine who the first process is.
func (b *box) ask(ctx context.Context) {
	b.r.mu.Lock()
	id := b.id
	b.r.mu.Unlock()
	if id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, b.r.pace.ready)
	defer cancel()
	if c, err := b.r.Inspect(ctx, id); err == nil {
		b.meet(c)
	}
}

// pick takes an idle connection, or the next that comes.
func (b *box) pick(ctx context.Context, asked *bool) (c *conn, owned bool, err error) {
	b.mu.Lock()
	if n := len(b.idle); n > 0 {
		c := b.idle[n-1]
		b.idle = b.idle[:n-1]
		defer b.mu.Unlock()
		return c, b.owns(c), nil
	}
	if b.ln == nil {
		b.mu.Unlock()
		return nil, false, errAbsent
	}
	if b.refused && !*asked { // maybe another process is the first by now
		b.mu.Unlock()
		*asked = true
		b.ask(ctx)
		return b.pick(ctx, asked)
	}
	patience := b.r.pace.brief
	if b.met || time.Now().Before(b.until) {
		patience = b.r.pace.dial
	}
	next := make(chan *conn, 1)
	b.waiting = append(b.waiting, next)
	b.mu.Unlock()

	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case c = <-next:
	case <-timer.C:
		err = errAbsent
	case <-b.done:
		err = errAbsent
	case <-ctx.Done():
		err = runtime.Ended(ctx)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if c == nil {
		c = b.unwait(next)
	}
	if c != nil {
		return c, b.owns(c), nil
	}
	if len(b.conns) == 0 && errors.Is(err, errAbsent) {
		b.met, b.until = false, time.Time{}
	}
	return nil, false, err
}

// connected tells whether the program has a connection that isn't in use.
func (b *box) connected() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.idle) > 0
}

// unwait takes a waiter back, and gives what it may have got meanwhile; the lock is held.
func (b *box) unwait(next chan *conn) *conn {
	for i, w := range b.waiting {
		if w == next {
			b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
			return nil
		}
	}
	return <-next
}
