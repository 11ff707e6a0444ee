package runtime

import (
	"context"
	"errors"
	"io"
	goruntime "runtime"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Grace is how long a backend's call that changes something may outlive its caller's
// context, so that its answer isn't lost.
const Grace = 5 * time.Second

// Linger is for backends. It returns a context that ends after the timeout, or Grace after ctx.
func Linger(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	out, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(Grace, cancel) })
	return out, func() { stop(); cancel() }
}

// Classify is for backends. It gives the error of a call the class that Runtime promises.
// Ctx is the caller's own: an error of a context below it is Unavailable.
func Classify(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errdefs.IsCanceled(err), errdefs.IsDeadlineExceeded(err):
		if ctx.Err() != nil {
			return Ended(ctx)
		}
		return Unavailable(errors.New("the engine didn't answer in time"))
	case HasClass(err) && !errdefs.IsUnavailable(err):
		return err
	case errdefs.IsNotFound(err), errdefs.IsAlreadyExists(err), errdefs.IsInvalidArgument(err), errdefs.IsFailedPrecondition(err):
		return err
	case ctx.Err() != nil:
		return Ended(ctx)
	case errdefs.IsUnavailable(err), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return Unavailable(err)
	}
	return err
}

// OnThread runs f on a thread that f may change as it likes: the thread ends with f. It is
// never the process's first thread, which doesn't end, and which others see in /proc.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		goruntime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- OnThread(f)
			goruntime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}
