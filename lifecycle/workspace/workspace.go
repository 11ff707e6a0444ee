// Package workspace gives every user of a tenant one workspace, which holds the user's
// chats, and keeps all of them together below one quota.
package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

var _ lifecycle.Workspaces = (*Service)(nil)

// Workspace is a user's. It is a value.
type Workspace struct {
	ID        string // UUID
	Tenant    string
	UserID    string
	CreatedAt time.Time // UTC
	Project   uint32    // ID of its project quota; unique, never 0
}

// Usage is how much of a workspace's quota is used.
type Usage struct {
	WorkspaceID string
	UsedBytes   int64
	QuotaBytes  int64  // 0 is none
	Enforcement string // "hard" (the kernel's) or "soft"; empty without a quota
}

// Store keeps workspaces. It must be safe for many goroutines.
type Store interface {
	// EnsureWorkspace answers the workspace of w's tenant and user; if there is none, w is
	// put, with a Project of its own, and made is true.
	EnsureWorkspace(ctx context.Context, w Workspace) (got Workspace, made bool, err error)
	// Workspace is of errdefs' NotFound class if the tenant has no such workspace.
	Workspace(ctx context.Context, tenant, id string) (Workspace, error)
	// WorkspaceOf answers the workspace of a chat, likewise.
	WorkspaceOf(ctx context.Context, tenant, chatID string) (Workspace, error)
	// ChatIDs lists a workspace's chats.
	ChatIDs(ctx context.Context, tenant, workspaceID string) ([]string, error)
}

// Projects has the kernel hold workspaces to their quotas. It must be safe for many
// goroutines.
type Projects interface {
	// Limit sets the limit of a project, in bytes; 0 is none.
	Limit(project uint32, bytes int64) error
	// Used is what a project's files take, in bytes.
	Used(project uint32) (int64, error)
	// Adopt puts an open directory, and all below it, into a project; what is made there
	// from then on belongs to it as well.
	Adopt(dir *os.File, project uint32) error
}

// Options configure a Service.
type Options struct {
	Store      Store // mandatory
	QuotaBytes int64 // of each workspace; 0 is no limit
	// Open opens a chat's directory; of errdefs' NotFound class if there is none. Mandatory.
	Open func(tenant, chatID string) (*os.Root, error)
	// Keys lists the keys beside one that have a directory, that one included, whether or not
	// they are chats. Nil: there are none but chats.
	Keys func(tenant, key string) ([]string, error)
	// Live tells whether a chat has a sandbox, which may write to its directory. Mandatory.
	Live     func(tenant, chatID string) bool
	Projects Projects // nil: the file system offers none, and the quota is soft
	// Follow puts a directory into the project of another, which may have been adopted when
	// there were Projects, and takes nothing else since. Nil: there never were any.
	Follow func(dir, like *os.File) error
}

// NotFoundError says that the tenant has no such workspace.
type NotFoundError struct{ ID string }

// Error names the workspace.
func (e *NotFoundError) Error() string { return fmt.Sprintf("there is no workspace %q", e.ID) }

// NotFound puts the error into errdefs' NotFound class.
func (*NotFoundError) NotFound() {}

// QuotaError says that a workspace's quota doesn't have room for what was to be added.
type QuotaError struct {
	WorkspaceID           string
	UsedBytes, QuotaBytes int64
	Chat                  string // the chat that couldn't be measured, and so counts as too much; else empty
}

// Error gives the figures.
func (e *QuotaError) Error() string {
	switch {
	case e.Chat != "" && e.QuotaBytes == 0:
		return fmt.Sprintf("the directory of chat %q has too much in it to be measured", e.Chat)
	case e.Chat != "":
		return fmt.Sprintf("the directory of chat %q has too much in it to be measured, which counts as more than the quota of %d bytes", e.Chat, e.QuotaBytes)
	}
	return fmt.Sprintf("workspace quota exceeded: %d of %d bytes are used, and there is no room for this; free some space first", e.UsedBytes, e.QuotaBytes)
}

// ResourceExhausted puts the error into errdefs' ResourceExhausted class.
func (*QuotaError) ResourceExhausted() {}

// Service has the workspaces. It is safe for many goroutines.
//
// The kernel counts, and holds quotas, where there are Projects ("hard"): of sandboxes. As it
// may exempt this process, additions are held to what it counts here. Elsewhere ("soft") the
// Service adds up what the chats hold; what a sandbox writes is known once that is measured
// again, which is after each of its commands, and for an addition while it is live at most
// every 5 seconds.
type Service struct {
	opts    Options
	measure func(context.Context, *os.Root) (int64, error)
	owners  owners

	mu       sync.Mutex // never held for long; not together with an account's
	accounts map[string]*account
	swept    time.Time // when idle accounts were looked for last
}

// New checks the options.
func New(opts Options) (*Service, error) {
	if opts.Store == nil || opts.Open == nil || opts.Live == nil {
		return nil, errors.New("workspace: Store, Open and Live are mandatory")
	}
	if opts.QuotaBytes < 0 {
		return nil, fmt.Errorf("workspace: a quota of %d bytes", opts.QuotaBytes)
	}
	return &Service{opts: opts, measure: hostdir.Allocated, accounts: map[string]*account{}}, nil
}

// maxUserID is how long a user's ID may be, in bytes.
const maxUserID = 255

// checkUser refuses what can't be one segment of a URL's path, or can't be told apart in
// a list.
func checkUser(id string) error {
	switch {
	case id == "" || len(id) > maxUserID:
		return &lifecycle.InvalidError{Field: "user_id", Message: fmt.Sprintf("must have 1 to %d bytes", maxUserID)}
	case !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl):
		return &lifecycle.InvalidError{Field: "user_id", Message: "must be UTF-8 without control characters"}
	case id == "." || id == ".." || strings.ContainsAny(id, `/\`):
		return &lifecycle.InvalidError{Field: "user_id", Message: `must be neither "." nor "..", and have no "/" and no "\"`}
	}
	return nil
}

// Ensure answers the user's workspace, and makes it if there is none. A user's ID is 1 to
// 255 bytes of UTF-8 without control characters, "/" and "\"; it isn't "." or "..". Errors:
// *lifecycle.InvalidError, *lifecycle.UnavailableError.
func (s *Service) Ensure(ctx context.Context, tenant, userID string) (w Workspace, made bool, err error) {
	if err := checkUser(userID); err != nil {
		return w, false, err
	}
	w, made, err = s.opts.Store.EnsureWorkspace(ctx, Workspace{ID: uuid.NewString(), Tenant: tenant, UserID: userID, CreatedAt: time.Now().UTC()})
	if err != nil {
		return Workspace{}, false, unavailable(ctx, err)
	}
	return w, made, nil
}

// Get answers a workspace. Errors: *NotFoundError, *lifecycle.UnavailableError.
func (s *Service) Get(ctx context.Context, tenant, id string) (Workspace, error) {
	w, err := s.opts.Store.Workspace(ctx, tenant, id)
	if errdefs.IsNotFound(err) {
		return Workspace{}, &NotFoundError{ID: id}
	}
	if err != nil {
		return Workspace{}, unavailable(ctx, err)
	}
	return w, nil
}

// Usage measures a workspace, as far as it may have changed since it was measured last.
// Errors: as Get's, and *QuotaError for one that can't be measured.
func (s *Service) Usage(ctx context.Context, tenant, id string) (Usage, error) {
	w, err := s.Get(ctx, tenant, id)
	if err != nil {
		return Usage{}, err
	}
	a := s.use(w)
	defer s.unuse(a)
	t, err := s.total(ctx, a, w, "")
	if err != nil {
		return Usage{}, err
	}
	if t.chat != "" {
		return Usage{}, s.over(w, t)
	}
	return Usage{WorkspaceID: w.ID, UsedBytes: t.used, QuotaBytes: s.opts.QuotaBytes, Enforcement: s.enforcement()}, nil
}

// Left is lifecycle.Workspaces'. Errors besides: *lifecycle.UnavailableError.
func (s *Service) Left(ctx context.Context, tenant, chatID string, changed bool) error {
	if s.opts.QuotaBytes == 0 {
		return nil
	}
	w, there, err := s.owner(ctx, tenant, chatID)
	if err != nil {
		return err
	}
	sum := s.total
	if !there {
		w, sum = Workspace{ID: keysOf(tenant), Tenant: tenant}, s.keysTotal
	}
	a := s.use(w)
	defer s.unuse(a)
	a.sandboxed(chatID, changed)
	t, err := sum(ctx, a, w, chatID)
	if err != nil {
		return err
	}
	if quota := s.opts.QuotaBytes; t.chat != "" || t.used > quota {
		return &lifecycle.QuotaError{UsedBytes: t.used, QuotaBytes: quota}
	}
	return nil
}

// Enforcement is lifecycle.Workspaces'. It is empty as well when the store can't tell.
func (s *Service) Enforcement(tenant, chatID string) string {
	if s.opts.QuotaBytes == 0 {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
	defer cancel()
	switch _, there, err := s.owner(ctx, tenant, chatID); {
	case err != nil:
		return ""
	case !there && s.opts.Keys != nil:
		return "soft"
	case !there:
		return ""
	}
	return s.enforcement()
}

// storeTimeout is for a call of the store that nobody else bounds.
const storeTimeout = 5 * time.Second

// QuotaBytes is each workspace's quota; 0 is none.
func (s *Service) QuotaBytes() int64 { return s.opts.QuotaBytes }

func (s *Service) enforcement() string {
	switch {
	case s.opts.QuotaBytes == 0:
		return ""
	case s.opts.Projects != nil:
		return "hard"
	}
	return "soft"
}

// Adopt puts a chat's directory under the workspace's project quota, where there are
// project quotas; also when the quota is none now, as it may be another one later. A chat
// of which that fails is measured, and it is tried again when its workspace is next asked
// about, at most once a minute. Errors: *lifecycle.UnavailableError.
func (s *Service) Adopt(w Workspace, chatID string, dir *os.File) error {
	if s.opts.Projects == nil {
		return nil
	}
	a := s.use(w)
	defer s.unuse(a)
	err := s.adopt(a, w, dir)
	if err == nil {
		a.hold(chatID)
		return nil
	}
	a.keep.Store(true)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unheld[chatID] = time.Now()
	return err
}

func (s *Service) adopt(a *account, w Workspace, dir *os.File) error {
	if err := s.limit(a, w); err != nil {
		return err
	}
	if err := s.opts.Projects.Adopt(dir, w.Project); err != nil {
		return &lifecycle.UnavailableError{Err: fmt.Errorf("workspace %s: %w", w.ID, err)}
	}
	return nil
}

// Stage readies a new directory for what is to be moved from it into a chat's own. Where
// there are project quotas it has no project until Reservation.Staged. Errors:
// *lifecycle.UnavailableError.
func (s *Service) Stage(w Workspace, dir, chat *os.File) error {
	if s.opts.Projects != nil || s.opts.Follow == nil {
		return nil
	}
	if err := s.opts.Follow(dir, chat); err != nil {
		return &lifecycle.UnavailableError{Err: fmt.Errorf("workspace %s: %w", w.ID, err)}
	}
	return nil
}

// limit tells the kernel the quota, once for as long as the account is known: it may have
// another one from an earlier configuration.
func (s *Service) limit(a *account, w Workspace) error {
	if a.limited.Load() {
		return nil
	}
	if err := s.opts.Projects.Limit(w.Project, s.opts.QuotaBytes); err != nil {
		return &lifecycle.UnavailableError{Err: fmt.Errorf("workspace %s: %w", w.ID, err)}
	}
	a.limited.Store(true)
	return nil
}

// over says that a workspace has no room.
func (s *Service) over(w Workspace, t total) error {
	return &QuotaError{WorkspaceID: w.ID, UsedBytes: t.used, QuotaBytes: s.opts.QuotaBytes, Chat: t.chat}
}

// unavailable is what a failed call of the store means to callers.
func unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &lifecycle.UnavailableError{Err: err}
}
