package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime"
)

// drained are the signals that the server in the engine's mount namespace gets from
// the process that started it there.
var drained = []os.Signal{syscall.SIGTERM, os.Interrupt, syscall.SIGHUP}

// EnterEngine runs this program again in the mount namespace of the process that listens on the
// engine's socket. It forwards signals to the new process, and returns when that has ended. If this
// process is in that namespace already, EnterEngine runs nothing, and done is false.
//
// This process stays in its own namespace, so that programs which the engine runs in the same
// container, such as a health check, still find the container's files.
func EnterEngine(ctx context.Context, cfg config.Engine) (done bool, err error) {
	socket := EngineSocket(cfg)
	if socket == "" {
		return false, errors.New("--enter-engine: the engine has no unix socket on this machine")
	}
	pid, err := Peer(ctx, socket)
	if err != nil {
		return false, fmt.Errorf("--enter-engine: find the engine's process: %w", err)
	}
	if pid == 0 {
		return false, errors.New("--enter-engine: the engine's process can't be seen from here; give this container the host's process namespace (pid: host)")
	}
	namespace := filepath.Join("/proc", strconv.Itoa(pid), "ns/mnt")
	if sameFile("/proc/self/ns/mnt", namespace) {
		return false, nil
	}
	ns, err := os.Open(namespace)
	if err != nil {
		return false, fmt.Errorf("--enter-engine: %w; it takes the capabilities SYS_ADMIN, SYS_CHROOT and SYS_PTRACE", err)
	}
	defer func() { _ = ns.Close() }()
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return false, fmt.Errorf("--enter-engine: %w", err)
	}
	defer func() { _ = self.Close() }()

	signals := make(chan os.Signal, 8)
	signal.Notify(signals, drained...)
	defer signal.Stop(signals)
	started, ended := make(chan *os.Process, 1), make(chan error, 1)
	go func() { ended <- runtime.OnThread(func() error { return runEntered(ns, self, started) }) }()
	var child *os.Process
	select {
	case child = <-started: // what was signalled meanwhile waits
	case err := <-ended:
		return true, err
	}
	for {
		select {
		case s := <-signals:
			_ = child.Signal(s) // one that has ended needs none
		case err := <-ended:
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				return true, &config.ExitError{Code: max(exit.ExitCode(), config.ExitFailure)} // it has said why
			}
			return true, err
		}
	}
}

// runEntered moves its thread into a mount namespace and runs a program there, with this
// process's arguments, to its end.
func runEntered(ns, program *os.File, started chan<- *os.Process) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("--enter-engine: %w", os.NewSyscallError("unshare", err))
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("--enter-engine: %w; it takes the capabilities SYS_ADMIN and SYS_CHROOT", os.NewSyscallError("setns", err))
	}
	cmd := &exec.Cmd{
		Path: fmt.Sprintf("/proc/self/fd/%d", program.Fd()), Args: os.Args, Dir: "/",
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		SysProcAttr: &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM},
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("--enter-engine: %w", err)
	}
	started <- cmd.Process
	return cmd.Wait()
}
