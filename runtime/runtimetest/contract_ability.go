package runtimetest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

var noID = strings.Repeat("0", 64)

func pauserCases() []contractCase {
	return []contractCase{{"pause", testPause}, {"pause while commands start", testPauseStart}}
}

// A container that is frozen under a command that is just being started must not
// be lost to the engine: old ones never answer for it again.
func testPauseStart(t *testing.T, b *bed) {
	p := b.rt.(runtime.Pauser)
	c := b.create(t, b.spec())
	for i := range 15 {
		ctx, cancel := context.WithTimeout(b.ctx, 10*time.Second)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				_, err := b.rt.Exec(ctx, c.ID, runtime.Exec{Command: []string{"true"}})
				if err != nil && !errdefs.IsFailedPrecondition(err) { // paused already
					t.Errorf("round %d: exec: %v", i, err)
				}
			})
		}
		time.Sleep(time.Duration(i) * 3 * time.Millisecond) // anywhere in the start
		if err := p.Pause(ctx, c.ID); err != nil {
			t.Errorf("round %d: pause: %v", i, err)
		}
		if err := p.Resume(ctx, c.ID); err != nil {
			t.Errorf("round %d: resume: %v", i, err)
		}
		wg.Wait()
		cancel()
		if t.Failed() {
			return
		}
	}
}

func testPause(t *testing.T, b *bed) {
	p := b.rt.(runtime.Pauser)
	c := b.create(t, b.spec())
	for range 2 {
		if err := p.Pause(b.ctx, c.ID); err != nil {
			t.Fatal(err)
		}
	}
	if got := b.inspect(t, c.ID).State; got != runtime.StatePaused {
		t.Errorf("paused: %s", got)
	}
	if cs := b.list(t); len(cs) != 1 || cs[0].State != runtime.StatePaused {
		t.Errorf("listed: %+v", cs)
	}
	_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}})
	class(t, "exec in a paused container", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	for range 2 {
		if err := p.Resume(b.ctx, c.ID); err != nil {
			t.Fatal(err)
		}
	}
	if got := b.output(t, c.ID, "echo", "alive"); got != "alive" {
		t.Errorf("resumed: %q", got)
	}
	if err := p.Pause(b.ctx, c.ID); err != nil {
		t.Fatal(err)
	}
	if err := b.rt.Remove(b.ctx, c.ID); err != nil {
		t.Errorf("remove a paused container: %v", err)
	}
	class(t, "pause", p.Pause(b.ctx, noID), errdefs.IsNotFound, "NotFound")
	class(t, "resume", p.Resume(b.ctx, noID), errdefs.IsNotFound, "NotFound")

	spec := b.spec()
	spec.Command = []string{"true"}
	c = b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	class(t, "pause one that ended", p.Pause(b.ctx, c.ID), errdefs.IsFailedPrecondition, "FailedPrecondition")
	class(t, "resume one that ended", p.Resume(b.ctx, c.ID), errdefs.IsFailedPrecondition, "FailedPrecondition")
}

func loggerCases() []contractCase {
	return []contractCase{{"logs/options", testLogs}, {"logs/follow", testLogsFollow}}
}

func testLogs(t *testing.T, b *bed) {
	l := b.rt.(runtime.Logger)
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "echo one; sleep 0.1; echo two >&2; sleep 0.3; echo three"}
	c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)

	var all, none bytes.Buffer
	if err := l.Logs(b.ctx, c.ID, runtime.LogOptions{Timestamps: true}, &all, &none); err != nil {
		t.Fatal(err)
	}
	var times []time.Time
	for line := range strings.Lines(all.String() + none.String()) {
		stamp, _, _ := strings.Cut(line, " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		if err != nil || time.Since(at) > time.Minute {
			t.Fatalf("timestamp of %q: %v", line, err)
		}
		times = append(times, at)
	}
	if len(times) != 3 || !times[1].After(times[0]) {
		t.Fatalf("with timestamps: %q and %q", &all, &none)
	}
	for _, tt := range []struct {
		name           string
		opts           runtime.LogOptions
		stdout, stderr string
	}{
		{"all", runtime.LogOptions{}, "one\nthree\n", "two\n"},
		{"tail 1", runtime.LogOptions{Tail: 1}, "three\n", ""},
		{"tail 2", runtime.LogOptions{Tail: 2}, "three\n", "two\n"},
		{"tail 10", runtime.LogOptions{Tail: 10}, "one\nthree\n", "two\n"},
		{"since the last", runtime.LogOptions{Since: times[1]}, "three\n", ""},
		{"since now", runtime.LogOptions{Since: time.Now()}, "", ""},
		{"follow", runtime.LogOptions{Follow: true}, "one\nthree\n", "two\n"},
	} {
		var stdout, stderr bytes.Buffer
		if err := l.Logs(b.ctx, c.ID, tt.opts, &stdout, &stderr); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if stdout.String() != tt.stdout || stderr.String() != tt.stderr {
			t.Errorf("%s: %q and %q, want %q and %q", tt.name, &stdout, &stderr, tt.stdout, tt.stderr)
		}
	}
	if err := l.Logs(b.ctx, c.ID, runtime.LogOptions{}, nil, nil); err != nil {
		t.Errorf("without writers: %v", err)
	}
	class(t, "logs", l.Logs(b.ctx, noID, runtime.LogOptions{}, nil, nil), errdefs.IsNotFound, "NotFound")
}

func testLogsFollow(t *testing.T, b *bed) {
	l := b.rt.(runtime.Logger)
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "echo one; sleep 1; echo two; sleep 100000"}
	c := b.create(t, spec)
	follow := func(ctx context.Context, until string) (<-chan struct{}, <-chan error) {
		out, done := newSignalWriter(until), make(chan error, 1)
		go func() { done <- l.Logs(ctx, c.ID, runtime.LogOptions{Follow: true}, out, nil) }()
		return out.seen, done
	}
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	seen, done := follow(ctx, "one\ntwo\n")
	select {
	case <-seen:
	case err := <-done:
		t.Fatalf("ended before the container: %v", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("ended by the context: %v", err)
	}
	seen, done = follow(b.ctx, "one\ntwo\n")
	<-seen
	if err := b.rt.Remove(b.ctx, c.ID); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("ended by the container: %v", err)
		}
	case <-b.ctx.Done():
		t.Error("follow didn't end with the container")
	}
}

func statserCases() []contractCase { return []contractCase{{"stats", testStats}} }

func testStats(t *testing.T, b *bed) {
	s := b.rt.(runtime.Statser)
	spec := b.spec()
	spec.MemoryBytes = 64 << 20
	c := b.create(t, spec)
	b.output(t, c.ID, "true")
	got, err := s.Stats(b.ctx, c.ID)
	if err != nil {
		t.Fatal(err)
	}
	if time.Since(got.Time).Abs() > time.Minute || got.CPUUsage <= 0 || got.CPUUsage > time.Minute ||
		got.MemoryBytes <= 0 || got.MemoryBytes > spec.MemoryBytes || got.MemoryLimitBytes != spec.MemoryBytes || got.Pids < 1 {
		t.Errorf("%+v", got)
	}
	_, err = s.Stats(b.ctx, noID)
	class(t, "stats", err, errdefs.IsNotFound, "NotFound")
	spec = b.spec()
	spec.Command = []string{"true"}
	c = b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	_, err = s.Stats(b.ctx, c.ID)
	class(t, "stats of one that ended", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
}

func watcherCases(real bool) []contractCase {
	cases := []contractCase{{"watch/events", testWatch}, {"watch/ready", testWatchReady}}
	if real {
		cases = append(cases, contractCase{"watch/out of memory", testWatchOOM})
	}
	return cases
}

// watch starts a watcher that ends with the test, and returns what it has seen so far.
func (b *bed) watch(t *testing.T, labels map[string]string) (seen func() []runtime.Event) {
	t.Helper()
	var mu sync.Mutex
	var events []runtime.Event
	ctx, cancel := context.WithCancel(b.ctx)
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- b.rt.(runtime.Watcher).Watch(ctx, labels, func() { close(ready) }, func(e runtime.Event) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, e)
		})
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatalf("watch: %v", err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("watch ended by its context: %v", err)
		}
	})
	return func() []runtime.Event {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(events)
	}
}

// lives leaves out pauses and resumes, which an engine may tell more than once.
func lives(events []runtime.Event) []runtime.Event {
	return slices.DeleteFunc(slices.Clone(events), func(e runtime.Event) bool {
		return e.Type == runtime.EventPaused || e.Type == runtime.EventResumed
	})
}

func types(events []runtime.Event) string {
	var s []string
	for _, e := range events {
		s = append(s, string(e.Type))
	}
	return strings.Join(s, " ")
}

func testWatch(t *testing.T, b *bed) {
	begun := time.Now()
	labels := map[string]string{labelCase: b.name, "watched": "yes"}
	seen, named := b.watch(t, labels), b.watch(t, map[string]string{labelCase: b.name, "watched": ""})
	spec := b.spec()
	spec.Labels["watched"] = "yes"
	c := b.create(t, spec)
	b.create(t, b.spec()) // isn't watched
	if p, ok := b.rt.(runtime.Pauser); ok {
		if err := p.Pause(b.ctx, c.ID); err != nil {
			t.Fatal(err)
		}
		if err := p.Resume(b.ctx, c.ID); err != nil {
			t.Fatal(err)
		}
		b.await(t, "pause and resume", func() bool {
			return slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventPaused }) &&
				slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventResumed })
		})
	}
	if err := b.rt.Remove(b.ctx, c.ID); err != nil {
		t.Fatal(err)
	}
	want := []string{"start", "exit", "removed", "start", "exit"}
	spec.Name, spec.Command = b.spec().Name, []string{"sh", "-c", "sleep 0.1; exit 3"}
	second := b.create(t, spec)
	b.await(t, "all events", func() bool { return len(lives(seen())) >= len(want) && len(lives(named())) >= len(want) })
	if got := types(lives(seen())); got != strings.Join(want, " ") {
		t.Errorf("events %s, want %s", got, want)
	}
	if got := types(lives(named())); got != strings.Join(want, " ") {
		t.Errorf("events selected by a label's name: %s, want %s", got, want)
	}
	for i, e := range lives(seen()) {
		id := c.ID
		if i >= len(want)-2 {
			id = second.ID
		}
		if e.ContainerID != id || e.Labels["watched"] != "yes" || e.Labels[labelCase] != b.name ||
			e.Time.Before(begun.Add(-time.Second)) || e.Time.After(time.Now().Add(time.Second)) {
			t.Errorf("%+v", e)
		}
	}
	if last := lives(seen())[len(want)-1]; last.ExitCode != 3 {
		t.Errorf("exit code in the event: %d, want 3", last.ExitCode)
	}
}

// testWatchReady checks that no event after ready is lost, time and again.
func testWatchReady(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	p, ok := b.rt.(runtime.Pauser)
	if !ok {
		return
	}
	for i := range 10 {
		ctx, cancel := context.WithCancel(b.ctx)
		got := make(chan runtime.EventType, 10)
		done := make(chan error, 1)
		ready := make(chan struct{})
		go func() {
			done <- b.rt.(runtime.Watcher).Watch(ctx, b.labels, func() { close(ready) }, func(e runtime.Event) { got <- e.Type })
		}()
		<-ready
		call, want := p.Pause, runtime.EventPaused
		if i%2 == 1 {
			call, want = p.Resume, runtime.EventResumed
		}
		if err := call(b.ctx, c.ID); err != nil {
			t.Fatal(err)
		}
		select {
		case e := <-got:
			if e != want {
				t.Errorf("round %d: first event %s, want %s", i, e, want)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("round %d: the event was lost", i)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("round %d: %v", i, err)
		}
	}
}

func testWatchOOM(t *testing.T, b *bed) {
	seen := b.watch(t, b.labels)
	spec := b.spec()
	spec.MemoryBytes = 48 << 20
	spec.Command = eatMemory
	c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	if c.ExitCode != 137 || !c.OOMKilled {
		t.Errorf("a main process over its limit: exit code %d, OOMKilled %t", c.ExitCode, c.OOMKilled)
	}
	b.await(t, "the oom event", func() bool {
		return slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventOOM && e.ContainerID == c.ID })
	})
}

func networkerCases(h Harness) []contractCase {
	cases := []contractCase{{"network/list and remove", testNetworks}}
	if h.Real {
		cases = append(cases, contractCase{"network/isolated", testNetworkIsolated})
	}
	if h.Outside != "" {
		cases = append(cases, contractCase{"network/internal", testNetworkInternal})
	}
	return cases
}

func testNetworks(t *testing.T, b *bed) {
	n := b.rt.(runtime.Networker)
	for i := range 2 {
		network := runtime.Network{Name: fmt.Sprintf("%s-%d", b.name, i), Labels: map[string]string{labelCase: b.name, "index": fmt.Sprint(i)}}
		network.Internal, network.Isolated = i == 1, i == 1
		if err := b.rt.EnsureNetwork(b.ctx, network); err != nil {
			t.Fatal(err)
		}
	}
	both, err := n.Networks(b.ctx, map[string]string{labelCase: b.name, "index": ""})
	if err != nil || len(both) != 2 {
		t.Fatalf("both: %+v, %v", both, err)
	}
	one, err := n.Networks(b.ctx, map[string]string{labelCase: b.name, "index": "1"})
	if err != nil || len(one) != 1 {
		t.Fatalf("one: %+v, %v", one, err)
	}
	got := one[0]
	if got.Name != b.name+"-1" || got.ID == "" || got.Labels["index"] != "1" || !got.Internal || !got.Isolated || time.Since(got.CreatedAt).Abs() > time.Minute {
		t.Errorf("%+v", got)
	}
	spec := b.spec()
	spec.Network = got.Name
	c := b.create(t, spec)
	class(t, "remove one in use", n.RemoveNetwork(b.ctx, got.Name), errdefs.IsFailedPrecondition, "FailedPrecondition")
	if err := b.rt.Remove(b.ctx, c.ID); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := n.RemoveNetwork(b.ctx, got.Name); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if left, err := n.Networks(b.ctx, b.labels); err != nil || len(left) != 1 {
		t.Errorf("afterwards: %+v, %v", left, err)
	}
}

func (b *bed) onNetwork(t *testing.T, network string) runtime.Container {
	t.Helper()
	spec := b.spec()
	spec.Network = network
	c := b.create(t, spec)
	t.Cleanup(func() { // before the network
		if err := b.rt.Remove(context.Background(), c.ID); err != nil {
			t.Error(err)
		}
	})
	return c
}

func testNetworkInternal(t *testing.T, b *bed) {
	for _, internal := range []bool{true, false} {
		name := fmt.Sprintf("%s-%t", b.name, internal)
		if err := b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: name, Labels: b.labels, Internal: internal}); err != nil {
			t.Fatal(err)
		}
		c := b.onNetwork(t, name)
		got := b.shell(t, c.ID, "nc -w 2 "+strings.Replace(b.Outside, ":", " ", 1))
		if strings.Contains(got, "outside") == internal {
			t.Errorf("internal %t: the world outside says %q", internal, got)
		}
	}
}

func testNetworkIsolated(t *testing.T, b *bed) {
	for _, isolated := range []bool{true, false} {
		name := fmt.Sprintf("%s-%t", b.name, isolated)
		if err := b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: name, Labels: b.labels, Isolated: isolated}); err != nil {
			t.Fatal(err)
		}
		server, client := b.onNetwork(t, name), b.onNetwork(t, name)
		b.shell(t, server.ID, "setsid nc -ll -p 7777 -e echo hello >/dev/null 2>&1 &")
		b.await(t, "the server to listen", func() bool {
			return strings.Contains(b.output(t, server.ID, "netstat", "-ltn"), ":7777")
		})
		got := b.shell(t, client.ID, "nc -w 2 "+server.IP+" 7777")
		if strings.Contains(got, "hello") == isolated {
			t.Errorf("isolated %t: one container says to another: %q", isolated, got)
		}
	}
}

func pullCases() []contractCase { return []contractCase{{"pull", testPull}} }

func testPull(t *testing.T, b *bed) {
	ref := b.Registry + "/contract:latest"
	canceled, cancel := context.WithCancel(b.ctx)
	cancel()
	_, err := b.rt.Pull(canceled, ref, nil)
	class(t, "a canceled pull", err, errdefs.IsCanceled, "Canceled")
	_, err = b.rt.Image(b.ctx, ref)
	class(t, "the image before", err, errdefs.IsNotFound, "NotFound")

	var last runtime.PullProgress
	pulled, err := b.rt.Pull(b.ctx, ref, func(p runtime.PullProgress) { last = p })
	if err != nil {
		t.Fatal(err)
	}
	if last == (runtime.PullProgress{}) {
		t.Error("no progress was told")
	}
	if found, err := b.rt.Image(b.ctx, ref); err != nil || found.ID != pulled.ID {
		t.Errorf("the image afterwards: %+v, %v; pulled %+v", found, err, pulled)
	}
	if _, err := b.rt.Pull(b.ctx, ref, nil); err != nil {
		t.Errorf("again, without progress: %v", err)
	}
	for _, missing := range []string{b.Registry + "/contract:missing", b.Registry + "/missing:latest"} {
		_, err := b.rt.Pull(b.ctx, missing, nil)
		class(t, missing, err, errdefs.IsNotFound, "NotFound")
	}
}
