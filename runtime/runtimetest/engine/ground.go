package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Options say how to start an engine. The zero value will do.
type Options struct {
	// Dir is where the engine makes a directory for all that it keeps. Empty is
	// the directory for temporary files. Engines whose owner died are looked for in the
	// same place, so it should be the same each time. At most 60 characters.
	Dir string
	// Log receives a line about each step; nil discards.
	Log io.Writer
	// NoNetns starts the daemon in this process's network namespace, where it
	// reaches loopback, but has no networks and must not be asked for any.
	NoNetns bool
	// Runtimes are OCI runtimes by the names of their classes, the paths of programs,
	// for a Docker Engine to offer besides its own.
	Runtimes map[string]string
	// Config has more fields of a Docker Engine's daemon.json.
	Config map[string]any
	// Image, when not empty, is the name of the image of Docker.ImportBusybox that the engine
	// is to have.
	Image string
	// StartTimeout is how long a daemon may take to answer. 0 is 30 s.
	StartTimeout time.Duration
}

// ground is the part that both kinds of engines have: a place, a network namespace with a
// world outside, and a containerd.
type ground struct {
	place *place
	opts  Options

	containerd *daemon  // nil while it is killed
	outside    *outside // nil with NoNetns, or when closed
}

// newGround makes the place; prepare does the rest, and close undoes both.
func newGround(kind string, opts Options) (*ground, error) {
	if err := Check(kind); err != nil {
		return nil, err
	}
	if opts.Log == nil {
		opts.Log = io.Discard
	}
	if opts.Dir == "" {
		opts.Dir = tempDir
	}
	if opts.StartTimeout == 0 {
		opts.StartTimeout = 30 * time.Second
	}
	if len(opts.Dir) > 60 { // a socket's path has at most 107 characters
		return nil, fmt.Errorf("directory %s has more than 60 characters: %w", opts.Dir, errdefs.ErrInvalidArgument)
	}
	place, err := newPlace(opts)
	if err != nil {
		return nil, err
	}
	return &ground{place: place, opts: opts}, nil
}

// Dir holds all that the engine keeps.
func (g *ground) Dir() string { return g.place.dir }

// Netns is the path of the engine's network namespace; empty with NoNetns.
func (g *ground) Netns() string {
	if g.opts.NoNetns {
		return ""
	}
	return g.place.path("netns")
}

// Outside is the address of a server beyond the engine's network namespace, which
// says "outside" to each client. It is all that there is; empty with NoNetns.
func (g *ground) Outside() string {
	if g.opts.NoNetns {
		return ""
	}
	return outsideAddr
}

func (g *ground) socket() string { return g.place.path("containerd.sock") }

func (g *ground) prepare(ctx context.Context) error {
	if !g.opts.NoNetns {
		if err := makeNetns(g.Netns()); err != nil {
			return err
		}
		var err error
		if g.outside, err = newOutside(ctx, g.Netns(), g.place.path("outside")); err != nil {
			return err
		}
	}
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = %q
[plugins."io.containerd.internal.v1.opt"]
path = %q
`, g.place.path("containerd"), g.place.path("state"), g.socket(), g.place.path("opt"))
	if err := os.WriteFile(g.place.path("containerd.toml"), []byte(config), 0o600); err != nil {
		return err
	}
	if err := putCrun(g.place.path("bin")); err != nil {
		return err
	}
	return g.startContainerd(ctx)
}

// putCrun writes a crun into dir, which comes first in the PATH of daemons, if this host has
// hybrid cgroups. crun refuses those, so the script hides the hierarchy of version 2.
func putCrun(dir string) error {
	crun, err := find("crun")
	if err != nil {
		return nil //nolint:nilerr // no test needs it then
	}
	var root, unified unix.Statfs_t
	if unix.Statfs("/sys/fs/cgroup", &root) != nil || unix.Statfs("/sys/fs/cgroup/unified", &unified) != nil ||
		root.Type == unix.CGROUP2_SUPER_MAGIC || unified.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil
	}
	script := fmt.Sprintf(`#!/bin/sh
exec unshare --mount --propagation slave sh -c 'mount -t tmpfs none /sys/fs/cgroup/unified && exec %s "$@"' crun "$@"
`, crun)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "crun"), []byte(script), 0o700) //nolint:gosec // a program
}

func (g *ground) startContainerd(ctx context.Context) error {
	d, err := startDaemon(g.place.path("containerd.log"), g.Netns(),
		"containerd", "--config", g.place.path("containerd.toml"))
	if err != nil {
		return err
	}
	if err := d.await(ctx, g.opts.StartTimeout, dial(g.socket())); err != nil {
		d.kill()
		return err
	}
	g.containerd = d
	return nil
}

func (g *ground) killContainerd() {
	if g.containerd != nil {
		g.containerd.kill()
		g.containerd = nil
	}
}

func (g *ground) close() error {
	g.killContainerd()
	var err error
	if g.outside != nil {
		err = g.outside.close()
		g.outside = nil
	}
	return errors.Join(err, g.place.remove())
}
