package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

// Sweep removes what creates and removals left that were cut short: directories,
// network namespaces and addresses of containers that the engine has no record of,
// leases, and processes without a record. A container with a record is List's.
func (r *Runtime) Sweep(ctx context.Context) error {
	x := sweep{r}
	return r.call(ctx, "sweep", func(ctx context.Context) error {
		parts, err := x.parts(ctx)
		if err != nil {
			return err
		}
		// Whoever is in parts and not here now may be under way, and then has a lock.
		known, err := x.known(ctx)
		if err != nil {
			return err
		}
		errs := []error{x.programs(ctx, parts), r.sweepLeases(ctx)}
		for _, id := range parts {
			if known[id] {
				continue
			}
			if err := x.one(ctx, id); err != nil {
				errs = append(errs, fmt.Errorf("what is left of container %s: %w", id, err))
			}
		}
		return errors.Join(append(errs, r.networks.Sweep(ctx))...)
	})
}

// sweep is a Sweep under way.
type sweep struct{ r *Runtime }

// parts lists the containers that anything is found of but, maybe, a record.
func (x sweep) parts(ctx context.Context) ([]string, error) {
	ids, err := x.r.root.places()
	if err != nil {
		return nil, err
	}
	attached, err := x.r.networks.Attachments()
	if err != nil {
		return nil, err
	}
	ids = append(ids, attached...)
	held, err := x.r.client.LeasesService().List(ctx, "labels."+strconv.Quote(labelRoot)+"=="+strconv.Quote(x.r.opts.Root))
	if err != nil {
		return nil, err
	}
	for _, l := range held {
		if id := strings.TrimPrefix(l.ID, "berm-"); idPattern.MatchString(id) {
			ids = append(ids, id)
		}
	}
	strays, err := x.strays(ctx)
	if err != nil {
		return nil, err
	}
	ids = append(ids, strays...)
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// known are the containers that the engine has a record of.
func (x sweep) known(ctx context.Context) (map[string]bool, error) {
	recs, err := x.r.client.ContainerService().List(ctx, labelFilter(nil))
	if err != nil {
		return nil, err
	}
	out := make(map[string]bool, len(recs))
	for _, rec := range recs {
		out[rec.ID] = true
	}
	return out, nil
}

// one removes what is left of a container, unless somebody is at it. Once begun it
// is brought to its end: the directory may be there only because of it.
func (x sweep) one(ctx context.Context, id string) error {
	if err := ended(ctx); err != nil {
		return err
	}
	ctx, cancel := x.r.linger(ctx)
	defer cancel()
	p, err := lockPlace(x.r.root.path("containers", id))
	if errors.Is(err, fs.ErrNotExist) {
		p, err = x.r.root.makePlace(ctx, id) // so that nobody else is at it either
	}
	if err != nil || p == nil {
		return err
	}
	defer p.release()
	switch rec, err := x.r.client.ContainerService().Get(ctx, id); {
	case err == nil && rec.Labels[labelName] != "":
		return nil // it was made or is listed
	case err == nil: // removeStray was cut short
	case !errdefs.IsNotFound(err):
		return err
	}
	if err := x.removeStray(ctx, id); err != nil {
		return err
	}
	if err := (teardown{r: x.r, id: id}).run(ctx); err != nil {
		return err
	}
	if err := absent(x.r.client.LeasesService().Delete(ctx, leases.Lease{ID: "berm-" + id}, leases.SynchronousDelete)); err != nil {
		return err
	}
	x.r.log.InfoContext(ctx, "container_parts_removed", "container_id", id)
	return p.remove()
}

// removeStray removes a task whose record is gone. The engine finds a task by its
// record only, and so it gets one for the while.
func (x sweep) removeStray(ctx context.Context, id string) error {
	res, err := x.r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
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
		_, err = x.r.client.ContainerService().Create(ctx, containers.Container{
			ID: id, Labels: map[string]string{labelRoot: x.r.opts.Root}, Runtime: containers.RuntimeInfo{Name: runcShim}, Spec: s,
		})
		if err != nil && !errdefs.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}

// strays are the containers with a shim but no record. A record is made before the
// shim and removed after it, so that there is no such thing in the normal course.
func (x sweep) strays(ctx context.Context) ([]string, error) {
	running, err := x.r.remains.shims()
	if err != nil || len(running) == 0 {
		return nil, err
	}
	recs, err := x.r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, err
	}
	recorded := make(map[string]bool, len(recs))
	for _, rec := range recs {
		recorded[rec.ID] = true
	}
	var out []string
	for _, s := range running {
		if !recorded[s.id] {
			out = append(out, s.id)
		}
	}
	return out, nil
}

// programs ends the lost programs of all containers, and removes their pipes.
func (x sweep) programs(ctx context.Context, ids []string) error {
	var errs []error
	for _, id := range ids {
		lost := x.r.root.lostCommands(id)
		if files := openPipes(lost); len(files) > 0 {
			select {
			case <-time.After(freeTime):
			case <-ctx.Done():
			}
			closePipes(files)
		}
		for _, p := range lost {
			if (program{x.r, id, filepath.Base(p.dir), p}).end(ctx, sweepPatience) {
				if err := p.remove(); err != nil && !errors.Is(err, fs.ErrNotExist) {
					errs = append(errs, err)
				}
			}
			p.release()
		}
	}
	return errors.Join(errs...)
}
