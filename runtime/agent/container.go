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
	maxWarm = 4                // sessions that were dialled and used, and wait; each takes 40 KiB of the program
	youth   = 10 * time.Second // how long its program is expected to dial, once its first process is met
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
	// Dialled sessions that wait for their first operation, and for another one. Only who holds mu may send.
	spare, warm chan *session

	mu      sync.Mutex
	ln      *net.UnixListener   // nil: there is no socket
	pid     int                 // of the container's first process; 0 while unknown
	accepts bool                // accept runs: the pid has been known
	until   time.Time           // its program is expected to dial until then
	refused bool                // a connection was refused since the engine was last asked
	unseen  bool                // the last process that dialled isn't visible here
	used    map[*session]bool   // dialled, with an operation
	offered int                 // times that a session was offered to operations
	served  map[string]*session // by user
	owners  map[string]*session // served sessions, by the IDs of their processes
	events  map[*events]bool
}

func (r *Runtime) newContainer(name string) *container {
	b := &container{r: r, name: name, spare: make(chan *session, wire.Spares), warm: make(chan *session, maxWarm), used: map[*session]bool{}, served: map[string]*session{}, owners: map[string]*session{}, events: map[*events]bool{}}
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

// hangUp forgets the first process, and ends all sessions. The caller holds b.mu.
func (b *container) hangUp() {
	b.setPid(0)
	for _, s := range b.served {
		s.endLocked()
	}
}

// setPid sets the first process. If it is another one, setPid ends the sessions that the one before dialled.
// The caller holds b.mu.
func (b *container) setPid(pid int) {
	if pid == b.pid {
		return
	}
	b.pid = pid
	for s := range b.used {
		s.hangUp()
	}
	for {
		select {
		case s := <-b.spare:
			s.hangUp()
		case s := <-b.warm:
			s.hangUp()
		default:
			return
		}
	}
}

// part is hangUp for a container that is gone.
func (b *container) part() {
	b.mu.Lock()
	defer b.mu.Unlock()
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
	b.setPid(c.Pid)
	b.refused = false
	if b.pid != 0 && b.ln != nil && !b.accepts {
		b.accepts = b.taskLocked(b.accept)
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

// admit makes a session of a new connection available. It returns false if it refuses the connection:
// only the container's first process may dial.
func (b *container) admit(nc *net.UnixConn) bool {
	pid, err := b.r.peer(nc)
	if err != nil {
		return false
	}
	if pid == 0 && !b.r.unseen.Swap(true) {
		b.r.log.Warn("agent_unseen", "dir", b.dir, "remedy", "run Berm in the host's process namespace (--pid host)")
	}
	s := &session{b: b, conn: nc, pid: pid}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unseen = pid == 0
	if b.unseen || s.pid != b.pid {
		b.refused = true
		return false
	}
	if b.ctx.Err() != nil || !b.offerLocked(b.spare, s) {
		return false
	}
	b.until = time.Now().Add(farAway)
	return true
}

// offerLocked makes a session available, unless there are too many.
func (b *container) offerLocked(to chan *session, s *session) bool {
	if len(to) == cap(to) {
		return false
	}
	to <- s
	b.offered++
	return true
}

// giveBack makes a session available whose operation has ended.
func (b *container) giveBack(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.used, s)
	s.user = ""
	if s.pid != b.pid || !b.offerLocked(b.warm, s) {
		s.hangUp()
	}
}

// peer returns the pid of the process that dialled. It is 0 for a process in a PID namespace that this
// one can't see into. Any process of the sandbox may have dialled then.
func peer(nc *net.UnixConn) (int, error) {
	cred, err := runtime.PeerOf(nc)
	return int(cred.Pid), err
}

// take takes a session that the container's first process dialled, for one operation. It waits a little for
// one. The caller must release the session or give it back. The error is errLost, or that of ctx.
func (b *container) take(ctx context.Context) (*session, error) {
	for asked := false; ; {
		b.mu.Lock()
		patience, expected := b.r.pace.brief, time.Now().Before(b.until)
		if expected {
			patience = b.r.pace.dial
		}
		unsure, offered := (b.refused || b.pid == 0) && !b.waits(), b.offered
		b.mu.Unlock()
		if unsure && !asked { // the container may have been restarted
			asked = true
			b.ask(ctx)
			continue
		}
		s, err := b.await(ctx, patience)
		switch {
		case err != nil:
			return nil, err
		case s == nil && b.others(ctx, expected, offered):
		case s == nil:
			return nil, errLost
		case b.use(s):
			return s, nil
		}
	}
}

// await takes a session, or returns nil if none is offered in time.
func (b *container) await(ctx context.Context, patience time.Duration) (*session, error) {
	select {
	case s := <-b.warm: // rather than a spare one, for which the program would dial another
		return s, nil
	default:
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case s := <-b.warm:
		return s, nil
	case s := <-b.spare:
		return s, nil
	case <-late.C:
		return nil, nil
	case <-b.ctx.Done():
		return nil, errLost
	case <-ctx.Done():
		return nil, runtime.Ended(ctx)
	}
}

// others reports whether sessions were offered after the given number of offers, which other operations
// took. If not, the program isn't expected to dial any more, unless the container is paused.
func (b *container) others(ctx context.Context, expected bool, offered int) bool {
	runs := expected && b.runs(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.offered != offered {
		return true
	}
	if runs {
		b.until = time.Time{}
	}
	return false
}

// use begins an operation on a session. It returns false, and ends the session, if another process is the
// first by now.
func (b *container) use(s *session) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.pid != b.pid {
		s.hangUp()
		return false
	}
	b.used[s] = true
	return true
}

// ask asks the engine for the first process.
func (b *container) ask(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, b.r.pace.ready)
	defer cancel()
	if c, err := b.inspect(ctx); err == nil {
		b.meet(c)
	}
}

// waits reports whether a session waits for an operation. It may have ended.
func (b *container) waits() bool { return len(b.warm)+len(b.spare) > 0 }

// streams counts the operations of all sessions of a container.
func streams(b *container) int {
	b.mu.Lock()
	n := len(b.used)
	served := slices.Collect(maps.Values(b.served))
	b.mu.Unlock()
	for _, s := range served {
		n += s.mux.NumStreams() - int(s.lost.Load())
	}
	return n
}
