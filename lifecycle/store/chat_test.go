package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
)

var at = time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)

func space(tenant, id, user string) quota.Workspace {
	return quota.Workspace{Tenant: tenant, ID: id, UserID: user, CreatedAt: at}
}

func file(id, name string) chat.Record {
	return chat.Record{ID: id, Name: name, CreatedAt: at, ContentType: "text/plain", Identity: 1 << 63, OldType: "a/old", OldIdentity: 7}
}

func put(t *testing.T, s *Store, tenant, chatID string, records ...chat.Record) error {
	t.Helper()
	return s.PutRecords(t.Context(), tenant, chatID, records)
}

// files are a chat's records of a range of names.
func files(t *testing.T, s *Store, tenant, chatID, from, to string) (all []chat.Record) {
	t.Helper()
	must(t, s.EachRecord(t.Context(), tenant, chatID, from, to, func(r chat.Record) { all = append(all, r) }))
	return all
}

// get is for what can't go wrong in the test at hand.
func get[T any](v T, err error) T {
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
	if got, made, err := s.EnsureWorkspace(ctx, space("a", "1", "v")); !errdefs.IsAlreadyExists(err) || made || got != (quota.Workspace{}) {
		t.Errorf("an ID that is taken: %+v, %v", got, err)
	}
	chatIn(t, s, "a", "9", "k")
	must(t, s.Close())

	s = open(t, path)
	same(t, "after a restart", one, get(s.Workspace(ctx, "a", "1")))
	same(t, "of the chat", "9", get(s.WorkspaceOf(ctx, "a", "k")).ID)
	same(t, "next project", uint32(firstProject+3), get(first(s.EnsureWorkspace(ctx, space("c", "4", "u")))).Project)
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
	same(t, "chats", []string{"k"}, get(s.ChatIDs(ctx, "a", "9")))
	chatIn(t, s, "a", "8", "j")
	same(t, "all chats", []string{"j", "k"}, get(s.ChatIDs(ctx, "a", "")))
	if ids := get(s.ChatIDs(ctx, "b", "9")); ids != nil {
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
	same(t, "one", k, get(s.Chat(ctx, "a", "k")))
	chatIn(t, s, "b", "2", "k") // another tenant may use the ID as well
	_, _, err := s.EnsureWorkspace(ctx, space("a", "3", "u3"))
	must(t, err)
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
	must(t, err)
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

func TestRecords(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "berm.db")
	s := open(t, path)
	chatIn(t, s, "a", "1", "k")
	chatIn(t, s, "a", "1b", "l")
	chatIn(t, s, "b", "2", "k")
	x, y := file("1", "x"), file("2", "y")
	y.ContentType, y.Identity = "", 0
	over := file("9", "x")
	over.ContentType, over.Identity, over.OldType, over.OldIdentity, over.CreatedAt = "a/b", 8, "c/d", 9, at.Add(time.Hour)
	for _, err := range []error{put(t, s, "a", "k", y, x), put(t, s, "b", "k", file("1", "x")), put(t, s, "a", "l", file("3", "x")), put(t, s, "a", "k", over)} {
		must(t, err)
	}
	over.ID, over.CreatedAt = x.ID, x.CreatedAt
	x = over
	must(t, s.Close())

	s = open(t, path)
	for _, tt := range []struct {
		from, to string
		want     []chat.Record
	}{{"", "", []chat.Record{x, y}}, {"x", "x", []chat.Record{x}}, {"xx", "", []chat.Record{y}}, {"", "w", nil}, {"z", "", nil}, {"w", "y", []chat.Record{x, y}}} {
		same(t, fmt.Sprintf("from %q to %q", tt.from, tt.to), tt.want, files(t, s, "a", "k", tt.from, tt.to))
	}
	same(t, "number", []int{2, 1, 0, 0}, []int{
		get(s.CountRecords(ctx, "a", "k")), get(s.CountRecords(ctx, "b", "k")), get(s.CountRecords(ctx, "b", "l")), get(s.CountRecords(ctx, "a", "none")),
	})
	of := func(tenant, id string) error {
		_, _, err := s.RecordOf(ctx, tenant, id)
		return err
	}
	if chatID, r, err := s.RecordOf(ctx, "a", "1"); err != nil || chatID != "k" || r != x {
		t.Errorf("by ID: %s, %+v, %v", chatID, r, err)
	}
	for name, err := range map[string]error{
		"an ID that was never used": of("a", "9"),
		"another tenant's ID":       of("b", "2"),
		"no chat":                   put(t, s, "a", "none", file("8", "z")),
		"another tenant's chat":     put(t, s, "b", "l", file("8", "z")),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := put(t, s, "a", "k", file("7", "z"), file("3", "v")); !errdefs.IsAlreadyExists(err) {
		t.Errorf("an ID that is taken: %v", err)
	}
	same(t, "all or none", []chat.Record{x, y}, files(t, s, "a", "k", "", ""))
	if err := s.DeleteRecords(ctx, "b", []string{"2"}); err != nil { // the other tenant's, who has none of that ID
		t.Fatal(err)
	}
	must(t, s.DeleteRecords(ctx, "a", []string{"1", "none"}))
	same(t, "after deleting", []chat.Record{y}, files(t, s, "a", "k", "", ""))
	if err := errors.Join(put(t, s, "a", "k"), s.DeleteRecords(ctx, "a", nil)); err != nil {
		t.Error(err)
	}
	for range 2 { // the second time there is none
		must(t, s.DeleteChat(ctx, "a", "l"))
	}
	if err := of("a", "3"); !errdefs.IsNotFound(err) {
		t.Errorf("a deleted chat's: %v", err)
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
	var want []chat.Record
	for i, name := range names {
		user, ws, id := "u"+name, fmt.Sprint("w", i), "k"+name
		if w, made, err := s.EnsureWorkspace(ctx, space("a", ws, user)); err != nil || !made || w.UserID != user {
			t.Fatalf("user %q: %+v, %v, %v", name, w, made, err)
		}
		c, made, err := s.EnsureChat(ctx, chat.Chat{Tenant: "a", ID: id, WorkspaceID: ws, CreatedAt: at})
		if err != nil || !made || c.ID != id {
			t.Fatalf("chat %q: %+v, %v, %v", name, c, made, err)
		}
		f := file(fmt.Sprint(i), name)
		f.ContentType = name
		want = append(want, f)
	}
	must(t, put(t, s, "a", "ka", want...))
	slices.SortFunc(want, func(a, b chat.Record) int { return strings.Compare(a.Name, b.Name) })
	same(t, "files", want, files(t, s, "a", "ka", "", ""))
	for _, f := range want {
		same(t, "by name", []chat.Record{f}, files(t, s, "a", "ka", f.Name, f.Name))
	}
}

func TestDurably(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	level := func(q querier) int {
		return get(one(ctx, q, func(row scanner) (n int, err error) { return n, row.Scan(&n) }, "PRAGMA synchronous"))
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
	if err := s.PutRecords(ending, "a", "k", []chat.Record{{}}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestClosed(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	k := chatIn(t, s, "a", "1", "k")
	must(t, s.Close())
	ctx := t.Context()
	for name, err := range map[string]error{
		"EnsureWorkspace": err2(first(s.EnsureWorkspace(ctx, space("a", "1", "u")))),
		"EnsureChat":      err2(first(s.EnsureChat(ctx, k))),
		"EachRecord":      s.EachRecord(ctx, "a", "k", "", "", nil),
		"CountRecords":    err2(s.CountRecords(ctx, "a", "k")),
		"PutRecords":      put(t, s, "a", "k", file("1", "x")),
		"DeleteChat":      s.DeleteChat(ctx, "a", "k"),
		"EachChat":        s.EachChat(ctx, func(chat.Chat) error { return nil }),
	} {
		if err == nil || errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "the store: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestChangesMigrate takes over a store in which an earlier version has left changes: files
// keep their IDs and content types, and a chat that was being deleted stays: its directory
// may be in its place, and its files would come back with the next chat of that name.
func TestChangesMigrate(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "berm.db")
	db := ofVersion(t, path, 5)
	_, err := db.ExecContext(ctx, `
		INSERT INTO workspaces VALUES ('a', 'w', 'u', 1, 5);
		INSERT INTO chats VALUES ('a', 'k', 'w', 2), ('a', 'l', 'w', 3);
		INSERT INTO files VALUES ('a', 'k', 'x', '1', 'text/x', 10, 4, 5), ('a', 'l', 'x', '2', 'text/x', 10, 4, 5);
		INSERT INTO changes VALUES ('c', 'a', 'k'), ('deleted-d', 'a', 'l');
		INSERT INTO changed_files VALUES ('c', 'x', '1', 'text/new', 11, 4, 6), ('c', 'y', '3', 'text/y', 12, 7, 7);`)
	must(t, errors.Join(err, db.Close()))
	s := open(t, path)
	same(t, "files", []chat.Record{
		{ID: "1", Name: "x", ContentType: "text/x", CreatedAt: instant(4)}, {ID: "3", Name: "y", ContentType: "text/y", CreatedAt: instant(7)},
	}, files(t, s, "a", "k", "", ""))
	if c, err := s.Chat(ctx, "a", "l"); err != nil || c.WorkspaceID != "w" {
		t.Errorf("the chat that was being deleted: %+v, %v", c, err)
	}
	must(t, s.Close())
	if r, err := Check(ctx, path, ""); err != nil || r.Files != 3 || r.Chats != 2 {
		t.Errorf("%+v, %v", r, err)
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
			if err := put(t, s, tenant, c.ID, file(fmt.Sprint(i), "x"), file(fmt.Sprint(i, "own"), fmt.Sprint(i))); err != nil {
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
	var n1 int
	if err := s.EachChat(ctx, func(c chat.Chat) error {
		got, err := s.CountRecords(ctx, c.Tenant, c.ID)
		n1 += got
		return err
	}); err != nil || n1 != 10+n {
		t.Errorf("%d files, %v", n1, err)
	}
}

func TestProjectsRunOut(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	chatIn(t, s, "a", "1", "k")
	must(t, err2(s.db.ExecContext(ctx, "UPDATE workspaces SET project = 4294967294")))
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
		"SELECT * FROM files WHERE tenant = '' AND chat_id = '' AND name >= '' AND (name <= '' OR '' = '') ORDER BY name",
		"SELECT COUNT(*) FROM files WHERE tenant = '' AND chat_id = ''",
		"SELECT * FROM files WHERE tenant = '' AND file_id = ''",
	} {
		steps := get(list(t.Context(), s.db, func(row scanner) (step string, err error) {
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
