package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func loadCases() []contractCase {
	return []contractCase{
		{"load/much output", testMuchOutput},
		{"load/many at once", testManyAtOnce},
		{"load/nothing left open", testNothingLeftOpen},
	}
}

// zeros are many bytes that take no memory.
func zeros(n int64) io.Reader { return io.LimitReader(zeroReader{}, n) }

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// meter counts what is written, and measures the heap as it goes by.
type meter struct {
	bytes int64
	next  int64
	peak  uint64
}

func (m *meter) Write(p []byte) (int, error) {
	m.bytes += int64(len(p))
	if m.bytes >= m.next {
		m.next += 4 << 20
		m.peak = max(m.peak, heap())
	}
	return len(p), nil
}

func heap() uint64 {
	var stats goruntime.MemStats
	goruntime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

func testMuchOutput(t *testing.T, b *fixture) {
	const size = 64 << 20
	c := b.create(t, b.spec())
	goruntime.GC()
	before := heap()
	var out meter
	result, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"cat"}, Stdin: zeros(size), Stdout: &out})
	if err != nil || result.ExitCode != 0 || out.bytes != size {
		t.Errorf("%d of %d bytes, %+v, %v", out.bytes, size, result, err)
	}
	if grown := int64(out.peak) - int64(before); grown > size/2 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}

func testManyAtOnce(t *testing.T, b *fixture) {
	const n = 20
	ids := make([]string, n)
	slots := make(chan struct{}, 8) // an engine starts few at a time anyway
	var wg sync.WaitGroup
	for i := range n {
		spec := b.spec()
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			c, err := b.rt.Create(b.ctx, spec)
			if err != nil {
				t.Errorf("create: %v", err)
				return
			}
			ids[i] = c.ID
			out := newSignalWriter(fmt.Sprintf("number %d\n", i))
			if _, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"echo", "number", fmt.Sprint(i)}, Stdout: out}); err != nil || !out.done {
				t.Errorf("exec in number %d: %q, %v", i, out.buf, err)
			}
		})
	}
	wg.Wait()
	if cs := b.list(t); len(cs) != n {
		t.Errorf("%d are listed, want %d", len(cs), n)
	}
	if distinct := slices.Compact(slices.Sorted(slices.Values(ids))); len(distinct) != n {
		t.Errorf("%d distinct ids, want %d", len(distinct), n)
	}
	for _, id := range ids {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if err := b.rt.Remove(b.ctx, id); err != nil {
				t.Errorf("remove: %v", err)
			}
		})
	}
	wg.Wait()
	if cs := b.list(t); len(cs) != 0 {
		t.Errorf("%d are left", len(cs))
	}
}

// testNothingLeftOpen counts goroutines and open files before and after some work.
func testNothingLeftOpen(t *testing.T, b *fixture) {
	use := func() {
		c := b.create(t, b.spec())
		b.output(t, c.ID, "true")
		ctx, cancel := context.WithCancel(b.ctx)
		command := b.underWay(ctx, t, c.ID)
		cancel()
		class(t, "exec", <-command, errdefs.IsCanceled, "Canceled")
		_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"no-such-program"}, Stdin: zeros(1 << 20)})
		if err != nil {
			t.Errorf("exec of a program that isn't there: %v", err)
		}
		soon := func() context.Context {
			ctx, cancel := context.WithTimeout(b.ctx, 50*time.Millisecond)
			t.Cleanup(cancel)
			return ctx
		}
		err = b.rt.Logs(soon(), c.ID, runtime.LogOptions{Follow: true}, nil, nil)
		if err != nil && !errdefs.IsDeadlineExceeded(err) { // a slow engine doesn't come to following
			t.Errorf("logs: %v", err)
		}
		if err := b.rt.Watch(soon(), b.labels, nil, func(runtime.Event) {}); err != nil {
			t.Errorf("watch: %v", err)
		}
		if _, err := b.rt.Stats(b.ctx, c.ID); err != nil {
			t.Errorf("stats: %v", err)
		}
		failing := b.spec()
		failing.Network = b.name + "-missing"
		if _, err := b.rt.Create(b.ctx, failing); err == nil {
			t.Error("a network that isn't there was taken")
		}
		must(t, b.rt.Remove(b.ctx, c.ID))
	}
	use() // connections that are kept open have goroutines
	goroutines, files := goruntime.NumGoroutine(), openFiles(t)
	for range 7 {
		use()
	}
	const kept = 6 // some more of these; less than one for each use
	b.await(t, "the goroutines to end", func() bool { return goruntime.NumGoroutine() <= goroutines+kept })
	b.await(t, "the files to be closed", func() bool { return openFiles(t) <= files+kept })
}

// openFiles counts this process' open files; 0 where they can't be counted.
func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return len(files)
}
