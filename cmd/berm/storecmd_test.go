package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/store"
)

// fillState makes a state directory whose store has sandboxes of the given keys, as a
// killed server leaves it, and answers its instance's id.
func fillState(t *testing.T, dir string, keys ...string) string {
	t.Helper()
	st, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	id, err := st.owner("")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.sealKey(); err != nil {
		t.Fatal(err)
	}
	live := filepath.Join(t.TempDir(), stateStore)
	s, err := store.Open(t.Context(), store.Options{Path: live})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	for _, key := range keys {
		if err := s.Put(t.Context(), lifecycle.Record{SessionID: uuid.NewString(), Tenant: "a", Key: key}); err != nil {
			t.Fatal(err)
		}
	}
	for _, suffix := range []string{"", "-wal"} {
		write(t, filepath.Join(dir, stateStore+suffix), string(slurp(t, live+suffix)))
	}
	return id
}

func slurp(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// stateHolds reads a state directory as the next server would: its instance, and its keys.
func stateHolds(t *testing.T, dir string) string {
	t.Helper()
	st, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	id, err := instanceOf(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(t.Context(), store.Options{Path: filepath.Join(dir, stateStore)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	records, err := s.Records(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	keys := []string{id}
	for _, r := range records {
		keys = append(keys, r.Key)
	}
	slices.Sort(keys[1:])
	return strings.Join(keys, " ")
}

func TestStoreCommands(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("TMPDIR", t.TempDir())
	id := fillState(t, filepath.Join(dir, "a"), "one", "two")
	fillState(t, filepath.Join(dir, "other"), "three")
	if err := os.Mkdir("none", 0o700); err != nil {
		t.Fatal(err)
	}
	for _, s := range []step{
		{args: "store check --state-dir a", stdout: []string{"sound", id, "sandboxes: 2"}},
		{args: "store backup --state-dir a", code: 2, stderr: []string{"arg"}},
		{args: "store backup b.tar --state-dir a", stderr: []string{"backed up instance " + id, "sandboxes: 2"}},
		{args: "store backup b.tar --state-dir a", code: 1, stderr: []string{"b.tar is there; --force"}},
		{args: "store backup b.tar --state-dir a --force", stderr: []string{"backed up"}},
		{args: "store backup a --state-dir a --force", code: 1, stderr: []string{"is no file"}},
		{args: "store backup nosuch/b.tar --state-dir a", code: 1, stderr: []string{"no such file"}},
		{args: "store backup c.tar --state-dir none", code: 1, stderr: []string{"no instance id"}},
		{args: "store check b.tar", stdout: []string{"sound: a backup of 20", id, "sandboxes: 2"}},
		{args: "store check -", stdin: string(slurp(t, "a/instance")), code: 1, stderr: []string{"read the backup"}},
		{args: "store check nosuch", code: 1, stderr: []string{"no such file"}},
		{args: "store check --state-dir none", code: 1, stderr: []string{"no instance id", "no such file"}},
		{args: "store restore b.tar --state-dir new", stdout: []string{"restored into " + dir + "/new: a backup of 20", id, "sandboxes: 2"}},
		{args: "store restore b.tar --state-dir new", code: 1, stderr: []string{"isn't empty; --force"}},
		{args: "store restore b.tar --state-dir new --force", stdout: []string{"what was there is kept in " + dir + "/new/replaced-20"}},
		{args: "store restore b.tar --state-dir other", code: 1, stderr: []string{"of another, whose sandboxes nobody would find"}},
		{args: "store restore b.tar --state-dir other --force", stdout: []string{"kept in " + dir + "/other/replaced-20"}},
	} {
		s.run(t)
	}
	for _, name := range []string{"a", "new", "other"} {
		if got := stateHolds(t, name); got != id+" one two" {
			t.Errorf("%s holds %s", name, got)
		}
		if a, b := slurp(t, filepath.Join("a", stateSealKey)), slurp(t, filepath.Join(name, stateSealKey)); string(a) != string(b) {
			t.Errorf("%s has the seal key %s, want %s", name, b, a)
		}
		wantEmptyDir(t, filepath.Join(name, stateScratch))
	}
	wantEmptyDir(t, os.Getenv("TMPDIR"))
	if info, err := os.Stat("b.tar"); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the backup: %v, %v", info, err)
	}
	kept, err := filepath.Glob("other/replaced-*")
	if err != nil || len(kept) != 1 || !strings.HasSuffix(stateHolds(t, kept[0]), " three") {
		t.Errorf("what was replaced: %q, %v", kept, err)
	}

	// By the standard streams.
	stdout, stderr, code := berm(t, "", "store", "backup", "-", "--state-dir", "a")
	if code != 0 {
		t.Fatal(stderr)
	}
	step{args: "store check -", stdin: stdout, stdout: []string{"sandboxes: 2"}}.run(t)
	step{args: "store restore - --state-dir piped", stdin: stdout, stdout: []string{"sandboxes: 2"}}.run(t)
	if left, err := filepath.Glob(".b.tar*"); err != nil || left != nil {
		t.Errorf("left: %q, %v", left, err)
	}
}

// A configured instance is the backup's, too, and no file says another.
func TestBackupOfConfiguredInstance(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	fillState(t, filepath.Join(dir, "a"), "one")
	if err := os.Remove("a/instance"); err != nil {
		t.Fatal(err)
	}
	t.Setenv("BERM_ENGINE_INSTANCE", "mine")
	step{args: "store backup b.tar --state-dir a", stderr: []string{"instance mine"}}.run(t)
	step{args: "store restore b.tar --state-dir b", stdout: []string{"instance mine"}}.run(t)
	if _, err := os.Stat("b/instance"); !os.IsNotExist(err) {
		t.Errorf("the instance's file: %v", err)
	}
	t.Setenv("BERM_ENGINE_INSTANCE", "yours")
	step{args: "store restore b.tar --state-dir c --force", code: 1, stderr: []string{"instance mine", "engine.instance is yours"}}.run(t)
	t.Setenv("BERM_ENGINE_INSTANCE", "")
	step{args: "store restore b.tar --state-dir c --force", code: 1, stderr: []string{"set engine.instance"}}.run(t)
	if _, err := os.Stat("c/berm.db"); !os.IsNotExist(err) {
		t.Errorf("there is a store: %v", err)
	}
}

func TestStoreCommandsBesideOthers(t *testing.T) {
	t.Parallel() // it waits for the disk
	dir := t.TempDir()
	a, file := filepath.Join(dir, "a"), filepath.Join(dir, "b.tar")
	id := fillState(t, a, "one")
	st, err := openState(a)
	if err != nil {
		t.Fatal(err)
	}
	step{args: "store backup " + file + " --state-dir " + a, stderr: []string{"backed up"}}.run(t)
	step{args: "store check --state-dir " + a, stdout: []string{"sound"}}.run(t)
	step{args: "store restore " + file + " --state-dir " + a + " --force", code: 1, stderr: []string{"another berm uses"}}.run(t)
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
	work, err := openScratch(a)
	if err != nil {
		t.Fatal(err)
	}
	step{args: "store backup " + file + " --force --state-dir " + a, code: 1, stderr: []string{"another backup or restore"}}.run(t)
	step{args: "store restore " + file + " --state-dir " + a + " --force", code: 1, stderr: []string{"another backup or restore"}}.run(t)
	if err := work.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(a, stateScratch, "left"), "by one that was killed")
	step{args: "store backup " + file + " --force --state-dir " + a, stderr: []string{"backed up"}}.run(t)
	wantEmptyDir(t, filepath.Join(a, stateScratch))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, args := range [][]string{{"backup", filepath.Join(dir, "c.tar")}, {"restore", file, "--force"}} {
		var errs bytes.Buffer
		if code := run(ctx, append([]string{"store"}, append(args, "--state-dir", a)...), nil, io.Discard, &errs); code != 1 || !strings.Contains(errs.String(), "context canceled") {
			t.Errorf("%s is cut off: exit code %d, %s", args[0], code, &errs)
		}
		wantEmptyDir(t, filepath.Join(a, stateScratch))
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*c.tar*")); err != nil || left != nil {
		t.Errorf("left: %q, %v", left, err)
	}
	if err := os.Mkdir(filepath.Join(a, statePending), 0o700); err != nil {
		t.Fatal(err)
	}
	step{args: "store backup " + file + " --force --state-dir " + a, code: 1, stderr: []string{"was cut off"}}.run(t)
	step{args: "store check --state-dir " + a, code: 1, stderr: []string{"was cut off"}}.run(t)
	if got := stateHolds(t, a); got != id+" one" {
		t.Errorf("it holds %s", got)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(a, 65532, 65532); err != nil {
			t.Fatal(err)
		}
		step{args: "store backup " + file + " --force --state-dir " + a, stderr: []string{"backed up"}}.run(t) // as in a volume that has its owner of the image
		for _, name := range []string{stateStore, "lock"} {
			if err := os.Chown(filepath.Join(a, name), 65532, 65532); err != nil {
				t.Fatal(err)
			}
			for _, args := range []string{"backup " + file + " --force", "restore " + file + " --force", "check"} {
				step{args: "store " + args + " --state-dir " + a, code: 1, stderr: []string{a + "/" + name, "65532", "run this as that user"}}.run(t)
			}
			if err := os.Chown(filepath.Join(a, name), 0, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// To look at a stopped server's store takes no directory, and leaves none and no file.
func TestStoreCheckLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", filepath.Join(dir, "none"))
	a := filepath.Join(dir, "a")
	st, err := openState(a)
	if err != nil {
		t.Fatal(err)
	}
	_, err = st.owner("")
	if err = errors.Join(err, st.Close()); err != nil {
		t.Fatal(err)
	}
	stateHolds(t, a) // and has closed it
	contents := func() map[string]string {
		all := map[string]string{}
		entries, err := os.ReadDir(a)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			all[e.Name()] = string(slurp(t, filepath.Join(a, e.Name())))
		}
		return all
	}
	before := contents()
	step{args: "store check --state-dir " + a, stdout: []string{"sound"}}.run(t)
	if after := contents(); !maps.Equal(before, after) {
		t.Errorf("before there was %q, now %q", slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(after)))
	}
	step{args: "store check -", code: 1, stderr: []string{"no such file"}}.run(t)
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
	wantEmptyDir(t, filepath.Join(dir, stateScratch))
}

// Whatever isn't quite a backup is refused, and nothing is changed.
func TestRestoreRefuses(t *testing.T) {
	t.Parallel() // it waits for the disk
	dir := t.TempDir()
	a, file := filepath.Join(dir, "a"), filepath.Join(dir, "b.tar")
	fillState(t, a, "one")
	step{args: "store backup " + file + " --state-dir " + a, stderr: []string{"backed up"}}.run(t)
	data := slurp(t, file)
	var m manifest
	members := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if members[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := json.Unmarshal(members[manifestName], &m); err != nil || len(members) != 2 || time.Since(m.Created) > time.Hour {
		t.Fatalf("%+v, %v", m, err)
	}
	pack := func(parts ...string) string { // name, content, name, content…
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for i := 0; i < len(parts); i += 2 {
			h := &tar.Header{Name: parts[i], Size: int64(len(parts[i+1]))}
			if err := errors.Join(w.WriteHeader(h), second(io.WriteString(w, parts[i+1]))); err != nil {
				t.Fatal(err)
			}
		}
		_ = w.Close()
		return b.String()
	}
	// What a member with holes says of itself, 1 TiB of them here, is in a header before its own.
	holes := func(name, records string) string {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		var pax strings.Builder
		for _, r := range strings.Fields(records) {
			n := len(r) + 4 // the length has two digits
			fmt.Fprintf(&pax, "%d %s\n", n, r)
		}
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: "pax", Size: int64(pax.Len())}), second(io.WriteString(w, pax.String())),
			w.Flush(), w.WriteHeader(&tar.Header{Name: name})); err != nil {
			t.Fatal(err)
		}
		data := b.Bytes()
		data[156] = tar.TypeXHeader // which can't be written as such
		sum := 0
		copy(data[148:156], "        ")
		for _, c := range data[:512] {
			sum += int(c)
		}
		copy(data[148:], fmt.Sprintf("%06o\x00 ", sum))
		return string(data)
	}
	db, head := string(members[stateStore]), string(members[manifestName])
	_, known, err := store.Look(filepath.Join(a, stateStore))
	if err != nil {
		t.Fatal(err)
	}
	newer := db[:60] + string([]byte{0, 0, 0, byte(known + 1)}) + db[64:] // where a database has its schema's version
	with := func(db string, change func(*manifest)) string {
		m := m
		m.Members = slices.Clone(m.Members)
		change(&m)
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return pack(manifestName, string(b), stateStore, db)
	}
	for name, tt := range map[string]struct{ backup, want string }{
		"nothing":          {"", "manifest.json is missing"},
		"no tar":           {strings.Repeat("x", 4096), "invalid tar header"},
		"a database":       {db, "invalid tar header"},
		"cut off":          {string(data[:len(data)/2]), "unexpected EOF"},
		"no database":      {pack(manifestName, head), "berm.db is missing"},
		"other order":      {pack(stateStore, db, manifestName, head), `there is "berm.db" where manifest.json should be`},
		"another member":   {pack(manifestName, head, "../berm.db", db), `there is "../berm.db"`},
		"one more":         {pack(manifestName, head, stateStore, db, "x", ""), "there is more"},
		"holes":            {holes(manifestName, "GNU.sparse.major=0 GNU.sparse.minor=1 GNU.sparse.size=1099511627776 GNU.sparse.map=1099511627776,0 GNU.sparse.numblocks=1"), "manifest.json has holes"},
		"holes in another": {holes("x", "GNU.sparse.major=0 GNU.sparse.minor=1 GNU.sparse.name=manifest.json GNU.sparse.size=1099511627776 GNU.sparse.map=1099511627776,0 GNU.sparse.numblocks=1"), "manifest.json has holes"},
		"more at the end":  {string(data) + "x", "there is more"},
		"another backup":   {string(data) + string(data), "there is more"},
		"a longer one":     {pack(manifestName, head, stateStore, db+"x"), "bytes, want"},
		"another database": {pack(manifestName, head, stateStore, db[:len(db)-1]+"x"), "isn't what was backed up"},
		"long manifest":    {pack(manifestName, head+strings.Repeat(" ", maxManifest)), "more than"},
		"no manifest":      {pack(manifestName, "{}", stateStore, db), "manifest.json"},
		"unknown field":    {pack(manifestName, `{"x": 1, `+head[1:], stateStore, db), `"x"`},
		"newer format":     {with(db, func(m *manifest) { m.Format = 3 }), "its format is 3, and this berm knows 2: use the newer berm"},
		"no seal key":      {with(db, func(m *manifest) { m.SealKey = "" }), "not one of a backup"},
		"bad seal key":     {with(db, func(m *manifest) { m.SealKey = "00" }), "not one of a backup"},
		"earlier, sealed":  {with(db, func(m *manifest) { m.Format = 1 }), "not one of a backup"},
		"newer and other":  {pack(manifestName, `{"format": 3, "x": 1}`), "use the newer berm"},
		"newer schema": {with(newer, func(m *manifest) {
			m.Schema, m.Members[0].SHA256 = known+1, fmt.Sprintf("%x", sha256.Sum256([]byte(newer)))
		}), fmt.Sprintf("its schema is version %d, and this berm knows %d: use the newer berm", known+1, known)},
		"other schema": {with(db, func(m *manifest) { m.Schema = 1 }), "says schema 1"},
		"no instance":  {with(db, func(m *manifest) { m.Instance = "" }), "not one of a backup"},
		"odd instance": {with(db, func(m *manifest) { m.Instance = "\x1b[2J" }), "not one of a backup"},
		"no members":   {with(db, func(m *manifest) { m.Members = nil }), "not one of a backup"},
		"other member": {with(db, func(m *manifest) { m.Members[0].Name = "x" }), "not one of a backup"},
		"other size":   {with(db, func(m *manifest) { m.Members[0].Size++ }), "bytes, want"},
		"other sum":    {with(db, func(m *manifest) { m.Members[0].SHA256 = "" }), "isn't what was backed up"},
	} {
		before := stateHolds(t, a)
		_, stderr, code := berm(t, tt.backup, "store", "restore", "-", "--force", "--state-dir", a)
		if code != 1 || !strings.Contains(stderr, tt.want) {
			t.Errorf("%s: exit code %d, %s", name, code, stderr)
		}
		if _, stderr, code := berm(t, tt.backup, "store", "check", "-"); code != 1 || !strings.Contains(stderr, tt.want) {
			t.Errorf("%s is checked: exit code %d, %s", name, code, stderr)
		}
		if after := stateHolds(t, a); after != before {
			t.Errorf("%s: before there was %s, now %s", name, before, after)
		}
	}
	step{args: "store check -", stdin: string(data) + strings.Repeat("\x00", 10240), stdout: []string{"sound"}}.run(t) // as tar fills up
	if left, err := filepath.Glob(filepath.Join(a, "re*")); err != nil || left != nil {
		t.Errorf("left: %q, %v", left, err)
	}
}

// Wherever a restore is cut off, the next process finds the old store or the new one, each
// with its own instance, and the old one isn't lost.
func TestRestoreCutOff(t *testing.T) {
	t.Parallel() // it waits for the disk
	dir := t.TempDir()
	from, file := filepath.Join(dir, "from"), filepath.Join(dir, "b.tar")
	fillState(t, from, "backed", "up")
	step{args: "store backup " + file + " --state-dir " + from, stderr: []string{"backed up"}}.run(t)
	fresh := stateHolds(t, from)
	stop := errors.New("cut off")
	for n := 0; ; n++ {
		to := filepath.Join(dir, fmt.Sprint(n))
		fillState(t, to, "old")
		old := stateHoldsCopy(t, to)
		backup, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		done := 0
		_, err = restoreState(t.Context(), to, "", backup, true, func(from, to string) error {
			if done == n {
				return stop
			}
			done++
			return os.Rename(from, to)
		})
		_ = backup.Close()
		want := fresh
		if n == 0 {
			want = old
		}
		if err != nil && n > 0 {
			// Who tries again hears what has been done, whatever becomes of that.
			if !strings.Contains(err.Error(), "the next restore, puts it there first") {
				t.Error(err)
			}
			_, stderr, code := berm(t, "", "store", "restore", "-", "--state-dir", to)
			if code != 1 || !strings.Contains(stderr, "a restore that was cut off has been finished, and what was there is kept in "+to+"/"+stateReplaced) ||
				!strings.Contains(stderr, "another one: read the backup") {
				t.Errorf("after %d steps and one more restore: exit code %d, %s", n, code, stderr)
			}
		}
		if got := stateHolds(t, to); got != want {
			t.Errorf("after %d steps it holds %s, want %s (old %s, new %s)", n, got, want, old, fresh)
		}
		kept, globErr := filepath.Glob(filepath.Join(to, stateReplaced+"*"))
		if globErr != nil || len(kept) != min(n, 1) {
			t.Errorf("after %d steps there is %q, %v", n, kept, globErr)
		} else if n > 0 {
			if got := stateHolds(t, kept[0]); got != old {
				t.Errorf("after %d steps %s is kept, want %s", n, got, old)
			}
		}
		wantEmptyDir(t, filepath.Join(to, stateScratch))
		if err == nil {
			if n < 6 {
				t.Errorf("it took %d steps only", n)
			}
			return
		}
		if !errors.Is(err, stop) {
			t.Fatal(err)
		}
	}
}

// A restore into an empty directory that is cut off is finished by the next one, which says so.
func TestRestoreAfterCutOff(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from, to, file := filepath.Join(dir, "from"), filepath.Join(dir, "to"), filepath.Join(dir, "b.tar")
	fillState(t, from, "backed", "up")
	step{args: "store backup " + file + " --state-dir " + from, stderr: []string{"backed up"}}.run(t)
	cutOff := func() {
		t.Helper()
		steps := 0
		_, err := restoreState(t.Context(), to, "", bytes.NewReader(slurp(t, file)), true, func(from, to string) error {
			if steps++; steps > 1 {
				return errors.New("cut off")
			}
			return os.Rename(from, to)
		})
		if err == nil {
			t.Fatal("it wasn't cut off")
		}
	}
	cutOff()
	step{args: "store restore " + file + " --state-dir " + to, code: 1, stderr: []string{"a restore that was cut off has been finished; another one: ", "isn't empty; --force"}}.run(t)
	cutOff()
	step{args: "store restore " + file + " --state-dir " + to + " --force", stdout: []string{
		"a restore that was cut off has been finished, and what was there is kept in " + to + "/replaced-20", "restored into " + to, "\nwhat was there is kept in " + to + "/replaced-20",
	}}.run(t)
	if got, want := stateHolds(t, to), stateHolds(t, from); got != want {
		t.Errorf("it holds %s, want %s", got, want)
	}
}

// stateHoldsCopy is stateHolds without a trace.
func stateHoldsCopy(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(filepath.Join(to, "state"), os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return stateHolds(t, filepath.Join(to, "state"))
}
