package serve

import (
	"context"
	"errors"
	"time"
)

// stuckGrace is how much longer a look at something may take to say itself that it is stuck.
const stuckGrace = 500 * time.Millisecond

var ErrStuck = errors.New("no answer in time")

// Within has a look at something take no longer than a limit. One that is stuck in the
// kernel, as on a file system whose server is away, ends with the process.
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
	case o := <-done: // who heeds its context can say more
		return o.value, o.err
	case <-time.After(stuckGrace):
		var none T
		return none, ErrStuck
	}
}

// Try is Within for what has no value.
func Try(ctx context.Context, limit time.Duration, look func(context.Context) error) error {
	_, err := Within(ctx, limit, func(ctx context.Context) (struct{}, error) { return struct{}{}, look(ctx) })
	return err
}
