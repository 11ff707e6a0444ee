package engineapi

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestTightenedJoin checks that a network that a container joined is judged again at a start.
func TestTightenedJoin(t *testing.T) {
	ctx := t.Context()
	const networks = "networks: {team: {engine_network: tight-policy-net, internal: true}}\n"
	d, direct := engineDoor(t, basePolicy+networks)
	check.Value(direct.NetworkCreate(ctx, "tight-policy-net", network.CreateOptions{Internal: true, Labels: d.policyNetworkLabels()}))(t)
	c := d.client("mine")
	own := check.Value(c.NetworkCreate(ctx, "tight-own-net", network.CreateOptions{Internal: true}))(t)
	ct := check.Value(c.ContainerCreate(ctx, sleeper, &container.HostConfig{NetworkMode: container.NetworkMode(own.ID)}, nil, nil, ""))(t)
	const locked = basePolicy + networks + "profiles: {default: {locked: [network]}}\n"
	d.under(locked, testImage)
	must(t, startIt(t, c, ct.ID))
	must(t, direct.ContainerKill(ctx, ct.ID, "KILL"))
	d.under(basePolicy+networks, testImage)
	must(t, c.NetworkConnect(ctx, "tight-policy-net", ct.ID, nil))
	d.under(locked, testImage)
	deniedBy(t, startIt(t, c, ct.ID), "verify.start")
	d.under(basePolicy+networks, testImage)
	must(t, startIt(t, c, ct.ID))
}

// TestNetworksOfThePolicy joins them late, and leaves them.
func TestNetworksOfThePolicy(t *testing.T) {
	ctx := t.Context()
	ids := map[string]string{}
	d, direct := engineDoor(t, basePolicy+"networks: {team: {engine_network: policy-net, internal: true}}\n")
	for _, name := range []string{"policy-net", "unlisted-net"} {
		made := check.Value(direct.NetworkCreate(ctx, name, network.CreateOptions{Internal: true, Labels: d.policyNetworkLabels()}))(t)
		ids[name] = made.ID
	}
	c, other := d.client("mine"), d.client("other")
	id := d.made(direct, "mine", "policy-mine", container.Config{})
	must(t, direct.NetworkDisconnect(ctx, "none", id, true))
	for _, ref := range []string{"unlisted-net", ids["unlisted-net"], ids["unlisted-net"][:12], "bridge", "host"} {
		wantErr(t, errdefs.IsNotFound, c.NetworkConnect(ctx, ref, id, nil), "connect to %s", ref)
		wantErr(t, errdefs.IsNotFound, c.NetworkDisconnect(ctx, ref, id, true), "disconnect from %s", ref)
	}
	wantErr(t, errdefs.IsPermissionDenied, c.NetworkConnect(ctx, "policy-net", id, &network.EndpointSettings{Aliases: []string{"db"}}), "a name of one's own where others are")
	must(t, c.NetworkConnect(ctx, ids["policy-net"][:12], id, nil))
	wantErr(t, errdefs.IsNotFound, other.NetworkConnect(ctx, "policy-net", id, nil), "another's container")
	wantErr(t, errdefs.IsNotFound, other.NetworkDisconnect(ctx, "policy-net", id, true), "another's container")
	must(t, direct.ContainerKill(ctx, id, "KILL"))
	eventually(t, func() bool { ct, err := direct.ContainerInspect(ctx, id); return err == nil && !ct.State.Running })
	if err := c.NetworkDisconnect(ctx, "policy-net", id, false); err != nil {
		t.Errorf("leave it, stopped: %v", err)
	}
	wantErr(t, errdefs.IsNotFound, errOf(c.NetworkInspect(ctx, "policy-net", network.InspectOptions{})), "the policy's network shows whom it joins")
	auditing := newClient(t, d.listen(Caller{Name: "auditor", Tenant: "mine", Audit: true}))
	if err := auditing.NetworkConnect(ctx, "unlisted-net", id, nil); err != nil {
		t.Errorf("in mode audit: %v", err)
	}
	mine := check.Value(other.NetworkCreate(ctx, "policy-other", network.CreateOptions{}))(t)
	wantErr(t, errdefs.IsNotFound, auditing.NetworkConnect(ctx, mine.ID, id, nil), "another's network in mode audit")
}

// TestObjectsInAudit does what the policy denies, and looks for what was written down.
func TestObjectsInAudit(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {pull: \"off\", build: \"off\", commit: \"off\"}}}\n")
	ctx := t.Context()
	c := newClient(t, d.listen(Caller{Name: "audit", Tenant: "audit", Audit: true}))
	id := d.made(direct, "audit", "audit-ct", container.Config{})
	must(t, errOf(c.VolumeCreate(ctx, volume.CreateOptions{Name: "audit-vol", DriverOpts: map[string]string{"type": "tmpfs", "device": "tmpfs"}})))
	v, err := direct.VolumeInspect(ctx, "audit-vol")
	if err != nil || v.Labels[lifecycle.LabelTenant] != "audit" {
		t.Errorf("volume: %+v, %v", v, err)
	}
	n, err := c.NetworkCreate(ctx, "audit-net", network.CreateOptions{Options: map[string]string{"com.docker.network.bridge.name": "br-audit"}})
	if err != nil {
		t.Errorf("network: %v", err)
	} else if got, err := direct.NetworkInspect(ctx, n.ID, network.InspectOptions{}); err != nil || got.Labels[lifecycle.LabelTenant] != "audit" || got.Options["com.docker.network.bridge.name"] != "br-audit" {
		t.Errorf("network: %+v, %v", got, err)
	}
	made, err := c.ContainerCommit(ctx, id, container.CommitOptions{Reference: "audit.local/x:1"})
	if err != nil {
		t.Errorf("commit: %v", err)
	} else if img, err := direct.ImageInspect(ctx, made.ID); err != nil || img.Config.Labels[lifecycle.LabelTenant] != "audit" {
		t.Errorf("commit: %+v, %v", img, err)
	}
	wantErr(t, errdefs.IsPermissionDenied, errOf(c.VolumeCreate(ctx, volume.CreateOptions{Labels: map[string]string{"berm.tenant": "other"}})), "another's label")
	for _, want := range []string{"/volumes/create", "/networks/create", "/commit"} {
		eventually(t, func() bool {
			for line := range bytes.Lines(readFile(t, d.audit)) {
				var r Record
				if json.Unmarshal(line, &r) == nil && r.Route == want && r.Verdict == VerdictWouldDeny && len(r.Reasons) > 0 {
					return true
				}
			}
			return false
		})
	}
}

// TestVolumesAtOnce has two tenants want one name.
func TestVolumesAtOnce(t *testing.T) {
	d, direct := engineDoor(t, "")
	tenants := []string{"one", "two"}
	for round := range 10 {
		name := "at-once-" + string(rune('a'+round))
		var got [2]error
		var wg sync.WaitGroup
		for i, tenant := range tenants {
			c := newClient(t, d.listen(Caller{Name: tenant + name, Tenant: tenant}))
			wg.Go(func() {
				v, err := c.VolumeCreate(t.Context(), volume.CreateOptions{Name: name, Labels: map[string]string{"by": tenant}})
				if got[i] = err; err == nil && v.Labels["by"] != tenant {
					t.Errorf("%s got what another made: %v", tenant, v.Labels)
				}
			})
		}
		wg.Wait()
		if (got[0] == nil) == (got[1] == nil) || got[0] != nil && !errdefs.IsConflict(got[0]) || got[1] != nil && !errdefs.IsConflict(got[1]) {
			t.Errorf("%v and %v", got[0], got[1])
		}
	}
	check.Value(direct.VolumeCreate(t.Context(), volume.CreateOptions{Name: "at-once-foreign", Labels: map[string]string{lifecycle.LabelTenant: "one"}}))(t)
	defer func() { _ = direct.VolumeRemove(context.Background(), "at-once-foreign", true) }()
	c := d.client("one")
	wantErr(t, errdefs.IsConflict, errOf(c.VolumeCreate(t.Context(), volume.CreateOptions{Name: "at-once-foreign"})), "what only looks like one's own")
	wantErr(t, errdefs.IsNotFound, c.VolumeRemove(t.Context(), "at-once-foreign", false), "what only looks like one's own")
}

// TestOldVersions asks each endpoint as clients of several ages do.
func TestOldVersions(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "old", Tenant: "old"})
	for _, v := range []string{"v1.24", "v1.30", "v1.41"} {
		id := d.made(direct, "old", "old-"+v, container.Config{})
		for _, tt := range []struct {
			method, path, body string
			status             int
			has                string
		}{
			{"GET", "/_ping", "", 200, "OK"},
			{"GET", "/version", "", 200, `"ApiVersion":"1.`},
			{"GET", "/info", "", 200, `"Containers":`},
			{"GET", "/containers/json?all=1", "", 200, id},
			{"GET", "/containers/json?size=1&limit=1", "", 200, `"SizeRootFs":`},
			{"GET", "/containers/json?filters=%7B%22status%22%3A%5B%22running%22%5D%7D", "", 200, id},
			{"GET", "/containers/" + id[:12] + "/json?size=1", "", 200, `"SizeRw":`},
			{"GET", "/images/json", "", 200, testImage},
			{"GET", "/images/json?filters=%7B%22reference%22%3A%7B%22berm.local%2F%2A%22%3Atrue%7D%7D", "", 200, testImage},
			{"GET", "/images/json?filters=%7B%22reference%22%3A%5B%22nobody%2F%2A%22%5D%7D", "", 200, "[]"},
			{"GET", "/images/" + testImage + "/json", "", 200, testImage},
			{"GET", "/images/" + testImage + "/history", "", 200, `"CreatedBy":`},
			{"POST", "/networks/create", `{"Name":"old-` + v + `","Driver":null,"Options":null,"IPAM":{"Driver":"default","Config":[]},"CheckDuplicate":true,"Internal":false,"EnableIPv6":false,"Attachable":true,"Labels":{"com.docker.compose.network":"x","com.docker.compose.version":"1.25.0"}}`, 201, `"Id":`},
			{"GET", "/networks", "", 200, "old-" + v},
			{"GET", "/networks/old-" + v, "", 200, `"com.docker.compose.network"`},
			{"POST", "/networks/old-" + v + "/disconnect", `{"Container":"nobody","Force":true}`, 404, "No such container"},
			{"DELETE", "/networks/old-" + v, "", 204, ""},
			{"POST", "/volumes/create", `{"Name":"old-` + v + `","Driver":"local","DriverOpts":null,"Labels":null}`, 201, `"Mountpoint":`},
			{"GET", "/volumes", "", 200, "old-" + v},
			{"GET", "/volumes/old-" + v, "", 200, `"Scope":"local"`},
			{"DELETE", "/volumes/old-" + v, "", 204, ""},
			{"DELETE", "/volumes/old-" + v, "", 404, "no such volume"},
			{"DELETE", "/volumes/old-" + v + "?force=1", "", 204, ""},
			{"GET", "/events?since=0&until=1", "", 200, ""},
			{"POST", "/containers/" + id + "/pause", "", 204, ""},
			{"POST", "/containers/" + id + "/unpause", "", 204, ""},
			{"POST", "/containers/" + id + "/rename?name=old2-" + v[3:], "", 204, ""},
			{"POST", "/containers/" + id + "/kill", "", 204, ""},
			{"POST", "/containers/prune?filters=%7B%22label%22%3A%5B%22nobody%22%5D%7D", "", map[bool]int{true: 403, false: 200}[v == "v1.24"], ""},
			{"POST", "/images/prune", "", map[bool]int{true: 403, false: 200}[v == "v1.24"], ""},
			{"POST", "/volumes/prune", "", map[bool]int{true: 403, false: 200}[v == "v1.24"], ""},
			{"POST", "/networks/prune", "", map[bool]int{true: 403, false: 200}[v == "v1.24"], ""},
			{"POST", "/build/prune", "", map[bool]int{true: 200, false: 403}[v == "v1.41"], ""},
			{"GET", "/system/df", "", map[bool]int{true: 403, false: 200}[v == "v1.24"], ""},
			{"DELETE", "/containers/" + id + "?force=1&v=1", "", 204, ""},
		} {
			status, told := say(t, address, tt.method, "/"+v+tt.path, tt.body)
			if status != tt.status || !strings.Contains(told, tt.has) {
				t.Errorf("%s /%s%s: %d %.300s, want %d and %q", tt.method, v, tt.path, status, told, tt.status, tt.has)
			}
		}
	}
}
