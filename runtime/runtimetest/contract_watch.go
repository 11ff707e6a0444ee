package runtimetest

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
)

func watcherCases() []contractCase {
	return []contractCase{
		{"watch/events", testWatch},
		{"watch/ready", testWatchReady},
		{"watch/nothing is replayed", testWatchNoReplay},
		{"watch/later client", testWatchLaterClient},
	}
}

// watch starts a watcher that ends with the test, and returns what it has seen so far.
func (b *fixture) watch(t *testing.T, labels map[string]string) (seen func() []runtime.Event) {
	t.Helper()
	return b.watchWith(t, b.rt, labels)
}

func (b *fixture) watchWith(t *testing.T, w runtime.Runtime, labels map[string]string) (seen func() []runtime.Event) {
	t.Helper()
	var mu sync.Mutex
	var events []runtime.Event
	ctx, cancel := context.WithCancel(b.ctx)
	ready, done := make(chan struct{}), make(chan error, 1)
	var telling atomic.Int32
	go func() {
		done <- w.Watch(ctx, labels, func() { close(ready) }, func(e runtime.Event) {
			if telling.Add(1) != 1 {
				t.Error("two events are told at once")
			}
			mu.Lock()
			events = append(events, e)
			mu.Unlock()
			telling.Add(-1)
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

// of are the events of one container.
func of(events []runtime.Event, id string) []runtime.Event {
	return slices.DeleteFunc(slices.Clone(events), func(e runtime.Event) bool { return e.ContainerID != id })
}

func types(events []runtime.Event) string {
	var s []string
	for _, e := range events {
		s = append(s, string(e.Type))
	}
	return strings.Join(s, " ")
}

func testWatch(t *testing.T, b *fixture) {
	begun := time.Now()
	labels := map[string]string{labelCase: b.name, "watched": "yes"}
	seen, named := b.watch(t, labels), b.watch(t, map[string]string{labelCase: b.name, "watched": ""})
	spec := b.spec()
	spec.Labels["watched"] = "yes"
	c := b.create(t, spec)
	b.create(t, b.spec()) // isn't watched
	must(t, b.rt.Pause(b.ctx, c.ID))
	must(t, b.rt.Resume(b.ctx, c.ID))
	b.await(t, "pause and resume", func() bool {
		return slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventPaused }) &&
			slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventResumed })
	})
	must(t, b.rt.Remove(b.ctx, c.ID))
	// The engine may be late with the news of one container, and the next one's come first.
	wantFirst, wantSecond := "start exit removed", "start exit"
	spec.Name, spec.Command = b.spec().Name, []string{"sh", "-c", "sleep 0.1; exit 3"}
	second := b.create(t, spec)
	all := func(events []runtime.Event) bool {
		return types(of(events, c.ID)) == wantFirst && types(of(events, second.ID)) == wantSecond
	}
	defer func() {
		if t.Failed() {
			t.Logf("events %+v; selected by a label's name: %+v", seen(), named())
		}
	}()
	b.await(t, "all events", func() bool { return all(lives(seen())) && all(lives(named())) })
	for _, e := range lives(seen()) {
		if e.ContainerID != c.ID && e.ContainerID != second.ID || e.Labels["watched"] != "yes" || e.Labels[labelCase] != b.name ||
			e.Time.Before(begun.Add(-time.Second)) || e.Time.After(time.Now().Add(time.Second)) {
			t.Errorf("%+v", e)
		}
	}
	if last := of(lives(seen()), second.ID)[1]; last.ExitCode != 3 {
		t.Errorf("exit code in the event: %d, want 3", last.ExitCode)
	}
}

// testWatchReady checks that no event after ready is lost, time and again.
func testWatchReady(t *testing.T, b *fixture) {
	c := b.create(t, b.spec())
	for i := range 10 {
		ctx, cancel := context.WithCancel(b.ctx)
		got := make(chan runtime.EventType, 10)
		done := make(chan error, 1)
		ready := make(chan struct{})
		go func() {
			done <- b.rt.Watch(ctx, b.labels, func() { close(ready) }, func(e runtime.Event) { got <- e.Type })
		}()
		<-ready
		call, want := b.rt.Pause, runtime.EventPaused
		if i%2 == 1 {
			call, want = b.rt.Resume, runtime.EventResumed
		}
		must(t, call(b.ctx, c.ID))
		// An engine that is late with its own news may tell of an earlier round once more.
		lost := time.After(20 * time.Second)
		for e := runtime.EventType(""); e != want; {
			select {
			case e = <-got:
			case <-lost:
				t.Errorf("round %d: the event was lost", i)
				e = want
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("round %d: %v", i, err)
		}
	}
}

func testWatchOOM(t *testing.T, b *fixture) {
	seen := b.watch(t, b.labels)
	spec := b.spec()
	spec.MemoryBytes = 48 << 20
	spec.Command = eatMemoryLater
	c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	if c.ExitCode != 137 || !c.OOMKilled {
		t.Errorf("a main process over its limit: exit code %d, OOMKilled %t", c.ExitCode, c.OOMKilled)
	}
	b.await(t, "the oom event", func() bool {
		return slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventOOM && e.ContainerID == c.ID })
	})
}

func testWatchExecOOM(t *testing.T, b *fixture) {
	seen := b.watch(t, b.labels)
	spec := b.spec()
	spec.MemoryBytes = 48 << 20
	c := b.create(t, spec)
	if result, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: eatMemory}); err != nil || !result.OOMKilled {
		t.Errorf("exec: %+v, %v", result, err)
	}
	b.await(t, "the oom event", func() bool {
		return slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventOOM && e.ContainerID == c.ID })
	})
	if slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.Type == runtime.EventExit }) {
		t.Errorf("the main process lives on, but there are %s", types(seen()))
	}
}

// testWatchNoReplay: what happened before ready is for a list to tell.
func testWatchNoReplay(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Command = []string{"true"}
	before := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	must(t, b.rt.Remove(b.ctx, before.ID))
	// An engine may be late with its own news: these don't come after the next ones.
	b.create(t, b.spec())
	seen := b.watch(t, b.labels)
	after := b.create(t, b.spec())
	b.await(t, "the later event", func() bool {
		return slices.ContainsFunc(seen(), func(e runtime.Event) bool { return e.ContainerID == after.ID })
	})
	for _, e := range seen() {
		if e.ContainerID == before.ID {
			t.Errorf("replayed: %+v", e)
		}
	}
}

// testWatchLaterClient watches, by a client of its own, containers that were there
// before it: their labels must be known all the same.
func testWatchLaterClient(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Labels["watched"] = "with, commas = \"and\" more"
	c := b.create(t, spec)
	other := b.create(t, b.spec())
	seen := b.watchWith(t, b.New(t), map[string]string{labelCase: b.name, "watched": spec.Labels["watched"]})
	for _, id := range []string{other.ID, c.ID} {
		must(t, b.rt.Remove(b.ctx, id))
	}
	b.await(t, "the removal", func() bool { return len(seen()) >= 2 })
	if got := types(seen()); got != "exit removed" {
		t.Errorf("events %s", got)
	}
	for _, e := range seen() {
		if e.ContainerID != c.ID || e.Labels["watched"] != spec.Labels["watched"] {
			t.Errorf("%+v", e)
		}
	}
}
