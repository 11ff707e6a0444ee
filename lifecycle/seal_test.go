package lifecycle_test

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// copied makes a container with labels that are changed, and perhaps with an image's.
func copied(t *testing.T, fake *runtimetest.Fake, image string, labels map[string]string, change ...string) runtime.Container {
	t.Helper()
	labels = maps.Clone(labels)
	for pair := range slices.Chunk(change, 2) {
		if labels[pair[0]] = pair[1]; pair[1] == "" {
			delete(labels, pair[0])
		}
	}
	c, err := fake.Create(context.Background(), runtime.Spec{Name: uuid.NewString(), Image: image, Labels: labels})
	must(t, err)
	return c
}

// Whatever labels a container copies, it isn't entered, listed, taken over or swept, and the
// log tells of it once.
func TestForgedSandbox(t *testing.T) {
	ctx := context.Background()
	const other = "6f9619ff-8b86-d011-b42d-00c04fc964ff"
	for name, change := range map[string][]string{
		"copy":           nil,
		"newer":          {lifecycle.LabelCreatedAt, time.Now().Format(time.RFC3339Nano)}, // which is later than in a test's bubble
		"session":        {lifecycle.LabelSessionID, other},
		"key":            {lifecycle.LabelSessionID, other, lifecycle.LabelKey, "forged"},
		"tenant":         {lifecycle.LabelSessionID, other, lifecycle.LabelTenant, "b"},
		"further label":  {lifecycle.LabelSessionID, other, "BERM.further", "x"},
		"without a seal": {lifecycle.LabelSessionID, other, lifecycle.LabelKey, "forged", lifecycle.LabelSeal, ""},
		"empty seal":     {lifecycle.LabelSessionID, other, lifecycle.LabelSeal, " "},
		"object":         {lifecycle.LabelSessionID, other, lifecycle.LabelKey, "", lifecycle.LabelDoor, lifecycle.DoorEngine, lifecycle.LabelExpiresAt, "1999-01-01T00:00:00Z"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var j journal
				s := setup{logger: j.logger(), store: newStore()}
				w := newWorld(t, s)
				mine := w.create(request("k")).Sandbox
				c, err := w.fake.Inspect(ctx, mine.ContainerID)
				must(t, err)
				forged := copied(t, w.fake, runtimetest.DefaultImage, c.Labels, change...)
				time.Sleep(2 * time.Second) // no container can be an orphan before
				look := func(w *world) {
					t.Helper()
					for _, tenant := range []string{"a", "b"} {
						list, _, err := w.List(ctx, tenant, lifecycle.ListOptions{})
						if err != nil || slices.ContainsFunc(list, func(sb lifecycle.Sandbox) bool { return sb.ContainerID == forged.ID }) {
							t.Errorf("listed: %+v, %v", list, err)
						}
					}
					if sb, err := w.Get(ctx, "a", "k"); err != nil || sb.ContainerID != mine.ContainerID || sb.Status != lifecycle.StatusRunning {
						t.Errorf("the original: %+v, %v", sb, err)
					}
					if swept, err := w.Sweep(ctx); err != nil || swept != (lifecycle.Swept{}) || len(w.fake.Containers()) != 2 {
						t.Errorf("swept %+v, %v", swept, err)
					}
				}
				look(w)
				if told := j.entries(t, "object_not_ours"); len(told) != 1 || told[0]["id"] != forged.ID {
					t.Errorf("told: %v", told)
				}
				w.stop()
				s.engine = w.fake
				look(newWorld(t, s))
			})
		})
	}
}

// Of two containers with one session the older one is taken, and neither if none is older.
func TestSessionTwiceWithoutStore(t *testing.T) {
	for name, apart := range map[string]time.Duration{"older": time.Second, "of one moment": 0} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{})
			mine := w.create(request("k")).Sandbox
			w.stop()
			engine := func(f *runtimetest.Fake) runtime.AgentRuntime { return doubledEngine{f, apart} }
			again := newWorld(t, setup{engine: w.fake, wrap: engine})
			sb, err := again.Get(context.Background(), "a", "k")
			if apart > 0 && (err != nil || sb.ContainerID != mine.ContainerID) || apart == 0 && err == nil {
				t.Errorf("got %+v, %v", sb, err)
			}
		})
	}
}

// doubledEngine lists each container once more, as one that was made later.
type doubledEngine struct {
	*runtimetest.Fake
	apart time.Duration
}

func (e doubledEngine) List(ctx context.Context, labels map[string]string) ([]runtime.Container, error) {
	list, err := e.Fake.List(ctx, labels)
	for _, c := range list {
		c.ID, c.CreatedAt = "copy", c.CreatedAt.Add(e.apart)
		list = append([]runtime.Container{c}, list...)
	}
	return list, err
}

// The engine adds an image's labels to those of a container. They make no difference.
func TestImageWithOwnLabels(t *testing.T) {
	labels := map[string]string{
		lifecycle.LabelDoor: lifecycle.DoorEngine, lifecycle.LabelOwner: "other", "Berm.X": "x", "berm.ttl": "1s", lifecycle.LabelSeal: "x", "color": "red",
	}
	fake := runtimetest.NewFake(runtimetest.FakeOptions{})
	fake.AddImage(runtimetest.DefaultImage, runtime.Image{Labels: labels})
	s := setup{engine: fake, store: newStore()}
	w := newWorld(t, s)
	mine := w.create(request("k")).Sandbox
	if c := fake.Containers()[0]; c.Labels["color"] != "red" || c.Labels[lifecycle.LabelDoor] != "" || c.Labels["Berm.X"] != "" {
		t.Errorf("labels: %v", c.Labels)
	}
	w.stop()
	w = newWorld(t, s)
	if sb, err := w.Get(context.Background(), "a", "k"); err != nil || sb.ContainerID != mine.ContainerID || sb.Status != lifecycle.StatusRunning {
		t.Errorf("after a restart: %+v, %v", sb, err)
	}
}

// memSeals is a store of seals that is open at first.
type memSeals struct {
	seals  []string
	closed int
}

func (m *memSeals) Seals(context.Context) ([]string, bool, error) { return m.seals, m.closed == 0, nil }

func (m *memSeals) CloseSeals(_ context.Context, seals []string) error {
	m.seals = seals
	m.closed++
	return nil
}

// What a version without seals has made is sealed once, unless its labels may be an image's.
func TestEarlierObjectsAreSealedOnce(t *testing.T) {
	ctx := context.Background()
	var j journal
	fake := runtimetest.NewFake(runtimetest.FakeOptions{})
	first := newWorld(t, setup{engine: fake})
	sb := first.create(request("k")).Sandbox
	first.stop()
	c, err := fake.Inspect(ctx, sb.ContainerID)
	must(t, err)
	must(t, fake.Remove(ctx, c.ID))
	fake.AddImage("forged", runtime.Image{Labels: map[string]string{"BERM.owner": "x"}})
	earlier := copied(t, fake, runtimetest.DefaultImage, c.Labels, lifecycle.LabelSeal, "")
	forged := copied(t, fake, "forged", c.Labels, lifecycle.LabelSeal, "", lifecycle.LabelKey, "forged", lifecycle.LabelSessionID, uuid.NewString())
	wrong := copied(t, fake, runtimetest.DefaultImage, c.Labels, lifecycle.LabelSeal, strings.Repeat("0", 64), lifecycle.LabelSessionID, uuid.NewString())
	ended := objectLabels(lifecycle.ObjectVolume, -time.Second)
	delete(ended, lifecycle.LabelSeal)
	fake.AddVolume(runtime.Volume{Name: "v", Labels: ended}, "")
	seals := &memSeals{}
	s := setup{engine: fake, seals: seals, logger: j.logger()}
	for i := range 2 {
		w := newWorld(t, s)
		list, _, err := w.List(ctx, "a", lifecycle.ListOptions{})
		if err != nil || len(list) != 1 || list[0].ContainerID != earlier.ID {
			t.Fatalf("listed: %+v, %v", list, err)
		}
		if swept := w.sweep(); swept.Objects != 1-i {
			t.Errorf("swept: %+v", swept)
		}
		w.stop()
		copied(t, fake, runtimetest.DefaultImage, earlier.Labels, lifecycle.LabelKey, "late", lifecycle.LabelSessionID, uuid.NewString())
	}
	if seals.closed != 1 {
		t.Errorf("sealed %d times", seals.closed)
	}
	told := j.entries(t, "object_not_ours")
	for _, id := range []string{forged.ID, wrong.ID} {
		if !slices.ContainsFunc(told, func(e map[string]any) bool { return e["id"] == id }) {
			t.Errorf("the log doesn't tell of %s: %v", id, told)
		}
	}
}

// A network with the policy's name is joined only if Berm made it, or the policy says that an
// operator did.
func TestSquattedNetwork(t *testing.T) {
	ctx := context.Background()
	const external = "version: 1\nnetworks: {on: {external: true}}\n"
	own := newSealer("owner", nil, nil)
	for name, tt := range map[string]struct {
		labels map[string]string
		policy string
		ok     bool
	}{
		"nobody's":             {nil, "", false},
		"forged":               {map[string]string{lifecycle.LabelOwner: "owner"}, "", false},
		"another instance's":   {newSealer("other", nil, nil).Seal(lifecycle.ObjectNetwork, map[string]string{lifecycle.LabelOwner: "other"}), "", false},
		"a volume's seal":      {own.Seal(lifecycle.ObjectVolume, map[string]string{lifecycle.LabelOwner: "owner"}), "", false},
		"a caller's":           {objectLabels(lifecycle.ObjectNetwork, time.Hour), "", false},
		"a caller's, external": {objectLabels(lifecycle.ObjectNetwork, time.Hour), external, false},
		"external":             {nil, external, true},
		"own":                  {own.Seal(lifecycle.ObjectNetwork, map[string]string{lifecycle.LabelOwner: "owner"}), "", true},
	} {
		t.Run(name, func(t *testing.T) {
			fake := runtimetest.NewFake(runtimetest.FakeOptions{})
			must(t, fake.EnsureNetwork(ctx, runtime.Network{Name: "berm-sandbox", Labels: tt.labels, Isolated: true}))
			w := newWorld(t, setup{engine: fake, policy: tt.policy})
			req := request("k")
			req.Request.Network = ptr("on")
			_, err := w.Create(ctx, req)
			if ok := err == nil; ok != tt.ok || !ok && !strings.Contains(err.Error(), "remove or rename it") {
				t.Errorf("create: %v", err)
			}
			w.sweep()
			if list, err := fake.Networks(ctx, nil); err != nil || len(list) != 1 {
				t.Errorf("networks: %+v, %v", list, err)
			}
		})
	}
}

// FuzzSeal shows that no two sets of labels have one seal, and that only Berm's labels count.
func FuzzSeal(f *testing.F) {
	f.Add("berm.a", "b", "berm.c", "d", "berm.a", "bberm.cd")
	f.Add("berm.a", "", "berm.b", "", "berm.a", "berm.b")
	f.Add("berm.a", "1", "BERM.A", "2", "Berm.a", "1")
	f.Add("a", "1", "b", "2", "berm", "3")
	s := newSealer("owner", nil, nil)
	f.Fuzz(func(t *testing.T, n1, v1, n2, v2, n3, v3 string) {
		base := map[string]string{lifecycle.LabelOwner: "owner"}
		with := func(pairs ...string) map[string]string {
			labels := maps.Clone(base)
			for pair := range slices.Chunk(pairs, 2) {
				labels[pair[0]] = pair[1]
			}
			delete(labels, lifecycle.LabelSeal)
			return labels
		}
		counted := func(labels map[string]string) map[string]string {
			maps.DeleteFunc(labels, func(name, _ string) bool {
				return !strings.HasPrefix(strings.ToLower(name), "berm.") || name == lifecycle.LabelSeal
			})
			return labels
		}
		one, two := s.Seal(lifecycle.ObjectContainer, with(n1, v1, n2, v2)), s.Seal(lifecycle.ObjectContainer, with(n3, v3))
		same := one[lifecycle.LabelSeal] == two[lifecycle.LabelSeal]
		if s.Seal(lifecycle.ObjectNetwork, maps.Clone(one))[lifecycle.LabelSeal] == one[lifecycle.LabelSeal] {
			t.Error("a network has a container's seal")
		}
		if valid := s.Valid(lifecycle.ObjectContainer, "x", one); valid != (one[lifecycle.LabelOwner] == "owner") {
			t.Errorf("valid: %t: %q", valid, one)
		}
		if same != maps.Equal(counted(one), counted(two)) {
			t.Errorf("%q and %q: the same seal: %t", one, two, same)
		}
	})
}
