package docker

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/docker/docker/api/types/events"

	"github.com/bermhq/berm/runtime"
)

var eventTypes = map[events.Action]runtime.EventType{
	events.ActionStart:   runtime.EventStart,
	events.ActionDie:     runtime.EventExit,
	events.ActionOOM:     runtime.EventOOM,
	events.ActionDestroy: runtime.EventRemoved,
	events.ActionPause:   runtime.EventPaused,
	events.ActionUnPause: runtime.EventResumed,
}

// Watch reports the events of containers until ctx ends or the engine goes away.
func (r *Runtime) Watch(ctx context.Context, labels map[string]string, ready func(), f func(runtime.Event)) error {
	const op = "watch containers"
	watchCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	timer := time.AfterFunc(r.timeout, cancel) // bounds the opening of the stream
	s, err := r.connect(watchCtx)
	if err != nil {
		return r.watchEnd(ctx, nil, op, err)
	}
	// The engine answers before it subscribes. So ask for the events since now, by the engine's own
	// clock: it replays those from before the subscription.
	info, err := s.Info(watchCtx)
	if err != nil {
		return r.watchEnd(ctx, s, op, err)
	}
	since := parseTime(info.SystemTime)
	if since.IsZero() {
		since = s.now()
	}
	filter := labelFilter(labels)
	filter.Add("type", string(events.ContainerEventType))
	for action := range eventTypes {
		filter.Add("event", string(action))
	}
	messages, failed := s.Events(watchCtx, events.ListOptions{Since: unixTime(since), Filters: filter})
	select {
	case err := <-failed:
		return r.watchEnd(ctx, s, op, err)
	default:
	}
	if !timer.Stop() {
		return r.watchEnd(ctx, s, op, context.DeadlineExceeded)
	}
	if ready != nil {
		ready()
	}
	for {
		select {
		case m := <-messages:
			if e, ok := fromEvent(m); ok {
				f(e)
			}
		case err := <-failed:
			return r.watchEnd(ctx, s, op, err)
		}
	}
}

func (r *Runtime) watchEnd(ctx context.Context, s *session, op string, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the usual end of a watch
	}
	return r.failure(ctx, s, op, err)
}

func fromEvent(m events.Message) (runtime.Event, bool) {
	typ, ok := eventTypes[m.Action]
	if !ok {
		return runtime.Event{}, false
	}
	out := runtime.Event{
		Type:        typ,
		ContainerID: m.Actor.ID,
		Labels:      ownLabels(m.Actor.Attributes),
		Time:        time.Unix(0, m.TimeNano).UTC(),
	}
	if typ == runtime.EventExit {
		out.ExitCode, _ = strconv.Atoi(m.Actor.Attributes["exitCode"])
	}
	// The engine puts these among the labels.
	maps.DeleteFunc(out.Labels, func(k, _ string) bool {
		return k == "image" || k == "name" || k == "exitCode" || k == "execDuration"
	})
	return out, true
}

// lacksFirst reports whether the engine lists a container's processes without the first one.
// The container then has ended, or is ending, whatever else the engine says. The kernel takes
// the first process out of its cgroups, by which engines list, before it kills the others, and
// reports its end after theirs (do_exit and zap_pid_ns_processes in the kernel). Runtimes with
// a kernel of their own may list processes by other numbers.
func lacksFirst(ctx context.Context, s *session, id string) bool {
	c, err := inspect(ctx, s, id)
	if err != nil || c.Pid == 0 {
		return false
	}
	list, err := s.ContainerTop(ctx, id, []string{"-o", "pid"})
	if err != nil { // there may be no ps on its host
		return false
	}
	return !slices.ContainsFunc(list.Processes, func(row []string) bool { return slices.Equal(row, []string{strconv.Itoa(c.Pid)}) })
}
