package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// Containerd is a private containerd without Docker, and what it keeps. Its methods
// may be called from many goroutines at once.
//
// When the process dies without Close, the daemon dies with it, and a watchdog removes
// the rest. If that dies, too, the next engine that is started in the same Options.Dir does.
type Containerd struct {
	*ground
	mu     sync.Mutex // guards ground's daemon
	closed bool
}

// StartContainerd starts a private containerd and waits until it answers, which takes
// less than a second. The caller closes it. FailedPrecondition says that this machine
// or this user can't have one.
func StartContainerd(ctx context.Context, opts Options) (*Containerd, error) {
	begun := time.Now()
	g, err := newGround("containerd", opts)
	if err != nil {
		return nil, fmt.Errorf("start a private engine: %w", err)
	}
	c := &Containerd{ground: g}
	if err = os.Mkdir(c.Root(), 0o711); err == nil {
		err = g.prepare(ctx)
	}
	if err == nil && opts.Image != "" {
		err = c.ImportBusybox(ctx, opts.Image)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a private engine: %w", err), c.Close())
	}
	_, _ = fmt.Fprintf(g.opts.Log, "private containerd at %s, up in %s\n", c.Address(), time.Since(begun).Round(time.Millisecond))
	return c, nil
}

// Address is the engine's socket, a path, as in CONTAINERD_ADDRESS.
func (c *Containerd) Address() string { return c.socket() }

// Namespace is the containerd namespace that images are imported into. Users of the
// engine should use it, too.
func (c *Containerd) Namespace() string { return "berm" }

// Root is an existing directory of the engine's own, with a short path, for the files
// of its users.
func (c *Containerd) Root() string { return c.place.path("root") }

// CgroupParent is the cgroup that containers must be made in, so that Close finds
// them whatever became of them.
func (c *Containerd) CgroupParent() string { return "/" + c.place.name }

// Pid is the process id of the daemon; 0 while it is killed. Stopping it with SIGSTOP
// makes an engine that hangs.
func (c *Containerd) Pid() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.containerd == nil {
		return 0
	}
	return c.containerd.cmd.Process.Pid
}

// Kill ends the daemon with SIGKILL and waits for its end. Containers and their shims
// live on, and Start finds them again.
func (c *Containerd) Kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.killContainerd()
}

// Start starts the daemon again after Kill, and waits until it answers.
func (c *Containerd) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return fmt.Errorf("the engine is closed: %w", errdefs.ErrFailedPrecondition)
	case c.containerd != nil:
		return nil
	}
	return c.startContainerd(ctx)
}

// Close kills the engine and its containers and removes all that they left. It may
// be called more than once.
func (c *Containerd) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.close()
}

// ImportBusybox puts the image of Docker.ImportBusybox into the engine, unpacked.
func (c *Containerd) ImportBusybox(ctx context.Context, ref string, changes ...string) error {
	return c.Store().ImportBusybox(ctx, ref, changes...)
}

// Store is the engine's images.
func (c *Containerd) Store() ContainerdStore {
	return ContainerdStore{Address: c.Address(), Namespace: c.Namespace()}
}

// ContainerdStore is the images in one namespace of a containerd, as its own program
// ctr sees them.
type ContainerdStore struct {
	Address   string // the socket's path, or unix:// and the path
	Namespace string
}

// Ping asks the engine whether it is there.
func (s ContainerdStore) Ping(ctx context.Context) error {
	_, err := s.ctr(ctx, nil, "version")
	return err
}

// ImportBusybox is Containerd.ImportBusybox.
func (s ContainerdStore) ImportBusybox(ctx context.Context, ref string, changes ...string) error {
	archive, err := busyboxArchive(ctx, ref, changes...)
	if err != nil {
		return fmt.Errorf("build image %s: %w", ref, err)
	}
	if _, err := s.ctr(ctx, archive, "images", "import", "-"); err != nil {
		return fmt.Errorf("import image %s: %w", ref, err)
	}
	return nil
}

// HasImage reports whether there is an image of a name.
func (s ContainerdStore) HasImage(ctx context.Context, ref string) (bool, error) {
	out, err := s.ctr(ctx, nil, "images", "list", "--quiet")
	return slices.Contains(strings.Fields(string(out)), ref), err
}

// RemoveImage removes an image; one that isn't there is no error.
func (s ContainerdStore) RemoveImage(ctx context.Context, ref string) error {
	_, err := s.ctr(ctx, nil, "images", "remove", "--sync", ref)
	return err
}

// HasNamespace reports whether the namespace is there, empty or not.
func (s ContainerdStore) HasNamespace(ctx context.Context) (bool, error) {
	out, err := s.ctr(ctx, nil, "namespaces", "list", "--quiet")
	return slices.Contains(strings.Fields(string(out)), s.Namespace), err
}

// RemoveNamespace removes the namespace, which has to be empty.
func (s ContainerdStore) RemoveNamespace(ctx context.Context) error {
	_, err := s.ctr(ctx, nil, "namespaces", "remove", s.Namespace)
	return err
}

func (s ContainerdStore) ctr(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
	path, err := find("ctr")
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, append([]string{"--address", strings.TrimPrefix(s.Address, "unix://"), "--namespace", s.Namespace}, args...)...)
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(stdin), &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("ctr %s: %w: %s", args[0], errors.Join(ctx.Err(), err), bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}
