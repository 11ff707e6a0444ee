package main

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// After a command has ended, other processes may still have its output open. Their output is read until
// none came for drainQuiet, and for at most maxDrain.
const (
	drainQuiet = 500 * time.Millisecond
	maxDrain   = 900 * time.Millisecond
)

// chunks are buffers for output. They are taken only once there is output.
var chunks = sync.Pool{New: func() any { return new(wire.OutputFrame) }}

// read reads the output from a pipe or terminal to its end.
func (p *process) read(f *os.File, stderr bool) {
	defer p.readers.Done()
	if !p.tty { // a terminal is for both directions
		defer shut(f)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	for err == nil {
		if _, err = p.take(raw.Read, stderr); err == nil {
			p.bound(f)
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return
	}
	// Output from before the command's end is still in the pipe if a follower was slow.
	left := pipeSize(raw)
	for err = nil; err == nil && left > 0; {
		var n int
		n, err = p.take(func(f func(uintptr) bool) error {
			return raw.Control(func(fd uintptr) { f(fd) })
		}, stderr)
		left -= n
	}
}

// take reads once when access allows it, and adds the output to the ring. The end of a terminal is EIO.
func (p *process) take(access func(func(fd uintptr) bool) error, stderr bool) (int, error) {
	var buf *wire.OutputFrame
	n, err := transfer(access, func(fd uintptr) (int, error) {
		buf = chunks.Get().(*wire.OutputFrame)
		n, err := gatedOnce(unix.SYS_READ, fd, buf.Data())
		if n == 0 {
			chunks.Put(buf)
		}
		return n, err
	})
	if err != nil {
		return 0, err
	}
	p.add(stderr, buf.Data()[:n])
	chunks.Put(buf)
	return n, nil
}

// pipeSize returns how many bytes a pipe or terminal can hold.
func pipeSize(raw syscall.RawConn) int {
	size := wire.MaxData
	_ = raw.Control(func(fd uintptr) {
		if n, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0); err == nil {
			size = n
		}
	})
	return size
}

// bound sets a deadline for reading the output, once the command has ended.
func (p *process) bound(f *os.File) {
	p.mu.Lock()
	by := p.drainBy
	p.mu.Unlock()
	if by.IsZero() {
		return
	}
	if quiet := time.Now().Add(drainQuiet); quiet.Before(by) {
		by = quiet
	}
	_ = f.SetReadDeadline(by)
}

// maxFollowers is the most followers that a process has at once.
const maxFollowers = 64

// follower is a connection that follows a process.
type follower struct {
	seq       int64 // where the output that it was sent ends
	lossless  bool
	exclusive bool
	end       error // why it must end before the process
}

// add adds output to the ring. It waits until lossless followers have made room for it.
func (p *process) add(stderr bool, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(data) > 0 {
		n := len(data)
		for f := range p.followers {
			if f.lossless {
				n = min(n, p.ring.Room(stderr, f.seq))
			}
		}
		if n <= 0 {
			p.change.Wait()
			continue
		}
		p.ring.Add(stderr, data[:n])
		p.change.Broadcast()
		data = data[n:]
	}
}

// push adds output to the ring without waiting.
func (p *process) push(stderr bool, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ring.Add(stderr, data)
	p.change.Broadcast()
}

func (p *process) outOfRange(seq int64) error {
	first, next := p.ring.Bounds()
	return &wire.Failure{Class: wire.ClassOutOfRange, Message: fmt.Sprintf("the output is kept from %d to %d, and %d isn't in it", first, next, seq)}
}

// join adds a follower.
func (p *process) join(how wire.Follow) (*follower, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first, next := p.ring.Bounds()
	if how.From == wire.FromFirst {
		how.From = first
	}
	f := &follower{seq: how.From, lossless: how.Lossless, exclusive: how.Exclusive || how.TakeOver}
	if f.seq < first || f.seq > next {
		return nil, p.outOfRange(f.seq)
	}
	var other *follower // the exclusive one
	for o := range p.followers {
		if f.exclusive && o.exclusive {
			other = o
		}
	}
	switch {
	case other != nil && how.TakeOver:
		p.drop(other, &wire.Failure{Class: wire.ClassAborted, Message: "another follower took process " + p.id + " over"})
	case other != nil:
		return nil, &wire.Failure{Class: wire.ClassExists, Message: "process " + p.id + " has an exclusive follower"}
	case len(p.followers) >= maxFollowers:
		return nil, &wire.Failure{Class: wire.ClassExhausted, Message: fmt.Sprintf("process %s has %d followers, and no more may follow it", p.id, maxFollowers)}
	}
	p.followers[f] = true
	return f, nil
}

// drop ends a follower, so that output doesn't wait for it any more. The caller holds p.mu.
func (p *process) drop(f *follower, err error) {
	delete(p.followers, f)
	if f.end == nil {
		f.end = err
	}
	p.change.Broadcast()
}

// leave is drop for a caller that doesn't hold p.mu.
func (p *process) leave(f *follower, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop(f, err)
}

// serve serves a follower to the end of the process, or until Berm hangs up.
func (p *process) serve(c *conn, f *follower) (any, error) {
	defer p.leave(f, errGone)
	if !p.exec || p.stdin { // Berm waits for an Item only then
		info := p.snapshot()
		info.FirstSeq = f.seq
		if c.w.SendJSON(wire.KindItem, info) != nil {
			return nil, errGone
		}
	}
	c.watch(func() {
		p.leave(f, errGone)
		_ = c.Close() // SendFrame may wait for room
	})
	for seq := f.seq; ; {
		buf, o, err := p.await(f, seq)
		switch {
		case err != nil:
			return nil, err
		case buf == nil:
			c.after = p.delivered
			return p.snapshot(), nil
		}
		err, seq = c.w.SendFrame(buf, o), o.Seq
		chunks.Put(buf)
		if err != nil {
			return nil, errGone
		}
	}
}

// await records that the follower has the output up to seq. It waits for the next output, and
// returns it in a frame, or a nil frame after the last.
func (p *process) await(f *follower, seq int64) (*wire.OutputFrame, wire.Output, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.seq = seq
	p.change.Broadcast()
	for {
		_, next := p.ring.Bounds()
		switch {
		case f.end != nil:
			return nil, wire.Output{}, f.end
		case f.seq < next:
			buf := chunks.Get().(*wire.OutputFrame)
			o, kept := p.ring.Read(f.seq, buf.Data())
			if !kept {
				chunks.Put(buf)
				return nil, wire.Output{}, p.outOfRange(f.seq)
			}
			return buf, o, nil
		case !p.info.Running:
			return nil, wire.Output{}, nil
		}
		p.change.Wait()
	}
}

// delivered drops the output of a process with once, if a follower was sent all of it.
func (p *process) delivered(sent bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sent && p.once && len(p.followers) == 0 {
		p.ring.Clear()
	}
}

// follow does OpFollow.
func (c *conn) follow(p *process, req *wire.Process) (any, error) {
	if req.Follow == nil || req.Follow.From < wire.FromFirst {
		return nil, invalid("the request doesn't say how to follow")
	}
	f, err := p.join(*req.Follow)
	if err != nil {
		return nil, err
	}
	return p.serve(c, f)
}
