package docker

import (
	"bytes"
	"context"
	"errors"
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
	for _, script := range []string{"sleep 30 & echo hi", "(while :; do echo x; sleep 0.05; done) & echo hi", "yes & echo hi"} {
		var out bytes.Buffer
		start := time.Now()
		res, err := r.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{"sh", "-c", script}, Stdout: &out})
		if took := time.Since(start); err != nil || res.ExitCode != 0 || !strings.Contains(out.String(), "hi\n") || took > 1500*time.Millisecond {
			t.Errorf("%s: %v %+v %q after %s", script, err, res, out.String()[:min(out.Len(), 50)], took)
		} else {
			t.Logf("%s: %s", script, took)
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

func TestExecKill(t *testing.T) {
	r := newRuntime(t, testEngine(t).Host())
	cases := []struct {
		name, script string
		want         error // besides the context's
	}{
		{"plain", "sleep 1001", nil},
		{"tree", "sleep 1001 & sleep 1001 & (sleep 1001; true) & wait", nil},
		{"setsid", "setsid sleep 1001 & nohup sleep 1001 >/dev/null 2>&1 & wait", nil},
		{"double_fork", "(setsid sh -c 'sleep 1001 & sleep 1001' >/dev/null 2>&1 &) ; sleep 1001", nil},
		{"forking", "f() { while :; do (sleep 0.01 &) ; done; }; f & f; wait", nil},
		{"ignoring", "trap '' TERM INT HUP; while :; do sleep 1; done", nil},
		{"stopped", "sh -c 'kill -STOP $$' & kill -STOP $$", nil},
		{"no_environment", "exec env -i sh -c 'sleep 1001; true'", nil},
		{"child_without_environment", "env -i sh -c 'sleep 1001; true'; true", nil},
		{"hidden_orphan", "(env -i setsid sleep 1001 &); sleep 1001", runtime.ErrNotKilled},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c := sandbox(t, r, func(s *runtime.Spec) { s.PidsLimit = 1000 })
			other := make(chan error, 1)
			go func() {
				_, err := r.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{"sh", "-c", "sleep 2002 & while [ ! -e /stop ]; do sleep 0.1; done; kill %1"}})
				other <- err
			}()
			cause := errors.New("enough")
			ctx, cancel := context.WithTimeoutCause(t.Context(), 700*time.Millisecond, cause)
			defer cancel()
			start := time.Now()
			_, err := r.Exec(ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", tc.script}})
			t.Logf("%v after %s", err, time.Since(start))
			if !errdefs.IsDeadlineExceeded(err) || !errors.Is(err, cause) || errors.Is(err, runtime.ErrNotKilled) != (tc.want != nil) {
				t.Errorf("error %v", err)
			}
			if out, _, _ := sh(t, r, c.ID, "ps"); tc.want == nil && (strings.Contains(out, "1001") || strings.Count(out, "sleep 2002") != 2) {
				t.Errorf("left are:\n%s", out)
			}
			sh(t, r, c.ID, "touch /stop")
			if err := <-other; err != nil {
				t.Errorf("another command: %v", err)
			}
		})
	}
}
