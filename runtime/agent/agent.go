// Package agent works in the containers of an engine through Berm's own program, which is
// each container's first process. A command costs about a millisecond there. Processes,
// files and ports are reached in the same way.
//
// A session with the program has one of two carriers. Each container has a directory of its
// own, which it sees read-only, with a socket at which Berm listens and the program dials.
// Where that doesn't reach, or for another user than the program's, the engine starts the
// program once more, and the session is over its stdio.
//
// The other side is hostile. At a socket, only the container's first process is heard. All
// that comes is bounded, and says something of that container alone.
package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/keylock"
)

// Engine is what a backend must offer to be wrapped.
type Engine interface {
	runtime.Runtime
	runtime.Starter
}

// Options of a Runtime.
type Options struct {
	// Engine is the backend. Mandatory. The Runtime closes it if it can be closed.
	Engine Engine
	// Program is the path of the program berm-agent on the engine's host. Empty is the
	// backend's own copy, for an engine that doesn't see this host's files: no container
	// has a socket then.
	Program string
	// Root is an absolute directory of this Runtime's own, made with mode 0700 if it
	// is missing. It has a directory for each container. Mandatory.
	Root string
	// HostRoot is Root as the engine sees it; empty is Root.
	HostRoot string
	// Logger is told what becomes of the programs; nil discards.
	Logger *slog.Logger
}

// Runtime is an engine whose containers are worked in through the program.
//
// A container gets the program and a directory from Create, unless its Spec has an
// Agent already: one without a Dir has the program alone, and is reached through the
// engine; one with a Dir is somebody else's.
//
// It may be used from many goroutines at once.
type Runtime struct {
	Engine

	opts    Options
	log     *slog.Logger
	root    *os.File // Root, locked
	pace    pace
	serving keylock.Map[servedKey] // sessions that are started
	naming  keylock.Map[servedKey] // processes that are started, by the container's id and theirs
	peer    func(*net.UnixConn) (int, error)

	unseen atomic.Bool // a program dialled that this process can't see

	mu         sync.Mutex
	closed     bool
	containers map[string]*container // by the name of the directory
	byID       map[string]*container // by the container's id; those without a directory, too
	tasks      sync.WaitGroup        // all goroutines
}

var (
	_ runtime.AgentRuntime = (*Runtime)(nil)
	_ io.Closer            = (*Runtime)(nil)
)

// pace is how long things may take. Tests are in more of a hurry.
type pace struct {
	hello  time.Duration // a new connection's first word
	reject time.Duration // until the next connection is looked at, after one that was refused
	dial   time.Duration // until the program has dialled
	brief  time.Duration // the same where nothing says that it will
	linger time.Duration // until a session ends that the engine's program serves, and nothing needs
	ping   time.Duration // between pings of such a program
	pong   time.Duration // for its answer

	// A program that doesn't answer a request may be held up by the container's own
	// work, which holds the engine's exec up as well, so that it isn't given up
	// easily. First the engine is asked whether the container is frozen or dead.
	look  time.Duration
	ready time.Duration

	kill   time.Duration // of a command, the program's own 5 s for it included
	drain  time.Duration // of a killed command's last output
	rejoin time.Duration // after a connection broke in mid-command
	answer time.Duration // to what takes no time inside
	leave  time.Duration // of a program that the engine started, once its input has ended
}

var usualPace = pace{
	hello: 5 * time.Second, reject: 20 * time.Millisecond, dial: time.Second, brief: 100 * time.Millisecond, linger: 2 * time.Second,
	ping: time.Second, pong: 4 * time.Second,
	look: 500 * time.Millisecond, ready: 5 * time.Second,
	kill: 7 * time.Second, drain: time.Second, rejoin: 5 * time.Second, answer: 15 * time.Second,
	leave: 5 * time.Second,
}

// New wraps an engine. It listens at once for the programs of all containers that an
// earlier Runtime with the same Root made, and fails if that one isn't closed.
func New(opts Options) (*Runtime, error) { return newRuntime(opts, usualPace) }

func newRuntime(opts Options, p pace) (*Runtime, error) {
	switch {
	case opts.Engine == nil:
		return nil, errors.New("agent: an Engine is needed")
	case opts.Program != "" && !filepath.IsAbs(opts.Program):
		return nil, fmt.Errorf("agent: the program's path %q must be absolute", opts.Program)
	case !filepath.IsAbs(opts.Root) || opts.HostRoot != "" && !filepath.IsAbs(opts.HostRoot):
		return nil, fmt.Errorf("agent: the root %q, and as the engine sees it %q, must be absolute", opts.Root, opts.HostRoot)
	}
	if opts.HostRoot == "" {
		opts.HostRoot = opts.Root
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	root, err := lockRoot(opts.Root)
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	r := &Runtime{
		Engine: opts.Engine, opts: opts, log: opts.Logger, root: root, pace: p, peer: peer,
		containers: map[string]*container{}, byID: map[string]*container{},
	}
	if err := r.scan(); err != nil {
		r.stop()
		return nil, fmt.Errorf("agent: %w", err)
	}
	return r, nil
}

func lockRoot(path string) (*os.File, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := root.Stat()
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		err = fmt.Errorf("%s can be entered by others than its owner; mode 0700 keeps them out", path)
	}
	if err == nil && unix.Flock(int(root.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		err = fmt.Errorf("%s is in use by another process", path)
	}
	if err != nil {
		_ = root.Close()
		return nil, err
	}
	return root, nil
}

var dirPattern = regexp.MustCompile(`^[0-9a-f]{32}$`)

// dirName is the name of a container's directory. The container's own name is unique in
// the engine, and known again after a restart.
func dirName(container string) string {
	sum := sha256.Sum256([]byte(container))
	return hex.EncodeToString(sum[:16])
}

// scan listens in every directory that is there. Each has a container, which Sweep drops.
func (r *Runtime) scan() error {
	entries, err := os.ReadDir(r.opts.Root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || !dirPattern.MatchString(e.Name()) {
			continue
		}
		b := r.newContainer(e.Name())
		if err := b.listen(); err != nil {
			r.log.Warn("agent_not_heard", "dir", b.dir, "error", err)
		}
		r.containers[b.name] = b
	}
	return nil
}

// Close ends all connections, and closes the engine's client. Containers and their
// processes go on; calls that are under way fail. Processes that were started in
// containers without a socket end.
func (r *Runtime) Close() error {
	r.stop()
	if c, ok := r.Engine.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

func (r *Runtime) stop() {
	r.mu.Lock()
	r.closed = true
	all := slices.AppendSeq(slices.Collect(maps.Values(r.containers)), maps.Values(r.byID)) // some in both
	r.mu.Unlock()
	for _, b := range all {
		b.close()
	}
	r.tasks.Wait()
	_ = r.root.Close()
}

// minPids is the least limit that a container gets: its program has up to 16 threads,
// and ends if it can't make them; then there is the main process, a supervisor for a
// command, and the command, for which two are left at the worst.
const minPids = 20

// Create makes a container with the program in it, and listens for it. A PidsLimit that
// leaves that program no room is raised to 20.
func (r *Runtime) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	if spec.Name == "" || spec.Agent != nil && spec.Agent.Dir != "" {
		return r.Engine.Create(ctx, spec)
	}
	if spec.PidsLimit > 0 {
		spec.PidsLimit = max(spec.PidsLimit, minPids)
	}
	own := runtime.Agent{Program: r.opts.Program, Stored: r.opts.Program == ""}
	if spec.Agent != nil || own.Stored {
		if spec.Agent == nil || spec.Agent.Program == "" {
			spec.Agent = &own
		}
		return r.Engine.Create(ctx, spec)
	}
	b, err := r.reserve(spec.Name)
	if err != nil {
		return runtime.Container{}, fmt.Errorf("create container %q: %w", spec.Name, err)
	}
	spec.Agent = &runtime.Agent{Program: r.opts.Program, Dir: filepath.Join(r.opts.HostRoot, b.name)}
	c, err := r.Engine.Create(ctx, spec)
	r.mu.Lock()
	defer r.mu.Unlock()
	b.creates--
	if err != nil {
		// What an earlier Runtime left may belong to a container that this one hasn't met.
		if b.creates == 0 && b.id == "" && b.fresh {
			r.drop(b)
		}
		return runtime.Container{}, err
	}
	b.id = c.ID
	r.byID[c.ID] = b
	b.meet(c)
	return c, nil
}

// reserve gives what a container is to have that is about to be made. There may be such
// already: of a container that has the name, so that the new one won't be, or of one
// that is no more.
func (r *Runtime) reserve(name string) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errClosed
	}
	b := r.containers[dirName(name)]
	if b == nil {
		b = r.newContainer(dirName(name))
		b.fresh = true
	}
	if b.ln == nil {
		if err := b.make(); err != nil {
			return nil, runtime.Unavailable(err)
		}
		r.containers[b.name] = b
	}
	b.creates++
	return b, nil
}

// drop forgets a container, and removes its directory; the lock is held.
func (r *Runtime) drop(b *container) {
	b.close()
	if b.name == "" {
		return
	}
	if r.containers[b.name] == b {
		delete(r.containers, b.name)
	}
	if err := os.RemoveAll(b.dir); err != nil {
		r.log.Error("agent_dir_left", "dir", b.dir, "error", err)
	}
}

// Remove kills a container, and removes it with all that Create made for it.
func (r *Runtime) Remove(ctx context.Context, id string) error {
	b := r.known(id)
	if b == nil {
		if c, err := r.Inspect(ctx, id); err == nil {
			r.mu.Lock()
			b = r.containers[dirName(c.Name)]
			r.mu.Unlock()
		}
	}
	if err := r.Engine.Remove(ctx, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byID, id)
	if b == nil || b.id != "" && b.id != id {
		return nil
	}
	b.id = ""
	b.part()
	if b.creates == 0 {
		r.drop(b)
	}
	return nil
}

// known gives a container that this Runtime has met.
func (r *Runtime) known(id string) *container {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byID[id]
}

// container finds a container, unless ctx has ended.
func (r *Runtime) container(ctx context.Context, id string) (*container, error) {
	if ctx.Err() != nil {
		return nil, runtime.Ended(ctx)
	}
	if b := r.known(id); b != nil {
		return b, nil
	}
	c, err := r.Inspect(ctx, id)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errClosed
	}
	b := r.byID[c.ID]
	if b == nil {
		if b = r.containers[dirName(c.Name)]; b == nil {
			b = r.newContainer("")
		}
		b.id = c.ID
		r.byID[c.ID] = b
	}
	b.meet(c)
	return b, nil
}

// Sweep removes what is left of containers that are no more, the engine's own parts
// and Berm's directories.
func (r *Runtime) Sweep(ctx context.Context) error {
	err := r.Engine.Sweep(ctx)
	unmet, own := r.sweep(ctx)
	if own != nil {
		err = errors.Join(err, fmt.Errorf("sweep the agents' directories: %w", own))
	}
	r.meet(ctx, unmet)
	return err
}

// meet asks the engine who is the first process in containers of an earlier Runtime, as
// nobody in them is let in before. What can't be done now can wait.
func (r *Runtime) meet(ctx context.Context, ids []string) {
	ctx, cancel := context.WithTimeout(ctx, r.pace.answer)
	defer cancel()
	var g errgroup.Group
	g.SetLimit(16)
	for _, id := range ids {
		g.Go(func() error { _, _ = r.container(ctx, id); return nil })
	}
	_ = g.Wait()
}

// guard is runtime.Guard for what takes what a container says.
func (r *Runtime) guard(f func() error) error { return runtime.Guard(r.log, f) }

// sweep gives the ids of containers that this Runtime hasn't met.
func (r *Runtime) sweep(ctx context.Context) (unmet []string, err error) {
	r.mu.Lock()
	before := map[*container]string{} // IDs before the engine is asked: what comes after stays
	for _, b := range r.containers {
		if b.creates == 0 {
			before[b] = b.id
		}
	}
	for _, b := range r.byID {
		before[b] = b.id
	}
	r.mu.Unlock()

	list, err := r.List(ctx, nil)
	if err != nil {
		return nil, err
	}
	names, ids := map[string]bool{}, map[string]bool{}
	for _, c := range list {
		names[dirName(c.Name)], ids[c.ID] = true, true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for b, id := range before {
		if b.creates > 0 || b.id != id {
			continue
		}
		if b.id != "" && !ids[b.id] {
			delete(r.byID, b.id)
			if b.name == "" {
				r.drop(b)
			}
		}
		if b.name != "" && !names[b.name] && r.containers[b.name] == b {
			r.drop(b)
		}
	}
	for _, c := range list {
		if b := r.containers[dirName(c.Name)]; b != nil && b.id == "" && b.creates == 0 {
			unmet = append(unmet, c.ID)
		}
	}
	return unmet, nil
}

// runPrefix begins the IDs of commands, which aren't listed as processes.
const runPrefix = "berm:run:"

var errClosed = runtime.Unavailable(errors.New("this client of the engine is closed"))
