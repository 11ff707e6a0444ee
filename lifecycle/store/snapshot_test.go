package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/restart"
)

// fill puts something of every kind into a store.
func fill(t *testing.T, s *Store) {
	t.Helper()
	r := record(uuid.NewString())
	chatIn(t, s, "a", "1", "k")
	_, err := s.AddProject(t.Context(), r.SessionID, "/work/"+r.SessionID)
	must(t, err)
	given, err := s.AddProject(t.Context(), r.SessionID, "/shared/"+r.SessionID)
	if err == nil {
		err = s.PassProject(t.Context(), given.ID, "")
	}
	must(t, err)
	for _, err := range []error{
		s.PutRestart(t.Context(), restarted), s.PutRestart(t.Context(), restart.Row{ContainerID: "b", Policy: restart.Policy{Name: "no"}}),
		s.Put(t.Context(), r), put(t, s, "a", "k", file("1", "x")),
	} {
		must(t, err)
	}
}

// restarted is a row with all that there is in one.
var restarted = restart.Row{
	ContainerID: "a", Policy: restart.Policy{Name: restart.OnFailure, MaxRetries: 5}, Count: 3, Stopped: true,
	Exit: time.Unix(1, 2).UTC(), Backoff: time.Second, Next: time.Unix(3, 4).UTC(),
}

var filled = Report{Schema: len(get(migrationNames())), Sandboxes: 1, Workspaces: 1, Chats: 1, Files: 1}

func TestSnapshot(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	dir := t.TempDir()
	path, to := filepath.Join(dir, "a b?c#d%20.db"), filepath.Join(dir, "copy")
	must(t, open(t, path).TookOver(ctx))
	s := open(t, path)
	fill(t, s)
	before := records(t, s)
	for _, name := range get(filepath.Glob(filepath.Join(dir, "*"))) {
		if !strings.HasPrefix(name, path) {
			t.Errorf("made %s", name)
		}
	}
	same(t, "in use", filled, get(Check(ctx, path, dir)))
	must(t, Snapshot(ctx, path, to))
	if fi, err := os.Stat(to); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if left, err := filepath.Glob(to + "?*"); err != nil || left != nil {
		t.Errorf("beside the copy: %q, %v", left, err)
	}
	same(t, "the copy", filled, get(Check(ctx, to, dir)))
	got := open(t, to)
	if s.Fresh() || !got.Fresh() {
		t.Errorf("fresh: the store %v, the copy %v", s.Fresh(), got.Fresh())
	}
	want := before[0]
	want.LastUsedAt = time.Time{}
	same(t, "record", []lifecycle.Sandbox{want}, records(t, got))
	without := file("1", "x")
	without.Identity, without.OldType, without.OldIdentity = 0, "", 0
	same(t, "files", []chat.Record{without}, files(t, got, "a", "k", "", ""))
	kept := []restart.Row{restarted, {ContainerID: "b", Policy: restart.Policy{Name: "no"}}}
	same(t, "restarts", kept, get(got.Restarts(ctx)))
	same(t, "restarts, read from outside", kept, get(ReadRestarts(ctx, path)))
	same(t, "what was copied", before, records(t, s))
	if err := errors.Join(s.DeleteRestart(ctx, "b"), s.DeleteRestart(ctx, "none")); err != nil {
		t.Error(err)
	}
	same(t, "restarts left", kept[:1], get(s.Restarts(ctx)))
	if err := Snapshot(ctx, path, to); err == nil {
		t.Error("a file was written over")
	}
	if err := Snapshot(ctx, filepath.Join(dir, "none"), filepath.Join(dir, "x")); !os.IsNotExist(unwrapAll(err)) {
		t.Errorf("no store: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "none")); err == nil {
		t.Error("a store was made")
	}
}

// unwrapAll is for os.IsNotExist, which doesn't.
func unwrapAll(err error) error {
	for {
		u, ok := err.(interface{ Unwrap() error })
		if !ok {
			return err
		}
		err = u.Unwrap()
	}
}

// copied returns a copy of an open database, as after a kill.
func copied(t *testing.T, path string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "berm.db")
	for _, suffix := range []string{"", "-wal"} {
		content, err := os.ReadFile(path + suffix)
		if err == nil {
			err = os.WriteFile(to+suffix, content, 0o600)
		}
		must(t, err)
	}
	return to
}

// A snapshot is of one moment, whoever writes meanwhile, and after a kill.
func TestSnapshotMeanwhile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "berm.db")
	s := open(t, path)
	chatIn(t, s, "a", "1", "k")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	begun := make(chan struct{})
	wg.Go(func() { // both files, or none
		for i := 0; ctx.Err() == nil; i++ {
			if err := put(t, s, "a", "k", file(fmt.Sprint("a", i), fmt.Sprint("a", i)), file(fmt.Sprint("b", i), fmt.Sprint("b", i))); err != nil {
				t.Error(err)
			}
			if i == 0 {
				close(begun)
			}
		}
	})
	<-begun
	last := 0
	for i := range 5 {
		to := filepath.Join(dir, fmt.Sprint(i))
		must(t, Snapshot(t.Context(), path, to))
		r, err := Check(t.Context(), to, dir)
		if err != nil || r.Files%2 != 0 || r.Files < max(last, 2) {
			t.Errorf("after %d files: %+v, %v", last, r, err)
		}
		last = r.Files
	}
	cancel()
	wg.Wait()
	killed := copied(t, path)
	must(t, Snapshot(t.Context(), killed, filepath.Join(dir, "killed")))
	same(t, "after a kill", get(Check(t.Context(), path, dir)), get(Check(t.Context(), filepath.Join(dir, "killed"), dir)))
}

func TestCheckFinds(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sound := filepath.Join(dir, "sound")
	s := open(t, sound)
	fill(t, s)
	must(t, s.Close())
	exec := func(stmts string) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			db, err := sql.Open("sqlite", path)
			if err == nil {
				_, err = db.Exec(stmts)
			}
			must(t, err)
			_ = db.Close()
		}
	}
	for name, tt := range map[string]struct {
		harm func(t *testing.T, path string)
		want string
	}{
		"nothing": {exec(""), ""},
		"a page": {func(t *testing.T, path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			must(t, err)
			defer func() { _ = f.Close() }()
			must(t, err2(f.WriteAt([]byte(strings.Repeat("x", 4096)), 2*4096)))
		}, "malformed"},
		"not a database": {func(t *testing.T, path string) {
			must(t, os.WriteFile(path, []byte(strings.Repeat("x", 8192)), 0o600))
		}, "not a database"},
		"nothing in it":  {func(_ *testing.T, path string) { _ = os.Truncate(path, 0) }, "no schema"},
		"newer":          {exec("PRAGMA user_version = 1000"), "newer berm"},
		"other tables":   {exec("DROP INDEX chats_of_workspace"), "aren't those of schema version"},
		"a trigger":      {exec("CREATE TRIGGER t AFTER DELETE ON chats BEGIN DELETE FROM files; END"), "aren't those"},
		"no chat":        {exec("DELETE FROM chats"), "1 of files without chats"},
		"no spec":        {exec("UPDATE sandboxes SET spec = '{'"), "unexpected EOF"},
		"other spec":     {exec(`UPDATE sandboxes SET spec = '{"privileged": true}'`), "unknown object member name"},
		"two specs":      {exec("UPDATE sandboxes SET spec = '{}{}'"), "after top-level value"},
		"no key":         {exec("UPDATE sandboxes SET key = '../k'"), "is no key"},
		"no session":     {exec("UPDATE sandboxes SET session_id = 's'"), "no such can be"},
		"no user":        {exec("UPDATE workspaces SET user_id = ''"), "no such can be"},
		"chat of no key": {exec("PRAGMA foreign_keys = 0; UPDATE chats SET chat_id = '.'; UPDATE files SET chat_id = '.'"), "is no key"},
		"a path":         {exec("UPDATE files SET name = '../x'"), "no such can be"},
		"no directory":   {exec("UPDATE ceilings SET dir = '../work' WHERE session_id = ''"), "no such can be"},
		"no container":   {exec("UPDATE restarts SET container_id = '' WHERE container_id = 'a'"), "invalid"},
		"no number":      {exec("UPDATE files SET inode = 'x'"), "inode"},
	} {
		path := filepath.Join(t.TempDir(), "berm.db")
		content, err := os.ReadFile(sound)
		if err == nil {
			err = os.WriteFile(path, content, 0o600)
		}
		must(t, err)
		tt.harm(t, path)
		r, err := Check(t.Context(), path, dir)
		if tt.want == "" {
			if err != nil || r != filled {
				t.Errorf("%s: %+v, %v", name, r, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), tt.want) || r != (Report{}) {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	if r, err := Check(t.Context(), filepath.Join(dir, "none"), dir); err == nil {
		t.Errorf("no store: %+v", r)
	}
}

// ofVersion makes a database with an earlier schema.
func ofVersion(t *testing.T, path string, version int) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err == nil {
		err = inTx(t.Context(), db, func(tx *sql.Tx) error { return applyMigrations(t.Context(), tx, get(migrationNames())[:version], 0) })
	}
	must(t, err)
	return db
}

// A store of each earlier schema can be copied and checked, stays what it is, and can be opened.
func TestCheckOlder(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for version := 1; version <= filled.Schema; version++ {
		dir := t.TempDir()
		path, to := filepath.Join(dir, "berm.db"), filepath.Join(dir, "copy")
		db := ofVersion(t, path, version)
		r := record(uuid.NewString())
		must(t, (&Store{db: db}).Put(ctx, r))
		must(t, db.Close())
		must(t, Snapshot(ctx, path, to))
		want := Report{Schema: version, Sandboxes: 1}
		for range 2 {
			same(t, "the store", want, get(Check(ctx, path, dir)))
			same(t, "the copy", want, get(Check(ctx, to, dir)))
		}
		same(t, "restarts", []restart.Row(nil), get(ReadRestarts(ctx, path)))
		entries := get(os.ReadDir(dir))
		for _, e := range entries {
			if e.Name() != "berm.db" && e.Name() != "copy" {
				t.Errorf("%s is left", e.Name())
			}
		}
		for range 2 {
			s := open(t, path)
			if err := put(t, s, "a", "k", file("1", "x")); !errdefs.IsNotFound(err) || s.Fresh() {
				t.Errorf("a file without a chat: %v; fresh: %v", err, s.Fresh())
			}
			same(t, "sandboxes", []lifecycle.Sandbox{r}, records(t, s))
			must(t, s.Close())
		}
	}
}
