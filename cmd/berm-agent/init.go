package main

import (
	"errors"
	"io/fs"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// exitSignal plus a signal's number is the exit code of a process that the signal killed.
const exitSignal = 128

// runInit implements "init DIR -- CMD [ARG…]", the first process of a container. It creates DIR if it
// is missing, and starts the command there. It forwards signals to the command, reaps orphans, and
// returns the command's exit code. If the container has Berm's socket, runInit also serves Berm.
func runInit(args []string) int {
	if len(args) < 3 || args[1] != "--" {
		return complain("usage: berm-agent init DIR -- CMD [ARG…]", exitUsage)
	}
	dir, command := args[0], args[2:]
	// Otherwise code of the same user could trace this process, and act as PID 1.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return complain("forbid tracing: "+reason(err), exitNotExecutable)
	}
	if err := enter(dir); err != nil {
		return complain(dir+": "+reason(err), exitNotExecutable)
	}
	limitMemory()
	setHome()

	signals := make(chan os.Signal, 256)
	signal.Notify(signals)
	signal.Reset(syscall.SIGURG) // Go's scheduler sends it to its own threads

	serves := serving()
	if serves {
		_ = keepThreads(spareThreads()) // runtime/agent keeps the pids limit high enough
	}
	pid, code := start(command)
	if pid == 0 {
		return code
	}
	kids := &childReaper{main: pid}
	if serves {
		srv, err := newServer(pid)
		if err != nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			return complain("read the limit of open files: "+reason(err), exitNotExecutable)
		}
		kids = &srv.kids
		srv.link(bermSocket)
	}
	for {
		// Reap after any signal: one SIGCHLD may stand for many, or be lost while the channel is full.
		if status, ended := kids.reap(); ended {
			return exitCode(status)
		}
		sig, ok := (<-signals).(syscall.Signal)
		if serves && sig == syscall.SIGPIPE { // from its own write to Berm or a command
			continue
		}
		if ok && sig != syscall.SIGCHLD {
			_ = syscall.Kill(pid, sig) // can't hit another process: the command isn't reaped yet
		}
	}
}

// start starts the command with this process's own files and environment. On failure pid is 0, start
// has printed the reason, and code is the exit code.
func start(command []string) (pid, code int) {
	path, err := lookUp(command[0])
	if err == nil {
		pid, err = fork(path, command)
	}
	if errors.Is(err, syscall.ENOEXEC) { // a script that doesn't name its interpreter
		pid, err = fork("/bin/sh", append([]string{"sh", path}, command[1:]...))
	}
	switch {
	case err == nil:
		return pid, 0
	case errors.Is(err, fs.ErrNotExist):
		return 0, complain(command[0]+": not found", exitNotFound)
	}
	return 0, complain(command[0]+": "+reason(err), exitNotExecutable)
}

// fork starts a program in a process group of its own, with default signal handlers and an empty signal
// mask. ForkExec resets the handlers, but keeps the mask that this process inherited. That mask is
// rarely set.
func fork(path string, args []string) (int, error) {
	var none, own unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, nil, &own); err != nil {
		return 0, err
	}
	if own != none {
		runtime.LockOSThread() // costs a thread for good
		defer runtime.UnlockOSThread()
		if err := unix.PthreadSigmask(unix.SIG_SETMASK, &none, &own); err != nil {
			return 0, err
		}
		defer func() { _ = unix.PthreadSigmask(unix.SIG_SETMASK, &own, nil) }()
	}
	return syscall.ForkExec(path, args, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
}

func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return exitSignal + int(status.Signal())
	}
	return status.ExitStatus()
}
