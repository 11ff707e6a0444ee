package chat

import (
	"context"
	"errors"
	"fmt"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

// NotFoundError says that the tenant has no such chat.
type NotFoundError struct{ ID string }

// Error names the chat.
func (e *NotFoundError) Error() string { return fmt.Sprintf("there is no chat %q", e.ID) }

// NotFound puts the error into errdefs' NotFound class.
func (*NotFoundError) NotFound() {}

// ConflictError says that a chat belongs to another workspace.
type ConflictError struct{ ID, WorkspaceID string }

// Error names both.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("chat %q belongs to workspace %s", e.ID, e.WorkspaceID)
}

// Conflict puts the error into errdefs' Conflict class.
func (*ConflictError) Conflict() {}

// FileNotFoundError says that a chat has no such file. Name is the file's name, or its ID if
// the caller gave that.
type FileNotFoundError = hostdir.NotFoundError

// FileError says why a file of a chat can't be used.
type FileError = hostdir.FileError

// TooLargeError says that a body, or an archive of a chat, is too large.
type TooLargeError = hostdir.TooLargeError

// storeError wraps an error of the store as one that says that the store can't be used now.
func storeError(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &lifecycle.UnavailableError{Err: err}
}
