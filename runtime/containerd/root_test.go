package containerd

import (
	"os"
	"sync"
	"testing"
)

// Those who remove a place at the same time don't fail because of one another, and
// leave nothing.
func TestPlaceRemovedTogether(t *testing.T) {
	r := &Runtime{root: root(t.TempDir())}
	for range 200 {
		id := newID()
		first, err := r.root.makePlace(t.Context(), id)
		must(t, err)
		must(t, os.WriteFile(first.file("hosts"), nil, 0o600))
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for {
					p, err := lockPlace(r.root.path("containers", id))
					if p == nil && err == nil {
						continue // somebody is at it
					}
					if p != nil {
						if err := p.remove(); err != nil {
							t.Error(err)
						}
						p.release()
					}
					return
				}
			})
		}
		must(t, first.remove())
		first.release()
		wg.Wait()
		if left, err := r.root.places(); err != nil || len(left) > 0 {
			t.Fatalf("left: %v, %v", left, err)
		}
	}
}
