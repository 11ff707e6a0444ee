package main

import (
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// server does Berm's operations in its container.
type server struct {
	env       []string
	files     syscall.Rlimit // of open files, for commands
	oom       *oomCounter
	kids      childReaper
	processes *table
	tidy      *time.Timer // calls freeMemory
	begun     uint64      // start of this process, in ticks since boot
	// launch starts a process. Tests of the protocol replace it.
	launch func(*process, *wire.Start) error
	// other returns the handler of an operation that isn't about processes, or nil.
	other func(wire.Op) handler
}

// newServer returns a server for this process. main is the pid of the container's command, or 0.
func newServer(main int) (*server, error) {
	files, err := fileLimit()
	if err != nil {
		return nil, err
	}
	return &server{
		env: os.Environ(), files: files, oom: openOOM(), kids: childReaper{main: main, supervisors: map[int]bool{}}, processes: newTable(),
		launch: (*process).launch, other: fileHandler, tidy: time.AfterFunc(quiet, freeMemory), begun: ticksNow(),
	}, nil
}

func (srv *server) handler(op wire.Op) handler {
	if _, ok := controls[op]; ok {
		return srv.control
	}
	switch op {
	case wire.OpStart:
		return srv.start
	case wire.OpEvents:
		return srv.events
	case wire.OpForget:
		return srv.forget
	}
	return srv.other(op)
}

// runServe implements "serve": it serves one session on its standard input and output. When the session
// ends, it kills the processes that the session started. It returns 1 if some are left.
func runServe(args []string) int {
	if len(args) != 0 {
		return complain("usage: berm-agent serve", exitUsage)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return complain("forbid tracing: "+reason(err), exitNotExecutable)
	}
	// Adopt the descendants of a supervisor that was killed.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return complain("become a reaper: "+reason(err), exitNotExecutable)
	}
	in, out, err := stdio()
	if err != nil {
		return complain("take the standard input and output: "+reason(err), exitNotExecutable)
	}
	enterOwn()
	setHome()
	// Wait for a new tick: all that this process starts is then younger than what was there before.
	for before := ticksNow(); ticksNow() == before && before > 0; {
		time.Sleep(time.Millisecond)
	}
	if !keepThreads(spareThreads()) {
		return complain(wire.NoThread, wire.ExitNoThread)
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGCHLD, unix.SIGPIPE, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	limitMemory()
	srv, err := newServer(0)
	if err != nil {
		return complain("read the limit of open files: "+reason(err), exitNotExecutable)
	}
	go func() {
		for sig := range signals {
			switch sig {
			case unix.SIGCHLD:
				srv.kids.reap()
			case unix.SIGPIPE:
			default:
				_ = in.Close() // ends the session, and so this function
				go srv.processes.close()
			}
		}
	}()
	_ = srv.session(stdioConn{in, out}) // the end of the session ends this process
	if !srv.killAll() {
		return 1
	}
	return 0
}

// enterOwn changes to the container's working directory, an argument of PID 1. The engine starts this
// process in "/". enterOwn ignores errors.
func enterOwn() {
	b, err := os.ReadFile("/proc/1/cmdline")
	if args := strings.Split(string(b), "\x00"); err == nil && len(args) > 2 && args[1] == "init" {
		_ = os.Chdir(args[2])
	}
}

// stdio duplicates standard input and output to higher descriptors, and makes them non-blocking.
// Waiting for the files takes no thread.
func stdio() (in, out *os.File, err error) {
	var files [2]*os.File
	for i := range files {
		fd, err := unix.FcntlInt(uintptr(i), unix.F_DUPFD_CLOEXEC, 3)
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			return nil, nil, err
		}
		files[i] = os.NewFile(uintptr(fd), "berm")
	}
	if err := files[0].SetReadDeadline(time.Time{}); err != nil {
		return nil, nil, fmt.Errorf("the input is no pipe or socket: %w", err)
	}
	return files[0], files[1], nil
}

// stdioConn joins an input and an output to a connection.
type stdioConn struct {
	*os.File // the input, which Close closes
	out      *os.File
}

func (c stdioConn) Write(p []byte) (int, error) { return c.out.Write(p) }
