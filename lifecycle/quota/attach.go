package quota

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/runtime"
)

// A sandbox's own directory gets a project, with the quota as its limit, while only one
// sandbox can write to the directory.
//
// A file has one project, so the limit holds for everybody who writes to the directory. So a
// directory gets no project if other sandboxes may write to it, or above or below it. A
// directory that becomes shared loses its project for good, as its files may have moved
// elsewhere since.

// subject is an attached sandbox.
type subject struct {
	of   chatKey
	dirs []string // that it may write to
	root *os.Root // the directory of its own quota; nil without one, or if it couldn't be opened
	held bool     // the kernel enforces its own quota; guarded by Service.mu

	// owner is its chat's workspace. It has no ID if the key is no chat, and is nil while
	// that isn't known. Guarded by Service.mu.
	owner *Workspace
}

type chatKey struct{ tenant, chatID string }

// row is a project, and what this process does with it.
type row struct {
	Project
	busy  bool      // its tree is being walked
	again time.Time // when the sweep may walk it again, after that failed
}

// wait waits for the turn.
func (s *Service) wait(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// setHeld records whether the kernel enforces an attached session's own quota.
func (s *Service) setHeld(sessionID string, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub := s.subjects[sessionID]; sub != nil {
		sub.held = held
	}
}

// subject returns an attached sandbox, or nil.
func (s *Service) subject(sessionID string) *subject {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.subjects[sessionID]
}

// setSubject attaches a sandbox. With a nil sub, it detaches the session's.
func (s *Service) setSubject(sessionID string, sub *subject) {
	s.mu.Lock()
	was := s.subjects[sessionID]
	if was != nil {
		delete(s.subjects, sessionID)
		if s.sharing[was.of]--; s.sharing[was.of] == 0 {
			delete(s.sharing, was.of)
		}
	}
	if sub != nil {
		sub.held = was != nil && was.held
		s.subjects[sessionID] = sub
		s.sharing[sub.of]++
	}
	s.mu.Unlock()
	if was != nil && was.root != nil && (sub == nil || sub.root != was.root) {
		_ = was.root.Close() // it was only read
	}
	if sub == nil {
		sub = was
	}
	if sub != nil { // it may write, or may have written, to its chat's directory
		s.touch(sub.of.tenant, sub.of.chatID)
	}
}

// attached reports whether a key has a sandbox, which may write to its directory.
func (s *Service) attached(tenant, key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sharing[chatKey{tenant, key}] > 0
}

// errExchanged says that a path leads to another directory than the sandbox mounts.
var errExchanged = errors.New("the directory was exchanged")

// openOwn opens the directory of a sandbox's own quota without following links, and returns
// its identity. It returns nil without a quota. It fails if a sandbox that may run mounts
// another directory.
func openOwn(sub lifecycle.Subject) (root *os.Root, inode string, err error) {
	if sub.Dir == "" {
		return nil, "", nil
	}
	f, err := hostdir.OpenDir(sub.Dir)
	if err == nil {
		defer f.Close()
		inode, err = hostdir.Inode(f)
	}
	if sub.Inode != "" && (err != nil || inode != sub.Inode) {
		err = errExchanged
	}
	if err == nil {
		root, err = os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	}
	if err != nil {
		return nil, "", fmt.Errorf("open workspace %s: %w", sub.Dir, err)
	}
	return root, inode, nil
}

// Attach implements lifecycle.Quotas. A quota that the kernel can't enforce is no error.
// Errors are those of opening the sandbox's own directory, and *lifecycle.UnavailableError.
func (s *Service) Attach(ctx context.Context, sub lifecycle.Subject) (inode string, err error) {
	root, inode, err := openOwn(sub)
	if err != nil && !sub.Resumed {
		return inode, err
	}
	// A quota that the kernel doesn't enforce is measured.
	hold := root != nil && slices.Contains(sub.Dirs, sub.Dir) && !sub.Exempt && (!s.opts.Off || sub.Resumed)
	now := &subject{of: chatKey{sub.Tenant, sub.Key}, dirs: sub.Dirs, root: root}
	if len(sub.Dirs) == 0 {
		s.setSubject(sub.SessionID, now)
		return inode, nil
	}
	var dir *os.File
	if hold { // without the turn, as a file system may hang
		if dir, err = root.Open("."); err != nil {
			s.soft(ctx, sub, err)
			hold = false
		}
		defer dir.Close()
	}
	if err := s.wait(ctx); err != nil {
		if root != nil {
			_ = root.Close()
		}
		return inode, err
	}
	defer func() {
		if err != nil {
			err = Unavailable(ctx, err)
			if !sub.Resumed {
				s.setSubject(sub.SessionID, nil)
			}
		}
		<-s.turn
	}()
	s.setSubject(sub.SessionID, now)
	alone := hold && !touches(sub.Dir, s.except)
	for session, other := range s.others() {
		alone = alone && (session == sub.SessionID || !touches(sub.Dir, other))
	}
	for dir, r := range s.rows {
		own := alone && dir == sub.Dir && (!sub.Resumed || r.SessionID == sub.SessionID)
		if own || r.SessionID == "" || !touches(dir, sub.Dirs) {
			continue
		}
		if err := s.giveUp(ctx, r); err != nil {
			return inode, err
		}
	}
	if !alone {
		return inode, nil
	}
	return inode, s.claim(ctx, sub, dir)
}

// others returns the directories that attached sandboxes may write to, by session.
func (s *Service) others() map[string][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	dirs := make(map[string][]string, len(s.subjects))
	for session, sub := range s.subjects {
		dirs[session] = sub.dirs
	}
	return dirs
}

// claim makes the kernel enforce the quota of a sandbox's open directory, if it can. The
// caller holds the turn; claim releases it while it walks the tree.
func (s *Service) claim(ctx context.Context, sub lifecycle.Subject, dir *os.File) error {
	r := s.rows[sub.Dir]
	if r == nil && sub.Resumed || r != nil && (r.busy || r.SessionID == "") {
		return nil
	}
	projects, err := s.system(dir)
	if err != nil {
		s.soft(ctx, sub, err)
		if r != nil && r.SessionID != sub.SessionID {
			return s.giveUp(ctx, r)
		}
		return nil
	}
	if r == nil {
		if err := projects.Try(dir); err != nil {
			s.soft(ctx, sub, err)
			return nil
		}
		c, err := s.add(ctx, sub, projects)
		if errdefs.IsFailedPrecondition(err) {
			s.soft(ctx, sub, err)
			return nil
		}
		if err != nil {
			return err
		}
		r = &row{Project: c}
		s.rows[sub.Dir] = r
	} else if r.SessionID != sub.SessionID {
		if err := s.opts.Store.PassProject(ctx, r.ID, sub.SessionID); err != nil {
			return err
		}
		r.SessionID = sub.SessionID
	}
	if !sub.Resumed { // else an earlier process took the tree, which a sandbox may be changing
		if err := s.walk(ctx, r, func() error { return projects.Take(ctx, dir, r.ID) }); err != nil {
			s.soft(ctx, sub, err)
			if err := s.giveUp(ctx, r); err != nil {
				return err
			}
			// Undo it now: files can't be moved between directories with and without a project.
			if err := s.undo(ctx, r); err != nil {
				s.soft(ctx, sub, err)
			}
			return context.Cause(ctx)
		}
	}
	if r.SessionID != sub.SessionID { // another sandbox was attached meanwhile
		return nil
	}
	if err := projects.Limit(r.ID, sub.QuotaBytes); err != nil {
		s.soft(ctx, sub, err)
		return s.giveUp(ctx, r)
	}
	s.setHeld(sub.SessionID, true)
	return nil
}

// soft logs why the kernel doesn't enforce a quota.
func (s *Service) soft(ctx context.Context, sub lifecycle.Subject, err error) {
	level := slog.LevelWarn
	if errdefs.IsNotImplemented(err) || errdefs.IsFailedPrecondition(err) {
		level = slog.LevelDebug
	}
	s.log.LogAttrs(ctx, level, "sandbox_quota_soft", slog.String("session_id", sub.SessionID), slog.Any("error", err))
}

// maxTaken is how many project IDs are tried if others use them.
const maxTaken = 16

// add records a new project whose ID nobody else uses. If it finds none, the error is in
// errdefs' FailedPrecondition class; later calls try other IDs.
func (s *Service) add(ctx context.Context, sub lifecycle.Subject, projects Projects) (Project, error) {
	for range maxTaken {
		c, err := s.opts.Store.AddProject(ctx, sub.SessionID, sub.Dir)
		if err != nil {
			return Project{}, err
		}
		free, err := projects.Free(c.ID)
		if err == nil && free {
			return c, nil
		}
		if err := errors.Join(err, s.opts.Store.DeleteProject(ctx, c.ID)); err != nil {
			return Project{}, err
		}
	}
	return Project{}, fmt.Errorf("%d projects are used by others: %w", maxTaken, errdefs.ErrFailedPrecondition)
}

// walkAgain is how long the sweep waits before it walks a tree again after a failure. The tree
// may be too large.
const walkAgain = time.Hour

// walk calls f, which walks a project's tree, without the turn. The caller holds the turn.
func (s *Service) walk(ctx context.Context, r *row, f func() error) error {
	r.busy, r.again = true, time.Time{}
	<-s.turn
	err := f()
	s.turn <- struct{}{}
	r.busy = false
	if err != nil && ctx.Err() == nil {
		r.again = time.Now().Add(walkAgain)
	}
	return err
}

// giveUp lifts a project's limit for good. The sweep removes the project.
func (s *Service) giveUp(ctx context.Context, r *row) error {
	if err := s.lift(r); err != nil && !errdefs.IsNotImplemented(err) {
		return err
	}
	if err := s.opts.Store.PassProject(context.WithoutCancel(ctx), r.ID, ""); err != nil {
		return err
	}
	r.SessionID = ""
	return nil
}

// lift lifts the limit of a project. The error is of errdefs' NotImplemented class while its
// file system has no projects, and so no limits.
func (s *Service) lift(r *row) error {
	s.setHeld(r.SessionID, false)
	projects, err := s.systemOf(r.Dir)
	if err != nil {
		return err
	}
	return projects.Limit(r.ID, 0)
}

// Detach implements lifecycle.Quotas. The sweep repeats what fails.
func (s *Service) Detach(sessionID string) {
	sub := s.subject(sessionID)
	switch {
	case sub == nil:
		return
	case len(sub.dirs) == 0: // it has no project: don't wait for the turn
		s.setSubject(sessionID, nil)
		return
	}
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.setSubject(sessionID, nil)
	for _, r := range s.rows {
		if r.SessionID != sessionID {
			continue
		}
		if err := s.lift(r); err != nil && !errdefs.IsNotImplemented(err) {
			s.log.Warn("sandbox_quota_not_lifted", "session_id", sessionID, "error", err)
		}
	}
}

// Sweep implements lifecycle.Quotas. It leaves a project alone if its file system has no
// project quotas now, or if sandboxes may still write to its directory.
func (s *Service) Sweep(ctx context.Context) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	defer func() { <-s.turn }()
	var left []*row
	for _, r := range s.rows {
		left = append(left, r)
	}
	var errs []error
	for _, r := range left {
		if ctx.Err() != nil {
			break
		}
		if r.busy || s.rows[r.Dir] != r || s.occupied(r) {
			continue
		}
		var err error
		if time.Now().Before(r.again) {
			err = s.lift(r)
		} else {
			err = s.undo(ctx, r)
		}
		if err != nil && !errdefs.IsNotImplemented(err) {
			errs = append(errs, fmt.Errorf("release project %d: %w", r.ID, err))
		}
	}
	return errors.Join(errs...)
}

// occupied reports whether any sandbox may write to a project's directory.
func (s *Service) occupied(r *row) bool {
	for _, dirs := range s.others() {
		if touches(r.Dir, dirs) {
			return true
		}
	}
	return false
}

// undo removes a project: its limit, its files' assignment, and its record.
func (s *Service) undo(ctx context.Context, r *row) error {
	if err := s.lift(r); err != nil {
		return err
	}
	dir, err := hostdir.OpenDir(r.Dir)
	if err == nil {
		defer dir.Close()
		projects, serr := s.systemOf(r.Dir)
		if serr != nil {
			return serr
		}
		err = s.walk(ctx, r, func() error { return projects.Drop(ctx, dir, r.ID) })
	}
	if err != nil && !gone(err) {
		return err
	}
	if err := s.opts.Store.DeleteProject(ctx, r.ID); err != nil {
		return err
	}
	delete(s.rows, r.Dir)
	return nil
}

// systemOf returns the project quotas of a directory's file system. If the directory is gone,
// it takes the nearest parent that exists.
func (s *Service) systemOf(path string) (Projects, error) {
	dir, err := hostdir.OpenDir(path)
	for ; err != nil && gone(err) && path != "/"; dir, err = hostdir.OpenDir(path) {
		path = filepath.Dir(path)
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return s.system(dir)
}

// system returns the project quotas of an open directory's file system.
func (s *Service) system(dir *os.File) (Projects, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: dir.Name(), Err: err}
	}
	if projects := s.systems[st.Dev]; projects != nil {
		return projects, nil
	}
	projects, err := s.find(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return nil, err
	}
	s.systems[st.Dev] = projects
	return projects, nil
}

// touches reports whether a directory equals one of others, or is above or below one.
func touches(dir string, others []string) bool {
	return slices.ContainsFunc(others, func(other string) bool { return runtime.Below(dir, other) || runtime.Below(other, dir) })
}
