package chat_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	kept := w.put("kept", "kept")
	w.put("gone", "gone")
	w.put("turned", "turned")
	w.ensure(tenant, "lost")
	w.ensure("b", "theirs")
	must(t, third(w.Put(ctx, tenant, "lost", chat.PutFile{Name: "a", Size: -1}, strings.NewReader("a"))))
	w.ensure(tenant, "odd")
	for _, err := range []error{
		os.Remove(w.path("gone")), os.Remove(w.path("turned")), os.Symlink("kept", w.path("turned")), os.Remove(w.path(chat.HistoryName)),
		os.RemoveAll(filepath.Join(w.root, "lost")),
		os.RemoveAll(filepath.Join(w.root, "odd")), os.Symlink(chatID, filepath.Join(w.root, "odd")),
		os.MkdirAll(filepath.Join(w.root, ".staging", "left", "deep", "er"), 0o700),
		os.WriteFile(filepath.Join(w.root, ".staging", "file"), nil, 0o600),
	} {
		must(t, err)
	}
	w.write("found", "found")
	got, err := w.Check(ctx)
	want := chat.Report{Chats: 4, Dropped: 3, Removed: 2, Failed: 1}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	must(t, os.Remove(filepath.Join(w.root, "odd")))
	got, err = w.Check(ctx)
	if diff := cmp.Diff(chat.Report{Chats: 4}, got); err != nil || diff != "" {
		t.Errorf("again: %v\n%s", err, diff)
	}
	if f, err := w.File(ctx, tenant, kept.ID); err != nil || f.Name != "kept" {
		t.Errorf("%+v, %v", f, err)
	}
	must(t, os.Remove(w.path("turned")))
	w.checkSound()
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := w.Check(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// An upload that streams while the check runs keeps its staging directory.
func TestCheckMeanwhile(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	_, _, err := w.Put(ctx, tenant, chatID, chat.PutFile{Name: "a", Size: -1}, reading{strings.NewReader("whole"), func() error {
		r, err := w.Check(ctx)
		if r.Removed != 0 {
			t.Errorf("%+v", r)
		}
		return err
	}})
	if err != nil || w.read("a") != "whole" {
		t.Errorf("error %v", err)
	}
	w.checkSound()
}

// A store that can't be used is told as that, and nothing changes.
func TestStoreUnavailable(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	dir := t.TempDir()
	w := openWorld(t, dir, 0, nil)
	w.ensure(tenant, chatID)
	w.put("a", "old")
	_, _, err := w.Put(ctx, tenant, chatID, chat.PutFile{Name: "a", Size: -1}, reading{strings.NewReader("new"), func() error { return w.db.Close() }})
	if !errorIs[*lifecycle.UnavailableError](err) {
		t.Errorf("put: %v", err)
	}
	for what, err := range map[string]error{
		"get":     second(w.Get(ctx, tenant, chatID)),
		"list":    second(w.Files(ctx, tenant, chatID, "", 1)),
		"history": second(w.History(ctx, tenant, chatID)),
		"delete":  w.Delete(ctx, tenant, chatID),
		"check":   second(w.Check(ctx)),
	} {
		if !errorIs[*lifecycle.UnavailableError](err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	w = openWorld(t, dir, 0, nil)
	if _, err := w.Check(ctx); err != nil {
		t.Error(err)
	}
	w.wantFile("a", "old")
	w.checkSound()
}
