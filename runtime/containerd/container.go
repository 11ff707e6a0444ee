package containerd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// exitLost is the exit code of a main process that ended without the engine, as in
// a restart of the host.
const exitLost = 128 + int(unix.SIGKILL)

// Inspect describes one container.
func (r *Runtime) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	var out runtime.Container
	err := r.call(ctx, "inspect container "+id, func(ctx context.Context) error {
		rec, err := r.record(ctx, id)
		if err != nil {
			return err
		}
		out, err = r.inspect(ctx, rec)
		return err
	})
	return out, err
}

// record returns the engine's record of a container.
func (r *Runtime) record(ctx context.Context, id string) (containers.Container, error) {
	if !idPattern.MatchString(id) { // it could be another client's, and its id no file name
		return containers.Container{}, noContainer(id)
	}
	return r.client.ContainerService().Get(ctx, id)
}

func (r *Runtime) inspect(ctx context.Context, rec containers.Container) (runtime.Container, error) {
	var process *tasktypes.Process
	started := r.root.startedAt(rec.ID) // before the engine is asked, see tell
	res, err := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: rec.ID})
	switch err = native(err); {
	case err == nil:
		process = res.Process
	case !errdefs.IsNotFound(err):
		return runtime.Container{}, err
	}
	out, err := tell(rec, started, process)
	if err != nil {
		return runtime.Container{}, err
	}
	spec, err := decodeSpec(rec)
	if err != nil {
		return runtime.Container{}, err
	}
	out.Env = spec.Process.Env
	if out.State == runtime.StateExited {
		err = r.tellEnd(ctx, &out, rec, process)
		return out, err
	}
	if out.State == runtime.StateRunning || out.State == runtime.StatePaused {
		out.Pid = int(process.Pid)
	}
	e, err := r.networks.Attached(rec.ID)
	if err != nil {
		return runtime.Container{}, err
	}
	if e != nil {
		out.IP = e.IP
	}
	return out, nil
}

// tell describes a container by its record and its task, which is nil if it has none. Started must be
// read before the task. A container that was started by then and has no task has ended. One that is
// started in between has a task.
func tell(rec containers.Container, started time.Time, process *tasktypes.Process) (runtime.Container, error) {
	labels, err := ownLabels(rec)
	if err != nil {
		return runtime.Container{}, err
	}
	out := runtime.Container{
		ID:        rec.ID,
		Name:      rec.Labels[labelName],
		Image:     rec.Labels[labelImage],
		Labels:    labels,
		CreatedAt: rec.CreatedAt.UTC(),
		StartedAt: started,
	}
	_, settled := rec.Labels[labelExitCode]
	switch {
	case process != nil:
		out.State = state(process.Status)
	case settled || !out.StartedAt.IsZero():
		out.State = runtime.StateExited
	default:
		out.State = runtime.StateCreated
	}
	return out, nil
}

// tellEnd adds how a container ended.
func (r *Runtime) tellEnd(ctx context.Context, out *runtime.Container, rec containers.Container, process *tasktypes.Process) error {
	if code, ok := rec.Labels[labelExitCode]; ok {
		var err error
		if out.ExitCode, err = strconv.Atoi(code); err != nil {
			return fmt.Errorf("label %s: %w", labelExitCode, err)
		}
		if out.FinishedAt, err = time.Parse(time.RFC3339Nano, rec.Labels[labelExitedAt]); err != nil {
			return fmt.Errorf("label %s: %w", labelExitedAt, err)
		}
		out.OOMKilled = rec.Labels[labelOOM] == "true"
		return nil
	}
	if process == nil { // the main process ended with the host or the shim
		out.ExitCode, out.FinishedAt = exitLost, out.StartedAt
		return nil
	}
	out.ExitCode, out.FinishedAt = int(process.ExitStatus), process.ExitedAt.AsTime()
	kills, err := r.oomKills(ctx, rec.ID)
	out.OOMKilled = kills > 0
	return absent(err) // it was settled just now
}

func state(s tasktypes.Status) runtime.State {
	switch s {
	case tasktypes.Status_CREATED:
		return runtime.StateCreated
	case tasktypes.Status_RUNNING:
		return runtime.StateRunning
	case tasktypes.Status_STOPPED:
		return runtime.StateExited
	case tasktypes.Status_PAUSED, tasktypes.Status_PAUSING:
		return runtime.StatePaused
	}
	return runtime.StateUnknown
}

// List returns every container that carries all the labels.
func (r *Runtime) List(ctx context.Context, labels map[string]string) ([]runtime.Container, error) {
	var out []runtime.Container
	err := r.call(ctx, "list containers", func(ctx context.Context) error {
		recs, err := r.client.ContainerService().List(ctx, labelFilter(labels))
		if err != nil {
			return err
		}
		started := make([]time.Time, len(recs)) // before the engine is asked, see tell
		for i, rec := range recs {
			started[i] = r.root.startedAt(rec.ID)
		}
		res, err := r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
		if err != nil {
			return native(err)
		}
		processes := make(map[string]*tasktypes.Process, len(res.Tasks))
		for _, t := range res.Tasks {
			processes[t.ID] = t
		}
		out = make([]runtime.Container, 0, len(recs))
		for i, rec := range recs {
			c, err := tell(rec, started[i], processes[rec.ID])
			if err != nil {
				return err
			}
			c.StartedAt = time.Time{}
			out = append(out, c)
		}
		return nil
	})
	return out, err
}

// Remove kills a container and removes it with all that Create made for it. It goes on when
// ctx ends, as the engine undoes nothing.
func (r *Runtime) Remove(ctx context.Context, id string) error {
	op := "remove container " + id
	if err := ended(ctx); err != nil || !idPattern.MatchString(id) { // a malformed ID is none of Berm's
		return failure(ctx, op, err)
	}
	return r.call(ctx, op, func(callCtx context.Context) error {
		p, err := r.root.ownPlace(callCtx, id)
		if err != nil {
			return err
		}
		done := make(chan error, 1)
		r.chores.background(func() {
			defer p.release()
			workCtx, cancel := r.linger(callCtx)
			defer cancel()
			done <- teardown{r, id, p}.run(workCtx)
		})
		select {
		case err := <-done:
			return err
		case <-callCtx.Done():
			return callCtx.Err()
		}
	})
}

// absent returns nil for NotFound, and any other error as it is.
func absent(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// settle deletes the task of a container whose main process has ended, and notes in the record how it
// ended. The log writer then gets the rest of the output, and ends. Settle does nothing while the
// container runs.
func (r *Runtime) settle(ctx context.Context, id string) error {
	if !idPattern.MatchString(id) {
		return noContainer(id)
	}
	ctx = r.namespaced(ctx)
	p, err := r.root.ownPlace(ctx, id) // of two that delete a task at once, one gets an arbitrary error
	if err != nil {
		return err
	}
	defer p.release()
	rec, err := r.record(ctx, id)
	if err != nil {
		return err
	}
	res, err := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err = native(err); errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if res.Process.Status != tasktypes.Status_STOPPED {
		return nil
	}
	var end runtime.Container
	if err := r.tellEnd(ctx, &end, rec, res.Process); err != nil {
		return err
	}
	_, err = r.client.ContainerService().Update(ctx, containers.Container{ID: id, Labels: map[string]string{
		labelExitCode: strconv.Itoa(end.ExitCode),
		labelExitedAt: end.FinishedAt.Format(time.RFC3339Nano),
		labelOOM:      strconv.FormatBool(end.OOMKilled),
	}}, "labels."+labelExitCode, "labels."+labelExitedAt, "labels."+labelOOM)
	if err != nil {
		return err
	}
	return teardown{r: r, id: id}.deleteTask(ctx)
}

// decodeSpec returns the OCI spec in a container's record.
func decodeSpec(rec containers.Container) (*specs.Spec, error) {
	if rec.Spec == nil {
		return nil, errors.New("the engine's record has no OCI spec")
	}
	var s specs.Spec
	if err := typeurl.UnmarshalTo(rec.Spec, &s); err != nil {
		return nil, fmt.Errorf("read the OCI spec of container %s: %w", rec.ID, err)
	}
	if s.Process == nil {
		return nil, errors.New("the OCI spec has no process")
	}
	return &s, nil
}

// runningPid returns the pid of a main process. FailedPrecondition when the container is paused or
// doesn't run.
func (r *Runtime) runningPid(ctx context.Context, id string) (uint32, error) {
	p, err := r.taskProcess(ctx, id)
	if err != nil {
		return 0, err
	}
	switch state(p.Status) {
	case runtime.StateRunning:
		return p.Pid, nil
	case runtime.StatePaused:
		return 0, runtime.Precondition("the container is paused")
	}
	return 0, runtime.Precondition("the container isn't running")
}

// taskProcess returns the engine's state of a container's main process, even of a paused one or one
// that has just ended. NotFound when there is no such container. FailedPrecondition when it has no
// task: the main process is gone, or was never started.
func (r *Runtime) taskProcess(ctx context.Context, id string) (*tasktypes.Process, error) {
	if !idPattern.MatchString(id) {
		return nil, noContainer(id)
	}
	res, err := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err = native(err); err == nil {
		if state(res.Process.Status) == runtime.StateUnknown { // the shim took too long for containerd 1
			return nil, fmt.Errorf("the engine can't tell the state of container %s: %w", id, context.DeadlineExceeded)
		}
		return res.Process, nil
	}
	if errdefs.IsNotFound(err) {
		if _, err := r.record(ctx, id); err != nil {
			return nil, err
		}
		err = runtime.Precondition("the container isn't running")
	}
	return nil, err
}
