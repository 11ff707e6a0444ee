package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/cmd/berm/serve/storetest"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// lock locks a file or directory as another berm does.
func lock(t *testing.T, path string) (unlock func()) {
	t.Helper()
	f := check.Value(os.Open(path))(t)
	must(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB))
	return func() { _ = f.Close() }
}

func TestStoreCommands(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("TMPDIR", t.TempDir())
	id := storetest.Fill(t, filepath.Join(dir, "a"), "one", "two")
	storetest.Fill(t, filepath.Join(dir, "other"), "three")
	must(t, os.Mkdir("none", 0o700))
	for _, s := range []check.Step{
		{Args: "store check --state-dir a", Stdout: []string{"sound", id, "sandboxes: 2"}},
		{Args: "store backup --state-dir a", Code: 2, Stderr: []string{"arg"}},
		{Args: "store backup b.db --state-dir a", Stderr: []string{"backed up instance " + id, "sandboxes: 2"}},
		{Args: "store backup b.db --state-dir a", Code: 1, Stderr: []string{"b.db is there; --force"}},
		{Args: "store backup b.db --state-dir a --force", Stderr: []string{"backed up"}},
		{Args: "store backup a --state-dir a --force", Code: 1, Stderr: []string{"is no file"}},
		{Args: "store backup nosuch/b.db --state-dir a", Code: 1, Stderr: []string{"no such file"}},
		{Args: "store backup c.db --state-dir none", Code: 1, Stderr: []string{"no instance id"}},
		{Args: "store check b.db", Stdout: []string{"sound: a backup of 20", id, "sandboxes: 2"}},
		{Args: "store check -", Stdin: storetest.Read(t, "a/instance"), Code: 1, Stderr: []string{"read the backup"}},
		{Args: "store check nosuch", Code: 1, Stderr: []string{"no such file"}},
		{Args: "store check --state-dir none", Code: 1, Stderr: []string{"no instance id", "no such file"}},
		{Args: "store restore b.db --state-dir new", Stdout: []string{"restored into " + dir + "/new: a backup of 20", id, "sandboxes: 2"}},
		{Args: "store restore b.db --state-dir new", Code: 1, Stderr: []string{"isn't empty; --force"}},
		{Args: "store restore b.db --state-dir new --force", Stdout: []string{"what was there is kept in " + dir + "/new/replaced-20"}},
		{Args: "store restore b.db --state-dir other", Code: 1, Stderr: []string{"of another, whose sandboxes nobody would find"}},
		{Args: "store restore b.db --state-dir other --force", Stdout: []string{"kept in " + dir + "/other/replaced-20"}},
	} {
		s.Run(t, berm)
	}
	for _, name := range []string{"a", "new", "other"} {
		if got := storetest.Holds(t, name); got != id+" one two" {
			t.Errorf("%s holds %s", name, got)
		}
		if a, b := storetest.Read(t, filepath.Join("a", serve.StateSealKey)), storetest.Read(t, filepath.Join(name, serve.StateSealKey)); a != b {
			t.Errorf("%s has the seal key %s, want %s", name, b, a)
		}
		wantEmptyDir(t, filepath.Join(name, "scratch"))
	}
	wantEmptyDir(t, os.Getenv("TMPDIR"))
	if info, err := os.Stat("b.db"); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the backup: %v, %v", info, err)
	}
	kept, err := filepath.Glob("other/replaced-*")
	if err != nil || len(kept) != 1 || !strings.HasSuffix(storetest.Holds(t, kept[0]), " three") {
		t.Errorf("what was replaced: %q, %v", kept, err)
	}

	// By the standard streams.
	stdout, stderr, code := berm(t, "", "store", "backup", "-", "--state-dir", "a")
	if code != 0 {
		t.Fatal(stderr)
	}
	check.Step{Args: "store check -", Stdin: stdout, Stdout: []string{"sandboxes: 2"}}.Run(t, berm)
	check.Step{Args: "store restore - --state-dir piped", Stdin: stdout, Stdout: []string{"sandboxes: 2"}}.Run(t, berm)
	if left, err := filepath.Glob(".b.db*"); err != nil || left != nil {
		t.Errorf("left: %q, %v", left, err)
	}
}

// A configured instance is the backup's, too, and no file says another.
func TestBackupOfConfiguredInstance(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	storetest.Fill(t, filepath.Join(dir, "a"), "one")
	must(t, os.Remove("a/instance"))
	t.Setenv("BERM_ENGINE_INSTANCE", "mine")
	check.Step{Args: "store backup b.db --state-dir a", Stderr: []string{"instance mine"}}.Run(t, berm)
	check.Step{Args: "store restore b.db --state-dir b", Stdout: []string{"instance mine"}}.Run(t, berm)
	if _, err := os.Stat("b/instance"); !os.IsNotExist(err) {
		t.Errorf("the instance's file: %v", err)
	}
	t.Setenv("BERM_ENGINE_INSTANCE", "yours")
	check.Step{Args: "store restore b.db --state-dir c --force", Code: 1, Stderr: []string{"instance mine", "engine.instance is yours"}}.Run(t, berm)
	t.Setenv("BERM_ENGINE_INSTANCE", "")
	check.Step{Args: "store restore b.db --state-dir c --force", Code: 1, Stderr: []string{"set engine.instance"}}.Run(t, berm)
	if _, err := os.Stat("c/berm.db"); !os.IsNotExist(err) {
		t.Errorf("there is a store: %v", err)
	}
}

func TestStoreCommandsBesideOthers(t *testing.T) {
	t.Parallel() // it waits for the disk
	dir := t.TempDir()
	a, file := filepath.Join(dir, "a"), filepath.Join(dir, "b.db")
	id := storetest.Fill(t, a, "one")
	unlock := lock(t, filepath.Join(a, "lock"))
	check.Step{Args: "store backup " + file + " --state-dir " + a, Stderr: []string{"backed up"}}.Run(t, berm)
	check.Step{Args: "store check --state-dir " + a, Stdout: []string{"sound"}}.Run(t, berm)
	check.Step{Args: "store restore " + file + " --state-dir " + a + " --force", Code: 1, Stderr: []string{"another berm uses"}}.Run(t, berm)
	unlock()
	unlock = lock(t, filepath.Join(a, "scratch"))
	check.Step{Args: "store backup " + file + " --force --state-dir " + a, Code: 1, Stderr: []string{"another backup or restore"}}.Run(t, berm)
	check.Step{Args: "store restore " + file + " --state-dir " + a + " --force", Code: 1, Stderr: []string{"another backup or restore"}}.Run(t, berm)
	unlock()
	write(t, filepath.Join(a, "scratch", "left"), "by one that was killed")
	check.Step{Args: "store backup " + file + " --force --state-dir " + a, Stderr: []string{"backed up"}}.Run(t, berm)
	wantEmptyDir(t, filepath.Join(a, "scratch"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, args := range [][]string{{"backup", filepath.Join(dir, "c.db")}, {"restore", file, "--force"}} {
		var errs bytes.Buffer
		if code := run(ctx, append([]string{"store"}, append(args, "--state-dir", a)...), nil, io.Discard, &errs); code != 1 || !strings.Contains(errs.String(), "context canceled") {
			t.Errorf("%s is cut off: exit code %d, %s", args[0], code, &errs)
		}
		wantEmptyDir(t, filepath.Join(a, "scratch"))
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*c.db*")); err != nil || left != nil {
		t.Errorf("left: %q, %v", left, err)
	}
	must(t, os.Mkdir(filepath.Join(a, "restore"), 0o700))
	check.Step{Args: "store backup " + file + " --force --state-dir " + a, Code: 1, Stderr: []string{"was cut off"}}.Run(t, berm)
	check.Step{Args: "store check --state-dir " + a, Code: 1, Stderr: []string{"was cut off"}}.Run(t, berm)
	must(t, os.Remove(filepath.Join(a, "restore")))
	if got := storetest.Holds(t, a); got != id+" one" {
		t.Errorf("it holds %s", got)
	}
	if os.Geteuid() == 0 {
		must(t, os.Chown(a, 65532, 65532))
		check.Step{Args: "store backup " + file + " --force --state-dir " + a, Stderr: []string{"backed up"}}.Run(t, berm) // as in a volume that has its owner of the image
		for _, name := range []string{serve.StateStore, "lock"} {
			must(t, os.Chown(filepath.Join(a, name), 65532, 65532))
			for _, args := range []string{"backup " + file + " --force", "restore " + file + " --force", "check"} {
				check.Step{Args: "store " + args + " --state-dir " + a, Code: 1, Stderr: []string{a + "/" + name, "65532", "run this as that user"}}.Run(t, berm)
			}
			must(t, os.Chown(filepath.Join(a, name), 0, 0))
		}
	}
}

// To look at a stopped server's store takes no directory, and leaves none and no file.
func TestStoreCheckLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", filepath.Join(dir, "none"))
	a := filepath.Join(dir, "a")
	storetest.Fill(t, a)
	storetest.Holds(t, a) // and has closed it
	contents := func() map[string]string {
		all := map[string]string{}
		entries := check.Value(os.ReadDir(a))(t)
		for _, e := range entries {
			all[e.Name()] = storetest.Read(t, filepath.Join(a, e.Name()))
		}
		return all
	}
	before := contents()
	check.Step{Args: "store check --state-dir " + a, Stdout: []string{"sound"}}.Run(t, berm)
	if after := contents(); !maps.Equal(before, after) {
		t.Errorf("before there was %q, now %q", slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(after)))
	}
	check.Step{Args: "store check -", Code: 1, Stderr: []string{"no such file"}}.Run(t, berm)
}

// A command that waits for its input ends with a signal.
func TestRestoreIsInterrupted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, args := range [][]string{{"check", "-"}, {"restore", "-", "--state-dir", dir}} {
		in, typed := io.Pipe()
		ctx, cancel := context.WithCancelCause(t.Context())
		var errs bytes.Buffer
		done := make(chan int)
		go func() { done <- run(ctx, append([]string{"store"}, args...), in, io.Discard, &errs) }()
		if _, err := typed.Write([]byte("x")); err != nil { // it is reading
			t.Fatal(err)
		}
		cancel(errors.New("interrupted"))
		select {
		case code := <-done:
			if code != 1 || !strings.Contains(errs.String(), "interrupted") {
				t.Errorf("%s: exit code %d, %s", args[0], code, &errs)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s waits for more", args[0])
		}
		_ = typed.Close()
	}
	wantEmptyDir(t, filepath.Join(dir, "scratch"))
}

// Whatever isn't quite a backup is refused, and nothing is changed.
func TestRestoreRefuses(t *testing.T) {
	t.Parallel() // it waits for the disk
	dir := t.TempDir()
	a, file := filepath.Join(dir, "a"), filepath.Join(dir, "b.db")
	id := storetest.Fill(t, a, "one")
	check.Step{Args: "store backup " + file + " --state-dir " + a, Stderr: []string{"backed up"}}.Run(t, berm)
	data := storetest.Read(t, file)
	d := check.Value(store.Look(file))(t)
	// change returns the backup after SQL statements.
	change := func(statements string) string {
		path := filepath.Join(t.TempDir(), "changed.db")
		write(t, path, data)
		db, err := sql.Open("sqlite", path)
		if err == nil {
			_, err = db.Exec(statements)
			err = errors.Join(err, db.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		return storetest.Read(t, path)
	}
	plain := change("DROP TABLE backup")
	pack := func(manifest string, db string) string { // as earlier versions wrote backups
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, m := range [][2]string{{"manifest.json", manifest}, {"berm.db", db}} {
			must(t, w.WriteHeader(&tar.Header{Name: m[0], Size: int64(len(m[1])), Mode: 0o600}))
			if _, err := io.WriteString(w, m[1]); err != nil {
				t.Fatal(err)
			}
		}
		_ = w.Close()
		return b.String()
	}
	manifest := func(format int, key string) string {
		return fmt.Sprintf(`{"format": %d, "berm": "0.8", "schema": %d, "instance": %q, "seal_key": %q, "created": "2026-01-02T03:04:05Z", "members": [{"name": "berm.db", "size": %d, "sha256": "%x"}]}`,
			format, d.Known, id, key, len(plain), sha256.Sum256([]byte(plain)))
	}
	sealed := strings.Repeat("0b", lifecycle.SealKeyBytes)
	earlier := pack(manifest(2, sealed), plain)
	for name, tt := range map[string]struct{ backup, want string }{
		"nothing":          {"", "no table backup"},
		"text":             {strings.Repeat("x", 4096), "is no database"},
		"a store":          {plain, "no table backup"},
		"cut off":          {data[:len(data)/2], "malformed"},
		"damaged":          {data[:len(data)-8192] + strings.Repeat("x", 8192), "malformed"},
		"no row":           {change("DELETE FROM backup"), "read its table backup"},
		"a view":           {change("DROP TABLE backup; CREATE VIEW backup AS SELECT 1"), "isn't that of a backup"},
		"a trigger":        {change("CREATE TRIGGER x AFTER DELETE ON backup BEGIN DELETE FROM chats; END"), "isn't that of a backup"},
		"another's":        {change("CREATE TABLE more (x)"), "its tables aren't those"},
		"newer":            {change(fmt.Sprintf("PRAGMA user_version = %d", d.Known+1)), fmt.Sprintf("its schema is version %d, and this berm knows %d: use the newer berm", d.Known+1, d.Known)},
		"no instance":      {change("UPDATE backup SET instance = ''"), "doesn't say which server"},
		"odd instance":     {change("UPDATE backup SET instance = char(27)"), "doesn't say which server"},
		"bad seal key":     {change("UPDATE backup SET seal_key = '00'"), "not a seal key"},
		"tar, cut off":     {earlier[:len(earlier)/2], "unexpected EOF"},
		"tar, more":        {earlier + earlier, "there is more"},
		"tar, format":      {pack(manifest(3, sealed), plain), "its manifest isn't one"},
		"tar, no seal key": {pack(manifest(2, ""), plain), "its manifest isn't one"},
		"tar, bad key":     {pack(manifest(2, "00"), plain), "not a seal key"},
		"tar, database":    {pack(manifest(2, sealed), plain[:len(plain)-1]+"x"), "isn't what was backed up"},
		"tar, longer":      {pack(manifest(2, sealed), plain+"x"), "isn't the member"},
		"tar, no manifest": {pack("{}", plain), "its manifest isn't one"},
	} {
		before := storetest.Holds(t, a)
		_, stderr, code := berm(t, tt.backup, "store", "restore", "-", "--force", "--state-dir", a)
		if code != 1 || !strings.Contains(stderr, tt.want) {
			t.Errorf("%s: exit code %d, %s", name, code, stderr)
		}
		if _, stderr, code := berm(t, tt.backup, "store", "check", "-"); code != 1 || !strings.Contains(stderr, tt.want) {
			t.Errorf("%s is checked: exit code %d, %s", name, code, stderr)
		}
		if after := storetest.Holds(t, a); after != before {
			t.Errorf("%s: before there was %s, now %s", name, before, after)
		}
	}
	if left, err := filepath.Glob(filepath.Join(a, "re*")); err != nil || left != nil {
		t.Errorf("left: %q, %v", left, err)
	}

	// The backups of earlier versions are restored.
	for name, tt := range map[string]struct{ backup, key string }{
		"format 1": {pack(manifest(1, ""), plain), ""},
		"format 2": {earlier + strings.Repeat("\x00", 10240), sealed + "\n"},
	} {
		to := filepath.Join(dir, name)
		if _, stderr, code := berm(t, tt.backup, "store", "restore", "-", "--state-dir", to); code != 0 {
			t.Fatalf("%s: %s", name, stderr)
		}
		if got := storetest.Holds(t, to); got != id+" one" {
			t.Errorf("%s: it holds %s", name, got)
		}
		if key, _ := os.ReadFile(filepath.Join(to, serve.StateSealKey)); string(key) != tt.key {
			t.Errorf("%s: the seal key is %q", name, key)
		}
	}
}
