package lifecycle_test

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

const legacyKey = "6f9619ff-8b86-d011-b42d-00c04fc964ff"

// legacyContainer makes a container as the old service did, but for what is changed.
func legacyContainer(t *testing.T, fake *runtimetest.Fake, volume string, change func(labels map[string]string)) runtime.Container {
	t.Helper()
	labels := map[string]string{
		lifecycle.LegacySessionID: "0f9619ff-8b86-d011-b42d-00c04fc964ff", lifecycle.LegacyChatID: legacyKey,
		lifecycle.LegacyExpiresAt: time.Now().UTC().Add(time.Hour).Format(time.RFC3339),
		lifecycle.LegacyAgentID:   "agent", lifecycle.LegacyVolume: volume, lifecycle.LegacyPort: "8080",
	}
	change(labels)
	c, err := fake.Create(context.Background(), runtime.Spec{Name: "old", Image: runtimetest.DefaultImage, Labels: labels})
	must(t, err)
	return c
}

func TestNotAdopted(t *testing.T) {
	type change = func(map[string]string)
	without := func(name string) change { return func(l map[string]string) { delete(l, name) } }
	with := func(name, value string) change { return func(l map[string]string) { l[name] = value } }
	malformed := map[string]change{
		"session":           with(lifecycle.LegacySessionID, "1"),
		"blank session":     with(lifecycle.LegacySessionID, ""),
		"key":               with(lifecycle.LegacyChatID, "../../etc"),
		"time":              with(lifecycle.LegacyExpiresAt, "tomorrow"),
		"time without zone": with(lifecycle.LegacyExpiresAt, "2030-01-02T03:04:05"),
		"blank agent":       with(lifecycle.LegacyAgentID, ""),
		"port":              with(lifecycle.LegacyPort, "http"),
		"port 0":            with(lifecycle.LegacyPort, "0"),
		"port too high":     with(lifecycle.LegacyPort, "65536"),
	}
	unmarked := map[string]change{
		"another instance's": with(lifecycle.LabelOwner, "somebody"),
	}
	for _, name := range []string{
		lifecycle.LegacySessionID, lifecycle.LegacyChatID, lifecycle.LegacyExpiresAt,
		lifecycle.LegacyAgentID, lifecycle.LegacyVolume, lifecycle.LegacyPort,
	} {
		unmarked["without "+name] = without(name)
	}
	all := maps.Clone(malformed)
	maps.Copy(all, unmarked)
	for name, change := range all {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			var j journal
			fake := runtimetest.NewFake(runtimetest.FakeOptions{})
			c := legacyContainer(t, fake, "/data", change)
			w := newWorld(t, setup{engine: fake, logger: j.logger(), settings: lifecycle.Settings{AdoptLegacy: true}})
			if list, _, err := w.List(ctx, lifecycle.DefaultTenant, lifecycle.ListOptions{}); err != nil || len(list) != 0 {
				t.Errorf("adopted: %+v, %v", list, err)
			}
			w.sweep()
			if !slices.ContainsFunc(fake.Containers(), func(left runtime.Container) bool {
				return left.ID == c.ID && left.State == runtime.StateRunning
			}) {
				t.Error("it wasn't left alone")
			}
			want := 0
			if _, bad := malformed[name]; bad {
				want = 1
			}
			reports := j.entries(t, "sandbox_labels_malformed")
			if len(reports) != want || want == 1 && (reports[0]["container_id"] != c.ID || reports[0]["error"] == "") {
				t.Errorf("reported: %v", reports)
			}
		})
	}
}

// What was adopted and has died is made again by the create that the old service
// would have got, and then it is one of ours.
func TestAdoptedIsMadeAgain(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(map[bool]string{false: "seen", true: "found dead"}[restart], func(t *testing.T) {
			volume := t.TempDir()
			fake := runtimetest.NewFake(runtimetest.FakeOptions{})
			old := legacyContainer(t, fake, volume, func(map[string]string) {})
			s := setup{
				engine: fake, store: newStore(), policy: "version: 1\nmounts: {allowed_roots: [" + volume + "]}\n",
				settings: lifecycle.Settings{AdoptLegacy: true, AgentPort: 9090},
			}
			w := newWorld(t, s)
			req := lifecycle.CreateRequest{Tenant: lifecycle.DefaultTenant, Key: legacyKey, AgentID: "agent", VolumePath: volume}
			if res := w.create(req); res.Result != lifecycle.ResultReused || res.Sandbox.ContainerID != old.ID {
				t.Fatalf("adopted: %+v", res)
			}
			if restart {
				w.stop()
			}
			fake.Die(old.ID)
			if restart {
				w = newWorld(t, s)
			}
			w.eventually("its end is seen", func() bool {
				sb, err := w.Get(context.Background(), lifecycle.DefaultTenant, legacyKey)
				return err == nil && sb.Status == lifecycle.StatusStopped
			})
			res := w.create(req)
			sb := res.Sandbox
			if res.Result != lifecycle.ResultReplaced || !res.Recreated || sb.Status != lifecycle.StatusRunning ||
				sb.SessionID == old.Labels[lifecycle.LegacySessionID] || sb.VolumePath != volume || sb.Endpoint.Port != 9090 {
				t.Errorf("made again: %+v", res)
			}
			cs := fake.Containers()
			if len(cs) != 1 || cs[0].ID != sb.ContainerID || cs[0].Labels[lifecycle.LabelOwner] != "owner" || !slices.Contains(cs[0].Env, "AGENT_ID=agent") {
				t.Errorf("containers: %+v", cs)
			}
			if !w.store.has(sb.SessionID) {
				t.Error("the store doesn't know it")
			}
			w.stop()
			w = newWorld(t, s)
			if res := w.create(req); res.Result != lifecycle.ResultReused || res.Sandbox.SessionID != sb.SessionID {
				t.Errorf("after a restart: %+v", res)
			}
		})
	}
}

// How far the old service's sandboxes were renewed isn't known to the first start that finds
// the engine, nor to the first with a restored store: one more TTL. Others go by the label.
func TestAdoptedHasGraceOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		fake := runtimetest.NewFake(runtimetest.FakeOptions{})
		expired := func(l map[string]string) {
			l[lifecycle.LegacyExpiresAt] = time.Now().UTC().Add(-time.Minute).Format(time.RFC3339)
		}
		legacyContainer(t, fake, "/data", expired)
		s := setup{engine: fake, store: newStore(), settings: lifecycle.Settings{AdoptLegacy: true}}
		s.store.fresh = true
		fake.SetDown(true)
		s.wait = true
		w := newWorld(t, s)
		synctest.Wait()
		w.stop()
		fake.SetDown(false)
		s.wait = false

		start := func(which string, cleaned int) {
			t.Helper()
			w = newWorld(t, s)
			if swept := w.sweep(); swept.Cleaned != cleaned || len(fake.Containers()) != 1-cleaned {
				t.Fatalf("%s: %+v", which, swept)
			}
		}
		start("the first that finds the engine", 0)
		backup := s.store.backup()
		must(t, second(w.Renew(ctx, lifecycle.DefaultTenant, legacyKey, 0)))
		w.stop()
		s.store = backup
		start("the first with a restored store", 0)
		w.stop()
		start("a later one", 1)
	})
}
