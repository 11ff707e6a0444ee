package engineapi

import (
	"context"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/restart"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	private "github.com/bermhq/berm/runtime/runtimetest/engine"
)

// rows is a store of restarts that outlives a door.
type rows struct {
	mu   sync.Mutex
	rows map[string]restart.Row
}

func (s *rows) Restarts(context.Context) (all []restart.Row, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.rows {
		all = append(all, r)
	}
	return all, nil
}

func (s *rows) PutRestart(_ context.Context, r restart.Row) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rows[r.ContainerID] = r
	return nil
}

func (s *rows) DeleteRestart(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.rows, id)
	return nil
}

func (s *rows) row(id string) (restart.Row, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.rows[id]
	return r, ok
}

// running runs the door's restarts until stop is called. It is another Berm on the same
// store from the second time on.
func (d *testDoor) running(s *rows) (stop func()) {
	d.t.Helper()
	d.restarts = check.Value(restart.New(d.t.Context(), restart.Options{Engine: restartEngine{d.Proxy}, Store: s}))(d.t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		report(d.t, <-done)
	})
	d.t.Cleanup(stop)
	return stop
}

// restartable makes a container with a bind that runs until a file "end" is in it.
func restartable(t *testing.T, c *client.Client, dir string, p container.RestartPolicy) string {
	t.Helper()
	cfg := &container.Config{Image: testImage, StopSignal: "KILL", Cmd: []string{"sh", "-c", "echo x >> /b/runs; until [ -e /b/end ]; do sleep 0.1; done; rm /b/end; exit 3"}}
	ct := check.Value(c.ContainerCreate(t.Context(), cfg, &container.HostConfig{Binds: []string{dir + ":/b"}, RestartPolicy: p}, nil, nil, ""))(t)
	return ct.ID
}

// TestRestartPolicies has Berm carry out the policies of containers with binds: after an
// exit, after its own end, and after the engine's.
func TestRestartPolicies(t *testing.T) {
	private.Require(t, "docker")
	own, err := private.StartDocker(t.Context(), private.Options{})
	if err != nil {
		private.Lacking(t, "docker", err)
	}
	t.Cleanup(func() {
		report(t, own.Close())
	})
	must(t, own.ImportBusybox(t.Context(), testImage))
	direct := newClient(t, own.Host())
	work := workDir(t)
	d := doorTo(t, own.Host(), workRules(work))
	c := d.client("again")
	store := &rows{rows: map[string]restart.Row{}}
	stop := d.running(store)

	dirs, ids := map[string]string{}, map[string]string{}
	for name, p := range map[string]container.RestartPolicy{"always": {Name: "always"}, "stopped": {Name: "always"}, "unless": {Name: "unless-stopped"}, "failure": {Name: "on-failure", MaximumRetryCount: 1}} {
		dirs[name] = filepath.Join(work, name)
		must(t, os.Mkdir(dirs[name], 0o700))
		id := restartable(t, c, dirs[name], p)
		ids[name] = id
		if got := inspect(t, direct, id).HostConfig.RestartPolicy; !got.IsNone() {
			t.Errorf("%s: the engine's policy is %+v", name, got)
		}
		if got := inspect(t, c, id); got.HostConfig.RestartPolicy != p || got.RestartCount != 0 {
			t.Errorf("%s: %+v, %d restarts", name, got.HostConfig.RestartPolicy, got.RestartCount)
		}
		must(t, startIt(t, c, id))
	}
	runs := func(name string, n int) {
		t.Helper()
		eventually(t, func() bool {
			b, _ := os.ReadFile(filepath.Join(dirs[name], "runs"))
			return len(b) >= 2*n
		})
		if b := readFile(t, filepath.Join(dirs[name], "runs")); len(b) != 2*n {
			t.Errorf("%s: %d runs, want %d", name, len(b)/2, n)
		}
	}
	end := func(name string) {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(dirs[name], "end"), nil, 0o600))
	}
	// asked waits until Berm has asked the policy about the last exit, and nothing waits.
	asked := func(name string) {
		t.Helper()
		eventually(t, func() bool {
			row, ok := store.row(ids[name])
			s := inspect(t, direct, ids[name]).State
			return ok && !s.Running && row.Exit.Format(time.RFC3339Nano) == s.FinishedAt && row.Next.IsZero()
		})
	}
	zero := 0
	for name := range ids {
		runs(name, 1)
		end(name)
	}
	for name, id := range ids {
		runs(name, 2)
		eventually(t, func() bool { s := inspect(t, c, id); return s.State.Running && s.RestartCount == 1 })
	}
	end("failure")
	asked("failure")
	must(t, c.ContainerStop(t.Context(), ids["stopped"], container.StopOptions{Timeout: &zero}))
	must(t, c.ContainerKill(t.Context(), ids["unless"], "KILL"))
	asked("stopped")
	asked("unless")

	stop() // as if it were killed: the rows are all that is left
	end("always")
	eventually(t, func() bool { return !inspect(t, direct, ids["always"]).State.Running })
	d.running(store)
	runs("always", 3)
	runs("stopped", 3)
	asked("unless")
	asked("failure")

	must(t, startIt(t, c, ids["failure"]))
	runs("failure", 3)
	lives := engineLives(t, own.Host())
	first := lives()
	if again := lives(); again != first || !strings.HasPrefix(first[0], "process ") || !strings.HasPrefix(first[1], "network ") {
		t.Errorf("one life: %q, then %q", first, again)
	}
	own.Kill()
	if got := lives(); got != [2]string{} {
		t.Errorf("without an engine: %q", got)
	}
	must(t, own.Start(t.Context()))
	if second := lives(); second[0] == first[0] || second[1] == first[1] || second[1] == "" {
		t.Errorf("after a restart: %q, before: %q", second, first)
	}
	if _, ok := dockerd(int32(os.Getpid())); ok {
		t.Error("this test counts as an engine")
	}
	runs("always", 4)
	runs("failure", 4) // it was ended by the engine, and so failed
	if inspect(t, direct, ids["unless"]).State.Running {
		t.Error("what was stopped by hand runs")
	}

	eventually(t, func() bool { row, _ := store.row(ids["always"]); return row.Next.IsZero() })
	check.Value(c.ContainerUpdate(t.Context(), ids["always"], container.UpdateConfig{RestartPolicy: container.RestartPolicy{Name: "no"}}))(t)
	if got := inspect(t, c, ids["always"]).HostConfig.RestartPolicy; !got.IsNone() {
		t.Errorf("after the update: %+v", got)
	}
	end("always")
	asked("always")

	for _, id := range ids {
		report(t, c.ContainerRemove(t.Context(), id, container.RemoveOptions{Force: true}))
		eventually(t, func() bool { _, ok := store.row(id); return !ok })
	}
	for name, want := range map[string]int{"always": 4, "stopped": 4, "unless": 2, "failure": 4} {
		runs(name, want)
	}
}

// TestRestarting has a container end at once, over and over: while it waits it is shown as
// the engine shows such a container, and a stop or kill ends that.
func TestRestarting(t *testing.T) {
	work := workDir(t)
	d, direct := engineDoor(t, workRules(work))
	store := &rows{rows: map[string]restart.Row{}}
	d.running(store)
	c := d.client("loop")
	for name, end := range map[string]func(id string) error{
		"stop": func(id string) error { return c.ContainerStop(t.Context(), id, container.StopOptions{}) },
		"kill": func(id string) error { return c.ContainerKill(t.Context(), id, "SIGTERM") },
	} {
		ct, err := c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"false"}},
			&container.HostConfig{Binds: []string{work + ":/b"}, RestartPolicy: container.RestartPolicy{Name: "always"}}, nil, nil, "")
		if err == nil {
			err = startIt(t, c, ct.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, func() bool {
			s := inspect(t, c, ct.ID)
			return s.RestartCount > 1 && s.State.Restarting && s.State.Running && s.State.Status == "restarting"
		})
		eventually(t, func() bool {
			list, err := c.ContainerList(t.Context(), container.ListOptions{All: true})
			return err != nil || slices.ContainsFunc(list, func(s container.Summary) bool { return s.ID == ct.ID && s.State == "restarting" })
		})
		if err := end(ct.ID); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		eventually(t, func() bool {
			row, _ := store.row(ct.ID)
			return row.Stopped && row.Next.IsZero() && row.Exit.Format(time.RFC3339Nano) == inspect(t, direct, ct.ID).State.FinishedAt
		})
		if s := inspect(t, c, ct.ID).State; s.Restarting || s.Running {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

// TestRestartByEngine has the engine refused what would have it start a container with binds
// by itself, and what an older version left to it taken over.
func TestRestartByEngine(t *testing.T) {
	work := workDir(t)
	d, direct := engineDoor(t, workRules(work))
	c := d.client("refused")
	always := container.RestartPolicy{Name: "always"}
	binds := container.HostConfig{Binds: []string{work + ":/b"}, AutoRemove: true}
	removed := makeOne(t, c, &binds, "")
	wantErr(t, errdefs.IsConflict, errOf(c.ContainerUpdate(t.Context(), removed, container.UpdateConfig{RestartPolicy: always})), "update with AutoRemove")
	binds.RestartPolicy = always
	if _, err := c.ContainerCreate(t.Context(), sleeper, &binds, nil, nil, ""); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "can't create 'AutoRemove' container with restart policy") {
		t.Errorf("create with AutoRemove: %v", err)
	}
	binds.AutoRemove = false
	id := makeOne(t, c, &binds, "")
	audited := newClient(t, d.listen(Caller{Name: "audited", Tenant: "refused", Audit: true}))
	for name, who := range map[string]*client.Client{"enforced": c, "audited": audited} {
		u := container.UpdateConfig{RestartPolicy: container.RestartPolicy{Name: "unless-stopped"}}
		u.CPUShares = 4096 // which is denied
		_, err := who.ContainerUpdate(t.Context(), id, u)
		if got := inspect(t, direct, id).HostConfig.RestartPolicy; !got.IsNone() || (err == nil) != (name == "audited") {
			t.Errorf("%s: the engine's policy is %+v, %v", name, got, err)
		}
	}
	if row, _ := d.restarts.Row(id); row.Name != "unless-stopped" {
		t.Errorf("row: %+v", row)
	}

	made := inspect(t, direct, id)
	older := check.Value(direct.ContainerCreate(t.Context(), made.Config, &container.HostConfig{
		NetworkMode: "none", RestartPolicy: container.RestartPolicy{Name: "on-failure", MaximumRetryCount: 7}, Binds: []string{work + ":/b"},
	}, nil, nil, ""))(t)
	unsealed := *made.Config // of an earlier version, and not sealed since, as its image has labels of Berm's
	unsealed.Labels = maps.Clone(unsealed.Labels)
	delete(unsealed.Labels, lifecycle.LabelSeal)
	left := check.Value(direct.ContainerCreate(t.Context(), &unsealed, &container.HostConfig{NetworkMode: "none", RestartPolicy: always, Binds: []string{work + ":/b"}}, nil, nil, ""))(t)
	loop := *made.Config // it waits for the engine to restart it
	loop.Cmd = []string{"false"}
	looping, err := direct.ContainerCreate(t.Context(), &loop, &container.HostConfig{NetworkMode: "none", RestartPolicy: always, Binds: []string{work + ":/b"}}, nil, nil, "")
	if err == nil {
		err = startIt(t, direct, looping.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	var started string
	eventually(t, func() bool { // the engine waits 3.2 s after 5 restarts
		got := inspect(t, direct, looping.ID)
		started = got.State.StartedAt
		return got.RestartCount >= 5 && got.State.Restarting
	})
	store := &rows{rows: map[string]restart.Row{}}
	d.running(store)
	eventually(t, func() bool {
		got := inspect(t, direct, looping.ID)
		return got.HostConfig.RestartPolicy.IsNone() && !got.State.Restarting
	})
	if got := inspect(t, direct, looping.ID).State.StartedAt; got != started {
		t.Error("the engine restarted a container that was taken over")
	}
	eventually(t, func() bool {
		_, has := store.row(left.ID)
		return !has && inspect(t, direct, left.ID).HostConfig.RestartPolicy.IsNone()
	})
	eventually(t, func() bool {
		row, _ := store.row(older.ID)
		return row.Policy == restart.Policy{Name: "on-failure", MaxRetries: 7} && inspect(t, direct, older.ID).HostConfig.RestartPolicy.IsNone()
	})
	eventually(t, func() bool { row, _ := store.row(id); return row.Name == "always" }) // the store is new: as its label says
}

// engineLives tells an engine that starts anew from one whose connections break, by the process
// behind its socket and, where Berm can't see that, by the engine's answers.
func engineLives(t *testing.T, host string) func() [2]string {
	t.Helper()
	seen, unseen := restartEngine{doorTo(t, host, "").Proxy}, restartEngine{doorTo(t, host, "").Proxy}
	dial := unseen.opts.Dial
	unseen.opts.Dial = func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		return struct{ net.Conn }{conn}, err
	}
	return func() [2]string { return [2]string{seen.life(t.Context()), unseen.life(t.Context())} }
}
