// Package chat keeps chats, their files and their histories: content that outlives
// sandboxes. A chat's directory is the one that the sandbox of the same key mounts
// read-write, so nothing in it is to be trusted.
package chat

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/lifecycle/workspace"
)

// HistoryName is the file of a chat's history. No attachment can have its name.
const HistoryName = "history.md"

// Bounds of chats.
const (
	MaxHistory = 64 << 20 // bytes
	MaxName    = 255      // bytes of a file's name
	MaxFiles   = 100_000  // of one chat that have records; a sandbox may make more, which aren't listed
)

// Chat is content that a sandbox of the same key mounts. It is a value.
type Chat struct {
	Tenant      string
	ID          string // also a sandbox's key
	WorkspaceID string
	CreatedAt   time.Time // UTC
}

// File is an attachment: a regular file right in a chat's directory, whoever wrote it. It
// is a value.
type File struct {
	ID          string // UUID; the same as long as the file's name has one
	Tenant      string
	ChatID      string
	Name        string
	ContentType string // empty: not known
	Size        int64  // bytes
	CreatedAt   time.Time
	ModifiedAt  time.Time
}

// Change is what was going to be put into a chat's directory when it was made durable: all
// that lies in the staging directory of its ID.
type Change struct {
	ID     string // UUID
	Tenant string
	ChatID string
	Files  []File // the records of what lies at the top
}

// Store keeps chats and files. It must be safe for many goroutines.
type Store interface {
	// EnsureChat answers the tenant's chat of c's ID; if there is none, c is put, and made
	// is true.
	EnsureChat(ctx context.Context, c Chat) (got Chat, made bool, err error)
	// Chat is of errdefs' NotFound class if the tenant has no such chat.
	Chat(ctx context.Context, tenant, id string) (Chat, error)
	// Chats lists a workspace's chats by ID, those after a given one, at most limit.
	Chats(ctx context.Context, tenant, workspaceID, after string, limit int) ([]Chat, error)
	// EachChat calls f with every chat of every tenant.
	EachChat(ctx context.Context, f func(Chat) error) error
	// DeleteChat removes a chat with all its files and changes; none is no error.
	DeleteChat(ctx context.Context, tenant, id string) error

	// Files lists a chat's files by name (as bytes), those after a given one, at most limit.
	Files(ctx context.Context, tenant, chatID, after string, limit int) ([]File, error)
	// File is of errdefs' NotFound class if the tenant has no such file.
	File(ctx context.Context, tenant, id string) (File, error)
	// FileNamed likewise.
	FileNamed(ctx context.Context, tenant, chatID, name string) (File, error)
	// PutFiles writes records over those of the same chats and names, all or none. The ID
	// and the creation of one that is there stay.
	PutFiles(ctx context.Context, files ...File) error
	// DeleteFiles removes records by ID; those that aren't there are no error.
	DeleteFiles(ctx context.Context, tenant string, ids ...string) error

	// PutChange keeps a change, durably, until FinishChange.
	PutChange(ctx context.Context, c Change) error
	// FinishChange puts the records of a change's files as PutFiles does, and forgets the
	// change, all or none.
	FinishChange(ctx context.Context, c Change, files []File) error
	// Changes lists those that weren't finished.
	Changes(ctx context.Context) ([]Change, error)
}

// Sandboxes is what is to be known of sandboxes; a *lifecycle.Manager.
type Sandboxes interface {
	WithoutSandbox(ctx context.Context, tenant, key string, f func(context.Context) error) error
}

// Options configure a Service.
type Options struct {
	Root       string                // mandatory: the directory of all chats' directories
	Store      Store                 // mandatory
	Workspaces *workspace.Service    // mandatory
	Sandboxes  Sandboxes             // mandatory
	Logger     *slog.Logger          // nil discards
	Registry   prometheus.Registerer // nil: metrics are kept but not exported
}

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
	Class   error // of errdefs: AlreadyExists, FailedPrecondition (of another kind) or ResourceExhausted (no space)
	Message string
}

// Error names the file and gives the reason.
func (e *FileError) Error() string { return fmt.Sprintf("%q %s", e.Name, e.Message) }

// Unwrap gives the class.
func (e *FileError) Unwrap() error { return e.Class }

// TooLargeError says that a body is larger than what it is for may be.
type TooLargeError struct{ Limit int64 } // bytes

// Error gives the limit.
func (e *TooLargeError) Error() string {
	return fmt.Sprintf("it is larger than %d bytes, which is the most", e.Limit)
}

// Service has the chats. It is safe for many goroutines.
//
// The errors of its methods are *lifecycle.InvalidError, *NotFoundError,
// *workspace.NotFoundError, *FileNotFoundError, *FileError, *workspace.QuotaError and
// *lifecycle.UnavailableError, as they apply, and those of a caller's own readers and
// writers as they are.
type Service struct {
	opts Options
}

// New checks the options and finishes the changes that an earlier process didn't.
func New(ctx context.Context, opts Options) (*Service, error) { return nil, errors.ErrUnsupported }

// Report is what Check did.
type Report struct {
	Chats    int // that were looked at
	Finished int // changes that an earlier process had begun
	Adopted  int // files that had no record, and have one now
	Dropped  int // records whose file was gone
	Removed  int // left-over directories and files of unfinished changes
	Remade   int // chats whose directory was gone, and is empty now
	Failed   int // chats that couldn't be looked at
}

// Check brings records and content together, of every chat. It is meant for start-up, and
// may go on while the chats are used.
func (s *Service) Check(ctx context.Context) (Report, error) {
	return Report{}, errors.ErrUnsupported
}

// Open opens a chat's directory, for workspace.Options.Open.
func Open(root, tenant, chatID string) (*os.Root, error) { return nil, errors.ErrUnsupported }

// Ensure answers a chat, and makes it, its directory and its history if there is none.
// *ConflictError if it belongs to another workspace.
func (s *Service) Ensure(ctx context.Context, tenant, chatID, workspaceID string) (c Chat, made bool, err error) {
	return c, false, errors.ErrUnsupported
}

// Get answers a chat.
func (s *Service) Get(ctx context.Context, tenant, chatID string) (Chat, error) {
	return Chat{}, errors.ErrUnsupported
}

// List lists a workspace's chats by ID, those after a given one, at most limit; more tells
// whether there are others.
func (s *Service) List(ctx context.Context, tenant, workspaceID, after string, limit int) (chats []Chat, more bool, err error) {
	return nil, false, errors.ErrUnsupported
}

// Delete removes a chat with all that it holds. *lifecycle.ActiveError if it has a live
// sandbox.
func (s *Service) Delete(ctx context.Context, tenant, chatID string) error {
	return errors.ErrUnsupported
}

// FileList is one page of a chat's files.
type FileList struct {
	Files   []File
	More    bool // there are others, after the last one
	Unnamed int  // entries that are no attachments: directories, links, names that can't be one
	Beyond  bool // the chat has more than MaxFiles, and not all are listed
}

// Files lists a chat's files by name, those after a given one, at most limit. What a
// sandbox has written meanwhile is in it.
func (s *Service) Files(ctx context.Context, tenant, chatID, after string, limit int) (FileList, error) {
	return FileList{}, errors.ErrUnsupported
}

// File answers a file.
func (s *Service) File(ctx context.Context, tenant, fileID string) (File, error) {
	return File{}, errors.ErrUnsupported
}

// FileNamed answers a file.
func (s *Service) FileNamed(ctx context.Context, tenant, chatID, name string) (File, error) {
	return File{}, errors.ErrUnsupported
}

// Content is an open file. The caller closes it. A sandbox may change it meanwhile.
type Content struct {
	*os.File
	Info File   // of a history without an ID
	ETag string // weak, with its quotes
}

// Content opens a file.
func (s *Service) Content(ctx context.Context, tenant, chatID, name string) (*Content, error) {
	return nil, errors.ErrUnsupported
}

// PutFile says what is to be written.
type PutFile struct {
	Name        string
	ContentType string // empty: not known
	Size        int64  // bytes; -1: not known
	NoClash     bool   // refuse to write over one that is there: errdefs' AlreadyExists
}

// Put writes a file, whole or not at all; made tells that there was none of the name.
func (s *Service) Put(ctx context.Context, tenant, chatID string, f PutFile, r io.Reader) (file File, made bool, err error) {
	return file, false, errors.ErrUnsupported
}

// PutAll writes several files, all or none. Next gives one after the other, until io.EOF.
func (s *Service) PutAll(ctx context.Context, tenant, chatID string, next func() (PutFile, io.Reader, error)) ([]File, error) {
	return nil, errors.ErrUnsupported
}

// DeleteFile removes a file.
func (s *Service) DeleteFile(ctx context.Context, tenant, chatID, name string) error {
	return errors.ErrUnsupported
}

// DeleteFiles removes all files of a chat but its history, and answers how many. What
// isn't a file stays.
func (s *Service) DeleteFiles(ctx context.Context, tenant, chatID string) (int, error) {
	return 0, errors.ErrUnsupported
}

// History opens a chat's history.
func (s *Service) History(ctx context.Context, tenant, chatID string) (*Content, error) {
	return nil, errors.ErrUnsupported
}

// PutHistory replaces a chat's history. *TooLargeError over MaxHistory.
func (s *Service) PutHistory(ctx context.Context, tenant, chatID string, size int64, r io.Reader) (File, error) {
	return File{}, errors.ErrUnsupported
}

// AppendHistory adds to a chat's history, all of r or nothing, likewise.
func (s *Service) AppendHistory(ctx context.Context, tenant, chatID string, size int64, r io.Reader) (File, error) {
	return File{}, errors.ErrUnsupported
}

// ReadTar writes an archive of all that a chat's directory holds: regular files,
// directories and symbolic links.
func (s *Service) ReadTar(ctx context.Context, tenant, chatID string, w io.Writer) error {
	return errors.ErrUnsupported
}

// WriteTar unpacks an archive over a chat's directory, all or nothing.
func (s *Service) WriteTar(ctx context.Context, tenant, chatID string, r io.Reader) error {
	return errors.ErrUnsupported
}
