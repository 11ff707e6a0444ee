package chat

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

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

// Errors of files, which hostdir returns as well.
type (
	FileNotFoundError = hostdir.NotFoundError // Name is an ID, if the file was asked for by that
	FileError         = hostdir.FileError
	TooLargeError     = hostdir.TooLargeError
)

// storeError says of a failure of the store that it can't be used now.
func storeError(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &lifecycle.UnavailableError{Err: err}
}

// isClash tells whether an error is about something of another kind in the way of a file.
func isClash(err error) bool {
	var file *FileError
	return errors.As(err, &file) && errdefs.IsFailedPrecondition(file)
}
