package lifecycle_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func TestMakeRoots(t *testing.T) {
	for _, tt := range []struct {
		name, file string // the file is in the way
	}{
		{"missing", ""},
		{"chats", "chats"},
		{"dependencies", "a/dependencies"},
		{"tools", "tools"},
		{"parent", "a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			roots := lifecycle.Settings{
				ChatsRoot: filepath.Join(dir, "chats"), DependenciesRoot: filepath.Join(dir, "a/dependencies"), ToolsRoot: filepath.Join(dir, "tools"),
			}
			if tt.file == "" {
				for range 2 { // those that are there are no matter
					must(t, roots.MakeRoots())
				}
				for _, root := range []string{roots.ChatsRoot, roots.DependenciesRoot, roots.ToolsRoot} {
					if fi, err := os.Lstat(root); err != nil || !fi.IsDir() {
						t.Errorf("%s: %v", root, err)
					}
				}
				return
			}
			file := filepath.Join(dir, tt.file)
			must(t, os.MkdirAll(filepath.Dir(file), 0o700))
			must(t, os.WriteFile(file, nil, 0o600))
			if err := roots.MakeRoots(); err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("error %v, want one that names %s", err, file)
			}
		})
	}
	if err := (lifecycle.Settings{}).MakeRoots(); err != nil {
		t.Errorf("no roots: %v", err)
	}
}

// specs keeps what the engine is asked to make.
type specs struct {
	*runtimetest.Fake
	made *[]runtime.Spec
}

func (s specs) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	*s.made = append(*s.made, spec)
	return s.Fake.Create(ctx, spec)
}

func TestMountsThatTheEngineGets(t *testing.T) {
	dir := t.TempDir()
	sub := func(name string) string { return filepath.Join(dir, name) }
	settings := lifecycle.Settings{
		ChatsRoot: sub("chats"), ChatMountPath: "/in/chat", DependenciesRoot: sub("deps"), DependenciesPath: "/in/deps",
		ToolsRoot: sub("tools"), ToolsPath: "/in/tools", VolumePath: "/in/volume",
	}
	must(t, settings.MakeRoots())
	must(t, os.Mkdir(sub("volume"), 0o700))
	var made []runtime.Spec
	w := newWorld(t, setup{
		policy: "version: 1\nmounts: {allowed_roots: [" + sub("volume") + "]}\nprofiles:\n  sealed: {host_path_mode: none, locked: [host_path_mode]}\n  asked: {host_path_mode: none}\n", settings: settings,
		wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return specs{f, &made} },
	})
	shared := []runtime.Mount{
		{Source: sub("deps"), Target: "/in/deps", ReadOnly: true},
		{Source: sub("tools"), Target: "/in/tools", ReadOnly: true},
	}
	for profile, want := range map[string][]runtime.Mount{
		"sealed": shared,
		"asked":  append([]runtime.Mount{{Source: sub("chats/asked"), Target: "/in/chat"}}, shared...),
	} {
		w.create(lifecycle.CreateRequest{Tenant: lifecycle.DefaultTenant, Key: profile, Request: policy.Request{Profile: profile}})
		if diff := cmp.Diff(want, made[len(made)-1].Mounts); diff != "" {
			t.Errorf("profile %s: %s", profile, diff)
		}
	}
	if _, err := os.Lstat(sub("chats/sealed")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("chat directory of a sandbox that has no mounts: %v", err)
	}
	for _, tt := range []struct {
		tenant, chat, volume string
		more                 []runtime.Mount
	}{
		{lifecycle.DefaultTenant, "k", sub("volume"), []runtime.Mount{{Source: sub("volume"), Target: "/in/volume"}}},
		{"b", ".tenants/b/k", "", nil},
	} {
		chat := filepath.Join(sub("chats"), tt.chat)
		w.create(lifecycle.CreateRequest{Tenant: tt.tenant, Key: "k", VolumePath: tt.volume})
		want := slices.Concat([]runtime.Mount{{Source: chat, Target: "/in/chat"}}, shared, tt.more)
		if diff := cmp.Diff(want, made[len(made)-1].Mounts); diff != "" {
			t.Errorf("tenant %s: %s", tt.tenant, diff)
		}
		if fi, err := os.Lstat(chat); err != nil || !fi.IsDir() {
			t.Errorf("chat directory of tenant %s: %v", tt.tenant, err)
		}
	}
}

// A chat's directory is the owner's from the next create on, and nothing in or above it is.
func TestChatDirOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	chats, outside := t.TempDir(), t.TempDir()
	at := func(name string) string { return filepath.Join(chats, name) }
	must(t, os.MkdirAll(at("old/sub"), 0o755), os.WriteFile(at("old/file"), nil, 0o600), os.Symlink(outside, at("link")))
	w := newWorld(t, setup{
		policy: "version: 1\nmounts: {owner: '1234:4321'}", settings: lifecycle.Settings{ChatsRoot: chats, ChatMountPath: "/chat"},
	})
	for _, c := range [][2]string{{lifecycle.DefaultTenant, "old"}, {lifecycle.DefaultTenant, "new"}, {"b", "new"}} {
		w.create(lifecycle.CreateRequest{Tenant: c[0], Key: c[1]})
	}
	if _, err := w.Create(t.Context(), lifecycle.CreateRequest{Tenant: lifecycle.DefaultTenant, Key: "link"}); err == nil {
		t.Error("a link passes for a chat's directory")
	}
	for path, want := range map[string][2]uint32{
		at("old"): {1234, 4321}, at("new"): {1234, 4321}, at(".tenants/b/new"): {1234, 4321},
		chats: {}, outside: {}, at("link"): {}, at("old/sub"): {}, at("old/file"): {}, at(".tenants"): {}, at(".tenants/b"): {},
	} {
		fi, err := os.Lstat(path)
		if err != nil {
			t.Error(err)
			continue
		}
		if st := fi.Sys().(*syscall.Stat_t); [2]uint32{st.Uid, st.Gid} != want {
			t.Errorf("%s belongs to %d:%d, want %d", path, st.Uid, st.Gid, want)
		}
	}
}

// TestAgentOff: the policy decides, of new sandboxes.
func TestAgentOff(t *testing.T) {
	var made []runtime.Spec
	w := newWorld(t, setup{
		policy: "version: 1\nprofiles: {plain: {agent: off}}",
		wrap:   func(f *runtimetest.Fake) runtime.AgentRuntime { return specs{f, &made} },
	})
	with := w.create(request("with")).Sandbox
	req := request("without")
	req.Request.Profile = "plain"
	without := w.create(req).Sandbox
	if len(made) != 2 || made[0].Agent != nil || made[1].Agent == nil || *made[1].Agent != (runtime.Agent{}) {
		t.Errorf("made %+v", made)
	}
	if with.Spec.Agent != "on" || without.Spec.Agent != "off" {
		t.Errorf("on record: %q, %q", with.Spec.Agent, without.Spec.Agent)
	}
	var err error
	w.policy, err = policy.Parse([]byte("version: 1\nprofiles: {plain: {}}"), policy.Options{DefaultImage: runtimetest.DefaultImage})
	must(t, err)
	if got := w.create(req); got.Result != lifecycle.ResultReused {
		t.Errorf("under another policy: %+v", got)
	}
}

// Mounts in use are known of every tenant, until the container is dead.
func TestMountsInUse(t *testing.T) {
	root := t.TempDir()
	w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + root + "]}\n"})
	made := map[string]lifecycle.Sandbox{}
	for _, name := range []string{"x", "y"} {
		dir := filepath.Join(root, name)
		must(t, os.Mkdir(dir, 0o755))
		req := lifecycle.CreateRequest{Tenant: name, Key: "k"}
		req.Request.HostPath = &dir
		made[name] = w.create(req).Sandbox
	}
	inUse := func() []string {
		var got []string
		for _, m := range w.MountsInUse() {
			got = append(got, filepath.Base(m.Source)+" "+m.Mode)
		}
		slices.Sort(got)
		return got
	}
	if got := inUse(); !slices.Equal(got, []string{"x rw", "y rw"}) {
		t.Errorf("of both: %v", got)
	}
	w.fake.Die(made["y"].ContainerID)
	w.eventually("y's mount is forgotten", func() bool { return slices.Equal(inUse(), []string{"x rw"}) })
}

// A create and an archive call that use a directory wait for each other.
func TestCreateAndArchiveCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var claims mountpin.Claims
		dir := t.TempDir()
		proceed := make(chan struct{})
		w := newWorld(t, setup{
			policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n", claim: claims.Start,
			fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
				if op == "create" {
					<-proceed
				}
				return nil
			}},
		})
		defer w.stop()
		req := mounting("k", dir, 0)
		archive := func() *mountpin.Use {
			return &mountpin.Use{ID: "archived", Archive: true, Binds: []policy.Mount{{Source: dir, Mode: "ro"}}}
		}
		create := func() <-chan error {
			defer synctest.Wait()
			return later(func() error { return second(w.Create(t.Context(), req)) })
		}

		leave, err := claims.Use(t.Context(), archive())
		must(t, err)
		created := create()
		time.Sleep(9 * time.Second)
		close(proceed)
		synctest.Wait()
		if len(created) != 0 || len(w.fake.Containers()) != 0 {
			t.Fatal("it was created during an archive call")
		}
		w.create(request("another")) // needn't wait
		if err := <-created; !errorIs[*lifecycle.CapacityError](err) || !strings.Contains(err.Error(), "docker cp") {
			t.Errorf("beside a long archive call: %v", err)
		}
		created = create()
		leave()
		if err := <-created; err != nil {
			t.Errorf("after an archive call: %v", err)
		}
		must(t, second(w.Delete(t.Context(), req.Tenant, req.Key)))

		proceed = make(chan struct{})
		created = create()
		entered := make(chan []policy.Mount, 1)
		go func() {
			leave, err := claims.Use(t.Context(), archive())
			if err != nil {
				t.Error(err)
				return
			}
			entered <- w.MountsInUse()
			leave()
		}()
		synctest.Wait()
		if len(entered) != 0 {
			t.Error("an archive call began during a create")
		}
		close(proceed)
		if err := <-created; err != nil {
			t.Error(err)
		}
		if mounts := <-entered; len(mounts) != 1 || mounts[0].Source != dir {
			t.Errorf("the archive call sees %v", mounts)
		}
	})
}
