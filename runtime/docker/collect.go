package docker

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/runtime"
)

var _ runtime.Collector = (*Runtime)(nil)

// Volumes lists the volumes that carry all the labels.
func (r *Runtime) Volumes(ctx context.Context, labels map[string]string) ([]runtime.Volume, error) {
	var out []runtime.Volume
	err := r.call(ctx, "list volumes", func(ctx context.Context, s *session) error {
		list, err := s.VolumeList(ctx, volume.ListOptions{Filters: labelFilter(labels)})
		if err != nil {
			return err
		}
		out = make([]runtime.Volume, 0, len(list.Volumes))
		for _, v := range list.Volumes {
			made, _ := time.Parse(time.RFC3339, v.CreatedAt) // not every driver tells
			out = append(out, runtime.Volume{Name: v.Name, Labels: v.Labels, CreatedAt: made.UTC()})
		}
		return nil
	})
	return out, err
}

// RemoveVolume removes the volume of this name.
func (r *Runtime) RemoveVolume(ctx context.Context, name string) error {
	return r.discard(ctx, "remove volume", name, func(ctx context.Context, s *session) error {
		return s.VolumeRemove(ctx, name, false)
	})
}

// RemoveNetworkID removes the network of this ID.
func (r *Runtime) RemoveNetworkID(ctx context.Context, id string) error {
	return r.discard(ctx, "remove network", id, func(ctx context.Context, s *session) error {
		return s.NetworkRemove(ctx, id)
	})
}

// discard is call for a removal. It is no error if there is no such thing.
func (r *Runtime) discard(ctx context.Context, op, name string, f func(context.Context, *session) error) error {
	if name == "" || url.PathEscape(name) != name { // it would change the path of the client's URL
		return fmt.Errorf("%s %q: %w", op, name, runtime.WithClass(errdefs.ErrInvalidArgument, errors.New("nothing has such a name")))
	}
	err := r.call(ctx, fmt.Sprintf("%s %q", op, name), f)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}
