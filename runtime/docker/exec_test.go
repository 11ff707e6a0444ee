package docker

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// sandbox makes a container for one test.
func sandbox(t testing.TB, r *Runtime, change func(*runtime.Spec)) runtime.Container {
	t.Helper()
	spec := runtime.Spec{
		Name:    "berm-test-" + strings.ToLower(strings.NewReplacer("/", "-", "#", "-").Replace(t.Name())),
		Image:   testImage,
		Command: []string{"sleep", "100000"},
	}
	if change != nil {
		change(&spec)
	}
	c, err := r.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Remove(context.Background(), c.ID); err != nil {
			t.Error(err)
		}
	})
	return c
}

func sh(t testing.TB, r *Runtime, id, script string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	res, err := r.Exec(t.Context(), id, runtime.Exec{Command: []string{"sh", "-c", script}, Stdout: &out, Stderr: &errs})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return out.String(), errs.String(), res.ExitCode
}

func TestExecHeldOpen(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	c := sandbox(t, r, nil)
	for _, script := range []string{"sleep 1000 & echo hi", "(while :; do echo x; sleep 0.05; done) & echo hi", "yes & echo hi"} {
		var out bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // or it waits for what holds the output
		res, err := r.Exec(ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", script}, Stdout: &out})
		cancel()
		if err != nil || res.ExitCode != 0 || !strings.Contains(out.String(), "hi\n") {
			t.Errorf("%s: %v %+v %q", script, err, res, out.String()[:min(out.Len(), 50)])
		}
		sh(t, r, c.ID, "pkill yes; pkill sleep; true")
	}
}

func TestExecRefused(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	c := sandbox(t, r, nil)
	for _, e := range []runtime.Exec{
		{Command: []string{"nosuch"}},
		{Command: []string{"/etc/passwd"}},
		{Command: []string{"nosuch"}, WorkingDir: "/new/dir"},
	} {
		var out, errs bytes.Buffer
		e.Stdout, e.Stderr = &out, &errs
		res, err := r.Exec(t.Context(), c.ID, e)
		if err != nil || res.ExitCode != 126 && res.ExitCode != 127 || out.Len() > 0 || errs.Len() == 0 {
			t.Errorf("%q: %v %+v stdout %q stderr %q", e.Command, err, res, out.String(), errs.String())
		}
		t.Logf("%+v %s", res, errs.String())
	}
	var out bytes.Buffer
	res, err := r.Exec(t.Context(), c.ID, runtime.Exec{
		Command: []string{"sh", "-c", "pwd; cat"}, WorkingDir: "/a/b c", Stdin: strings.NewReader("input"), Stdout: &out,
	})
	if err != nil || res.ExitCode != 0 || out.String() != "/a/b c\ninput" {
		t.Errorf("%v %+v %q", err, res, out.String())
	}
	_, err = r.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{"pwd"}, WorkingDir: "/etc/passwd/x"})
	if !errdefs.IsInvalidArgument(err) {
		t.Errorf("working directory below a file: %v", err)
	}
}

func TestExecOOM(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	c := sandbox(t, r, func(s *runtime.Spec) { s.MemoryBytes = 32 << 20 })
	run := func(cmd ...string) runtime.ExecResult {
		res, err := r.Exec(t.Context(), c.ID, runtime.Exec{Command: cmd})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	if got := run("sh", "-c", "kill -9 $$"); got != (runtime.ExecResult{ExitCode: 137}) {
		t.Errorf("before: %+v", got)
	}
	if got := run("tail", "/dev/zero"); got != (runtime.ExecResult{ExitCode: 137, OOMKilled: true}) {
		t.Errorf("out of memory: %+v", got)
	}
	if got := run("sh", "-c", "kill -9 $$"); got != (runtime.ExecResult{ExitCode: 137}) {
		t.Errorf("after: %+v", got)
	}
}

// shells are directories of programs that stand in for a container's /bin. Nil
// means its own, which is busybox.
func shells(t *testing.T) map[string][]runtime.Mount {
	out := map[string][]runtime.Mount{"busybox": nil}
	for _, shell := range []string{"dash", "bash"} {
		dir := t.TempDir()
		out[shell] = []runtime.Mount{{Source: dir, Target: "/bin", ReadOnly: true}}
		for _, lib := range []string{"/usr/lib", "/usr/lib64"} {
			if _, err := os.Stat(lib); err == nil {
				out[shell] = append(out[shell], runtime.Mount{Source: lib, Target: strings.TrimPrefix(lib, "/usr"), ReadOnly: true})
			}
		}
		for name, program := range map[string]string{
			"sh": shell, "sleep": "sleep", "env": "env", "setsid": "setsid", "nohup": "nohup", "ps": "busybox", "touch": "touch",
		} {
			file, err := exec.LookPath(program)
			if err != nil {
				t.Logf("without %s: %v", shell, err)
				delete(out, shell)
				break
			}
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func TestExecKill(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	cases := []struct {
		name, script string // prints when all of its processes are on their way
		want         error  // besides the context's
	}{
		{"tree", "sleep 1001 & sleep 1001 & (sleep 1001; true) & echo; wait", nil},
		{"setsid", "setsid sleep 1001 & nohup sleep 1001 >/dev/null 2>&1 & echo; wait", nil},
		{"double_fork", "(setsid sh -c 'sleep 1001 & sleep 1001' >/dev/null 2>&1 &); echo; sleep 1001", nil},
		{"forking", "f() { while :; do (sleep 0.01 &) ; done; }; f & f & sleep 0.1; echo; wait", nil},
		{"ignoring", "trap '' TERM INT HUP; echo; while :; do sleep 1; done", nil},
		{"stopped", "sh -c 'kill -STOP $$' & echo; kill -STOP $$", nil},
		{"no_environment", "exec env -i sh -c 'echo; sleep 1001; true'", nil},
		{"child_without_environment", "env -i sh -c 'echo; sleep 1001; true'; true", nil},
		{"hidden_orphan", "(env -i setsid sleep 1001 &); sleep 0.2; echo; sleep 1001", runtime.ErrNotKilled},
	}
	for shell, mounts := range shells(t) {
		for _, tc := range cases {
			t.Run(shell+"/"+tc.name, func(t *testing.T) {
				t.Parallel()
				c := sandbox(t, r, func(s *runtime.Spec) { s.PidsLimit, s.Mounts = 1000, mounts })
				other := make(chan error, 1)
				go func() {
					_, err := r.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{"sh", "-c", "sleep 2002 & while [ ! -e /stop ]; do sleep 0.1; done; kill %1"}})
					other <- err
				}()
				cause := errors.New("enough")
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				_, err := r.Exec(ctx, c.ID, runtime.Exec{
					Command: []string{"sh", "-c", tc.script},
					Stdout:  writerFunc(func() { cancel(cause) }),
				})
				if !errdefs.IsCanceled(err) || !errors.Is(err, cause) || errors.Is(err, runtime.ErrNotKilled) != (tc.want != nil) {
					t.Errorf("error %v", err)
				}
				if out, _, _ := sh(t, r, c.ID, "ps"); tc.want == nil && strings.Contains(out, "1001") {
					t.Errorf("left are:\n%s", out)
				}
				sh(t, r, c.ID, "touch /stop")
				if err := <-other; err != nil {
					t.Errorf("another command: %v", err)
				}
			})
		}
	}
}

// writerFunc is called for each write.
type writerFunc func()

func (f writerFunc) Write(p []byte) (int, error) {
	f()
	return len(p), nil
}

func TestExecKillWithoutShell(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	c := sandbox(t, r, nil)
	sh(t, r, c.ID, "rm /bin/sh")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := r.Exec(ctx, c.ID, runtime.Exec{Command: []string{"sleep", "1001"}})
	if !errdefs.IsDeadlineExceeded(err) || !errors.Is(err, runtime.ErrNotKilled) {
		t.Errorf("error %v", err)
	}
	if took := time.Since(start); took > 2*killTimeout {
		t.Errorf("it took %s", took)
	}
}
