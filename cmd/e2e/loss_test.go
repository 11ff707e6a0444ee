package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// TestEngineAway has an engine hang, and stop.
func TestEngineAway(t *testing.T) {
	onEachEngine(t, func(t *testing.T, kind string) {
		t.Parallel() // most of its time it waits
		e := startEngine(t, kind, engine.Options{})
		t.Run("hangs", func(t *testing.T) { testHungEngine(t, *e) })
		t.Run("stops", func(t *testing.T) { testStoppedEngine(t, e) })
	})
}

// An engine that hangs: every call answers within its deadline, and the server
// recovers by itself.
func testHungEngine(t *testing.T, own testEngine) {
	ctx, e := t.Context(), &own
	e.config.CallTimeout = 10 * time.Second
	s, server := newStorm(t, e)
	before := check.Value(s.client.Create(ctx, "before", apitype.SandboxRequest{}))(t)
	thaw, err := engine.Freeze(e.Pid())
	defer func() { _ = thaw() }() // for a test that ends early
	must(t, err)
	began := time.Now()
	// The first call meets an engine that nobody knows to hang.
	if _, err := s.client.Create(ctx, "during", apitype.SandboxRequest{}); refusal(err).Status != http.StatusServiceUnavailable {
		t.Errorf("create: %v", err)
	}
	if took := time.Since(began); took > 40*time.Second {
		t.Errorf("a create took %s to fail", took)
	}
	until(t, "the server isn't ready", func() bool {
		return refusal(s.client.Ready(ctx)).Status == http.StatusServiceUnavailable
	})
	began = time.Now()
	if _, err := s.client.Exec(ctx, "before", apitype.ExecRequest{Command: apitype.Command{"true"}}); refusal(err).Status != http.StatusServiceUnavailable {
		t.Errorf("exec: %v", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("once it is known to hang, a command took %s to fail", took)
	}
	must(t, thaw())
	until(t, "the server has found its engine again", func() bool { return s.client.Ready(t.Context()) == nil })
	after, err := s.client.Get(ctx, "before")
	if err != nil || after.SessionID != before.SessionID || after.Status != "running" {
		t.Errorf("afterwards: %+v, %v", after, err)
	}
	for _, key := range []string{"before", "during"} {
		must(t, second(s.client.Delete(ctx, key)))
	}
	s.settle(server)
	wantNothing(t, e, server)
}

// Two instances share an engine, and neither takes the other's. One of them loses
// its store, and still knows its sandboxes.
func TestTwoInstancesAndALostStore(t *testing.T) { onEachEngine(t, testTwoInstancesAndALostStore) }

func testTwoInstancesAndALostStore(t *testing.T, kind string) {
	t.Parallel() // most of its time it waits
	ctx := t.Context()
	e := commonEngine(t, kind)
	one, server := newStorm(t, e)
	two, other := newStorm(t, e)
	var sessions []string
	for i, s := range []*storm{one, two} {
		ttl := apitype.Duration(stormTTL << i) // a restart takes some of the second one's
		sb := check.Value(s.client.Create(ctx, "same", apitype.SandboxRequest{TTL: &ttl}))(t)
		sessions = append(sessions, sb.SessionID)
	}
	server.Kill()
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(filepath.Join(server.dir, "state", "berm.db"+suffix)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	one.start(server)
	for i, s := range []*storm{one, two} {
		sb, err := s.client.Create(ctx, "same", apitype.SandboxRequest{})
		if err != nil || sb.Result != "reused" || sb.SessionID != sessions[i] {
			t.Errorf("instance %d: %+v, %v", i+1, sb, err)
		}
	}
	// One more TTL from the start, and it ends.
	one.settle(server)
	if got := containersOf(t, e, server); got != 0 {
		t.Errorf("the first instance left %d containers", got)
	}
	must(t, second(two.client.Delete(ctx, "same")))
	two.settle(other)
	wantNothing(t, e, server, other)
}
