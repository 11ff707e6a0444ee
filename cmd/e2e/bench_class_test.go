package e2e

import (
	"errors"
	"testing"
	"time"
)

// BenchmarkCrun measures sandboxes of the class crun on containerd against containerd's
// own client with the same class, and against those of Docker's default runtime, in one
// run. Commands go by the engine: with an agent in between, the runtime has no part in them.
func BenchmarkCrun(b *testing.B) {
	s := newBench(b)
	ctx := b.Context()
	docker, crun := s.servers["docker"], s.servers["containerd"].as("crun")
	raw := newContainerdContender(b, crun.engine, crun)
	ways := func(measured func(c contender, key string) (time.Duration, error), docker, crun *bermContender) []way {
		measure := func(c contender) way {
			return way{c.String(), func() (time.Duration, error) { return measured(c, s.key()) }}
		}
		return []way{measure(crun), measure(raw), measure(crun), measure(docker)}
	}
	b.Run("cold create to first output", func(b *testing.B) {
		turns(b, ways(func(c contender, key string) (took time.Duration, err error) {
			took, err = whole(func() error { return errors.Join(c.create(ctx, key, false), c.exec(ctx, key)) })()
			return took, errors.Join(err, c.remove(ctx, key))
		}, docker, crun), noUnit)
	})
	b.Run("delete", func(b *testing.B) {
		turns(b, ways(func(c contender, key string) (time.Duration, error) {
			if err := c.create(ctx, key, false); err != nil {
				return 0, err
			}
			return whole(func() error { return c.remove(ctx, key) })()
		}, docker, crun), noUnit)
	})
	b.Run("8 in parallel", func(b *testing.B) {
		turns(b, ways(func(c contender, key string) (took time.Duration, err error) {
			took, err = whole(func() error {
				return eight(key, func(key string) error { return errors.Join(c.create(ctx, key, false), c.exec(ctx, key)) })
			})()
			return took, errors.Join(err, eight(key, func(key string) error { return c.remove(ctx, key) }))
		}, docker, crun), noUnit)
	})
	docker, crun = docker.as("plain"), crun.as("plain-crun")
	for _, c := range []contender{docker, crun, raw} {
		s.must(c.create(ctx, "exec", false))
	}
	b.Run("exec by the engine", func(b *testing.B) {
		turns(b, ways(func(c contender, _ string) (time.Duration, error) {
			return whole(func() error { return c.exec(ctx, "exec") })()
		}, docker, crun), noUnit)
	})
	for _, c := range []contender{docker, crun, raw} {
		s.must(c.remove(ctx, "exec"))
	}
}
