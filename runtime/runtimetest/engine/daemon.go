package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var systemDirs = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// daemon is a process that dies with this one.
type daemon struct {
	cmd     *exec.Cmd
	logFile string
	done    chan struct{} // closed when it has ended
}

// startDaemon starts a program in the network namespace at a path; "" is this
// process's. Its output is added to logFile.
func startDaemon(logFile, netns, name string, args ...string) (*daemon, error) {
	path, err := find(name)
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(path, args...)
	path = filepath.Join(filepath.Dir(logFile), "bin") + ":" + os.Getenv("PATH") + ":" + strings.Join(systemDirs, ":")
	cmd.Env = append(os.Environ(), "PATH="+path, "TMPDIR="+filepath.Dir(logFile))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	d := &daemon{cmd: cmd, logFile: logFile, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The signal comes when the thread that forked ends, and the child's network
		// namespace is this thread's: so it is neither unlocked nor left before the end.
		runtime.LockOSThread()
		err := enterNetns(netns)
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(d.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return d, nil
}

// await waits until a probe succeeds.
func (d *daemon) await(ctx context.Context, timeout time.Duration, probe func(context.Context) error) error {
	name := filepath.Base(d.cmd.Path)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if probe(ctx) == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-d.done:
			return fmt.Errorf("%s ended: %s\n%s", name, d.cmd.ProcessState, d.logTail())
		case <-ctx.Done():
			return fmt.Errorf("%s doesn't answer: %w\n%s", name, ctx.Err(), d.logTail())
		}
	}
}

func (d *daemon) logTail() []byte {
	b, err := os.ReadFile(d.logFile)
	if err != nil {
		return []byte(err.Error())
	}
	return b[max(0, len(b)-4<<10):]
}

func (d *daemon) kill() {
	_ = d.cmd.Process.Kill() // fails only if it has ended
	<-d.done
}

func dial(socket string) func(context.Context) error {
	return func(ctx context.Context) error {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "unix", socket)
		if err != nil {
			return err
		}
		return conn.Close()
	}
}

// makeNetns makes a network namespace with loopback up, and mounts it at a path.
func makeNetns(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread is spoilt and ends here
		made <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			if err := loopbackUp(); err != nil {
				return err
			}
			own := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
			return unix.Mount(own, path, "", unix.MS_BIND, "")
		}()
	}()
	if err := <-made; err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	lo, err := unix.NewIfreq("lo")
	if err == nil {
		lo.SetUint16(unix.IFF_UP)
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
	}
	return errors.Join(err, unix.Close(fd))
}

// enterNetns moves this thread; "" lets it be.
func enterNetns(path string) error {
	if path == "" {
		return nil
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	return errors.Join(unix.Setns(fd, unix.CLONE_NEWNET), unix.Close(fd))
}
