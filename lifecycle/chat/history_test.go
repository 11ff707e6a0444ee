package chat_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
)

func TestHistory(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 100)
	if got := w.history(); got != "" {
		t.Errorf("a new chat's is %q", got)
	}
	f, err := w.PutHistory(ctx, tenant, chatID, 4, strings.NewReader("one\n"))
	if err != nil || f.Size != 4 || f.ID != "" || f.ModifiedAt.IsZero() {
		t.Fatalf("%+v, %v", f, err)
	}
	f, err = w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader("two\n"))
	if err != nil || f.Size != 8 {
		t.Fatalf("%+v, %v", f, err)
	}
	for name, err := range map[string]error{
		"short":  second(w.AppendHistory(ctx, tenant, chatID, 5, strings.NewReader("four"))),
		"long":   second(w.PutHistory(ctx, tenant, chatID, 3, strings.NewReader("four"))),
		"quota":  second(w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader(strings.Repeat("x", 93)))),
		"quota2": second(w.PutHistory(ctx, tenant, chatID, 101, strings.NewReader(strings.Repeat("x", 101)))),
		"chat":   second(w.PutHistory(ctx, tenant, "none", 1, strings.NewReader("x"))),
	} {
		var ok bool
		switch name {
		case "chat":
			ok = errorIs[*chat.NotFoundError](err)
		case "quota", "quota2":
			ok = errorIs[*quota.FullError](err)
		default:
			ok = errorIs[*lifecycle.InvalidError](err)
		}
		if !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := w.history(); got != "one\ntwo\n" {
		t.Errorf("it is %q", got)
	}
	w.checkSound()
	// It fills the quota to the last byte, and what makes way counts.
	if _, err := w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader(strings.Repeat("x", 92))); err != nil {
		t.Error(err)
	}
	if _, err := w.PutHistory(ctx, tenant, chatID, 100, strings.NewReader(strings.Repeat("y", 100))); err != nil {
		t.Error(err)
	}
	w.wantFiles()
	w.checkSound()
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestHistoryLimit(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	for name, err := range map[string]error{
		"told":     second(w.PutHistory(ctx, tenant, chatID, chat.MaxHistory+1, endless{})),
		"not told": second(w.PutHistory(ctx, tenant, chatID, -1, endless{})),
	} {
		if !errorIs[*chat.TooLargeError](err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.Truncate(w.path(chat.HistoryName), chat.MaxHistory); err != nil { // by a sandbox
		t.Fatal(err)
	}
	wantError[*chat.TooLargeError](t, "appended to one that is full", second(w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader("x"))))
	if fi, err := os.Stat(w.path(chat.HistoryName)); err != nil || fi.Size() != chat.MaxHistory {
		t.Errorf("%v, %v", fi, err)
	}
}

// Appends of one chat don't lose each other.
func TestAppendTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for j := range 5 {
				if _, err := w.AppendHistory(context.Background(), tenant, chatID, -1, strings.NewReader(fmt.Sprintf("%d-%d\n", i, j))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	lines := strings.Fields(w.history())
	last := map[byte]byte{}
	for _, l := range lines {
		if l[2] < last[l[0]] {
			t.Errorf("%q is out of order", l)
		}
		last[l[0]] = l[2]
	}
	if len(lines) != 40 {
		t.Errorf("%d of 40 entries", len(lines))
	}
	w.checkSound()
}

// What a sandbox puts in the place of the history is never followed or waited for.
func TestHistoryReplaced(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	secret := t.TempDir() + "/secret"
	must(t, os.WriteFile(secret, []byte("secret"), 0o600))
	for name, tt := range map[string]struct {
		plant func(path string) error
		put   bool // it can be replaced
	}{
		"link":      {func(path string) error { return os.Symlink(secret, path) }, true},
		"fifo":      {func(path string) error { return unix.Mkfifo(path, 0o666) }, true},
		"directory": {func(path string) error { return os.Mkdir(path, 0o755) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 0)
			must(t, os.Remove(w.path(chat.HistoryName)))
			must(t, tt.plant(w.path(chat.HistoryName)))
			wantError[*chat.FileError](t, "read", second(w.History(ctx, tenant, chatID)))
			if _, err := w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader("x")); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("appended: %v", err)
			}
			_, err := w.PutHistory(ctx, tenant, chatID, -1, strings.NewReader("new"))
			if !tt.put {
				if !errdefs.IsFailedPrecondition(err) {
					t.Errorf("put: %v", err)
				}
				return
			}
			if err != nil || w.history() != "new" {
				t.Errorf("put: %v", err)
			}
			w.checkSound()
		})
	}
	if b, err := os.ReadFile(secret); err != nil || !bytes.Equal(b, []byte("secret")) {
		t.Errorf("outside: %q, %v", b, err)
	}
}

// One that a sandbox removed is empty.
func TestHistoryRemoved(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	for _, use := range []func() error{
		func() error { _, err := io.WriteString(io.Discard, w.history()); return err },
		func() error { return second(w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader(""))) },
	} {
		must(t, os.Remove(w.path(chat.HistoryName)))
		if err := use(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(w.path(chat.HistoryName)); err != nil {
			t.Error(err)
		}
	}
}
