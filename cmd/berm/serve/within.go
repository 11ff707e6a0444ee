package serve

import (
	"context"
	"errors"
	"time"
)

// stuckGrace is how long a function may take to return after its context has ended.
const stuckGrace = 500 * time.Millisecond

// ErrStuck is the error of Within when nothing came back in time.
var ErrStuck = errors.New("no answer in time")

// Within calls look with a timeout. It returns ErrStuck if look doesn't return in time, as
// on a file system whose server is away; look then ends with the process.
func Within[T any](ctx context.Context, limit time.Duration, look func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		v, err := look(ctx)
		done <- outcome{v, err}
	}()
	select {
	case o := <-done:
		return o.value, o.err
	case <-ctx.Done():
	}
	select {
	case o := <-done: // its own error says more
		return o.value, o.err
	case <-time.After(stuckGrace):
		var none T
		return none, ErrStuck
	}
}

// Try is Within for a function without a value.
func Try(ctx context.Context, limit time.Duration, look func(context.Context) error) error {
	_, err := Within(ctx, limit, func(ctx context.Context) (struct{}, error) { return struct{}{}, look(ctx) })
	return err
}
