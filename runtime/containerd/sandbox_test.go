package containerd

import "testing"

// Containers that an earlier Berm made have none, and are removed like others.
func TestRemoveSandbox(t *testing.T) {
	r := newRuntime(t, testEngine(t))
	ctx, id := r.namespaced(t.Context()), newID()
	if err := r.makeSandbox(ctx, id, runcShim); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.removeSandbox(ctx, id); err != nil {
			t.Error(err)
		}
	}
	wantNothingLeft(t, testEngine(t))
}
