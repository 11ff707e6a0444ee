package docker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/google/uuid"

	"github.com/bermhq/berm/runtime"
)

// Create makes a container and starts it.
func (r *Runtime) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	op := fmt.Sprintf("create container %q", spec.Name)
	if a := spec.Agent; a != nil && *a == (runtime.Agent{}) {
		spec.Agent = nil
	}
	if err := validate(spec); err != nil {
		return runtime.Container{}, fmt.Errorf("%s: %w", op, err)
	}
	var out runtime.Container
	err := r.call(ctx, op, func(callCtx context.Context, s *session) error {
		img, err := s.declared(callCtx, spec.Image)
		if err != nil {
			return err
		}
		if spec.Agent == nil && spec.WorkingDir == "" && runtime.KernelPath(img.dir) {
			return runtime.Invalid("the image's working directory %q is in a file system of the kernel", img.dir)
		}
		if spec.Agent != nil && spec.Command == nil {
			spec.Command = img.command
			if len(spec.Command) == 0 {
				return runtime.Invalid("neither the container nor its image names a command")
			}
		}
		if !spec.ReadOnlyRootfs {
			img.volumes = nil
		}
		stored := spec.Agent != nil && spec.Agent.Stored
		if stored {
			path, err := r.storedProgram(callCtx, s, spec.Image)
			if err != nil {
				return err
			}
			spec.Agent = &runtime.Agent{Program: path}
		}
		id, err := r.make(ctx, s, spec, img)
		if err != nil {
			r.stored.Store(false) // the program may be gone
			return err
		}
		if stored {
			err = r.checkProgram(callCtx, s, id)
		}
		var c runtime.Container
		if err == nil {
			c, err = r.start(callCtx, s, id)
		}
		if err != nil {
			return r.undo(ctx, spec.Name, err, func(ctx context.Context) error { return remove(ctx, s, id) })
		}
		out = c
		return nil
	})
	return out, err
}

// make makes the container, without starting it. The engine goes on when its client hangs up,
// so the call outlives ctx a little, to learn the ID.
func (r *Runtime) make(ctx context.Context, s *session, spec runtime.Spec, img declared) (string, error) {
	nonce := uuid.NewString()
	callCtx, cancel := runtime.Linger(ctx, r.timeout)
	defer cancel()
	res, err := s.ContainerCreate(callCtx, containerConfig(spec, img.dir, nonce), hostConfig(spec, s, img.volumes), nil, nil, spec.Name)
	switch {
	case err == nil && ctx.Err() == nil:
		return res.ID, nil
	case err == nil:
		return "", r.undo(ctx, spec.Name, runtime.Ended(ctx), func(ctx context.Context) error { return remove(ctx, s, res.ID) })
	case errdefs.IsConflict(err):
		return "", runtime.WithClass(errdefs.ErrAlreadyExists, err)
	case answered(err):
		return "", err
	}
	return "", r.undo(ctx, spec.Name, err, func(ctx context.Context) error { return removeLost(ctx, s, spec.Name, nonce) })
}

// start starts the container and inspects it.
func (r *Runtime) start(ctx context.Context, s *session, id string) (runtime.Container, error) {
	if err := s.ContainerStart(ctx, id, container.StartOptions{}); err != nil {
		return runtime.Container{}, err
	}
	return inspect(ctx, s, id)
}

// undo cleans up after a failed Create, even if ctx has ended. A container that it can't remove still
// has its labels, so the sweep can find it.
func (r *Runtime) undo(ctx context.Context, name string, err error, f func(context.Context) error) error {
	cleanCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if cleanErr := f(cleanCtx); cleanErr != nil {
		r.log.ErrorContext(ctx, "container_left", "name", name, "error", cleanErr)
	}
	return err
}

// removalWait is how long remove waits for another removal until it tries again.
const removalWait = time.Second

// remove kills and removes a container with its anonymous volumes, and returns when
// it is gone.
func remove(ctx context.Context, s *session, id string) error {
	for {
		err := s.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
		if errdefs.IsNotFound(err) {
			return nil
		}
		if !errdefs.IsConflict(err) || ctx.Err() != nil {
			return err
		}
		if err := awaitRemoval(ctx, s, id); err != nil {
			return err
		}
	}
}

// awaitRemoval waits until another removal of a container has finished. It doesn't wait for long, as
// the engine doesn't report every removal that fails.
func awaitRemoval(ctx context.Context, s *session, id string) error {
	wait, cancel := context.WithTimeout(ctx, removalWait)
	defer cancel()
	done, failed := s.ContainerWait(wait, id, container.WaitConditionRemoved)
	select {
	case <-done:
	case err := <-failed:
		if wait.Err() == nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// removeLost removes the container of a create whose answer was lost, if there is one.
func removeLost(ctx context.Context, s *session, name, nonce string) error {
	list, err := s.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(
		filters.Arg("name", "^/?"+regexp.QuoteMeta(name)+"$"), filters.Arg("label", createLabel+"="+nonce))})
	if err != nil {
		return err
	}
	for _, c := range list { // at most one
		if err := remove(ctx, s, c.ID); err != nil {
			return err
		}
	}
	return nil
}

// Inspect describes one container.
func (r *Runtime) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	var out runtime.Container
	err := r.callOn(ctx, "inspect container", id, func(ctx context.Context, s *session) error {
		var err error
		out, err = inspect(ctx, s, id)
		return err
	})
	return out, err
}

// List returns every container that carries all the labels. CreatedAt has whole seconds, as
// the engine lists it.
func (r *Runtime) List(ctx context.Context, labels map[string]string) ([]runtime.Container, error) {
	var out []runtime.Container
	err := r.call(ctx, "list containers", func(ctx context.Context, s *session) error {
		list, err := s.ContainerList(ctx, container.ListOptions{All: true, Filters: labelFilter(labels)})
		if err != nil {
			return err
		}
		out = make([]runtime.Container, 0, len(list))
		for _, c := range list {
			out = append(out, fromSummary(c))
		}
		return nil
	})
	return out, err
}

// Remove kills a container and removes it with its anonymous volumes.
func (r *Runtime) Remove(ctx context.Context, id string) error {
	err := r.callOn(ctx, "remove container", id, func(ctx context.Context, s *session) error {
		return remove(ctx, s, id)
	})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

var idPattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// checkID returns NotFound for a string that can't be an ID. The client would put it into a URL's path,
// which could lead to something else.
func checkID(id string) error {
	if !idPattern.MatchString(id) {
		return runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such container"))
	}
	return nil
}

// callOn is call for one container.
func (r *Runtime) callOn(ctx context.Context, op, id string, f func(context.Context, *session) error) error {
	if err := checkID(id); err != nil {
		return fmt.Errorf("%s %q: %w", op, id, err)
	}
	return r.call(ctx, op+" "+id, f)
}

func labelFilter(labels map[string]string) filters.Args {
	out := filters.NewArgs()
	for k, v := range labels {
		if v != "" {
			k += "=" + v
		}
		out.Add("label", k)
	}
	return out
}

func inspect(ctx context.Context, s *session, id string) (runtime.Container, error) {
	c, err := s.ContainerInspect(ctx, id)
	if err != nil {
		return runtime.Container{}, err
	}
	if c.ContainerJSONBase == nil || c.State == nil || c.Config == nil || c.NetworkSettings == nil {
		return runtime.Container{}, errors.New("the engine's answer is incomplete")
	}
	out := runtime.Container{
		ID:        c.ID,
		Name:      strings.TrimPrefix(c.Name, "/"),
		Image:     c.Image,
		State:     state(c.State.Status),
		Labels:    ownLabels(c.Config.Labels),
		Env:       slices.DeleteFunc(c.Config.Env, func(v string) bool { return !strings.Contains(v, "=") }), // names from Spec.Unset
		CreatedAt: parseTime(c.Created),
		StartedAt: parseTime(c.State.StartedAt),
		OOMKilled: c.State.OOMKilled,
	}
	if c.State.Running {
		out.Pid = c.State.Pid
	} else { // the engine keeps these two from the run before
		out.FinishedAt = parseTime(c.State.FinishedAt)
		out.ExitCode = c.State.ExitCode
	}
	for _, n := range c.NetworkSettings.Networks { // one, or "none" without an address
		out.IP = n.IPAddress
	}
	return out, nil
}

func fromSummary(c container.Summary) runtime.Container {
	out := runtime.Container{
		ID:        c.ID,
		Image:     c.ImageID,
		State:     state(c.State),
		Labels:    ownLabels(c.Labels),
		CreatedAt: time.Unix(c.Created, 0).UTC(),
	}
	for _, n := range c.Names { // others are of the form /container/link
		if n = strings.TrimPrefix(n, "/"); !strings.Contains(n, "/") {
			out.Name = n
		}
	}
	return out
}

// ownLabels returns the labels that Berm's callers gave.
func ownLabels(labels map[string]string) map[string]string {
	out := maps.Clone(labels)
	delete(out, createLabel)
	return out
}

func state(engine string) runtime.State {
	switch engine {
	case container.StateCreated:
		return runtime.StateCreated
	case container.StateRunning:
		return runtime.StateRunning
	case container.StatePaused:
		return runtime.StatePaused
	case container.StateExited:
		return runtime.StateExited
	}
	return runtime.StateUnknown
}
