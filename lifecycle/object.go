package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// ObjectKind is what an Object is.
type ObjectKind string

// The kinds of objects, in the order in which they can be removed: what comes later may
// be in use by what comes before.
const (
	ObjectContainer ObjectKind = "container"
	ObjectNetwork   ObjectKind = "network"
	ObjectVolume    ObjectKind = "volume"
	ObjectImage     ObjectKind = "image" // carries a seal, and isn't collected
)

// ObjectKinds returns the kinds that are collected, in that order.
func ObjectKinds() []ObjectKind { return []ObjectKind{ObjectContainer, ObjectNetwork, ObjectVolume} }

// Object is something that a caller of the engine's own API made. All that is known of
// it is in its labels.
type Object struct {
	Kind   ObjectKind
	ID     string // the engine's; of a volume its name
	Name   string // empty for a container
	Tenant string
	Ends   time.Time

	session string // tells a volume from the next one of its name; empty if nothing does
}

// isObject tells whether labels are an object's. A sandbox's container has a key, even if
// its image has put the door on it.
func isObject(labels map[string]string) bool {
	return labels[LabelDoor] == DoorEngine && labels[LabelKey] == ""
}

// EndedObjects answers this instance's objects of a kind that have ended at now, whether
// or not they are in use. Those whose labels don't say when they end are left out.
func (m *Manager) EndedObjects(ctx context.Context, kind ObjectKind, now time.Time) ([]Object, error) {
	if err := m.available(); err != nil {
		return nil, err
	}
	var ended []Object
	objects, err := m.objects(ctx, kind)
	if err != nil {
		return nil, fmt.Errorf("list what the engine's own API made: %w", err)
	}
	for _, o := range objects {
		if ends, ok := objectEnd(o.Labels); ok && !ends.After(now) {
			ended = append(ended, Object{Kind: kind, ID: o.ID, Name: o.Name, Tenant: o.Labels[LabelTenant], Ends: ends, session: o.Labels[LabelSessionID]})
		}
	}
	return ended, nil
}

// objects lists this instance's objects of a kind, each as a container.
func (m *Manager) objects(ctx context.Context, kind ObjectKind) (own []runtime.Container, err error) {
	err = m.listClaims(ctx, kind, map[string]string{LabelOwner: m.opts.Owner, LabelDoor: DoorEngine}, func(c runtime.Container) {
		if isObject(c.Labels) && (kind == ObjectContainer || m.opts.Sealer.Valid(kind, c.ID, c.Labels)) {
			own = append(own, c)
		}
	})
	if kind == ObjectContainer {
		own = m.opts.Sealer.Genuine(own, func(string) bool { return false })
	}
	return own, err
}

// listClaims lists the objects that carry the labels, forged ones too. A network or a volume
// has its ID, name and labels only.
func (m *Manager) listClaims(ctx context.Context, kind ObjectKind, selector map[string]string, add func(runtime.Container)) error {
	networks, ok := m.opts.Runtime.(runtime.Networker)
	switch {
	case kind == ObjectContainer:
		return m.call(ctx, "list", func(ctx context.Context) error {
			list, err := m.opts.Runtime.List(ctx, selector)
			for _, c := range list {
				c.Name = ""
				add(c)
			}
			return err
		})
	case kind == ObjectVolume && m.opts.Collector == nil:
		return nil
	case kind == ObjectVolume:
		return m.call(ctx, "volumes", func(ctx context.Context) error {
			list, err := m.opts.Collector.Volumes(ctx, selector)
			for _, v := range list {
				add(runtime.Container{ID: v.Name, Name: v.Name, Labels: v.Labels})
			}
			return err
		})
	case ok:
		return m.call(ctx, "networks", func(ctx context.Context) error {
			list, err := networks.Networks(ctx, selector)
			for _, n := range list {
				add(runtime.Container{ID: n.ID, Name: n.Name, Labels: n.Labels})
			}
			return err
		})
	}
	return nil
}

// hasObjects tells whether there may be containers of the engine's own API.
func (m *Manager) hasObjects(ctx context.Context) bool {
	there, err := m.objects(ctx, ObjectContainer)
	return len(there) > 0 || err != nil
}

// objectEnd is the earlier of the two ends that labels name.
func objectEnd(labels map[string]string) (time.Time, bool) {
	expires, err := time.Parse(time.RFC3339Nano, labels[LabelExpiresAt])
	if err != nil {
		return time.Time{}, false
	}
	deadline, err := time.Parse(time.RFC3339Nano, labels[LabelDeadline])
	return earlier(expires, deadline), err == nil
}

// CollectObject removes an object that EndedObjects answered: a container by force and
// with its anonymous volumes; a network and a volume only if nothing uses it, else the
// answer is false and the next sweep's time will come. It is false as well if the volume
// of this name is another by now.
func (m *Manager) CollectObject(ctx context.Context, o Object) (bool, error) {
	if err := m.available(); err != nil {
		return false, err
	}
	var err error
	switch o.Kind {
	case ObjectContainer:
		err = m.remove(ctx, o.ID)
	case ObjectNetwork:
		err = m.call(ctx, "remove_network", func(ctx context.Context) error { return m.opts.Collector.RemoveNetworkID(ctx, o.ID) })
	case ObjectVolume:
		var there bool
		if there, err = m.sameVolume(ctx, o); err == nil && !there {
			return false, nil
		}
		if err == nil {
			err = m.call(ctx, "remove_volume", func(ctx context.Context) error { return m.opts.Collector.RemoveVolume(ctx, o.ID) })
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

// sameVolume looks whether the volume of this name is still the one that has ended.
func (m *Manager) sameVolume(ctx context.Context, o Object) (bool, error) {
	volumes, err := m.objects(ctx, ObjectVolume)
	return slices.ContainsFunc(volumes, func(v runtime.Container) bool {
		return v.ID == o.ID && v.Labels[LabelSessionID] == o.session
	}), err
}
