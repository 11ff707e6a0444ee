package store

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/policy"
	checks "github.com/bermhq/berm/runtime/runtimetest/check" // snapshot.go has a check
)

func open(t *testing.T, path string) *Store {
	t.Helper()
	s, err := Open(context.Background(), Options{Path: path})
	must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func record(session string) lifecycle.Sandbox {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)
	return lifecycle.Sandbox{
		SessionID: session, Tenant: "a", Key: "k", ContainerID: "c",
		CreatedAt: at, ExpiresAt: at.Add(time.Hour), Deadline: at.Add(2 * time.Hour), LastUsedAt: at.Add(time.Minute),
		Spec:    policy.Spec{Image: "i", CPUs: 1.5, TTL: time.Hour, Mounts: []policy.Mount{{HostPath: "/srv", Source: "/srv", Local: "/srv", MountPath: "/w", Mode: "rw"}}, Env: map[string]string{"E": "1"}},
		AgentID: "agent", VolumePath: "/srv",
		Metadata:    map[string]string{"m": "'; DROP TABLE sandboxes; --"},
		Overridden:  []policy.Override{{Field: "network", Requested: "on", Effective: "off", Rule: "r"}},
		Enforcement: lifecycle.Enforcement{Mounts: "held", WorkspaceQuota: "soft"},
	}
}

func records(t *testing.T, s *Store) []lifecycle.Sandbox {
	t.Helper()
	got, err := s.Records(context.Background())
	must(t, err)
	return got
}

var bySession = cmpopts.SortSlices(func(a, b lifecycle.Sandbox) bool { return a.SessionID < b.SessionID })

func TestRoundTrip(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "berm.db")
	s := open(t, path)
	if !s.Fresh() {
		t.Error("a new store isn't fresh")
	}
	one, two := record("1"), record("2")
	for _, r := range []lifecycle.Sandbox{one, two} {
		must(t, s.Put(ctx, r))
	}
	one.ExpiresAt = one.ExpiresAt.Add(time.Hour)
	must(t, s.Put(ctx, one))
	two.LastUsedAt = two.LastUsedAt.Add(time.Hour)
	must(t, s.Touch(ctx, map[string]time.Time{"2": two.LastUsedAt, "none": two.LastUsedAt}))
	must(t, s.Ping(ctx))
	must(t, s.Close())
	again := open(t, path)
	if !again.Fresh() {
		t.Error("a store by which nobody took over isn't fresh")
	}
	must(t, again.TookOver(ctx), again.Close())
	again = open(t, path)
	if again.Fresh() {
		t.Error("a store by which somebody took over is fresh")
	}
	if d := cmp.Diff([]lifecycle.Sandbox{one, two}, records(t, again), bySession); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	must(t, again.Delete(ctx, "1", "none"))
	if d := cmp.Diff([]lifecycle.Sandbox{two}, records(t, again)); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

func TestEndTooFarAway(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "berm.db"))
	r := record("1")
	r.Deadline = r.CreatedAt.Add(1<<63 - 1)
	must(t, s.Put(context.Background(), r))
	if got := records(t, s)[0].Deadline; got.Year() != 2262 {
		t.Errorf("the deadline came back as %s", got)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	garbage := filepath.Join(dir, "garbage")
	must(t, os.WriteFile(garbage, []byte(strings.Repeat("not a database\n", 100)), 0o600))
	newer := filepath.Join(dir, "newer.db")
	db, err := sql.Open("sqlite", newer)
	must(t, err)
	must(t, err2(db.Exec("PRAGMA user_version = 1000")))
	must(t, db.Close())
	for name, tt := range map[string]struct{ path, want string }{
		"garbage":      {garbage, "not a database"},
		"newer":        {newer, "newer berm"},
		"no directory": {filepath.Join(dir, "none", "berm.db"), "no such file"},
		"no path":      {"", "mandatory"},
	} {
		if s, err := Open(context.Background(), Options{Path: tt.path}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
	if content, err := os.ReadFile(garbage); err != nil || !strings.HasPrefix(string(content), "not a database") {
		t.Errorf("the file was changed: %v", err)
	}
}

// No project is ever given out twice.
func TestProjects(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "berm.db")
	s := open(t, path)
	ctx := t.Context()
	add := func(session, dir string) uint32 {
		t.Helper()
		c, err := s.AddProject(ctx, session, dir)
		if err != nil || c.SessionID != session || c.Dir != dir {
			t.Fatalf("%+v, %v", c, err)
		}
		return c.ID
	}
	one, two := add("1", "/a"), add("2", "/b")
	if one != 0x63000000 || two != one+1 {
		t.Errorf("projects %#x and %#x", one, two)
	}
	if _, err := s.AddProject(ctx, "3", "/a"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a directory has two: %v", err)
	}
	must(t, s.PassProject(ctx, one, "3"), s.PassProject(ctx, 1, "4"), s.DeleteProject(ctx, two), s.DeleteProject(ctx, 1), s.Close())
	s = open(t, path)
	if three := add("5", "/b"); three <= two {
		t.Errorf("project %#x comes back as %#x", two, three)
	}
	got, err := s.Projects(ctx)
	want := []quota.Project{{ID: one, SessionID: "3", Dir: "/a"}, {ID: two + 1, SessionID: "5", Dir: "/b"}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v, %s", err, d)
	}
	must(t, s.Close())
	if _, err := s.Projects(ctx); err == nil {
		t.Error("a closed store knows projects")
	}
}

func TestLook(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "berm.db")
	if _, err := Look(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	db, err := Open(t.Context(), Options{Path: path})
	must(t, err)
	must(t, db.Close())
	before, err := os.ReadFile(path)
	must(t, err)
	d, err := Look(path)
	if err != nil || d.Schema != d.Known || d.Known == 0 || d.Merging || d.Whole != d.Size || d.Size == 0 {
		t.Errorf("%+v, %v", d, err)
	}
	after, err := os.ReadFile(path)
	if entries, dirErr := os.ReadDir(dir); err != nil || dirErr != nil || len(entries) != 1 || !bytes.Equal(before, after) {
		t.Errorf("looking changed something: %v, %v, %v", entries, err, dirErr)
	}
	for content, ok := range map[string]bool{"": true, "short": false, strings.Repeat("long", 100): false} {
		must(t, os.WriteFile(path, []byte(content), 0o600))
		if d, err := Look(path); d.Schema != 0 || (err == nil) != ok {
			t.Errorf("%.10q: %+v, %v", content, d, err)
		}
	}
}

var must = checks.Must // ends a test if a step of its own fails
