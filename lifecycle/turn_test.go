package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
)

func serialized(command ...string) lifecycle.ExecRequest {
	create := request("k")
	return lifecycle.ExecRequest{Tenant: "a", Key: "k", Create: &create, Command: command, Serialize: true, Timeout: ptr(int64(3))}
}

func TestSerialize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				res, err := w.Exec(context.Background(), serialized("sleep", "2"))
				if err != nil || !res.OK() || res.Duration != 2*time.Second {
					t.Errorf("%d: %+v, %v", i, res, err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait() // they come one after another
		}
		time.Sleep(time.Second)
		if res := w.exec("k", "true"); !res.OK() || time.Since(start) != time.Second {
			t.Errorf("a command that doesn't queue took until %s", time.Since(start))
		}
		wg.Wait()
		if !slices.IsSorted(order) || len(order) != 10 || time.Since(start) != 20*time.Second {
			t.Errorf("in the order %v, in %s", order, time.Since(start))
		}
	})
}

func TestSerializeFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		start := time.Now()
		req := lifecycle.StartRequest{ExecRequest: serialized("sleep", "2"), ID: "x"}
		w.begin(req)
		if e := w.begin(req); !e.Existing || time.Since(start) != 0 {
			t.Errorf("the same again, after %s: %+v", time.Since(start), e)
		}
		res, err := w.Exec(context.Background(), serialized("true"))
		if took := time.Since(start); err != nil || !res.OK() || took < 2*time.Second || took > 3*time.Second {
			t.Errorf("after %s: %+v, %v", took, res, err)
		}
		// One that is seen to its end makes way at once.
		req.ID = "y"
		w.begin(req)
		start = time.Now()
		s := w.attachExec("y", 0)
		go func() {
			if _, err := s.Next(); !errors.Is(err, io.EOF) {
				t.Errorf("the stream: %v", err)
			}
		}()
		if _, err := w.Exec(context.Background(), serialized("true")); err != nil || time.Since(start) != 2*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		// And so does one whose sandbox dies, which is made again.
		req.ID = "z"
		w.begin(req)
		w.fake.Die(w.fake.Containers()[0].ID)
		if res, err := w.Exec(context.Background(), serialized("true")); err != nil || !res.Recreated {
			t.Errorf("%+v, %v", res, err)
		}
		_ = s.Close()
	})
}

func TestSerializeQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		w.begin(lifecycle.StartRequest{ExecRequest: serialized("sleep", "2"), ID: "x"})
		done := make(chan error, 64)
		leaving, cancel := context.WithCancel(context.Background())
		for i := range cap(done) {
			ctx := context.Background()
			if i == 0 {
				ctx = leaving
			}
			go func() { done <- second(w.Exec(ctx, serialized("true"))) }()
			synctest.Wait()
		}
		var full *lifecycle.CapacityError
		if _, err := w.Exec(context.Background(), serialized("true")); !errors.As(err, &full) || full.RetryAfter == 0 {
			t.Errorf("one too many that waits: %v", err)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("one that leaves: %v", err)
		}
		for range cap(done) - 1 {
			if err := <-done; err != nil {
				t.Errorf("one behind it: %v", err)
			}
		}
		if w.Turn("a", "k") {
			t.Error("the turn is still taken")
		}
		w.begin(lifecycle.StartRequest{ExecRequest: serialized("sleep", "2"), ID: "y"})
		go func() { done <- second(w.Exec(context.Background(), serialized("true"))) }()
		synctest.Wait()
		w.stop()
		if err := <-done; !errdefs.IsUnavailable(err) {
			t.Errorf("one that waits at the end: %v", err)
		}
		_ = w.fake.Remove(context.Background(), w.fake.Containers()[0].ID)
	})
}

// Turns are never lost or given twice.
func TestSerializeStorm(t *testing.T) {
	w := newWorld(t, setup{})
	w.create(request("k"))
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i%7)*time.Millisecond+time.Second*time.Duration(i%2))
			defer cancel()
			if i%3 == 0 {
				if e, err := w.start(ctx, lifecycle.StartRequest{ExecRequest: serialized("true"), ID: fmt.Sprint(i)}); err == nil {
					_, _ = w.Kill(context.Background(), execRef("a", "k", e.ID))
				}
				return
			}
			_, _ = w.Exec(ctx, serialized("true"))
		})
	}
	wg.Wait()
	w.eventually("all turns are over", func() bool { return !w.Turn("a", "k") })
	if n := w.Status(context.Background(), "a").RunningCommands; n != 0 {
		t.Errorf("%d commands run", n)
	}
}
