package lifecycle_test

import (
	"context"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// TestExecMeasured checks that a result has what the command used.
func TestExecMeasured(t *testing.T) {
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Measures: true}})
	w.create(request("k"))
	got, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}})
	if err != nil || got.CPUTime != time.Millisecond || got.PeakMemoryBytes != 1<<20 {
		t.Errorf("%+v, %v", got, err)
	}
}
