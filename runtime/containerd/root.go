package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/network"
)

// maxRoot keeps the paths of pipes and sockets below the root short enough.
const maxRoot = 90

// root is the directory of the files of containers and networks.
type root string

// path returns a path below the root. The root has:
//
//	bin/berm-agent-…     the agent's program
//	containers/ID/       files of one container; locked while it is made or removed:
//	                     started (the time of its start), hosts, hostname, resolv.conf,
//	                     log/, exec/ (pipes, in a directory for each program, locked
//	                     while it runs), range (its IDs on the host), userns (its user
//	                     namespace, mounted)
//	netns/ID             network namespaces, mounted
//	networks/…           networks, and their containers
func (r root) path(elem ...string) string {
	return filepath.Join(append([]string{string(r)}, elem...)...)
}

// idPattern matches the ids that Create makes. No other id may become part of a path.
var idPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// place is the directory of a container, or of a program in it, that this process has locked
// until release. The process that makes or removes the container, or runs the program, holds
// the lock. A sweep acquires the lock if no process holds it.
type place struct {
	dir   string
	owner *os.File // of the directory, locked
}

// makePlace makes the directory of a new container.
func (r root) makePlace(ctx context.Context, id string) (*place, error) {
	dir := r.path("containers", id)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, err
	}
	return newPlace(ctx, dir)
}

// newPlace makes and locks a directory, whose parent must exist.
func newPlace(ctx context.Context, dir string) (*place, error) {
	// A sweep may remove the directory before it is locked. Then make it again.
	for {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		if p, err := awaitPlace(ctx, dir); p != nil || err != nil {
			return p, err
		}
	}
}

// ownPlace waits until no other process has locked a container's directory, and locks it. It
// returns nil if the container has no directory.
func (r root) ownPlace(ctx context.Context, id string) (*place, error) {
	return awaitPlace(ctx, r.path("containers", id))
}

func awaitPlace(ctx context.Context, dir string) (p *place, err error) {
	err = await(ctx, func() (bool, error) {
		p, err = lockPlace(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return true, nil // no place is no error
		}
		return p != nil, err
	})
	return p, err
}

// lockPlace locks a directory. It returns nil if another process or goroutine has locked it.
func lockPlace(dir string) (*place, error) {
	owner, err := network.TryLockDir(dir)
	if owner == nil || err != nil {
		return nil, err
	}
	return &place{dir: dir, owner: owner}, nil
}

// release unlocks the directory, if p isn't nil.
func (p *place) release() {
	if p != nil {
		_ = p.owner.Close()
	}
}

// remove removes the directory with its content. The directory itself goes last, so that a
// sweep finds one that was removed in part.
func (p *place) remove() error { return os.RemoveAll(p.dir) }

// file returns the path of one of the container's files.
func (p *place) file(name string) string { return filepath.Join(p.dir, name) }

// places lists the containers that have a directory.
func (r root) places() ([]string, error) {
	entries, err := os.ReadDir(r.path("containers"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		if idPattern.MatchString(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// startedAt returns when a container's main process was started; zero if it never was.
func (r root) startedAt(id string) time.Time {
	if !idPattern.MatchString(id) {
		return time.Time{}
	}
	b, err := os.ReadFile(r.path("containers", id, "started"))
	if err != nil {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, string(b))
	if err != nil {
		return time.Time{}
	}
	return t
}

// noContainer returns the error for an id that no container has.
func noContainer(id string) error {
	return runtime.WithClass(errdefs.ErrNotFound, fmt.Errorf("there is no container %s", id))
}
