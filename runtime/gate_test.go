package runtime

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// starting is a command that is settled when its channel is closed.
func starting(done chan struct{}) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func enter(t *testing.T, g *Gates, settled func(context.Context) error) (leave func()) {
	t.Helper()
	leave, err := g.Enter(t.Context(), "c", settled)
	if err != nil {
		t.Fatal(err)
	}
	return leave
}

func TestGates(t *testing.T) {
	const later = time.Minute
	for _, tt := range []struct {
		name string
		run  func(t *testing.T, g *Gates)
		took time.Duration
	}{
		{"nobody is in", func(t *testing.T, g *Gates) {
			open, err := g.Close(t.Context(), "c")
			if err != nil {
				t.Fatal(err)
			}
			open()
		}, 0},
		{"waits for a start", func(t *testing.T, g *Gates) {
			done := make(chan struct{})
			defer enter(t, g, starting(done))()
			time.AfterFunc(later, func() { close(done) })
			open, err := g.Close(t.Context(), "c")
			if err != nil {
				t.Fatal(err)
			}
			open()
		}, later},
		{"waits for one that leaves", func(t *testing.T, g *Gates) {
			time.AfterFunc(later, enter(t, g, starting(nil)))
			open, err := g.Close(t.Context(), "c")
			if err != nil {
				t.Fatal(err)
			}
			open()
		}, later},
		{"gives up", func(t *testing.T, g *Gates) {
			defer enter(t, g, starting(nil))()
			ctx, cancel := context.WithTimeout(t.Context(), later)
			defer cancel()
			if _, err := g.Close(ctx, "c"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error %v", err)
			}
			enter(t, g, starting(nil))() // it is open again
		}, later},
		{"keeps commands out", func(t *testing.T, g *Gates) {
			open, err := g.Close(t.Context(), "c")
			if err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(later, open)
			enter(t, g, starting(nil))()
		}, later},
		{"keeps another pause out", func(t *testing.T, g *Gates) {
			open, err := g.Close(t.Context(), "c")
			if err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(later, open)
			if open, err = g.Close(t.Context(), "c"); err != nil {
				t.Fatal(err)
			}
			open()
		}, later},
		{"a command gives up", func(t *testing.T, g *Gates) {
			open, err := g.Close(t.Context(), "c")
			if err != nil {
				t.Fatal(err)
			}
			defer open()
			ctx, cancel := context.WithTimeout(t.Context(), later)
			defer cancel()
			if _, err := g.Enter(ctx, "c", starting(nil)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error %v", err)
			}
		}, later},
		{"other containers' are open", func(t *testing.T, g *Gates) {
			open, err := g.Close(t.Context(), "other")
			if err != nil {
				t.Fatal(err)
			}
			defer open()
			enter(t, g, starting(nil))()
		}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var g Gates
				begun := time.Now()
				tt.run(t, &g)
				if took := time.Since(begun); took != tt.took {
					t.Errorf("took %s, want %s", took, tt.took)
				}
				if len(g.m) != 0 {
					t.Errorf("%d gates are left", len(g.m))
				}
			})
		})
	}
}
