package runtimetest

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func testPull(t *testing.T, b *fixture) {
	ref := b.Registry + "/contract:latest"
	canceled, cancel := context.WithCancel(b.ctx)
	cancel()
	_, err := b.rt.Pull(canceled, ref, nil)
	class(t, "a canceled pull", err, errdefs.IsCanceled, "Canceled")
	_, err = b.rt.Image(b.ctx, ref)
	class(t, "the image before", err, errdefs.IsNotFound, "NotFound")

	// Canceled when the first progress is reported.
	midway, cancel := context.WithCancel(b.ctx)
	defer cancel()
	_, err = b.rt.Pull(midway, ref, func(runtime.PullProgress) { cancel() })
	class(t, "a pull canceled in the middle", err, errdefs.IsCanceled, "Canceled")

	var last runtime.PullProgress
	var telling, told atomic.Int32
	pulled, err := b.rt.Pull(b.ctx, ref, func(p runtime.PullProgress) {
		if telling.Add(1) != 1 {
			t.Error("progress is told by two goroutines at once")
		}
		if p.CurrentBytes < 0 || p.CurrentBytes > p.TotalBytes {
			t.Errorf("progress %+v", p)
		}
		last = p
		told.Add(1)
		telling.Add(-1)
	})
	must(t, err)
	if last == (runtime.PullProgress{}) {
		t.Error("no progress was told")
	}
	before := told.Load()
	if !slices.ContainsFunc(pulled.Digests, func(d string) bool { return strings.HasPrefix(d, b.Registry+"/contract@sha256:") }) && b.Real {
		t.Errorf("digests %q", pulled.Digests)
	}
	if found, err := b.rt.Image(b.ctx, ref); err != nil || found.ID != pulled.ID {
		t.Errorf("the image afterwards: %+v, %v; pulled %+v", found, err, pulled)
	}
	if _, err := b.rt.Pull(b.ctx, ref, nil); err != nil {
		t.Errorf("again, without progress: %v", err)
	}
	if after := told.Load(); after != before {
		t.Errorf("progress was told %d times after the pull's end", after-before)
	}
	_, err = b.rt.Pull(b.ctx, "NOT A REFERENCE", nil)
	class(t, "a malformed reference", err, errdefs.IsInvalidArgument, "InvalidArgument")
	for _, missing := range []string{b.Registry + "/contract:missing", b.Registry + "/missing:latest"} {
		_, err := b.rt.Pull(b.ctx, missing, nil)
		class(t, missing, err, errdefs.IsNotFound, "NotFound")
	}
}
