// Package workspace gives every user of a tenant one workspace, which holds the user's
// chats.
package workspace

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/quota"
)

// Workspace is a user's.
type Workspace = quota.Workspace

// Usage is how much of a workspace's quota is used.
type Usage = quota.Usage

// QuotaError says that a workspace's quota has no room.
type QuotaError = quota.FullError

// Store keeps workspaces. It must be safe for concurrent use.
type Store interface {
	// EnsureWorkspace returns the workspace of w's tenant and user; if there is none, it puts
	// w, with a Project of its own, and made is true.
	EnsureWorkspace(ctx context.Context, w Workspace) (got Workspace, made bool, err error)
	// Workspace is of errdefs' NotFound class if the tenant has no such workspace.
	Workspace(ctx context.Context, tenant, id string) (Workspace, error)
}

// NotFoundError says that the tenant has no such workspace.
type NotFoundError struct{ ID string }

// Error names the workspace.
func (e *NotFoundError) Error() string { return fmt.Sprintf("there is no workspace %q", e.ID) }

// NotFound puts the error into errdefs' NotFound class.
func (*NotFoundError) NotFound() {}

// Service has the workspaces. It is safe for concurrent use.
type Service struct {
	store  Store
	quotas *quota.Service
}

// New makes a Service. Both arguments are mandatory.
func New(store Store, quotas *quota.Service) (*Service, error) {
	if store == nil || quotas == nil {
		return nil, errors.New("workspace: a store and quotas are mandatory")
	}
	return &Service{store: store, quotas: quotas}, nil
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

// Ensure returns the user's workspace, and makes it if there is none. A user's ID is 1 to
// 255 bytes of UTF-8 without control characters, "/" and "\"; it isn't "." or "..". Errors:
// *lifecycle.InvalidError, *lifecycle.UnavailableError.
func (s *Service) Ensure(ctx context.Context, tenant, userID string) (w Workspace, made bool, err error) {
	if err := checkUser(userID); err != nil {
		return w, false, err
	}
	w, made, err = s.store.EnsureWorkspace(ctx, Workspace{ID: uuid.NewString(), Tenant: tenant, UserID: userID, CreatedAt: time.Now().UTC()})
	if err != nil {
		return Workspace{}, false, quota.Unavailable(ctx, err)
	}
	return w, made, nil
}

// Get returns a workspace. Errors: *NotFoundError, *lifecycle.UnavailableError.
func (s *Service) Get(ctx context.Context, tenant, id string) (Workspace, error) {
	w, err := s.store.Workspace(ctx, tenant, id)
	if errdefs.IsNotFound(err) {
		return Workspace{}, &NotFoundError{ID: id}
	}
	if err != nil {
		return Workspace{}, quota.Unavailable(ctx, err)
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
	return s.quotas.Usage(ctx, w)
}
