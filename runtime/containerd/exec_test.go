package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

func TestValidateExec(t *testing.T) {
	for _, tt := range []struct {
		name string
		e    runtime.Exec
		ok   bool
	}{
		{"plain", runtime.Exec{Command: []string{"true"}, Env: []string{"A=", "B=c=d"}, WorkingDir: "/"}, true},
		{"empty", runtime.Exec{}, false},
		{"relative directory", runtime.Exec{Command: []string{"true"}, WorkingDir: "tmp"}, false},
		{"zero byte in the command", runtime.Exec{Command: []string{"true", "a\x00b"}}, false},
		{"zero byte in the environment", runtime.Exec{Command: []string{"true"}, Env: []string{"A=secret\x00"}}, false},
		{"no value", runtime.Exec{Command: []string{"true"}, Env: []string{"secret"}}, false},
		{"no name", runtime.Exec{Command: []string{"true"}, Env: []string{"=secret"}}, false},
	} {
		err := validateExec(tt.e)
		if (err == nil) != tt.ok || err != nil && (!errdefs.IsInvalidArgument(err) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%s: error %v", tt.name, err)
		}
	}
}

func TestCommandProcess(t *testing.T) {
	base := &specs.Process{
		Terminal: true, ConsoleSize: &specs.Box{Height: 1}, Cwd: "/", NoNewPrivileges: true,
		Args: []string{runtime.AgentProgram, "init", "/work", "--", "sleep"}, Env: []string{"A=container", "B=container"},
		User: specs.User{UID: 1000}, Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_CHOWN"}},
	}
	before := *base
	// Cwd is never the caller's: by a path below /proc, OCI runtimes that enter it on
	// their way in have been led out of the container (CVE-2024-21626).
	got := command{Exec: runtime.Exec{
		Command: []string{"env", "-0"}, Env: []string{"A=exec", "C=exec", markerEnv + "=forged"}, WorkingDir: "/tmp",
	}}.process(base, "marker")
	want := &specs.Process{
		Cwd: "/", NoNewPrivileges: true, Args: []string{runtime.AgentProgram, "exec", "/tmp", "--", "env", "-0"},
		Env: []string{"A=exec", "B=container", "C=exec", markerEnv + "=marker"}, User: base.User, Capabilities: base.Capabilities,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if args := (command{Exec: runtime.Exec{Command: []string{"x"}}}).process(base, "").Args; args[2] != "/work" {
		t.Errorf("without a directory of its own: %q", args)
	}
	if diff := cmp.Diff(&before, base); diff != "" {
		t.Errorf("the container's own process (-want +got)\n%s", diff)
	}
}

// sandbox makes a container that sleeps, on an engine.
func sandbox(t *testing.T, r *Runtime) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := r.Create(ctx, runtime.Spec{
		Name: "exec-" + strings.ToLower(strings.NewReplacer("/", "-", " ", "-").Replace(t.Name())), Image: testImage,
		Command: []string{"sleep", "100000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := r.Remove(ctx, c.ID); err != nil {
			t.Error(err)
		}
	})
	for !slices.Contains(inside(t, c.ID), "sleep 100000") && ctx.Err() == nil { // the init process forks first, and executes it in a moment
		time.Sleep(time.Millisecond)
	}
	return c.ID
}

// shell runs a script to its end.
func shell(t *testing.T, r *Runtime, id, script string) (output string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out bytes.Buffer
	res, err := r.Exec(ctx, id, runtime.Exec{Command: []string{"sh", "-c", script}, Stdout: &out})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return out.String(), res.ExitCode
}

// begun runs a script that says "begun" in the background, and waits until it has.
func begun(ctx context.Context, t *testing.T, r *Runtime, id, script string) <-chan error {
	t.Helper()
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := r.Exec(ctx, id, runtime.Exec{Command: []string{"sh", "-c", script}, Stdout: pw})
		_ = pw.CloseWithError(err)
		done <- err
	}()
	buf := make([]byte, len("begun\n"))
	if _, err := io.ReadFull(pr, buf); err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	go func() { _, _ = io.Copy(io.Discard, pr) }()
	return done
}

// inside lists the commands of the processes in a container, as the host sees them.
func inside(t *testing.T, id string) []string {
	t.Helper()
	all, err := processes()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for pid, p := range all {
		cgroups, err := readLimited(fmt.Sprintf("/proc/%d/cgroup", pid), 64<<10)
		if err != nil || !strings.Contains(string(cgroups), id) || p.over() {
			continue
		}
		line, err := readLimited(fmt.Sprintf("/proc/%d/cmdline", pid), 1<<10)
		if err == nil {
			out = append(out, strings.Trim(strings.ReplaceAll(string(line), "\x00", " "), " "))
		}
	}
	slices.Sort(out)
	return out
}

// A command that the engine has lost is killed all the same.
func TestExecEngineKilled(t *testing.T) {
	testEngine(t) // or there can't be another
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c, err := startEngine(ctx, engine.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	r := newRuntime(t, c)
	id := sandbox(t, r)
	idle := inside(t, id)
	done := begun(ctx, t, r, id, "echo begun; setsid sleep 70001 & sleep 70002")
	c.Kill()
	at := time.Now()
	err = <-done
	if !errdefs.IsUnavailable(err) || errors.Is(err, runtime.ErrNotKilled) || time.Since(at) > 10*time.Second {
		t.Errorf("after %s: %v", time.Since(at), err)
	}
	if diff := cmp.Diff(idle, inside(t, id)); diff != "" {
		t.Errorf("in the container (-want +got)\n%s", diff)
	}
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := r.Info(ctx); err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("the engine isn't seen again")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if got, code := shell(t, r, id, "echo alive"); got != "alive\n" || code != 0 {
		t.Errorf("afterwards: %q, %d", got, code)
	}
}

// An engine that hangs keeps the end of a command to itself.
func TestExecEngineHangs(t *testing.T) {
	c := testEngine(t)
	opts := testOptions(t, c)
	opts.CallTimeout = 2 * time.Second
	r := newRuntimeWith(t, opts)
	id := sandbox(t, r)
	pr, pw := io.Pipe()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := r.Exec(ctx, id, runtime.Exec{Command: []string{"sh", "-c", "read x; read y"}, Stdin: pr, Stdout: io.Discard})
		_ = pr.Close() // nobody waits for it to read
		done <- err
	}()
	if _, err := io.WriteString(pw, "begun\n"); err != nil { // it is taken once the command has begun
		t.Fatal(err, <-done)
	}
	thaw, err := engine.Freeze(c.Pid())
	t.Cleanup(func() { _ = thaw() })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(pw, "go\n"); err != nil {
		t.Fatal(err)
	}
	err = <-done
	if err := thaw(); err != nil {
		t.Fatal(err)
	}
	if !errdefs.IsUnavailable(err) || errors.Is(err, runtime.ErrNotKilled) {
		t.Errorf("error %v", err)
	}
	_ = pw.Close()
}

// What is frozen can't be killed, and Exec says so; it dies when it thaws.
func TestExecCanceledWhilePaused(t *testing.T) {
	r := newRuntime(t, testEngine(t))
	id := sandbox(t, r)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := begun(ctx, t, r, id, "echo begun; sleep 70001")
	if err := r.Pause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	cancel()
	err := <-done
	if killed := !slices.Contains(inside(t, id), "sleep 70001"); !errdefs.IsCanceled(err) || killed == errors.Is(err, runtime.ErrNotKilled) {
		t.Errorf("killed %t, error %v", killed, err)
	}
	if err := r.Resume(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); slices.Contains(inside(t, id), "sleep 70001"); {
		if time.Now().After(deadline) {
			t.Fatalf("still there: %q", inside(t, id))
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A container that a Berm froze and left can be removed: what is frozen doesn't die before it
// thaws, on cgroup v1.
func TestRemoveFrozen(t *testing.T) {
	r := newRuntime(t, testEngine(t))
	id := sandbox(t, r)
	p, err := r.taskProcess(r.namespaced(t.Context()), id)
	if err != nil {
		t.Fatal(err)
	}
	h, err := openHabitat(id, int(p.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	if _, err := h.freezer.freeze(t.Context()); err != nil { // and never thaw
		t.Fatal(err)
	}
	defer func() { _ = h.freezer.set(false) }()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := r.Remove(ctx, id); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Inspect(t.Context(), id); !errdefs.IsNotFound(err) {
		t.Errorf("it is there: %v", err)
	}
}

// A command in a container that is known takes the engine no call more than it has to, and
// its end is asked for while it begins. What isn't known any more is asked for.
func TestExecCalls(t *testing.T) {
	c := testEngine(t)
	r, other := newRuntime(t, c), newRuntime(t, c)
	id := sandbox(t, other)
	var (
		mu      sync.Mutex
		calls   []string
		waiting chan struct{}
		paused  bool // when the command comes, for that moment
	)
	see := func(ctx context.Context, method string, in, out any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		name := path.Base(method)
		mu.Lock()
		calls = append(calls, name)
		waits, pause := waiting, paused
		paused = paused && name != "Exec"
		mu.Unlock()
		switch name {
		case "Exec":
			if !pause {
				break
			}
			if err := other.Pause(ctx, id); err != nil {
				t.Error(err)
			}
			defer func() {
				if err := other.Resume(ctx, id); err != nil {
					t.Error(err)
				}
			}()
		case "Wait":
			close(waits)
		case "Start":
			select {
			case <-waits:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return invoke(ctx, method, in, out, conn, opts...)
	}
	seen, err := client.New(c.Address(), client.WithDefaultNamespace(c.Namespace()),
		client.WithExtraDialOpts([]grpc.DialOption{grpc.WithUnaryInterceptor(see)}))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.client.Close(); err != nil {
		t.Fatal(err)
	}
	r.client = seen
	run := []string{"DeleteProcess", "Exec", "Start", "Wait"}
	asked := []string{"DeleteProcess", "Exec", "Get", "Start", "Wait"}
	for _, tt := range []struct {
		name  string
		first func(p process) *process
		want  []string
	}{
		{"new", nil, []string{"DeleteProcess", "Exec", "Get", "Get", "Start", "Wait"}},
		{"known", func(p process) *process { return &p }, run},
		{"another with its number", func(p process) *process { p.start--; return &p }, asked},
		{"outside", func(process) *process { p, _ := readProcess(os.Getpid()); return &p }, asked},
		{"gone", func(p process) *process { p.pid = 1 << 23; return &p }, asked},
		{"paused", func(p process) *process { return &p }, slices.Sorted(slices.Values(append([]string{"DeleteProcess", "Exec"}, asked...)))},
		{"known again", func(p process) *process { return &p }, run},
	} {
		if tt.first != nil {
			m := r.commands.mains[id]
			m.first.Store(tt.first(*m.first.Load()))
		}
		mu.Lock()
		calls, waiting, paused = nil, make(chan struct{}), tt.name == "paused"
		mu.Unlock()
		if out, code := shell(t, r, id, "echo hi"); out != "hi\n" || code != 0 {
			t.Errorf("%s: %q, exit code %d", tt.name, out, code)
		}
		r.commands.idleFor(t)
		mu.Lock()
		slices.Sort(calls)
		if diff := cmp.Diff(tt.want, calls); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tt.name, diff)
		}
		mu.Unlock()
	}
}

// Whatever a command's end, nothing of it stays in the engine, its shim or our files.
func TestExecLeavesNothing(t *testing.T) {
	r := newRuntime(t, testEngine(t))
	id := sandbox(t, r)
	pid, err := r.runningPid(r.namespaced(t.Context()), id)
	if err != nil {
		t.Fatal(err)
	}
	first, err := readProcess(int(pid))
	if err != nil {
		t.Fatal(err)
	}
	open := func() int {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", first.parent)) // the shim
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
	use := func() {
		shell(t, r, id, "exit 3")
		shell(t, r, id, "sleep 3 & echo kept")
		shell(t, r, id, "while true; do echo on and on; done & echo kept")
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := r.Exec(ctx, id, runtime.Exec{Command: []string{"sleep", "1000"}}); err == nil {
			t.Error("a command outlived its context")
		}
		if _, err := r.Exec(t.Context(), id, runtime.Exec{Command: []string{"no-such-program"}, Stdin: strings.NewReader("x")}); err != nil {
			t.Error(err)
		}
	}
	use()
	r.commands.idleFor(t)
	before := open()
	for range 3 {
		use()
	}
	r.commands.idleFor(t)
	for deadline := time.Now().Add(10 * time.Second); open() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("the shim has %d files open, %d before", open(), before)
		}
		time.Sleep(10 * time.Millisecond)
	}
	left, err := os.ReadDir(r.path("containers", id, "exec"))
	if err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// idleFor waits until the engine has forgotten all commands.
func (c *commands) idleFor(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	idle := c.idle
	c.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(disposeTimeout):
		t.Fatal("the engine doesn't forget the commands")
	}
}
