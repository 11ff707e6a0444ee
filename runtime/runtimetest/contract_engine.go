package runtimetest

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func engineCases() []contractCase {
	return []contractCase{{"engine killed and restarted", testEngineRestart}}
}

func testEngineRestart(t *testing.T, b *bed) {
	spec := b.spec()
	spec.Labels["kept"] = "yes"
	c := b.create(t, spec)

	// What is under way when the engine dies.
	out := newSignalWriter("started")
	underWay := make(map[string]chan error)
	start := func(name string, f func() error) {
		done := make(chan error, 1)
		underWay[name] = done
		go func() { done <- f() }()
	}
	start("exec", func() error {
		_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", "echo started; sleep 1000"}, Stdout: out})
		return err
	})
	<-out.seen
	if w, ok := b.rt.(runtime.Watcher); ok {
		ready := make(chan struct{})
		start("watch", func() error { return w.Watch(b.ctx, nil, func() { close(ready) }, func(runtime.Event) {}) })
		<-ready
	}
	b.Engine.Kill()
	for name, done := range underWay {
		select {
		case err := <-done:
			class(t, name+" under way when the engine is killed", err, errdefs.IsUnavailable, "Unavailable")
		case <-b.ctx.Done():
			t.Fatalf("%s under way when the engine is killed doesn't end", name)
		}
	}
	for name, call := range b.calls(c.ID) {
		begun := time.Now()
		class(t, name+" without an engine", call(b.ctx), errdefs.IsUnavailable, "Unavailable")
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("%s without an engine took %s", name, took)
		}
	}
	ctx, cancel := context.WithTimeout(b.ctx, 50*time.Millisecond)
	_, err := b.rt.Exec(ctx, c.ID, runtime.Exec{Command: []string{"true"}})
	cancel()
	if err == nil {
		t.Error("exec without an engine succeeded")
	}

	if err := b.Engine.Start(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.await(t, "the engine to be seen again", func() bool {
		_, err := b.rt.Info(b.ctx)
		return err == nil
	})
	cs := b.list(t)
	if len(cs) != 1 || cs[0].ID != c.ID || cs[0].Labels["kept"] != "yes" {
		t.Errorf("afterwards: %+v", cs)
	}
	for i := range 2 {
		made := b.create(t, b.spec())
		var stdout bytes.Buffer
		if _, err := b.rt.Exec(b.ctx, made.ID, runtime.Exec{Command: []string{"echo", fmt.Sprint(i)}, Stdout: &stdout}); err != nil || stdout.String() != fmt.Sprintln(i) {
			t.Errorf("exec in a new one: %q, %v", &stdout, err)
		}
	}
	if err := b.rt.Remove(b.ctx, c.ID); err != nil {
		t.Errorf("remove the old one: %v", err)
	}
}
