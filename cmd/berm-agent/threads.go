package main

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Go makes a thread whenever all of its threads are in system calls, and ends the program if it can't.
// Commands may leave no room for a thread at any time. So this program makes all its threads at its
// start, and bounds how many are in system calls at once. System calls that may take long go through a
// gate. Short ones are raw, and need no other thread.

// gate bounds how many threads are in system calls of a kind. A goroutine must not enter it
// twice.
type gate chan struct{}

var (
	// disk is for files, whose file system may be slow or hang.
	disk = make(gate, 3)
	// kernel is for pipes, terminals and processes. A goroutine may hold other locks when it
	// enters the gate, and must not acquire any inside it.
	kernel = make(gate, 1)
)

// Lock enters the gate.
func (g gate) Lock() { g <- struct{}{} }

// Unlock leaves the gate.
func (g gate) Unlock() { <-g }

func (g gate) do(call func() error) error {
	g.Lock()
	defer g.Unlock()
	return call()
}

// spareThreads returns how many threads to make: those for both gates, one that waits for
// events while another works, and one for the goroutine that dials Berm. Two more are for
// the moment when a thread leaves its system call and the next one has entered the gate.
func spareThreads() int { return cap(disk) + cap(kernel) + 4 }

// keepThreads makes n threads: n goroutines wait in system calls at once, and Go keeps their
// threads. If there is no room for all of them, it makes none and returns false.
func keepThreads(n int) bool {
	if !roomFor(n + 2) { // with those that Go may make for itself meanwhile
		return false
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC) != nil {
		return false
	}
	var begun, all sync.WaitGroup
	begun.Add(n)
	for range n {
		all.Go(func() {
			var b [1]byte
			begun.Done()
			_, _ = syscall.Read(fds[0], b[:]) // until the other end is closed
		})
	}
	begun.Wait() // each goroutine runs once the one before is in its system call
	_ = unix.Close(fds[1])
	all.Wait()
	_ = unix.Close(fds[0])
	return true
}

// kill signals a process, or a group. It never waits, and so needs no other thread.
func kill(pid int, sig syscall.Signal) error {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_KILL, uintptr(pid), uintptr(sig), 0); errno != 0 {
		return errno
	}
	return nil
}

// sinceBoot returns the time since the machine started, sleep included. It is 0 if the kernel
// has no such clock.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, unix.CLOCK_BOOTTIME, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0
	}
	return time.Duration(ts.Nano())
}

// shut closes a pipe, a terminal or a socket. It accepts nil and closed files.
func shut(f *os.File) { _ = kernel.do(f.Close) }

// pollable is a file that is read and written only when it is ready.
type pollable struct {
	*os.File
	once func(call, fd uintptr, b []byte) (int, error)
}

// socket returns a pollable for a socket, or another file of this process whose reads and writes never
// wait. They need no other thread.
func socket(f *os.File) *pollable { return &pollable{f, rawOnce} }

// gated returns a pollable for a pipe or terminal whose other end belongs to other processes.
func gated(f *os.File) *pollable { return &pollable{f, gatedOnce} }

func rawOnce(call, fd uintptr, b []byte) (int, error) {
	for {
		n, _, errno := syscall.RawSyscall(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), nil
		case syscall.EINTR:
		default:
			return 0, errno
		}
	}
}

func gatedOnce(call, fd uintptr, b []byte) (n int, err error) {
	transfer := unix.Read
	if call == syscall.SYS_WRITE {
		transfer = unix.Write
	}
	for {
		err = kernel.do(func() error { n, err = transfer(int(fd), b); return err })
		if !errors.Is(err, unix.EINTR) {
			return max(n, 0), err
		}
	}
}

func (p *pollable) Close() error { return kernel.do(p.File.Close) }

func (p *pollable) Read(b []byte) (int, error) {
	raw, err := p.SyscallConn()
	if err != nil || len(b) == 0 {
		return 0, err
	}
	return transfer(raw.Read, func(fd uintptr) (int, error) { return p.once(syscall.SYS_READ, fd, b) })
}

func (p *pollable) Write(b []byte) (done int, err error) {
	raw, err := p.SyscallConn()
	for done < len(b) && err == nil {
		var n int
		n, err = transfer(raw.Write, func(fd uintptr) (int, error) { return p.once(syscall.SYS_WRITE, fd, b[done:]) })
		done += n
	}
	return done, err
}

// gone reports whether the other end of a socket was closed, even if something is left to read.
func (p *pollable) gone() bool {
	raw, err := p.SyscallConn()
	if err != nil {
		return true
	}
	var n uintptr
	err = raw.Control(func(fd uintptr) {
		what, now := unix.PollFd{Fd: int32(fd)}, unix.Timespec{} // POLLHUP is always reported
		n, _, _ = syscall.RawSyscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&what)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	})
	return err != nil || n == 1
}

// transfer calls once when access, a method of a RawConn, finds the file ready. 0 bytes are io.EOF.
func transfer(access func(func(fd uintptr) bool) error, once func(fd uintptr) (int, error)) (n int, err error) {
	var failed error
	err = access(func(fd uintptr) bool {
		n, failed = once(fd)
		return failed != syscall.EAGAIN //nolint:errorlint // system calls give nothing else
	})
	switch {
	case err != nil:
		return 0, err
	case failed != nil:
		return 0, failed
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// roomFor reports whether n processes or threads can be made now. It forks processes, which
// count until they are reaped.
func roomFor(n int) bool {
	made := 0
	for made < n && forkNothing() {
		made++
	}
	for range made {
		for {
			_, err := syscall.Wait4(-1, nil, 0, nil)
			if !errors.Is(err, syscall.EINTR) {
				break
			}
		}
	}
	return made == n
}

// forkNothing forks a process that ends at once.
func forkNothing() bool {
	beforeFork()
	errno := forkEnd()
	afterFork()
	return errno == 0
}

//go:nosplit
//go:noinline
//go:norace
func forkEnd() syscall.Errno {
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	for errno == 0 && pid == 0 {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return errno
}
