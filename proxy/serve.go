package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

const unixScheme = "unix://"

// CheckExposure refuses an address that is neither a unix socket nor a loopback address,
// unless there are tokens. The address has the form that Listen takes.
func CheckExposure(address string, tokens int) error {
	if tokens > 0 || strings.HasPrefix(address, unixScheme) {
		return nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("listen address %q: %w", address, err)
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("without a token, only a loopback address or a unix socket may be listened on, and %q is neither: configure a token, or listen on 127.0.0.1", address)
}

// Listen listens on "host:port" or "unix:///path". A unix socket has its mode as soon as it
// appears at its path. It replaces a socket on which no process listens any more.
func Listen(ctx context.Context, address string, mode fs.FileMode) (net.Listener, error) {
	return ListenOwned(ctx, address, mode, -1, -1)
}

// ListenOwned is Listen, but also sets the owner of a unix socket before the socket appears. A
// uid or gid of -1 leaves the user or the group as it is.
func ListenOwned(ctx context.Context, address string, mode fs.FileMode, uid, gid int) (net.Listener, error) {
	var lc net.ListenConfig
	path, ok := strings.CutPrefix(address, unixScheme)
	if !ok {
		return lc.Listen(ctx, "tcp", address)
	}
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("listen on %s: the path must be absolute", address)
	}
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("listen on %s: there is something else than a socket", address)
		}
		if c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path); err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("listen on %s: another process listens on it", address)
		}
	}
	// A boot removes directories like /run/berm.
	if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil && !errors.Is(err, fs.ErrExist) { //nolint:gosec // the socket has a mode
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	// The socket is made in a private directory, and moved once it has its owner and mode.
	dir, err := os.MkdirTemp(filepath.Dir(path), ".berm-*")
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	tmp := filepath.Join(dir, "s")
	l, err := lc.Listen(ctx, "unix", tmp)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := errors.Join(os.Chown(tmp, uid, gid), os.Chmod(tmp, mode), os.Rename(tmp, path)); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return &unixListener{Listener: l, path: path}, nil
}

// unixListener removes its socket when it closes.
type unixListener struct {
	net.Listener
	path string
	once sync.Once
}

// Addr returns the path to which the socket was moved, not the one where it was created.
func (l *unixListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

func (l *unixListener) Close() error {
	l.once.Do(func() { _ = os.Remove(l.path) })
	return l.Listener.Close()
}

// ErrGoingDown is the cause with which a request's context ends when the server does.
var ErrGoingDown = errors.New("the server is going down")

// lastWords is how long handlers have to answer and to clean up, once the end of the drain has
// cancelled their requests.
const lastWords = 5 * time.Second

// ServeOptions configure Serve.
type ServeOptions struct {
	DrainTimeout time.Duration // for requests in flight once ctx has ended; 0 is 30 s
	Logger       *slog.Logger  // nil discards
	MaxConns     int           // of one client at a time: a user on a unix socket, else an address; 0 is 2,048
	OneClient    bool          // all connections count as those of one client
	// ConnContext adds to the context of a connection's requests. Nil adds nothing.
	ConnContext func(ctx context.Context, c net.Conn) context.Context
}

// Serve answers requests on l until ctx ends, and then drains: it accepts no more requests
// and waits for those in flight, hijacked connections included. At the end of the drain
// timeout it cancels the contexts of the remaining requests with ErrGoingDown. A few seconds
// later it closes their connections. Serve closes l.
func Serve(ctx context.Context, l net.Listener, h http.Handler, opts ServeOptions) error {
	opts.Logger = cmp.Or(opts.Logger, slog.New(slog.DiscardHandler))
	opts.DrainTimeout = cmp.Or(opts.DrainTimeout, 30*time.Second)
	clients := &clients{most: cmp.Or(opts.MaxConns, maxConns), one: opts.OneClient, log: opts.Logger, conns: map[string]int{}}
	base, stop := context.WithCancelCause(context.WithValue(context.WithoutCancel(ctx), drainKey{}, ctx))
	defer stop(nil)
	var handlers sync.WaitGroup
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			handlers.Add(1)
			defer handlers.Done()
			defer clients.after(r)
			h.ServeHTTP(w, r)
		}),
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       clients.enter(opts.ConnContext),
		ConnState:         clients.changed,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		// net/http would answer OPTIONS * itself, without authentication.
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     slog.NewLogLogger(opts.Logger.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(base, opts.DrainTimeout)
	defer cancel()
	err := srv.Shutdown(grace)
	if err == nil {
		err = wait(grace, &handlers) // Shutdown doesn't wait for hijacked connections
	}
	if err != nil {
		opts.Logger.WarnContext(ctx, "requests_broken_off", "error", err.Error())
		stop(ErrGoingDown)
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWords)
		defer cancel()
		_ = wait(last, &handlers)
		_ = srv.Shutdown(last) // lets the last answers leave
		err = srv.Close()
	}
	return errors.Join(err, notClosed(<-served))
}

// maxConns is how many connections a client may have. Each takes some 20 KiB.
const maxConns = 2048

// clients counts the connections of each client, hijacked ones included.
type clients struct {
	most int
	one  bool // all are one client
	log  *slog.Logger

	mu    sync.Mutex
	conns map[string]int
	slots sync.Map // *connSlot by net.Conn
}

// connSlot is a connection's place among those of its client.
type connSlot struct {
	client string
	taken  atomic.Bool // hijacked; the connection ends with its handler
}

type slotKey struct{}

// enter counts a connection, and closes it if its client has too many.
func (c *clients) enter(next func(context.Context, net.Conn) context.Context) func(context.Context, net.Conn) context.Context {
	return func(ctx context.Context, conn net.Conn) context.Context {
		s := &connSlot{client: "all"}
		if !c.one {
			s.client = clientOf(conn)
		}
		c.mu.Lock()
		c.conns[s.client]++
		n := c.conns[s.client]
		c.mu.Unlock()
		c.slots.Store(conn, s)
		if n > c.most {
			_ = conn.Close()
		}
		if n == c.most+1 { // further ones aren't logged
			c.log.WarnContext(ctx, "too_many_connections", "client", s.client, "max", c.most)
		}
		if ctx = context.WithValue(ctx, slotKey{}, s); next != nil {
			ctx = next(ctx, conn)
		}
		return ctx
	}
}

func (c *clients) changed(conn net.Conn, state http.ConnState) {
	s, _ := c.slots.Load(conn)
	slot, ok := s.(*connSlot)
	if !ok || state != http.StateClosed && state != http.StateHijacked {
		return
	}
	c.slots.Delete(conn)
	if state == http.StateHijacked {
		slot.taken.Store(true)
		return
	}
	c.leave(slot)
}

// after gives back the slot of the request's connection if the handler hijacked it.
func (c *clients) after(r *http.Request) {
	if s, ok := r.Context().Value(slotKey{}).(*connSlot); ok && s.taken.Load() {
		c.leave(s)
	}
}

func (c *clients) leave(s *connSlot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conns[s.client]--; c.conns[s.client] == 0 {
		delete(c.conns, s.client)
	}
}

// clientOf returns the client of a connection: a user on a unix socket, or else an address.
func clientOf(conn net.Conn) string {
	if cred, ok := PeerOf(conn); ok {
		return "uid " + strconv.FormatUint(uint64(cred.Uid), 10)
	}
	host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		return conn.RemoteAddr().String()
	}
	return host
}

// PeerOf returns the kernel's record of the process at the other end of a unix socket.
func PeerOf(conn net.Conn) (cred unix.Ucred, ok bool) {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return cred, false
	}
	cred, err := runtime.PeerOf(u)
	return cred, err == nil
}

// wait waits for a group until ctx ends. Its goroutine stays until the group is done.
func wait(ctx context.Context, g *sync.WaitGroup) error {
	done := make(chan struct{})
	go func() {
		g.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// notClosed returns nil for the error that http.Server.Serve returns after every shutdown.
func notClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

type drainKey struct{}

// UntilDrain derives a context that also ends when the server begins to drain, with
// ErrGoingDown as the cause. Long streams use it so that they don't delay the drain.
func UntilDrain(ctx context.Context) (context.Context, context.CancelFunc) {
	out, cancel := context.WithCancelCause(ctx)
	stop := func() bool { return true }
	if drain, ok := ctx.Value(drainKey{}).(context.Context); ok {
		stop = context.AfterFunc(drain, func() { cancel(ErrGoingDown) })
	}
	return out, func() { stop(); cancel(nil) }
}

// Draining reports whether the server of a request has begun to drain.
func Draining(ctx context.Context) bool {
	drain, ok := ctx.Value(drainKey{}).(context.Context)
	return ok && drain.Err() != nil
}

// GoingDown reports whether a context ended because the server goes down.
func GoingDown(ctx context.Context) bool { return errors.Is(context.Cause(ctx), ErrGoingDown) }

// Explained wraps err with ErrGoingDown if ctx ended because the server goes down.
func Explained(ctx context.Context, err error) error {
	if err != nil && GoingDown(ctx) {
		return fmt.Errorf("%w: %w", ErrGoingDown, err)
	}
	return err
}
