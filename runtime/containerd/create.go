package containerd

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
)

// leaseTime is how long the engine's collector spares the parts of a Create, which takes far
// less.
const leaseTime = 15 * time.Minute

const leasePrefix = "berm-"

// maxVolumes is more than any honest image declares.
const maxVolumes = 256

// Create makes a container and starts it.
func (r *Runtime) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	op := fmt.Sprintf("create container %q", spec.Name)
	if err := validate(spec); err != nil {
		return runtime.Container{}, fmt.Errorf("%s: %w", op, err)
	}
	var out runtime.Container
	err := r.call(ctx, op, func(callCtx context.Context) error {
		c := &creation{r: r, spec: spec}
		err := c.prepare(callCtx)
		if err == nil {
			err = ended(callCtx)
		}
		if err != nil {
			return err
		}
		if c.place, err = r.root.makePlace(callCtx, c.id); err != nil {
			return err
		}
		defer c.place.release()
		// Don't cancel calls to the engine: it may leave the parts of a cancelled call behind.
		workCtx, cancel := r.linger(callCtx)
		defer cancel()
		if err = c.run(callCtx, workCtx); err == nil {
			out, err = r.inspect(workCtx, c.record)
		}
		if err != nil {
			c.undo(callCtx)
		}
		return err
	})
	return out, err
}

// creation is a Create under way.
type creation struct {
	r       *Runtime
	spec    runtime.Spec
	id      string
	image   *image.Image
	account image.Account
	ids     int      // the first of the host's IDs in its user namespace; 0 without one
	dirs    []string // directories that the image lacks
	agent   string
	class   runtimeClass
	place   *place
	lease   leases.Lease
	record  containers.Container
	linux   *specs.Linux // of the record's OCI spec
}

// prepare checks the spec, and finds the image, the account and the agent. It makes nothing.
func (c *creation) prepare(ctx context.Context) error {
	var err error
	if c.class, err = classOf(c.spec.RuntimeClass); err != nil {
		return err
	}
	for _, m := range c.spec.Mounts {
		if _, err := os.Stat(m.Source); err != nil {
			return runtime.Invalid("mount of %s at %s: the source can't be used: %w", m.Source, m.Target, err)
		}
	}
	if err = c.class.mounts(c.spec.Mounts, c.spec.UserNS); err != nil {
		return err
	}
	if err = c.findAgent(); err != nil {
		return err
	}
	if c.image, err = c.r.images.Unpacked(ctx, c.spec.Image); err != nil {
		return err
	}
	if c.account, err = c.r.images.Account(ctx, c.image, c.spec.User); err != nil {
		return err
	}
	if c.spec.UserNS {
		if err = c.checkUserNS(ctx); err != nil {
			return err
		}
	}
	if n := len(c.image.Config.Volumes); n > maxVolumes { // each is a mount, and may be a directory on the host's disk
		return runtime.Invalid("the image declares %d volumes, of which there may be %d", n, maxVolumes)
	}
	if c.dirs, err = c.r.images.MissingDirs(ctx, c.image, c.wanted()); err != nil {
		return err
	}
	c.id = newID()
	return nil
}

// findAgent finds the agent's program and directory on the host.
func (c *creation) findAgent() error {
	var err error
	if a := c.spec.Agent; a != nil {
		for _, p := range []string{a.Program, a.Dir} {
			if _, err := os.Stat(p); p != "" && err != nil {
				return runtime.Invalid("the agent can't be used: %w", err)
			}
		}
		if c.agent = a.Program; c.agent != "" {
			return nil
		}
	}
	c.agent, err = c.r.agentPath()
	return err
}

func newID() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// run makes the container and starts it, on ctx. It stops between two steps if asked, the caller's
// context, ends.
func (c *creation) run(asked, ctx context.Context) error {
	var netns string
	var err error
	switch {
	case c.spec.UserNS:
		netns, err = c.makeUserNS(ctx)
	case c.spec.Network != "":
		netns, err = c.r.networks.MakeNetns(c.id, "")
	}
	if err != nil {
		return err
	}
	if err := c.writeFiles(); err != nil {
		return err
	}
	// If one fails, the other stops between two steps. Cancelling a call would leave parts that nobody
	// knows of.
	going, stop := context.WithCancel(asked)
	defer stop()
	var wg sync.WaitGroup
	var unconnected error
	if netns != "" {
		wg.Go(func() {
			if unconnected = c.connect(ctx); unconnected != nil {
				stop()
			}
		})
	}
	err = c.makeTask(going, ctx, netns)
	wg.Wait()
	if unconnected != nil {
		return unconnected
	}
	if err != nil {
		return err
	}
	return c.start(asked, ctx)
}

// connect puts the container's network namespace on its network.
func (c *creation) connect(ctx context.Context) error {
	e, err := c.r.networks.Attach(ctx, c.id, c.spec.Network)
	if err != nil {
		return err
	}
	return c.writeNetworkFiles(e)
}

// makeTask makes the record and the processes, up to the point where the main
// process would start.
func (c *creation) makeTask(asked, ctx context.Context, netns string) error {
	mounts, err := c.snapshot(ctx)
	if err == nil {
		err = ended(asked)
	}
	if err != nil {
		return err
	}
	if err := c.register(ctx, netns); err != nil {
		return err
	}
	// The record keeps the snapshot from here on.
	var g errgroup.Group
	g.Go(func() error { return c.r.client.LeasesService().Delete(ctx, c.lease) })
	g.Go(func() error { return c.makeSandbox(ctx) })
	g.Go(func() error {
		if err := ended(asked); err != nil {
			return err
		}
		return c.task(ctx, mounts)
	})
	return g.Wait()
}

// ended returns the error of a context that has ended, or nil.
func ended(ctx context.Context) error {
	if ctx.Err() != nil {
		return runtime.Ended(ctx)
	}
	return nil
}

// snapshot makes the root file system. Its key is the container's name, which keeps the name
// unique in the engine.
func (c *creation) snapshot(ctx context.Context) ([]mount.Mount, error) {
	var err error
	c.lease, err = c.r.client.LeasesService().Create(ctx, leases.WithID(leaseID(c.id)),
		leases.WithExpiration(leaseTime), leases.WithLabel(labelRoot, c.r.opts.Root))
	if err != nil {
		return nil, err
	}
	leaseCtx := leases.WithLease(ctx, c.lease.ID)
	snapshotter := c.r.client.SnapshotService(c.r.opts.Snapshotter)
	var opts []snapshots.Opt
	if c.ids != 0 {
		ids := fmt.Sprintf("0:%d:%d", c.ids, rangeSize)
		opts = append(opts, snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotUIDMapping: ids, snapshots.LabelSnapshotGIDMapping: ids}))
	}
	for swept := false; ; swept = true {
		mounts, err := snapshotter.Prepare(leaseCtx, snapshotKey(c.spec.Name), c.image.ChainID, opts...)
		if !errdefs.IsAlreadyExists(err) {
			return mounts, err
		}
		recs, err := c.r.client.ContainerService().List(ctx, labelFilter(map[string]string{labelName: c.spec.Name}))
		switch {
		case err != nil:
			return nil, err
		case swept || len(recs) > 0:
			return nil, runtime.WithClass(errdefs.ErrAlreadyExists, fmt.Errorf("the name %q is taken", c.spec.Name))
		}
		// A Create that was cut short may have left the snapshot.
		if err := c.r.Sweep(ctx); err != nil {
			return nil, err
		}
	}
}

func snapshotKey(name string) string { return "berm-" + name }

func leaseID(id string) string { return leasePrefix + id }

// register makes the engine's record of the container.
func (c *creation) register(ctx context.Context, netns string) error {
	s, err := c.ociSpec(netns)
	if err != nil {
		return err
	}
	c.linux = s.Linux
	specAny, err := typeurl.MarshalAny(s)
	if err != nil {
		return fmt.Errorf("encode the OCI spec: %w", err)
	}
	options, err := c.class.options(c.ids)
	if err != nil {
		return err
	}
	rec := containers.Container{
		ID:          c.id,
		Labels:      map[string]string{labelName: c.spec.Name, labelImage: c.image.ID, labelRoot: c.r.opts.Root},
		Image:       c.image.ID,
		Runtime:     containers.RuntimeInfo{Name: c.class.name, Options: options},
		Spec:        specAny,
		SnapshotKey: snapshotKey(c.spec.Name),
		Snapshotter: c.r.opts.Snapshotter,
	}
	if err := encodeLabels(&rec, c.spec.Labels); err != nil {
		return err
	}
	c.record, err = c.r.client.ContainerService().Create(ctx, rec)
	return err
}

// task makes the container's processes; the main process waits for its start.
func (c *creation) task(ctx context.Context, mounts []mount.Mount) error {
	newIO, err := c.logIO()
	if err != nil {
		return err
	}
	io, err := newIO(c.id)
	if err != nil {
		return fmt.Errorf("set up the log: %w", err)
	}
	req := &tasks.CreateTaskRequest{ContainerID: c.id, Stdout: io.Config().Stdout, Stderr: io.Config().Stderr}
	for _, m := range mounts {
		req.Rootfs = append(req.Rootfs, &types.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	res, err := c.r.client.TaskService().Create(ctx, req)
	if err = native(err); err != nil {
		return c.class.explain(err)
	}
	return c.vet(res.Pid, c.linux)
}

// start lets the main process begin.
func (c *creation) start(asked, ctx context.Context) error {
	if err := ended(asked); err != nil {
		return err
	}
	begun := time.Now().UTC().Format(time.RFC3339Nano)
	if err := os.WriteFile(c.place.file("started"), []byte(begun), 0o600); err != nil {
		return err
	}
	_, err := c.r.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: c.id})
	return native(err)
}

// undo cleans up after a failed Create, even if its context has ended. A sweep finds what it can't
// remove, or a caller does by the labels.
func (c *creation) undo(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if err := (teardown{r: c.r, id: c.id}).all(ctx, c.place); err != nil {
		c.r.log.ErrorContext(ctx, "container_left", "name", c.spec.Name, "container_id", c.id, "error", err)
	}
}

// hostname returns the container's host name.
func (c *creation) hostname() string { return cmp.Or(c.spec.Hostname, c.id[:12]) }
