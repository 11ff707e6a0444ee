package docker

import (
	"context"
	"errors"
	"maps"
	"slices"
)

// Description has properties by which a process can recognize its own container.
type Description struct {
	ID       string
	Running  bool
	Labels   map[string]string
	UpperDir string // the root file system's changes on the engine's host; empty if unknown
	Mounts   []DescribedMount
	Networks []string // names of its networks, sorted; "host" and "none" are among them
}

// DescribedMount is a bind or a volume of a container's.
type DescribedMount struct {
	Source string // on the engine's host
	Target string // in the container
	Volume bool   // it is a volume, which the engine keeps
}

// Describe describes any container, even one without Berm's labels. Berm looks for its own container
// with it.
func (r *Runtime) Describe(ctx context.Context, id string) (Description, error) {
	var out Description
	err := r.callOn(ctx, "describe container", id, func(ctx context.Context, s *session) error {
		c, err := s.ContainerInspect(ctx, id)
		if err != nil {
			return err
		}
		if c.ContainerJSONBase == nil || c.State == nil || c.Config == nil || c.NetworkSettings == nil {
			return errors.New("the engine's answer is incomplete")
		}
		out = Description{
			ID: c.ID, Running: c.State.Running, Labels: c.Config.Labels, UpperDir: c.GraphDriver.Data["UpperDir"],
			Networks: slices.Sorted(maps.Keys(c.NetworkSettings.Networks)),
		}
		for _, m := range c.Mounts {
			if m.Source != "" && (m.Type == "bind" || m.Type == "volume") {
				out.Mounts = append(out.Mounts, DescribedMount{Source: m.Source, Target: m.Destination, Volume: m.Type == "volume"})
			}
		}
		return nil
	})
	return out, err
}
