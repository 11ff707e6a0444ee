package runtimetest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func basicCases() []contractCase {
	return []contractCase{
		{"info", testInfo},
		{"image", testImage},
		{"create/fields", testCreateFields},
		{"create/main process ends", testCreateMainEnds},
		{"create/failure leaves nothing", testCreateFailures},
		{"network/ensured by many", testEnsureNetwork},
		{"list", testList},
		{"remove", testRemove},
		{"remove/canceled", testRemoveCanceled},
		{"remove/while it is created", testRemoveWhileCreated},
		{"client restart", testClientRestart},
		{"context/ended", testContextEnded},
		{"pull", testPull},
		{"stats", testStats},
	}
}

func testInfo(t *testing.T, b *fixture) {
	info, err := b.rt.Info(b.ctx)
	must(t, err)
	if info.Backend == "" || info.Version == "" || info.OS == "" || info.Architecture == "" ||
		info.CPUs <= 0 || info.MemoryBytes <= 0 || info.CgroupVersion != "1" && info.CgroupVersion != "2" {
		t.Errorf("incomplete: %+v", info)
	}
	if slices.Contains([]string{"x86_64", "aarch64"}, info.Architecture) {
		t.Errorf("architecture %q isn't in Go's terms", info.Architecture)
	}
}

func testImage(t *testing.T, b *fixture) {
	img, err := b.rt.Image(b.ctx, b.Image)
	must(t, err)
	byID, err := b.rt.Image(b.ctx, img.ID)
	if err != nil || byID.ID != img.ID || !strings.HasPrefix(img.ID, "sha256:") {
		t.Errorf("by reference %q, by ID %q, %v", img.ID, byID.ID, err)
	}
	_, err = b.rt.Image(b.ctx, "berm.invalid/no/such/image:latest")
	class(t, "an image that isn't there", err, errdefs.IsNotFound, "NotFound")
	_, err = b.rt.Image(b.ctx, "NOT A REFERENCE")
	class(t, "a malformed reference", err, errdefs.IsInvalidArgument, "InvalidArgument")

	spec := b.spec()
	spec.Image, spec.Command = img.ID, nil
	if c := b.create(t, spec); c.Image != img.ID {
		t.Errorf("container's image %q, want %q", c.Image, img.ID)
	}
}

func testCreateFields(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Labels["some.label"] = "some value"
	spec.Labels["empty.label"] = ""
	spec.Env = []string{"A=1", "B=with = and space", "EMPTY="}
	spec.User = "1234:4321"
	spec.WorkingDir = "/made/for/this"
	begun := time.Now()
	created := b.create(t, spec)
	inspected := b.inspect(t, created.ID)
	for how, c := range map[string]runtime.Container{"created": created, "inspected": inspected} {
		if c.ID == "" || c.ID != created.ID || c.Name != spec.Name || c.Image == "" || c.State != runtime.StateRunning {
			t.Errorf("%s: %+v", how, c)
		}
		for name, value := range spec.Labels {
			if got, ok := c.Labels[name]; !ok || got != value {
				t.Errorf("%s: label %s is %q, want %q", how, name, got, value)
			}
		}
		for _, v := range spec.Env {
			if !slices.Contains(c.Env, v) {
				t.Errorf("%s: env %q lacks %q", how, c.Env, v)
			}
		}
		// An engine may tell seconds only.
		if c.CreatedAt.Before(begun.Add(-time.Second)) || c.StartedAt.Before(c.CreatedAt) || time.Since(c.StartedAt) < 0 || !c.FinishedAt.IsZero() {
			t.Errorf("%s: times %s, %s, %s", how, c.CreatedAt, c.StartedAt, c.FinishedAt)
		}
		if c.IP != "" || c.ExitCode != 0 || c.OOMKilled {
			t.Errorf("%s: IP %q, exit code %d, OOM %t", how, c.IP, c.ExitCode, c.OOMKilled)
		}
	}
	env := strings.Split(b.output(t, created.ID, "env"), "\n")
	for _, v := range spec.Env {
		if !slices.Contains(env, v) {
			t.Errorf("env in the container: %q lacks %q", env, v)
		}
	}
	got := b.output(t, created.ID, "id", "-u") + ":" + b.output(t, created.ID, "id", "-g") + " " + b.output(t, created.ID, "pwd")
	if want := spec.User + " " + spec.WorkingDir; got != want {
		t.Errorf("user and directory in the container: %s, want %s", got, want)
	}
}

func testCreateMainEnds(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "sleep 0.2; exit 3"}
	c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	if c.ExitCode != 3 || c.FinishedAt.Before(c.StartedAt) || c.OOMKilled {
		t.Errorf("ended: %+v", c)
	}
	calls := map[string]func() error{
		"exec": func() error {
			_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}})
			return err
		},
		"pause":  func() error { return b.rt.Pause(b.ctx, c.ID) },
		"resume": func() error { return b.rt.Resume(b.ctx, c.ID) },
		"stats":  func() error { _, err := b.rt.Stats(b.ctx, c.ID); return err },
	}
	if b.Starter != nil {
		calls["start"] = func() error {
			_, err := b.Starter.Start(b.ctx, c.ID, runtime.Program{Command: []string{"/bin/cat"}})
			return err
		}
	}
	for name, call := range calls {
		class(t, name, call(), errdefs.IsFailedPrecondition, "FailedPrecondition")
	}
}

func testCreateFailures(t *testing.T, b *fixture) {
	missing := filepath.Join(t.TempDir(), "missing")
	refused := func(name string, change func(*runtime.Spec), is func(error) bool, want string) {
		t.Helper()
		spec := b.spec()
		change(&spec)
		_, err := b.rt.Create(b.ctx, spec)
		class(t, name, err, is, want)
		if cs := b.list(t); len(cs) != 0 {
			t.Fatalf("%s: left behind: %+v", name, cs)
		}
	}
	refused("image", func(s *runtime.Spec) { s.Image = "berm.invalid/no/such/image:latest" }, errdefs.IsNotFound, "NotFound")
	refused("network", func(s *runtime.Spec) { s.Network = b.name + "-missing" }, errdefs.IsNotFound, "NotFound")
	for name, change := range map[string]func(*runtime.Spec){
		"mount source":       func(s *runtime.Spec) { s.Mounts = []runtime.Mount{{Source: missing, Target: "/mnt"}} },
		"mount target":       func(s *runtime.Spec) { s.Mounts = []runtime.Mount{{Source: "/tmp", Target: "relative"}} },
		"working directory":  func(s *runtime.Spec) { s.WorkingDir = "relative" },
		"name":               func(s *runtime.Spec) { s.Name = "with space" },
		"no name":            func(s *runtime.Spec) { s.Name = "" },
		"path for a name":    func(s *runtime.Spec) { s.Name = "../" + s.Name },
		"no image":           func(s *runtime.Spec) { s.Image = "" },
		"empty command":      func(s *runtime.Spec) { s.Command = []string{} },
		"negative memory":    func(s *runtime.Spec) { s.MemoryBytes = -1 },
		"negative cpus":      func(s *runtime.Spec) { s.CPUs = -1 },
		"negative pids":      func(s *runtime.Spec) { s.PidsLimit = -1 },
		"negative log":       func(s *runtime.Spec) { s.LogMaxBytes = -1 },
		"unknown capability": func(s *runtime.Spec) { s.CapAdd = []string{"CAP_NO_SUCH"} },
		"all capabilities":   func(s *runtime.Spec) { s.CapAdd = []string{"ALL"} },
		"tmpfs target":       func(s *runtime.Spec) { s.Tmpfs = []runtime.Tmpfs{{Target: "relative", SizeBytes: 1 << 20}} },
		"tmpfs size":         func(s *runtime.Spec) { s.Tmpfs = []runtime.Tmpfs{{Target: "/scratch"}} },
	} {
		refused(name, change, errdefs.IsInvalidArgument, "InvalidArgument")
	}
	if _, err := os.Lstat(missing); err == nil {
		t.Error("a missing mount source was made")
	}
	// A name that a failed create has used is free.
	spec := b.spec()
	spec.Network = b.name + "-missing"
	if _, err := b.rt.Create(b.ctx, spec); err == nil {
		t.Error("a network that isn't there was taken")
	}
	spec.Network = ""
	b.create(t, spec)
}

func testEnsureNetwork(t *testing.T, b *fixture) {
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if err := b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Labels: b.labels}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Isolated: true, External: true}); err != nil {
		t.Errorf("one that an operator made: %v", err)
	}
	for _, other := range []runtime.Network{{Internal: true}, {Isolated: true}, {Internal: true, External: true}} {
		other.Name = b.name
		class(t, "another one of this name", b.rt.EnsureNetwork(b.ctx, other), errdefs.IsFailedPrecondition, "FailedPrecondition")
	}
	class(t, "an operator's that is missing", b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name + "-none", External: true}), errdefs.IsNotFound, "NotFound")
	networks, err := b.rt.Networks(b.ctx, b.labels)
	if err != nil || len(networks) != 1 || networks[0].Internal {
		t.Errorf("there is %+v, %v; want one, as it was first asked for", networks, err)
	}
}

func testList(t *testing.T, b *fixture) {
	if cs := b.list(t); len(cs) != 0 {
		t.Fatalf("before: %+v", cs)
	}
	names := make(map[string]string) // by id
	for i := range 3 {
		spec := b.spec()
		spec.Labels["index"] = fmt.Sprint(i)
		if i == 2 {
			spec.Labels["last"] = "yes"
			spec.Command = []string{"false"}
		}
		names[b.create(t, spec).ID] = spec.Name
	}
	for _, c := range b.list(t) {
		if names[c.ID] != c.Name || c.Labels[labelCase] != b.name || c.CreatedAt.IsZero() || c.State == "" || c.Image == "" {
			t.Errorf("listed: %+v", c)
		}
		if c.Env != nil {
			t.Errorf("env is filled in: %q", c.Env)
		}
	}
	for _, tt := range []struct {
		labels map[string]string
		want   int
	}{
		{map[string]string{labelCase: b.name}, 3},
		{map[string]string{labelCase: b.name, "index": ""}, 3},
		{map[string]string{labelCase: b.name, "index": "1"}, 1},
		{map[string]string{labelCase: b.name, "last": ""}, 1},
		{map[string]string{labelCase: b.name, "last": "no"}, 0},
		{map[string]string{labelCase: b.name, "index": "1", "last": "yes"}, 0},
		{map[string]string{labelCase: b.name[:len(b.name)-1]}, 0},
	} {
		cs, err := b.rt.List(b.ctx, tt.labels)
		if err != nil || len(cs) != tt.want {
			t.Errorf("list by %v: %d, %v; want %d", tt.labels, len(cs), err, tt.want)
		}
	}
	all, err := b.rt.List(b.ctx, nil)
	must(t, err)
	ours := func(c runtime.Container) bool { _, ok := names[c.ID]; return !ok }
	if got := len(slices.DeleteFunc(all, ours)); got != 3 {
		t.Errorf("the list of all has %d of 3", got)
	}
}

func testRemove(t *testing.T, b *fixture) {
	running, exited := b.spec(), b.spec()
	exited.Command = []string{"true"}
	for _, spec := range []runtime.Spec{running, exited} {
		c := b.create(t, spec)
		if spec.Name == exited.Name {
			b.awaitState(t, c.ID, runtime.StateExited)
		}
		for range 2 {
			if err := b.rt.Remove(b.ctx, c.ID); err != nil {
				t.Errorf("remove %q: %v", spec.Command, err)
			}
		}
		_, err := b.rt.Inspect(b.ctx, c.ID)
		class(t, "inspect afterwards", err, errdefs.IsNotFound, "NotFound")
		if cs := b.list(t); len(cs) != 0 {
			t.Errorf("listed afterwards: %+v", cs)
		}
	}
	b.create(t, running) // the name is free again
	if err := b.rt.Remove(b.ctx, strings.Repeat("0", 64)); err != nil {
		t.Errorf("remove one that never was: %v", err)
	}
	c := b.create(t, b.spec())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := b.rt.Remove(b.ctx, c.ID); err != nil {
				t.Errorf("remove by four at once: %v", err)
			}
		})
	}
	wg.Wait()
}
