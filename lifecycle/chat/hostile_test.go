package chat_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle/chat"
)

// A sandbox plants things in its chat's directory: none is followed, opened or listed, no
// call waits for one, and another chat and what is outside stay as they are.
func TestPlanted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	outside := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(outside, []byte("secret"), 0o600))
	for name, plant := range map[string]func(w *world, path string) error{
		"link outside":    func(_ *world, path string) error { return os.Symlink(outside, path) },
		"link to a chat":  func(_ *world, path string) error { return os.Symlink("../other/secret", path) },
		"link inside":     func(_ *world, path string) error { return os.Symlink("good", path) },
		"dangling link":   func(_ *world, path string) error { return os.Symlink("../new", path) },
		"link to itself":  func(_ *world, path string) error { return os.Symlink(filepath.Base(path), path) },
		"fifo":            func(_ *world, path string) error { return unix.Mkfifo(path, 0o666) },
		"device":          func(_ *world, path string) error { return unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) },
		"socket":          func(_ *world, path string) error { return unix.Mknod(path, unix.S_IFSOCK|0o666, 0) },
		"directory":       func(_ *world, path string) error { return os.Mkdir(path, 0o755) },
		"empty directory": func(_ *world, path string) error { return os.Mkdir(path, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1<<20)
			w.ensure(tenant, "other")
			must(t, third(w.Put(ctx, tenant, "other", chat.PutFile{Name: "secret", Size: -1}, strings.NewReader("secret"))))
			w.put("good", "good")
			if err := plant(w, w.path("bad")); errors.Is(err, unix.EPERM) {
				t.Skip("can't be made here")
			} else if err != nil {
				t.Fatal(err)
			}
			before, err := os.Lstat(w.path("bad"))
			must(t, err)
			l, err := w.Files(ctx, tenant, chatID, "", 10)
			if err != nil || len(l.Files) != 1 {
				t.Errorf("listed %+v, %v", l, err)
			}
			for call, err := range map[string]error{
				"content": second(w.Content(ctx, tenant, chatID, "bad")),
				"named":   second(w.FileNamed(ctx, tenant, chatID, "bad")),
				"delete":  w.DeleteFile(ctx, tenant, chatID, "bad"),
			} {
				if !errorIs[*chat.FileError](err) || !errdefs.IsFailedPrecondition(err) {
					t.Errorf("%s: %v", call, err)
				}
			}
			if err := w.ReadTar(ctx, tenant, chatID, io.Discard); err != nil {
				t.Errorf("tar: %v", err)
			}
			if _, err := w.Check(ctx); err != nil {
				t.Error(err)
			}
			if n, err := w.DeleteFiles(ctx, tenant, chatID); n != 1 || err != nil {
				t.Errorf("deleted %d, %v", n, err)
			}
			if after, err := os.Lstat(w.path("bad")); err != nil || !os.SameFile(before, after) {
				t.Errorf("it has gone: %v", err)
			}
			// A file takes the place of what isn't a directory, and of nothing else.
			for i, put := range []func() error{
				func() error { return putOnly(w, "bad", "new") },
				func() error { return second(w.PutAll(ctx, tenant, chatID, several("a=a", "bad=new"))) },
			} {
				if err := put(); before.IsDir() {
					if !errorIs[*chat.FileError](err) || !errdefs.IsFailedPrecondition(err) {
						t.Errorf("written over: %v", err)
					}
				} else if b, rerr := os.ReadFile(w.path("bad")); err != nil || rerr != nil || string(b) != "new" {
					t.Errorf("after it was written there is %q, %v, %v", b, err, rerr)
				} else if err := errors.Join(os.Remove(w.path("bad")), plant(w, w.path("bad"))); err != nil && i == 0 {
					t.Fatal(err)
				}
			}
			if b, err := os.ReadFile(filepath.Join(w.root, "other", "secret")); err != nil || string(b) != "secret" {
				t.Errorf("the other chat's file: %q, %v", b, err)
			}
			if err := w.Delete(ctx, tenant, chatID); err != nil {
				t.Errorf("delete the chat: %v", err)
			}
			if b, err := os.ReadFile(outside); err != nil || string(b) != "secret" {
				t.Errorf("outside: %q, %v", b, err)
			}
			if _, err := os.Lstat(filepath.Join(w.root, "new")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a link was followed: %v", err)
			}
			w.checkSound()
		})
	}
}

func TestNamesOfSandboxes(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	for _, name := range []string{"ok", "back\\slash", "new\nline", "\xff\xfe", "del\x7f", ".dot"} {
		w.write(name, "x")
	}
	l, err := w.Files(ctx, tenant, chatID, "", 10)
	if err != nil || len(l.Files) != 2 {
		t.Errorf("%+v, %v", l, err)
	}
	if n, err := w.DeleteFiles(ctx, tenant, chatID); n != 2 || err != nil {
		t.Errorf("deleted %d, %v", n, err)
	}
	if err := w.Delete(ctx, tenant, chatID); err != nil {
		t.Error(err)
	}
	w.checkSound()
}

// A file has a second name in the same chat: each is a file, and a new one takes the place
// of one only.
func TestHardLink(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 10)
	w.put("a", "12345")
	must(t, os.Link(w.path("a"), w.path("b")))
	w.wantFiles("a", "b")
	w.put("a", "67890")
	if a, b := w.read("a"), w.read("b"); a != "67890" || b != "12345" {
		t.Errorf("a is %q, b is %q", a, b)
	}
	w.checkSound()
}

// Both names of a file go at once, and its bytes with them.
func TestHardLinksGo(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]func(w *world) error{
		"replaced": func(w *world) error {
			return second(w.PutAll(context.Background(), tenant, chatID, several("a=1", "b=2")))
		},
		"deleted": func(w *world) error { return second(w.DeleteFiles(context.Background(), tenant, chatID)) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 100)
			w.put("a", "12345")
			must(t, os.Link(w.path("a"), w.path("b")), remove(w))
			w.checkSound()
		})
	}
}

// A huge sparse file is no way to fill a quota, or to have it filled.
func TestSparse(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 1<<20)
	w.write("sparse", "")
	if err := os.Truncate(w.path("sparse"), 1<<40); err != nil {
		t.Skip(err)
	}
	f, err := w.FileNamed(ctx, tenant, chatID, "sparse")
	if err != nil || f.Size != 1<<40 {
		t.Errorf("%+v, %v", f, err)
	}
	wantError[*chat.TooLargeError](t, "tar", w.ReadTar(ctx, tenant, chatID, io.Discard))
	w.put("a", strings.Repeat("a", 1<<20))
	w.put("a", strings.Repeat("a", 1<<20-10))
	// It doesn't make way for more than it takes.
	if err := putOnly(w, "sparse", strings.Repeat("s", 11)); !errdefs.IsResourceExhausted(err) {
		t.Errorf("in its place: %v", err)
	}
	w.put("sparse", "small")
	w.checkSound()
}

// A directory with more files than are listed.
func TestBeyond(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	const most, more = 200, 50
	w.SetMost(most)
	for i := range most + more {
		w.write(fmt.Sprintf("f%06d", i), "")
	}
	l, err := w.Files(ctx, tenant, chatID, "", 10)
	if err != nil || len(l.Files) != 10 || !l.More || !l.Beyond {
		t.Errorf("%d files, more %v, beyond %v, %v", len(l.Files), l.More, l.Beyond, err)
	}
	if got := w.names(7); len(got) != most {
		t.Errorf("listed %d", len(got))
	}
	if n, err := w.DeleteFiles(ctx, tenant, chatID); n != most+more || err != nil {
		t.Errorf("deleted %d, %v", n, err)
	}
	for range 2*most + 1 {
		must(t, os.Mkdir(w.path(fmt.Sprint("d", len(l.Files))), 0o755))
		l.Files = append(l.Files, chat.File{})
	}
	if l, err := w.Files(ctx, tenant, chatID, "", 10); err != nil || !l.Beyond {
		t.Errorf("of many directories %+v, %v", l, err)
	}
	w.checkSound()
}

// No more files have records than may, whoever makes them; what has one can be replaced.
func TestMostFiles(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	w.SetMost(3)
	full := func(err error) bool { return errorIs[*chat.FileError](err) && errdefs.IsResourceExhausted(err) }
	w.put("a", "a")
	if _, err := w.PutAll(ctx, tenant, chatID, several("b=b", "c=c", "d=d")); !full(err) {
		t.Errorf("three more: %v", err)
	}
	if _, err := w.PutAll(ctx, tenant, chatID, several("a=A", "b=b", "c=c")); err != nil {
		t.Errorf("two more: %v", err)
	}
	if err := putOnly(w, "d", "d"); !full(err) {
		t.Errorf("one more: %v", err)
	}
	w.put("c", "C")
	w.write("0", "of a sandbox")
	wantError[*chat.FileNotFoundError](t, "a sandbox's", second(w.FileNamed(ctx, tenant, chatID, "0")))
	if got := w.names(10); len(got) > 3 {
		t.Errorf("listed %q", got)
	}
	must(t, w.DeleteFile(ctx, tenant, chatID, "b"))
	if f, err := w.FileNamed(ctx, tenant, chatID, "0"); err != nil || f.ID == "" {
		t.Errorf("a sandbox's, once there is room: %+v, %v", f, err)
	}
	w.checkSound()
}
