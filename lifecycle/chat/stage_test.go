package chat_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
)

// Whatever comes of a call, it leaves no handle open. It isn't parallel, so that no other
// test has any.
func TestHandles(t *testing.T) {
	w := newWorld(t, 10_000)
	ctx := context.Background()
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip(err)
		}
		return len(list)
	}
	all := func() {
		w.put("a", "a")
		_ = w.read("a")
		_ = w.history()
		_ = w.names(10)
		for _, f := range []chat.PutFile{{Name: "a", Size: 20_000}, {Name: "a", Size: 9}, {Name: "a", Size: -1, NoClash: true}} {
			if _, _, err := w.Put(ctx, tenant, chatID, f, strings.NewReader("short")); err == nil {
				t.Error("no error")
			}
		}
		for _, err := range []error{
			second(w.PutAll(ctx, tenant, chatID, several("b=b", "c=c"))), second(w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader("x"))),
			w.ReadTar(ctx, tenant, chatID, io.Discard), second(w.Check(ctx)), w.DeleteFile(ctx, tenant, chatID, "b"),
			second(w.DeleteFiles(ctx, tenant, chatID)), w.Delete(ctx, tenant, chatID),
		} {
			if err != nil {
				t.Error(err)
			}
		}
		w.ensure(tenant, chatID)
		must(t, os.Symlink("x", w.path("link")))
		_, err := w.Content(ctx, tenant, chatID, "link")
		if err == nil || w.WriteTar(ctx, tenant, chatID, strings.NewReader("no archive")) == nil {
			t.Error("no error")
		}
		must(t, os.Remove(w.path("link")))
	}
	all()
	before := open()
	for range 5 {
		all()
	}
	if after := open(); after > before {
		t.Errorf("%d handles, and then %d", before, after)
	}
	w.checkSound()
}

// adoptions are of directories into projects.
type adoptions struct {
	quota.Projects

	mu   sync.Mutex
	dirs []string
	fail error
}

func (*adoptions) Limit(uint32, int64) error  { return nil }
func (*adoptions) Try(*os.File) error         { return nil }
func (*adoptions) Used(uint32) (int64, error) { return 0, nil }

func (a *adoptions) Adopt(dir *os.File, _ uint32) error {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	list, _ := dir.Readdirnames(-1)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dirs = append(a.dirs, fmt.Sprint(filepath.Base(filepath.Dir(path)), " ", len(list)))
	return errors.Join(err, a.fail)
}

// Chats' directories belong to their workspace's project before anything is written to
// them; what is staged does once all of it is there, as it may take something's place.
func TestProjects(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := openWorld(t, t.TempDir(), 1<<20, nil)
	projects := &adoptions{}
	w.hold(quota.Options{QuotaBytes: 1 << 20, Find: func(string) (quota.Projects, error) { return projects, nil }})
	var err error
	w.Service, err = chat.New(ctx, w.options())
	must(t, err)
	w.ensure(tenant, chatID)
	w.put("a", "a")
	must(t, second(w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader("h"))))
	if want := []string{"chats 0", ".staging 1", ".staging 1"}; !slices.Equal(projects.dirs, want) {
		t.Errorf("adopted %q, want %q", projects.dirs, want)
	}
	projects.dirs = nil
	if _, err := w.Check(ctx); err != nil || !slices.Equal(projects.dirs, []string{"chats 2"}) {
		t.Errorf("the check adopted %q: %v", projects.dirs, err)
	}
	projects.fail = errors.New("broken")
	if err := putOnly(w, "b", "b"); !errors.Is(err, projects.fail) {
		t.Errorf("put: %v", err)
	}
	if _, _, err := w.Ensure(ctx, tenant, "new", w.space.ID); !errors.Is(err, projects.fail) {
		t.Errorf("ensure: %v", err)
	}
	wantError[*chat.NotFoundError](t, "the chat is there", second(w.Get(ctx, tenant, "new")))
	if list, err := os.ReadDir(filepath.Join(w.root, ".staging")); err != nil || len(list) > 0 {
		t.Errorf("staged: %v, %v", list, err)
	}
}

// While one upload's body streams, the chat is used by others.
func TestStreamingHoldsNobody(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	w := newWorld(t, 0)
	_, _, err := w.Put(ctx, tenant, chatID, chat.PutFile{Name: "a", Size: -1}, reading{strings.NewReader("slow"), func() error {
		if _, _, err := w.Put(ctx, tenant, chatID, chat.PutFile{Name: "a", Size: -1}, strings.NewReader("quick")); err != nil {
			return err
		}
		w.wantFile("a", "quick")
		return second(w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader("x")))
	}})
	if err != nil || w.read("a") != "slow" {
		t.Errorf("the last one whole doesn't win: %v, %q", err, w.read("a"))
	}
	w.checkSound()
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 100)
	reg := prometheus.NewRegistry()
	var err error
	opts := w.options()
	opts.Registry = reg
	w.Service, err = chat.New(ctx, opts)
	must(t, err)
	w.put("a", "12345")
	_ = putOnly(w, "b", strings.Repeat("b", 101))
	w.write("c", "")
	_ = w.names(10)
	families, err := reg.Gather()
	must(t, err)
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			if v := m.GetCounter().GetValue(); v > 0 {
				got[name] = v
			}
		}
	}
	want := map[string]float64{
		"berm_chat_operations_total write ok": 1, "berm_chat_operations_total write resource_exhausted": 1, "berm_chat_operations_total list ok": 1,
		"berm_chat_repairs_total adopted": 1, "berm_chat_written_bytes_total": 5,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
