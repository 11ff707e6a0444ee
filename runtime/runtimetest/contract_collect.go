package runtimetest

import (
	"context"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func collectorCases() []contractCase {
	return []contractCase{
		{"collect/volumes", testVolumes},
		{"collect/networks", testNetworkByID},
	}
}

func (b *fixture) cleanVolumes(ctx context.Context, t *testing.T) {
	c := b.Collector
	if c == nil {
		return
	}
	volumes, err := c.Volumes(ctx, b.labels)
	if err != nil {
		t.Errorf("clean up: %v", err)
	}
	for _, v := range volumes {
		if err := c.RemoveVolume(ctx, v.Name); err != nil {
			t.Errorf("clean up: %v", err)
		}
	}
}

func testVolumes(t *testing.T, b *fixture) {
	c := b.Collector
	for name, used := range map[string]bool{b.name + "-0": false, b.name + "-1": true} {
		b.MakeVolume(t, name, map[string]string{labelCase: b.name, "name": name}, used)
	}
	both, err := c.Volumes(b.ctx, map[string]string{labelCase: b.name, "name": ""})
	if err != nil || len(both) != 2 {
		t.Fatalf("both: %+v, %v", both, err)
	}
	one, err := c.Volumes(b.ctx, map[string]string{labelCase: b.name, "name": b.name + "-1"})
	if err != nil || len(one) != 1 {
		t.Fatalf("one: %+v, %v", one, err)
	}
	got := one[0]
	if got.Name != b.name+"-1" || got.Labels["name"] != got.Name || time.Since(got.CreatedAt).Abs() > time.Minute {
		t.Errorf("%+v", got)
	}
	class(t, "remove one in use", c.RemoveVolume(b.ctx, got.Name), errdefs.IsFailedPrecondition, "FailedPrecondition")
	for _, ct := range b.list(t) {
		must(t, b.rt.Remove(b.ctx, ct.ID))
	}
	for range 2 {
		must(t, c.RemoveVolume(b.ctx, got.Name))
	}
	if left, err := c.Volumes(b.ctx, b.labels); err != nil || len(left) != 1 || left[0].Name != b.name+"-0" {
		t.Errorf("left %+v, %v", left, err)
	}
}

// testNetworkByID checks that an ID selects the network, not a name that looks like one.
func testNetworkByID(t *testing.T, b *fixture) {
	c := b.Collector
	must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Labels: b.labels}))
	made, err := b.rt.Networks(b.ctx, b.labels)
	if err != nil || len(made) != 1 {
		t.Fatalf("%+v, %v", made, err)
	}
	if err := c.RemoveNetworkID(b.ctx, noID); err != nil {
		t.Errorf("remove one that never was: %v", err)
	}
	spec := b.spec()
	spec.Network = b.name
	user := b.create(t, spec)
	class(t, "remove one in use", c.RemoveNetworkID(b.ctx, made[0].ID), errdefs.IsFailedPrecondition, "FailedPrecondition")
	must(t, b.rt.Remove(b.ctx, user.ID))
	for range 2 {
		must(t, c.RemoveNetworkID(b.ctx, made[0].ID))
	}
	if left, err := b.rt.Networks(b.ctx, b.labels); err != nil || len(left) != 0 {
		t.Errorf("left %+v, %v", left, err)
	}
}
