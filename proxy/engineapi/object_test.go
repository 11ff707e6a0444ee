package engineapi

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestCapOfObjects asks for more at once than there is room for.
func TestCapOfObjects(t *testing.T) {
	d, _ := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {max_objects: 3}}}\n")
	c := d.client("cap")
	for kind, create := range map[string]func() error{
		"volume":    func() error { _, err := c.VolumeCreate(t.Context(), volume.CreateOptions{}); return err },
		"container": func() error { _, err := c.ContainerCreate(t.Context(), sleeper, nil, nil, nil, ""); return err },
	} {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if err := create(); err != nil && !strings.Contains(err.Error(), "max_objects") {
					t.Errorf("%s: %v", kind, err)
				}
			})
		}
		wg.Wait()
		n := len(slices.DeleteFunc(d.left(), func(what string) bool { return !strings.HasPrefix(what, kind) }))
		if err := create(); n == 0 || n > 3 || n == 3 && err == nil {
			t.Errorf("%d of kind %s, %v", n, kind, err)
		}
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
		networks[tenant] = check.Value(c.NetworkCreate(ctx, "events-"+tenant, network.CreateOptions{}))(t).ID
		check.Value(c.VolumeCreate(ctx, volume.CreateOptions{Name: "events-" + tenant}))(t)
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
	for _, id := range []string{own, networks["mine"]} {
		d.known.drop(id)
	}
	messages, failed = mine.Events(ctx, events.ListOptions{Filters: dockerfilters.NewArgs(dockerfilters.Arg("event", "destroy"))})
	for _, id := range []string{theirs, own} {
		must(t, direct.ContainerRemove(ctx, id, forced))
	}
	for _, tenant := range []string{"other", "mine"} {
		must(t, direct.NetworkRemove(ctx, networks[tenant]))
		must(t, direct.VolumeRemove(ctx, "events-"+tenant, false))
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
	if again := check.Value(c.Info(ctx))(t); again.ID != info.ID || check.Value(d.client("other").Info(ctx))(t).ID == info.ID {
		t.Errorf("the ID isn't the tenant's: %s, %s", info.ID, again.ID)
	}
	want := check.Value(direct.ServerVersion(ctx))(t)
	got, err := c.ServerVersion(ctx)
	if err != nil || got.Version != want.Version || got.APIVersion != want.APIVersion || got.MinAPIVersion != "1.24" {
		t.Errorf("version: %+v, %v", got, err)
	}
	df, err := c.DiskUsage(ctx, types.DiskUsageOptions{})
	if err != nil || len(df.Containers) != 1 || df.Containers[0].Names[0] != "/info-mine" || len(df.Images) == 0 || df.LayersSize == 0 {
		t.Errorf("df: %+v, %v", df, err)
	}
	list := check.Value(c.ImageList(ctx, image.ListOptions{}))(t)
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
	d, s, address := scripted(t, "1.41", "")
	s.ownContainerOf(d, "mine", mineID, "c")
	_, _ = say(t, address, "GET", "/containers/c/json", "")
	_, _ = say(t, address, "POST", "/volumes/create", `{"Driver":"nfs"}`)
	want := []string{`"route":"/containers/{id}/json"`, `"verdict":"allowed"`, mineID, `"verdict":"denied"`, `"tenant":"mine"`, `"peer":"uid=0 pid=`}
	eventually(t, func() bool {
		log := readFile(t, d.audit)
		return !slices.ContainsFunc(want, func(s string) bool { return !bytes.Contains(log, []byte(s)) })
	})
}
