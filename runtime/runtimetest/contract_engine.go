package runtimetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// testEngineRestart kills the engine and starts it again. One may take its containers
// along, another leave them: what lives is usable afterwards, what ended is told so,
// and nothing is lost.
func testEngineRestart(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Labels["kept"] = "yes"
	c := b.create(t, spec)
	ended := b.spec()
	ended.Command = []string{"sh", "-c", "echo printed; exit 3"}
	before := b.awaitState(t, b.create(t, ended).ID, runtime.StateExited)
	ending, end := b.ending(t)

	// These calls are under way when the engine dies.
	ctx, cancelExec := context.WithCancel(b.ctx)
	defer cancelExec()
	exec := b.underWay(ctx, t, c.ID)
	underWay := map[string]<-chan error{}
	if !b.Real {
		underWay["exec"] = exec
	}
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- b.rt.Watch(b.ctx, nil, func() { close(ready) }, func(runtime.Event) {}) }()
	<-ready
	underWay["watch"] = done
	b.Engine.Kill()
	for name, done := range underWay {
		select {
		case err := <-done:
			class(t, name+" under way when the engine is killed", err, errdefs.IsUnavailable, "Unavailable")
		case <-b.ctx.Done():
			t.Fatalf("%s under way when the engine is killed doesn't end", name)
		}
	}
	for name, call := range b.calls(b.rt, c.ID) {
		if name == "exec" && b.Real {
			continue
		}
		begun := time.Now()
		if err := call(b.ctx); !b.answered(name) {
			class(t, name+" without an engine", err, errdefs.IsUnavailable, "Unavailable")
		} else if err != nil {
			t.Errorf("%s, which needs no engine: %v", name, err)
		}
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("%s without an engine took %s", name, took)
		}
	}
	soon, cancel := context.WithTimeout(b.ctx, 50*time.Millisecond)
	_, err := b.rt.Exec(soon, c.ID, runtime.Exec{Command: []string{"true"}})
	cancel()
	if err == nil && !b.Real {
		t.Error("exec without an engine succeeded")
	}
	end()

	must(t, b.Engine.Start(b.ctx))
	b.await(t, "the engine to be seen again", func() bool {
		_, err := b.rt.Info(b.ctx)
		return err == nil
	})
	if b.Real {
		cancelExec()
		if err := <-exec; !errdefs.IsCanceled(err) && !errdefs.IsUnavailable(err) && !errors.Is(err, runtime.ErrInterrupted) {
			t.Errorf("exec under way when the engine was killed: %v", err)
		}
	}
	ids := map[string]bool{c.ID: true, before.ID: true, ending: true}
	cs := b.list(t)
	for _, listed := range cs {
		if !ids[listed.ID] || listed.ID == c.ID && listed.Labels["kept"] != "yes" {
			t.Errorf("listed: %+v", listed)
		}
	}
	if len(cs) != len(ids) {
		t.Errorf("%d are listed of %d", len(cs), len(ids))
	}
	b.afterRestart(t, c.ID, before, ending)
	for i := range 2 {
		made := b.create(t, b.spec())
		if got := b.output(t, made.ID, "echo", fmt.Sprint(i)); got != fmt.Sprint(i) {
			t.Errorf("exec in a new one: %q", got)
		}
	}
	_, err = b.rt.Create(b.ctx, spec)
	class(t, "a name that was taken before", err, errdefs.IsAlreadyExists, "AlreadyExists")
	for id := range ids {
		if err := b.rt.Remove(b.ctx, id); err != nil {
			t.Errorf("remove an old one: %v", err)
		}
		_, err := b.rt.Inspect(b.ctx, id)
		class(t, "an old one that was removed", err, errdefs.IsNotFound, "NotFound")
	}
	b.create(t, spec)
}

// ending makes a container whose main process exits with code 5 when end is called.
func (b *fixture) ending(t *testing.T) (id string, end func()) {
	t.Helper()
	spec := b.spec()
	if !b.Real {
		spec.Command = []string{"sh", "-c", "sleep 0.5; exit 5"}
		return b.create(t, spec).ID, func() {}
	}
	dir := t.TempDir()
	spec.Mounts = []runtime.Mount{{Source: dir, Target: "/mnt"}}
	spec.Command = []string{"sh", "-c", "until test -e /mnt/end; do sleep 0.1; done; touch /mnt/ended; exit 5"}
	return b.create(t, spec).ID, func() {
		must(t, os.WriteFile(filepath.Join(dir, "end"), nil, 0o600))
		b.await(t, "a main process to end without the engine", func() bool {
			_, err := os.Stat(filepath.Join(dir, "ended"))
			return err == nil
		})
	}
}

// afterRestart looks at one that ran, one that had ended and one that ended meanwhile.
func (b *fixture) afterRestart(t *testing.T, ran string, before runtime.Container, ending string) {
	t.Helper()
	if got := b.inspect(t, ran); got.State == runtime.StateRunning {
		b.alive(t, ran)
	} else if got.State != runtime.StateExited || got.ExitCode == 0 || got.FinishedAt.IsZero() {
		t.Errorf("one that ended with the engine: %+v", got)
	}
	if got := b.inspect(t, before.ID); got.State != runtime.StateExited || got.ExitCode != 3 || !got.FinishedAt.Equal(before.FinishedAt) {
		t.Errorf("one that had ended: %+v, was %+v", got, before)
	}
	var out bytes.Buffer
	if err := b.rt.Logs(b.ctx, before.ID, runtime.LogOptions{}, &out, nil); err != nil || out.String() != "printed\n" {
		t.Errorf("its log: %q, %v", &out, err)
	}
	if got := b.awaitState(t, ending, runtime.StateExited); got.ExitCode != 5 || got.FinishedAt.IsZero() {
		t.Errorf("one that ended while the engine was away: %+v", got)
	}
}
