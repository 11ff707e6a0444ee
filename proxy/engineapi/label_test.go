package engineapi

import (
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/volume"
)

// What callers make is marked as Berm's, unless they mark it as their own; as a part of
// Berm's own they can't.
func TestFurtherLabels(t *testing.T) {
	d, direct := engineDoor(t, "")
	d.opts.Labels = map[string]string{"stack": "own", "part": "made"}
	c := newClient(t, d.listen(Caller{Name: "a", Tenant: "a"}))
	for name, tt := range map[string]struct{ given, stack, part string }{
		"none":  {"", "own", "made"},
		"given": {"another", "another", ""},
	} {
		cfg := &container.Config{Image: testImage}
		if tt.given != "" {
			cfg.Labels = map[string]string{"stack": tt.given}
		}
		ct := must(c.ContainerCreate(t.Context(), cfg, nil, nil, nil, ""))(t)
		if got := inspect(t, direct, ct.ID).Config.Labels; got["stack"] != tt.stack || got["part"] != tt.part {
			t.Errorf("%s: %v", name, got)
		}
		if err := c.ContainerRemove(t.Context(), ct.ID, container.RemoveOptions{}); err != nil {
			t.Error(err)
		}
	}
	_, err := c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Labels: map[string]string{"stack": "own"}}, nil, nil, nil, "")
	deniedBy(t, err, "labels.reserved")
	_, err = c.VolumeCreate(t.Context(), volume.CreateOptions{Name: "of-the-stack", Labels: map[string]string{"stack": "own"}})
	deniedBy(t, err, "labels.reserved")
}
