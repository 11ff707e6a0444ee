package runtimetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// Harness is the engine that Run tests.
type Harness struct {
	// New makes a client of the engine, the same engine each time. Mandatory.
	New func(t *testing.T) runtime.AgentRuntime
	// Starter and Collector are the backend itself. The former is mandatory with Real, and
	// the cases about what others make need the latter.
	Starter   runtime.Starter
	Collector runtime.Collector
	// Image is in the engine's store: a busybox, all applets, /tmp, users root and
	// nobody, whose own command is any that needs no arguments. Mandatory.
	Image string
	// Configured is in the store, too: Image with ConfiguredChanges. Mandatory.
	Configured string
	// Agent is the path of the program berm-agent, on the engine's host. Mandatory.
	Agent string
	// Class is the RuntimeClass of the containers. Empty is the engine's default.
	Class string
	// UserNS is the UserNS of the containers.
	UserNS bool
	// Only names the cases to run, by how their names begin. Nil is all.
	Only []string
	// Real says that commands run in a kernel, this machine's, on whose files the engine
	// works, too, and mostly without the engine: one that is away, or hangs, may or may not
	// keep them from it.
	Real bool
	// Engine kills the engine and starts it again. Mandatory.
	Engine interface {
		Kill()
		Start(ctx context.Context) error
	}
	// LocalNetworks says that networks are the backend's own, so that the calls about
	// them alone work without an engine.
	LocalNetworks bool
	// Reopen makes a client that keeps what it has on the host in a directory, where one
	// that was closed has left it. Mandatory with Real.
	Reopen func(t *testing.T, dir string) runtime.AgentRuntime
	// Registry has an image Registry + "/contract:latest", which isn't in the store, and
	// no other. Mandatory.
	Registry string
	// Hang makes the engine hear calls and not answer them, until resume is called.
	// Impatient is a client of it that waits no more than a second for an answer.
	// Mandatory with Real.
	Hang func(t *testing.T) (impatient runtime.AgentRuntime, resume func())
	// Outside is the address and port of a server that says "outside", which ordinary
	// networks reach and internal ones don't. Mandatory with Real.
	Outside string
	// Terminals is how many pseudo terminals a container may have; 0 is as many as the host.
	Terminals int
	// MakeVolume makes a volume of this name and with these labels; if it is to be used,
	// also a container with the same labels that has it. Mandatory with Collector.
	MakeVolume func(t *testing.T, name string, labels map[string]string, used bool)
}

// ConfiguredChanges are what Harness.Configured has over Harness.Image, as lines of
// a Dockerfile.
func ConfiguredChanges() []string {
	return []string{"ENV FROM_IMAGE=yes", "USER nobody", `VOLUME /home /var/data /run /run/berm /sbin/x`, `CMD ["sleep", "200000"]`}
}

// labelCase carries the name of a case's containers and networks.
const labelCase = "berm.contract"

type contractCase struct {
	name string
	run  func(t *testing.T, b *fixture)
}

// containerCase is a case that needs a container, and leaves it usable.
type containerCase struct {
	name string
	run  func(t *testing.T, b *fixture, id string)
}

// inOne makes one case of several, which run in one container, one after the other. What
// processes a case leaves are gone before the next one.
func inOne(name string, spec func(*fixture) runtime.Spec, cases ...containerCase) contractCase {
	return contractCase{name, func(t *testing.T, b *fixture) {
		c := b.create(t, spec(b))
		for _, of := range cases {
			t.Run(of.name, func(t *testing.T) {
				t.Cleanup(func() { b.forget(t, c.ID) })
				of.run(t, b, c.ID)
			})
		}
	}}
}

// forget kills and forgets all processes of a container, unless a case has removed it.
func (b *fixture) forget(t *testing.T, id string) {
	processes, err := b.rt.ListProcesses(b.ctx, id)
	for _, p := range processes {
		err = errors.Join(err, b.rt.Kill(b.ctx, id, p.ID))
		b.await(t, "the end of the output of "+p.ID, func() bool {
			left := b.rt.Forget(b.ctx, id, p.ID)
			if !errdefs.IsFailedPrecondition(left) {
				err = errors.Join(err, left)
			}
			return !errdefs.IsFailedPrecondition(left)
		})
	}
	if err != nil && !errdefs.IsNotFound(err) {
		t.Error(err)
	}
}

// fixture is the fixture of a case.
type fixture struct {
	Harness
	rt     runtime.AgentRuntime
	ctx    context.Context // ends long before the test binary's timeout
	name   string          // the prefix of all names
	labels map[string]string
	count  atomic.Int64
}

// Run runs the contract suite: every promise of runtime.AgentRuntime. Its sub-tests are
// named alike for every backend; those that need a kernel are there only if the harness
// has one. It leaves nothing in the engine.
func Run(t *testing.T, h Harness) {
	rt := h.New(t)
	together := slices.Concat(
		agentCases(), execCases(h.Real), basicCases(), createCases(), programCases(), pauserCases(), loggerCases(), watcherCases(), networkerCases(),
	)
	alone := loadCases() // those that want the machine, or the engine, for themselves
	if h.Real {          // those that wait the longest come first
		together = slices.Concat(kernelCases(), killCases(), together, insideCases(), syscallCases(), starterCases())
		alone = append(alone, contractCase{"network/apart", testNetworksApart}, contractCase{"engine that hangs", testHang})
	}
	if h.Collector != nil {
		together = append(together, collectorCases()...)
	} else { // there is something to sweep
		alone = append(alone, sweeperCases()...)
	}
	alone = append(alone, contractCase{"engine killed and restarted", testEngineRestart})
	skipped := func(c contractCase) bool {
		return h.Only != nil && !slices.ContainsFunc(h.Only, func(begin string) bool { return strings.HasPrefix(c.name, begin) })
	}
	t.Run("together", func(t *testing.T) {
		for _, c := range slices.DeleteFunc(together, skipped) {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.run(t, newFixture(t, h, rt))
			})
		}
	})
	for _, c := range slices.DeleteFunc(alone, skipped) {
		t.Run(c.name, func(t *testing.T) { c.run(t, newFixture(t, h, rt)) })
	}
}

func newFixture(t *testing.T, h Harness, rt runtime.AgentRuntime) *fixture {
	name := "berm-contract-" + strings.ToLower(rand.Text()[:12])
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	b := &fixture{Harness: h, rt: rt, ctx: ctx, name: name, labels: map[string]string{labelCase: name}}
	t.Cleanup(func() {
		cancel()
		b.clean(t)
	})
	return b
}

func (b *fixture) clean(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cs, err := b.rt.List(ctx, b.labels)
	if err != nil {
		t.Errorf("clean up: %v", err)
	}
	for _, c := range cs {
		if err := b.rt.Remove(ctx, c.ID); err != nil {
			t.Errorf("clean up: %v", err)
		}
	}
	b.cleanVolumes(ctx, t)
	networks, err := b.rt.Networks(ctx, b.labels)
	if err != nil {
		t.Errorf("clean up: %v", err)
	}
	for _, network := range networks {
		if err := b.rt.RemoveNetwork(ctx, network.Name); err != nil {
			t.Errorf("clean up: %v", err)
		}
	}
}

// spec is of a container that sleeps; each has a name of its own.
func (b *fixture) spec() runtime.Spec {
	return runtime.Spec{
		Name: fmt.Sprintf("%s-%d", b.name, b.count.Add(1)), Image: b.Image,
		Command: []string{"sleep", "100000"}, Labels: maps.Clone(b.labels), RuntimeClass: b.Class, UserNS: b.UserNS,
	}
}

func (b *fixture) create(t *testing.T, spec runtime.Spec) runtime.Container {
	t.Helper()
	c, err := b.rt.Create(b.ctx, spec)
	must(t, err)
	return c
}

func (b *fixture) inspect(t *testing.T, id string) runtime.Container {
	t.Helper()
	c, err := b.rt.Inspect(b.ctx, id)
	must(t, err)
	return c
}

func (b *fixture) list(t *testing.T) []runtime.Container {
	t.Helper()
	cs, err := b.rt.List(b.ctx, b.labels)
	must(t, err)
	return cs
}

// run runs a command and fails the test unless it could be run.
func (b *fixture) run(t *testing.T, id string, e runtime.Exec) (stdout, stderr string, code int) {
	t.Helper()
	var outBuf, errBuf bytes.Buffer
	e.Stdout, e.Stderr = &outBuf, &errBuf
	result, err := b.rt.Exec(b.ctx, id, e)
	if err != nil {
		t.Fatalf("exec %q: %v", e.Command, err)
	}
	return outBuf.String(), errBuf.String(), result.ExitCode
}

// output is what a command prints; the test fails unless it succeeds.
func (b *fixture) output(t *testing.T, id string, command ...string) string {
	t.Helper()
	stdout, stderr, code := b.run(t, id, runtime.Exec{Command: command})
	if code != 0 {
		t.Fatalf("exec %q: exit code %d, %s%s", command, code, stdout, stderr)
	}
	return strings.TrimSpace(stdout)
}

// alive checks that commands can be run.
func (b *fixture) alive(t *testing.T, id string) {
	t.Helper()
	if got := b.output(t, id, "echo", "alive"); got != "alive" {
		t.Errorf("a command prints %q", got)
	}
}

// shell is the output of a script, whatever its exit code.
func (b *fixture) shell(t *testing.T, id, script string) string {
	t.Helper()
	stdout, stderr, _ := b.run(t, id, runtime.Exec{Command: []string{"sh", "-c", script}})
	return strings.TrimSpace(stdout + stderr)
}

// awaitState waits until a container's main process has come to a state.
func (b *fixture) awaitState(t *testing.T, id string, want runtime.State) runtime.Container {
	t.Helper()
	var c runtime.Container
	b.await(t, "state "+string(want), func() bool {
		c = b.inspect(t, id)
		return c.State == want
	})
	return c
}

// await waits until a condition holds.
func (b *fixture) await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-b.ctx.Done():
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// class checks an error's class.
func class(t *testing.T, what string, err error, is func(error) bool, name string) {
	t.Helper()
	if err == nil || !is(err) {
		t.Errorf("%s: error %v, want the class %s", what, err, name)
	}
}

var errCause = errors.New("the cause")

// must ends a test if a step of its own fails.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
