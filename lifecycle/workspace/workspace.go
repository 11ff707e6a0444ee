// Package workspace gives every user of a tenant one workspace, which holds the user's
// chats, and keeps all of them together below one quota.
package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

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
	// Live tells whether a chat has a sandbox, which may write to its directory. Mandatory.
	Live     func(tenant, chatID string) bool
	Projects Projects // nil: the file system offers none, and the quota is soft
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
	if e.Chat != "" {
		return fmt.Sprintf("the directory of chat %q has too much in it to be measured, which counts as more than the quota of %d bytes", e.Chat, e.QuotaBytes)
	}
	return fmt.Sprintf("workspace quota exceeded: %d of %d bytes are used, and there is no room for this; free some space first", e.UsedBytes, e.QuotaBytes)
}

// ResourceExhausted puts the error into errdefs' ResourceExhausted class.
func (*QuotaError) ResourceExhausted() {}

// Service has the workspaces. It is safe for many goroutines.
type Service struct {
	opts Options
}

// New checks the options.
func New(opts Options) (*Service, error) {
	return nil, errors.ErrUnsupported
}

// Ensure answers the user's workspace, and makes it if there is none. Errors:
// *lifecycle.InvalidError, *lifecycle.UnavailableError.
func (s *Service) Ensure(ctx context.Context, tenant, userID string) (w Workspace, made bool, err error) {
	return w, false, errors.ErrUnsupported
}

// Get answers a workspace. Errors: *NotFoundError, *lifecycle.UnavailableError.
func (s *Service) Get(ctx context.Context, tenant, id string) (Workspace, error) {
	return Workspace{}, errors.ErrUnsupported
}

// Usage measures a workspace, as far as it may have changed since it was measured last.
// Errors: as Get's, and *QuotaError for one that can't be measured.
func (s *Service) Usage(ctx context.Context, tenant, id string) (Usage, error) {
	return Usage{}, errors.ErrUnsupported
}

// Left is lifecycle.Workspaces'.
func (s *Service) Left(ctx context.Context, tenant, chatID string, changed bool) error {
	return errors.ErrUnsupported
}

// Enforcement is lifecycle.Workspaces'.
func (s *Service) Enforcement(tenant, chatID string) string { return "" }

// Adopt puts a chat's directory under the workspace's project quota, where there are
// project quotas.
func (s *Service) Adopt(w Workspace, dir *os.File) error { return errors.ErrUnsupported }

// Forget drops what is known of a chat that has been deleted, with all that it held.
func (s *Service) Forget(w Workspace, chatID string) {}

// Freed notes that a chat holds n bytes less.
func (s *Service) Freed(w Workspace, chatID string, n int64) {}

// Reserve keeps room for an addition of n bytes to a chat, of which replaced make way for
// it. Without room it is a *QuotaError. The reservation must be released.
func (s *Service) Reserve(ctx context.Context, w Workspace, chatID string, n, replaced int64) (*Reservation, error) {
	return nil, errors.ErrUnsupported
}

// Reservation is room in a workspace. It belongs to one goroutine.
type Reservation struct{}

// Grow has it keep room for n bytes in all.
func (r *Reservation) Grow(ctx context.Context, n int64) error { return errors.ErrUnsupported }

// Commit turns the reservation into use, before what was written takes its place: n bytes,
// in place of replaced. If there is no room for that any more it is a *QuotaError, and
// nothing has changed. Done must be called afterwards, whether or not that went well.
func (r *Reservation) Commit(ctx context.Context, n, replaced int64) error {
	return errors.ErrUnsupported
}

// Done ends a committed change. What it changed in truth may be other than was committed;
// then the chat is measured anew.
func (r *Reservation) Done(asCommitted bool) {}

// Release gives back what wasn't committed; it may be called more than once.
func (r *Reservation) Release() {}
