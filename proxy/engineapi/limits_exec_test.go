package engineapi

import (
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/build"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/lifecycle"
)

// TestAnonymousVolumesAreCounted: also those that outlive their containers.
func TestAnonymousVolumesAreCounted(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {max_objects: 3}}}\n")
	c, ctx := d.client("anonymous"), t.Context()
	create := func(volumes int) error {
		places := map[string]struct{}{}
		for i := range volumes {
			places[fmt.Sprintf("/v%d", i)] = struct{}{}
		}
		made, err := c.ContainerCreate(ctx, &container.Config{Image: testImage, Volumes: places}, nil, nil, nil, "")
		if err != nil {
			return err
		}
		return c.ContainerRemove(ctx, made.ID, container.RemoveOptions{})
	}
	full := func(err error) bool { return err != nil && strings.Contains(err.Error(), "max_objects") }
	if err := create(4); !full(err) {
		t.Errorf("four at once: %v", err)
	}
	noError(t, create(3))
	if err := create(1); !full(err) {
		t.Errorf("a fourth: %v", err)
	}
	if err := create(0); err != nil {
		t.Errorf("none: %v", err)
	}
	own := dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))
	list, err := direct.VolumeList(ctx, volume.ListOptions{Filters: own})
	if err != nil || len(list.Volumes) != 3 {
		t.Errorf("%d volumes, %v", len(list.Volumes), err)
	}
}

func TestImagesAreCounted(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {commit: \"on\", build: \"on\", max_objects: 1}}}\n")
	c, ctx := d.client("images"), t.Context()
	id := d.made(direct, "images", "counted", container.Config{})
	made := must(c.ContainerCommit(ctx, id, container.CommitOptions{}))(t)
	full := func(err error) bool { return err != nil && strings.Contains(err.Error(), "max_objects") }
	if _, err := c.ContainerCommit(ctx, id, container.CommitOptions{}); !full(err) {
		t.Errorf("commit another: %v", err)
	}
	if _, err := c.ImageBuild(ctx, contextOf(t, "FROM "+testImage+"\nLABEL a=counted\n"), build.ImageBuildOptions{Version: build.BuilderV1}); !full(err) {
		t.Errorf("build another: %v", err)
	}
	if _, err := c.ImageRemove(ctx, made.ID, image.RemoveOptions{}); err != nil {
		t.Error(err)
	}
	made = must(c.ContainerCommit(ctx, id, container.CommitOptions{}))(t)
	if _, err := c.ImageRemove(ctx, made.ID, image.RemoveOptions{}); err != nil {
		t.Error(err)
	}
}

// TestBuildsEnd: one that hangs, and one whose files don't come, last no longer than what
// they make is to live.
func TestBuildsEnd(t *testing.T) {
	d, direct := engineDoor(t, buildPolicy)
	address := d.listen(Caller{Name: "hanging", Tenant: "hanging"})
	c, ctx := newClient(t, address), t.Context()
	resp := must(c.ImageBuild(ctx, contextOf(t, "FROM "+testImage+"\nRUN sleep 1000\n"), build.ImageBuildOptions{Version: build.BuilderV1, Labels: map[string]string{labelTTL: "5s"}}))(t)
	said, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || !strings.Contains(string(said), "the build was ended") {
		t.Errorf("%v\n%s", err, said)
	}
	own := dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))
	eventually(t, func() bool {
		list, err := direct.ContainerList(ctx, container.ListOptions{All: true, Filters: own})
		return err == nil && len(list) == 0
	})
	conn := must(net.Dial("unix", strings.TrimPrefix(address, "unix://")))(t)
	defer func() { _ = conn.Close() }()
	labels := url.QueryEscape(`{"` + labelTTL + `":"1s"}`)
	must(fmt.Fprintf(conn, "POST /v1.41/build?version=1&labels=%s HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-tar\r\nContent-Length: 10240\r\n\r\nx", labels))(t)
	if answer, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 4") {
		t.Errorf("files that don't come: %v\n%s", err, answer)
	}
}
