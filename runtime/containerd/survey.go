package containerd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/containerd/api/services/introspection/v1"
	containerdplugins "github.com/containerd/containerd/v2/plugins"

	"github.com/bermhq/berm/runtime"
)

// Survey asks the engine for its configuration, and looks for what the engine and Berm need on this
// host. It changes nothing.
func (r *Runtime) Survey(ctx context.Context) (runtime.Survey, error) {
	out := runtime.Survey{Storage: r.opts.Snapshotter}
	var err error
	if out.Info, err = r.Info(ctx); err != nil {
		return out, err
	}
	err = r.call(ctx, "list the engine's plug-ins", func(ctx context.Context) error {
		// A snapshotter that can't be used here is listed with the reason.
		if p, err := r.snapshotter(ctx); err != nil {
			return err
		} else if p == nil || p.InitErr != nil {
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
	missing := func(list *[]string, programs ...string) {
		for _, program := range programs {
			if !installed(program) {
				*list = append(*list, "the program "+program)
			}
		}
	}
	missing(&out.Missing, "runc", "containerd-shim-runc-v2")
	missing(&out.MissingForNetworks, "iptables-save", "iptables-restore")
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

// snapshotter returns what the engine says about its snapshotter; nil if it has none.
func (r *Runtime) snapshotter(ctx context.Context) (*introspection.Plugin, error) {
	found, err := r.client.IntrospectionService().Plugins(ctx, fmt.Sprintf("type==%s,id==%s", containerdplugins.SnapshotPlugin, r.opts.Snapshotter))
	if err != nil || len(found.Plugins) == 0 {
		return nil, err
	}
	return found.Plugins[0], nil
}
