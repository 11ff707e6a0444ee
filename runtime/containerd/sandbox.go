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

func (c *creation) makeSandbox(ctx context.Context) error {
	_, err := c.r.client.SandboxStore().Create(ctx, coresandbox.Sandbox{
		ID: c.id, Labels: map[string]string{labelRoot: c.r.opts.Root}, Runtime: coresandbox.RuntimeOpts{Name: c.class.name},
	})
	if err = native(err); errdefs.IsNotImplemented(err) {
		return nil
	}
	return err
}
