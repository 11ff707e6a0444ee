package containerd

import (
	"context"

	coresandbox "github.com/containerd/containerd/v2/core/sandbox"
	"github.com/containerd/errdefs"
)

// When containerd 1.7 or newer starts, it ends a shim without processes, as if its container was never
// made. How the main process ended would be lost. containerd spares shims with the ID of a sandbox
// (loadShim in its shim_load.go). So each container gets a sandbox record, which has no other use. The
// record goes with the task, and exists only while the container's record does.

func (c *creation) makeSandbox(ctx context.Context) error {
	_, err := c.r.client.SandboxStore().Create(ctx, coresandbox.Sandbox{
		ID: c.id, Labels: map[string]string{labelRoot: c.r.opts.Root}, Runtime: coresandbox.RuntimeOpts{Name: c.class.name},
	})
	if err = native(err); errdefs.IsNotImplemented(err) {
		return nil
	}
	return err
}
