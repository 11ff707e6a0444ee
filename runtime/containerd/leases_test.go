package containerd

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
)

func TestHolder(t *testing.T) {
	own, err := holder()
	must(t, err)
	gone := exec.Command("true")
	must(t, gone.Run())
	for name, want := range map[string]bool{
		own:                                   false,
		own + "0":                             true, // another that has the number now
		fmt.Sprintf("%d-1", gone.Process.Pid): true,
		"":                                    false,
		"1":                                   false,
		"x-1":                                 false,
		"1-x":                                 false,
		"-1-1":                                false,
	} {
		if got := holderGone(name); got != want {
			t.Errorf("%q: gone is %t, want %t", name, got, want)
		}
	}
}

// What a killed process held is given up by the next one's sweep, and nothing else.
func TestSweepLeases(t *testing.T) {
	d := shared.Get(t)
	r := newRuntime(t, d)
	ctx := r.namespaced(t.Context())
	service := r.client.LeasesService()
	own, err := holder()
	must(t, err)
	stale := fmt.Sprintf("%d-1", os.Getpid())
	for id, labels := range map[string]map[string]string{
		"stale":   {labelRoot: r.opts.Root, labelHolder: stale},
		"held":    {labelRoot: r.opts.Root, labelHolder: own},
		"lost":    {labelRoot: r.opts.Root, labelHolder: own},
		"others":  {labelRoot: r.opts.Root + "x", labelHolder: stale},
		"foreign": {},
	} {
		l, err := service.Create(ctx, leases.WithID("leases-"+id), leases.WithExpiration(time.Minute), leases.WithLabels(labels))
		must(t, err)
		t.Cleanup(func() { _ = service.Delete(r.namespaced(context.Background()), l) })
	}
	underWay.Store("leases-held", true)
	t.Cleanup(func() { underWay.Delete("leases-held") })
	must(t, r.Sweep(t.Context()))
	left, err := service.List(ctx)
	must(t, err)
	there := map[string]bool{}
	for _, l := range left {
		there[l.ID] = true
	}
	for id, want := range map[string]bool{"stale": false, "held": true, "lost": false, "others": true, "foreign": true} {
		if there["leases-"+id] != want {
			t.Errorf("%s: there is %t, want %t", id, there["leases-"+id], want)
		}
	}
}
