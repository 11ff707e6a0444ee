package chat_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle/chat"
)

// operations change a chat from a state to another. What is written takes its place between
// the steps "recorded" and "merged".
var operations = map[string]struct {
	do    func(w *world) error
	after map[string]string // what differs from before; empty: it isn't there
	steps []string          // nil: all of what is written
}{
	"put": {
		do:    func(w *world) error { return putOnly(w, "new", "new") },
		after: map[string]string{"new": "new"},
	},
	"replace": {
		do:    func(w *world) error { return putOnly(w, "a", "other, longer") },
		after: map[string]string{"a": "other, longer"},
	},
	"put all": {
		do: func(w *world) error {
			return second(w.PutAll(context.Background(), tenant, chatID, several("a=A", "n1=1", "n2=2", "n3=3")))
		},
		after: map[string]string{"a": "A", "n1": "1", "n2": "2", "n3": "3"},
	},
	"append": {
		do: func(w *world) error {
			return second(w.AppendHistory(context.Background(), tenant, chatID, -1, strings.NewReader("said more")))
		},
		after: map[string]string{"history.md": "said\nsaid more"},
	},
	"tar": {
		do: func(w *world) error {
			var archive strings.Builder
			if err := w.ReadTar(context.Background(), tenant, "model", &archive); err != nil {
				return err
			}
			return w.WriteTar(context.Background(), tenant, chatID, strings.NewReader(archive.String()))
		},
		after: map[string]string{"a": "from tar", "d/e/f": "deep", "d/kept": "kept", "history.md": ""},
	},
	"delete file": {
		do:    func(w *world) error { return w.DeleteFile(context.Background(), tenant, chatID, "a") },
		after: map[string]string{"a": "gone"},
		steps: []string{"unlinked"},
	},
	"delete files": {
		do:    func(w *world) error { return second(w.DeleteFiles(context.Background(), tenant, chatID)) },
		after: map[string]string{"a": "gone", "b": "gone"},
		steps: []string{"unlinked"},
	},
	"delete chat": {
		do:    func(w *world) error { return w.Delete(context.Background(), tenant, chatID) },
		after: map[string]string{"a": "gone", "b": "gone", "d/kept": "gone", "history.md": ""},
		steps: []string{"deleting", "moved_away"},
	},
}

func putOnly(w *world, name, content string) error {
	_, _, err := w.Put(context.Background(), tenant, chatID, chat.PutFile{Name: name, Size: -1}, strings.NewReader(content))
	return err
}

var before = map[string]string{"a": "a", "b": "b", "d/kept": "kept", "history.md": "said\n"}

func prepare(t *testing.T, dir string) {
	w := openWorld(t, dir, 1<<20, nil)
	w.ensure(tenant, chatID)
	w.put("a", "a")
	w.put("b", "b")
	must(t, second(w.PutHistory(context.Background(), tenant, chatID, -1, strings.NewReader("said\n"))))
	must(t, os.Mkdir(w.path("d"), 0o755))
	w.write("d/kept", "kept")
	w.ensure(tenant, "model")
	model := filepath.Join(w.root, "model")
	for _, err := range []error{
		os.MkdirAll(filepath.Join(model, "d", "e"), 0o755), os.WriteFile(filepath.Join(model, "d", "e", "f"), []byte("deep"), 0o644),
		os.WriteFile(filepath.Join(model, "a"), []byte("from tar"), 0o644),
	} {
		must(t, err)
	}
	must(t, second(w.Check(context.Background())))
	_ = w.db.Close()
}

// state is all that a chat's directory holds.
func (w *world) state() map[string]string {
	state := map[string]string{}
	err := filepath.WalkDir(w.path(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(w.path(), path)
		state[rel] = string(b)
		return err
	})
	must(w.t, err)
	return state
}

func afterwards(changes map[string]string) map[string]string {
	state := maps.Clone(before)
	for name, content := range changes {
		if state[name] = content; content == "gone" {
			delete(state, name)
		}
	}
	return state
}

const crashVariable = "BERM_CHAT_CRASH" // DIR:OPERATION:STEP

// TestCrashing is the process that dies; without the variable it does nothing.
func TestCrashing(t *testing.T) {
	spec := os.Getenv(crashVariable)
	if spec == "" {
		t.Skip("is run by TestCrash")
	}
	parts := strings.Split(spec, ":")
	w := openWorld(t, parts[0], 1<<20, func(step string) error {
		switch parts[2] {
		case step:
			os.Exit(7)
		case step + " half":
			// As if it had come to half of its files.
			staged, err := filepath.Glob(filepath.Join(parts[0], "chats", ".staging", "*", "*"))
			if err != nil || len(staged) < 2 {
				t.Fatalf("staged: %q, %v", staged, err)
			}
			for _, path := range staged[:len(staged)/2] {
				must(t, os.Rename(path, filepath.Join(parts[0], "chats", chatID, filepath.Base(path))))
			}
			os.Exit(7)
		}
		return nil
	})
	t.Fatalf("it lives: %v", operations[parts[1]].do(w))
}

// The process dies at each step: what comes after it finds the old or the new state, whole.
func TestCrash(t *testing.T) {
	t.Parallel()
	model := t.TempDir()
	prepare(t, model)
	for name, op := range operations {
		steps := op.steps
		if steps == nil {
			steps = chat.Steps()
		}
		if name == "put all" {
			steps = append(steps, "recorded half")
		}
		for _, step := range steps {
			t.Run(name+" "+step, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				must(t, os.CopyFS(dir, os.DirFS(model)))
				cmd := exec.Command(os.Args[0], "-test.run=^TestCrashing$")
				cmd.Env = append(os.Environ(), crashVariable+"="+strings.Join([]string{dir, name, step}, ":"))
				out, err := cmd.CombinedOutput()
				if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 7 {
					t.Fatalf("%v: %s", err, out)
				}
				want := afterwards(op.after)
				if step == "staged" || step == "reserved" || step == "recorded" || step == "deleting" {
					want = before
				}
				w := openWorld(t, dir, 1<<20, nil)
				if step == "moved_away" { // all of it is gone, or nothing
					if c, err := w.Get(context.Background(), tenant, chatID); !errorIs[*chat.NotFoundError](err) {
						t.Errorf("of a deleted chat there is %+v, %v", c, err)
					}
					w.ensure(tenant, chatID)
				}
				r, err := w.Check(context.Background())
				if err != nil || r.Failed > 0 {
					t.Errorf("check: %+v, %v", r, err)
				}
				if got := w.state(); step == "recorded half" { // each file is whole
					for name, content := range got {
						if content != before[name] && content != want[name] {
							t.Errorf("%s is %q", name, content)
						}
					}
				} else if diff := cmp.Diff(want, got); diff != "" {
					t.Error(diff)
				}
				w.checkSound()
			})
		}
	}
}

// A step fails in a process that lives on: the change is there or not, and the next one
// isn't in its way.
func TestFailure(t *testing.T) {
	t.Parallel()
	model := t.TempDir()
	prepare(t, model)
	broken := errors.New("broken")
	for name, op := range operations {
		if op.steps != nil {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, step := range chat.Steps() {
				dir := t.TempDir()
				must(t, os.CopyFS(dir, os.DirFS(model)))
				fail := true
				w := openWorld(t, dir, 1<<20, func(at string) error {
					if fail && at == step {
						return broken
					}
					return nil
				})
				if err := op.do(w); !errors.Is(err, broken) {
					t.Fatalf("%s: %v", step, err)
				}
				want := afterwards(op.after)
				if step != "merged" {
					want = before
				}
				if diff := cmp.Diff(want, w.state()); diff != "" {
					t.Errorf("%s: at once: %s", step, diff)
				}
				fail = false
				w.put("later", "later")
				want = maps.Clone(want)
				want["later"] = "later"
				if diff := cmp.Diff(want, w.state()); diff != "" {
					t.Errorf("%s: %s", step, diff)
				}
				w.checkSound()
			}
		})
	}
}

// A content type is that of the file that is there, however often replacing it fails.
func TestContentType(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	dir := t.TempDir()
	broken := errors.New("broken")
	fail := ""
	at := func(step string) error {
		if step == fail {
			return broken
		}
		return nil
	}
	w := openWorld(t, dir, 0, at)
	w.ensure(tenant, chatID)
	put := func(kind string, want error) {
		t.Helper()
		_, _, err := w.Put(ctx, tenant, chatID, chat.PutFile{Name: "a", ContentType: kind, Size: -1}, strings.NewReader(kind))
		if !errors.Is(err, want) {
			t.Fatal(err)
		}
	}
	want := func(kind, content string) {
		t.Helper()
		for range 2 { // and in the next process
			f, err := w.FileNamed(ctx, tenant, chatID, "a")
			if got := w.read("a"); err != nil || f.ContentType != kind || got != content {
				t.Errorf("%q of %q, %v; want %q of %q", f.ContentType, got, err, kind, content)
			}
			_ = w.db.Close()
			w = openWorld(t, dir, 0, at)
			if _, err := w.Check(ctx); err != nil {
				t.Error(err)
			}
		}
	}
	w.write("b", "another") // before any other file ends: a file system may use its inode again
	put("text/old", nil)
	for _, fail = range []string{"recorded", "recorded"} {
		put("text/new", broken)
		want("text/old", "text/old")
	}
	fail = "merged"
	put("text/new", broken)
	fail = ""
	want("text/new", "text/new")
	w.write("a", "in place")
	want("text/new", "in place")
	must(t, os.Rename(w.path("b"), w.path("a")))
	want("", "another")

	// A new file gets the inode of the one that it takes the place of.
	put("text/new", nil)
	was, err := os.Stat(w.path("a"))
	must(t, err, os.Remove(w.path("a")))
	for i := range 1000 {
		name := fmt.Sprint("anew", i)
		w.write(name, "anew")
		if is, err := os.Stat(w.path(name)); err == nil && os.SameFile(was, is) {
			must(t, os.Rename(w.path(name), w.path("a")))
			want("", "anew")
			return
		}
	}
	t.Skip("the file system uses no inode again")
}

// A deletion that fails leaves the chat and its records as they were, also for the next
// process.
func TestFailedDeletion(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for _, at := range []string{"deleting", "moved_away"} {
		dir := t.TempDir()
		prepare(t, dir)
		w := openWorld(t, dir, 1<<20, func(step string) error {
			if step == at {
				return broken
			}
			return nil
		})
		file, err := w.FileNamed(context.Background(), tenant, chatID, "a")
		must(t, err)
		if err := w.Delete(context.Background(), tenant, chatID); !errors.Is(err, broken) {
			t.Errorf("%s: %v", at, err)
		}
		for range 2 {
			if got, err := w.File(context.Background(), tenant, file.ID); err != nil || got != file {
				t.Errorf("%s: %+v, %v", at, got, err)
			}
			if diff := cmp.Diff(before, w.state()); diff != "" {
				t.Errorf("%s: %s", at, diff)
			}
			w.checkSound()
			_ = w.db.Close()
			w = openWorld(t, dir, 1<<20, nil)
		}
	}
}

// A chat that was made again isn't the one that an earlier process has moved away.
func TestMadeAgain(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	dir := t.TempDir()
	prepare(t, dir)
	staging := filepath.Join(dir, "chats", ".staging")
	must(t, os.MkdirAll(filepath.Join(staging, "away-x", tenant, chatID, "d"), 0o700))
	w := openWorld(t, dir, 1<<20, nil)
	if r, err := w.Check(ctx); err != nil || r.Removed != 1 || r.Finished != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if diff := cmp.Diff(before, w.state()); diff != "" {
		t.Error(diff)
	}
	w.checkSound()
}

// Nothing could be moved at all: the chat goes on.
func TestNothingMoved(t *testing.T) {
	t.Parallel()
	var w *world
	lost := false
	w = openWorld(t, t.TempDir(), 0, func(step string) error {
		if step == "recorded" && !lost {
			lost = true
			return os.RemoveAll(w.path())
		}
		return nil
	})
	w.ensure(tenant, chatID)
	if err := putOnly(w, "a", "a"); err == nil {
		t.Error("no error")
	}
	w.put("b", "b")
	if diff := cmp.Diff(map[string]string{"b": "b", "history.md": ""}, w.state()); diff != "" {
		t.Error(diff)
	}
	w.checkSound()
}

// A sandbox puts a directory in the way when it is too late to refuse the change: the rest
// comes, and the call says so.
func TestLateClash(t *testing.T) {
	t.Parallel()
	var w *world
	w = openWorld(t, t.TempDir(), 0, func(step string) error {
		if step == "recorded" {
			return os.Mkdir(w.path("b"), 0o755)
		}
		return nil
	})
	w.ensure(tenant, chatID)
	wantError[*chat.FileError](t, "error", second(w.PutAll(context.Background(), tenant, chatID, several("a=a", "b=b"))))
	// The order in which they are moved is the file system's.
	if got := w.names(10); len(got) > 1 || len(got) == 1 && got[0] != "a" {
		t.Errorf("files %q", got)
	}
	must(t, os.Remove(w.path("b")))
	w.checkSound()
}
