package lifecycle_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/bermhq/berm/lifecycle"
)

// What others can write to is known for every tenant and from the moment that a
// sandbox is on its way, and forgotten when its container is dead.
func TestOtherMounts(t *testing.T) {
	root := t.TempDir()
	w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + root + "]}\n"})
	made := map[string]lifecycle.Sandbox{}
	for _, name := range []string{"x", "y"} {
		dir := filepath.Join(root, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		req := lifecycle.CreateRequest{Tenant: name, Key: "k"}
		req.Request.HostPath = &dir
		made[name] = w.create(req).Sandbox
	}
	others := func(session string) []string {
		var got []string
		for _, m := range w.OtherMounts(session) {
			got = append(got, filepath.Base(m.Source)+" "+m.Mode)
		}
		slices.Sort(got)
		return got
	}
	if got := others(""); !slices.Equal(got, []string{"x rw", "y rw"}) {
		t.Errorf("of nobody's: %v", got)
	}
	if got := others(made["x"].SessionID); !slices.Equal(got, []string{"y rw"}) {
		t.Errorf("of all but x: %v", got)
	}
	w.fake.Die(made["y"].ContainerID)
	w.eventually("y's mount is forgotten", func() bool { return slices.Equal(others(""), []string{"x rw"}) })
}
