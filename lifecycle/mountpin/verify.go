package mountpin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/policy"
)

// Verifier compares: what the path led to before the container was made must be
// what it leads to afterwards. Whoever exchanges the directory and brings the
// first back in time isn't seen, so that one made by NewVerifier also keeps out
// those who could: other sandboxes. The zero value only compares. It is safe for
// many goroutines.
type Verifier struct{ guard *guard }

// NewVerifier makes a Verifier that refuses a directory that lies in one that
// another sandbox can write to. Others answers the mounts of all sandboxes that are
// there or on the way, but for one session.
func NewVerifier(others func(sessionID string) []policy.Mount) Verifier {
	return Verifier{&guard{others: others, held: map[string][]policy.Mount{}}}
}

// guard knows which directories must not be exchanged now.
type guard struct {
	others func(sessionID string) []policy.Mount
	mu     sync.Mutex
	held   map[string][]policy.Mount // by session
}

// enter notes a session's mounts, unless a sandbox that has another's parent in
// its hands would be there while the engine looks for the other.
func (g *guard) enter(sessionID string, mounts []policy.Mount) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	// Whoever isn't among these yet will find this session's mounts held.
	others := g.others(sessionID)
	for _, m := range mounts {
		if slices.ContainsFunc(others, func(o policy.Mount) bool { return o.Mode != "ro" && inside(m.Source, o.Source) }) {
			return policy.Exposed(m)
		}
		for _, held := range g.held {
			if slices.ContainsFunc(held, func(h policy.Mount) bool { return m.Mode != "ro" && inside(h.Source, m.Source) }) {
				return policy.Exposed(m)
			}
		}
	}
	g.held[sessionID] = mounts
	return nil
}

func (g *guard) leave(sessionID string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.held, sessionID)
}

// inside tells whether a clean path lies below dir.
func inside(path, dir string) bool {
	return path != dir && (dir == "/" || strings.HasPrefix(path, dir+"/"))
}

// Mode is ModeVerified.
func (Verifier) Mode() string { return ModeVerified }

// Clean has nothing to do.
func (Verifier) Clean() error { return nil }

// Hold opens each mount's directory, and keeps it open until release, so that its
// number isn't given to another.
func (v Verifier) Hold(_ context.Context, sessionID string, mounts []policy.Mount) ([]string, func() error, error) {
	if v.guard != nil {
		if err := v.guard.enter(sessionID, mounts); err != nil {
			return nil, nil, err
		}
	}
	var fds []int
	closeAll := func() {
		for _, fd := range fds {
			_ = unix.Close(fd) // nothing was written through it
		}
		if v.guard != nil {
			v.guard.leave(sessionID)
		}
	}
	sources := make([]string, len(mounts))
	for i, m := range mounts {
		fd, err := OpenDir(m.Local)
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		fds = append(fds, fd)
		sources[i] = m.Source
	}
	release := func() error {
		defer closeAll()
		var errs []error
		for i, m := range mounts {
			errs = append(errs, same(fds[i], m.Local))
		}
		return errors.Join(errs...)
	}
	return sources, release, nil
}

// same is nil when path leads to the directory that fd is.
func same(fd int, path string) error {
	now, err := OpenDir(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, ErrExchanged)
	}
	defer unix.Close(now)
	var was, is unix.Stat_t
	if err := errors.Join(unix.Fstat(fd, &was), unix.Fstat(now, &is)); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if was.Dev != is.Dev || was.Ino != is.Ino {
		return fmt.Errorf("%s: %w", path, ErrExchanged)
	}
	return nil
}
