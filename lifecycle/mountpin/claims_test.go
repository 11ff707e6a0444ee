package mountpin

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/bermhq/berm/policy"
)

func TestClaimsUse(t *testing.T) {
	use := func(id string, archive bool, volume string, writable bool, binds ...string) *Use {
		u := &Use{ID: id, Archive: archive, Volumes: map[string]bool{}}
		if volume != "" {
			u.Volumes[volume] = writable
		}
		for _, b := range binds {
			source, mode, _ := strings.Cut(b, ":")
			u.Binds = append(u.Binds, policy.Mount{Source: source, Mode: mode})
		}
		return u
	}
	alone := func(u *Use) *Use { u.Alone = true; return u }
	for name, tt := range map[string]struct {
		first, second *Use
		waits         bool
	}{
		"a start that is alone":    {use("a", false, "v", true), alone(use("b", false, "v", false)), true},
		"beside one that is alone": {alone(use("a", false, "", false, "/x:rw")), use("b", false, "", false, "/x/y:ro"), true},
		"alone with its mounts":    {use("a", false, "v", true), alone(use("b", false, "w", true)), false},
		"start of the same":        {use("a", true, "", false), use("a", false, "", false), true},
		"archive of what starts":   {use("a", false, "", false), use("a", true, "", false), true},
		"two archives of one":      {use("a", true, "v", true), use("a", true, "v", true), false},
		"two starts":               {use("a", false, "v", true), use("b", false, "v", true), false},
		"start that can write":     {use("a", true, "v", false), use("b", false, "v", true), true},
		"start that can read":      {use("a", true, "v", false), use("b", false, "v", false), false},
		"other volumes":            {use("a", true, "v", true), use("b", false, "w", true), false},
		"the same bind":            {use("a", true, "", false, "/x:ro"), use("b", false, "", false, "/x:rw"), true},
		"a bind above":             {use("a", true, "", false, "/x/y:ro"), use("b", false, "", false, "/x:rw"), true},
		"a bind below":             {use("a", true, "", false, "/x:ro"), use("b", false, "", false, "/x/y:rw"), true},
		"a bind beside":            {use("a", true, "", false, "/x:rw"), use("b", false, "", false, "/xy:rw"), false},
		"a bind that is read-only": {use("a", true, "", false, "/x:ro"), use("b", false, "", false, "/x:ro"), false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var s Claims
				leave, err := s.Use(t.Context(), tt.first)
				must(t, err)
				var entered atomic.Bool
				done := make(chan struct{})
				go func() {
					defer close(done)
					leave, err := s.Use(t.Context(), tt.second)
					if err != nil {
						t.Error(err)
						return
					}
					entered.Store(true)
					leave()
				}()
				synctest.Wait()
				if entered.Load() == tt.waits {
					t.Errorf("it waits: %v", !tt.waits)
				}
				leave()
				<-done
				if len(s.uses) != 0 {
					t.Errorf("%d are held", len(s.uses))
				}
				ctx, cancel := context.WithCancel(t.Context())
				leave, _ = s.Use(ctx, tt.first)
				defer leave()
				if cancel(); tt.waits {
					if _, err := s.Use(ctx, tt.second); err == nil {
						t.Error("it doesn't give up")
					}
				}
			})
		})
	}
}

// Nobody passes by one that waits, so that archive calls can't keep a start waiting forever.
func TestClaimsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Claims
		use := func(u *Use) (entered chan func()) {
			entered = make(chan func(), 1)
			go func() {
				if leave, err := c.Use(t.Context(), u); err == nil {
					entered <- leave
				}
			}()
			synctest.Wait()
			return entered
		}
		first := use(&Use{ID: "a", Archive: true})
		start := use(&Use{ID: "a"})
		second := use(&Use{ID: "a", Archive: true})
		if len(first) != 1 || len(start) != 0 || len(second) != 0 {
			t.Fatalf("entered: %d, %d, %d", len(first), len(start), len(second))
		}
		(<-first)()
		if synctest.Wait(); len(start) != 1 || len(second) != 0 {
			t.Fatalf("entered next: %d, %d", len(start), len(second))
		}
		(<-start)()
		(<-second)()
	})
}
