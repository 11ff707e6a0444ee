package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// sweepObjects removes objects of one kind that callers made through the engine proxy and that
// have ended at now. It leaves objects whose labels don't say when they end. It fails only if it
// can't list the objects.
func (c *collector) sweepObjects(ctx context.Context, kind ObjectKind, now time.Time) (*batch, error) {
	b := &batch{report: func(ctx context.Context, err error, attrs []any) { c.reportObject(ctx, kind, err, attrs) }}
	if err := c.registry.available(); err != nil {
		return b, err
	}
	objects, err := c.engine.objects(ctx, kind)
	if err != nil {
		return b, fmt.Errorf("list what the engine's own API made: %w", err)
	}
	for _, o := range objects {
		ends, ok := objectEnd(o.Labels)
		if !ok || ends.After(now) {
			continue
		}
		attrs := []any{"kind", string(kind), "id", o.ID, "tenant", o.Labels[LabelTenant], "expires_at", ends}
		b.do(ctx, attrs, func(ctx context.Context) (bool, error) { return c.collectObject(ctx, kind, o) })
	}
	b.wg.Wait()
	return b, nil
}

// reportObject logs and counts the removal of an object.
func (c *collector) reportObject(ctx context.Context, kind ObjectKind, err error, attrs []any) {
	if err != nil {
		c.engine.metrics.objects.WithLabelValues(string(kind), string(ResultError)).Inc()
		c.engine.log.WarnContext(ctx, "object_clean_failed", append(attrs, "error", err)...)
		return
	}
	c.engine.metrics.objects.WithLabelValues(string(kind), string(ResultDeleted)).Inc()
	c.engine.log.InfoContext(ctx, "object_cleaned", attrs...)
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

// collectObject removes an object: a container by force and with its anonymous volumes, a network
// or a volume only if nothing uses it. It returns false if it is in use, or if another volume has
// the name by now.
func (c *collector) collectObject(ctx context.Context, kind ObjectKind, o runtime.Container) (bool, error) {
	var err error
	switch kind {
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
	if errdefs.IsFailedPrecondition(err) && kind != ObjectContainer {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("collect %s %s: %w", kind, o.ID, err)
	}
	return true, nil
}

// sameVolume reports whether the volume of this name is still the one that was listed.
func (c *collector) sameVolume(ctx context.Context, o runtime.Container) (bool, error) {
	volumes, err := c.engine.objects(ctx, ObjectVolume)
	return slices.ContainsFunc(volumes, func(v runtime.Container) bool {
		return v.ID == o.ID && v.Labels[LabelSessionID] == o.Labels[LabelSessionID]
	}), err
}
