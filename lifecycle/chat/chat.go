// Package chat keeps chats, their files and their histories: content that outlives
// sandboxes. A chat's directory is the one that the sandbox of the same key mounts
// read-write, so nothing in it is to be trusted.
package chat

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/workspace"
	"github.com/bermhq/berm/policy"
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
	// CountFiles is how many files a chat has.
	CountFiles(ctx context.Context, tenant, chatID string) (int, error)
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
	// Owner is nil for Berm's own user.
	Owner() *policy.Owner
}

// Options configure a Service.
type Options struct {
	Root       string                // mandatory: the directory of all chats' directories
	Store      Store                 // mandatory
	Workspaces *workspace.Service    // mandatory
	Quotas     *quota.Service        // mandatory
	Sandboxes  Sandboxes             // mandatory
	Logger     *slog.Logger          // nil discards
	Registry   prometheus.Registerer // nil: metrics are kept but not exported
}

// Service has the chats. It is safe for many goroutines. Close ends what it does behind its
// callers' backs.
//
// The errors of its methods are *lifecycle.InvalidError, *NotFoundError,
// *workspace.NotFoundError, *FileNotFoundError, *FileError, *quota.FullError and
// *lifecycle.UnavailableError, as they apply, and those of a caller's own readers and
// writers as they are.
type Service struct {
	opts    Options
	root    string // without symbolic links
	log     *slog.Logger
	metrics *metrics
	most    int              // MaxFiles
	buffers sync.Pool        // of *[copyBuffer]byte
	step    func(step) error // of tests: stops a change on its way; nil in service
	mu      sync.Mutex       // guards what follows
	locks   map[key]*lock    // of chats that somebody has or waits for
	staged  map[string]bool  // staging directories in use, by name
	pending map[key][]Change // durable, but couldn't be finished yet
	ended   Report           // what New did
	trash   trash
}

// key names a chat: two tenants may use the same ID.
type key struct{ tenant, chatID string }

func (c Chat) key() key { return key{c.Tenant, c.ID} }

// New checks the options and finishes the changes that an earlier process didn't. It makes
// a directory of its own below the root, which must be there. If that directory is missing
// while there are chats, it is an error that says what to do, and nothing is changed: the
// file system that holds them may not be mounted.
func New(ctx context.Context, opts Options) (*Service, error) { return start(ctx, opts, nil) }

func start(ctx context.Context, opts Options, at func(step) error) (*Service, error) {
	switch {
	case opts.Root == "":
		return nil, errors.New("chat: Root is mandatory")
	case opts.Store == nil:
		return nil, errors.New("chat: Store is mandatory")
	case opts.Workspaces == nil:
		return nil, errors.New("chat: Workspaces is mandatory")
	case opts.Quotas == nil:
		return nil, errors.New("chat: Quotas is mandatory")
	case opts.Sandboxes == nil:
		return nil, errors.New("chat: Sandboxes is mandatory")
	}
	s := &Service{
		opts: opts, step: at, most: MaxFiles, log: opts.Logger, metrics: newMetrics(opts.Registry),
		buffers: sync.Pool{New: func() any { return new([copyBuffer]byte) }},
		locks:   map[key]*lock{}, staged: map[string]bool{}, pending: map[key][]Change{},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if s.root, err = filepath.EvalSymlinks(opts.Root); err != nil {
		return nil, fmt.Errorf("the root of chats: %w", err)
	}
	if err := s.makeStaging(ctx); err != nil {
		return nil, err
	}
	if err := s.rollForward(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// chat reads a chat's record.
func (s *Service) chat(ctx context.Context, tenant, chatID string) (Chat, error) {
	id, err := lifecycle.ParseKey(chatID)
	if err != nil {
		return Chat{}, err
	}
	c, err := s.opts.Store.Chat(ctx, tenant, id)
	if errdefs.IsNotFound(err) {
		return Chat{}, &NotFoundError{ID: id}
	}
	return c, storeError(err)
}
