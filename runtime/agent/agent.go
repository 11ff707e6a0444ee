// Package agent works in an engine's containers through Berm's own program, which is each
// container's first process. It runs commands there in about a millisecond, and reaches
// processes, files and ports in the same way.
//
// Each container has a directory of its own, which it sees read-only. Berm listens on a socket
// there, and the program dials it, with a connection for each operation under way. If the socket
// doesn't work, or for another user than the program's, the engine starts the program once more,
// and operations share a yamux session over its stdio.
//
// The other side is hostile. On a socket, Berm accepts only the container's first process.
// All input is bounded, and Berm believes it of that container alone.
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
	// Logger logs trouble with the programs; nil discards.
	Logger *slog.Logger
}

// Runtime is an engine that works inside its containers through the program.
//
// Create gives a container the program and a directory, unless its Spec has an Agent. With an Agent
// without a Dir, the container has the program alone, and the Runtime reaches it through the engine. An
// Agent with a Dir isn't the Runtime's, so Create passes the Spec on unchanged.
//
// It may be used from many goroutines at once.
type Runtime struct {
	Engine

	opts    Options
	log     *slog.Logger
	root    *os.File // Root, locked
	pace    pace
	serving keylock.Map[servedKey] // starts of sessions
	naming  keylock.Map[servedKey] // starts of processes, by the container's id and the process's
	peer    func(*net.UnixConn) (int, error)

	unseen atomic.Bool // a program dialled whose pid isn't visible here; logged once

	mu         sync.Mutex
	closed     bool
	containers map[string]*container // by the name of the directory
	byID       map[string]*container // by the container's id; includes those without a directory
	tasks      sync.WaitGroup        // all goroutines
}

var (
	_ runtime.AgentRuntime = (*Runtime)(nil)
	_ io.Closer            = (*Runtime)(nil)
)

// pace has the timeouts and intervals of a Runtime. Tests shorten them.
type pace struct {
	reject time.Duration // between a refused connection and the next accept
	dial   time.Duration // for the program to dial, while it is expected to
	brief  time.Duration // for the program to dial, otherwise
	linger time.Duration // before an unused served session ends
	ping   time.Duration // between pings of a served session
	pong   time.Duration // for the answer to a ping

	// The container's own work may delay the program's answer to a request, and would
	// delay the engine's exec as well. So Berm waits for ready in all. After look, it
	// first asks the engine whether the container is frozen or dead.
	look  time.Duration
	ready time.Duration

	kill   time.Duration // for killing a command; includes the program's own 5 s
	drain  time.Duration // for the last output of a killed command
	rejoin time.Duration // for following again after a connection broke
	answer time.Duration // for requests that the program answers at once
	leave  time.Duration // for a served program to end once its input has ended
}

var usualPace = pace{
	reject: 20 * time.Millisecond, dial: time.Second, brief: 100 * time.Millisecond, linger: 2 * time.Second,
	ping: time.Second, pong: 4 * time.Second,
	look: 500 * time.Millisecond, ready: 5 * time.Second,
	kill: 7 * time.Second, drain: time.Second, rejoin: 5 * time.Second, answer: 15 * time.Second,
	leave: 5 * time.Second,
}

// New wraps an engine. It listens at once for the programs of all containers that an earlier Runtime
// with the same Root made. It fails if that Runtime isn't closed.
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

// dirName returns the name of a container's directory. It derives from the container's name, which is
// unique in the engine and still known after a restart.
func dirName(container string) string {
	sum := sha256.Sum256([]byte(container))
	return hex.EncodeToString(sum[:16])
}

// scan listens in every directory below the Root. It makes a container for each directory;
// Sweep drops those that the engine doesn't have.
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

// minPids is the lowest limit of processes that a container gets. The program has up to 16
// threads, and ends if it can't make one. The main process and a command's supervisor take
// one each. That leaves at least two for the command.
const minPids = 20

// Create makes a container with the program in it, and listens for the program. It raises a
// PidsLimit below 20, which the program needs.
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
		// A directory that an earlier Runtime made may belong to a container that isn't met yet.
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

// reserve returns a container with a directory and a listener, for a name that Create is about to use.
// If the directory exists already, the engine has a container of that name and Create will fail, or a
// container that is gone left it.
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

// drop forgets a container, and removes its directory. The caller holds r.mu.
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

// known returns the container with an id, or nil if this Runtime hasn't met it.
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

// Sweep removes what is left of containers that are gone: the engine's parts, and the
// directories below Root.
func (r *Runtime) Sweep(ctx context.Context) error {
	err := r.Engine.Sweep(ctx)
	unmet, own := r.sweep(ctx)
	if own != nil {
		err = errors.Join(err, fmt.Errorf("sweep the agents' directories: %w", own))
	}
	r.meet(ctx, unmet)
	return err
}

// meet asks the engine for the first process of each container of an earlier Runtime. Their
// programs can't connect before that. It ignores failures: the next use of a container asks
// again.
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

// guard is runtime.Guard for functions that read from a container.
func (r *Runtime) guard(f func() error) error { return runtime.Guard(r.log, f) }

// sweep drops containers that the engine doesn't have. It returns the ids of containers that
// have a directory and weren't met yet.
func (r *Runtime) sweep(ctx context.Context) (unmet []string, err error) {
	r.mu.Lock()
	before := map[*container]string{} // IDs before the engine is asked; later containers stay
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
