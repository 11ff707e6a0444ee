package chat_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	tenant = "default"
	chatID = "c1"
)

// boxes says which keys have a sandbox.
type boxes struct {
	mu    sync.Mutex
	live  map[string]bool
	owner *policy.Owner
}

func (b *boxes) set(key string, live bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.live[key] = live
}

func (b *boxes) has(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.live[key]
}

func (b *boxes) Owner() *policy.Owner { return b.owner }

func (b *boxes) WithoutSandbox(ctx context.Context, _, key string, f func(context.Context) error) error {
	if b.has(key) {
		return &lifecycle.ActiveError{Key: key, SessionID: "s"}
	}
	return f(ctx)
}

// world is a service over a real directory and a real store.
type world struct {
	t testing.TB
	*chat.Service
	quotas *quota.Service
	db     *store.Store
	boxes  *boxes
	root   string // the chats'
	space  quota.Workspace
}

// newWorld has one chat, chatID, in the workspace of the user "u".
func newWorld(t testing.TB, bytes int64) *world {
	t.Helper()
	w := openWorld(t, t.TempDir(), bytes, nil)
	w.ensure(tenant, chatID)
	return w
}

func openWorld(t testing.TB, dir string, bytes int64, at func(step string) error) *world {
	t.Helper()
	ctx := context.Background()
	w := &world{t: t, root: filepath.Join(dir, "chats"), boxes: &boxes{live: map[string]bool{}}}
	must(t, os.MkdirAll(w.root, 0o755))
	var err error
	w.db, err = store.Open(ctx, store.Options{Path: filepath.Join(dir, "berm.db")})
	must(t, err)
	t.Cleanup(func() { _ = w.db.Close() })
	w.hold(quota.Options{QuotaBytes: bytes, Off: true})
	opts := w.options()
	if at == nil {
		w.Service, err = chat.New(ctx, opts)
	} else {
		w.Service, err = chat.CrashAt(ctx, opts, at)
	}
	must(t, err)
	t.Cleanup(func() { _ = w.Close(ctx) })
	w.space, _, err = w.quotas.EnsureWorkspace(ctx, tenant, "u")
	must(t, err)
	return w
}

// hold makes the quotas.
func (w *world) hold(opts quota.Options) {
	w.t.Helper()
	opts.Store, opts.Root = w.db, w.root
	var err error
	w.quotas, err = quota.New(context.Background(), opts)
	must(w.t, err)
}

func (w *world) options() chat.Options {
	return chat.Options{Root: w.root, Store: w.db, Quotas: w.quotas, Sandboxes: w.boxes}
}

func (w *world) ensure(tenant, id string) chat.Chat {
	w.t.Helper()
	space, _, err := w.quotas.EnsureWorkspace(context.Background(), tenant, "u")
	must(w.t, err)
	c, _, err := w.Ensure(context.Background(), tenant, id, space.ID)
	must(w.t, err)
	return c
}

func (w *world) path(elem ...string) string {
	return filepath.Join(append([]string{w.root, chatID}, elem...)...)
}

func (w *world) put(name, content string) chat.File {
	w.t.Helper()
	f, _, err := w.Put(context.Background(), tenant, chatID, chat.PutFile{Name: name, Size: int64(len(content))}, strings.NewReader(content))
	must(w.t, err)
	return f
}

func (w *world) read(name string) string {
	w.t.Helper()
	content, err := w.Content(context.Background(), tenant, chatID, name)
	return w.drain(content, err)
}

func (w *world) wantFile(name, content string) {
	w.t.Helper()
	if got := w.read(name); got != content {
		w.t.Errorf("%s is %q, want %q", name, got, content)
	}
}

func (w *world) wantFiles(names ...string) {
	w.t.Helper()
	if got := w.names(10); !slices.Equal(got, names) {
		w.t.Errorf("files %q, want %q", got, names)
	}
}

func (w *world) history() string {
	w.t.Helper()
	content, err := w.History(context.Background(), tenant, chatID)
	return w.drain(content, err)
}

func (w *world) drain(content *chat.Content, err error) string {
	w.t.Helper()
	must(w.t, err)
	defer content.Close()
	b, err := io.ReadAll(content)
	must(w.t, err)
	return string(b)
}

// names lists all files, by pages.
func (w *world) names(limit int) []string {
	w.t.Helper()
	var names []string
	for after, more := "", true; more; {
		l, err := w.Files(context.Background(), tenant, chatID, after, limit)
		must(w.t, err)
		for _, f := range l.Files {
			names = append(names, f.Name)
		}
		if more = l.More; more {
			after = names[len(names)-1]
		}
	}
	return names
}

func (w *world) write(name, content string) {
	w.t.Helper()
	must(w.t, os.WriteFile(w.path(name), []byte(content), 0o644))
}

// sound says what is wrong with the records, the content, or what is between them.
func (w *world) sound() error {
	ctx := context.Background()
	w.Settle()
	staging, err := os.ReadDir(filepath.Join(w.root, ".staging"))
	if err != nil || len(staging) > 0 {
		return fmt.Errorf("left in the staging directory: %v, %w", staging, err)
	}
	var total int64
	err = w.db.EachChat(ctx, func(c chat.Chat) error {
		dir := filepath.Join(w.root, c.ID)
		if c.Tenant != lifecycle.DefaultTenant {
			dir = filepath.Join(w.root, ".tenants", c.Tenant, c.ID)
		}
		if w.Locked(c) {
			return fmt.Errorf("chat %s is locked", c.ID)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if c.Tenant == tenant {
				total += size(filepath.Join(dir, e.Name()))
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	usage, err := w.quotas.Usage(ctx, tenant, w.space.ID)
	if err == nil && usage.UsedBytes != total {
		err = fmt.Errorf("usage is %d, and there are %d bytes", usage.UsedBytes, total)
	}
	return err
}

// size is what the regular files below a path make together.
func size(path string) (total int64) {
	_ = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			fi, _ := d.Info()
			total += fi.Size()
		}
		return err
	})
	return total
}

func (w *world) checkSound() {
	w.t.Helper()
	if err := w.sound(); err != nil {
		w.t.Error(err)
	}
}

// errorIs looks for an error's type.
func errorIs[E error](err error) bool {
	var want E
	return errors.As(err, &want)
}

func wantError[E error](t testing.TB, what string, err error) {
	t.Helper()
	if !errorIs[E](err) {
		t.Errorf("%s: %v", what, err)
	}
}

func second[T any](_ T, err error) error { return err }

func third[T, U any](_ T, _ U, err error) error { return err }

// reading gives a reader's bytes, and what f answers in place of the end.
type reading struct {
	io.Reader
	f func() error
}

func (r reading) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err == io.EOF && r.f != nil {
		if err := r.f(); err != nil {
			return n, err
		}
	}
	return n, err
}

var must = check.Must // ends a test if a step of its own fails
