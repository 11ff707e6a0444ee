package containerd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	containerdplugins "github.com/containerd/containerd/v2/plugins"

	"github.com/bermhq/berm/runtime"
)

// Survey asks the engine how it is set up, and looks for what it and Berm need on this
// host. Nothing is made.
func (r *Runtime) Survey(ctx context.Context) (runtime.Survey, error) {
	out := runtime.Survey{Storage: r.opts.Snapshotter}
	var err error
	if out.Info, err = r.Info(ctx); err != nil {
		return out, err
	}
	err = r.call(ctx, "list the engine's plug-ins", func(ctx context.Context) error {
		found, err := r.client.IntrospectionService().Plugins(ctx, fmt.Sprintf("type==%s,id==%s", containerdplugins.SnapshotPlugin, r.opts.Snapshotter))
		if err != nil {
			return err
		}
		// One that can't be used here is listed with the reason.
		if len(found.Plugins) == 0 || found.Plugins[0].InitErr != nil {
			out.Missing = append(out.Missing, "the engine's snapshotter "+r.opts.Snapshotter)
		}
		return nil
	})
	if err != nil {
		return out, err
	}
	for name, class := range runtimeClasses {
		if name != "" && installed(class.needs) {
			out.Classes = append(out.Classes, name)
		}
	}
	slices.Sort(out.Classes)
	for _, program := range []string{"runc", "containerd-shim-runc-v2"} {
		if !installed(program) {
			out.Missing = append(out.Missing, "the program "+program)
		}
	}
	for _, program := range []string{"iptables-save", "iptables-restore"} {
		if !installed(program) {
			out.MissingForNetworks = append(out.MissingForNetworks, "the program "+program)
		}
	}
	for _, name := range r.networks.MissingPlugins() {
		out.MissingForNetworks = append(out.MissingForNetworks, fmt.Sprintf("the CNI plug-in %s (looked for in %s)", name, strings.Join(r.opts.PluginDirs, ", ")))
	}
	if err := r.call(ctx, "ask for user namespaces", func(ctx context.Context) (err error) {
		out.NoUserNS, err = r.noUserNS(ctx)
		return err
	}); err != nil {
		out.NoUserNS = err.Error()
	}
	if !swapLimits() {
		out.Unlimited = []string{"swap"}
	}
	return out, nil
}
