package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// bench is real servers on private engines of both kinds, and the engines' own
// clients, side by side.
type bench struct {
	b       *testing.B
	servers map[string]*bermContender // by kind of engine
	all     []contender
	name    atomic.Int64
}

// contender does with a sandbox what there is to measure.
type contender interface {
	runner
	String() string
	create(ctx context.Context, key string, network bool) error
	exec(ctx context.Context, key string) error // echo hi, and its output and exit code
	remove(ctx context.Context, key string) error
}

// bermContender is a server, over its REST API.
type bermContender struct {
	*client.Client
	kind   string
	engine *testEngine
	server *server
}

func (c *bermContender) String() string { return "berm over " + c.kind }

func (c *bermContender) create(ctx context.Context, key string, network bool) error {
	var req apitype.SandboxRequest
	if on := "on"; network {
		req.Network = &on
	}
	_, err := c.Create(ctx, key, req)
	return err
}

var echo = []string{"echo", "hi"}

// runner runs a command in a container to its end, which has to be a good one.
type runner interface {
	run(ctx context.Context, key string, command []string, stdout io.Writer) error
}

func execEcho(ctx context.Context, r runner, key string) error {
	var out bytes.Buffer
	err := r.run(ctx, key, echo, &out)
	if err == nil && out.String() != "hi\n" {
		err = fmt.Errorf("%q", out.String())
	}
	return err
}

func (c *bermContender) exec(ctx context.Context, key string) error {
	res, err := c.Exec(ctx, key, apitype.ExecRequest{Command: echo})
	if err == nil && res.Stdout != "hi\n" {
		err = fmt.Errorf("%+v", res)
	}
	return err
}

func (c *bermContender) remove(ctx context.Context, key string) error {
	_, err := c.Delete(ctx, key)
	return err
}

// model gives the container of a sandbox that stays for as long as the benchmark.
func (c *bermContender) model(b *testing.B, network bool) (containerID string) {
	b.Helper()
	key := fmt.Sprintf("model-%t", network)
	must(b, c.create(b.Context(), key, network))
	sb := check.Value(c.Get(b.Context(), key))(b)
	return sb.ContainerID
}

// newBench starts the engines, and a server on each.
func newBench(b *testing.B) *bench {
	b.Helper()
	s := &bench{b: b, servers: map[string]*bermContender{}}
	engines := map[string]*testEngine{}
	for _, kind := range []string{"docker", "containerd"} {
		e := commonEngine(b, kind)
		c := &bermContender{kind: kind, engine: e, server: newServer(b, e, e.dir(b), testImage)}
		c.server.env = append(c.server.env, "BERM_SANDBOX_CLEANUP_INTERVAL=30s") // 30s is the default
		c.server.start(b)
		c.Client = c.server.client(b, nil)
		engines[kind], s.servers[kind] = e, c
	}
	s.all = []contender{s.servers["docker"], newDockerContender(b, engines["docker"], s.servers["docker"]), s.servers["containerd"], newContainerdContender(b, engines["containerd"], s.servers["containerd"])}
	return s
}

func (s *bench) key() string { return fmt.Sprintf("bench-%d", s.name.Add(1)) }

// took measures one call.
func took(f func()) time.Duration {
	began := time.Now()
	f()
	return time.Since(began)
}

// figures are the measurements of one contender.
type figures []time.Duration

func (f figures) at(q float64) float64 {
	sorted := slices.Sorted(slices.Values(f))
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)].Microseconds()) / 1000
}

func (f figures) String() string {
	return fmt.Sprintf("n=%-4d p50 %8.2f  p90 %8.2f  p99 %8.2f ms", len(f), f.at(.5), f.at(.9), f.at(.99))
}

// rounds measures the contenders in turns. Before and after aren't measured.
func (s *bench) rounds(b *testing.B, before, measured, after func(c contender, key string) error) {
	b.Helper()
	ways := make([]way, 0, len(s.all))
	for _, c := range s.all {
		ways = append(ways, way{c.String(), func() (spent time.Duration, err error) {
			key := s.key()
			if before != nil {
				err = before(c, key)
			}
			if err == nil {
				spent, err = rested(whole(func() error { return measured(c, key) }))
			}
			if err == nil && after != nil {
				err = after(c, key)
			}
			return spent, err
		}})
	}
	turns(b, ways, noUnit)
}

// BenchmarkBackends measures calls of the REST API over both engines against the same
// work done with the engines' own clients, interleaved, in one run.
func BenchmarkBackends(b *testing.B) {
	s := newBench(b)
	ctx := b.Context()
	remove := func(c contender, key string) error { return c.remove(ctx, key) }
	for _, network := range []bool{false, true} {
		create := func(c contender, key string) error { return c.create(ctx, key, network) }
		use := func(c contender, key string) error {
			return errors.Join(c.create(ctx, key, network), c.exec(ctx, key))
		}
		name := map[bool]string{false: ", network off", true: ", network on"}[network]
		b.Run("cold create to first output"+name, func(b *testing.B) { s.rounds(b, nil, use, remove) })
		b.Run("delete"+name, func(b *testing.B) { s.rounds(b, create, remove, nil) })
	}
	b.Run("8 in parallel", func(b *testing.B) {
		s.rounds(b, nil, func(c contender, key string) error {
			return parallel(8, func(i int) error {
				key := fmt.Sprintf("%s-%d", key, i)
				return errors.Join(c.create(ctx, key, false), c.exec(ctx, key))
			})
		}, func(c contender, key string) error {
			return parallel(8, func(i int) error { return c.remove(ctx, fmt.Sprintf("%s-%d", key, i)) })
		})
	})
}

// parallel has n do at once.
func parallel(n int, do func(i int) error) error {
	var g errgroup.Group
	for i := range n {
		g.Go(func() error { return do(i) })
	}
	return g.Wait()
}

// BenchmarkServer measures what a server does by itself.
func BenchmarkServer(b *testing.B) {
	s := newBench(b)
	ctx := b.Context()
	for _, kind := range []string{"docker", "containerd"} {
		berm := s.servers[kind]
		b.Run("reuse/"+kind, func(b *testing.B) {
			must(s.b, berm.create(ctx, "reuse", false))
			var ours figures
			for b.Loop() {
				for range 50 {
					ours = append(ours, took(func() { must(s.b, berm.create(ctx, "reuse", false)) }))
				}
			}
			must(s.b, berm.remove(ctx, "reuse"))
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(ours.at(.5), "p50-ms")
			b.Log(ours)
		})
		b.Run("idle memory/"+kind, func(b *testing.B) {
			for _, key := range []string{"model-true", "model-false"} {
				must(s.b, berm.remove(ctx, key))
			}
			time.Sleep(30*time.Second + 5*time.Second)
			var resident float64
			for b.Loop() {
				resident = float64(weigh(b, berm.server.Process.Pid).rss) / 1024
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(resident, "MiB")
		})
	}
}
