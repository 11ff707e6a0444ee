package image

import (
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/bermhq/berm/runtime"
)

// progressInterval is how often a pull reports its progress.
const progressInterval = 100 * time.Millisecond

// follower adds up the progress of a pull, and reports it from one goroutine until end. If tell is nil,
// it reports nothing.
type follower struct {
	tell     func(runtime.PullProgress)
	ending   chan struct{}
	reporter sync.WaitGroup

	mu     sync.Mutex
	layers map[digest.Digest]*layerProgress
	now    runtime.PullProgress
}

type layerProgress struct{ current, total int64 }

// newFollower reports the first status before it returns.
func newFollower(tell func(runtime.PullProgress), status string) *follower {
	f := &follower{
		tell: tell, ending: make(chan struct{}), layers: map[digest.Digest]*layerProgress{},
		now: runtime.PullProgress{Status: status},
	}
	if tell != nil {
		first := f.now
		tell(first)
		f.reporter.Go(func() { f.report(first) })
	}
	return f
}

func (f *follower) report(told runtime.PullProgress) {
	ticker := time.NewTicker(progressInterval)
	defer ticker.Stop()
	for ending := false; !ending; {
		select {
		case <-ticker.C:
		case <-f.ending:
			ending = true
		}
		f.mu.Lock()
		now := f.now
		f.mu.Unlock()
		if now != told {
			f.tell(now)
			told = now
		}
	}
}

// end reports the last state before it returns.
func (f *follower) end(complete bool) {
	if complete {
		f.mu.Lock()
		for _, l := range f.layers { // some snapshots existed, and needed no download
			l.current = l.total
		}
		f.now.Status = "Pull complete"
		f.sum()
		f.mu.Unlock()
	}
	close(f.ending)
	f.reporter.Wait()
}

// layer adds a layer with its size.
func (f *follower) layer(desc ocispec.Descriptor, complete bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.known(desc)
	if complete {
		l.current = l.total
		f.now.Status = short(desc) + " Download complete"
	}
	f.sum()
}

// reached records how much of a layer has arrived. A part that is downloaded again doesn't count twice.
func (f *follower) reached(desc ocispec.Descriptor, offset int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.known(desc)
	l.current = max(l.current, min(offset, l.total))
	f.now.Status = short(desc) + " Downloading"
	f.sum()
}

func (f *follower) known(desc ocispec.Descriptor) *layerProgress {
	l := f.layers[desc.Digest]
	if l == nil {
		l = &layerProgress{total: max(desc.Size, 0)}
		f.layers[desc.Digest] = l
	}
	return l
}

func (f *follower) sum() {
	f.now.CurrentBytes, f.now.TotalBytes = 0, 0
	for _, l := range f.layers {
		f.now.CurrentBytes += l.current
		f.now.TotalBytes += l.total
	}
}

// short returns the ID by which users know a layer.
func short(desc ocispec.Descriptor) string {
	if desc.Digest.Validate() != nil {
		return "layer"
	}
	hex := desc.Digest.Encoded()
	return hex[:min(12, len(hex))]
}
