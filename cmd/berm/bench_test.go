package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	docker "github.com/docker/docker/client"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// bench is a real server and the same engine's own client, side by side.
type bench struct {
	b      *testing.B
	berm   *client.Client
	raw    *docker.Client
	server *demoServer
	name   int
}

// newBench starts a private engine and the binary that BERM_BIN names, or else this
// test binary, whose idle memory says nothing.
func newBench(b *testing.B) *bench {
	b.Helper()
	engine.Require(b, "docker")
	goruntime.LockOSThread() // the server dies with the thread that starts it
	b.Cleanup(goruntime.UnlockOSThread)
	d, err := engine.StartDocker(b.Context(), engine.Options{})
	if err != nil {
		engine.Lacking(b, "docker", err)
	}
	b.Cleanup(func() {
		if err := d.Close(); err != nil {
			b.Error(err)
		}
	})
	if err := d.ImportBusybox(b.Context(), testImage); err != nil {
		b.Fatal(err)
	}
	s := &bench{b: b, server: newDemoServer(b.TempDir(), demoOptions{kind: "docker", address: d.Host(), image: testImage, listen: "127.0.0.1:0"})}
	b.Setenv("RUN_AS_BERM", "1")
	if bin := os.Getenv("BERM_BIN"); bin != "" {
		if s.server.binary, err = filepath.Abs(bin); err != nil {
			b.Fatal(err)
		}
	}
	s.server.env = append(s.server.env, "BERM_SANDBOX_CLEANUP_INTERVAL=30s") // the default
	b.Cleanup(s.server.stop)
	if err := s.server.start(b.Context()); err != nil {
		b.Fatalf("%v\n%s", err, s.server.logTail())
	}
	if s.berm, err = client.New(client.Options{BaseURL: s.server.url, Token: s.server.token, Retries: -1}); err != nil {
		b.Fatal(err)
	}
	if s.raw, err = docker.NewClientWithOpts(docker.WithHost(d.Host()), docker.WithAPIVersionNegotiation()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = s.raw.Close() })
	return s
}

func (s *bench) must(err error) {
	if err != nil {
		s.b.Helper()
		s.b.Fatal(err)
	}
}

func (s *bench) key() string {
	s.name++
	return fmt.Sprintf("bench-%d", s.name)
}

var echo = []string{"echo", "hi"}

func (s *bench) bermExec(ctx context.Context, key string) {
	res, err := s.berm.Exec(ctx, key, apitype.ExecRequest{Command: echo})
	s.must(err)
	if res.Stdout != "hi\n" {
		s.b.Fatalf("%+v", res)
	}
}

// rawExec is what an exec takes of anybody: its output and its exit code.
func (s *bench) rawExec(ctx context.Context, id string) {
	made, err := s.raw.ContainerExecCreate(ctx, id, container.ExecOptions{Cmd: echo, AttachStdout: true, AttachStderr: true})
	s.must(err)
	conn, err := s.raw.ContainerExecAttach(ctx, made.ID, container.ExecAttachOptions{})
	s.must(err)
	defer conn.Close()
	var out bytes.Buffer
	_, err = stdcopy.StdCopy(&out, &out, conn.Reader)
	s.must(err)
	state, err := s.raw.ContainerExecInspect(ctx, made.ID)
	s.must(err)
	if out.String() != "hi\n" || state.ExitCode != 0 {
		s.b.Fatalf("%q, %+v", out.String(), state)
	}
}

// rawCreate makes a container just like the given one.
func (s *bench) rawCreate(ctx context.Context, like container.InspectResponse) string {
	made, err := s.raw.ContainerCreate(ctx, like.Config, like.HostConfig, nil, nil, s.key())
	s.must(err)
	s.must(s.raw.ContainerStart(ctx, made.ID, container.StartOptions{}))
	return made.ID
}

// took measures one call.
func took(f func()) time.Duration {
	began := time.Now()
	f()
	return time.Since(began)
}

// report prints medians and percentiles, ours against the engine's own.
func (s *bench) report(b *testing.B, raw, ours []time.Duration) {
	b.Helper()
	at := func(d []time.Duration, q float64) float64 {
		d = slices.Sorted(slices.Values(d))
		return float64(d[min(int(q*float64(len(d))), len(d)-1)].Microseconds()) / 1000
	}
	b.ReportMetric(0, "ns/op") // the sum of both, which says nothing
	line := fmt.Sprintf("n=%-4d berm p50 %.2f  p90 %.2f  p99 %.2f ms", len(ours), at(ours, .5), at(ours, .9), at(ours, .99))
	b.ReportMetric(at(ours, .5), "berm-p50-ms")
	if raw != nil {
		difference := make([]time.Duration, len(raw))
		for i := range raw {
			difference[i] = ours[i] - raw[i]
		}
		line += fmt.Sprintf("   engine p50 %.2f  p90 %.2f  p99 %.2f ms   ratio %.3f  median difference %.2f ms",
			at(raw, .5), at(raw, .9), at(raw, .99), at(ours, .5)/at(raw, .5), at(difference, .5))
		b.ReportMetric(at(raw, .5), "engine-p50-ms")
		b.ReportMetric(at(ours, .5)/at(raw, .5), "ratio")
	}
	b.Log(line)
}

// BenchmarkAgainstEngine measures calls of the REST API against the same work done
// with the engine's own client, interleaved, in one run.
func BenchmarkAgainstEngine(b *testing.B) {
	s := newBench(b)
	ctx := b.Context()
	_, err := s.berm.Create(ctx, "model", apitype.SandboxRequest{})
	s.must(err)
	sb, err := s.berm.Get(ctx, "model")
	s.must(err)
	model, err := s.raw.ContainerInspect(ctx, sb.ContainerID)
	s.must(err)
	// A stranger's: the server is not to take it for its own.
	for name := range model.Config.Labels {
		model.Config.Labels[name+".copy"] = model.Config.Labels[name]
		delete(model.Config.Labels, name)
	}

	b.Run("cold create to first output", func(b *testing.B) {
		var raw, ours []time.Duration
		turns := []func(){
			func() {
				var id string
				raw = append(raw, took(func() { id = s.rawCreate(ctx, model); s.rawExec(ctx, id) }))
				s.must(s.raw.ContainerRemove(ctx, id, container.RemoveOptions{Force: true}))
			},
			func() {
				key := s.key()
				ours = append(ours, took(func() {
					_, err := s.berm.Create(ctx, key, apitype.SandboxRequest{})
					s.must(err)
					s.bermExec(ctx, key)
				}))
				_, err := s.berm.Delete(ctx, key)
				s.must(err)
			},
		}
		for b.Loop() {
			for _, turn := range turns {
				turn()
			}
			slices.Reverse(turns) // what one leaves the engine to do is not always the same one's burden
		}
		s.report(b, raw, ours)
	})
	b.Run("exec", func(b *testing.B) {
		id := s.rawCreate(ctx, model)
		defer func() { s.must(s.raw.ContainerRemove(ctx, id, container.RemoveOptions{Force: true})) }()
		var raw, ours []time.Duration
		for b.Loop() {
			raw = append(raw, took(func() { s.rawExec(ctx, id) }))
			ours = append(ours, took(func() { s.bermExec(ctx, "model") }))
		}
		s.report(b, raw, ours)
	})
	b.Run("reuse", func(b *testing.B) {
		var ours []time.Duration
		for b.Loop() {
			for range 50 {
				ours = append(ours, took(func() {
					_, err := s.berm.Create(ctx, "model", apitype.SandboxRequest{})
					s.must(err)
				}))
			}
		}
		s.report(b, nil, ours)
	})
	b.Run("idle memory", func(b *testing.B) {
		_, err := s.berm.Delete(ctx, "model")
		s.must(err)
		time.Sleep(5 * time.Second)
		var kib int
		for b.Loop() {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.server.cmd.Process.Pid))
			s.must(err)
			_, rss, _ := strings.Cut(string(status), "VmRSS:")
			kib, err = strconv.Atoi(strings.Fields(rss)[0])
			s.must(err)
		}
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(kib)/1024, "MiB")
		b.Logf("%.1f MiB resident", float64(kib)/1024)
	})
	b.Run("list of 500", func(b *testing.B) {
		const n = 500
		each := func(do func(key string)) {
			var wg sync.WaitGroup
			gate := make(chan struct{}, 8)
			for i := range n {
				gate <- struct{}{}
				wg.Go(func() { do(fmt.Sprintf("list-%d", i)); <-gate })
			}
			wg.Wait()
		}
		each(func(key string) {
			if _, err := s.berm.Create(ctx, key, apitype.SandboxRequest{}); err != nil {
				b.Error(err)
			}
		})
		mine := filters.NewArgs(filters.Arg("label", lifecycle.LabelOwner+"="+s.server.instance))
		var raw, ours []time.Duration
		for b.Loop() {
			raw = append(raw, took(func() {
				list, err := s.raw.ContainerList(ctx, container.ListOptions{All: true, Filters: mine})
				s.must(err)
				if len(list) != n {
					b.Fatalf("the engine lists %d", len(list))
				}
			}))
			ours = append(ours, took(func() {
				listed := 0
				for _, err := range s.berm.List(ctx, client.ListOptions{}) {
					s.must(err)
					listed++
				}
				if listed != n {
					b.Fatalf("berm lists %d", listed)
				}
			}))
		}
		each(func(key string) {
			if _, err := s.berm.Delete(ctx, key); err != nil {
				b.Error(err)
			}
		})
		s.report(b, raw, ours)
	})
}
