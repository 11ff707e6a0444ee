package chat_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle/chat"
)

// All calls at once, on two chats: every content that is read is one that was written,
// whole, and in the end records, content and usage agree.
func TestTogether(t *testing.T) {
	t.Parallel()
	const quota = 400_000
	ctx := context.Background()
	w := newWorld(t, quota)
	w.ensure(tenant, "brief")
	whole := func(b string) bool {
		return b == "" || len(b) == 1000*int(b[0]-'a'+1) && strings.Count(b, b[:1]) == len(b)
	}
	expected := func(err error) bool {
		return err == nil || errdefs.IsNotFound(err) || errdefs.IsAlreadyExists(err) || errdefs.IsResourceExhausted(err)
	}
	var group sync.WaitGroup
	for worker := range 6 {
		group.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(worker)))
			for range 30 {
				id := []string{chatID, "brief"}[random.IntN(2)]
				name := fmt.Sprintf("f%d", random.IntN(3))
				letter := string(rune('a' + random.IntN(26)))
				body := strings.Repeat(letter, 1000*int(letter[0]-'a'+1))
				var err error
				switch what := random.IntN(12); what {
				case 0, 1, 2:
					_, _, err = w.Put(ctx, tenant, id, chat.PutFile{Name: name, Size: -1, NoClash: what == 0}, strings.NewReader(body))
				case 3:
					_, err = w.PutAll(ctx, tenant, id, several("f0="+body, "f1="+body))
				case 4:
					err = w.DeleteFile(ctx, tenant, id, name)
				case 5:
					_, err = w.DeleteFiles(ctx, tenant, id)
				case 6:
					_, err = w.AppendHistory(ctx, tenant, id, -1, strings.NewReader("entry\n"))
				case 7:
					_, err = w.Files(ctx, tenant, id, "", 2)
				case 8:
					_, err = w.Check(ctx)
				case 9:
					if id == "brief" {
						if err = w.Delete(ctx, tenant, id); err == nil {
							_, _, err = w.Ensure(ctx, tenant, id, w.space.ID)
						}
					}
				default:
					var content *chat.Content
					if content, err = w.Content(ctx, tenant, id, name); err == nil {
						if got := w.drain(content, nil); !whole(got) {
							t.Errorf("%d bytes that begin with %.1q were read", len(got), got)
						}
					}
				}
				if !expected(err) {
					t.Errorf("%v", err)
				}
			}
		})
	}
	group.Wait()
	if h := w.history(); strings.Trim(strings.ReplaceAll(h, "entry\n", ""), "") != "" {
		t.Errorf("the history is %q", h)
	}
	w.ensure(tenant, "brief")
	w.checkSound()
}

// However many come at once, all that stays is within the quota.
func TestQuotaTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 10_000)
	var group sync.WaitGroup
	var mu sync.Mutex
	stayed := 0
	for i := range 12 {
		group.Go(func() {
			size := []int64{-1, 3000}[i%2]
			_, _, err := w.Put(context.Background(), tenant, chatID, chat.PutFile{Name: fmt.Sprint(i), Size: size}, strings.NewReader(strings.Repeat("x", 3000)))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				stayed++
			case !errdefs.IsResourceExhausted(err):
				t.Error(err)
			}
		})
	}
	group.Wait()
	if stayed > 3 || stayed == 0 {
		t.Errorf("%d files of 3,000 bytes stayed", stayed)
	}
	w.checkSound()
}

// Who waits for a chat can go.
func TestWaitingIsCancelled(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(context.Background())
	var w *world
	w = openWorld(t, t.TempDir(), 0, func(step string) error {
		if step != "staged" {
			return nil
		}
		cancel()
		if err := w.DeleteFile(ctx, tenant, chatID, "a"); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		return nil
	})
	w.ensure(tenant, chatID)
	w.put("a", "a")
	w.checkSound()
}
