package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

// Sweep removes what creates and removals left that were cut short: directories,
// network namespaces and addresses of containers that the engine has no record of,
// leases, and processes without a record. A container with a record is List's.
func (r *Runtime) Sweep(ctx context.Context) error {
	return r.call(ctx, "sweep", func(ctx context.Context) error {
		parts, err := r.parts(ctx)
		if err != nil {
			return err
		}
		// Whoever is in parts and not here now may be under way, and then has a lock.
		known, err := r.known(ctx)
		if err != nil {
			return err
		}
		errs := []error{r.sweepPipes(ctx, parts), r.sweepLeases(ctx)}
		for _, id := range parts {
			if known[id] {
				continue
			}
			if err := r.sweepOne(ctx, id); err != nil {
				errs = append(errs, fmt.Errorf("what is left of container %s: %w", id, err))
			}
		}
		return errors.Join(append(errs, r.networks.Sweep(ctx))...)
	})
}

// parts lists the containers that anything is found of but, maybe, a record.
func (r *Runtime) parts(ctx context.Context) ([]string, error) {
	ids, err := r.places()
	if err != nil {
		return nil, err
	}
	attached, err := r.networks.Attachments()
	if err != nil {
		return nil, err
	}
	ids = append(ids, attached...)
	held, err := r.client.LeasesService().List(ctx, "labels."+strconv.Quote(labelRoot)+"=="+strconv.Quote(r.opts.Root))
	if err != nil {
		return nil, err
	}
	for _, l := range held {
		if id := strings.TrimPrefix(l.ID, "berm-"); idPattern.MatchString(id) {
			ids = append(ids, id)
		}
	}
	strays, err := r.strays(ctx)
	if err != nil {
		return nil, err
	}
	ids = append(ids, strays...)
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// known are the containers that the engine has a record of.
func (r *Runtime) known(ctx context.Context) (map[string]bool, error) {
	recs, err := r.client.ContainerService().List(ctx, labelFilter(nil))
	if err != nil {
		return nil, err
	}
	out := make(map[string]bool, len(recs))
	for _, rec := range recs {
		out[rec.ID] = true
	}
	return out, nil
}

// sweepOne removes what is left of a container, unless somebody is at it. Once begun it
// is brought to its end: the directory may be there only because of it.
func (r *Runtime) sweepOne(ctx context.Context, id string) error {
	if err := ended(ctx); err != nil {
		return err
	}
	ctx, cancel := r.linger(ctx)
	defer cancel()
	p, err := lockPlace(r.path("containers", id))
	if errors.Is(err, fs.ErrNotExist) {
		p, err = r.makePlace(ctx, id) // so that nobody else is at it either
	}
	if err != nil || p == nil {
		return err
	}
	defer p.release()
	switch rec, err := r.client.ContainerService().Get(ctx, id); {
	case err == nil && rec.Labels[labelName] != "":
		return nil // it was made or is listed
	case err == nil: // removeStray was cut short
	case !errdefs.IsNotFound(err):
		return err
	}
	if err := r.removeStray(ctx, id); err != nil {
		return err
	}
	if err := r.remove(ctx, nil, id); err != nil {
		return err
	}
	if err := absent(r.client.LeasesService().Delete(ctx, leases.Lease{ID: "berm-" + id}, leases.SynchronousDelete)); err != nil {
		return err
	}
	r.log.InfoContext(ctx, "container_parts_removed", "container_id", id)
	return p.remove()
}

// removeStray removes a task whose record is gone. The engine finds a task by its
// record only, and so it gets one for the while.
func (r *Runtime) removeStray(ctx context.Context, id string) error {
	res, err := r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return native(err)
	}
	for _, t := range res.Tasks {
		if t.ID != id {
			continue
		}
		s, err := emptySpec()
		if err != nil {
			return err
		}
		_, err = r.client.ContainerService().Create(ctx, containers.Container{
			ID: id, Labels: map[string]string{labelRoot: r.opts.Root}, Runtime: containers.RuntimeInfo{Name: runcShim}, Spec: s,
		})
		if err != nil && !errdefs.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}
