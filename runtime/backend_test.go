package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestOnThread checks that nobody else runs on a thread that was changed.
func TestOnThread(t *testing.T) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	must(t, err)
	done := make(chan error)
	for range 50 {
		go func() { done <- OnThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) }) }()
	}
	for range 50 {
		must(t, <-done)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/mnt")
	must(t, err)
	deadline := time.Now().Add(10 * time.Second)
	for _, task := range tasks {
		for ns, err := os.Readlink(task); err == nil && ns != own; ns, err = os.Readlink(task) {
			if time.Now().After(deadline) {
				t.Fatalf("%s stays in another namespace", task)
			}
			time.Sleep(time.Millisecond) // threads take a moment to end
		}
	}
}

// TestTogether checks that f runs once for all callers, and that none of them ends it.
func TestTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var group singleflight.Group
		runs, goOn := 0, make(chan struct{})
		call := func(ctx context.Context, out chan<- error) {
			got, err := Together(ctx, &group, "key", time.Minute, func(ctx context.Context) (string, error) {
				runs++
				<-goOn
				return "done", ctx.Err()
			})
			if err == nil && got != "done" {
				err = fmt.Errorf("got %q", got)
			}
			out <- err
		}
		hasty, cancel := context.WithCancel(t.Context())
		first, second := make(chan error, 1), make(chan error, 1)
		go call(hasty, first)
		synctest.Wait()
		go call(t.Context(), second)
		synctest.Wait()
		cancel()
		if err := <-first; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		close(goOn)
		if err := <-second; err != nil || runs != 1 {
			t.Errorf("%v after %d runs", err, runs)
		}
	})
}

func TestCache(t *testing.T) {
	var c Cache[int, string]
	c.Put(-1, "large", maxCachedBytes+1)
	if _, ok := c.Get(-1); ok {
		t.Error("a large value is kept")
	}
	for i := range 2*maxCached + 1 {
		c.Put(i, "small", maxCachedBytes)
	}
	if len(c.values) > maxCached {
		t.Errorf("%d values", len(c.values))
	}
	if v, ok := c.Get(2 * maxCached); !ok || v != "small" {
		t.Errorf("the last one: %q, %t", v, ok)
	}
}

func TestGuard(t *testing.T) {
	var log strings.Builder
	err := Guard(slog.New(slog.NewTextHandler(&log, nil)), func() error { panic("bang") })
	if err == nil || !strings.Contains(err.Error(), "bang") || !strings.Contains(log.String(), "TestGuard") {
		t.Errorf("%v, logged %q", err, log.String())
	}
	if err := Guard(nil, func() error { return context.Canceled }); !errors.Is(err, context.Canceled) {
		t.Errorf("without a panic: %v", err)
	}
}

var must = check.Must // ends a test if a step of its own fails
