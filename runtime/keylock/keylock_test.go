package keylock

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
)

func TestLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Map[string]
		unlock, err := m.Lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		other, err := m.Lock(t.Context(), "b")
		if err != nil {
			t.Fatalf("another key: %v", err)
		}
		var order []int
		var tasks sync.WaitGroup
		for i := range 5 {
			tasks.Go(func() {
				unlock, err := m.Lock(t.Context(), "a")
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, i)
				unlock()
			})
			synctest.Wait()
		}
		if n := m.Waiting("a"); n != 5 {
			t.Errorf("%d wait, want 5", n)
		}
		if _, ok := m.TryLock("a"); ok {
			t.Error("TryLock acquired a lock that is held")
		}
		unlock()
		unlock() // a second call doesn't release another's lock
		tasks.Wait()
		other()
		for i, n := range order {
			if i != n {
				t.Fatalf("order %v, want first come first", order)
			}
		}
		if len(m.locks) != 0 {
			t.Errorf("%d locks are left", len(m.locks))
		}
	})
}

func TestLockCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Map[int]
		unlock, _ := m.TryLock(1)
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		failed := make(chan error)
		go func() {
			_, err := m.Lock(ctx, 1)
			failed <- err
		}()
		synctest.Wait()
		locked := make(chan struct{})
		go func() {
			unlock, err := m.Lock(t.Context(), 1)
			if err != nil {
				t.Error(err)
			} else {
				unlock()
			}
			close(locked)
		}()
		synctest.Wait()
		cancel(cause)
		if err := <-failed; !errors.Is(err, cause) {
			t.Errorf("canceled: %v, want the cause", err)
		}
		if _, err := m.Lock(ctx, 2); !errors.Is(err, cause) {
			t.Errorf("a free lock with an ended context: %v, want the cause", err)
		}
		unlock()
		<-locked
		if len(m.locks) != 0 {
			t.Errorf("%d locks are left", len(m.locks))
		}
	})
}

// TestLockCanceledAtItsTurn cancels as the lock is handed over: nobody may lose it.
func TestLockCanceledAtItsTurn(t *testing.T) {
	var m Map[int]
	for range 1000 {
		unlock, ok := m.TryLock(1)
		if !ok {
			t.Fatal("the lock was lost")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			if unlock, err := m.Lock(ctx, 1); err == nil {
				unlock()
			}
		}()
		go cancel()
		unlock()
		<-done
	}
}
