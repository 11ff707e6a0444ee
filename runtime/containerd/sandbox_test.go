package containerd

import "testing"

// Containers that an earlier Berm made have none, and are removed like others.
func TestRemoveSandbox(t *testing.T) {
	r := newRuntime(t, shared.Get(t))
	ctx, id := r.namespaced(t.Context()), newID()
	must(t, (&creation{r: r, id: id, class: runtimeClasses[""]}).makeSandbox(ctx))
	for range 2 {
		must(t, (teardown{r: r, id: id}).removeSandbox(ctx))
	}
	wantNothingLeft(t, shared.Get(t))
}
