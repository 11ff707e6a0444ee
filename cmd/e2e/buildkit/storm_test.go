package buildkit

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	gateway "github.com/moby/buildkit/frontend/gateway/pb"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// TestSoakBuildKitStorm has clients end at any moment of their builds, and looks at what is left.
func TestSoakBuildKitStorm(t *testing.T) {
	engine.Require(t, "docker")
	e := engines[len(engines)-1]
	engine.RequireNewer(t, e.programs)
	t.Setenv("PATH", engine.NewerPath(e.programs))
	r := newRig(t, nil)
	r.serve(t)
	s := r.sides(t)[1]
	must(t, s.innocent(t.Context()))
	calm := r.weight(t)
	var all sync.WaitGroup
	until := time.Now().Add(patience)
	word := make(chan string)
	go func() {
		for {
			select {
			case word <- s.word():
			case <-t.Context().Done():
				return
			}
		}
	}()
	for range 3 {
		for _, c := range []*client{s.alice, s.bob} {
			all.Go(func() {
				for time.Now().Before(until) {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(1500))*time.Millisecond)
					b := build{dockerfile: "FROM " + base + "\nCOPY --from=front.local/front:1 /bin/busybox /x\nRUN echo " + <-word}
					if rand.IntN(2) == 0 {
						b.frontend = func(ctx context.Context, ref, session string) error {
							ctx = inBuild(ctx, ref)
							result, err := gatewaySolve("dockerfile.v0", nil)(ctx, c, session)
							go func() {
								_, _ = c.gateway().ReadFile(ctx, &gateway.ReadFileRequest{FilePath: "/x", Ref: result.GetRef().GetId()})
							}()
							return c.returns(ctx, result, err)
						}
					}
					_, _ = c.run(ctx, b)
					cancel()
				}
			})
		}
	}
	all.Wait()
	for range 10 {
		if err := s.innocent(t.Context()); err == nil {
			break
		}
		time.Sleep(time.Second)
	}
	must(t, s.innocent(t.Context()))
	r.rests(t, calm)
}
