package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// How the service is, and what it says when it says no.
var boxStatus = []boxCase{
	{"status", statusFields},
	{"caps of the server", statusFull},
}

func (r *boxRow) status(c *client.Client) *apitype.Status {
	r.Helper()
	s, err := c.Status(r.ctx)
	if err != nil {
		r.Fatal(err)
	}
	return s
}

// leanly gives a key of the tenant lean, who shares nothing with the other tests.
func (r *boxRow) leanly(s *boxServer, name string) boxSandbox {
	x := boxSandbox{r.T, r.ctx, s, s.lean, name}
	r.Cleanup(func() {
		if _, err := s.lean.Delete(context.WithoutCancel(r.ctx), name); err != nil {
			r.Error(err)
		}
	})
	return x
}

func statusFields(r *boxRow) {
	x := r.leanly(r.bare, "status")
	before := r.status(x.c)
	if b := before.Backend; b.Name != r.kind || !b.Available || b.Version == "" || b.Reason != "" {
		r.Errorf("backend: %+v", b)
	}
	want := apitype.Limits{
		CPUs: 1, MaxCPUs: 2, MemoryMB: 512, MaxMemoryMB: 2048, PidsLimit: 128, MaxPidsLimit: 512,
		Timeout: apitype.Duration(30 * time.Second), MaxTimeout: apitype.Duration(2 * time.Minute), TTL: apitype.Duration(time.Hour),
	}
	if before.Profile != "default" || before.Limits != want || before.Tenant != "lean" || before.MaxSandboxes != 2 || before.ActiveSandboxes != 0 ||
		before.RunningProcesses != 0 || before.RecentErrors != 0 || !slices.Equal(before.Profiles, []string{"default", "network_basic", "network_extended", "offline_readonly"}) {
		r.Errorf("%+v", before)
	}
	x.start("p", "cat")
	if _, err := x.c.StartExec(x.ctx, x.key, apitype.ExecRequest{Command: apitype.Command{"sleep", "300"}, Timeout: apitype.SecondsOf(110)}); err != nil {
		r.Fatal(err)
	}
	if _, err := x.c.Get(x.ctx, "nosuch"); err == nil {
		r.Error("there is a sandbox")
	}
	if s := r.status(x.c); s.ActiveSandboxes != 1 || s.RunningProcesses != 2 || s.RecentErrors != 1 {
		r.Errorf("%+v", s)
	}
	if _, err := x.c.StopProcess(x.ctx, x.key, "p"); err != nil {
		r.Error(err)
	}
	until(r, "the process to be counted out", func() bool { return r.status(x.c).RunningProcesses == 1 })
	if _, err := x.c.Delete(x.ctx, x.key); err != nil {
		r.Error(err)
	}
	if s := r.status(x.c); s.ActiveSandboxes != 0 || s.RunningProcesses != 0 {
		r.Errorf("%+v", s)
	}
}

// wantFull checks that a cap is reached, and that there is word of when to come again.
func (x boxSandbox) wantFull(err error) {
	x.t.Helper()
	x.wantError(err, http.StatusTooManyRequests, "capacity")
	var e *client.Error
	if errors.As(err, &e) && e.RetryAfter <= 0 {
		x.t.Errorf("there is no Retry-After: %+v", e)
	}
}

// statusFull reaches the caps that a server of its own is configured to.
func statusFull(r *boxRow) {
	s := r.serve(r.T, "full", testImage, "", "BERM_SANDBOX_MAX_SANDBOXES=2", "BERM_SANDBOX_MAX_COMMANDS=2")
	x := r.on(s, "a")
	x.create(apitype.SandboxRequest{})
	r.fullOfCommands(x)

	// Of sandboxes, the tenants have so many together.
	other := r.leanly(s, r.key+"-b")
	other.create(apitype.SandboxRequest{})
	for _, more := range []boxSandbox{r.on(s, "c"), r.leanly(s, r.key+"-d")} {
		_, err := more.c.Create(r.ctx, more.key, apitype.SandboxRequest{})
		more.wantFull(err)
		_, err = more.c.Exec(r.ctx, more.key, apitype.ExecRequest{Command: apitype.Command{"true"}, Sandbox: &apitype.SandboxRequest{}})
		more.wantFull(err)
		_, err = more.c.StartProcess(r.ctx, more.key, apitype.ProcessRequest{Command: "cat", Sandbox: &apitype.SandboxRequest{}})
		more.wantFull(err)
	}
	if again := x.create(apitype.SandboxRequest{}); again.Result != "reused" || other.sh("echo in") != "in" {
		r.Errorf("%+v", again)
	}
	for _, gone := range []boxSandbox{x, other} {
		if _, err := gone.c.Delete(r.ctx, gone.key); err != nil {
			r.Fatal(err)
		}
	}
	// Nor do they have more when they come all at once.
	var all sync.WaitGroup
	var made atomic.Int32
	for i := range 6 {
		x := r.on(s, fmt.Sprint("at-once-", i))
		all.Go(func() {
			if _, err := x.c.Create(r.ctx, x.key, apitype.SandboxRequest{}); err != nil {
				x.wantFull(err)
				return
			}
			made.Add(1)
		})
	}
	all.Wait()
	if there := containersOf(r.T, r.e, s.server); made.Load() != 2 || there != 2 {
		r.Errorf("%d sandboxes were made, and there are %d containers", made.Load(), there)
	}
}

// fullOfCommands has as many commands run as may, two, and one more.
func (r *boxRow) fullOfCommands(x boxSandbox) {
	r.Helper()
	var all sync.WaitGroup
	for i := range 2 {
		all.Go(func() { x.sh(fmt.Sprintf("touch /tmp/on%d; until test -e /tmp/go; do sleep 0.1; done", i)) })
		until(r, "it to run", func() bool { return exists(x.inside(fmt.Sprint("/tmp/on", i))) })
	}
	more := apitype.ExecRequest{Command: shell("touch /tmp/ran")}
	_, err := x.c.Exec(r.ctx, x.key, more)
	x.wantFull(err)
	_, err = x.c.StartExec(r.ctx, x.key, more)
	x.wantFull(err)
	x.start("p", "cat") // processes have a cap of their own
	write(r.T, x.inside("/tmp/go"), "")
	all.Wait()
	if exists(x.inside("/tmp/ran")) {
		r.Error("one too many was started")
	}
	x.sh("echo again")
}
