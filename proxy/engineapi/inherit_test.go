package engineapi

import (
	"context"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
)

// A container that the operator makes of a caller's image has its labels, and is the
// operator's all the same.
func TestContainersOfCallersImages(t *testing.T) {
	d, direct := engineDoor(t, basePolicy+"profiles: {default: {engine_api: {commit: \"on\", tags: [\"inherit.local/*\"]}}}\n")
	c := d.client("inherit")
	mine := must(c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"sleep", "1000"}}, nil, nil, nil, ""))(t)
	img := must(c.ContainerCommit(t.Context(), mine.ID, container.CommitOptions{Reference: "inherit.local/made:1"}))(t)
	t.Cleanup(func() { _, _ = direct.ImageRemove(context.Background(), img.ID, image.RemoveOptions{Force: true}) })
	if _, err := c.ImageInspect(t.Context(), img.ID); err != nil {
		t.Errorf("the caller's own image: %v", err)
	}
	theirs := must(direct.ContainerCreate(t.Context(), &container.Config{Image: img.ID, Cmd: []string{"sleep", "1000"}}, nil, nil, nil, ""))(t)
	t.Cleanup(func() {
		_ = direct.ContainerRemove(context.Background(), theirs.ID, container.RemoveOptions{Force: true})
	})
	if _, err := c.ContainerInspect(t.Context(), theirs.ID); !errdefs.IsNotFound(err) {
		t.Errorf("the operator's container: %v", err)
	}
	list, err := c.ContainerList(t.Context(), container.ListOptions{All: true})
	if err != nil || len(list) != 1 || list[0].ID != mine.ID {
		t.Errorf("the list: %+v, %v", list, err)
	}
	if _, err := c.ContainerCreate(t.Context(), &container.Config{Image: "inherit.local/made:1"}, nil, nil, nil, ""); err != nil {
		t.Errorf("one of the caller's own: %v", err)
	}
}
