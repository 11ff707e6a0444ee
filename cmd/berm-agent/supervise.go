package main

import (
	"errors"
	"io"
	"os"
	"reflect"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The parent of every command is a supervisor, which also adopts the command's orphans. So the agent
// can tell the command's descendants from other processes, even if they change their session, group and
// environment. A supervisor is a fork of this process that never executes a program. It has one thread,
// and almost no memory of its own. It exits as soon as the command does. This process then adopts the
// descendants that still run.

// program is a program for a supervisor to execute.
type program struct {
	path  string // found already; relative to dir if it isn't absolute
	argv  []string
	env   []string
	dir   string // working directory; empty for that of this process
	stdio [3]*os.File
	tty   bool           // stdio is a terminal; it becomes the controlling one
	files syscall.Rlimit // of open files
}

// report is a message from a supervisor, or from its child before the child executes the program.
type report struct {
	kind  int32
	value int32
	usage syscall.Rusage
}

const (
	reportPid   = iota + 1 // pid of the command, or -errno if none was started
	reportChdir            // errno of chdir
	reportTTY              // errno of taking the terminal as the controlling one
	reportExec             // errno of execve
	reportEnd              // wait status of the command, and its usage
)

// readReport reads the next report. Any error is io.EOF: the supervisor has ended.
func readReport(r io.Reader) (report, error) {
	var out report
	if _, err := io.ReadFull(r, unsafe.Slice((*byte)(unsafe.Pointer(&out)), unsafe.Sizeof(out))); err != nil {
		return report{}, io.EOF
	}
	return out, nil
}

// supervisor is a running supervisor process.
type supervisor struct {
	pid     int
	reports *os.File // reaches EOF when the supervisor ends; the caller of supervise closes it
}

// supervise forks a supervisor, which starts p and reports how p starts and ends. An error is a
// syscall.Errno: EAGAIN, ENOMEM, EMFILE, ….
func supervise(p *program) (*supervisor, error) {
	mine, its, err := pipe(readEnd)
	if err != nil {
		return nil, err
	}
	defer func() { _ = its.Close() }()
	block, j, err := newJob(p)
	if err == nil {
		for i, f := range p.stdio {
			j.fds[i] = fdOf(f)
		}
		j.fds[3] = fdOf(its)
		beforeFork()
		pid, errno := j.fork()
		afterFork()
		err = syscall.Munmap(block)
		if errno != 0 {
			err = errno
		}
		if err == nil {
			return &supervisor{pid: int(pid), reports: mine}, nil
		}
	}
	_ = mine.Close()
	return nil, err
}

// The end of a pipe that this process keeps.
const (
	readEnd  = 0
	writeEnd = 1
)

// pipe makes a pipe. This process's own end doesn't block, so that waiting takes no thread.
// The other end blocks, as programs expect.
func pipe(own int) (mine, its *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(fds[own], true); err != nil {
		_, _ = unix.Close(fds[0]), unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[own]), "|"), os.NewFile(uintptr(fds[1-own]), "|"), nil
}

// fdOf returns a file's descriptor. File.Fd would make the file block.
func fdOf(f *os.File) (fd uintptr) {
	if c, err := f.SyscallConn(); err == nil {
		_ = c.Control(func(n uintptr) { fd = n })
	}
	return fd
}

// job is a program in the form that system calls take. It begins a block of memory, which also holds
// everything that the job points to. The block is outside of Go's heap, of which a supervisor has no
// copy.
type job struct {
	path, argv, env, dir uintptr // dir may be 0
	shell, shellArgv     uintptr // for a script that doesn't name its interpreter
	fds                  [4]uintptr
	size                 uintptr // of the block
	apart                bool    // the program is below programEnd, so the memory above needs no copy
	tty                  bool
	files                syscall.Rlimit
	report               report // a buffer; supervisor and command have a copy each
}

func newJob(p *program) (block []byte, j *job, err error) {
	const shell = "/bin/sh"
	words := len(p.argv) + 1 + len(p.argv) + 2 + len(p.env) + 1
	text := int(unsafe.Sizeof(*j)) + words*int(unsafe.Sizeof(uintptr(0)))
	size := text
	for _, list := range [][]string{p.argv, p.env, {p.path, p.dir, shell, "sh"}} {
		for _, s := range list {
			size += len(s) + 1
		}
	}
	block, err = syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil, nil, err
	}
	base := uintptr(unsafe.Pointer(&block[0]))
	j = (*job)(unsafe.Pointer(&block[0]))
	vectors := base + unsafe.Sizeof(*j)
	vector := unsafe.Slice((*uintptr)(unsafe.Pointer(&block[unsafe.Sizeof(*j)])), words)
	str := func(s string) uintptr {
		at := base + uintptr(text)
		text += copy(block[text:], s) + 1
		return at
	}
	next := 0
	list := func(of ...uintptr) uintptr {
		at := vectors + uintptr(next)*unsafe.Sizeof(uintptr(0))
		next += copy(vector[next:], of) + 1
		return at
	}
	var argv, env []uintptr
	for _, s := range p.argv {
		argv = append(argv, str(s))
	}
	for _, s := range p.env {
		env = append(env, str(s))
	}
	*j = job{
		size: uintptr(size), apart: reflect.ValueOf(supervisorMain).Pointer() < programEnd,
		path: str(p.path), shell: str(shell), tty: p.tty, files: p.files,
	}
	j.argv, j.env = list(argv...), list(env...)
	j.shellArgv = list(append([]uintptr{str("sh"), j.path}, argv[1:]...)...)
	if p.dir != "" {
		j.dir = str(p.dir)
	}
	return block, j, nil
}

// beforeFork makes Go's runtime block signals and forbid the stack to grow, until afterFork.
//
//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

// The code from here on runs in a fork. The fork has one thread, and memory as the other threads left
// it. So the code must not acquire a lock, allocate, grow the stack or handle a signal. See
// forkAndExecInChild in package syscall.

// fork forks a supervisor. It copies no memory of this process but the program itself, this stack and
// the job. That is much faster: copying takes time, and so does this process's next write to each
// copied page. The kernel would also count the copied memory in the command's peak memory.
//
// Memory that fork excludes stays excluded from every later fork. So use fork for any fork that needs
// memory. It isn't safe for concurrent use.
//
//go:nosplit
//go:noinline
//go:norace
//go:nocheckptr
func (j *job) fork() (uintptr, syscall.Errno) {
	if j.apart {
		at := uintptr(unsafe.Pointer(&j)) &^ (stackMargin - 1)
		_, _, _ = syscall.RawSyscall(syscall.SYS_MADVISE, programEnd, memoryEnd-programEnd, syscall.MADV_DONTFORK)
		_, _, _ = syscall.RawSyscall(syscall.SYS_MADVISE, at-stackMargin, 3*stackMargin, syscall.MADV_DOFORK)
		_, _, _ = syscall.RawSyscall(syscall.SYS_MADVISE, uintptr(unsafe.Pointer(j)), j.size, syscall.MADV_DOFORK)
	}
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno == 0 && pid == 0 {
		supervisorMain(j)
	}
	return pid, errno
}

const (
	programEnd  = 1 << 32  // the linker puts the whole program below it
	memoryEnd   = 1 << 48  // no memory is above it
	stackMargin = 16 << 10 // more than a goroutine's stack uses here
	highFD      = 16       // above the descriptors of a command and its supervisor
	reportFD    = 3
	maxSignal   = 64
	maxFD       = 16 << 10 // closed up to here if the kernel has no close_range
)

//go:nosplit
//go:noinline
//go:norace
//go:nocheckptr
func supervisorMain(j *job) {
	var errno syscall.Errno
	var i, pid, command uintptr
	var status int32
	var action [4]uint64 // zeros: SIG_DFL

	for i = 1; i <= maxSignal; i++ {
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, i, uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	}
	if _, _, errno = syscall.RawSyscall6(syscall.SYS_PRCTL, unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0, 0); errno != 0 {
		goto failed
	}
	_, _, _ = syscall.RawSyscall6(syscall.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&supervisorName)), 0, 0, 0, 0)
	for i = range uintptr(len(j.fds)) { // moves them above the targets of dup3
		if j.fds[i], _, errno = syscall.RawSyscall(syscall.SYS_FCNTL, j.fds[i], syscall.F_DUPFD_CLOEXEC, highFD); errno != 0 {
			goto failed
		}
	}
	for i = range uintptr(reportFD) {
		if _, _, errno = syscall.RawSyscall(syscall.SYS_DUP3, j.fds[i], i, 0); errno != 0 {
			goto failed
		}
	}
	if _, _, errno = syscall.RawSyscall(syscall.SYS_DUP3, j.fds[reportFD], reportFD, syscall.O_CLOEXEC); errno != 0 {
		goto failed
	}
	j.fds[reportFD] = reportFD
	if _, _, errno = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, reportFD+1, maxUint32, 0); errno != 0 {
		for i = reportFD + 1; i < maxFD; i++ {
			_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, i, 0, 0)
		}
	}

	command, _, errno = syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		goto failed
	}
	if command == 0 {
		commandMain(j)
	}
	for i = range uintptr(reportFD) {
		_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, i, 0, 0)
	}
	j.report.kind, j.report.value = reportPid, int32(command)
	_, _, _ = syscall.RawSyscall(syscall.SYS_WRITE, reportFD, uintptr(unsafe.Pointer(&j.report)), unsafe.Sizeof(j.report))
	for {
		pid, _, errno = syscall.RawSyscall6(syscall.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&status)), 0,
			uintptr(unsafe.Pointer(&j.report.usage)), 0, 0)
		if errno == 0 && pid == command {
			j.report.kind, j.report.value = reportEnd, status
			break
		}
		if errno == syscall.ECHILD {
			_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 1, 0, 0)
		}
	}
	_, _, _ = syscall.RawSyscall(syscall.SYS_WRITE, reportFD, uintptr(unsafe.Pointer(&j.report)), unsafe.Sizeof(j.report))
	for {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
failed:
	j.report.kind, j.report.value = reportPid, -int32(errno)
	_, _, _ = syscall.RawSyscall(syscall.SYS_WRITE, j.fds[reportFD], uintptr(unsafe.Pointer(&j.report)), unsafe.Sizeof(j.report))
	for {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 1, 0, 0)
	}
}

const maxUint32 = 1<<32 - 1

var supervisorName = [...]byte{'b', 'e', 'r', 'm', '-', 'e', 'x', 'e', 'c', 0}

//go:nosplit
//go:noinline
//go:norace
//go:nocheckptr
func commandMain(j *job) {
	var errno syscall.Errno
	var none uint64 // no signal is blocked

	_, _, _ = syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0)
	if j.tty {
		if _, _, errno = syscall.RawSyscall(syscall.SYS_IOCTL, 0, syscall.TIOCSCTTY, 0); errno != 0 {
			j.report.kind = reportTTY
			goto failed
		}
	}
	if j.dir != 0 {
		if _, _, errno = syscall.RawSyscall(syscall.SYS_CHDIR, j.dir, 0, 0); errno != 0 {
			j.report.kind = reportChdir
			goto failed
		}
	}
	_, _, _ = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, syscall.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&j.files)), 0, 0, 0)
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&none)), 0, 8, 0, 0)
	_, _, errno = syscall.RawSyscall(syscall.SYS_EXECVE, j.path, j.argv, j.env)
	if errno == syscall.ENOEXEC {
		_, _, errno = syscall.RawSyscall(syscall.SYS_EXECVE, j.shell, j.shellArgv, j.env)
	}
	j.report.kind = reportExec
failed:
	j.report.value = int32(errno)
	_, _, _ = syscall.RawSyscall(syscall.SYS_WRITE, reportFD, uintptr(unsafe.Pointer(&j.report)), unsafe.Sizeof(j.report))
	for {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, exitNotExecutable, 0, 0)
	}
}

// fileLimit returns the limit of open files that this process was started with, for its children. Go
// raises the limit at the start, and restores it before an execve, even one that fails. So fileLimit
// lets an execve fail, reads the limit, and raises it again.
func fileLimit() (syscall.Rlimit, error) {
	var own syscall.Rlimit
	if err := syscall.Exec("/", []string{""}, nil); err == nil {
		return own, errors.New("a directory was executed")
	}
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &own); err != nil {
		return own, err
	}
	raised := own
	raised.Cur = raised.Max
	return own, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &raised)
}
