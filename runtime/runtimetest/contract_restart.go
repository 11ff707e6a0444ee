package runtimetest

import (
	"bytes"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
)

// testClientRestart has a second client find all that a first one left, and use it.
func testClientRestart(t *testing.T, b *fixture) {
	running, exited, paused := b.spec(), b.spec(), b.spec()
	running.Env, running.Labels["kind"] = []string{"A=1"}, "running"
	exited.Command = []string{"sh", "-c", "echo to stdout; echo to stderr >&2; exit 3"}
	specs := []runtime.Spec{running, exited, paused}
	must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Labels: b.labels}))
	specs[0].Network = b.name
	if b.Real {
		killed := b.spec()
		killed.MemoryBytes, killed.Command = 48<<20, eatMemoryLater
		specs = append(specs, killed)
	}
	first := make(map[string]runtime.Container)
	var ids []string
	for i, spec := range specs {
		id := b.create(t, spec).ID
		ids = append(ids, id)
		switch i {
		case 1:
			b.awaitState(t, id, runtime.StateExited)
		case 3:
			b.await(t, "the want of memory to be told", func() bool { return b.inspect(t, id).OOMKilled })
			b.awaitState(t, id, runtime.StateExited)
		case 2:
			must(t, b.rt.Pause(b.ctx, id))
		}
		first[id] = b.inspect(t, id)
	}
	if c := first[ids[1]]; c.ExitCode != 3 {
		t.Errorf("the one that ended: %+v", c)
	}

	other := b.New(t)
	cs, err := other.List(b.ctx, b.labels)
	if err != nil || len(cs) != len(ids) {
		t.Fatalf("the second client sees %+v, %v", cs, err)
	}
	for _, c := range cs {
		if was := first[c.ID]; c.State != was.State || c.Name != was.Name || c.Image != was.Image || !cmp.Equal(c.Labels, was.Labels) {
			t.Errorf("listed %+v, was %+v", c, was)
		}
	}
	for _, id := range ids {
		got, err := other.Inspect(b.ctx, id)
		must(t, err)
		if diff := cmp.Diff(first[id], got); diff != "" {
			t.Errorf("the second client sees another container:\n%s", diff)
		}
	}
	if _, err := other.Create(b.ctx, running); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a name that is taken: %v", err)
	}
	must(t, other.Resume(b.ctx, ids[2]))
	for _, id := range []string{ids[0], ids[2]} {
		var out bytes.Buffer
		result, err := other.Exec(b.ctx, id, runtime.Exec{Command: []string{"sh", "-c", "env; exit 5"}, Stdout: &out})
		if err != nil || result.ExitCode != 5 || id == ids[0] && !bytes.Contains(out.Bytes(), []byte("A=1\n")) {
			t.Errorf("exec: %+v, %v, %s", result, err, &out)
		}
	}
	var stdout, stderr bytes.Buffer
	if err := other.Logs(b.ctx, ids[1], runtime.LogOptions{}, &stdout, &stderr); err != nil || stdout.String() != "to stdout\n" || stderr.String() != "to stderr\n" {
		t.Errorf("logs: %q and %q, %v", &stdout, &stderr, err)
	}
	for _, id := range ids {
		must(t, other.Remove(b.ctx, id))
	}
	if cs := b.list(t); len(cs) != 0 {
		t.Errorf("the first client still sees %+v", cs)
	}
}
