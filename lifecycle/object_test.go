package lifecycle_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// objectLabels are those of an object of this instance's that ends after ttl, with further ones
// as pairs of a name and a value, and with the seal.
func objectLabels(kind lifecycle.ObjectKind, ttl time.Duration, more ...string) map[string]string {
	now := time.Now().UTC()
	labels := map[string]string{
		lifecycle.LabelOwner: "owner", lifecycle.LabelDoor: lifecycle.DoorEngine, lifecycle.LabelTenant: "a", lifecycle.LabelSessionID: uuid.NewString(),
		lifecycle.LabelExpiresAt: now.Add(ttl).Format(time.RFC3339Nano), lifecycle.LabelDeadline: now.Add(time.Hour).Format(time.RFC3339Nano),
	}
	for pair := range slices.Chunk(more, 2) {
		labels[pair[0]] = pair[1]
	}
	return newSealer("owner", nil, nil).Seal(kind, labels)
}

// Objects are none of the first door's business before their end, whoever looks.
func TestObjectsAreLeftAlone(t *testing.T) {
	fake := runtimetest.NewFake(runtimetest.FakeOptions{})
	ctx := context.Background()
	c, err := fake.Create(ctx, runtime.Spec{Name: "c", Image: runtimetest.DefaultImage, Labels: objectLabels(lifecycle.ObjectContainer, time.Hour)})
	must(t, err)
	must(t, fake.EnsureNetwork(ctx, runtime.Network{Name: "n", Labels: objectLabels(lifecycle.ObjectNetwork, time.Hour)}))
	var log strings.Builder
	w := newWorld(t, setup{engine: fake, logger: slog.New(slog.NewTextHandler(&log, nil))})
	if orphans, err := w.Orphans(ctx, time.Now().Add(time.Hour)); err != nil || len(orphans) != 0 {
		t.Errorf("orphans: %+v, %v", orphans, err)
	}
	if _, err := w.CollectNetworks(ctx); err != nil {
		t.Error(err)
	}
	must(t, w.EnsureNetwork(ctx, "shared"))
	w.stop()                                                                        // which takes away networks that nobody uses, unless there may be stopped containers on them
	if networks, err := fake.Networks(ctx, nil); err != nil || len(networks) != 3 { // with the policy's own
		t.Errorf("networks: %+v, %v", networks, err)
	}
	if cs := fake.Containers(); len(cs) != 1 || cs[0].ID != c.ID {
		t.Errorf("containers: %+v", cs)
	}
	if strings.Contains(log.String(), "malformed") {
		t.Errorf("the log tells of them:\n%s", &log)
	}
}

// TestRemovedNetwork removes a network of the policy past Berm, as docker network prune does.
func TestRemovedNetwork(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := context.Background()
	must(t, w.EnsureNetwork(ctx, "shared"))
	must(t, w.fake.RemoveNetwork(ctx, "shared"))
	must(t, w.EnsureNetwork(ctx, "shared"))
	networks, err := w.fake.Networks(ctx, nil)
	if err != nil || !slices.ContainsFunc(networks, func(n runtime.Network) bool { return n.Name == "shared" }) {
		t.Errorf("networks: %+v, %v", networks, err)
	}
}

func TestEndedObjects(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := context.Background()
	for name, labels := range map[string]map[string]string{
		"ended":    objectLabels(lifecycle.ObjectVolume, -time.Second),
		"live":     objectLabels(lifecycle.ObjectVolume, time.Hour),
		"deadline": objectLabels(lifecycle.ObjectVolume, time.Hour, lifecycle.LabelDeadline, time.Now().Add(-time.Second).Format(time.RFC3339)),
		"foreign":  objectLabels(lifecycle.ObjectVolume, -time.Second, lifecycle.LabelOwner, "other"),
		"sandbox":  objectLabels(lifecycle.ObjectVolume, -time.Second, lifecycle.LabelKey, "k"), // its image has the door on it
		"no door":  objectLabels(lifecycle.ObjectVolume, -time.Second, lifecycle.LabelDoor, ""),
		"garbled":  objectLabels(lifecycle.ObjectVolume, -time.Second, lifecycle.LabelExpiresAt, "soon"),
		"no end":   objectLabels(lifecycle.ObjectVolume, -time.Second, lifecycle.LabelDeadline, ""),
	} {
		w.fake.AddVolume(runtime.Volume{Name: name, Labels: labels}, "")
	}
	ended, err := w.EndedObjects(ctx, lifecycle.ObjectVolume, time.Now())
	if err != nil || len(ended) != 2 {
		t.Fatalf("%+v, %v", ended, err)
	}
	for _, o := range ended {
		if o.ID != "ended" && o.ID != "deadline" || o.Tenant != "a" || o.Kind != lifecycle.ObjectVolume {
			t.Errorf("%+v", o)
		}
	}
	w.fake.SetDown(true)
	if _, err := w.EndedObjects(ctx, lifecycle.ObjectVolume, time.Now()); err == nil {
		t.Error("an engine that is away told of objects")
	}
	w.fake.SetDown(false)
}

// What is in use goes only with what uses it.
func TestCollectObject(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := context.Background()
	must(t, w.fake.EnsureNetwork(ctx, runtime.Network{Name: "n", Labels: objectLabels(lifecycle.ObjectNetwork, -time.Second)}))
	c, err := w.fake.Create(ctx, runtime.Spec{Name: "c", Image: runtimetest.DefaultImage, Network: "n", Labels: objectLabels(lifecycle.ObjectContainer, -time.Second)})
	must(t, err)
	w.fake.AddVolume(runtime.Volume{Name: "v", Labels: objectLabels(lifecycle.ObjectVolume, -time.Second)}, c.ID)
	somebodys := objectLabels(lifecycle.ObjectContainer, -time.Second, lifecycle.LabelDoor, lifecycle.DoorEngineImage) // made of a caller's image
	must(t, second(w.fake.Create(ctx, runtime.Spec{Name: "somebodys", Image: runtimetest.DefaultImage, Labels: somebodys})))
	collect := func(kind lifecycle.ObjectKind) bool {
		t.Helper()
		ended, err := w.EndedObjects(ctx, kind, time.Now())
		if err != nil || len(ended) != 1 {
			t.Fatalf("%s: %+v, %v", kind, ended, err)
		}
		removed, err := w.CollectObject(ctx, ended[0])
		if err != nil {
			t.Error(err)
		}
		return removed
	}
	if collect(lifecycle.ObjectNetwork) || collect(lifecycle.ObjectVolume) {
		t.Error("what is in use was removed")
	}
	for _, kind := range lifecycle.ObjectKinds() {
		if !collect(kind) {
			t.Errorf("the %s is left", kind)
		}
	}
}

// A volume's name may be another's by the time that it is collected.
func TestCollectObjectExchanged(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := context.Background()
	w.fake.AddVolume(runtime.Volume{Name: "v", Labels: objectLabels(lifecycle.ObjectVolume, -time.Second, lifecycle.LabelSessionID, "one")}, "")
	ended, err := w.EndedObjects(ctx, lifecycle.ObjectVolume, time.Now())
	if err != nil || len(ended) != 1 {
		t.Fatalf("%+v, %v", ended, err)
	}
	next := objectLabels(lifecycle.ObjectVolume, time.Hour, lifecycle.LabelSessionID, "two")
	for _, labels := range []map[string]string{next, nil} {
		w.fake.AddVolume(runtime.Volume{Name: "v", Labels: labels}, "")
		if removed, err := w.CollectObject(ctx, ended[0]); removed || err != nil {
			t.Errorf("collected: %t, %v", removed, err)
		}
		if list, err := w.fake.Volumes(ctx, nil); err != nil || len(list) != 1 {
			t.Errorf("volumes: %+v, %v", list, err)
		}
	}
}
