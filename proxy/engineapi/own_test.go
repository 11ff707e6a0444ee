package engineapi

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestVolumeExchanged has a volume's name change hands after it was judged, while the
// engine is asked for the container.
func TestVolumeExchanged(t *testing.T) {
	d, direct, l := lyingDoor(t, "")
	attacker, victim := d.client("exchanger"), d.client("exchanged")
	whose := func(name string) string {
		t.Helper()
		v := check.Value(direct.VolumeInspect(t.Context(), name))(t)
		return v.Labels[lifecycle.LabelTenant]
	}
	for _, tt := range []struct {
		name    string
		there   bool // before the create
		taken   bool // by the victim
		refused bool // the create by the engine
	}{
		{name: "exchange-taken", there: true, taken: true},
		{name: "exchange-made-taken", taken: true},
		{name: "exchange-gone", there: true},
		{name: "exchange-undone", taken: true, refused: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.there {
				check.Value(attacker.VolumeCreate(t.Context(), volume.CreateOptions{Name: tt.name}))(t)
			}
			l.set(func(l *liar) {
				l.refuse = func(_, path string) bool {
					if !strings.HasSuffix(path, "/containers/create") {
						return false
					}
					report(t, direct.VolumeRemove(t.Context(), tt.name, false))
					if tt.taken {
						labels := d.labels(lifecycle.ObjectVolume, "exchanged")
						report(t, errOf(direct.VolumeCreate(t.Context(), volume.CreateOptions{Name: tt.name, Labels: labels})))
					}
					return tt.refused
				}
			})
			ct, err := attacker.ContainerCreate(t.Context(), sleeper, &container.HostConfig{Binds: []string{tt.name + ":/v"}}, nil, nil, "")
			l.honest()
			if tt.taken {
				if err == nil {
					t.Errorf("it has the victim's volume")
				}
				if got := whose(tt.name); got != "exchanged" {
					t.Errorf("the volume is %q's", got)
				}
				report(t, errOf(victim.VolumeInspect(t.Context(), tt.name)))
				if slices.ContainsFunc(d.left(), func(s string) bool { return strings.HasPrefix(s, "container ") }) {
					t.Errorf("left: %v", d.left())
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := whose(tt.name); got != "exchanger" {
				t.Errorf("the volume that the engine made is %q's", got)
			}
			report(t, direct.ContainerRemove(t.Context(), ct.ID, container.RemoveOptions{Force: true}))
		})
	}
}

// TestAuditKeepsApart has a caller in mode audit ask for what is another tenant's.
func TestAuditKeepsApart(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {networks: own}}}\n")
	victim := d.client("apart-victim")
	c := newClient(t, d.listen(Caller{Name: "apart-audit", Tenant: "apart", Audit: true}))
	check.Value(victim.VolumeCreate(t.Context(), volume.CreateOptions{Name: "apart-vol"}))(t)
	made := check.Value(victim.NetworkCreate(t.Context(), "apart-net", network.CreateOptions{Internal: true}))(t)
	id := d.made(direct, "apart-victim", "apart-ct", container.Config{})
	before := len(d.left())
	for name, h := range map[string]*container.HostConfig{
		"bind":             {Binds: []string{"apart-vol:/v"}},
		"mount":            {Mounts: []mount.Mount{{Type: mount.TypeVolume, Source: "apart-vol", Target: "/v"}}},
		"network":          {NetworkMode: "apart-net"},
		"network by ID":    {NetworkMode: container.NetworkMode(made.ID)},
		"container's net":  {NetworkMode: "container:apart-ct"},
		"pids":             {PidMode: "container:apart-ct"},
		"pids by ID":       {PidMode: container.PidMode("container:" + id)},
		"ipc":              {IpcMode: "container:apart-ct"},
		"volumes from":     {VolumesFrom: []string{"apart-ct:ro"}},
		"links":            {Links: []string{"apart-ct:x"}},
		"forged":           {Privileged: true, Mounts: []mount.Mount{{Type: mount.TypeVolume, Target: "/v", VolumeOptions: &mount.VolumeOptions{Labels: map[string]string{lifecycle.LabelTenant: "apart-victim"}}}}},
		"with what's more": {Privileged: true, Binds: []string{"apart-vol:/v"}},
	} {
		_, err := c.ContainerCreate(t.Context(), sleeper, h, nil, nil, "")
		if name == "forged" {
			deniedBy(t, err, "labels.reserved")
		} else if !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	config := &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{"apart-net": {}}}
	wantErr(t, errdefs.IsNotFound, errOf(c.ContainerCreate(t.Context(), sleeper, &container.HostConfig{Privileged: true}, config, nil, "")), "endpoint")
	if got := d.left(); len(got) != before {
		t.Errorf("left: %v", got)
	}

	// One's own goes through, by ID.
	own := check.Value(c.ContainerCreate(t.Context(), sleeper, nil, nil, nil, "apart-own"))(t)
	must(t, c.ContainerStart(t.Context(), own.ID, container.StartOptions{}))
	check.Value(c.NetworkCreate(t.Context(), "apart-own-net", network.CreateOptions{Internal: true}))(t)
	config = &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{"apart-own-net": {Aliases: []string{"a"}}}}
	ct := check.Value(c.ContainerCreate(t.Context(), sleeper, &container.HostConfig{
		PidMode: "container:apart-own", NetworkMode: "apart-own-net", UTSMode: "host",
		Mounts: []mount.Mount{{Type: mount.TypeVolume, Target: "/v", VolumeOptions: &mount.VolumeOptions{Labels: map[string]string{"mine": "1"}}}},
	}, config, nil, "apart-made"))(t)
	must(t, c.ContainerStart(t.Context(), ct.ID, container.StartOptions{}))
	got := inspect(t, direct, ct.ID)
	if string(got.HostConfig.PidMode) != "container:"+own.ID || !fullID.MatchString(string(got.HostConfig.NetworkMode)) || len(got.Mounts) != 1 {
		t.Fatalf("%+v", got.HostConfig)
	}
	v, err := direct.VolumeInspect(t.Context(), got.Mounts[0].Name)
	if err != nil || v.Labels["mine"] != "1" || v.Labels[lifecycle.LabelTenant] != "apart" || v.Labels[lifecycle.LabelExpiresAt] == "" {
		t.Errorf("the volume: %+v, %v", v, err)
	}

	// Whom the policy binds doesn't get in there.
	bound := d.client("apart")
	in := func(c *client.Client) error {
		_, err := c.ContainerExecCreate(t.Context(), ct.ID, container.ExecOptions{Cmd: []string{"true"}})
		return err
	}
	for range 2 {
		deniedBy(t, in(bound), "verify.start")
	}
	report(t, in(c))
	deniedBy(t, in(bound), "verify.start")
	_, err = bound.ContainerAttach(t.Context(), ct.ID, container.AttachOptions{Stream: true, Stdout: true})
	if err == nil {
		t.Error("attach: no error")
	}
	_, _, err = bound.CopyFromContainer(t.Context(), ct.ID, "/etc")
	if err == nil {
		t.Error("archive: no error")
	}
	_, err = bound.ContainerCreate(t.Context(), sleeper, &container.HostConfig{NetworkMode: container.NetworkMode("container:" + ct.ID)}, nil, nil, "")
	if err == nil {
		t.Error("network: no error")
	}
	report(t, bound.ContainerRemove(t.Context(), ct.ID, container.RemoveOptions{Force: true, RemoveVolumes: true}))
}

// TestLabelBounds has labels be as large in lists as they are there, and not as they come.
func TestLabelBounds(t *testing.T) {
	s := rehearse(t, "1.41")
	for text, ok := range map[string]bool{strings.Repeat("a", 30<<10): true, strings.Repeat("<", 30<<10): false, strings.Repeat("\x01", 6<<10): false} {
		labels := labelsJSON(map[string]string{"l": text})
		status, told := s.create(t, "", fmt.Sprintf(`{"Image":%q,"Labels":%s}`, testImage, labels))
		if got := len(s.take()) == 1; got != ok {
			t.Errorf("a container with a label of %d %q: %d %s", len(text), text[:1], status, told)
		}
		if status, _ := say(t, s.address, http.MethodPost, "/volumes/create", `{"Labels":`+labels+`}`); (status/100 != 4) != ok {
			t.Errorf("a volume with a label of %d %q: %d", len(text), text[:1], status)
		}
	}
	for text, ok := range map[string]bool{strings.Repeat("a", 100<<10): true, strings.Repeat("\x01", 100<<10): false} {
		status, told := s.create(t, "", fmt.Sprintf(`{"Image":%q,"Cmd":[%s]}`, testImage, jsonText(text)))
		if got := len(s.take()) == 1; got != ok {
			t.Errorf("a command of %d %q: %d %s", len(text), text[:1], status, told)
		}
	}
}

// TestLongLists reads a list of 6 MiB with a part of that in memory.
func TestLongLists(t *testing.T) {
	const entries = 120
	var list []string
	var volumeLabels string
	engine := serveEngine(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Api-Version", "1.41")
		switch {
		case strings.HasSuffix(r.URL.Path, "/containers/json"):
			for i, entry := range list {
				_, _ = io.WriteString(w, "[,"[min(i, 1):][:1]+entry)
			}
			_, _ = io.WriteString(w, "]")
		case strings.HasSuffix(r.URL.Path, "/volumes"):
			_, _ = io.WriteString(w, `{"Warnings":["w"],"X":{"Volumes":[1]},"Volumes":[{"Name":"a","Labels":`+volumeLabels+`},{"Name":"b","Labels":`+volumeLabels+`},{"Name":"c"}],"N":null}`)
		case strings.HasSuffix(r.URL.Path, "/networks"):
			_, _ = io.WriteString(w, `[{"Id":"a"}`)
		}
	})
	d := doorTo(t, engine, "")
	volumeLabels = d.sealed(lifecycle.ObjectVolume, "a")
	for i := range entries {
		labels := d.labels(lifecycle.ObjectContainer, "a", "l", strings.Repeat("x", 50<<10), lifecycle.LabelSessionID, fmt.Sprint(i), lifecycle.LabelEffective, "")
		list = append(list, fmt.Sprintf(`{"Id":"%d","State":"running","Labels":%s,"Mounts":[{"Type":"bind","Source":"/a","RW":true}]}`, i, labelsJSON(labels)))
	}
	c := &call{Proxy: d.Proxy, ctx: t.Context(), version: 41, caller: Caller{Tenant: "a"}}
	var was, is runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&was)
	peak := uint64(0)
	n := 0
	err := c.eachContainer(t.Context(), 41, func(*listed) {
		if n++; n%30 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&is)
			peak = max(peak, is.HeapAlloc)
		}
	})
	if err != nil || n != entries || peak > was.HeapAlloc+(3<<20) {
		t.Errorf("%d entries, %v, %d MiB more than before", n, err, (peak-was.HeapAlloc)>>20)
	}
	if mounts, err := c.Binds(t.Context()); err != nil || len(mounts) != entries {
		t.Errorf("%d binds, %v", len(mounts), err)
	}
	for kind, want := range map[string]int64{"containers": entries, "volumes": 2} {
		if n, err := countObjects(c, kind); err != nil || n != want {
			t.Errorf("%d %s, %v", n, kind, err)
		}
	}
	if n, err := countObjects(c, "networks"); err == nil {
		t.Errorf("a list that is broken off counts %d", n)
	}
}

func TestNextEvent(t *testing.T) {
	long := strings.Repeat("x", maxEvent)
	r := bufio.NewReaderSize(strings.NewReader("{}\n"+long+"\n{\"a\":1}\n"+long+long+"\n{}\npart"), 16<<10)
	for _, want := range []string{"{}\n", "{\"a\":1}\n", "{}\n"} {
		if line, err := nextEvent(r); string(line) != want || err != nil {
			t.Fatalf("%.20q, %v, want %q", line, err, want)
		}
	}
	if _, err := nextEvent(r); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a part: %v", err)
	}
	if _, err := nextEvent(bufio.NewReader(strings.NewReader(""))); !errors.Is(err, io.EOF) {
		t.Errorf("the end: %v", err)
	}
}

// TestEventsOfOthersLast has an event of somebody else's be longer than any may be, and a
// volume's name be another's before.
func TestEventsOfOthersLast(t *testing.T) {
	d, direct := engineDoor(t, "")
	begin := time.Now().Add(-time.Second)
	former, c := d.client("events-former"), d.client("events-now")
	check.Value(former.VolumeCreate(t.Context(), volume.CreateOptions{Name: "events-reused"}))(t)
	must(t, former.VolumeRemove(t.Context(), "events-reused", false))
	big := check.Value(direct.ContainerCreate(t.Context(), &container.Config{Image: testImage, Labels: map[string]string{"l": strings.Repeat("<", maxEvent/4)}}, nil, nil, nil, ""))(t)
	must(t, direct.ContainerRemove(t.Context(), big.ID, container.RemoveOptions{}))
	check.Value(c.VolumeCreate(t.Context(), volume.CreateOptions{Name: "events-reused"}))(t)
	seen, failed := c.Events(t.Context(), events.ListOptions{Since: begin.Format(time.RFC3339Nano), Until: time.Now().Add(time.Second).Format(time.RFC3339Nano)})
	var got []string
	for done := false; !done; {
		select {
		case e := <-seen:
			text, _ := json.Marshal(e.Actor)
			got = append(got, string(e.Type)+" "+string(e.Action)+" "+e.Actor.ID+" "+string(text[:min(len(text), 80)]))
		case err := <-failed:
			if !errors.Is(err, io.EOF) {
				t.Error(err)
			}
			done = true
		}
	}
	if len(got) != 1 || !strings.HasPrefix(got[0], "volume create events-reused ") {
		t.Errorf("events: %q", got)
	}
}

// TestShadowedID has another's container be named as the start of one's own ID.
func TestShadowedID(t *testing.T) {
	d, _ := engineDoor(t, "")
	c, other := d.client("shadowed"), d.client("shadowing")
	ct := check.Value(c.ContainerCreate(t.Context(), sleeper, nil, nil, nil, ""))(t)
	start := ct.ID[:11]
	check.Value(other.ContainerCreate(t.Context(), sleeper, nil, nil, nil, start))(t)
	if got, err := c.ContainerInspect(t.Context(), start); err != nil || got.ID != ct.ID {
		t.Errorf("%s: %v, %v", start, got.ContainerJSONBase, err)
	}
	if got, err := other.ContainerInspect(t.Context(), start); err != nil || got.ID == ct.ID {
		t.Errorf("by name: %v, %v", got.ContainerJSONBase, err)
	}
	for _, ref := range []string{ct.ID[:12], ct.ID} {
		wantErr(t, errdefs.IsNotFound, errOf(other.ContainerInspect(t.Context(), ref)), "another's by %s", ref)
		wantErr(t, errdefs.IsNotFound, other.ContainerPause(t.Context(), ref), "pause another's by %s", ref)
	}
}

// again is the door after a restart: of the same instance, and without what it remembers.
func (d *testDoor) again() *testDoor {
	d.t.Helper()
	opts := d.opts
	opts.Registry = nil
	next := check.Value(New(opts))(d.t)
	d.t.Cleanup(func() { _ = next.Close() })
	return &testDoor{Proxy: next, t: d.t, dir: d.t.TempDir(), audit: d.audit}
}

// Containers that got their labels from an image, as a build step's do, are nobody's: they
// aren't shown, entered, started or pruned, and are in nobody's way.
func TestForgedContainers(t *testing.T) {
	ctx := t.Context()
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {max_objects: 2}}}\n")
	victim := d.client("victim")
	mine := check.Value(victim.ContainerCreate(ctx, sleeper, nil, nil, nil, "forged-mine"))(t)
	must(t, startIt(t, victim, mine.ID))
	original := inspect(t, direct, mine.ID)
	labels := original.Config.Labels
	eventually(t, func() bool { // lists tell seconds only
		created, err := time.Parse(time.RFC3339Nano, original.Created)
		return err == nil && time.Now().Unix() > created.Unix()
	})
	changed := func(name, value string) map[string]string {
		l := maps.Clone(labels)
		if l[name] = value; value == "" {
			delete(l, name)
		}
		return l
	}
	session := maps.Clone(changed(lifecycle.LabelSessionID, "00000000-0000-4000-8000-000000000000"))
	var forged []string
	for _, labels := range map[string]map[string]string{
		"copy": labels, "session": session, "unsealed": changed(lifecycle.LabelSeal, ""), "further": changed("Berm.x", "y"),
		"volume": d.labels(lifecycle.ObjectVolume, "victim"), "caller's image": d.labels(lifecycle.ObjectImage, "victim"), "image": d.labels(lifecycle.ObjectImage, "victim", lifecycle.LabelDoor, lifecycle.DoorEngine),
	} {
		made := check.Value(direct.ContainerCommit(ctx, mine.ID, container.CommitOptions{Reference: fmt.Sprintf("forged.local/%d:1", len(forged)), Config: &container.Config{Labels: labels, Cmd: []string{"sleep", "1000"}}}))(t)
		ct := check.Value(direct.ContainerCreate(ctx, &container.Config{Image: made.ID}, &container.HostConfig{NetworkMode: "none"}, nil, nil, fmt.Sprintf("forged-%d", len(forged))))(t)
		forged = append(forged, ct.ID)
	}
	for name, c := range map[string]*client.Client{"remembered": victim, "after a restart": d.again().client("victim")} {
		t.Run(name, func(t *testing.T) {
			wantForgedRefused(t, c, forged)
			list, err := c.ContainerList(ctx, container.ListOptions{All: true})
			if err != nil || len(list) != 1 || list[0].ID != mine.ID {
				t.Errorf("list: %+v, %v", list, err)
			}
			if info, err := c.Info(ctx); err != nil || info.ContainersRunning != 1 {
				t.Errorf("info: %+v, %v", info, err)
			}
			if df, err := c.DiskUsage(ctx, types.DiskUsageOptions{}); err != nil || len(df.Containers) != 1 {
				t.Errorf("df: %+v, %v", df.Containers, err)
			}
			if pruned, err := c.ContainersPrune(ctx, dockerfilters.Args{}); err != nil || len(pruned.ContainersDeleted) != 0 {
				t.Errorf("prune: %+v, %v", pruned, err)
			}
			if _, err := c.ContainerExecCreate(ctx, mine.ID, container.ExecOptions{Cmd: []string{"true"}}); err != nil {
				t.Errorf("the original: %v", err)
			}
			second, err := c.ContainerCreate(ctx, sleeper, nil, nil, nil, "")
			if err != nil {
				t.Fatalf("the forged ones take the victim's room: %v", err)
			}
			report(t, c.ContainerRemove(ctx, second.ID, container.RemoveOptions{}))
		})
	}
}

func wantForgedRefused(t *testing.T, c *client.Client, forged []string) {
	t.Helper()
	for _, id := range forged {
		for _, ref := range []string{id, id[:12]} {
			_, execErr := c.ContainerExecCreate(t.Context(), ref, container.ExecOptions{Cmd: []string{"true"}})
			_, inspectErr := c.ContainerInspect(t.Context(), ref)
			_, _, copyErr := c.CopyFromContainer(t.Context(), ref, "/etc")
			_, logsErr := c.ContainerLogs(t.Context(), ref, container.LogsOptions{ShowStdout: true})
			for what, err := range map[string]error{
				"exec": execErr, "inspect": inspectErr, "copy": copyErr, "logs": logsErr, "start": startIt(t, c, ref),
				"remove": c.ContainerRemove(t.Context(), ref, container.RemoveOptions{Force: true}),
				"update": func() error {
					_, err := c.ContainerUpdate(t.Context(), ref, container.UpdateConfig{Resources: container.Resources{Memory: 32 << 20, MemorySwap: 32 << 20}})
					return err
				}(),
			} {
				if !errdefs.IsNotFound(err) {
					t.Errorf("%s of %s: %v", what, ref, err)
				}
			}
		}
	}
}

// A network that somebody else gave the name of one of the policy's isn't joined by it,
// whatever labels it copies.
func TestSquattedPolicyNetwork(t *testing.T) {
	var squatted string // its description
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, squatted) }})
	own := d.policyNetworkLabels()
	p := check.Value(policy.Parse([]byte(basePolicy+"networks: {on: {engine_network: squat-on}}\n"), policy.Options{}))(t)
	c := &call{Proxy: d.Proxy, ctx: t.Context(), version: 41, rules: p, caller: Caller{Name: "a", Tenant: "a"}}
	for name, tt := range map[string]struct {
		driver, more string
		labels       map[string]string
		ok           bool
	}{
		"own":        {"bridge", "", own, true},
		"nobody's":   {"bridge", "", nil, false},
		"unsealed":   {"bridge", "", map[string]string{lifecycle.LabelOwner: d.opts.Owner}, false},
		"a caller's": {"bridge", "", d.labels(lifecycle.ObjectNetwork, "a"), false},
		"driver":     {"macvlan", "", own, false},
		"internal":   {"bridge", `"Internal":true,`, own, false},
	} {
		squatted = fmt.Sprintf(`{"Id":%q,"Name":"squat-on","Driver":%q,"Scope":"local",%s"Labels":%s}`, strings.Repeat("c", 64), tt.driver, tt.more, labelsJSON(tt.labels))
		n, err := policyNetwork(c, "squat-on")
		if err != nil || (n != nil) != tt.ok {
			t.Errorf("%s: %+v, %v", name, n, err)
		}
		named, err := resolveNetwork(c, "squat-on", false)
		if err != nil || (named.ID != "") != (tt.ok || name == "a caller's") {
			t.Errorf("%s, by name: %+v, %v", name, named, err)
		}
	}
}
