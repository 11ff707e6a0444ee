package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	sdnotify "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
)

// passedSockets are listeners that systemd has passed to this process, by their address. The
// address of a TCP listener is host:port.
type passedSockets map[string]net.Listener

// takeSockets takes the sockets that systemd has passed, and returns the configuration with their
// addresses. Child processes don't inherit the sockets.
func takeSockets(cfg *config.Config) (passedSockets, *config.Config, error) {
	if pid := os.Getenv("LISTEN_PID"); os.Getenv("LISTEN_FDS") != "" && pid != strconv.Itoa(os.Getpid()) {
		return nil, nil, fmt.Errorf("LISTEN_FDS is of sockets for the process %q (LISTEN_PID), which isn't this one: what systemd starts has to become berm by exec; or start it without LISTEN_FDS", pid)
	}
	sockets, addresses := passedSockets{}, map[string]string{}
	var errs []error
	for _, f := range activation.Files(true) {
		l, address, err := listenerOf(f)
		_ = f.Close() // the listener has a descriptor of its own
		if err != nil {
			errs = append(errs, fmt.Errorf("the socket %s that systemd has passed: %w", f.Name(), err))
			continue
		}
		if addresses[f.Name()] != "" || sockets[address] != nil {
			errs = append(errs, fmt.Errorf("systemd has passed %s as %s, and another socket of that address or name; give each a .socket unit and a FileDescriptorName= of its own", address, f.Name()),
				l.Close())
			continue
		}
		sockets[address], addresses[f.Name()] = l, address
	}
	if err := errors.Join(errs...); err != nil {
		return nil, nil, errors.Join(err, sockets.Close())
	}
	bound, err := cfg.Bound(addresses)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("the sockets that systemd passes and the configuration don't go together:\n%w", err), sockets.Close())
	}
	return sockets, bound, nil
}

// Close closes all listeners. It leaves the files of unix sockets, which are systemd's.
func (s passedSockets) Close() error {
	for _, l := range s {
		_ = l.Close() // closed already if it was served
	}
	return nil
}

func listenerOf(f *os.File) (net.Listener, string, error) {
	if on, err := unix.GetsockoptInt(int(f.Fd()), unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || on == 0 {
		return nil, "", errors.New("it doesn't listen for connections; Accept=yes isn't supported")
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, "", err
	}
	switch address := l.Addr().String(); l.Addr().Network() {
	case "tcp":
		return l, address, nil
	case "unix":
		return l, "unix://" + address, nil
	default:
		return nil, "", errors.Join(fmt.Errorf("want a stream socket of TCP or unix, not %s", l.Addr().Network()), l.Close())
	}
}

// notifyTimeout bounds a message to systemd, which may be busy.
const notifyTimeout = time.Second

// notifier sends the server's state to systemd, if systemd asks for it.
type notifier struct {
	conn  *net.UnixConn // nil: systemd doesn't ask for messages
	every time.Duration // timeout of systemd's watchdog; 0 is none
	log   *slog.Logger
}

// newNotifier returns a notifier for the variables of the environment. It unsets them, so that no
// child process sends messages in place of this one.
func newNotifier(log *slog.Logger) (*notifier, error) {
	every, err := sdnotify.SdWatchdogEnabled(true)
	if err != nil {
		return nil, fmt.Errorf("systemd's watchdog: %w", err)
	}
	n := &notifier{every: every, log: log}
	path := os.Getenv("NOTIFY_SOCKET")
	if err := os.Unsetenv("NOTIFY_SOCKET"); err != nil || path == "" {
		return n, err
	}
	n.conn, err = net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	return n, nil
}

// Close ends it.
func (n *notifier) Close() error {
	if n.conn == nil {
		return nil
	}
	return n.conn.Close()
}

// say sends assignments in the format of sd_notify(3).
func (n *notifier) say(ctx context.Context, lines ...string) {
	if n.conn == nil {
		return
	}
	err := n.conn.SetWriteDeadline(time.Now().Add(notifyTimeout))
	if err == nil {
		_, err = io.WriteString(n.conn, strings.Join(lines, "\n"))
	}
	if err != nil {
		n.log.WarnContext(ctx, "systemd_not_told", "error", err.Error())
	}
}

// reloading tells systemd that the server reloads while f runs.
func (n *notifier) reloading(ctx context.Context, f func()) {
	n.say(ctx, sdnotify.SdNotifyReloading, strings.TrimSpace(sdnotify.SdNotifyMonotonicUsec()))
	f()
	n.say(ctx, sdnotify.SdNotifyReady)
}

// Run tells systemd that the server is ready. It sends watchdog messages as long as works succeeds.
// When ctx ends, it tells systemd that the server stops.
func (n *notifier) Run(ctx context.Context, status string, works func(context.Context) error) error {
	n.say(ctx, sdnotify.SdNotifyReady, "STATUS="+status)
	defer n.say(ctx, sdnotify.SdNotifyStopping, "STATUS=letting what is in flight finish")
	if n.conn == nil || n.every == 0 {
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(n.every / 3) // one may fail
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := Try(ctx, n.every/3, works); err == nil {
			n.say(ctx, sdnotify.SdNotifyWatchdog)
		} else if ctx.Err() == nil {
			n.log.ErrorContext(ctx, "server_stuck", "error", err.Error())
		}
	}
}
