// Package quota enforces the quotas of sandboxes and workspaces.
//
// A workspace has the chats of one user. A tenant's keys without chats share one quota. A
// sandbox may have its own quota for the directory that it mounts. On a file system with
// project quotas, the kernel enforces a quota ("hard"). Elsewhere the Service measures the
// directories ("soft").
package quota

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/lifecycle/quota/project"
	"github.com/bermhq/berm/runtime/keylock"
)

var _ lifecycle.Quotas = (*Service)(nil)

// Workspace is a user's chats, which share one quota. It is a value.
type Workspace struct {
	ID        string // UUID
	Tenant    string
	UserID    string
	CreatedAt time.Time // UTC
	Project   uint32    // ID of its project quota; unique, never 0
}

// Project is the project quota of a sandbox's own directory. It is a value.
type Project struct {
	ID        uint32 // never reused; never 0
	SessionID string // the sandbox's; empty if it has been given up
	Dir       string // absolute, without symbolic links; of one project only
}

// Usage is how much of a workspace's quota is used.
type Usage struct {
	WorkspaceID string
	UsedBytes   int64
	QuotaBytes  int64  // 0 is none
	Enforcement string // "hard" (by the kernel) or "soft"; empty without a quota
}

// Store keeps workspaces, chats and projects, durably. It must be safe for concurrent use.
type Store interface {
	// EnsureWorkspace returns the workspace of w's tenant and user. If there is none, it
	// adds w, with a new Project, and made is true.
	EnsureWorkspace(ctx context.Context, w Workspace) (got Workspace, made bool, err error)
	// Workspace returns a workspace of the tenant. The error is in errdefs' NotFound class
	// if the tenant has no such workspace.
	Workspace(ctx context.Context, tenant, id string) (Workspace, error)
	// WorkspaceOf returns a chat's workspace. The error is in errdefs' NotFound class if
	// there is no such chat.
	WorkspaceOf(ctx context.Context, tenant, chatID string) (Workspace, error)
	// ChatIDs lists a workspace's chats, or all of the tenant's if workspaceID is empty.
	ChatIDs(ctx context.Context, tenant, workspaceID string) ([]string, error)

	// Projects returns the projects of all sandboxes.
	Projects(ctx context.Context) ([]Project, error)
	// AddProject adds a project with a new ID.
	AddProject(ctx context.Context, sessionID, dir string) (Project, error)
	// PassProject gives a project to another session. A missing project is no error.
	PassProject(ctx context.Context, id uint32, sessionID string) error
	// DeleteProject removes a project. A missing project is no error.
	DeleteProject(ctx context.Context, id uint32) error
}

// Projects are the project quotas of one file system. They must be safe for concurrent
// use. *project.Quotas implements them.
type Projects interface {
	// Try finds out whether limits hold in an open directory. If they don't, the error is
	// in errdefs' NotImplemented class.
	Try(dir *os.File) error
	// Limit sets the limit of a project, in bytes; 0 is none.
	Limit(project uint32, bytes int64) error
	// Used returns how many bytes a project's files take.
	Used(project uint32) (int64, error)
	// Free reports whether a project has no file.
	Free(project uint32) (bool, error)
	// Adopt puts an open directory, and all below it, into a project.
	Adopt(dir *os.File, project uint32) error
	// Take is Adopt for a directory that nobody shares. Otherwise the error is in errdefs'
	// FailedPrecondition class.
	Take(ctx context.Context, dir *os.File, project uint32) error
	// Drop takes an open directory, and all below it, out of a project.
	Drop(ctx context.Context, dir *os.File, project uint32) error
}

// Options configure a Service.
type Options struct {
	Store      Store  // mandatory
	Root       string // of all chats' directories; empty: there are no workspaces
	QuotaBytes int64  // of each workspace; 0 is no limit
	// Off makes all quotas soft. Limits that the kernel has already are still lifted.
	Off bool
	// Required makes New fail if the kernel can't enforce the workspaces' quota.
	Required bool
	// Find returns the project quotas of a directory's file system. The Service never closes
	// them. If there are none, the error is in errdefs' NotImplemented class. Nil asks the
	// kernel.
	Find   func(dir string) (Projects, error)
	Logger *slog.Logger // nil discards
}

// FullError says that a workspace's quota has no room for an addition.
type FullError struct {
	WorkspaceID           string
	UsedBytes, QuotaBytes int64
	Chat                  string // a chat that is too large to be measured, which counts as over the quota; else empty
}

// Error gives the figures.
func (e *FullError) Error() string {
	switch {
	case e.Chat != "" && e.QuotaBytes == 0:
		return fmt.Sprintf("the directory of chat %q has too much in it to be measured", e.Chat)
	case e.Chat != "":
		return fmt.Sprintf("the directory of chat %q has too much in it to be measured, which counts as more than the quota of %d bytes", e.Chat, e.QuotaBytes)
	}
	return fmt.Sprintf("workspace quota exceeded: %d of %d bytes are used, and there is no room for this; free some space first", e.UsedBytes, e.QuotaBytes)
}

// ResourceExhausted puts the error into errdefs' ResourceExhausted class.
func (*FullError) ResourceExhausted() {}

// Service enforces the quotas. It is safe for concurrent use.
//
// The kernel may exempt this process from limits, so the Service itself checks additions to
// chats. Soft quotas are measured after each command of a sandbox. For additions, the Service
// measures the directory of a live sandbox at most every 5 seconds.
type Service struct {
	opts     Options
	log      *slog.Logger
	projects Projects // of the workspaces; nil: their quota is soft
	except   []string // directories with other projects; a sandbox's directory below or above one gets no project

	// What tests replace.
	find    func(dir string) (Projects, error)
	measure func(context.Context, *os.Root) (int64, error) // a chat's directory
	open    func(tenant, key string) (*os.Root, error)
	keys    func(tenant, key string) ([]string, error)
	live    func(tenant, key string) bool
	follow  func(dir, like *os.File) error

	counting keylock.Map[string] // by workspace: held while the kernel is asked; acquired before account.mu

	turn    chan struct{}       // a lock: guards systems and rows; not held while a tree is walked
	systems map[uint64]Projects // by device
	rows    map[string]*row     // by directory

	mu       sync.Mutex          // guards the rest; never held together with account.mu
	subjects map[string]*subject // by session
	sharing  map[chatKey]int     // number of subjects, by key
	changes  int                 // counts calls of Changed
	accounts map[string]*account
	swept    time.Time // when idle accounts were last forgotten
}

// New reads the sandboxes' projects from the store, and asks the kernel for project quotas.
func New(ctx context.Context, opts Options) (*Service, error) {
	if opts.Store == nil {
		return nil, errors.New("quota: Store is mandatory")
	}
	if opts.QuotaBytes < 0 {
		return nil, fmt.Errorf("quota: a quota of %d bytes", opts.QuotaBytes)
	}
	s := &Service{
		opts: opts, log: cmp.Or(opts.Logger, slog.New(slog.DiscardHandler)), find: opts.Find, measure: hostdir.Allocated,
		turn: make(chan struct{}, 1), systems: map[uint64]Projects{}, rows: map[string]*row{},
		subjects: map[string]*subject{}, sharing: map[chatKey]int{}, accounts: map[string]*account{},
	}
	s.open, s.keys, s.live, s.follow = s.openDir, s.listKeys, s.attached, project.Follow
	if s.find == nil {
		s.find = findProjects
	}
	if err := s.findRoot(); err != nil {
		return nil, err
	}
	known, err := opts.Store.Projects(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range known {
		s.rows[p.Dir] = &row{Project: p}
	}
	return s, nil
}

func findProjects(dir string) (Projects, error) {
	q, err := project.Find(dir)
	if err != nil {
		return nil, err // not a nil *project.Quotas
	}
	return q, nil
}

// findRoot finds the project quotas of the chats' file system. It does so without a quota,
// too, so that the limits of an earlier quota can be lifted.
func (s *Service) findRoot() error {
	if s.opts.Root == "" {
		return nil
	}
	root, err := filepath.EvalSymlinks(s.opts.Root)
	if err != nil {
		return fmt.Errorf("sandbox.chats_root: %w", err)
	}
	s.except = []string{root}
	if s.opts.Off {
		return nil
	}
	dir, err := os.Open(root)
	if err != nil {
		return fmt.Errorf("sandbox.chats_root: %w", err)
	}
	defer dir.Close()
	projects, err := s.find(root)
	if err == nil {
		err = projects.Try(dir)
	}
	switch {
	case err == nil:
		s.projects = projects
	case s.opts.QuotaBytes == 0:
	case s.opts.Required:
		return fmt.Errorf("storage.project_quotas is required, but the kernel can't hold workspaces to their quotas here: %w", err)
	case errdefs.IsNotImplemented(err):
		s.log.Info("workspace_quota_soft", "chats_root", s.opts.Root, "reason", err.Error())
	default:
		return fmt.Errorf("storage.project_quotas: %w", err)
	}
	return nil
}

// Shared implements lifecycle.Quotas.
func (s *Service) Shared() bool { return s.opts.Root != "" && s.opts.QuotaBytes > 0 }

// QuotaBytes returns each workspace's quota; 0 is none.
func (s *Service) QuotaBytes() int64 { return s.opts.QuotaBytes }

// enforcement returns how the workspaces' quota is enforced.
func (s *Service) enforcement() string {
	switch {
	case s.opts.QuotaBytes == 0:
		return ""
	case s.projects != nil:
		return "hard"
	}
	return "soft"
}

// openDir opens a key's directory below the root. The error is fs.ErrNotExist if there is
// none.
func (s *Service) openDir(tenant, key string) (*os.Root, error) {
	path, err := lifecycle.ChatDir(s.opts.Root, tenant, key)
	if err != nil {
		return nil, err
	}
	return os.OpenRoot(path)
}

// listKeys lists a tenant's keys that have a directory below the root, whether or not they
// are chats. It returns none if key has no directory.
func (s *Service) listKeys(tenant, key string) (keys []string, err error) {
	path, err := lifecycle.ChatDir(s.opts.Root, tenant, key)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	for _, e := range entries {
		if id, perr := lifecycle.ParseKey(e.Name()); perr == nil && id == e.Name() && e.IsDir() {
			keys = append(keys, id)
		}
	}
	return keys, err
}

// Unavailable returns the error that callers get for a failed call of the store or the
// kernel. It is the context's cause once ctx has ended, else a *lifecycle.UnavailableError.
func Unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &lifecycle.UnavailableError{Err: err}
}

// gone reports whether a path leads to no directory any more.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}
