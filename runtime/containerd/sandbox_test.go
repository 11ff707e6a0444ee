package containerd

import "testing"

// Containers that an earlier Berm made have none, and are removed like others.
func TestRemoveSandbox(t *testing.T) {
	r := newRuntime(t, shared.Get(t))
	ctx, id := r.namespaced(t.Context()), newID()
	if err := (&creation{r: r, id: id, class: runtimeClasses[""]}).makeSandbox(ctx); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := (teardown{r: r, id: id}).removeSandbox(ctx); err != nil {
			t.Error(err)
		}
	}
	wantNothingLeft(t, shared.Get(t))
}
