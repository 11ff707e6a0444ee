package chat_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/policy"
)

func TestNewChecksOptions(t *testing.T) {
	w := newWorld(t, 0)
	whole := w.options()
	for name, spoil := range map[string]func(*chat.Options){
		"root":      func(o *chat.Options) { o.Root = "" },
		"no root":   func(o *chat.Options) { o.Root += "/none" },
		"store":     func(o *chat.Options) { o.Store = nil },
		"quotas":    func(o *chat.Options) { o.Quotas = nil },
		"sandboxes": func(o *chat.Options) { o.Sandboxes = nil },
	} {
		opts := whole
		spoil(&opts)
		if _, err := chat.New(context.Background(), opts); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// An empty directory in the place of the root that the chats are in, as where a file system
// isn't mounted: nothing is repaired or deleted, and nothing made.
func TestNewWithoutContent(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	dir := t.TempDir()
	prepare(t, dir)
	root, away := filepath.Join(dir, "chats"), filepath.Join(dir, "away")
	must(t, os.Rename(root, away), os.Mkdir(root, 0o755))
	w := &world{t: t, root: root, boxes: &boxes{live: map[string]bool{}}}
	var err error
	w.db, err = store.Open(ctx, store.Options{Path: filepath.Join(dir, "berm.db")})
	must(t, err)
	defer w.db.Close()
	w.hold(quota.Options{Off: true})
	_, err = chat.New(ctx, w.options())
	if err == nil || !strings.Contains(err.Error(), "mount") || !strings.Contains(err.Error(), "make the directory .staging") {
		t.Errorf("error %v", err)
	}
	if made, err := os.ReadDir(root); err != nil || len(made) > 0 {
		t.Errorf("made %v, %v", made, err)
	}
	must(t, w.db.Close(), os.Remove(root), os.Rename(away, root))
	w = openWorld(t, dir, 1<<20, nil)
	if r, err := w.Check(ctx); err != nil || r.Dropped > 0 {
		t.Errorf("once it is mounted: %+v, %v", r, err)
	}
	if diff := cmp.Diff(before, w.state()); diff != "" {
		t.Error(diff)
	}
	// The content is lost for good.
	_ = w.db.Close()
	must(t, os.RemoveAll(root), os.MkdirAll(filepath.Join(root, ".staging"), 0o700))
	w = openWorld(t, dir, 1<<20, nil)
	if r, err := w.Check(ctx); err != nil || r.Dropped == 0 || r.Failed > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	w.checkSound()
}

func TestEnsure(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	other, _, err := w.quotas.EnsureWorkspace(ctx, tenant, "other")
	must(t, err)
	c, made, err := w.Ensure(ctx, tenant, " 6BA7B810-9DAD-11D1-80B4-00C04FD430C8 ", w.space.ID)
	if err != nil || !made || c.ID != "6ba7b810-9dad-11d1-80b4-00c04fd430c8" || c.WorkspaceID != w.space.ID {
		t.Fatalf("made %+v, %v, %v", c, made, err)
	}
	if fi, err := os.Stat(filepath.Join(w.root, c.ID, chat.HistoryName)); err != nil || fi.Size() != 0 || fi.Mode().Perm() != 0o644 {
		t.Errorf("the history is %v, %v", fi, err)
	}
	again, made, err := w.Ensure(ctx, tenant, c.ID, w.space.ID)
	if err != nil || made || !again.CreatedAt.Equal(c.CreatedAt) {
		t.Errorf("again %+v, %v, %v", again, made, err)
	}
	wantError[*chat.ConflictError](t, "another workspace", third(w.Ensure(ctx, tenant, c.ID, other.ID)))
	wantError[*quota.NotFoundError](t, "no workspace", third(w.Ensure(ctx, tenant, "new", "nothing")))
	if _, err := os.Stat(filepath.Join(w.root, "new")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a chat that was refused has a directory: %v", err)
	}
	wantError[*lifecycle.InvalidError](t, "a bad ID", third(w.Ensure(ctx, tenant, ".staging", w.space.ID)))
	wantError[*chat.NotFoundError](t, "another tenant's chat", second(w.Get(ctx, "other", c.ID)))
	for _, id := range []string{"b", "a"} {
		w.ensure(tenant, id)
	}
	first, more, err := w.List(ctx, tenant, w.space.ID, "", 2)
	if err != nil || !more {
		t.Fatalf("list: %v, %v", more, err)
	}
	rest, more, err := w.List(ctx, tenant, w.space.ID, first[1].ID, 2)
	if err != nil || more {
		t.Fatalf("list: %v, %v", more, err)
	}
	var ids []string
	for _, c := range append(first, rest...) {
		ids = append(ids, c.ID)
	}
	if want := []string{c.ID, "a", "b", chatID}; !slices.Equal(ids, want) {
		t.Errorf("listed %q, want %q", ids, want)
	}
	wantError[*quota.NotFoundError](t, "list of no workspace", third(w.List(ctx, tenant, "nothing", "", 2)))
}

// What a sandbox wrote before its key became a chat is the chat's.
func TestEnsureAdopts(t *testing.T) {
	t.Parallel()
	w := openWorld(t, t.TempDir(), 0, nil)
	must(t, os.Mkdir(w.path(), 0o755))
	if err := os.Chown(w.path(), 1234, 1235); err != nil {
		t.Skip("files can't be given away here:", err)
	}
	w.write("old", "old")
	w.ensure(tenant, chatID)
	w.put("new", "new")
	w.wantFiles("new", "old")
	for _, name := range []string{"new", chat.HistoryName} {
		fi, err := os.Stat(w.path(name))
		must(t, err)
		if st := fi.Sys().(*syscall.Stat_t); st.Uid != 1234 || st.Gid != 1235 || fi.Mode() != 0o644 {
			t.Errorf("%s belongs to %d:%d, mode %v", name, st.Uid, st.Gid, fi.Mode())
		}
	}
	w.checkSound()
}

func archiveOf(t *testing.T, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		must(t, w.WriteHeader(&h))
	}
	must(t, w.Close())
	return &b
}

// only leaves this thread some capabilities, until restore is called.
func only(t *testing.T, capabilities ...int) (restore func()) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all, less [2]unix.CapUserData
	set := func(data *[2]unix.CapUserData) {
		if err := unix.Capset(&header, &data[0]); err != nil {
			t.Error(err)
		}
	}
	goruntime.LockOSThread()
	must(t, unix.Capget(&header, &all[0]))
	less[0].Permitted, less[1].Permitted = all[0].Permitted, all[1].Permitted
	for _, c := range capabilities {
		less[0].Effective |= 1 << c
	}
	set(&less)
	return func() {
		set(&all)
		goruntime.UnlockOSThread()
	}
}

// What the service makes belongs to the policy's owner, whoever has the directory. What is there
// keeps its own. The capabilities that the stacks give suffice.
func TestPolicyOwner(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root can give files away")
	}
	ctx := context.Background()
	w := newWorld(t, 0)
	w.write("theirs", "x")
	w.boxes.owner = &policy.Owner{UID: 1234, GID: 4321}
	restore := only(t, unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE)
	w.ensure(tenant, "c2")
	w.put("old.txt", "x")
	archive := archiveOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "d/e/f"}, tar.Header{Typeflag: tar.TypeSymlink, Name: "d/l", Linkname: "/etc"})
	_, err := w.AppendHistory(ctx, tenant, "c2", -1, strings.NewReader("x"))
	must(t, err, w.WriteTar(ctx, tenant, chatID, archive))
	restore()
	c2 := filepath.Join(w.root, "c2")
	for path, want := range map[string][2]uint32{
		w.path("old.txt"): {1234, 4321}, w.path("d"): {1234, 4321}, w.path("d/e"): {1234, 4321}, w.path("d/e/f"): {1234, 4321}, w.path("d/l"): {1234, 4321},
		c2: {1234, 4321}, filepath.Join(c2, chat.HistoryName): {1234, 4321},
		w.path(): {}, w.path("theirs"): {}, w.path(chat.HistoryName): {}, "/etc": {}, w.root: {},
	} {
		fi, err := os.Lstat(path)
		if err != nil {
			t.Error(err)
			continue
		}
		if st := fi.Sys().(*syscall.Stat_t); [2]uint32{st.Uid, st.Gid} != want {
			t.Errorf("%s belongs to %d:%d, want %d", path, st.Uid, st.Gid, want)
		}
	}
	// A sandbox's user closes what it has, and the service still gets at all of it.
	for _, name := range []string{"old.txt", "theirs"} {
		must(t, os.Chown(w.path(name), 1234, 4321), os.Chmod(w.path(name), 0))
	}
	must(t, os.Chown(w.path(), 1234, 4321), os.Chmod(w.path(), 0))
	restore = only(t, unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE)
	w.wantFile("old.txt", "x")
	w.put("old.txt", "y")
	if err := w.DeleteFile(ctx, tenant, chatID, "theirs"); err != nil {
		t.Error(err)
	}
	w.wantFiles("old.txt")
	restore()
	w.checkSound()
}

// Who may not give files away says so, and leaves nothing.
func TestPolicyOwnerRefused(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root has the right that is taken away here")
	}
	ctx := context.Background()
	w := newWorld(t, 0)
	w.boxes.owner = &policy.Owner{UID: 1234, GID: 4321}
	defer only(t, unix.CAP_DAC_OVERRIDE)()
	archive := archiveOf(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "f"})
	for what, do := range map[string]func() error{
		"chat": func() error { _, _, err := w.Ensure(ctx, tenant, "c2", w.space.ID); return err },
		"upload": func() error {
			_, _, err := w.Put(ctx, tenant, chatID, chat.PutFile{Name: "f", Size: 1}, strings.NewReader("x"))
			return err
		},
		"archive": func() error { return w.WriteTar(ctx, tenant, chatID, archive) },
		"history": func() error { _, err := w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader("x")); return err },
	} {
		if err := do(); !errorIs[*policy.OwnerError](err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for range 3 { // what an earlier call left is not taken as it is
		wantError[*policy.OwnerError](t, "the chat again", third(w.Ensure(ctx, tenant, "c2", w.space.ID)))
	}
	w.wantFiles()
	w.checkSound()
}

func TestTenantsAreApart(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	w.ensure("b", chatID)
	w.put("a", "mine")
	wantError[*chat.FileNotFoundError](t, "another tenant's file", second(w.FileNamed(ctx, "b", chatID, "a")))
	must(t, third(w.Put(ctx, "b", chatID, chat.PutFile{Name: "a", Size: -1}, strings.NewReader("theirs"))))
	if b, err := os.ReadFile(filepath.Join(w.root, ".tenants", "b", chatID, "a")); err != nil || string(b) != "theirs" {
		t.Errorf("%q, %v", b, err)
	}
	w.wantFile("a", "mine")
	w.checkSound()
}

func TestDelete(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 1<<20)
	file := w.put("a", "content")
	must(t, os.MkdirAll(w.path("d", "e"), 0o755))
	w.write("d/e/f", "deep")
	w.boxes.set(chatID, true)
	if err := w.Delete(ctx, tenant, chatID); !errorIs[*lifecycle.ActiveError](err) {
		t.Fatalf("with a sandbox: %v", err)
	}
	w.wantFile("a", "content")
	w.boxes.set(chatID, false)
	must(t, w.Delete(ctx, tenant, chatID))
	if _, err := os.Stat(w.path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
	wantError[*chat.NotFoundError](t, "again", w.Delete(ctx, tenant, chatID))
	wantError[*chat.FileNotFoundError](t, "its file", second(w.File(ctx, tenant, file.ID)))
	w.checkSound()
	w.ensure(tenant, chatID)
	w.wantFiles()
	w.checkSound()
}

// The workspaces know at once which of them a chat belongs to, for the commands of its
// sandbox.
func TestOwnerIsKnown(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 1000)
	w.write("much", strings.Repeat("x", 2000)) // the first user's workspace is full
	left := func(when string, full bool) {
		t.Helper()
		if err := w.quotas.Left(ctx, lifecycle.Subject{Tenant: tenant, Key: "box"}, true); errorIs[*lifecycle.QuotaError](err) != full || !full && err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	must(t, os.Mkdir(filepath.Join(w.root, "box"), 0o755))
	left("of no chat", false)
	w.ensure(tenant, "box")
	left("of a full workspace", true)
	must(t, w.Delete(ctx, tenant, "box"))
	left("deleted", false)
	other, _, err := w.quotas.EnsureWorkspace(ctx, tenant, "other")
	must(t, err)
	must(t, third(w.Ensure(ctx, tenant, "box", other.ID)))
	left("of an empty workspace", false)
	must(t, os.WriteFile(filepath.Join(w.root, "box", "much"), make([]byte, 2000), 0o644))
	left("that is full by now", true)
}

// A sandbox of a key that is no chat keeps its directory.
func TestDeleteOfNoChat(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	must(t, os.Mkdir(filepath.Join(w.root, "box"), 0o755))
	w.boxes.set("box", true)
	wantError[*chat.NotFoundError](t, "error", w.Delete(context.Background(), tenant, "box"))
	if _, err := os.Stat(filepath.Join(w.root, "box")); err != nil {
		t.Error(err)
	}
}

// forgetful deletes chats, and reports an error.
type forgetful struct{ chat.Store }

func (s forgetful) DeleteChat(ctx context.Context, tenant, id string) error {
	return errors.Join(s.Store.DeleteChat(ctx, tenant, id), errors.New("disk I/O error"))
}

// A deletion took effect, though the store reported an error: the next chat with the ID, which
// may be another user's, doesn't get the files.
func TestDeleteThatTookEffect(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	w.put("a", "content")
	opts := w.options()
	opts.Store = forgetful{w.db}
	s, err := chat.New(ctx, opts)
	must(t, err)
	if err := errors.Join(s.Delete(ctx, tenant, chatID), s.Close(ctx)); err != nil {
		t.Error(err)
	}
	w.ensure(tenant, chatID)
	if names := w.names(10); len(names) > 0 {
		t.Errorf("the next one has %q", names)
	}
}
