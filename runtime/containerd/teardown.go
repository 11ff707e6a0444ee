package containerd

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/network"
)

// teardown removes a container.
type teardown struct {
	r     *Runtime
	id    string
	place *place // the container's directory, which the caller has locked; nil to keep it, or if there is none
}

// all removes everything that a Create made, even in part. It also removes the lease, and so a
// snapshot without a record, and the directory.
func (x teardown) all(ctx context.Context, p *place) error {
	err := x.run(ctx)
	if err == nil {
		err = absent(x.r.client.LeasesService().Delete(ctx, leases.Lease{ID: leaseID(x.id)}, leases.SynchronousDelete))
	}
	if err == nil {
		err = p.remove()
	}
	return err
}

// run removes a container, or what is left of it. A sweep finds the rest by the records, so run removes
// them last.
func (x teardown) run(ctx context.Context) error {
	defer x.r.root.freePipes(x.id)()
	rec, err := x.r.client.ContainerService().Get(ctx, x.id)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	there := err == nil
	if err := x.removeParts(ctx, there); err != nil {
		return err
	}
	if err := x.r.remains.removeSockets(x.id); err != nil { // those of a killed shim
		return err
	}
	var g errgroup.Group
	if there {
		g.Go(func() error { return absent(x.r.client.ContainerService().Delete(ctx, x.id)) })
	}
	if rec.SnapshotKey != "" {
		// The engine's collector would remove the snapshot later. But its name must be free now.
		g.Go(func() error {
			return absent(x.r.client.SnapshotService(rec.Snapshotter).Remove(ctx, rec.SnapshotKey))
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := x.removeUserNS(); err != nil || x.place == nil {
		return err
	}
	return x.place.remove()
}

// removeParts removes a container's task, processes and network. There says whether the engine
// has a record of the container, and so may have a task.
func (x teardown) removeParts(ctx context.Context, there bool) error {
	known := false
	if there {
		var err error
		if known, err = x.endTask(ctx); err != nil {
			return err
		}
	}
	processes := func() error {
		if there { // even without a known task, a shim may be left that nothing else would end
			if err := x.deleteTask(ctx); err != nil {
				return err
			}
		}
		if cgroups, err := x.r.remains.cgroups(x.id); err != nil || !known || len(cgroups) > 0 {
			return errors.Join(err, x.r.remains.remove(ctx, x.id))
		}
		return nil
	}
	if !known { // processes may use the network until they are found and killed
		if err := processes(); err != nil {
			return err
		}
		return x.r.networks.Detach(ctx, x.id)
	}
	var g errgroup.Group
	g.Go(processes)
	g.Go(func() error { return x.r.networks.Detach(ctx, x.id) })
	return g.Wait()
}

// endTask kills a container's processes, and waits for their end. It reports whether the
// engine knows of a task.
func (x teardown) endTask(ctx context.Context) (known bool, err error) {
	t, err := x.r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: x.id})
	switch err = native(err); {
	case errdefs.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, err
	case t.Process.Status == tasktypes.Status_STOPPED:
		return true, nil
	}
	return true, x.killTask(ctx, t.Process)
}

// noticeTime is how long the engine may take to notice that a shim has died.
const noticeTime = 2 * time.Second

// deleteTask deletes a task that has ended, with its shim and its sandbox. Missing ones are no
// error. Until the engine notices that a shim has died, its errors have no class, so
// deleteTask tries again for noticeTime.
func (x teardown) deleteTask(ctx context.Context) error {
	sandbox := make(chan error, 1)
	go func() { sandbox <- x.removeSandbox(ctx) }()
	noticed, cancel := context.WithTimeout(ctx, noticeTime)
	defer cancel()
	var err error
	_ = await(noticed, func() (bool, error) {
		_, err = x.r.client.TaskService().Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: x.id})
		err = absent(native(err))
		return !errdefs.IsUnknown(err), nil
	})
	return errors.Join(err, <-sandbox)
}

// killTask kills the main process, and so its whole process namespace. If it can, it does so
// without the engine, which would run its OCI runtime for that.
func (x teardown) killTask(ctx context.Context, first *tasktypes.Process) error {
	service := x.r.client.TaskService()
	killed, err := x.r.remains.killFirst(x.id, int(first.Pid))
	if err != nil {
		return err
	}
	if !killed {
		_, err := service.Kill(ctx, &tasks.KillRequest{ContainerID: x.id, Signal: uint32(unix.SIGKILL)})
		if err = native(err); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	if state(first.Status) == runtime.StatePaused { // frozen processes don't die
		if _, err := service.Resume(ctx, &tasks.ResumeTaskRequest{ContainerID: x.id}); err != nil {
			x.r.log.DebugContext(ctx, "resume_failed", "container_id", x.id, "error", err)
		}
	}
	_, err = service.Wait(ctx, &tasks.WaitRequest{ContainerID: x.id})
	if err = native(err); err != nil && !errdefs.IsNotFound(err) && !errdefs.IsUnknown(err) { // see deleteTask
		return err
	}
	return nil
}

// removeUserNS removes what pinUserNS and claimRange made for a container, except for files in
// its directory.
func (x teardown) removeUserNS() error {
	if err := network.RemoveNetns(x.r.root.path("containers", x.id, usernsFile)); err != nil {
		return err
	}
	own := x.r.root.path("containers", x.id, rangeFile)
	first, err := os.ReadFile(own)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	link := filepath.Join(rangeClaims, string(first))
	if target, lost := os.Readlink(link); err == nil && lost == nil && target == own {
		err = os.RemoveAll(link)
	}
	return err
}

// removeSandbox removes what makeSandbox made. A missing sandbox is no error.
func (x teardown) removeSandbox(ctx context.Context) error {
	err := native(x.r.client.SandboxStore().Delete(ctx, x.id))
	if err == nil || errdefs.IsNotImplemented(err) {
		return nil
	}
	// In containerd 1.7, the error for a missing sandbox has no class.
	if _, why := x.r.client.SandboxStore().Get(ctx, x.id); errdefs.IsNotFound(native(why)) {
		return nil
	}
	return err
}
