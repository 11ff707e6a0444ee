package lifecycle

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/bermhq/berm/runtime"
)

// A pull's own bounds. It runs for as long as data may be coming, not for as long
// as its first caller waits.
const (
	pullTimeout  = 30 * time.Minute
	pullLogEvery = 5 * time.Second
)

// pulling is one caller's view of a pull that callers share.
type pulling struct {
	result   <-chan singleflight.Result // of a runtime.Image
	progress func() runtime.PullProgress
}

// pull starts pulling an image, or joins the pull that is under way.
func (m *Manager) pull(ref string) pulling {
	m.mu.Lock()
	at := m.pullsAt[ref]
	if at == nil {
		at = &atomic.Pointer[runtime.PullProgress]{}
		at.Store(&runtime.PullProgress{Status: "waiting"})
		m.pullsAt[ref] = at
	}
	m.mu.Unlock()
	result := m.pulls.DoChan(ref, func() (any, error) {
		defer func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			delete(m.pullsAt, ref)
		}()
		return m.pullImage(ref, at)
	})
	return pulling{result: result, progress: func() runtime.PullProgress { return *at.Load() }}
}

func (m *Manager) pullImage(ref string, at *atomic.Pointer[runtime.PullProgress]) (runtime.Image, error) {
	ctx, cancel := context.WithTimeout(m.base, pullTimeout)
	defer cancel()
	start := time.Now()
	logged := start
	m.log.InfoContext(ctx, "image_pull_started", "image", ref)
	var img runtime.Image
	err := m.call(ctx, "pull", func(ctx context.Context) error {
		var err error
		img, err = m.opts.Runtime.Pull(ctx, ref, func(p runtime.PullProgress) {
			at.Store(&p)
			if now := time.Now(); now.Sub(logged) >= pullLogEvery {
				logged = now
				m.log.InfoContext(ctx, "image_pulling", "image", ref, "status", p.Status,
					"current_bytes", p.CurrentBytes, "total_bytes", p.TotalBytes)
			}
		})
		return err
	})
	if err != nil {
		m.log.WarnContext(ctx, "image_pull_failed", "image", ref, "error", err)
		return img, err
	}
	m.log.InfoContext(ctx, "image_pulled", "image", ref, "image_id", img.ID, "duration", time.Since(start))
	return img, nil
}
