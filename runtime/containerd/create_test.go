package containerd

import (
	"testing"

	"github.com/bermhq/berm/runtime"
)

// The halves of a create are cut short by each other, and leave nothing for the sweep.
func TestCreateLeavesNothing(t *testing.T) {
	c := shared.Get(t)
	r := newRuntime(t, c)
	wantNothingLeft(t, c)
	for range 10 {
		if _, err := r.Create(t.Context(), runtime.Spec{Name: "berm-test-cut", Image: testImage, Network: "berm-test-missing"}); err == nil {
			t.Fatal("a network that isn't there was taken")
		}
	}
	left, err := c.Leftovers(t.Context(), c.Root())
	if err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}
