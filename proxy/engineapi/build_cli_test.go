package engineapi

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/build"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// buildOf has a client build a Dockerfile, and gives what is said and the image's ID.
func buildOf(ctx context.Context, t *testing.T, c *client.Client, dockerfile string, o build.ImageBuildOptions) (said, id string, err error) {
	t.Helper()
	o.Version, o.Remove = build.BuilderV1, true
	resp, err := c.ImageBuild(ctx, contextOf(t, dockerfile), o)
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if i := bytes.LastIndex(text, []byte(`{"aux":{"ID":"`)); i >= 0 {
		id, _, _ = strings.Cut(string(text[i+len(`{"aux":{"ID":"`):]), `"`)
	}
	if bytes.Contains(text, []byte(`"error"`)) {
		err = errors.Join(err, errors.New(string(text)))
	}
	return string(text), id, err
}

// everything counts what the engine has of containers, and of images with those in between.
func everything(t *testing.T, direct *client.Client) (containers, images int) {
	t.Helper()
	list := check.Value(direct.ContainerList(context.Background(), container.ListOptions{All: true}))(t)
	all := check.Value(direct.ImageList(context.Background(), image.ListOptions{All: true}))(t)
	return len(list), len(all)
}

// TestBuildsRefused builds from an image whose trigger no Dockerfile may have, from one that isn't
// there, and by Dockerfiles that are refused as they are read and as they are written.
func TestBuildsRefused(t *testing.T) {
	_, s, address := scripted(t, "1.41", buildPolicy)
	s.answers["GET /images/json"], s.answers["POST /images/create"] = "[]", "404 no such image"
	const image = `{"Id":"sha256:%s","RepoTags":["berm.local/x:1"],"Config":{"OnBuild":%s}}`
	s.answers["GET /images/berm.local/trigger:1/json"] = fmt.Sprintf(image, standInID, `["ADD http://127.0.0.1:1/x /x"]`)
	s.answers["GET /images/"+testImage+"/json"] = fmt.Sprintf(image, standInID, "null")
	for dockerfile, want := range map[string]string{
		"FROM berm.local/trigger:1": "for builds", "FROM berm.local/missing": "no such image", "INCLUDE x": "the Dockerfile is refused",
		"FROM " + testImage + "\nRUN true \\\u00a0\nUSER 1": "the Dockerfile is refused",
	} {
		resp, told := sayWith(t, address, http.MethodPost, "/build?version=1", asTar, string(tarOf(t, "Dockerfile", dockerfile+"\n")))
		if resp.StatusCode < 400 || !strings.Contains(told, want) || len(s.said("POST /build")) > 0 {
			t.Errorf("%s: %s %s", dockerfile, resp.Status, told)
		}
	}
}

// TestBuildsLeaveNothing has builds fail, and clients leave.
func TestBuildsLeaveNothing(t *testing.T) {
	d, direct := engineDoor(t, buildPolicy)
	c := d.client("mine")
	containers, _ := everything(t, direct)
	_, id, err := buildOf(t.Context(), t, c, "FROM "+testImage+" AS a\nFROM "+testImage+"\nVOLUME /v\nRUN echo x > /v/x\nRUN false\n", build.ImageBuildOptions{Tags: []string{"built.local/mine/failed:1"}})
	if err == nil || !strings.Contains(err.Error(), "non-zero code: 1") || strings.Contains(err.Error(), "verify.build") {
		t.Errorf("a failing build: %s, %v", id, err)
	}
	wantErr(t, errdefs.IsNotFound, errOf(direct.ImageInspect(t.Context(), "built.local/mine/failed:1")), "a failed build has a name")
	ctx, leave := context.WithCancel(t.Context())
	resp := check.Value(c.ImageBuild(ctx, contextOf(t, "FROM "+testImage+"\nRUN echo begun; sleep 1000\n"), build.ImageBuildOptions{Version: build.BuilderV1}))(t)
	heard := make([]byte, 0, 4096)
	for !bytes.Contains(heard, []byte("begun\\n")) {
		piece := make([]byte, 512)
		n, err := resp.Body.Read(piece)
		if heard = append(heard, piece[:n]...); err != nil {
			t.Fatalf("%v: %s", err, heard)
		}
	}
	if running, _ := everything(t, direct); running != containers+1 {
		t.Errorf("%d containers while it builds, and %d before", running, containers)
	}
	leave()
	_ = resp.Body.Close()
	eventually(t, func() bool { now, _ := everything(t, direct); return now == containers })
	// What failed builds leave in between is the caller's own to prune.
	report, err := c.ImagesPrune(t.Context(), dockerfilters.NewArgs())
	if err != nil || len(report.ImagesDeleted) == 0 {
		t.Errorf("prune: %+v, %v", report, err)
	}
	list, err := direct.ImageList(t.Context(), image.ListOptions{All: true, Filters: dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))})
	if err != nil || len(list) != 0 {
		t.Errorf("left: %+v, %v", list, err)
	}
	if left, err := direct.VolumeList(t.Context(), volume.ListOptions{}); err != nil || len(left.Volumes) != 0 {
		t.Logf("volumes that are there: %d, %v", len(left.Volumes), err)
	}
}

// TestRewriteIsBounded gives a small archive with a sparse file of 1 TiB.
func TestRewriteIsBounded(t *testing.T) {
	records := map[string]string{"XXX.sparse.size": "1099511627776", "XXX.sparse.numblocks": "1", "XXX.sparse.map": "0,0"}
	archive := written(t, tar.Header{Name: "large", Typeflag: tar.TypeReg, Mode: 0o644, PAXRecords: records})
	archive = bytes.ReplaceAll(archive, []byte("XXX.sparse"), []byte("GNU.sparse")) // which Go doesn't write
	if h, err := tar.NewReader(bytes.NewReader(archive)).Next(); err != nil || h.Size != 1<<40 {
		t.Fatalf("the archive isn't what it should be: %+v, %v", h, err)
	}
	err := rewrite(io.Discard, bytes.NewReader(archive), "Dockerfile", nil)
	if err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("a file of 1 TiB: %v", err)
	}
}
