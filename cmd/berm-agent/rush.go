package main

import (
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	rushBytes = 64 << 10         // that come without a gap
	rushGap   = time.Millisecond // after which it is over
	rushPipe  = 256 << 10
)

// rush is an output of which much comes at once. A program that prints it in small
// pieces, and wakes this one for each, is slowed down by that, and so are all through
// whose hands the pieces go. So a pipe that is in a rush is let fill up for a
// moment, in which its program isn't held up: less than even a gigabyte a second needs to
// fill it.
type rush struct {
	bytes int
	last  time.Time
	span  time.Duration
	timer *socket // nil before the first pause
}

// pause is called after n bytes were read.
func (r *rush) pause(pipe syscall.RawConn, n int) {
	now := time.Now()
	if now.Sub(r.last) > rushGap {
		r.bytes = 0
	}
	r.last = now
	if r.bytes = min(r.bytes+n, rushBytes); r.bytes < rushBytes || n == wire.MaxData { // there is more already
		return
	}
	if r.timer == nil && !r.begin(pipe) {
		return
	}
	after := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(r.span))}
	set := false
	_ = r.timer.raw.Control(func(fd uintptr) { set = unix.TimerfdSettime(int(fd), 0, &after, nil) == nil })
	var ticks [8]byte
	if set {
		_, _ = r.timer.Read(ticks[:])
	}
	r.last = time.Now()
}

// begin makes room in the pipe, as far as its user's share of pipes allows, and a timer:
// Go's own are a millisecond off in a program that has nothing else to do.
func (r *rush) begin(pipe syscall.RawConn) bool {
	_ = pipe.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, rushPipe) })
	r.span = time.Duration(min(pipeSize(pipe), rushPipe)) * time.Nanosecond // a byte each
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return false
	}
	r.timer, err = newSocket(os.NewFile(uintptr(fd), "timer"))
	return err == nil
}

func (r *rush) end() {
	if r.timer != nil {
		_ = r.timer.Close()
	}
}
