package containerd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	coreevents "github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/google/uuid"

	"github.com/bermhq/berm/runtime"
)

const (
	// removalDelay is how long a removal is held back to wait for the exit of the main process. The
	// engine reports the removal, and its shim the exit.
	removalDelay = 2 * time.Second

	// The pauses between events that heard publishes: the first, and the longest.
	readyDelay, maxReadyDelay = 4 * time.Millisecond, 200 * time.Millisecond
)

// eventTopics are the topics that Watch subscribes to.
var eventTopics = []string{
	"/containers/create", "/containers/delete",
	"/tasks/start", "/tasks/exit", "/tasks/oom", "/tasks/paused", "/tasks/resumed",
}

// Watch reports the events of containers until ctx ends or the engine goes away.
func (r *Runtime) Watch(ctx context.Context, labels map[string]string, ready func(), f func(runtime.Event)) error {
	w := &watch{r: r, nonce: "/berm/ready/" + uuid.NewString(), track: newTracker(labels)}
	err := w.run(ctx, ready, f)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the usual end of a watch
	}
	return failure(ctx, "watch containers", err)
}

// watch is one call of Watch.
type watch struct {
	r     *Runtime
	nonce string // topic of the event that proves that events arrive
	track *tracker

	messages <-chan *coreevents.Envelope
	failed   <-chan error
}

func (w *watch) run(caller context.Context, ready func(), f func(runtime.Event)) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.r.namespaced(caller))) // see bounded
	defer cancel()
	defer context.AfterFunc(caller, cancel)()
	namespace := ",namespace==" + strconv.Quote(w.r.opts.Namespace)
	filters := []string{"topic==" + strconv.Quote(w.nonce) + namespace}
	for _, topic := range eventTopics {
		filters = append(filters, "topic=="+strconv.Quote(topic)+namespace)
	}
	w.messages, w.failed = w.r.client.EventService().Subscribe(ctx, filters...)
	setUp, cancelSetUp := context.WithTimeout(ctx, w.r.opts.CallTimeout)
	defer cancelSetUp()
	if err := w.heard(setUp); err != nil {
		return err
	}
	// Events report changes from here on; list reads what exists already.
	if err := w.list(setUp); err != nil {
		return err
	}
	cancelSetUp()
	if ready != nil {
		ready()
	}
	for {
		select {
		case m := <-w.messages:
			if err := w.take(ctx, m); err != nil {
				return err
			}
		case <-w.track.due():
		case err := <-w.failed:
			return streamError(err)
		}
		for _, e := range w.track.flush(time.Now()) {
			f(e)
		}
	}
}

// heard publishes an event until it arrives: the engine answers before it subscribes.
func (w *watch) heard(ctx context.Context) error {
	for delay := readyDelay; ; delay = min(2*delay, maxReadyDelay) {
		if err := w.r.client.EventService().Publish(ctx, w.nonce, &events.ContainerCreate{}); err != nil {
			return err
		}
		for again := time.After(delay); again != nil; {
			select {
			case m := <-w.messages:
				if m.Topic == w.nonce {
					return nil
				}
				// The event is from before the watch.
			case err := <-w.failed:
				return streamError(err)
			case <-ctx.Done():
				return ctx.Err()
			case <-again:
				again = nil
			}
		}
	}
}

func streamError(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("the engine has ended the stream of events")
	}
	if err = native(err); errdefs.IsUnavailable(err) {
		return err
	}
	return runtime.Unavailable(err)
}

// list gives the tracker the containers that exist, and whether they run.
func (w *watch) list(ctx context.Context) error {
	recs, err := w.r.client.ContainerService().List(ctx, labelFilter(w.track.labels))
	if err != nil {
		return err
	}
	res, err := w.r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return err
	}
	alive := map[string]bool{}
	for _, t := range res.Tasks {
		alive[t.ID] = t.Status != tasktypes.Status_STOPPED
	}
	for _, rec := range recs {
		labels, err := ownLabels(rec)
		if err != nil {
			return err
		}
		w.track.know(rec.ID, labels, alive[rec.ID])
	}
	return nil
}

// take passes one of the engine's messages to the tracker.
func (w *watch) take(ctx context.Context, m *coreevents.Envelope) error {
	if m.Event == nil {
		return nil
	}
	v, err := typeurl.UnmarshalAny(m.Event)
	if err != nil {
		return fmt.Errorf("decode event %s: %w", m.Topic, err)
	}
	e := runtime.Event{Time: m.Timestamp.UTC()}
	switch v := v.(type) {
	case *events.ContainerCreate:
		if m.Topic == w.nonce {
			return nil
		}
		return w.meet(ctx, v.ID)
	case *events.ContainerDelete:
		e.Type, e.ContainerID = runtime.EventRemoved, v.ID
	case *events.TaskStart:
		e.Type, e.ContainerID = runtime.EventStart, v.ContainerID
		if err := w.meet(ctx, v.ContainerID); err != nil {
			return err
		}
	case *events.TaskExit:
		if v.ID != v.ContainerID { // a program's
			return nil
		}
		e.Type, e.ContainerID, e.ExitCode = runtime.EventExit, v.ContainerID, int(v.ExitStatus)
	case *events.TaskOOM:
		e.Type, e.ContainerID = runtime.EventOOM, v.ContainerID
	case *events.TaskPaused:
		e.Type, e.ContainerID = runtime.EventPaused, v.ContainerID
	case *events.TaskResumed:
		e.Type, e.ContainerID = runtime.EventResumed, v.ContainerID
	default:
		return nil
	}
	w.track.happened(e, time.Now())
	return nil
}

// meet gives the tracker the labels of a container that it doesn't know.
func (w *watch) meet(ctx context.Context, id string) error {
	if w.track.knows(id) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, w.r.opts.CallTimeout)
	defer cancel()
	rec, err := w.r.record(ctx, id)
	if errdefs.IsNotFound(err) { // it is another client's, or gone already
		return nil
	}
	if err != nil {
		return err
	}
	if rec.Labels[labelName] == "" {
		return nil
	}
	labels, err := ownLabels(rec)
	if err == nil {
		w.track.meet(id, labels)
	}
	return err
}
