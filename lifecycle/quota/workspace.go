package quota

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
)

// NotFoundError says that the tenant has no such workspace.
type NotFoundError struct{ ID string }

// Error names the workspace.
func (e *NotFoundError) Error() string { return fmt.Sprintf("there is no workspace %q", e.ID) }

// NotFound puts the error into errdefs' NotFound class.
func (*NotFoundError) NotFound() {}

// maxUserID is how long a user's ID may be, in bytes.
const maxUserID = 255

// checkUser refuses a user's ID that can't be one segment of a URL's path, or has control
// characters.
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

// EnsureWorkspace returns the user's workspace, and makes it if there is none. A user's ID is 1
// to 255 bytes of UTF-8 without control characters, "/" and "\"; it isn't "." or "..". Errors:
// *lifecycle.InvalidError, *lifecycle.UnavailableError.
func (s *Service) EnsureWorkspace(ctx context.Context, tenant, userID string) (w Workspace, made bool, err error) {
	if err := checkUser(userID); err != nil {
		return w, false, err
	}
	w, made, err = s.opts.Store.EnsureWorkspace(ctx, Workspace{ID: uuid.NewString(), Tenant: tenant, UserID: userID, CreatedAt: time.Now().UTC()})
	if err != nil {
		return Workspace{}, false, Unavailable(ctx, err)
	}
	return w, made, nil
}

// Workspace returns a workspace. Errors: *NotFoundError, *lifecycle.UnavailableError.
func (s *Service) Workspace(ctx context.Context, tenant, id string) (Workspace, error) {
	w, err := s.opts.Store.Workspace(ctx, tenant, id)
	if errdefs.IsNotFound(err) {
		return Workspace{}, &NotFoundError{ID: id}
	}
	if err != nil {
		return Workspace{}, Unavailable(ctx, err)
	}
	return w, nil
}

// Usage measures a workspace, as far as it may have changed since it was measured last. Errors:
// as Workspace's, and *FullError for one that can't be measured.
func (s *Service) Usage(ctx context.Context, tenant, id string) (Usage, error) {
	w, err := s.Workspace(ctx, tenant, id)
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
