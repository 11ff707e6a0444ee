// Package runtimetest has what tests need of a container engine: Fake, an engine
// in memory, and Run, the contract suite that Fake and every backend pass.
package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// DefaultImage is in the store of a Fake whose options name no images.
const DefaultImage = "berm.local/busybox:latest"

// FakeOptions says how a Fake behaves. The zero value is an engine that has
// DefaultImage, whose registry is empty, and where nothing fails.
//
// Operations are named "info", "image", "pull", "ensure_network", "networks",
// "remove_network", "volumes", "remove_volume", "create", "inspect", "list", "remove", "exec", "pause",
// "resume", "logs", "stats", "watch" and "sweep", and of runtime.Insider "process_start",
// "process_follow", "process_input", "process_events", "process", "process_list",
// "process_signal", "process_kill", "process_resize", "process_forget", "file_stat", "file_read", "file_write", "file_list",
// "file_mkdir", "file_move", "file_copy", "file_remove", "file_glob", "file_search",
// "file_tar_read", "file_tar_write", "file_watch" and "dial". The id that goes with one is the
// container's; the image reference with "image" and "pull"; the name with
// "create" and the network and volume operations; empty with "info", "list", "networks",
// "volumes", "watch" and "sweep". Hooks are called from many goroutines at once.
type FakeOptions struct {
	// Images are in the store from the start, by reference. Nil is DefaultImage
	// alone. An image without an ID gets one made from its reference.
	Images map[string]runtime.Image
	// Registry is what Pull can bring, by reference.
	Registry map[string]runtime.Image
	// Pull, when not nil, stands for the transfer of an image that Registry has,
	// and takes as long as it likes. Its error is Pull's.
	Pull func(ctx context.Context, ref string, progress func(runtime.PullProgress)) error
	// Exec, when not nil, runs commands instead of the built-in ones. Its streams
	// are never nil. Its context ends with the caller's, with the container and
	// with the engine. errors.ErrUnsupported leaves the command to the built-in ones.
	Exec func(ctx context.Context, c runtime.Container, e runtime.Exec) (runtime.ExecResult, error)
	// Fail, when not nil, is asked first on each call; an error is the call's
	// outcome, and nothing is done.
	Fail func(op, id string) error
	// FailAfter, when not nil, is asked once a call has done its work; an error
	// replaces its outcome. A Create that fails so leaves its container.
	FailAfter func(op, id string) error
	// Files is a directory for containers' files. Without it there are no operations on
	// files.
	Files string
	// Measures has commands use a millisecond and a MiB, as processes do.
	Measures bool
	// Delay, when not nil, is how long each call takes before it does its work.
	Delay func(op string) time.Duration
}

// Fake is an engine in memory, but for files. It keeps all promises of runtime.Runtime that need
// no kernel, and is a runtime.Collector. It may be used from many goroutines
// at once, keeps none of its own but one for each process that Start started and that hasn't
// ended, and needs no closing.
//
// A main process whose command is one of the built-in ones, or a sh -c with a few
// of these, is run as they say; any other, and none, runs until it is killed.
// The labels, mounts and slices that it returns are shared: don't change them.
type Fake struct {
	opts  FakeOptions
	calls map[string]*atomic.Int64

	mu         sync.Mutex
	down       chan struct{} // closed while the engine is down
	images     map[string]runtime.Image
	registry   map[string]runtime.Image
	networks   map[string]*fakeNetwork
	volumes    map[string]*fakeVolume
	containers map[string]*fakeContainer
	names      map[string]*fakeContainer
	watchers   map[*fakeWatcher]struct{}
	pids       int // the last that was given
	ports      map[int]func(net.Conn)
}

var (
	_ runtime.AgentRuntime = (*Fake)(nil)
	_ runtime.Collector    = (*Fake)(nil)
)

// NewFake makes an engine without containers and networks.
func NewFake(opts FakeOptions) *Fake {
	f := &Fake{
		opts:       opts,
		calls:      make(map[string]*atomic.Int64),
		down:       make(chan struct{}),
		images:     make(map[string]runtime.Image),
		registry:   make(map[string]runtime.Image),
		networks:   make(map[string]*fakeNetwork),
		volumes:    make(map[string]*fakeVolume),
		containers: make(map[string]*fakeContainer),
		names:      make(map[string]*fakeContainer),
		watchers:   make(map[*fakeWatcher]struct{}),
		ports:      make(map[int]func(net.Conn)),
	}
	for _, op := range []string{
		"info", "image", "pull", "ensure_network", "networks", "remove_network", "volumes", "remove_volume", "create", "inspect",
		"list", "remove", "exec", "pause", "resume", "logs", "stats", "watch", "sweep",
		"process_start", "process_follow", "process_input", "process_events", "process", "process_list", "process_signal", "process_kill", "process_resize", "process_forget",
		"file_stat", "file_read", "file_write", "file_list", "file_mkdir", "file_move", "file_copy", "file_remove", "file_glob",
		"file_search", "file_tar_read", "file_tar_write", "file_watch", "dial",
	} {
		f.calls[op] = new(atomic.Int64)
	}
	if opts.Images == nil {
		opts.Images = map[string]runtime.Image{DefaultImage: {}}
	}
	for ref, img := range opts.Images {
		addImage(f.images, ref, img)
	}
	for ref, img := range opts.Registry {
		addImage(f.registry, ref, img)
	}
	return f
}

// Calls tells how often an operation was called, failed calls included. It panics
// on a name that is none.
func (f *Fake) Calls(op string) int {
	n, ok := f.calls[op]
	if !ok {
		panic("runtimetest: no operation is called " + op)
	}
	return int(n.Load())
}

// SetDown takes the engine down, or brings it back. While it is down all calls are
// Unavailable; those under way in Exec, Logs and Watch end so when it goes down, as do
// followers of processes, writers to them and Events.
// Containers live on.
func (f *Fake) SetDown(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if down == isClosed(f.down) {
		return
	}
	if down {
		close(f.down)
		for _, c := range f.containers {
			for e := range c.execs {
				(*e)(errDown)
			}
			c.leaveProcesses(errDown)
		}
		return
	}
	f.down = make(chan struct{})
}

// Containers tells what there is, as Inspect would, whether the engine is down or
// not, and without counting as a call.
func (f *Fake) Containers() []runtime.Container {
	f.mu.Lock()
	defer f.mu.Unlock()
	cs := make([]runtime.Container, 0, len(f.containers))
	for _, c := range f.containers {
		cs = append(cs, c.info)
	}
	return cs
}

// Die has a container's main process die of SIGKILL, as if by itself. It does
// nothing to one that isn't there or has ended.
func (f *Fake) Die(id string) { f.kill(id, false) }

// OOMKill has the kernel kill a container's main process for want of memory.
func (f *Fake) OOMKill(id string) { f.kill(id, true) }

func (f *Fake) kill(id string, oom bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.containers[id]; c != nil {
		f.end(c, 128+9, oom)
	}
}

// Info implements runtime.Runtime.
func (f *Fake) Info(ctx context.Context) (runtime.Info, error) {
	return call(ctx, f, "info", "", func() (runtime.Info, error) {
		return runtime.Info{
			Backend: "fake", Version: "1", OS: "linux", Architecture: "amd64",
			CPUs: 4, MemoryBytes: 8 << 30, CgroupVersion: "2",
		}, nil
	})
}

// Sweep implements runtime.Runtime. There is never anything to find.
func (f *Fake) Sweep(ctx context.Context) error {
	return f.do(ctx, "sweep", "", func() error { return nil })
}

// begin counts a call and lets it fail or take its time. The channel is closed
// when the engine goes down.
func (f *Fake) begin(ctx context.Context, op, id string) (down <-chan struct{}, err error) {
	f.calls[op].Add(1)
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s %s: %w", op, id, ctxError(ctx))
	}
	if f.opts.Fail != nil {
		if err := f.opts.Fail(op, id); err != nil {
			return nil, err
		}
	}
	if f.opts.Delay != nil {
		if d := f.opts.Delay(op); d > 0 {
			if err := sleep(ctx, d); err != nil {
				return nil, fmt.Errorf("%s %s: %w", op, id, err)
			}
		}
	}
	f.mu.Lock()
	down = f.down
	f.mu.Unlock()
	if isClosed(down) {
		return nil, fmt.Errorf("%s %s: %w", op, id, errDown)
	}
	return down, nil
}

// call counts a call, and does its work with f.mu held, unless it fails before. What it has
// opened is closed if it fails afterwards.
func call[T any](ctx context.Context, f *Fake, op, id string, work func() (T, error)) (T, error) {
	var out T
	_, err := f.begin(ctx, op, id)
	if err != nil {
		return out, err
	}
	f.mu.Lock()
	result, err := work()
	f.mu.Unlock()
	if err != nil {
		return out, err
	}
	if err := f.after(op, id); err != nil {
		if opened, ok := any(result).(io.Closer); ok {
			_ = opened.Close()
		}
		return out, err
	}
	return result, nil
}

// do is call for what returns nothing.
func (f *Fake) do(ctx context.Context, op, id string, work func() error) error {
	_, err := call(ctx, f, op, id, func() (struct{}, error) { return struct{}{}, work() })
	return err
}

func (f *Fake) after(op, id string) error {
	if f.opts.FailAfter == nil {
		return nil
	}
	return f.opts.FailAfter(op, id)
}

var errDown = fmt.Errorf("the engine is down: connection refused: %w", errdefs.ErrUnavailable)

// ctxError is of the class of ctx's end and wraps its cause.
func ctxError(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
		return errors.Join(ctx.Err(), cause)
	}
	return context.Cause(ctx)
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctxError(ctx)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
