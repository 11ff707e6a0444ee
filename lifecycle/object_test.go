package lifecycle_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
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
	synctest.Test(t, func(t *testing.T) {
		var j journal
		w := newWorld(t, setup{logger: j.logger()})
		ctx := t.Context()
		c, err := w.fake.Create(ctx, runtime.Spec{Name: "c", Image: runtimetest.DefaultImage, Labels: objectLabels(lifecycle.ObjectContainer, time.Hour)})
		must(t, err)
		must(t, w.fake.EnsureNetwork(ctx, runtime.Network{Name: "n", Labels: objectLabels(lifecycle.ObjectNetwork, time.Hour)}))
		w.stop()
		w = newWorld(t, setup{engine: w.fake, logger: j.logger()})
		time.Sleep(2 * time.Second) // no container can be an orphan before
		if swept, err := w.Sweep(ctx); err != nil || swept != (lifecycle.Swept{}) {
			t.Errorf("swept %+v, %v", swept, err)
		}
		must(t, w.EnsureNetwork(ctx, "shared"))
		w.stop()                                                                          // which takes away networks that nobody uses, unless there may be stopped containers on them
		if networks, err := w.fake.Networks(ctx, nil); err != nil || len(networks) != 3 { // with the policy's own
			t.Errorf("networks: %+v, %v", networks, err)
		}
		if cs := w.fake.Containers(); len(cs) != 1 || cs[0].ID != c.ID {
			t.Errorf("containers: %+v", cs)
		}
		if told := j.entries(t, "sandbox_labels_malformed"); len(told) > 0 {
			t.Errorf("the log tells of them: %v", told)
		}
	})
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

// Objects that have ended go, unless they are in use or another's.
func TestEndedObjects(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := t.Context()
	user, err := w.fake.Create(ctx, runtime.Spec{Name: "user", Image: runtimetest.DefaultImage, Labels: objectLabels(lifecycle.ObjectContainer, time.Hour)})
	must(t, err)
	must(t, w.fake.EnsureNetwork(ctx, runtime.Network{Name: "n", Labels: objectLabels(lifecycle.ObjectNetwork, -time.Second)}))
	somebodys := objectLabels(lifecycle.ObjectContainer, -time.Second, lifecycle.LabelDoor, lifecycle.DoorEngineImage) // made of a caller's image
	must(t, second(w.fake.Create(ctx, runtime.Spec{Name: "somebodys", Image: runtimetest.DefaultImage, Network: "n", Labels: somebodys})))
	w.fake.AddVolume(runtime.Volume{Name: "in use", Labels: objectLabels(lifecycle.ObjectVolume, -time.Second)}, user.ID)
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
	if swept, err := w.Sweep(ctx); err != nil || swept != (lifecycle.Swept{Objects: 2}) {
		t.Errorf("swept %+v, %v", swept, err)
	}
	volumes, err := w.fake.Volumes(ctx, nil)
	if err != nil || len(volumes) != 7 || slices.ContainsFunc(volumes, func(v runtime.Volume) bool { return v.Name == "ended" || v.Name == "deadline" }) {
		t.Errorf("left: %+v, %v", volumes, err)
	}
}

// A volume's name may be another's by the time that it is collected.
func TestCollectObjectExchanged(t *testing.T) {
	var w *world
	var next map[string]string
	lists := 0
	w = newWorld(t, setup{fake: runtimetest.FakeOptions{FailAfter: func(op, _ string) error {
		if op == "volumes" {
			if lists++; lists == 1 {
				w.fake.AddVolume(runtime.Volume{Name: "v", Labels: next}, "")
			}
		}
		return nil
	}}})
	for _, next = range []map[string]string{objectLabels(lifecycle.ObjectVolume, time.Hour, lifecycle.LabelSessionID, "two"), nil} {
		w.fake.AddVolume(runtime.Volume{Name: "v", Labels: objectLabels(lifecycle.ObjectVolume, -time.Second, lifecycle.LabelSessionID, "one")}, "")
		lists = 0
		if swept, err := w.Sweep(t.Context()); err != nil || swept != (lifecycle.Swept{}) || lists != 2 {
			t.Errorf("swept %+v, %v", swept, err)
		}
		if list, err := w.fake.Volumes(t.Context(), nil); err != nil || len(list) != 1 {
			t.Errorf("volumes: %+v, %v", list, err)
		}
	}
}
