package lifecycle_test

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// kernelLimits stand in for a file system that has project quotas.
type kernelLimits struct {
	quota.Projects
	mu     sync.Mutex
	limits map[uint32]int64
	taken  map[uint32]bool // projects that a directory is in
}

func (k *kernelLimits) Limit(project uint32, bytes int64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.limits[project] = bytes; bytes == 0 {
		delete(k.limits, project)
	}
	return nil
}

func (k *kernelLimits) Try(*os.File) error { return nil }

func (k *kernelLimits) Free(uint32) (bool, error) { return true, nil }

func (k *kernelLimits) Take(_ context.Context, _ *os.File, project uint32) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.taken[project] = true
	return nil
}

func (k *kernelLimits) Drop(_ context.Context, _ *os.File, project uint32) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.taken, project)
	return nil
}

// now is the limits in force, in MiB, and how many directories have a project.
func (k *kernelLimits) now() (mb []int64, dirs int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, bytes := range slices.Sorted(maps.Values(k.limits)) {
		mb = append(mb, bytes>>20)
	}
	return mb, len(k.taken)
}

// The kernel holds a sandbox's quota from before its container runs until after that has
// gone, and the answers say what is so.
func TestHardQuota(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "berm.db")})
	must(t, err)
	defer db.Close()
	kernel := &kernelLimits{limits: map[uint32]int64{}, taken: map[uint32]bool{}}
	quotas := func() lifecycle.Quotas {
		s, err := quota.New(t.Context(), quota.Options{Store: db, Find: func(string) (quota.Projects, error) { return kernel, nil }})
		must(t, err)
		return s
	}
	fake, breakOp := breaking("")
	s := setup{fake: fake, policy: "version: 1\nmounts: {allowed_roots: [" + root + "]}\n", quotas: quotas()}
	w := newWorld(t, s)
	mk := func(key, dir string, mb int64) lifecycle.Sandbox {
		t.Helper()
		path := filepath.Join(root, dir)
		must(t, os.MkdirAll(path, 0o700))
		return w.create(mounting(key, path, mb)).Sandbox
	}
	want := func(what string, mb []int64, dirs int, enforcement map[string]string) {
		t.Helper()
		gotMB, gotDirs := kernel.now()
		if d := cmp.Diff(mb, gotMB); d != "" || dirs != gotDirs {
			t.Errorf("%s: limits %s; %d directories", what, d, gotDirs)
		}
		for key, enforced := range enforcement {
			sb, err := w.Get(t.Context(), "a", key)
			if err != nil || sb.Enforcement.WorkspaceQuota != enforced {
				t.Errorf("%s: %s is %q, %v", what, key, sb.Enforcement.WorkspaceQuota, err)
			}
		}
	}
	sweep := func() {
		t.Helper()
		must(t, s.quotas.Sweep(t.Context()))
	}

	mk("one", "one", 1)
	mk("two", "two", 2)
	mk("none", "none", 0)
	want("made", []int64{1, 2}, 2, map[string]string{"one": "hard", "two": "hard", "none": ""})
	if res := w.exec("one", "true"); res.QuotaEnforcement != "hard" {
		t.Errorf("a command's result: %+v", res)
	}

	w.die("one")
	if res := w.exec("one", "true"); !res.Recreated || res.QuotaEnforcement != "hard" {
		t.Errorf("made again: %+v", res)
	}
	want("made again", []int64{1, 2}, 2, map[string]string{"one": "hard"})

	mk("below", "one/sub", 3)
	want("shared", []int64{2}, 2, map[string]string{"one": "soft", "below": "soft", "two": "hard"})

	w.stop() // and what this process knew is lost
	s.engine, s.store, s.quotas = w.fake, w.store, quotas()
	w = newWorld(t, s)
	want("restarted", []int64{2}, 2, map[string]string{"one": "soft", "below": "soft", "two": "hard"})

	for _, key := range []string{"one", "below", "two"} {
		must(t, second(w.Delete(t.Context(), "a", key)))
		if mb, _ := kernel.now(); key == "two" && len(mb) > 0 {
			t.Errorf("the limits %v outlive the sandbox", mb)
		}
	}
	sweep()
	want("deleted", nil, 0, nil)

	breakOp("create")
	if _, err := w.Create(t.Context(), mounting("broken", filepath.Join(root, "one"), 5)); err == nil {
		t.Error("it was made")
	}
	want("not made", nil, 1, nil)
	sweep()
	want("swept", nil, 0, nil)
}

// interrupted are Quotas that the engine goes away from, the first time that a sandbox
// of an earlier process is made known to them.
type interrupted struct {
	lifecycle.Quotas
	fake *runtimetest.Fake
	once sync.Once

	mu    sync.Mutex
	known []string
}

func (i *interrupted) Attach(ctx context.Context, s lifecycle.Subject) (string, error) {
	if s.Resumed {
		i.once.Do(func() {
			i.fake.SetDown(true)
			<-ctx.Done()
			i.fake.SetDown(false)
		})
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if ctx.Err() == nil {
		i.known = append(i.known, s.SessionID)
	}
	return "", ctx.Err()
}

// All sandboxes of an earlier process are known before anything is swept, also if the
// engine goes away meanwhile.
func TestResumesAll(t *testing.T) {
	w := newWorld(t, setup{})
	var want []string
	for _, key := range []string{"one", "two", "three"} {
		want = append(want, w.create(request(key)).Sandbox.SessionID)
	}
	w.stop()
	i := &interrupted{Quotas: softQuotas(), fake: w.fake}
	newWorld(t, setup{engine: w.fake, store: w.store, quotas: i})
	i.mu.Lock()
	defer i.mu.Unlock()
	slices.Sort(want)
	slices.Sort(i.known)
	if d := cmp.Diff(want, i.known); d != "" {
		t.Error(d)
	}
}
