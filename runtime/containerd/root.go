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

// maxRoot keeps the paths below the root within what pipes and sockets can have.
const maxRoot = 90

// root is the directory of the files of containers and networks.
type root string

// path is below the root:
//
//	bin/berm-agent-…     the agent's program
//	containers/ID/       files of one container, locked by who makes or removes it:
//	                     started (when it was begun), hosts, hostname, resolv.conf,
//	                     log/, exec/ (pipes, a directory for each program, locked by
//	                     who runs it), range and userns (its IDs of the host, its user
//	                     namespace, mounted)
//	netns/ID             network namespaces, mounted
//	networks/…           networks, and who is on them
func (r root) path(elem ...string) string {
	return filepath.Join(append([]string{string(r)}, elem...)...)
}

// idPattern is that of the ids that Create gives, and the only ones that may become
// part of a path.
var idPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// place is the directory of a container, or of a program in it, which this process owns
// until release. The process that makes or removes the container, or runs the program,
// owns it, and so does a sweep that finds it without an owner.
type place struct {
	dir   string
	owner *os.File // of the directory, locked
}

// makePlace makes the directory of a container that nobody knows yet.
func (r root) makePlace(ctx context.Context, id string) (*place, error) {
	dir := r.path("containers", id)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, err
	}
	return newPlace(ctx, dir)
}

// newPlace makes a directory, whose parent must be there.
func newPlace(ctx context.Context, dir string) (*place, error) {
	// Until it is locked, a sweep may take it for a leftover, and remove it.
	for {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		if p, err := awaitPlace(ctx, dir); p != nil || err != nil {
			return p, err
		}
	}
}

// ownPlace waits until nobody else owns a container's directory. It returns nil if there
// is none.
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

// lockPlace returns nil if another process, or goroutine, owns the directory.
func lockPlace(dir string) (*place, error) {
	owner, err := network.TryLockDir(dir)
	if owner == nil || err != nil {
		return nil, err
	}
	return &place{dir: dir, owner: owner}, nil
}

// release gives the directory up, if p isn't nil.
func (p *place) release() {
	if p != nil {
		_ = p.owner.Close()
	}
}

// remove removes the directory with all that is in it. The directory itself goes last, so
// that a removal that is cut short is found.
func (p *place) remove() error { return os.RemoveAll(p.dir) }

// file is the path of one of the container's files.
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

// startedAt is when a container's main process was started; zero if it never was.
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

// noContainer is the error for an id that no container has.
func noContainer(id string) error {
	return runtime.WithClass(errdefs.ErrNotFound, fmt.Errorf("there is no container %s", id))
}
