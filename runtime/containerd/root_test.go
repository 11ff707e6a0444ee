package containerd

import (
	"os"
	"sync"
	"testing"
)

// Those who remove a place at the same time don't fail because of one another, and
// leave nothing.
func TestPlaceRemovedTogether(t *testing.T) {
	r := &Runtime{opts: Options{Root: t.TempDir()}}
	for range 200 {
		id := newID()
		first, err := r.makePlace(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(first.file("hosts"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for {
					p, err := lockPlace(r.path("containers", id))
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
		if err := first.remove(); err != nil {
			t.Error(err)
		}
		first.release()
		wg.Wait()
		if left, err := r.places(); err != nil || len(left) > 0 {
			t.Fatalf("left: %v, %v", left, err)
		}
	}
}
