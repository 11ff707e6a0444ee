package lifecycle_test

import (
	"context"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// A command's result says which way it went.
func TestExecPath(t *testing.T) {
	for _, tt := range []struct {
		way, path string
		cpu       time.Duration
		memory    int64
	}{
		{"", runtime.PathEngine, 0, 0},
		{runtime.PathEngine, runtime.PathEngine, 0, 0},
		{runtime.PathAgent, runtime.PathAgent, time.Millisecond, 1 << 20},
	} {
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{ExecPath: tt.way}})
		w.create(request("k"))
		got, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}})
		if err != nil || got.Path != tt.path || got.CPUTime != tt.cpu || got.PeakMemoryBytes != tt.memory {
			t.Errorf("%q: %+v, %v", tt.way, got, err)
		}
	}
}
