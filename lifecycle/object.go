package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// Object is something that a caller made through the engine proxy. Everything known of it is in
// its labels.
type Object struct {
	Kind   ObjectKind
	ID     string // the engine's; of a volume its name
	Tenant string
	Ends   time.Time

	session string // distinguishes a volume from a later one of its name; may be empty
}

// EndedObjects returns this instance's objects of a kind that have ended at now, in use or not. It
// leaves out those whose labels don't say when they end.
func (c *collector) EndedObjects(ctx context.Context, kind ObjectKind, now time.Time) ([]Object, error) {
	if err := c.registry.available(); err != nil {
		return nil, err
	}
	var ended []Object
	objects, err := c.engine.objects(ctx, kind)
	if err != nil {
		return nil, fmt.Errorf("list what the engine's own API made: %w", err)
	}
	for _, o := range objects {
		if ends, ok := objectEnd(o.Labels); ok && !ends.After(now) {
			ended = append(ended, Object{Kind: kind, ID: o.ID, Tenant: o.Labels[LabelTenant], Ends: ends, session: o.Labels[LabelSessionID]})
		}
	}
	return ended, nil
}

// objectEnd returns the earlier of the two ends that labels name.
func objectEnd(labels map[string]string) (time.Time, bool) {
	expires, err := time.Parse(time.RFC3339Nano, labels[LabelExpiresAt])
	if err != nil {
		return time.Time{}, false
	}
	deadline, err := time.Parse(time.RFC3339Nano, labels[LabelDeadline])
	return earlier(expires, deadline), err == nil
}

// CollectObject removes an object that EndedObjects returned: a container by force and with its
// anonymous volumes, a network or a volume only if nothing uses it. It returns false if
// something does, or if the volume of this name is another by now.
func (c *collector) CollectObject(ctx context.Context, o Object) (bool, error) {
	if err := c.registry.available(); err != nil {
		return false, err
	}
	var err error
	switch o.Kind {
	case ObjectContainer:
		err = c.engine.remove(ctx, o.ID)
	case ObjectNetwork:
		err = c.engine.call(ctx, "remove_network", func(ctx context.Context) error { return c.registry.opts.Collector.RemoveNetworkID(ctx, o.ID) })
	case ObjectVolume:
		var there bool
		if there, err = c.sameVolume(ctx, o); err == nil && !there {
			return false, nil
		}
		if err == nil {
			err = c.engine.call(ctx, "remove_volume", func(ctx context.Context) error { return c.registry.opts.Collector.RemoveVolume(ctx, o.ID) })
		}
	}
	if errdefs.IsFailedPrecondition(err) && o.Kind != ObjectContainer {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("collect %s %s: %w", o.Kind, o.ID, err)
	}
	return true, nil
}

// sameVolume reports whether the volume of this name is still the one that has ended.
func (c *collector) sameVolume(ctx context.Context, o Object) (bool, error) {
	volumes, err := c.engine.objects(ctx, ObjectVolume)
	return slices.ContainsFunc(volumes, func(v runtime.Container) bool {
		return v.ID == o.ID && v.Labels[LabelSessionID] == o.session
	}), err
}
