package runtime

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

func TestFreeze(t *testing.T) {
	busy, other := errors.New("runc: unable to freeze: unknown"), errors.New("other")
	for name, tt := range map[string]struct {
		fails int
		with  error
		calls int
		err   error
	}{
		"at once":     {0, nil, 1, nil},
		"a busy host": {3, busy, 4, nil},
		"never":       {100, busy, maxFreezes, busy},
		"other":       {100, other, 1, other},
	} {
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			err := Freeze(t.Context(), func() error {
				if calls++; calls <= tt.fails {
					return tt.with
				}
				return nil
			})
			if calls != tt.calls || !errors.Is(err, tt.err) {
				t.Errorf("%s: %d calls, %v", name, calls, err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	calls := 0
	if err := Freeze(ctx, func() error { calls++; return busy }); calls != 1 || !errors.Is(err, busy) {
		t.Errorf("canceled: %d calls, %v", calls, err)
	}
}
