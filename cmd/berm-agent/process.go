package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	defaultKeep = 64 << 10
	maxCommand  = 4 << 10 // bytes of the command in a ProcessInfo
)

// process is a command that was started, or couldn't be.
type process struct {
	srv   *server
	id    string
	tty   bool
	stdin bool
	once  bool // the output is dropped once a follower has all of it
	exec  bool // it isn't listed, and is killed if its follower's connection ends
	order int  // the table's clock when it was reserved

	// Guarded by table.mu.
	changed int  // the table's clock when it started or ended; 0 before its start
	over    bool // it has ended, with all of its output

	// Set before other goroutines have the process.
	supervisor *supervisor // nil if no program was started
	begun      uint64      // no later than its start, in ticks
	kills      int         // OOM kills in the container before its start
	timer      *time.Timer
	outputs    []*os.File

	readers sync.WaitGroup
	exited  chan struct{} // closed when the command has ended; its output may go on

	inputMu sync.Mutex // held during a write

	mu        sync.Mutex
	change    sync.Cond // broadcast when a field below changes
	ring      *wire.Ring
	followers map[*follower]bool
	writer    *conn
	input     *os.File // nil once it is closed
	terminal  *os.File // nil without a terminal, or once it is closed
	info      wire.ProcessInfo
	lost      bool // the supervisor was killed
	killed    bool // this program sent SIGKILL
	endedAt   time.Time
	drainBy   time.Time // deadline for reading output; zero until exited
}

func precondition(format string, args ...any) *wire.Failure {
	return &wire.Failure{Class: wire.ClassPrecondition, Message: fmt.Sprintf(format, args...)}
}

// newProcess returns a process that hasn't been started.
func newProcess(srv *server, s *wire.Start) *process {
	p := &process{srv: srv, id: s.ID, tty: s.TTY, stdin: s.Stdin, once: s.Once, exec: s.Exec, exited: make(chan struct{}), followers: map[*follower]bool{}}
	p.ring = wire.NewRing(cmp.Or(s.KeepBytes, defaultKeep))
	p.change.L = &p.mu
	p.info = wire.ProcessInfo{ID: p.id, Label: s.Label, Command: cutCommand(s.Command), Running: true, TTY: p.tty}
	return p
}

// cutCommand returns the beginning of a command, for a ProcessInfo.
func cutCommand(command []string) []string {
	var out []string
	room := maxCommand
	for _, arg := range command {
		if room <= 0 {
			break
		}
		out = append(out, strings.Clone(wire.Cut(arg, room)))
		room -= len(arg) + 1
	}
	return out
}

// launch starts a process that is reserved in the table. If it returns an error, nothing was
// started. A program that can't be executed is no error: the process ends at once.
func (p *process) launch(s *wire.Start) error {
	if s.Dir != "" {
		var info fs.FileInfo
		err := again(func() (err error) { info, err = os.Stat(s.Dir); return err })
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || err == nil && !info.IsDir() {
			if err := again(func() error { return os.MkdirAll(s.Dir, 0o755) }); err != nil {
				return invalid("the working directory %s can't be made: %s", quote(s.Dir), reason(err))
			}
		}
	}
	vars := merge(p.srv.env, s.Env)
	if s.TTY && vars["TERM"] == "" {
		vars["TERM"] = "TERM=xterm"
	}
	p.kills, p.begun = p.srv.oom.count(), ticksNow()
	p.info.StartedAt = time.Now().UnixNano()
	found, err := findIn(s.Dir, s.Command[0], strings.TrimPrefix(vars["PATH"], "PATH="))
	if err != nil {
		p.fail(err, s)
		return nil
	}
	run := &program{path: found, argv: s.Command, env: slices.Sorted(maps.Values(vars)), dir: s.Dir, tty: s.TTY, files: p.srv.files}
	var mine []*os.File
	err = kernel.do(func() (err error) { mine, err = p.open(run, s); return err })
	for _, f := range run.stdio {
		if f != nil {
			defer shut(f) // a terminal is closed three times
		}
	}
	if err == nil {
		p.supervisor, err = p.srv.kids.add(func() (sup *supervisor, err error) {
			err = kernel.do(func() error { sup, err = supervise(run); return err })
			return sup, err
		})
	}
	var early report
	if err == nil {
		early, err = p.awaitPid()
	}
	if err != nil {
		for _, f := range append(mine, p.input) {
			shut(f)
		}
		return noRoom(err)
	}
	p.outputs = mine
	for i, f := range mine {
		p.readers.Add(1)
		go p.read(f, i == 1)
	}
	if s.TimeoutMS > 0 {
		p.timer = time.AfterFunc(time.Duration(s.TimeoutMS)*time.Millisecond, func() { p.killTree(true) })
	}
	go p.watch(early, s)
	return nil
}

// noRoom returns the failure for an error that kept a process from being started.
func noRoom(err error) error {
	failure := failureOf(err)
	if _, said := errors.AsType[*wire.Failure](err); !said && failure.Class == wire.ClassExhausted {
		failure.Message = "there is no room for another process: " + reason(err)
	}
	return failure
}

// findIn finds a program in a PATH, relative to a directory. It returns a *chdirError if the directory
// can't be entered.
func findIn(dir, name, path string) (string, error) {
	if dir != "" {
		if err := again(func() error { return unix.Access(dir, unix.X_OK) }); err != nil {
			return "", &chdirError{err}
		}
	}
	return lookUpFrom(dir, path, name)
}

// chdirError says why a directory can't be entered.
type chdirError struct{ error }

func (e *chdirError) Unwrap() error { return e.error }

// merge returns the variables of env and over, each "NAME=value", by their names. Of those
// with the same name, it keeps the last.
func merge(env, over []string) map[string]string {
	vars := map[string]string{}
	for _, e := range slices.Concat(env, over) {
		name, _, _ := strings.Cut(e, "=")
		vars[name] = e
	}
	return vars
}

// open makes the program's stdio, and returns this process's ends of the output.
func (p *process) open(run *program, s *wire.Start) (mine []*os.File, err error) {
	if s.TTY {
		master, its, err := openPTY(s.Rows, s.Cols)
		if err != nil {
			return nil, err
		}
		run.stdio = [3]*os.File{its, its, its}
		p.input, p.terminal = master, master
		return []*os.File{master}, nil
	}
	var in *os.File
	if in, run.stdio[0], err = pipe(writeEnd); err != nil {
		return nil, err
	}
	if s.Stdin {
		p.input = in
	} else {
		_ = in.Close()
	}
	for i := 1; i <= 2; i++ {
		var r *os.File
		if r, run.stdio[i], err = pipe(readEnd); err != nil {
			break
		}
		mine = append(mine, r)
	}
	return mine, err
}

// awaitPid waits for the supervisor's report of the command's pid. It returns the command's
// own report, if that came first.
func (p *process) awaitPid() (early report, err error) {
	for {
		r, err := readReport(gated(p.supervisor.reports))
		switch {
		case err != nil: // the supervisor was killed
			return early, nil
		case r.kind != reportPid:
			early = r
		case r.value <= 0:
			shut(p.supervisor.reports)
			return early, syscall.Errno(-r.value)
		default:
			p.info.PID = int(r.value)
			return early, nil
		}
	}
}

// watch reads reports, first r, until the command ends. It then waits for the end of the output.
func (p *process) watch(r report, s *wire.Start) {
	var failure, err error
	for err == nil && r.kind != reportEnd {
		switch r.kind {
		case reportChdir:
			failure = &chdirError{syscall.Errno(r.value)}
		case reportTTY, reportExec:
			failure = syscall.Errno(r.value)
		}
		r, err = readReport(gated(p.supervisor.reports))
	}
	shut(p.supervisor.reports)
	if p.timer != nil {
		p.timer.Stop()
	}
	p.mu.Lock()
	if err == nil {
		p.note(&r)
	} else {
		p.note(nil)
	}
	input := p.input
	p.input = nil
	p.drainBy = time.Now().Add(maxDrain)
	p.mu.Unlock()
	if input != nil {
		p.closeInput(input)
	}
	close(p.exited)
	if failure != nil {
		p.explain(failure, s)
	}
	for _, f := range p.outputs {
		p.bound(f)
	}
	p.readers.Wait()
	p.end()
}

// closeInput closes an input that p.input held until now. It leaves a terminal to end. It interrupts a
// writer first: Close would wait for the write inside the gate that the write needs.
func (p *process) closeInput(input *os.File) {
	_ = input.SetWriteDeadline(time.Now())
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if !p.tty {
		shut(input)
	}
}

// note records how the command ended. A nil end means that the supervisor was killed before it could
// report. The caller holds p.mu.
func (p *process) note(end *report) {
	p.endedAt = time.Now()
	p.info.EndedAt = p.endedAt.UnixNano()
	if end == nil {
		p.lost = true
		p.info.ExitCode, p.info.Signal = exitSignal+int(unix.SIGKILL), int(unix.SIGKILL)
		return
	}
	status := syscall.WaitStatus(end.value)
	p.info.ExitCode = exitCode(status)
	if status.Signaled() {
		p.info.Signal = int(status.Signal())
	}
	p.info.CPUTime = end.usage.Utime.Nano() + end.usage.Stime.Nano()
	p.info.PeakMemoryBytes = end.usage.Maxrss << 10
	if p.info.ExitCode == exitSignal+int(unix.SIGKILL) && !p.killed {
		p.info.OOMKilled = p.kills >= 0 && p.srv.oom.count() > p.kills
	}
}

// fail ends a process whose program can't be executed.
func (p *process) fail(err error, s *wire.Start) {
	p.endedAt = time.Now()
	p.info.EndedAt = p.endedAt.UnixNano()
	close(p.exited)
	p.explain(err, s)
	p.end()
}

// explain sets the exit code and prints the reason why the command didn't start, as a shell
// would.
func (p *process) explain(err error, s *wire.Start) {
	code, text := exitNotExecutable, s.Command[0]+": "+reason(err)
	if dir, ok := errors.AsType[*chdirError](err); ok {
		text = s.Dir + ": " + reason(dir.error)
	} else if errors.Is(err, fs.ErrNotExist) {
		code, text = exitNotFound, s.Command[0]+": not found"
	}
	p.mu.Lock()
	p.info.ExitCode, p.info.Signal = code, 0
	p.mu.Unlock()
	p.push(!p.tty, []byte("berm-agent: "+text+"\n"))
}

// end ends the process, once there is no more output.
func (p *process) end() {
	p.mu.Lock()
	if p.terminal != nil {
		shut(p.terminal)
		p.terminal = nil
	}
	p.ring.Flush()
	p.info.Running = false
	p.change.Broadcast()
	p.mu.Unlock()
	p.srv.processes.over(p)
	p.srv.tidy.Reset(quiet)
}

// snapshot returns what callers see of the process.
func (p *process) snapshot() *wire.ProcessInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	info := p.info
	if info.Running { // the command may have ended, but its output hasn't
		info = wire.ProcessInfo{ID: p.id, Label: info.Label, Command: info.Command, PID: info.PID, Running: true, TTY: p.tty, StartedAt: info.StartedAt}
	}
	info.FirstSeq, info.NextSeq = p.ring.Bounds()
	return &info
}

func (p *process) mustRun() error {
	select {
	case <-p.exited:
		return precondition("process %s has ended", p.id)
	default:
		return nil
	}
}

// control calls do with the terminal's descriptor.
func (p *process) control(do func(fd int) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.terminal == nil {
		return precondition("process %s has ended", p.id)
	}
	raw, err := p.terminal.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = kernel.do(func() error { return do(int(fd)) }) }); ctlErr != nil {
		return ctlErr
	}
	return err
}

// send sends a signal to the process's group, or to the foreground group of its terminal.
func (p *process) send(sig syscall.Signal) error {
	if err := p.mustRun(); err != nil {
		return err
	}
	group := p.info.PID
	if p.tty {
		_ = p.control(func(fd int) error {
			if n, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err == nil && n > 1 {
				group = n
			}
			return nil
		})
	}
	if group <= 1 {
		return precondition("process %s has no process group that can be signalled", p.id)
	}
	if sig == unix.SIGKILL {
		p.mu.Lock()
		p.killed = true
		p.mu.Unlock()
	}
	err := kill(-group, sig)
	if errors.Is(err, unix.ESRCH) { // the command hasn't made its group yet
		err = kill(p.info.PID, sig)
	}
	if errors.Is(err, unix.ESRCH) {
		return precondition("process %s has ended", p.id)
	}
	return err
}

// killTree kills the process with all its descendants, and waits until they are gone. It returns false
// if some are left after killTimeout. timeout says that the process's own timeout has passed.
func (p *process) killTree(timeout bool) bool {
	deadline := time.Now().Add(killTimeout)
	gone := true
	if p.mustRun() == nil {
		p.mu.Lock()
		if p.drainBy.IsZero() {
			p.killed = true
			p.info.TimedOut = p.info.TimedOut || timeout
			p.info.Killed = p.info.Killed || !timeout
		}
		p.mu.Unlock()
		kids, pid := &p.srv.kids, p.supervisor.pid
		gone = kids.killBelow(pid, deadline)
		p.mu.Lock()
		p.info.NotKilled = timeout && !gone
		p.mu.Unlock()
		kids.signal(pid, unix.SIGCONT)
		if gone || timeout {
			// The supervisor has nothing left to wait for, or mustn't wait any longer.
			late := time.AfterFunc(max(time.Until(deadline), killTimeout/10), func() { kids.signal(pid, unix.SIGKILL) })
			<-p.exited
			late.Stop()
		}
	}
	p.mu.Lock()
	lost := p.lost
	p.mu.Unlock()
	if lost {
		gone = p.srv.kids.killOrphans(p.begun, deadline) && gone
	}
	return gone
}
