package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	goruntime "runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/singleflight"
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

// OnThread runs f on a thread that f may change as it likes: the thread ends with f. OnThread
// never uses the process's first thread, which wouldn't end, and which /proc shows as the
// process.
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

// Poll calls done at once, and again at each interval, until it returns true or an error.
// If ctx ends first, the error is ctx.Err().
func Poll(ctx context.Context, interval time.Duration, done func() (bool, error)) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// TryFlock takes the flock of a file, as unix.LOCK_SH or unix.LOCK_EX says. It returns false
// if another open file has it.
func TryFlock(f *os.File, how int) (bool, error) {
	err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return false, nil
	}
	return err == nil, err
}

// PeerOf returns the process at the other end of a unix socket, as the kernel says. Its pid is
// 0 for a process of a PID namespace that this one can't see into.
func PeerOf(conn *net.UnixConn) (unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return unix.Ucred{}, err
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, failed); err != nil {
		return unix.Ucred{}, err
	}
	return *cred, nil
}

// Together runs f once for all callers that ask for the same key of a group at the same
// time. F runs to its end, or to the timeout, even if all callers leave. The error of a
// caller whose ctx ends first is ctx.Err().
func Together[T any](
	ctx context.Context, group *singleflight.Group, key string, timeout time.Duration, f func(context.Context) (T, error),
) (T, error) {
	result := group.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		defer cancel()
		return f(ctx)
	})
	select {
	case r := <-result:
		return r.Val.(T), r.Err
	case <-ctx.Done():
		return *new(T), ctx.Err()
	}
}

// Bounds of a Cache.
const (
	maxCached      = 1000     // values
	maxCachedBytes = 64 << 10 // of one value
)

// Cache keeps values that never change, such as what an image's content says, so that they
// needn't be read again. The zero value is empty. It may be used by many goroutines at once.
type Cache[K comparable, V any] struct {
	mu     sync.Mutex
	values map[K]V
}

// Get returns the value of a key, if the cache has it.
func (c *Cache[K, V]) Get(key K) (V, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.values[key]
	return v, ok
}

// Put keeps a value, unless its size in bytes is too large. It empties a full cache first.
func (c *Cache[K, V]) Put(key K, value V, size int64) {
	if size > maxCachedBytes {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.values == nil || len(c.values) >= maxCached {
		c.values = map[K]V{}
	}
	c.values[key] = value
}

// HasLabels reports whether have has all labels of want. An empty value in want stands for
// any value.
func HasLabels(have, want map[string]string) bool {
	for name, value := range want {
		if got, ok := have[name]; !ok || value != "" && got != value {
			return false
		}
	}
	return true
}

// MergeEnv returns the variables of base and over, each "NAME=value". Of variables with the
// same name, it keeps the last.
func MergeEnv(base, over []string) []string {
	var out []string
	at := map[string]int{}
	for _, v := range slices.Concat(base, over) {
		name, _, _ := strings.Cut(v, "=")
		if i, ok := at[name]; ok {
			out[i] = v
			continue
		}
		at[name] = len(out)
		out = append(out, v)
	}
	return out
}

// Guard calls f, which reads what an engine or a container sends. It turns a panic into an
// error, and logs it.
func Guard(log *slog.Logger, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			log.Error("panic", "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return f()
}

// Interrupted returns the error of a program whose container ended first: a
// FailedPrecondition and ErrInterrupted.
func Interrupted(how string) error {
	return WithClass(errors.Join(errdefs.ErrFailedPrecondition, ErrInterrupted), fmt.Errorf("%w: it is %s", ErrInterrupted, how))
}
