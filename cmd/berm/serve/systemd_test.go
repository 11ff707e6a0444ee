package serve

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestListenerOf(t *testing.T) {
	pair := check.Value(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))(t)
	defer func() { _ = unix.Close(pair[1]) }()
	packets := check.Value(net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unixpacket"}))(t)
	defer func() { _ = packets.Close() }()
	packetFile := check.Value(packets.File())(t)
	null := check.Value(os.Open(os.DevNull))(t)
	for want, f := range map[string]*os.File{
		"Accept=yes isn't supported": os.NewFile(uintptr(pair[0]), "connected"),
		"doesn't listen":             null,
		"want a stream socket":       packetFile,
	} {
		if _, _, err := listenerOf(f); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", f.Name(), err)
		}
		_ = f.Close()
	}
}

// No child takes itself for the one that sockets were passed to.
func TestSocketsAreTakenOnce(t *testing.T) {
	t.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()))
	t.Setenv("LISTEN_FDS", "0")
	t.Setenv("LISTEN_FDNAMES", "http")
	sockets, cfg, err := takeSockets(config.Default())
	if err != nil || len(sockets) != 0 || cfg.HTTP.Listen != config.Default().HTTP.Listen {
		t.Errorf("got %v, %+v, %v", sockets, cfg, err)
	}
	for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
		if got, ok := os.LookupEnv(name); ok {
			t.Errorf("%s is still %q", name, got)
		}
	}
}

// What is passed to another process isn't left to the children of this one.
func TestSocketsOfAnother(t *testing.T) {
	t.Setenv("LISTEN_FDS", "1")
	for _, pid := range []string{"1", ""} {
		t.Setenv("LISTEN_PID", pid)
		if _, _, err := takeSockets(config.Default()); err == nil || !strings.Contains(err.Error(), "isn't this one") {
			t.Errorf("with LISTEN_PID %q: %v", pid, err)
		}
	}
}

// What is stuck isn't fed, and neither is systemd told by a server that it has nothing to
// do with.
func TestNotifier(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	n := check.Value(newNotifier(slog.New(slog.DiscardHandler)))(t)
	n.say(t.Context(), "READY=1")
	if err := n.Close(); err != nil {
		t.Error(err)
	}

	path := filepath.Join(t.TempDir(), "notify")
	said := check.Value(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"}))(t)
	defer func() { _ = said.Close() }()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "30000")
	log := make(messages, 100)
	n = check.Value(newNotifier(slog.New(log)))(t)
	defer func() { _ = n.Close() }()
	for _, name := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC"} {
		if got, ok := os.LookupEnv(name); ok {
			t.Errorf("%s is still %q", name, got)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- n.Run(ctx, "x", func(ctx context.Context) error {
			<-ctx.Done() // as long as it may take
			return ctx.Err()
		})
	}()
	log.want(t, "server_stuck")
	log.want(t, "server_stuck")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, want := range []string{"READY=1\nSTATUS=x", "STOPPING=1\nSTATUS=letting what is in flight finish"} {
		buf := make([]byte, 100)
		n, err := said.Read(buf)
		if got := string(buf[:n]); err != nil || got != want {
			t.Errorf("%q is said, want %q; %v", got, want, err)
		}
	}
}
