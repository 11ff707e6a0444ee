package agent_test

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/docker"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// BenchmarkExec measures commands in one sandbox: one after the other, 16 side by side,
// and one that prints much.
func BenchmarkExec(b *testing.B) {
	engine.Require(b, "docker")
	ctx := context.Background()
	d, err := engine.StartDocker(ctx, engine.Options{})
	if err != nil {
		engine.Lacking(b, "docker", err)
	}
	b.Cleanup(func() { _ = d.Close() })
	if err := d.ImportBusybox(ctx, testImage); err != nil {
		b.Fatal(err)
	}
	program, err := engine.PutAgent(ctx, b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	backend, err := docker.New(docker.Options{Host: d.Host()})
	if err != nil {
		b.Fatal(err)
	}
	r := wrap(b, backend, program, "")
	c, err := r.Create(ctx, runtime.Spec{Name: "bench", Image: testImage, Command: []string{"sleep", "100000"}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = r.Remove(ctx, c.ID) })
	echo := func(b *testing.B) {
		res, err := r.Exec(ctx, c.ID, runtime.Exec{Command: []string{"echo", "hi"}, Stdout: io.Discard})
		if err != nil || res.Path != runtime.PathAgent || res.ExitCode != 0 {
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
			if err != nil || res.Path != runtime.PathAgent || n != size {
				b.Errorf("%+v, %v, %d bytes after %s", res, err, n, time.Since(begun))
			}
		}
	})
}

// counter counts what is written.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
