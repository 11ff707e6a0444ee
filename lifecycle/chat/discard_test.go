package chat_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/bermhq/berm/lifecycle/chat"
)

// Who deletes a chat doesn't wait until its files are removed. A process that ends does so
// at once, and what is left goes at the next start.
func TestDeleteDoesNotWait(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	dir := t.TempDir()
	prepare(t, dir)
	discarding, goOn := make(chan struct{}), make(chan struct{})
	w := openWorld(t, dir, 1<<20, func(step string) error {
		if step == "discarding" {
			close(discarding)
			<-goOn
		}
		return nil
	})
	for _, id := range []string{chatID, "model"} {
		must(t, w.Delete(ctx, tenant, id))
		if _, err := w.Get(ctx, tenant, id); !errorIs[*chat.NotFoundError](err) {
			t.Errorf("%s: %v", id, err)
		}
	}
	<-discarding
	if r, err := w.Check(ctx); err != nil || r.Removed > 0 {
		t.Errorf("what is being removed: %+v, %v", r, err)
	}
	impatient, cancel := context.WithCancel(ctx)
	cancel()
	if err := w.Close(impatient); !errors.Is(err, context.Canceled) {
		t.Errorf("it didn't wait: %v", err)
	}
	close(goOn)
	if err := w.Close(ctx); err != nil {
		t.Error(err)
	}
	w.ensure(tenant, "late")
	if err := w.Delete(ctx, tenant, "late"); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(filepath.Join(w.root, ".staging")); err != nil || len(left) != 3 {
		t.Errorf("left %v, %v", left, err)
	}
	_ = w.db.Close()
	w = openWorld(t, dir, 1<<20, nil)
	if r, err := w.Check(&chat.Ending{Context: ctx, Left: 1}); !errors.Is(err, context.Canceled) || r.Removed > 0 {
		t.Errorf("a check that ends: %+v, %v", r, err)
	}
	if left, err := os.ReadDir(filepath.Join(w.root, ".staging")); err != nil || len(left) != 3 {
		t.Errorf("it went on: left %v, %v", left, err)
	}
	if r, err := w.Check(ctx); err != nil || r.Removed == 0 || r.Failed > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	w.checkSound()
}
