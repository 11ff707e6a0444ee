package lifecycle

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/bermhq/berm/runtime"
)

// Bounds of a pull. It ends on its own time limit, not when its first caller leaves.
const (
	pullTimeout  = 30 * time.Minute
	pullLogEvery = 5 * time.Second
)

// pulling is one caller's view of a pull that callers share.
type pulling struct {
	result   <-chan singleflight.Result // of a runtime.Image
	progress func() runtime.PullProgress
}

// wait waits for the image, or until ctx ends.
func (p pulling) wait(ctx context.Context, ref string) (runtime.Image, error) {
	select {
	case r := <-p.result:
		if r.Err != nil {
			return runtime.Image{}, fmt.Errorf("pull image %s: %w", ref, r.Err)
		}
		return r.Val.(runtime.Image), nil
	case <-ctx.Done():
		return runtime.Image{}, context.Cause(ctx)
	}
}

// pull starts pulling an image, or joins the pull that is under way.
func (e *engine) pull(ref string) pulling {
	e.mu.Lock()
	at := e.progress[ref]
	if at == nil {
		at = &atomic.Pointer[runtime.PullProgress]{}
		at.Store(&runtime.PullProgress{Status: "waiting"})
		e.progress[ref] = at
	}
	e.mu.Unlock()
	result := e.pulls.DoChan(ref, func() (any, error) {
		defer func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			delete(e.progress, ref)
		}()
		return e.pullImage(ref, at)
	})
	return pulling{result: result, progress: func() runtime.PullProgress { return *at.Load() }}
}

func (e *engine) pullImage(ref string, at *atomic.Pointer[runtime.PullProgress]) (runtime.Image, error) {
	ctx, cancel := context.WithTimeout(e.base, pullTimeout)
	defer cancel()
	start := time.Now()
	logged := start
	e.log.InfoContext(ctx, "image_pull_started", "image", ref)
	img, err := ask(ctx, e, "pull", func(ctx context.Context) (runtime.Image, error) {
		return e.opts.Runtime.Pull(ctx, ref, func(p runtime.PullProgress) {
			at.Store(&p)
			if now := time.Now(); now.Sub(logged) >= pullLogEvery {
				logged = now
				e.log.InfoContext(ctx, "image_pulling", "image", ref, "status", p.Status,
					"current_bytes", p.CurrentBytes, "total_bytes", p.TotalBytes)
			}
		})
	})
	if err != nil {
		e.log.WarnContext(ctx, "image_pull_failed", "image", ref, "error", err)
		return img, err
	}
	e.log.InfoContext(ctx, "image_pulled", "image", ref, "image_id", img.ID, "duration", time.Since(start))
	return img, nil
}
