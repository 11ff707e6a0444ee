package engineapi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/docker/docker/api/types/mount"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// places are the directories of containers that are being made or started now, by
// whoever it is.
type places struct {
	mu   sync.Mutex
	held map[string][]policy.Mount
}

func (p *places) enter(who string, mounts []policy.Mount) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = map[string][]policy.Mount{}
	}
	p.held[who] = mounts
}

func (p *places) leave(who string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.held, who)
}

func (p *places) others(who string) (all []policy.Mount) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for other, mounts := range p.held {
		if other != who {
			all = append(all, mounts...)
		}
	}
	return all
}

// claim makes sure that nobody can exchange a bind's source. Whoever has a directory
// around it to write to could, between the judgement and the engine's mounting it and
// at each start of the container again, by the engine itself too. So such two can't be
// there at once: neither among the containers of this instance, running or not, nor in
// one container. The directories are claimed until release. Id is the container's own, if
// it is there already.
func (c *call) claim(who, id string, mounts []policy.Mount) (release func(), err error) {
	if len(mounts) == 0 {
		return func() {}, nil
	}
	// Of two that come at once at least one finds the other here.
	c.places.enter(who, mounts)
	release = func() { c.places.leave(who) }
	others := append(c.places.others(who), c.opts.Mounts()...)
	there, err := c.binds(c.ctx, c.version, id)
	if err == nil {
		err = exposed(mounts, append(others, there...))
		var d *policy.DeniedError
		if errors.As(err, &d) {
			d.Reasons[0].Field = "HostConfig.Mounts"
			err = c.allow(d.Reasons)
		}
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// Binds returns the binds of all containers that this door made, running or not.
func (d *Door) Binds(ctx context.Context) ([]policy.Mount, error) {
	v, err := d.engine.max(ctx)
	if err != nil {
		return nil, err
	}
	return d.binds(ctx, v, "")
}

// binds are the binds of all containers that this door made, running or not, but for one.
func (d *Door) binds(ctx context.Context, v version, except string) ([]policy.Mount, error) {
	var out []policy.Mount
	err := d.eachContainer(ctx, v, func(ct *listed) {
		for _, m := range ct.Mounts {
			if m.Type == mount.TypeBind && ct.ID != except {
				mode := "ro"
				if m.RW {
					mode = "rw"
				}
				out = append(out, policy.Mount{Source: m.Source, Mode: mode})
			}
		}
	}, lifecycle.LabelOwner+"="+d.opts.Owner, lifecycle.LabelDoor+"="+lifecycle.DoorEngine)
	return out, err
}

// KeepClear is for another door that is about to make a container with these mounts,
// which Options.Mounts has to have among its own by then. It is a *policy.DeniedError if
// a container of this door has a directory in one of them that could be written to: the
// engine starts such containers again by itself, wherever the path leads by then. With
// both it is one as well if one of the mounts lies in a directory that a container of
// this door can write to, which matters where mounts aren't held.
func (d *Door) KeepClear(ctx context.Context, mounts []policy.Mount, both bool) error {
	if len(mounts) == 0 {
		return nil
	}
	v, err := d.engine.max(ctx)
	if err != nil {
		return err
	}
	theirs := d.places.others("")
	there, err := d.binds(ctx, v, "")
	if err != nil {
		return err
	}
	for _, m := range mounts {
		for _, o := range append(theirs, there...) {
			if m.Mode != "ro" && inside(o.Source, m.Source) || both && o.Mode != "ro" && inside(m.Source, o.Source) {
				return policy.Exposed(m)
			}
		}
	}
	return nil
}

// exposed is an error if a mount lies in another that can be written to.
func exposed(mounts, others []policy.Mount) error {
	for i, m := range mounts {
		for j, o := range mounts {
			if i != j && o.Mode != "ro" && inside(m.Source, o.Source) {
				return policy.Exposed(m)
			}
		}
		for _, o := range others {
			if o.Mode != "ro" && inside(m.Source, o.Source) || m.Mode != "ro" && inside(o.Source, m.Source) {
				return policy.Exposed(m)
			}
		}
	}
	return nil
}

// inside tells whether a clean path lies below dir.
func inside(path, dir string) bool {
	return path != dir && (dir == "/" || strings.HasPrefix(path, dir+"/"))
}

// standing holds the directories that binds' sources lead to now.
type standing struct {
	mounts []policy.Mount
	fds    []int
}

// stand opens each source's directory, through no symbolic link, and keeps it open, so
// that its number isn't given to another.
func stand(mounts []policy.Mount) (*standing, error) {
	s := &standing{mounts: mounts}
	for _, m := range mounts {
		fd, err := openDir(m.Local)
		if err != nil {
			s.close()
			return nil, exchanged(m)
		}
		s.fds = append(s.fds, fd)
	}
	return s, nil
}

// same is nil if the sources lead where they led.
func (s *standing) same() error {
	for i, m := range s.mounts {
		now, err := openDir(m.Local)
		if err != nil {
			return exchanged(m)
		}
		var was, is unix.Stat_t
		errWas, errIs := unix.Fstat(s.fds[i], &was), unix.Fstat(now, &is)
		_ = unix.Close(now)
		if errWas != nil || errIs != nil || was.Dev != is.Dev || was.Ino != is.Ino {
			return exchanged(m)
		}
	}
	return nil
}

func (s *standing) close() {
	for _, fd := range s.fds {
		_ = unix.Close(fd) // nothing was written through it
	}
}

func openDir(path string) (int, error) {
	return unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
}

func exchanged(m policy.Mount) error {
	return denied("verify.start", "HostConfig.Mounts", fmt.Sprintf("host path %q is not the directory any more that was allowed", shorten(m.HostPath)),
		"the directory as it was when the container was made")
}
