package engineapi

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// again is the door after a restart: of the same instance, and without what it remembers.
func (d *testDoor) again() *testDoor {
	d.t.Helper()
	opts := d.opts
	opts.Registry = nil
	next := must(New(opts))(d.t)
	d.t.Cleanup(func() { _ = next.Close() })
	return &testDoor{Proxy: next, t: d.t, dir: d.t.TempDir(), audit: d.audit}
}

// Containers that got their labels from an image, as a build step's do, are nobody's: they
// aren't shown, entered, started or pruned, and are in nobody's way.
func TestForgedContainers(t *testing.T) {
	host, direct := testEngine(t)
	ctx := t.Context()
	d := doorTo(t, host, basePolicy+"profiles: {default: {engine_api: {max_objects: 2}}}\n")
	sweepOwn(t, direct, d)
	victim := d.client("victim")
	mine := must(victim.ContainerCreate(ctx, sleeper, nil, nil, nil, "forged-mine"))(t)
	noError(t, startIt(t, victim, mine.ID))
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
	for name, labels := range map[string]map[string]string{
		"copy": labels, "session": session, "unsealed": changed(lifecycle.LabelSeal, ""), "further": changed("Berm.x", "y"),
		"volume": d.labels(lifecycle.ObjectVolume, "victim"), "image": d.labels(lifecycle.ObjectImage, "victim", lifecycle.LabelDoor, lifecycle.DoorEngine),
	} {
		made := must(direct.ContainerCommit(ctx, mine.ID, container.CommitOptions{Reference: "forged.local/" + name + ":1", Config: &container.Config{Labels: labels, Cmd: []string{"sleep", "1000"}}}))(t)
		ct := must(direct.ContainerCreate(ctx, &container.Config{Image: made.ID}, &container.HostConfig{NetworkMode: "none"}, nil, nil, "forged-"+name))(t)
		t.Cleanup(func() {
			_ = direct.ContainerRemove(context.Background(), ct.ID, container.RemoveOptions{Force: true})
			_, _ = direct.ImageRemove(context.Background(), made.ID, image.RemoveOptions{Force: true})
		})
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
			if err := c.ContainerRemove(ctx, second.ID, container.RemoveOptions{}); err != nil {
				t.Error(err)
			}
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
	p := must(policy.Parse([]byte(basePolicy+"networks: {on: {engine_network: squat-on}}\n"), policy.Options{}))(t)
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
