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
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Sweep removes what is left of creates and removals that were cut short: directories,
// network namespaces, addresses, leases and processes of containers without a record. List
// returns containers with a record.
func (r *Runtime) Sweep(ctx context.Context) error {
	x := sweep{r}
	return r.call(ctx, "sweep", func(ctx context.Context) error {
		parts, err := x.parts(ctx)
		if err != nil {
			return err
		}
		shims, err := r.remains.shims()
		if err != nil {
			return err
		}
		// A container with parts and without a record may be in the making. Then its Create holds its
		// lock.
		recs, err := r.client.ContainerService().List(ctx)
		if err != nil {
			return err
		}
		recorded, ours := map[string]bool{}, map[string]bool{}
		for _, rec := range recs {
			recorded[rec.ID], ours[rec.ID] = true, rec.Labels[labelName] != ""
		}
		// A record is made before the shim and removed after it.
		for _, s := range shims {
			if !recorded[s.id] {
				parts = append(parts, s.id)
			}
		}
		slices.Sort(parts)
		parts = slices.Compact(parts)
		errs := []error{x.programs(ctx, parts), r.sweepLeases(ctx)}
		for _, id := range parts {
			if ours[id] {
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

// parts lists the containers that have a directory, a place on a network or a lease.
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
		if id := strings.TrimPrefix(l.ID, leasePrefix); idPattern.MatchString(id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// one removes what is left of a container, unless its lock is held. It goes on when ctx ends, as it may
// have made the directory only to lock it.
func (x sweep) one(ctx context.Context, id string) error {
	if err := ended(ctx); err != nil {
		return err
	}
	ctx, cancel := x.r.linger(ctx)
	defer cancel()
	p, err := lockPlace(x.r.root.path("containers", id))
	if errors.Is(err, fs.ErrNotExist) {
		p, err = x.r.root.makePlace(ctx, id) // to have its lock
	}
	if err != nil || p == nil {
		return err
	}
	defer p.release()
	switch rec, err := x.r.client.ContainerService().Get(ctx, id); {
	case err == nil && rec.Labels[labelName] != "":
		return nil // List returns it
	case err == nil: // removeStray was cut short
	case !errdefs.IsNotFound(err):
		return err
	}
	if err := x.removeStray(ctx, id); err != nil {
		return err
	}
	if err := (teardown{r: x.r, id: id}).all(ctx, p); err != nil {
		return err
	}
	x.r.log.InfoContext(ctx, "container_parts_removed", "container_id", id)
	return nil
}

// removeStray makes a record for a task whose record is gone: the engine finds a task by its record
// only. A teardown then removes both.
func (x sweep) removeStray(ctx context.Context, id string) error {
	res, err := x.r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return native(err)
	}
	for _, t := range res.Tasks {
		if t.ID != id {
			continue
		}
		s, err := typeurl.MarshalAny(&specs.Spec{Version: ociVersion})
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
				errs = append(errs, p.remove())
			}
			p.release()
		}
	}
	return errors.Join(errs...)
}
