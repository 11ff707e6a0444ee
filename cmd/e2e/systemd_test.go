package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// unit is what systemd is to a service: it passes sockets and hears what is said.
type unit struct {
	dir   string
	names []string
	files []*os.File
	said  *net.UnixConn
}

func newUnit(t *testing.T) *unit {
	t.Helper()
	u := &unit{dir: t.TempDir()}
	var err error
	u.said, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(u.dir, "notify"), Net: "unixgram"})
	must(t, err)
	t.Cleanup(func() { _ = u.said.Close() })
	return u
}

// listen makes a socket of the unit, which is there before its service and after it.
func (u *unit) listen(t *testing.T, name, network, address string) net.Listener {
	t.Helper()
	l := check.Value(net.Listen(network, address))(t)
	f := check.Value(l.(interface{ File() (*os.File, error) }).File())(t)
	t.Cleanup(func() { _, _ = l.Close(), f.Close() })
	u.names, u.files = append(u.names, name), append(u.files, f)
	return l
}

// start runs berm serve as systemd would, with a setting of http.listen.
func (u *unit) start(t *testing.T, listen, settings string, env ...string) *child {
	t.Helper()
	write(t, filepath.Join(u.dir, "berm.yaml"), settings)
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", `LISTEN_PID=$$ WATCHDOG_PID=$$ exec "$0" "$@"`, bin)
	cmd.Env = append(env, "LISTEN_FDS="+strconv.Itoa(len(u.files)), "LISTEN_FDNAMES="+strings.Join(u.names, ":"), "NOTIFY_SOCKET="+filepath.Join(u.dir, "notify"))
	cmd.ExtraFiles = u.files
	return startCommand(t, cmd, u.dir, nil, "", "--config", filepath.Join(u.dir, "berm.yaml"), "--listen", listen)
}

// hear waits for what is said, leaving out what is said of the watchdog unless it is that.
func (u *unit) hear(t *testing.T, want string) {
	t.Helper()
	must(t, u.said.SetReadDeadline(time.Now().Add(time.Minute)))
	for buf := make([]byte, 4096); ; {
		n, err := u.said.Read(buf)
		if err != nil {
			t.Fatalf("%q isn't said: %v", want, err)
		}
		got, _, _ := strings.Cut(string(buf[:n]), "\n")
		if got == want {
			return
		}
		if got != "WATCHDOG=1" {
			t.Fatalf("%q is said, want %q", got, want)
		}
	}
}

// A service of systemd is there from the first connection to its socket, which outlives
// it, and says how it is.
func TestSystemd(t *testing.T) {
	t.Parallel()
	u := newUnit(t)
	u.listen(t, "http", "unix", filepath.Join(u.dir, "berm.sock"))
	u.listen(t, "docker", "unix", filepath.Join(u.dir, "docker.sock"))
	const file = "engine_api: {listeners: [{address: 'systemd:docker', callers: [{name: nobody, tenant: a, uids: [12345]}]}]}\n"
	early := check.Value(net.Dial("unix", filepath.Join(u.dir, "berm.sock")))(t)
	defer func() { _ = early.Close() }()
	must(t, second(io.WriteString(early, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")))
	c := u.start(t, "systemd:http", file, "WATCHDOG_USEC=300000")
	u.hear(t, "READY=1")
	if resp, err := http.ReadResponse(bufio.NewReader(early), nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("who was there before the server: %v, %v", resp, err)
	}
	if _, err := dockerClient(t, client.WithHost("unix://"+filepath.Join(u.dir, "docker.sock"))).Ping(t.Context()); err == nil || !strings.Contains(err.Error(), "none of the configured callers") {
		t.Errorf("the other door: %v", err)
	}
	if got, err := os.ReadFile(filepath.Join(c.dir, "address")); err != nil || string(got) != "unix://"+u.dir+"/berm.sock\n" {
		t.Errorf("the address is %q, %v", got, err)
	}
	u.hear(t, "WATCHDOG=1")
	wantNothingInherited(t, c.Process.Pid)

	write(t, filepath.Join(u.dir, "berm.yaml"), file+"logging: {level: debug, format: json}\n")
	c.signal(t, syscall.SIGHUP)
	u.hear(t, "RELOADING=1")
	u.hear(t, "READY=1")
	c.Log.Wait(t, `msg=settings_need_restart keys=[logging.format]`)
	if !strings.Contains(c.Log.String(), "msg=log_level_changed from=INFO to=DEBUG") {
		t.Errorf("the log's level isn't debug:\n%s", c.Log)
	}
	c.get(t, "/healthz")
	c.Log.Wait(t, "level=DEBUG msg=http_request")

	c.signal(t, syscall.SIGTERM)
	u.hear(t, "STOPPING=1")
	if err := c.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	for _, name := range []string{"berm.sock", "docker.sock"} {
		conn, err := net.Dial("unix", filepath.Join(u.dir, name)) // the next server would answer it
		if err != nil {
			t.Errorf("without the server: %v", err)
			continue
		}
		_ = conn.Close()
	}
}

// Where systemd has put the one door that there is, a health check finds in the state directory.
func TestSystemdEngineAPIAlone(t *testing.T) {
	t.Parallel()
	u := newUnit(t)
	u.listen(t, "docker", "unix", filepath.Join(u.dir, "docker.sock"))
	c := u.start(t, "none", "http: {listen: none}\nengine_api: {listeners: [{address: 'systemd:docker', callers: [{name: nobody, tenant: a, uids: [12345]}]}]}\n")
	u.hear(t, "READY=1")
	if _, stderr, code := berm(t, "", "healthcheck", "--config", filepath.Join(u.dir, "berm.yaml"), "--state-dir", c.dir, "--timeout", "1m"); code != 0 {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	c.end(t, syscall.SIGTERM)
	if _, stderr, code := berm(t, "", "healthcheck", "--config", filepath.Join(u.dir, "berm.yaml"), "--state-dir", c.dir); code != 1 || !strings.Contains(stderr, "no server runs") {
		t.Errorf("without the server: exit code %d, %q", code, stderr)
	}
}

// wantNothingInherited looks for sockets that a child of the process would get.
func wantNothingInherited(t *testing.T, pid int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d", pid)
	fds := check.Value(os.ReadDir(filepath.Join(dir, "fd")))(t)
	for _, fd := range fds {
		to, _ := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
		info, err := os.ReadFile(filepath.Join(dir, "fdinfo", fd.Name()))
		if err != nil || !strings.HasPrefix(to, "socket:") {
			continue // closed meanwhile, or another's
		}
		_, flags, _ := strings.Cut(string(info), "flags:")
		if bits, err := strconv.ParseInt(strings.Fields(flags)[0], 8, 64); err != nil || bits&unix.O_CLOEXEC == 0 {
			t.Errorf("children inherit the descriptor %s: %s, %v", fd.Name(), info, err)
		}
	}
}

func TestSystemdRefusals(t *testing.T) {
	for name, tt := range map[string]struct {
		names []string
		want  string
	}{
		"exposed":  {[]string{"a"}, "without a token, only a loopback address"},
		"one name": {[]string{"a", "a"}, "another socket of that address or name"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := newUnit(t)
			for _, name := range tt.names {
				u.listen(t, name, "tcp", "0.0.0.0:0")
			}
			c := u.start(t, "systemd:a", "")
			c.Log.Wait(t, tt.want)
			var exit *exec.ExitError
			if err := c.Wait(); !errors.As(err, &exit) || exit.ExitCode() != config.ExitFailure {
				t.Errorf("it ended with %v", err)
			}
		})
	}
}

// The units give the sockets the names that the documentation's configuration has, and
// leave the service in the mount namespace that it has to share with the engine.
func TestUnits(t *testing.T) {
	dir := filepath.Join("..", "..", "docs")
	guide := readString(t, filepath.Join(dir, "operations.md"))
	settings := func(name string) map[string]string {
		data := readString(t, filepath.Join(dir, "systemd", name))
		out := map[string]string{}
		for line := range strings.Lines(data) {
			if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(key, "#") {
				out[key] = value
			}
		}
		return out
	}
	for _, name := range []string{"berm.socket", "berm-docker.socket"} {
		s := settings(name)
		if !strings.Contains(guide, "systemd:"+s["FileDescriptorName"]) || s["Service"] != "berm.service" || s["SocketMode"] != "0660" {
			t.Errorf("%s: %v", name, s)
		}
	}
	service := settings("berm.service")
	if service["Type"] != "notify" || service["WatchdogSec"] == "" {
		t.Errorf("the service doesn't say how it is: %v", service)
	}
	for key, value := range service {
		for _, prefix := range []string{
			"PrivateTmp", "PrivateDevices", "PrivateMounts", "PrivateNetwork", "PrivateUsers", "ProtectSystem", "ProtectHome", "ProtectProc",
			"ProcSubset", "ProtectKernel", "ProtectControlGroups", "ReadWrite", "ReadOnly", "Inaccessible", "Exec", "NoExec", "Bind", "TemporaryFileSystem",
			"Root", "MountFlags", "MountImages", "MountAPIVFS", "Extension", "LogNamespace", "DynamicUser", "User", "RuntimeDirectory",
		} {
			if strings.HasPrefix(key, prefix) && key != "ExecStart" && key != "ExecReload" {
				t.Errorf("the service has %s=%s", key, value)
			}
		}
	}
}
