// Package ceiling has the kernel hold the sandboxes' own workspaces to their quotas. Each
// directory gets a project of its own, with the quota as its limit, for as long as one
// sandbox has it to itself.
//
// A file has one project, so a limit would hold for everybody who writes to the directory.
// That is why a directory gets none that other sandboxes may write to, or to a directory
// above or below it, and why one that comes to be shared loses it for good: its files may
// have gone elsewhere since.
package ceiling

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
)

var _ lifecycle.Ceilings = (*Service)(nil)

// Ceiling is a directory's project. It is a value.
type Ceiling struct {
	Project   uint32 // never another one's, before or after; never 0
	SessionID string // whose it is; empty if it has been given up
	Dir       string // absolute, without symbolic links; of one ceiling only
}

// Store keeps ceilings, durably. It must be safe for many goroutines.
type Store interface {
	// Ceilings answers all that there are.
	Ceilings(ctx context.Context) ([]Ceiling, error)
	// AddCeiling adds one, with a new project.
	AddCeiling(ctx context.Context, sessionID, dir string) (Ceiling, error)
	// PassCeiling makes one another session's; one that isn't there is no error.
	PassCeiling(ctx context.Context, project uint32, sessionID string) error
	// DeleteCeiling removes one, likewise.
	DeleteCeiling(ctx context.Context, project uint32) error
}

// Projects are the project quotas of one file system. They must be safe for many
// goroutines.
type Projects interface {
	// Try finds out whether limits hold in an open directory. It is of errdefs'
	// NotImplemented class if they don't.
	Try(dir *os.File) error
	// Limit sets the limit of a project, in bytes; 0 is none.
	Limit(project uint32, bytes int64) error
	// Free tells whether no file is of a project.
	Free(project uint32) (bool, error)
	// Take puts an open directory, and all below it, into a project. It is of errdefs'
	// FailedPrecondition class if others have a part in it.
	Take(ctx context.Context, dir *os.File, project uint32) error
	// Drop takes out of a project what of it is in an open directory.
	Drop(ctx context.Context, dir *os.File, project uint32) error
}

// Options configure a Service.
type Options struct {
	Store Store // mandatory
	// Find answers the project quotas of a directory's file system, which stay open with this
	// process; of errdefs' NotImplemented class if it has none. The directory may be full.
	// Mandatory.
	Find func(dir string) (Projects, error)
	// Except are directories that nothing in, or above, is held: they have projects of
	// others. They are absolute, without symbolic links.
	Except []string
	Off    bool         // nothing more is held; what is left is still undone
	Logger *slog.Logger // nil discards
}

// Service has the ceilings. It is safe for many goroutines.
type Service struct {
	opts Options
	log  *slog.Logger

	turn    chan struct{}       // held by who works with what follows; never while a tree is walked
	systems map[uint64]Projects // by device
	live    map[string][]string // what sandboxes may write to, by session; changed with mu, too
	rows    map[string]*row     // by directory

	mu   sync.Mutex // never held for long
	held map[string]struct{}
}

// row is a ceiling, as far as this process has come with it.
type row struct {
	Ceiling
	busy  bool      // its tree is being walked
	again time.Time // when the sweep may walk it again, after that failed
}

// New reads what the store knows.
func New(ctx context.Context, opts Options) (*Service, error) {
	if opts.Store == nil || opts.Find == nil {
		return nil, errors.New("ceiling: Store and Find are mandatory")
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	known, err := opts.Store.Ceilings(ctx)
	if err != nil {
		return nil, err
	}
	s := &Service{
		opts: opts, log: opts.Logger, turn: make(chan struct{}, 1),
		systems: map[uint64]Projects{}, live: map[string][]string{}, rows: map[string]*row{}, held: map[string]struct{}{},
	}
	for _, c := range known {
		s.rows[c.Dir] = &row{Ceiling: c}
	}
	return s, nil
}

// Holds is lifecycle.Ceilings'.
func (s *Service) Holds(sessionID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, holds := s.held[sessionID]
	return holds
}

func (s *Service) setHeld(sessionID string, holds bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if holds {
		s.held[sessionID] = struct{}{}
	} else {
		delete(s.held, sessionID)
	}
}

// setLive notes what a session's sandbox may write to; nil: it is gone.
func (s *Service) setLive(sessionID string, dirs []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live[sessionID] = dirs; dirs == nil {
		delete(s.live, sessionID)
	}
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

// Enter is lifecycle.Ceilings'. What can't be held is no error. Errors:
// *lifecycle.UnavailableError.
func (s *Service) Enter(ctx context.Context, o lifecycle.Occupant) (softened []string, err error) {
	if len(o.Dirs) == 0 {
		return nil, nil
	}
	if s.opts.Off && !o.Resumed {
		o.Workspace = "" // what an earlier one was held to there is lifted
	}
	var dir *os.File
	if o.Workspace != "" {
		if o.Root != nil { // without the turn, as a file system may hang
			dir, err = o.Root.Open(".")
		} else {
			dir, err = lifecycle.OpenDir(o.Workspace)
		}
		if err != nil {
			s.soft(ctx, o, err)
			o.Workspace = ""
		}
		defer dir.Close()
	}
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = unavailable(ctx, err)
			if !o.Resumed {
				s.setLive(o.SessionID, nil)
			}
		}
		<-s.turn
	}()
	s.setLive(o.SessionID, o.Dirs)
	alone := o.Workspace != "" && !touches(o.Workspace, s.opts.Except)
	for session, dirs := range s.live {
		alone = alone && (session == o.SessionID || !touches(o.Workspace, dirs))
	}
	for dir, r := range s.rows {
		own := alone && dir == o.Workspace && (!o.Resumed || r.SessionID == o.SessionID)
		if own || r.SessionID == "" || !touches(dir, o.Dirs) {
			continue
		}
		session := r.SessionID
		if err := s.giveUp(ctx, r); err != nil {
			return softened, err
		}
		softened = append(softened, session)
	}
	if !alone {
		return softened, nil
	}
	return softened, s.claim(ctx, o, dir)
}

// claim has the kernel hold a workspace, which is open, if it can. It lets go of the turn
// meanwhile.
func (s *Service) claim(ctx context.Context, o lifecycle.Occupant, dir *os.File) error {
	r := s.rows[o.Workspace]
	if r == nil && o.Resumed || r != nil && (r.busy || r.SessionID == "") {
		return nil
	}
	projects, err := s.projects(dir)
	if err != nil {
		s.soft(ctx, o, err)
		if r != nil && r.SessionID != o.SessionID {
			return s.giveUp(ctx, r)
		}
		return nil
	}
	if r == nil {
		if err := projects.Try(dir); err != nil {
			s.soft(ctx, o, err)
			return nil
		}
		c, err := s.add(ctx, o, projects)
		if errdefs.IsFailedPrecondition(err) {
			s.soft(ctx, o, err)
			return nil
		}
		if err != nil {
			return err
		}
		r = &row{Ceiling: c}
		s.rows[o.Workspace] = r
	} else if r.SessionID != o.SessionID {
		if err := s.opts.Store.PassCeiling(ctx, r.Project, o.SessionID); err != nil {
			return err
		}
		r.SessionID = o.SessionID
	}
	if !o.Resumed { // else it has been taken, and is changing
		if err := s.walk(ctx, r, func() error { return projects.Take(ctx, dir, r.Project) }); err != nil {
			s.soft(ctx, o, err)
			if err := s.giveUp(ctx, r); err != nil {
				return err
			}
			// Nothing can be moved between what has a project and what hasn't.
			if err := s.undo(ctx, r); err != nil {
				s.soft(ctx, o, err)
			}
			return context.Cause(ctx)
		}
	}
	if r.SessionID != o.SessionID { // somebody else has come meanwhile
		return nil
	}
	if err := projects.Limit(r.Project, o.QuotaBytes); err != nil {
		s.soft(ctx, o, err)
		return s.giveUp(ctx, r)
	}
	s.setHeld(o.SessionID, true)
	return nil
}

// soft says why a quota isn't the kernel's.
func (s *Service) soft(ctx context.Context, o lifecycle.Occupant, err error) {
	level := slog.LevelWarn
	if errdefs.IsNotImplemented(err) || errdefs.IsFailedPrecondition(err) {
		level = slog.LevelDebug
	}
	s.log.LogAttrs(ctx, level, "sandbox_quota_soft", slog.String("session_id", o.SessionID), slog.Any("error", err))
}

// maxTaken is how many projects are tried that somebody else uses.
const maxTaken = 16

// add notes a new project, which nobody else uses. It is of errdefs' FailedPrecondition
// class if none was found; later calls look further on.
func (s *Service) add(ctx context.Context, o lifecycle.Occupant, projects Projects) (Ceiling, error) {
	for range maxTaken {
		c, err := s.opts.Store.AddCeiling(ctx, o.SessionID, o.Workspace)
		if err != nil {
			return Ceiling{}, err
		}
		free, err := projects.Free(c.Project)
		if err == nil && free {
			return c, nil
		}
		if err := errors.Join(err, s.opts.Store.DeleteCeiling(ctx, c.Project)); err != nil {
			return Ceiling{}, err
		}
	}
	return Ceiling{}, fmt.Errorf("%d projects are used by others: %w", maxTaken, errdefs.ErrFailedPrecondition)
}

// walkAgain is how long the sweep leaves a tree alone that couldn't be walked to its end:
// it may be too large for that.
const walkAgain = time.Hour

// walk does what may take long, without the turn.
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

// giveUp lifts a ceiling for good. The sweep undoes the rest.
func (s *Service) giveUp(ctx context.Context, r *row) error {
	if err := s.lift(r); err != nil && !errdefs.IsNotImplemented(err) {
		return err
	}
	if err := s.opts.Store.PassCeiling(context.WithoutCancel(ctx), r.Project, ""); err != nil {
		return err
	}
	r.SessionID = ""
	return nil
}

// lift lifts the limit of a ceiling. The error is of errdefs' NotImplemented class while its
// file system has no projects, and so no limits.
func (s *Service) lift(r *row) error {
	s.setHeld(r.SessionID, false)
	projects, err := s.system(r.Dir)
	if err != nil {
		return err
	}
	return projects.Limit(r.Project, 0)
}

// Leave is lifecycle.Ceilings'. What fails is left to the sweep.
func (s *Service) Leave(sessionID string) {
	s.mu.Lock()
	_, writes := s.live[sessionID]
	s.mu.Unlock()
	if !writes {
		return // without waiting for those that do
	}
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.setLive(sessionID, nil)
	for _, r := range s.rows {
		if r.SessionID != sessionID {
			continue
		}
		if err := s.lift(r); err != nil && !errdefs.IsNotImplemented(err) {
			s.log.Warn("sandbox_quota_not_lifted", "session_id", sessionID, "error", err)
		}
	}
}

// Sweep is lifecycle.Ceilings'. A ceiling whose file system has no projects right now is
// left alone, as is one that sandboxes still may write below.
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
			errs = append(errs, fmt.Errorf("let go of project %d: %w", r.Project, err))
		}
	}
	return errors.Join(errs...)
}

// occupied tells whether any sandbox may write to a ceiling's directory.
func (s *Service) occupied(r *row) bool {
	for _, dirs := range s.live {
		if touches(r.Dir, dirs) {
			return true
		}
	}
	return false
}

// undo leaves nothing of a ceiling.
func (s *Service) undo(ctx context.Context, r *row) error {
	if err := s.lift(r); err != nil {
		return err
	}
	dir, err := lifecycle.OpenDir(r.Dir)
	if err == nil {
		defer dir.Close()
		projects, serr := s.system(r.Dir)
		if serr != nil {
			return serr
		}
		err = s.walk(ctx, r, func() error { return projects.Drop(ctx, dir, r.Project) })
	}
	if err != nil && !gone(err) {
		return err
	}
	if err := s.opts.Store.DeleteCeiling(ctx, r.Project); err != nil {
		return err
	}
	delete(s.rows, r.Dir)
	return nil
}

// system answers the projects of a directory's file system, or of what is left of the way
// to it: that is where the directory was.
func (s *Service) system(path string) (Projects, error) {
	dir, err := lifecycle.OpenDir(path)
	for ; err != nil && gone(err) && path != "/"; dir, err = lifecycle.OpenDir(path) {
		path = filepath.Dir(path)
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return s.projects(dir)
}

// projects answers those of an open directory's file system.
func (s *Service) projects(dir *os.File) (Projects, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: dir.Name(), Err: err}
	}
	if projects := s.systems[st.Dev]; projects != nil {
		return projects, nil
	}
	projects, err := s.opts.Find(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return nil, err
	}
	s.systems[st.Dev] = projects
	return projects, nil
}

func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// touches tells whether a directory is one of others, or above or below one.
func touches(dir string, others []string) bool {
	return slices.ContainsFunc(others, func(other string) bool { return runtime.Below(dir, other) || runtime.Below(other, dir) })
}

// unavailable is what a failed call of the store or the kernel means to callers.
func unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &lifecycle.UnavailableError{Err: err}
}
