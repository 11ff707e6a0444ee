package containerd

import (
	"maps"
	"time"

	"github.com/bermhq/berm/runtime"
)

// tracker selects the events of the watched containers, adds their labels, and puts them into
// the order in which things happen.
type tracker struct {
	labels map[string]string // that are watched
	known  map[string]*tracked
	out    []runtime.Event
	held   []removal // in the order of their times
}

// tracked is a container that carries the labels.
type tracked struct {
	labels  map[string]string
	alive   bool // it runs, and its exit will come
	fresh   bool // its start will come
	removed bool
}

// removal is a removal event that waits for the container's exit.
type removal struct {
	event runtime.Event
	until time.Time
}

func newTracker(labels map[string]string) *tracker {
	return &tracker{labels: labels, known: map[string]*tracked{}}
}

func (t *tracker) knows(id string) bool { return t.known[id] != nil }

// know adds a container, with its caller's labels, if they are watched.
func (t *tracker) know(id string, own map[string]string, alive bool) {
	if runtime.HasLabels(own, t.labels) {
		t.known[id] = &tracked{labels: own, alive: alive}
	}
}

// meet is know for a container that was made, or has started, since the watch began.
func (t *tracker) meet(id string, own map[string]string) {
	t.know(id, own, false)
	if c := t.known[id]; c != nil {
		c.fresh = true
	}
}

// happened takes an event without labels. A busy engine may omit a start, and report another start
// twice.
func (t *tracker) happened(e runtime.Event, now time.Time) {
	c := t.known[e.ContainerID]
	if c == nil || c.removed && e.Type != runtime.EventExit {
		return
	}
	e.Labels = maps.Clone(c.labels)
	if c.fresh && e.Type != runtime.EventStart && e.Type != runtime.EventRemoved { // the start was omitted
		start := e
		start.Type, start.ExitCode, start.Labels = runtime.EventStart, 0, maps.Clone(c.labels)
		t.happened(start, now)
	}
	switch e.Type {
	case runtime.EventStart:
		if c.alive { // reported twice
			return
		}
		c.alive, c.fresh = true, false
	case runtime.EventExit:
		if !c.alive { // the engine repeats it when a shim has gone
			return
		}
		c.alive = false
	case runtime.EventRemoved:
		c.removed = true
		if c.alive {
			t.held = append(t.held, removal{e, now.Add(removalDelay)})
			return
		}
		delete(t.known, e.ContainerID)
	}
	t.out = append(t.out, e)
	if !c.removed || e.Type != runtime.EventExit {
		return
	}
	for i, h := range t.held {
		if h.event.ContainerID == e.ContainerID {
			t.held = append(t.held[:i:i], t.held[i+1:]...)
			t.out = append(t.out, h.event)
			break
		}
	}
	delete(t.known, e.ContainerID)
}

// due returns a channel that is ready when flush has something that was held back.
func (t *tracker) due() <-chan time.Time {
	if len(t.held) == 0 {
		return nil
	}
	return time.After(time.Until(t.held[0].until))
}

// flush returns the events that are due. If a removal is due and its exit hasn't come, the shim ended
// before it reported the exit, and flush adds the exit.
func (t *tracker) flush(now time.Time) []runtime.Event {
	for len(t.held) > 0 && !now.Before(t.held[0].until) {
		e := t.held[0].event
		t.held = t.held[1:]
		exit := e
		exit.Type, exit.ExitCode, exit.Labels = runtime.EventExit, exitLost, maps.Clone(e.Labels)
		t.out = append(t.out, exit, e)
		delete(t.known, e.ContainerID)
	}
	out := t.out
	t.out = nil
	return out
}
