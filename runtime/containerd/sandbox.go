package containerd

import (
	"context"

	coresandbox "github.com/containerd/containerd/v2/core/sandbox"
	"github.com/containerd/errdefs"
)

// An engine from 1.7 on that starts takes a shim without processes for one whose
// container was never made, and ends it: how the main process ended would be lost.
// It spares those that carry the id of a sandbox (loadShim in its shim_load.go), and
// so each container gets a record of one, which is nothing but that. It goes with the
// task, and is there only while the container's own is. Engines before 1.7 have neither the habit nor sandboxes.

func (r *Runtime) makeSandbox(ctx context.Context, id, shim string) error {
	_, err := r.client.SandboxStore().Create(ctx, coresandbox.Sandbox{
		ID: id, Labels: map[string]string{labelRoot: r.opts.Root}, Runtime: coresandbox.RuntimeOpts{Name: shim},
	})
	if err = native(err); errdefs.IsNotImplemented(err) {
		return nil
	}
	return err
}

// removeSandbox removes it; one that isn't there is no error.
func (r *Runtime) removeSandbox(ctx context.Context, id string) error {
	err := native(r.client.SandboxStore().Delete(ctx, id))
	if err == nil || errdefs.IsNotImplemented(err) {
		return nil
	}
	// 1.7 has no class for the error that there is none.
	if _, why := r.client.SandboxStore().Get(ctx, id); errdefs.IsNotFound(native(why)) {
		return nil
	}
	return err
}
