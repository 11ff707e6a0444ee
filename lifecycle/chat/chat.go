// Package chat keeps chats, their files and their histories, which outlive sandboxes. The
// sandbox of the same key mounts a chat's directory read-write, so the package trusts
// nothing in it.
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
	MaxFiles   = 100_000  // files of a chat with records; a sandbox may make more, which aren't listed
)

// Chat holds files that the sandbox of the same key mounts. It is a value.
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

// Record holds the data about a file that the file system doesn't keep. It is a value.
type Record struct {
	ID          string // UUID
	Name        string
	CreatedAt   time.Time
	ContentType string // of the file with Identity; empty: not known
	Identity    uint64 // 0: any file of the name
	OldType     string // content type of the file with OldIdentity, which the file with Identity replaces
	OldIdentity uint64
}

// Store keeps chats and records. It must be safe for concurrent use.
type Store interface {
	// EnsureChat returns the tenant's chat of c's ID. If there is none, it adds c, and made
	// is true.
	EnsureChat(ctx context.Context, c Chat) (got Chat, made bool, err error)
	// Chat returns a chat. The error is in errdefs' NotFound class if the tenant has no such
	// chat.
	Chat(ctx context.Context, tenant, id string) (Chat, error)
	// Chats lists a workspace's chats with an ID above after, sorted by ID, at most limit.
	Chats(ctx context.Context, tenant, workspaceID, after string, limit int) ([]Chat, error)
	// EachChat calls f with every chat of every tenant.
	EachChat(ctx context.Context, f func(Chat) error) error
	// DeleteChat removes a chat with its records, durably. A missing chat is no error.
	DeleteChat(ctx context.Context, tenant, id string) error

	// EachRecord calls f with a chat's records whose names are from from to to, both
	// included, in the order of the names' bytes. An empty bound is open. F must not use the
	// Store.
	EachRecord(ctx context.Context, tenant, chatID, from, to string, f func(Record)) error
	// CountRecords returns how many records a chat has.
	CountRecords(ctx context.Context, tenant, chatID string) (int, error)
	// RecordOf returns a record and its chat's ID. The error is in errdefs' NotFound class
	// if the tenant has no such file.
	RecordOf(ctx context.Context, tenant, fileID string) (chatID string, r Record, err error)
	// PutRecords writes records, durably, all or none. A record of the same name is replaced,
	// but keeps its ID and CreatedAt.
	PutRecords(ctx context.Context, tenant, chatID string, records []Record) error
	// DeleteRecords removes records by ID. Missing ones are no error.
	DeleteRecords(ctx context.Context, tenant string, ids []string) error
}

// Sandboxes is the part of *lifecycle.Service that chats use.
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

// Service keeps the chats. It is safe for concurrent use. Close ends its background work.
//
// The errors of its methods are *lifecycle.InvalidError, *NotFoundError,
// *quota.NotFoundError, *FileNotFoundError, *FileError, *quota.FullError and
// *lifecycle.UnavailableError. Errors of a caller's own readers and writers are returned
// unchanged.
type Service struct {
	opts    Options
	root    string // without symbolic links
	log     *slog.Logger
	metrics *metrics
	most    int              // MaxFiles
	buffers sync.Pool        // of *bufio.Writer
	step    func(step) error // lets tests stop a change at a step; otherwise nil
	run     string           // prefix of the names of this Service's staging directories
	locks   keylock.Map[key] // held while the API changes a chat's directory, but not while a body streams
	mu      sync.Mutex       // guards ended
	ended   Report           // the work that New did, for Check's report

	ctx      context.Context // until Close
	stop     context.CancelFunc
	trash    *semaphore.Weighted // bounds the staging directories that wait to be removed
	removal  sync.WaitGroup      // of the trash
	emptying sync.Mutex          // held during the removal of one directory
}

// key names a chat: two tenants may use the same ID.
type key struct{ tenant, chatID string }

func (c Chat) key() key { return key{c.Tenant, c.ID} }

// New checks the options, and finishes deletions that an earlier process began. Below the
// root, which must exist, it makes a staging directory. If that directory is missing although
// the store has chats, New changes nothing and returns an error that says what to do: the
// chats' file system may not be mounted.
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
