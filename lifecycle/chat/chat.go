// Package chat keeps chats, their files and their histories: content that outlives
// sandboxes. A chat's directory is the one that the sandbox of the same key mounts
// read-write, so nothing in it is to be trusted.
package chat

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/keylock"
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

// File is an attachment: a regular file right in a chat's directory, whether a caller or a
// sandbox wrote it. It is a value.
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

// Record is what a file can't say of itself. It is a value.
type Record struct {
	ID          string // UUID
	Name        string
	CreatedAt   time.Time
	ContentType string // of the file with Identity; empty: not known
	Identity    uint64 // 0: any file of the name
	OldType     string // of the file with OldIdentity, which was to be replaced
	OldIdentity uint64
}

// Store keeps chats and records. It must be safe for concurrent use.
type Store interface {
	// EnsureChat returns the tenant's chat of c's ID; if there is none, it puts c, and made
	// is true.
	EnsureChat(ctx context.Context, c Chat) (got Chat, made bool, err error)
	// Chat is of errdefs' NotFound class if the tenant has no such chat.
	Chat(ctx context.Context, tenant, id string) (Chat, error)
	// Chats lists a workspace's chats by ID, those after a given one, at most limit.
	Chats(ctx context.Context, tenant, workspaceID, after string, limit int) ([]Chat, error)
	// EachChat calls f with every chat of every tenant.
	EachChat(ctx context.Context, f func(Chat) error) error
	// DeleteChat removes a chat with its records, durably; none is no error.
	DeleteChat(ctx context.Context, tenant, id string) error

	// EachRecord calls f with a chat's records by name (as bytes), from one name to another,
	// both included; an empty one is the end on its side. F must not use the Store.
	EachRecord(ctx context.Context, tenant, chatID, from, to string, f func(Record)) error
	// CountRecords is how many records a chat has.
	CountRecords(ctx context.Context, tenant, chatID string) (int, error)
	// RecordOf returns a record, and whose it is; of errdefs' NotFound class if the tenant
	// has no such file.
	RecordOf(ctx context.Context, tenant, fileID string) (chatID string, r Record, err error)
	// PutRecords writes records, durably, over those of the same names, all or none. The ID
	// and the creation of one that is there stay.
	PutRecords(ctx context.Context, tenant, chatID string, records []Record) error
	// DeleteRecords removes records by ID; those that aren't there are no error.
	DeleteRecords(ctx context.Context, tenant string, ids []string) error
}

// Sandboxes is what is to be known of sandboxes; a *lifecycle.Service.
type Sandboxes interface {
	WithoutSandbox(ctx context.Context, tenant, key string, f func(context.Context) error) error
	// Owner is nil for Berm's own user.
	Owner() *policy.Owner
}

// Options configure a Service.
type Options struct {
	Root      string                // mandatory: the directory of all chats' directories
	Store     Store                 // mandatory
	Quotas    *quota.Service        // mandatory
	Sandboxes Sandboxes             // mandatory
	Logger    *slog.Logger          // nil discards
	Registry  prometheus.Registerer // nil: metrics are kept but not exported
}

// Service has the chats. It is safe for concurrent use. Close ends what it does behind its
// callers' backs.
//
// The errors of its methods are *lifecycle.InvalidError, *NotFoundError,
// *quota.NotFoundError, *FileNotFoundError, *FileError, *quota.FullError and
// *lifecycle.UnavailableError, as they apply, and those of a caller's own readers and
// writers as they are.
type Service struct {
	opts    Options
	root    string // without symbolic links
	log     *slog.Logger
	metrics *metrics
	most    int              // MaxFiles
	buffers sync.Pool        // of *bufio.Writer
	step    func(step) error // of tests: stops a change on its way; nil in service
	run     string           // begins the names of this Service's staging directories
	locks   keylock.Map[key] // held by who changes a directory by the API, and never while a body streams
	mu      sync.Mutex       // guards what follows
	ended   Report           // what New did

	ctx      context.Context // until Close
	stop     context.CancelFunc
	trash    *semaphore.Weighted // bounds the staging directories that wait to be removed
	removal  sync.WaitGroup      // of the trash
	emptying sync.Mutex          // held while one of them is removed
}

// key names a chat: two tenants may use the same ID.
type key struct{ tenant, chatID string }

func (c Chat) key() key { return key{c.Tenant, c.ID} }

// New checks the options and finishes the deletions that an earlier process didn't. It makes
// a directory of its own below the root, which must be there. If that directory is missing
// while there are chats, it is an error that says what to do, and nothing is changed: the
// file system that holds them may not be mounted.
func New(ctx context.Context, opts Options) (*Service, error) { return start(ctx, opts, nil) }

func start(ctx context.Context, opts Options, at func(step) error) (*Service, error) {
	for field, missing := range map[string]bool{
		"Root": opts.Root == "", "Store": opts.Store == nil,
		"Quotas": opts.Quotas == nil, "Sandboxes": opts.Sandboxes == nil,
	} {
		if missing {
			return nil, fmt.Errorf("chat: %s is mandatory", field)
		}
	}
	s := &Service{
		opts: opts, step: at, most: MaxFiles, log: cmp.Or(opts.Logger, slog.New(slog.DiscardHandler)), metrics: newMetrics(opts.Registry),
		buffers: sync.Pool{New: func() any { return bufio.NewWriterSize(nil, copyBuffer) }},
		run:     uuid.NewString(), trash: semaphore.NewWeighted(maxTrash),
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	var err error
	if s.root, err = filepath.EvalSymlinks(opts.Root); err != nil {
		return nil, fmt.Errorf("the root of chats: %w", err)
	}
	if err := s.makeStaging(ctx); err != nil {
		return nil, err
	}
	if err := s.finishDeletions(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// Get returns a chat.
func (s *Service) Get(ctx context.Context, tenant, chatID string) (Chat, error) {
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
