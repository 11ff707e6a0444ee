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
	maxCommand  = 4 << 10 // of a ProcessInfo's
)

// process is a command that was started, or couldn't be.
type process struct {
	srv   *server
	id    string
	tty   bool
	stdin bool
	once  bool // the output is to be given once
	exec  bool // it has no name: it is killed with its follower's connection, and not listed
	order int  // among all

	// With the table's lock.
	changed int  // when it has started or ended; 0 before it is known
	over    bool // it has ended, with all of its output

	// These are set before anybody else knows the process.
	supervisor *supervisor // nil if there was nothing to start
	begun      uint64      // no later than it, in ticks
	kills      int         // for want of memory, before it
	timer      *time.Timer
	outputs    []*os.File

	readers sync.WaitGroup
	exited  chan struct{} // closed when the command has ended; its output may go on

	inputMu sync.Mutex // one writes at a time

	mu        sync.Mutex
	change    sync.Cond // of what is below
	ring      *wire.Ring
	followers map[*follower]bool
	writer    *conn
	input     *os.File // nil when it is ended
	terminal  *os.File // nil if there is none, or it is gone
	info      wire.ProcessInfo
	lost      bool // the supervisor was killed
	killed    bool // by SIGKILL of ours
	endedAt   time.Time
	drainBy   time.Time // when the output is to end at the latest; zero until exited
}

func precondition(format string, args ...any) *wire.Failure {
	return &wire.Failure{Class: wire.ClassPrecondition, Message: fmt.Sprintf(format, args...)}
}

// newProcess makes one that hasn't been started.
func newProcess(srv *server, s *wire.Start) *process {
	p := &process{srv: srv, id: s.ID, tty: s.TTY, stdin: s.Stdin, once: s.Once, exec: s.Exec, exited: make(chan struct{}), followers: map[*follower]bool{}}
	p.ring = wire.NewRing(cmp.Or(s.KeepBytes, defaultKeep))
	p.change.L = &p.mu
	p.info = wire.ProcessInfo{ID: p.id, Label: s.Label, Command: cutCommand(s.Command), Running: true, TTY: p.tty}
	return p
}

// cutCommand is the beginning of a command, as it is told.
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

// launch starts a process that is reserved in the table. Its error says that nothing
// was; that the program can't be executed is none.
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
			defer shut(f) // a terminal is there thrice
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

// noRoom is the failure to start anything at all.
func noRoom(err error) error {
	failure := failureOf(err)
	if _, said := errors.AsType[*wire.Failure](err); !said && failure.Class == wire.ClassExhausted {
		failure.Message = "there is no room for another process: " + reason(err)
	}
	return failure
}

// findIn finds a program from a directory, which is to be entered, by a PATH.
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

// merge puts variables, "NAME=value", over others, by their names. The last of a name counts.
func merge(env, over []string) map[string]string {
	vars := map[string]string{}
	for _, e := range slices.Concat(env, over) {
		name, _, _ := strings.Cut(e, "=")
		vars[name] = e
	}
	return vars
}

// open makes what the program reads from and writes to, and gives this process' sides
// of the output.
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

// awaitPid waits for the supervisor's first word. Another that came before it, from
// the command, it gives back.
func (p *process) awaitPid() (early report, err error) {
	for {
		r, err := readReport(gated(p.supervisor.reports))
		switch {
		case err != nil: // it was killed at once
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

// watch waits for the end of the command, and then for that of its output.
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

// closeInput closes what isn't p.input any more; a terminal's is closed at the end. Whoever
// writes to it lets it go first: closing waits for that, in the gate that writing needs.
func (p *process) closeInput(input *os.File) {
	_ = input.SetWriteDeadline(time.Now())
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if !p.tty {
		shut(input)
	}
}

// note takes down how the command ended; nil: nobody knows, as its supervisor was killed.
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

// fail ends a process that never began.
func (p *process) fail(err error, s *wire.Start) {
	p.endedAt = time.Now()
	p.info.EndedAt = p.endedAt.UnixNano()
	close(p.exited)
	p.explain(err, s)
	p.end()
}

// explain says why there is no command, as a shell would.
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

// end is when there is no more output.
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

// tell is what is known of it.
func (p *process) tell() *wire.ProcessInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	info := p.info
	if info.Running { // the end is told when it is complete
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

// control does something with the terminal.
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

// send sends a signal to the process' group, or that in the foreground of its terminal.
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
	if errors.Is(err, unix.ESRCH) { // it is about to make it
		err = kill(p.info.PID, sig)
	}
	if errors.Is(err, unix.ESRCH) {
		return precondition("process %s has ended", p.id)
	}
	return err
}

// killTree kills the process with all its descendants, and returns when they are gone.
// False: some aren't.
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
			// It has nothing to wait for, or mustn't.
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
