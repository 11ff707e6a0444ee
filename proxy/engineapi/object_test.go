package engineapi

import (
	"bytes"
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
)

func TestNetworks(t *testing.T) {
	d, direct := engineDoor(t, "")
	mine, other, ctx := d.client("mine"), d.client("other"), t.Context()
	made := must(mine.NetworkCreate(ctx, "networks-mine", network.CreateOptions{Labels: map[string]string{"a": "b", "berm.ttl": "90m"}}))(t)
	defer func() { _ = direct.NetworkRemove(context.Background(), made.ID) }()
	n := must(direct.NetworkInspect(ctx, made.ID, network.InspectOptions{}))(t)
	if !n.Internal || n.Driver != "bridge" || n.Labels["a"] != "b" || n.Labels[lifecycle.LabelTenant] != "mine" || n.Labels[lifecycle.LabelOwner] != d.opts.Owner {
		t.Errorf("made: %+v", n)
	}
	expires, err := time.Parse(time.RFC3339Nano, n.Labels[lifecycle.LabelExpiresAt])
	if left := time.Until(expires); err != nil || left < 80*time.Minute || left > 90*time.Minute {
		t.Errorf("expires in %v, %v", left, err)
	}
	for _, ref := range []string{made.ID, made.ID[:12], "networks-mine"} {
		if _, err := mine.NetworkInspect(ctx, ref, network.InspectOptions{}); err != nil {
			t.Errorf("inspect %s: %v", ref, err)
		}
		_, inspect := other.NetworkInspect(ctx, ref, network.InspectOptions{})
		for what, err := range map[string]error{
			"inspect":    inspect,
			"remove":     other.NetworkRemove(ctx, ref),
			"connect":    other.NetworkConnect(ctx, ref, "nobody", nil),
			"disconnect": other.NetworkDisconnect(ctx, ref, "nobody", true),
		} {
			if !errdefs.IsNotFound(err) {
				t.Errorf("%s %s by another: %v", what, ref, err)
			}
		}
	}
	list, err := other.NetworkList(ctx, network.ListOptions{})
	if err != nil || len(list) != len(builtinNetworks) {
		t.Errorf("another sees %d networks, %v", len(list), err)
	}
	if _, err := other.NetworksPrune(ctx, dockerfilters.NewArgs()); err != nil {
		t.Error(err)
	}
	if _, err := other.NetworkCreate(ctx, "networks-mine", network.CreateOptions{}); !errdefs.IsConflict(err) {
		t.Errorf("a name that is taken: %v", err)
	}
	id := d.made(direct, "mine", "networks-container", container.Config{})
	noError(t, direct.NetworkDisconnect(ctx, "none", id, true))
	noError(t, mine.NetworkConnect(ctx, "networks-mine", "networks-container", &network.EndpointSettings{Aliases: []string{"db"}}))
	ct, err := direct.ContainerInspect(ctx, id)
	if err != nil || ct.NetworkSettings.Networks["networks-mine"] == nil {
		t.Errorf("connected: %v, %v", ct.NetworkSettings, err)
	}
	for _, elsewhere := range []string{"bridge", "host", "nowhere"} {
		if err := mine.NetworkConnect(ctx, elsewhere, id, nil); !errdefs.IsNotFound(err) {
			t.Errorf("connect to %s: %v", elsewhere, err)
		}
	}
	report(t, mine.NetworkDisconnect(ctx, "networks-mine", id, false))
	report(t, mine.NetworkRemove(ctx, "networks-mine"))
}

func TestNetworksThatAreRefused(t *testing.T) {
	d := standInDoor(t, &standIn{handler: func(_ http.ResponseWriter, r *http.Request) { t.Errorf("the engine was asked: %s", r.URL) }})
	address := d.listen(Caller{Name: "a", Tenant: "a"})
	for name, body := range map[string]string{
		"driver":        `{"Name":"refused","Driver":"macvlan","Options":{"parent":"eth0"}}`,
		"host binding":  `{"Name":"refused","Options":{"com.docker.network.bridge.host_binding_ipv4":"0.0.0.0"}}`,
		"bridge name":   `{"Name":"refused","Options":{"com.docker.network.bridge.name":"docker0"}}`,
		"subnet":        `{"Name":"refused","IPAM":{"Config":[{"Subnet":"10.0.0.0/8"}]}}`,
		"ipam driver":   `{"Name":"refused","IPAM":{"Driver":"null"}}`,
		"config from":   `{"Name":"refused","ConfigFrom":{"Network":"other"}}`,
		"config only":   `{"Name":"refused","ConfigOnly":true}`,
		"ingress":       `{"Name":"refused","Ingress":true}`,
		"scope":         `{"Name":"refused","Scope":"swarm"}`,
		"ipv6":          `{"Name":"refused","EnableIPv6":true}`,
		"label":         `{"Name":"refused","Labels":{"berm.tenant":"b"}}`,
		"label's case":  `{"Name":"refused","Labels":{"Berm.tenant":"b"}}`,
		"unknown field": `{"Name":"refused","Peers":[]}`,
		"case":          `{"name":"refused"}`,
		"twice":         `{"Name":"refused","Name":"bridge"}`,
		"after it":      `{"Name":"refused"}{}`,
		"host":          `{"Name":"host"}`,
		"swarm's":       `{"Name":"ingress"}`,
		"gateway":       `{"Name":"docker_gwbridge"}`,
	} {
		status, answer := say(t, address, http.MethodPost, "/networks/create", body)
		if status != http.StatusForbidden && status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", name, status, answer)
		}
	}
}

func TestVolumes(t *testing.T) {
	d, direct := engineDoor(t, "")
	mine, other, ctx := d.client("mine"), d.client("other"), t.Context()
	made := must(mine.VolumeCreate(ctx, volume.CreateOptions{Name: "volumes-mine"}))(t)
	defer func() { _ = direct.VolumeRemove(context.Background(), "volumes-mine", true) }()
	again, err := mine.VolumeCreate(ctx, volume.CreateOptions{Name: "volumes-mine"})
	if err != nil || again.CreatedAt != made.CreatedAt {
		t.Errorf("made twice: %+v, %v", again, err)
	}
	if _, err := other.VolumeCreate(ctx, volume.CreateOptions{Name: "volumes-mine"}); !errdefs.IsConflict(err) {
		t.Errorf("another's name: %v", err)
	}
	_, inspect := other.VolumeInspect(ctx, "volumes-mine")
	for what, err := range map[string]error{"inspect": inspect, "remove": other.VolumeRemove(ctx, "volumes-mine", true)} {
		if what == "remove" && err == nil { // with force the client makes nothing of a 404
			if _, err := direct.VolumeInspect(ctx, "volumes-mine"); err != nil {
				t.Error("another removed it")
			}
			continue
		}
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s by another: %v", what, err)
		}
	}
	if list, err := other.VolumeList(ctx, volume.ListOptions{}); err != nil || len(list.Volumes) != 0 {
		t.Errorf("another sees %v, %v", list.Volumes, err)
	}
	if _, err := other.VolumesPrune(ctx, dockerfilters.NewArgs()); err != nil {
		t.Error(err)
	}
	if _, err := direct.VolumeInspect(ctx, "volumes-mine"); err != nil {
		t.Errorf("another's prune took it: %v", err)
	}
	anonymous, err := mine.VolumeCreate(ctx, volume.CreateOptions{})
	if v, err := direct.VolumeInspect(ctx, anonymous.Name); err != nil || v.Labels[lifecycle.LabelTenant] != "mine" {
		t.Errorf("anonymous: %+v, %v", v, err)
	}
	if err != nil || anonymous.Name == "" || len(anonymous.Labels) != 0 {
		t.Errorf("anonymous: %+v, %v", anonymous, err)
	}
	for name, opts := range map[string]volume.CreateOptions{
		"bind":   {Name: "volumes-bind", DriverOpts: map[string]string{"type": "none", "o": "bind", "device": "/etc"}},
		"driver": {Name: "volumes-bind", Driver: "nfs"},
	} {
		if _, err := mine.VolumeCreate(ctx, opts); !errdefs.IsPermissionDenied(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"volumes-mine", anonymous.Name} {
		report(t, mine.VolumeRemove(ctx, name, false))
	}
}

func TestCapOfObjects(t *testing.T) {
	host, direct := testEngine(t)
	c := doorTo(t, host, basePolicy+"profiles: {default: {engine_api: {max_objects: 3}}}\n").client("cap")
	var mu sync.Mutex
	var failed []error
	var made []string
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			v, err := c.VolumeCreate(t.Context(), volume.CreateOptions{})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, err)
				return
			}
			made = append(made, v.Name)
		})
	}
	wg.Wait()
	for _, name := range made {
		report(t, direct.VolumeRemove(t.Context(), name, true))
	}
	if len(failed) < 5 || !strings.Contains(failed[0].Error(), "max_objects") {
		t.Errorf("%d of 8 failed: %v", len(failed), failed)
	}
}

func TestEvents(t *testing.T) {
	d, direct := engineDoor(t, "")
	mine := d.client("mine")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	since := time.Now().Add(-time.Second)
	messages, failed := mine.Events(ctx, events.ListOptions{Since: since.Format(time.RFC3339Nano)})
	own := d.made(direct, "mine", "events-mine", container.Config{})
	theirs := d.made(direct, "other", "events-other", container.Config{})
	networks := map[string]string{}
	for tenant, c := range map[string]*client.Client{"other": d.client("other"), "mine": mine} {
		networks[tenant] = must(c.NetworkCreate(ctx, "events-"+tenant, network.CreateOptions{}))(t).ID
		must(c.VolumeCreate(ctx, volume.CreateOptions{Name: "events-" + tenant}))(t)
	}
	var seen []string
	for len(seen) < 4 {
		select {
		case e := <-messages:
			if !slices.Contains([]string{own, networks["mine"], "events-mine"}, e.Actor.ID) {
				t.Errorf("saw %+v", e)
			}
			seen = append(seen, string(e.Type)+" "+string(e.Action))
		case err := <-failed:
			t.Fatal(err)
		case <-time.After(30 * time.Second):
			t.Fatalf("saw only %v", seen)
		}
	}
	for _, want := range []string{"container create", "container start", "network create", "volume create"} {
		if !slices.Contains(seen, want) {
			t.Errorf("no %q among %v", want, seen)
		}
	}

	// A door that never heard of them goes by what is there when it begins to look.
	for _, o := range []*owners{&d.known, &d.execs} {
		o.mu.Lock()
		o.byID = nil
		o.mu.Unlock()
	}
	messages, failed = mine.Events(ctx, events.ListOptions{Filters: dockerfilters.NewArgs(dockerfilters.Arg("event", "destroy"))})
	for _, id := range []string{theirs, own} {
		noError(t, direct.ContainerRemove(ctx, id, forced))
	}
	for _, tenant := range []string{"other", "mine"} {
		noError(t, direct.NetworkRemove(ctx, networks[tenant]))
		noError(t, direct.VolumeRemove(ctx, "events-"+tenant, false))
	}
	for _, want := range []string{own, networks["mine"], "events-mine"} {
		select {
		case e := <-messages:
			if e.Actor.ID != want {
				t.Errorf("the end of %s: %+v", want, e)
			}
		case err := <-failed:
			t.Fatal(err)
		case <-time.After(30 * time.Second):
			t.Fatalf("the end of %s isn't told", want)
		}
	}
}

func TestInfo(t *testing.T) {
	d, direct := engineDoor(t, "")
	d.made(direct, "mine", "info-mine", container.Config{})
	d.made(direct, "other", "info-other", container.Config{})
	c, ctx := d.client("mine"), t.Context()
	info, err := c.Info(ctx)
	if err != nil || info.Containers != 1 || info.ContainersRunning != 1 || info.OSType != "linux" || info.NCPU == 0 || info.DockerRootDir != "" || info.Images == 0 || info.ID == "" {
		t.Errorf("info: %+v, %v", info, err)
	}
	if again := must(c.Info(ctx))(t); again.ID != info.ID || must(d.client("other").Info(ctx))(t).ID == info.ID {
		t.Errorf("the ID isn't the tenant's: %s, %s", info.ID, again.ID)
	}
	want := must(direct.ServerVersion(ctx))(t)
	got, err := c.ServerVersion(ctx)
	if err != nil || got.Version != want.Version || got.APIVersion != want.APIVersion || got.MinAPIVersion != "1.24" {
		t.Errorf("version: %+v, %v", got, err)
	}
	df, err := c.DiskUsage(ctx, types.DiskUsageOptions{})
	if err != nil || len(df.Containers) != 1 || df.Containers[0].Names[0] != "/info-mine" || len(df.Images) == 0 || df.LayersSize == 0 {
		t.Errorf("df: %+v, %v", df, err)
	}
	list := must(c.ImageList(ctx, image.ListOptions{}))(t)
	if len(df.Images) != len(list) || len(list) != info.Images {
		t.Errorf("images: %d, df has %d, info %d", len(list), len(df.Images), info.Images)
	}
	for _, i := range df.Images {
		if want := map[bool]int64{true: 1}[slices.Contains(i.RepoTags, testImage)]; i.Containers != want {
			t.Errorf("%v has %d containers, not %d", i.RepoTags, i.Containers, want)
		}
	}
}

func TestAuditLog(t *testing.T) {
	d, direct := engineDoor(t, "")
	c, ctx := d.client("audited"), t.Context()
	id := d.made(direct, "audited", "audited", container.Config{})
	must(c.ContainerInspect(ctx, id))(t)
	if _, err := c.VolumeCreate(ctx, volume.CreateOptions{Driver: "nfs"}); err == nil {
		t.Fatal("not refused")
	}
	want := []string{`"route":"/containers/{id}/json"`, `"verdict":"allowed"`, id, `"verdict":"denied"`, `"tenant":"audited"`, `"peer":"uid=0 pid=`}
	deadline := time.Now().Add(10 * time.Second)
	for {
		log := readFile(t, d.audit)
		if !slices.ContainsFunc(want, func(s string) bool { return !bytes.Contains(log, []byte(s)) }) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the log lacks something: %s", log)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
