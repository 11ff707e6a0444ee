package agent_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent"
	"github.com/bermhq/berm/runtime/containerd"
	"github.com/bermhq/berm/runtime/docker"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// BenchmarkExec measures commands in one sandbox: one after the other, 16 side by side,
// and one that prints much.
func BenchmarkExec(b *testing.B) {
	ctx := context.Background()
	r, _ := benchDocker(b)
	c, err := r.Create(ctx, runtime.Spec{Name: "bench", Image: testImage, Command: []string{"sleep", "100000"}})
	must(b, err)
	b.Cleanup(func() { _ = r.Remove(ctx, c.ID) })
	echo := func(b *testing.B) {
		res, err := r.Exec(ctx, c.ID, runtime.Exec{Command: []string{"echo", "hi"}, Stdout: io.Discard})
		if err != nil || res.ExitCode != 0 {
			b.Errorf("%+v, %v", res, err)
		}
	}
	echo(b)
	b.Run("echo", func(b *testing.B) {
		for b.Loop() {
			echo(b)
		}
	})
	b.Run("echo/16", func(b *testing.B) {
		b.SetParallelism(8) // of two cores
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				echo(b)
			}
		})
	})
	b.Run("output", func(b *testing.B) {
		const size = 256 << 20
		b.SetBytes(size)
		for b.Loop() {
			var n counter
			begun := time.Now()
			res, err := r.Exec(ctx, c.ID, runtime.Exec{Command: []string{"head", "-c", "268435456", "/dev/zero"}, Stdout: &n})
			if err != nil || n != size {
				b.Errorf("%+v, %v, %d bytes after %s", res, err, n, time.Since(begun))
			}
		}
	})
}

// benchDocker gives a Runtime on a private Docker, and the program's path.
func benchDocker(b *testing.B) (*agent.Runtime, string) {
	b.Helper()
	engine.Require(b, "docker")
	d, err := engine.StartDocker(context.Background(), engine.Options{})
	if err != nil {
		engine.Lacking(b, "docker", err)
	}
	b.Cleanup(func() { _ = d.Close() })
	program := benchProgram(b, d)
	backend, err := docker.New(docker.Options{Host: d.Host()})
	must(b, err)
	return wrap(b, backend, program, ""), program
}

// benchContainerd does so on containerd.
func benchContainerd(b *testing.B) (*agent.Runtime, string) {
	b.Helper()
	engine.Require(b, "containerd")
	c, err := engine.StartContainerd(context.Background(), engine.Options{})
	if err != nil {
		engine.Lacking(b, "containerd", err)
	}
	b.Cleanup(func() { _ = c.Close() })
	path := benchProgram(b, c)
	program, err := os.ReadFile(path)
	must(b, err)
	backend, err := containerd.New(containerd.Options{
		Address: c.Address(), Namespace: c.Namespace(), Root: c.Root(), Agent: program, CgroupParent: c.CgroupParent(), Netns: c.Netns(),
	})
	must(b, err)
	return wrap(b, backend, path, ""), path
}

func benchProgram(b *testing.B, e importer) string {
	b.Helper()
	must(b, e.ImportBusybox(context.Background(), testImage))
	program, err := engine.PutAgent(context.Background(), b.TempDir())
	must(b, err)
	return program
}

// place is a container, and how its program is reached.
type place struct {
	name string
	r    *agent.Runtime
	id   string
}

// BenchmarkReach measures the program reached by its socket against one that is reached
// by the input and output of an engine's exec, in turns: an operation from nothing, a
// line to a process there and back, and 64 MiB of its output.
func BenchmarkReach(b *testing.B) {
	var places []place
	for name, open := range map[string]func(*testing.B) (*agent.Runtime, string){"docker": benchDocker, "containerd": benchContainerd} {
		r, program := open(b)
		for how, a := range map[string]*runtime.Agent{"socket": nil, "stdio": {Program: program}} {
			c, err := r.Create(b.Context(), runtime.Spec{Name: "bench-" + how, Image: testImage, Command: []string{"sleep", "100000"}, Agent: a})
			must(b, err)
			b.Cleanup(func() { _ = r.Remove(context.Background(), c.ID) })
			places = append(places, place{name + "-" + how, r, c.ID})
		}
	}
	for _, m := range []struct {
		name    string
		measure func(place, *testing.B) time.Duration
	}{{"operation", place.operation}, {"line", place.line}, {"64 MiB", place.bulk}} {
		b.Run(m.name, func(b *testing.B) {
			took := map[string][]time.Duration{}
			for b.Loop() {
				for _, i := range rand.Perm(len(places)) {
					took[places[i].name] = append(took[places[i].name], m.measure(places[i], b))
				}
			}
			b.ReportMetric(0, "ns/op") // the sum of all
			for name, all := range took {
				slices.Sort(all)
				b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, name+"-p50-ms")
			}
		})
	}
}

func (p place) operation(b *testing.B) time.Duration {
	begun := time.Now()
	if err := p.r.File(b.Context(), p.id, runtime.FileOp{Verb: runtime.FileStat, Path: "/tmp"}, runtime.FileIO{}); err != nil {
		b.Fatal(p.name, err)
	}
	return time.Since(begun)
}

func (p place) line(b *testing.B) time.Duration {
	const lines = 20
	w, in := p.follow(b, "cat")
	begun := time.Now()
	for range lines {
		if _, err := io.WriteString(in, "line\n"); err != nil {
			b.Fatal(p.name, err)
		}
		if chunk, err := w.Next(); err != nil || string(chunk.Data) != "line\n" {
			b.Fatalf("%s: %q, %v", p.name, chunk.Data, err)
		}
	}
	took := time.Since(begun)
	p.leave(b, w, in)
	return took / lines
}

func (p place) bulk(b *testing.B) time.Duration {
	const size = 64 << 20
	w, in := p.follow(b, "read x; head -c "+strconv.Itoa(size)+" /dev/zero")
	begun, n := time.Now(), 0
	if _, err := io.WriteString(in, "\n"); err != nil {
		b.Fatal(p.name, err)
	}
	for n < size {
		chunk, err := w.Next()
		if err != nil {
			b.Fatalf("%s: after %d bytes: %v", p.name, n, err)
		}
		n += len(chunk.Data)
	}
	took := time.Since(begun)
	p.leave(b, w, in)
	return took
}

func (p place) follow(b *testing.B, script string) (runtime.Follower, runtime.Input) {
	_, w, err := p.r.Start(b.Context(), p.id, runtime.Process{
		ID: "p", Command: []string{"sh", "-c", script}, Stdin: true, Follow: &runtime.Follow{Lossless: true},
	})
	if err != nil {
		b.Fatal(p.name, err)
	}
	in, err := p.r.Input(b.Context(), p.id, "p")
	if err != nil {
		b.Fatal(p.name, err)
	}
	return w, in
}

func (p place) leave(b *testing.B, w runtime.Follower, in runtime.Input) {
	err := p.r.Kill(b.Context(), p.id, "p")
	for err == nil {
		_, err = w.Next()
	}
	if errors.Is(err, io.EOF) {
		err = errors.Join(w.Close(), in.Close(), p.r.Forget(b.Context(), p.id, "p"))
	}
	if err != nil {
		b.Fatal(p.name, err)
	}
}

// counter counts what is written.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
