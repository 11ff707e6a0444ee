package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func mustCreate(t testing.TB, f *Fake, spec runtime.Spec) runtime.Container {
	t.Helper()
	if spec.Image == "" {
		spec.Image = DefaultImage
	}
	c, err := f.Create(context.Background(), spec)
	must(t, err)
	return c
}

func TestFakeFaults(t *testing.T) {
	ctx := context.Background()
	broken := errors.New("broken")
	var before, after string
	f := NewFake(FakeOptions{
		Fail: func(op, id string) error {
			if op+" "+id == before {
				return broken
			}
			return nil
		},
		FailAfter: func(op, id string) error {
			if op+" "+id == after {
				return broken
			}
			return nil
		},
	})

	before = "create a"
	if _, err := f.Create(ctx, runtime.Spec{Name: "a", Image: DefaultImage}); !errors.Is(err, broken) {
		t.Errorf("create with Fail: %v", err)
	}
	if n := len(f.Containers()); n != 0 {
		t.Errorf("a create that failed made %d containers", n)
	}
	before, after = "", "create a"
	if _, err := f.Create(ctx, runtime.Spec{Name: "a", Image: DefaultImage}); !errors.Is(err, broken) {
		t.Errorf("create with FailAfter: %v", err)
	}
	if n := len(f.Containers()); n != 1 {
		t.Errorf("a create that failed afterwards left %d containers, want 1", n)
	}
	if n := f.Calls("create"); n != 2 {
		t.Errorf("Calls = %d, want 2", n)
	}
}

func TestFakeDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		f := NewFake(FakeOptions{})
		c := mustCreate(t, f, runtime.Spec{Name: "a"})
		calls := map[string]func() error{
			"watch": func() error { return f.Watch(ctx, nil, nil, func(runtime.Event) {}) },
			"exec": func() error {
				_, err := f.Exec(ctx, c.ID, runtime.Exec{Command: []string{"sleep", "infinity"}})
				return err
			},
			"logs": func() error { return f.Logs(ctx, c.ID, runtime.LogOptions{Follow: true}, nil, nil) },
		}
		var wg sync.WaitGroup
		for name, call := range calls {
			wg.Go(func() {
				if err := call(); !errdefs.IsUnavailable(err) {
					t.Errorf("%s under way when the engine goes down: %v", name, err)
				}
			})
		}
		synctest.Wait()
		f.SetDown(true)
		wg.Wait()
		for name, call := range calls {
			if err := call(); !errdefs.IsUnavailable(err) {
				t.Errorf("%s while the engine is down: %v", name, err)
			}
		}
		f.SetDown(false)
		if got, err := f.Inspect(ctx, c.ID); err != nil || got.State != runtime.StateRunning {
			t.Errorf("afterwards: %v, %v", got.State, err)
		}
	})
}

func TestFakeDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{Delay: func(op string) time.Duration {
			if op == "create" {
				return time.Minute
			}
			return 0
		}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.Create(ctx, runtime.Spec{Name: "a", Image: DefaultImage})
		if !errdefs.IsDeadlineExceeded(err) || len(f.Containers()) != 0 {
			t.Errorf("create that took too long: %v, %d containers", err, len(f.Containers()))
		}
		start := time.Now()
		mustCreate(t, f, runtime.Spec{Name: "a"})
		if took := time.Since(start); took != time.Minute {
			t.Errorf("create took %s, want 1m", took)
		}
	})
}

func TestFakeDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		var events []runtime.EventType
		ctx, cancel := context.WithCancel(t.Context())
		watched := make(chan error)
		go func() {
			watched <- f.Watch(ctx, nil, nil, func(e runtime.Event) { events = append(events, e.Type) })
		}()
		synctest.Wait()
		c := mustCreate(t, f, runtime.Spec{Name: "a"})
		execed := make(chan error)
		go func() {
			_, err := f.Exec(ctx, c.ID, runtime.Exec{Command: []string{"sleep", "infinity"}})
			execed <- err
		}()
		synctest.Wait()
		f.OOMKill(c.ID)
		f.Die(c.ID)
		if err := <-execed; !errdefs.IsFailedPrecondition(err) {
			t.Errorf("exec in a container that died: %v", err)
		}
		got, err := f.Inspect(ctx, c.ID)
		if err != nil || got.State != runtime.StateExited || got.ExitCode != 137 || !got.OOMKilled {
			t.Errorf("after the death: %+v, %v", got, err)
		}
		synctest.Wait()
		cancel()
		must(t, <-watched)
		if got := fmt.Sprint(events); got != "[start oom exit]" {
			t.Errorf("events: %s", got)
		}
	})
}

func TestFakeMainProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		c := mustCreate(t, f, runtime.Spec{Name: "a", Command: []string{"sh", "-c", "echo one; sleep 60; echo two >&2; exit 3"}})
		start := time.Now()
		var stdout, stderr strings.Builder
		must(t, f.Logs(t.Context(), c.ID, runtime.LogOptions{Follow: true}, &stdout, &stderr))
		if stdout.String() != "one\n" || stderr.String() != "two\n" || time.Since(start) != time.Minute {
			t.Errorf("followed %q and %q for %s", &stdout, &stderr, time.Since(start))
		}
		if got, _ := f.Inspect(t.Context(), c.ID); got.ExitCode != 3 {
			t.Errorf("exit code %d, want 3", got.ExitCode)
		}
	})
}

func TestFakeExecHook(t *testing.T) {
	f := NewFake(FakeOptions{Exec: func(_ context.Context, c runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
		if e.Command[0] != "tool" {
			return runtime.ExecResult{}, errors.ErrUnsupported
		}
		in, _ := io.ReadAll(e.Stdin)
		_, _ = fmt.Fprintf(e.Stdout, "%s %s", c.Name, in)
		return runtime.ExecResult{ExitCode: 7}, nil
	}})
	c := mustCreate(t, f, runtime.Spec{Name: "a"})
	for _, tt := range []struct {
		command string
		code    int
		stdout  string
	}{{"tool", 7, "a "}, {"false", 1, ""}, {"nothing", 127, ""}} {
		var stdout strings.Builder
		got, err := f.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{tt.command}, Stdout: &stdout})
		if err != nil || got.ExitCode != tt.code || stdout.String() != tt.stdout {
			t.Errorf("%s: %+v %q %v", tt.command, got, &stdout, err)
		}
	}
}
