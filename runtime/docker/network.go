package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/runtime"
)

// iccOption of the bridge driver lets containers on one bridge reach each other.
const iccOption = "com.docker.network.bridge.enable_icc"

// inhibitOption of the bridge driver keeps the bridge from having an address of the host. At
// that address, containers could reach the host's servers, even from an internal network.
const inhibitOption = "com.docker.network.bridge.inhibit_ipv4"

// EnsureNetwork makes a bridge network unless one of this name exists. An existing one must have the
// same driver and options.
//
// Engines below API 1.44 check the name before they make the network. Two networks may come
// to share it, and then neither can be used. So EnsureNetwork looks again afterwards, and
// removes its own unless that is the oldest.
func (r *Runtime) EnsureNetwork(ctx context.Context, n runtime.Network) error {
	op := fmt.Sprintf("make network %q", n.Name)
	if n.Name == "" {
		return fmt.Errorf("%s: %w", op, runtime.Invalid("the name is missing"))
	}
	// The timeout is twice the call's, so that the call ends first, with its own error.
	_, err := runtime.Together(ctx, &r.networks, n.Name, 2*r.timeout, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, r.call(ctx, op, func(ctx context.Context, s *session) error { return ensureNetwork(ctx, s, n) })
	})
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%s: %w", op, runtime.Ended(ctx))
	}
	return err
}

func ensureNetwork(ctx context.Context, s *session, n runtime.Network) error {
	found, err := networksNamed(ctx, s, n.Name)
	switch {
	case err != nil:
		return err
	case len(found) > 0:
		return sameNetwork(found[0], n)
	case n.External:
		return runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such network, and the policy says that Berm doesn't make it"))
	}
	opts := network.CreateOptions{Driver: "bridge", Internal: n.Internal, Labels: n.Labels, Options: map[string]string{}}
	if n.Isolated {
		opts.Options[iccOption] = "false"
	}
	if n.Internal {
		opts.Options[inhibitOption] = "true"
	}
	made, err := s.NetworkCreate(ctx, n.Name, opts)
	if err != nil && !errdefs.IsConflict(err) {
		return err
	}
	found, err = networksNamed(ctx, s, n.Name)
	if err != nil || len(found) == 0 || found[0].ID == made.ID {
		return err
	}
	if made.ID != "" {
		if err := s.NetworkRemove(ctx, made.ID); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	return sameNetwork(found[0], n)
}

// sameNetwork returns an error if a network confines containers differently from n.
func sameNetwork(found network.Summary, n runtime.Network) error {
	switch {
	case found.Driver != "bridge", found.Scope != "local", found.Ingress, found.ConfigOnly, found.ConfigFrom.Network != "":
	case found.Internal != n.Internal, found.Internal && found.Options[inhibitOption] != "true" && !n.External:
	case !n.External && (found.EnableIPv6 || (found.Options[iccOption] == "false") != n.Isolated):
	default:
		return nil
	}
	return runtime.Precondition("the network that is there has another driver or other options than the policy's: remove or rename it")
}

// networksNamed lists the networks of exactly this name, the oldest first.
func networksNamed(ctx context.Context, s *session, name string) ([]network.Summary, error) {
	// The engine's filter also takes parts of names.
	list, err := s.NetworkList(ctx, network.ListOptions{Filters: filters.NewArgs(filters.Arg("name", name))})
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(n network.Summary) bool { return n.Name != name })
	slices.SortFunc(list, func(a, b network.Summary) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID))
	})
	return list, nil
}

// Networks lists the networks that carry all the labels.
func (r *Runtime) Networks(ctx context.Context, labels map[string]string) ([]runtime.Network, error) {
	var out []runtime.Network
	err := r.call(ctx, "list networks", func(ctx context.Context, s *session) error {
		list, err := s.NetworkList(ctx, network.ListOptions{Filters: labelFilter(labels)})
		if err != nil {
			return err
		}
		out = make([]runtime.Network, 0, len(list))
		for _, n := range list {
			out = append(out, runtime.Network{
				Name:      n.Name,
				ID:        n.ID,
				Labels:    n.Labels,
				Internal:  n.Internal,
				Isolated:  n.Options[iccOption] == "false",
				CreatedAt: n.Created.UTC(),
			})
		}
		return nil
	})
	return out, err
}

// RemoveNetwork removes the network of this name.
func (r *Runtime) RemoveNetwork(ctx context.Context, name string) error {
	return r.call(ctx, fmt.Sprintf("remove network %q", name), func(ctx context.Context, s *session) error {
		// Remove by ID, as the engine could take a name for the start of an ID.
		found, err := networksNamed(ctx, s, name)
		if err != nil {
			return err
		}
		for _, n := range found {
			if err := s.NetworkRemove(ctx, n.ID); err != nil && !errdefs.IsNotFound(err) {
				return err
			}
		}
		return nil
	})
}
