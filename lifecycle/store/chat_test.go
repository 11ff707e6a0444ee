package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/workspace"
)

var at = time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)

func space(tenant, id, user string) workspace.Workspace {
	return workspace.Workspace{Tenant: tenant, ID: id, UserID: user, CreatedAt: at}
}

func file(c chat.Chat, id, name string) chat.File {
	return chat.File{ID: id, Tenant: c.Tenant, ChatID: c.ID, Name: name, ContentType: "text/plain", Size: 7, CreatedAt: at, ModifiedAt: at.Add(time.Minute)}
}

// must is for what can't go wrong in the test at hand.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// chatIn makes a chat, in a workspace of the same tenant and its own name.
func chatIn(t *testing.T, s *Store, tenant, space1, id string) chat.Chat {
	t.Helper()
	if _, _, err := s.EnsureWorkspace(t.Context(), space(tenant, space1, "user of "+space1)); err != nil {
		t.Fatal(err)
	}
	c, made, err := s.EnsureChat(t.Context(), chat.Chat{Tenant: tenant, ID: id, WorkspaceID: space1, CreatedAt: at})
	if err != nil || !made {
		t.Fatalf("made %v, %v", made, err)
	}
	return c
}

func same(t *testing.T, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got)\n%s", what, d)
	}
}

func TestWorkspaces(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "berm.db")
	s := open(t, path)
	one, made, err := s.EnsureWorkspace(ctx, space("a", "1", "u"))
	if err != nil || !made || one.Project != firstProject {
		t.Fatalf("%+v, made %v, %v", one, made, err)
	}
	want := space("a", "1", "u")
	want.Project = one.Project
	same(t, "made", want, one)
	again, made, err := s.EnsureWorkspace(ctx, space("a", "2", "u"))
	if err != nil || made {
		t.Errorf("made twice, %v", err)
	}
	same(t, "asked for again", one, again)
	other, made, err := s.EnsureWorkspace(ctx, space("b", "3", "u"))
	if err != nil || !made || other.Project == one.Project {
		t.Errorf("another tenant's: %+v, made %v, %v", other, made, err)
	}
	if got, made, err := s.EnsureWorkspace(ctx, space("a", "1", "v")); !errdefs.IsAlreadyExists(err) || made || got != (workspace.Workspace{}) {
		t.Errorf("an ID that is taken: %+v, %v", got, err)
	}
	chatIn(t, s, "a", "9", "k")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = open(t, path)
	same(t, "after a restart", one, must(s.Workspace(ctx, "a", "1")))
	same(t, "of the chat", "9", must(s.WorkspaceOf(ctx, "a", "k")).ID)
	same(t, "next project", uint32(firstProject+3), must(first(s.EnsureWorkspace(ctx, space("c", "4", "u")))).Project)
	for name, err := range map[string]error{
		"unknown":                err2(s.Workspace(ctx, "a", "3")),
		"another tenant's":       err2(s.Workspace(ctx, "b", "1")),
		"no chat":                err2(s.WorkspaceOf(ctx, "a", "none")),
		"another tenant's chat":  err2(s.WorkspaceOf(ctx, "b", "k")),
		"other case of the chat": err2(s.WorkspaceOf(ctx, "a", "K")),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	same(t, "chats", []string{"k"}, must(s.ChatIDs(ctx, "a", "9")))
	if ids := must(s.ChatIDs(ctx, "b", "9")); ids != nil {
		t.Errorf("another tenant sees %q", ids)
	}
}

func err2[T any](_ T, err error) error { return err }

func first[T any](v T, _ bool, err error) (T, error) { return v, err }

func TestChats(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	k := chatIn(t, s, "a", "1", "k")
	same(t, "one", k, must(s.Chat(ctx, "a", "k")))
	chatIn(t, s, "b", "2", "k") // another tenant may use the ID as well
	_, _, err := s.EnsureWorkspace(ctx, space("a", "3", "u3"))
	if err != nil {
		t.Fatal(err)
	}
	got, made, err := s.EnsureChat(ctx, chat.Chat{Tenant: "a", ID: "k", WorkspaceID: "3"})
	if err != nil || made {
		t.Errorf("made again: %v, %v", made, err)
	}
	same(t, "one that is there stays where it is", k, got)
	for name, c := range map[string]chat.Chat{
		"unknown workspace":          {Tenant: "a", ID: "x", WorkspaceID: "9"},
		"another tenant's workspace": {Tenant: "a", ID: "x", WorkspaceID: "2"},
	} {
		if got, made, err := s.EnsureChat(ctx, c); !errdefs.IsNotFound(err) || made || got != (chat.Chat{}) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for _, tenant := range []string{"b", "c"} {
		if _, err := s.Chat(ctx, tenant, "x"); !errdefs.IsNotFound(err) {
			t.Errorf("unknown chat: %v", err)
		}
	}

	chatIn(t, s, "c", "4", "k0000")
	err = inTx(ctx, s.db, func(tx *sql.Tx) error { // at once, as each of them would be synced
		for i := 1; i < pageSize+5; i++ {
			if _, err := tx.ExecContext(ctx, "INSERT INTO chats VALUES ('c', ?, '4', 0)", fmt.Sprintf("k%04d", i)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	err = s.EachChat(ctx, func(c chat.Chat) error {
		all = append(all, c.Tenant+"/"+c.ID)
		return err2(s.Chat(ctx, c.Tenant, c.ID)) // the store isn't held meanwhile
	})
	if err != nil || len(all) != pageSize+7 || !slices.IsSorted(all) || len(slices.Compact(all)) != len(all) {
		t.Errorf("%d chats in all, %v", len(all), err)
	}
	enough := errors.New("enough")
	if err := s.EachChat(ctx, func(chat.Chat) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("f's error: %v", err)
	}
	for _, tt := range []struct {
		after       string
		limit, want int
		first       string
	}{{"", 2, 2, "k0000"}, {"k0001", 2, 2, "k0002"}, {"k0001x", 1, 1, "k0002"}, {"k0503", 9, 1, "k0504"}, {"k0504", 9, 0, ""}, {"", 0, 0, ""}, {"", -1, 0, ""}} {
		page, err := s.Chats(ctx, "c", "4", tt.after, tt.limit)
		if err != nil || len(page) != tt.want || tt.want > 0 && page[0].ID != tt.first {
			t.Errorf("after %q, at most %d: %d chats, %v", tt.after, tt.limit, len(page), err)
		}
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "berm.db")
	s := open(t, path)
	k, l := chatIn(t, s, "a", "1", "k"), chatIn(t, s, "a", "1b", "l")
	other := chatIn(t, s, "b", "2", "k")
	x, y := file(k, "1", "x"), file(k, "2", "y")
	y.ContentType, y.Size = "", 1<<62
	if err := s.PutFiles(ctx, y, x, file(other, "1", "x"), file(l, "3", "x")); err != nil {
		t.Fatal(err)
	}
	over := file(k, "9", "x")
	over.ContentType, over.Size, over.CreatedAt, over.ModifiedAt = "a/b", 8, at.Add(time.Hour), at.Add(time.Hour)
	if err := s.PutFiles(ctx, over); err != nil {
		t.Fatal(err)
	}
	x.ContentType, x.Size, x.ModifiedAt = over.ContentType, over.Size, over.ModifiedAt
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = open(t, path)
	same(t, "after a restart", []chat.File{x, y}, must(s.Files(ctx, "a", "k", "", 100)))
	for _, tt := range []struct {
		after string
		limit int
		want  []chat.File
	}{{"", 1, []chat.File{x}}, {"x", 1, []chat.File{y}}, {"w", 9, []chat.File{x, y}}, {"y", 9, nil}, {"", 0, nil}, {"", -1, nil}} {
		same(t, fmt.Sprintf("after %q, at most %d", tt.after, tt.limit), tt.want, must(s.Files(ctx, "a", "k", tt.after, tt.limit)))
	}
	same(t, "number", []int{2, 1, 0, 0}, []int{
		must(s.CountFiles(ctx, "a", "k")), must(s.CountFiles(ctx, "b", "k")), must(s.CountFiles(ctx, "b", "l")), must(s.CountFiles(ctx, "a", "none")),
	})
	same(t, "by ID", x, must(s.File(ctx, "a", "1")))
	same(t, "by name", y, must(s.FileNamed(ctx, "a", "k", "y")))
	same(t, "another tenant's", "b", must(s.File(ctx, "b", "1")).Tenant)
	for name, err := range map[string]error{
		"an ID that was never used": err2(s.File(ctx, "a", "9")),
		"another tenant's ID":       err2(s.File(ctx, "b", "2")),
		"another chat's name":       err2(s.FileNamed(ctx, "a", "l", "y")),
		"no chat":                   s.PutFiles(ctx, file(k, "7", "z"), file(chat.Chat{Tenant: "a", ID: "none"}, "8", "z")),
		"another tenant's chat":     s.PutFiles(ctx, file(k, "7", "z"), file(chat.Chat{Tenant: "b", ID: "l"}, "8", "z")),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.PutFiles(ctx, file(k, "7", "z"), file(l, "1", "z")); !errdefs.IsAlreadyExists(err) {
		t.Errorf("an ID that is taken: %v", err)
	}
	same(t, "all or none", []chat.File{x, y}, must(s.Files(ctx, "a", "k", "", 100)))
	if err := s.DeleteFiles(ctx, "b", "2"); err != nil { // the other tenant's, who has none of that ID
		t.Fatal(err)
	}
	if err := s.DeleteFiles(ctx, "a", "1", "none"); err != nil {
		t.Fatal(err)
	}
	same(t, "after deleting", []chat.File{y}, must(s.Files(ctx, "a", "k", "", 100)))
	if err := errors.Join(s.PutFiles(ctx), s.DeleteFiles(ctx, "a")); err != nil {
		t.Error(err)
	}
}

func TestOddNames(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	names := []string{
		"'; DROP TABLE files; --", "%", "_", "a", "A", "ä", "a\u0308", " a ", "1", "01", "1e0", "0x1", "a\nb", "\x00", "a\x00b", "a\x00c",
		"\xff\xfe", "\xed\xa0\x80", "\U0010ffff", "\u202egpj.exe", "*", "NULL", strings.Repeat("n", chat.MaxName),
	}
	var want []chat.File
	for i, name := range names {
		user, ws, id := "u"+name, fmt.Sprint("w", i), "k"+name
		if w, made, err := s.EnsureWorkspace(ctx, space("a", ws, user)); err != nil || !made || w.UserID != user {
			t.Fatalf("user %q: %+v, %v, %v", name, w, made, err)
		}
		c, made, err := s.EnsureChat(ctx, chat.Chat{Tenant: "a", ID: id, WorkspaceID: ws, CreatedAt: at})
		if err != nil || !made || c.ID != id {
			t.Fatalf("chat %q: %+v, %v, %v", name, c, made, err)
		}
		f := file(chat.Chat{Tenant: "a", ID: "ka"}, fmt.Sprint(i), name)
		f.ContentType = name
		want = append(want, f)
	}
	if err := s.PutChange(ctx, chat.Change{ID: "c", Tenant: "a", ChatID: "ka", Files: want}); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(want, func(a, b chat.File) int { return strings.Compare(a.Name, b.Name) })
	changes := must(s.Changes(ctx))
	same(t, "changes", []chat.Change{{ID: "c", Tenant: "a", ChatID: "ka", Files: want}}, changes)
	if err := s.FinishChange(ctx, changes[0], want); err != nil {
		t.Fatal(err)
	}
	same(t, "files", want, must(s.Files(ctx, "a", "ka", "", 100)))
	for _, f := range want {
		same(t, "by name", f, must(s.FileNamed(ctx, "a", "ka", f.Name)))
	}
}

func TestChanges(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "berm.db")
	s := open(t, path)
	k, l := chatIn(t, s, "a", "1", "k"), chatIn(t, s, "a", "2", "l")
	c := chat.Change{ID: "1", Tenant: "a", ChatID: "k", Files: []chat.File{file(k, "1", "x"), file(k, "2", "y")}}
	empty := chat.Change{ID: "2", Tenant: "a", ChatID: "l"}
	for _, c := range []chat.Change{empty, c} {
		if err := s.PutChange(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.PutChange(ctx, c); !errdefs.IsAlreadyExists(err) {
		t.Errorf("twice: %v", err)
	}
	if err := s.PutChange(ctx, chat.Change{ID: "3", Tenant: "b", ChatID: "k"}); !errdefs.IsNotFound(err) {
		t.Errorf("no chat: %v", err)
	}
	mixed := chat.Change{ID: "3", Tenant: "a", ChatID: "k", Files: []chat.File{file(l, "3", "x")}}
	if err := s.PutChange(ctx, mixed); !errdefs.IsInvalidArgument(err) {
		t.Errorf("another chat's file: %v", err)
	}
	if err := s.FinishChange(ctx, c, mixed.Files); !errdefs.IsInvalidArgument(err) {
		t.Errorf("finished with another chat's file: %v", err)
	}
	if err := s.FinishChange(ctx, chat.Change{ID: "1", Tenant: "a", ChatID: "l"}, nil); !errdefs.IsNotFound(err) {
		t.Errorf("finished as another chat's: %v", err)
	}
	if files := must(s.Files(ctx, "a", "k", "", 100)); files != nil {
		t.Errorf("an unfinished change has files: %v", files)
	}

	// As after a kill: the files as they are, without an orderly end.
	s = open(t, copied(t, path))
	same(t, "unfinished", []chat.Change{c, empty}, must(s.Changes(ctx)))
	grown := slices.Clone(c.Files)
	grown[1].Size = 100
	if err := s.FinishChange(ctx, c, grown); err != nil {
		t.Fatal(err)
	}
	same(t, "finished", grown, must(s.Files(ctx, "a", "k", "", 100)))
	same(t, "left", []chat.Change{empty}, must(s.Changes(ctx)))
	if err := s.FinishChange(ctx, c, grown); !errdefs.IsNotFound(err) {
		t.Errorf("finished twice: %v", err)
	}
	if err := s.PutFiles(ctx, file(l, "7", "z")); err != nil {
		t.Fatal(err)
	}
	taken := []chat.File{file(l, "8", "v"), file(l, "1", "w")}
	if err := s.FinishChange(ctx, empty, taken); !errdefs.IsAlreadyExists(err) {
		t.Errorf("an ID that is taken: %v", err)
	}
	same(t, "nothing is done by half", []chat.Change{empty}, must(s.Changes(ctx)))

	for range 2 { // the second time there is none
		if err := s.DeleteChat(ctx, "a", "l"); err != nil {
			t.Fatal(err)
		}
	}
	if changes, files := must(s.Changes(ctx)), must(s.Files(ctx, "a", "l", "", 100)); changes != nil || files != nil {
		t.Errorf("of a deleted chat there are %v and %v", changes, files)
	}
	if err := s.FinishChange(ctx, empty, nil); !errdefs.IsNotFound(err) {
		t.Errorf("finished after the chat was deleted: %v", err)
	}
	same(t, "the other chat's", grown, must(s.Files(ctx, "a", "k", "", 100)))
}

// copied answers a copy of an open database.
func copied(t *testing.T, path string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "berm.db")
	for _, suffix := range []string{"", "-wal"} {
		content, err := os.ReadFile(path + suffix)
		if err == nil {
			err = os.WriteFile(to+suffix, content, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func TestDurably(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	level := func(q querier) int {
		return must(one(ctx, q, func(row scanner) (n int, err error) { return n, row.Scan(&n) }, "PRAGMA synchronous"))
	}
	const normal, full = 1, 2
	ending, cancel := context.WithCancel(ctx)
	stop := errors.New("stop")
	for _, end := range []func(*sql.Tx) error{
		func(*sql.Tx) error { return nil },
		func(*sql.Tx) error { return stop },
		func(*sql.Tx) error { cancel(); return ending.Err() },
	} {
		var during int
		_ = s.durably(ending, func(tx *sql.Tx) error { during = level(tx); return end(tx) })
		if after := level(s.db); during != full || after != normal {
			t.Errorf("synchronous is %d, and %d afterwards", during, after)
		}
	}
	if err := s.PutFiles(ending, chat.File{}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestClosed(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	k := chatIn(t, s, "a", "1", "k")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	for name, err := range map[string]error{
		"EnsureWorkspace": err2(first(s.EnsureWorkspace(ctx, space("a", "1", "u")))),
		"EnsureChat":      err2(first(s.EnsureChat(ctx, k))),
		"Files":           err2(s.Files(ctx, "a", "k", "", 100)),
		"CountFiles":      err2(s.CountFiles(ctx, "a", "k")),
		"FileNamed":       err2(s.FileNamed(ctx, "a", "k", "x")),
		"PutFiles":        s.PutFiles(ctx, file(k, "1", "x")),
		"DeleteChat":      s.DeleteChat(ctx, "a", "k"),
		"Changes":         err2(s.Changes(ctx)),
		"EachChat":        s.EachChat(ctx, func(chat.Chat) error { return nil }),
	} {
		if err == nil || errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "the store: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMigration(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "berm.db")
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	stmts, err := migrations.ReadFile("migrations/0001_sandboxes.sql")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, string(stmts)+"; PRAGMA user_version = 1"); err != nil {
		t.Fatal(err)
	}
	old := &Store{db: db}
	if err := old.Put(ctx, record("1")); err != nil {
		t.Fatal(err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s := open(t, path)
		if s.Fresh() {
			t.Error("a store that was there is fresh")
		}
		if err := s.PutFiles(ctx, file(chat.Chat{Tenant: "a", ID: "k"}, "1", "x")); !errdefs.IsNotFound(err) {
			t.Errorf("a file without a chat: %v", err)
		}
		if got := records(t, s); len(got) != 1 || got[0].SessionID != "1" {
			t.Errorf("sandboxes: %v", got)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestManyChatsAtOnce(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	const n = 20
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex
		made    = map[string]int{}
		project = map[uint32]string{}
	)
	for i := range n {
		wg.Go(func() {
			tenant, user := "t"+fmt.Sprint(i%2), "u"+fmt.Sprint(i%5)
			w, new1, err := s.EnsureWorkspace(ctx, space(tenant, fmt.Sprint(i), user))
			if err != nil {
				t.Error(err)
				return
			}
			c, _, err := s.EnsureChat(ctx, chat.Chat{Tenant: tenant, ID: user, WorkspaceID: w.ID, CreatedAt: at})
			if err != nil || c.WorkspaceID != w.ID {
				t.Errorf("%+v, %v", c, err)
				return
			}
			change := chat.Change{ID: fmt.Sprint(i), Tenant: tenant, ChatID: c.ID, Files: []chat.File{file(c, fmt.Sprint(i), "x"), file(c, fmt.Sprint(i, "own"), fmt.Sprint(i))}}
			if err := s.PutChange(ctx, change); err != nil {
				t.Error(err)
			}
			if err := s.FinishChange(ctx, change, change.Files); err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if new1 {
				made[tenant+user]++
			}
			if of := project[w.Project]; of != "" && of != w.ID || w.Project == 0 {
				t.Errorf("project %d is of %s and of %s", w.Project, of, w.ID)
			}
			project[w.Project] = w.ID
		})
	}
	wg.Wait()
	if len(made) != 10 || len(project) != 10 {
		t.Errorf("%d workspaces, %d projects, want 10", len(made), len(project))
	}
	for user, n := range made {
		if n != 1 {
			t.Errorf("%s was made %d times", user, n)
		}
	}
	var files int
	if err := s.EachChat(ctx, func(c chat.Chat) error {
		got, err := s.Files(ctx, c.Tenant, c.ID, "", 100)
		files += len(got)
		return err
	}); err != nil || files != 10+n {
		t.Errorf("%d files, %v", files, err)
	}
}

func TestProjectsRunOut(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	chatIn(t, s, "a", "1", "k")
	if _, err := s.db.ExecContext(ctx, "UPDATE workspaces SET project = 4294967294"); err != nil {
		t.Fatal(err)
	}
	if w, made, err := s.EnsureWorkspace(ctx, space("a", "2", "v")); err == nil || made {
		t.Errorf("%+v, made %v", w, made)
	}
}

// TestPlans sees that no query of a chat's or workspace's looks at others'.
func TestPlans(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	for _, query := range []string{
		"SELECT * FROM workspaces WHERE tenant = '' AND user_id = ''",
		"SELECT MAX(project) FROM workspaces",
		"SELECT * FROM chats c JOIN workspaces w USING (tenant, workspace_id) WHERE c.tenant = '' AND c.chat_id = ''",
		"SELECT chat_id FROM chats WHERE tenant = '' AND workspace_id = '' AND chat_id > '' ORDER BY chat_id LIMIT 1",
		"SELECT * FROM chats WHERE (tenant, chat_id) > ('', '') ORDER BY tenant, chat_id LIMIT 1",
		"SELECT * FROM files WHERE tenant = '' AND chat_id = '' AND name > '' ORDER BY name LIMIT 1",
		"SELECT COUNT(*) FROM files WHERE tenant = '' AND chat_id = ''",
		"SELECT * FROM files WHERE tenant = '' AND file_id = ''",
		"DELETE FROM changes WHERE tenant = '' AND chat_id = ''",
		"SELECT * FROM changes JOIN changed_files USING (change_id) WHERE change_id = '' ORDER BY name",
	} {
		steps := must(list(t.Context(), s.db, func(row scanner) (step string, err error) {
			var id, parent, unused int
			return step, row.Scan(&id, &parent, &unused, &step)
		}, "EXPLAIN QUERY PLAN "+query))
		for _, step := range steps {
			if !strings.HasPrefix(step, "SEARCH") {
				t.Errorf("%s: %s", query, step)
			}
		}
	}
}
