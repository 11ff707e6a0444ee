package chat

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
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

// FileNotFoundError says that a chat has no such file.
type FileNotFoundError struct{ Name string } // or ID, of a file that was asked for by that

// Error names the file.
func (e *FileNotFoundError) Error() string { return fmt.Sprintf("there is no file %q", e.Name) }

// NotFound puts the error into errdefs' NotFound class.
func (*FileNotFoundError) NotFound() {}

// FileError says why a file of a chat can't be used as it was to be.
type FileError struct {
	Name    string
	Class   error // of errdefs: AlreadyExists, FailedPrecondition (of another kind) or ResourceExhausted (no space, or too many files)
	Message string
}

// Error names the file and gives the reason.
func (e *FileError) Error() string { return fmt.Sprintf("%q %s", e.Name, e.Message) }

// Unwrap gives the class.
func (e *FileError) Unwrap() error { return e.Class }

// TooLargeError says that a body is larger than what it is for may be, or that a chat is
// too large to be archived.
type TooLargeError struct {
	Limit   int64  // bytes; of an archive also directories, in depth, or files
	Message string // of an archive; else empty
}

// Error gives the limit.
func (e *TooLargeError) Error() string {
	if e.Message != "" {
		return e.Message
	}
	return fmt.Sprintf("it is larger than %d bytes, which is the most", e.Limit)
}

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
