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

// When a command has ended, others may have its output open. What they print is still
// taken until they are quiet for a while, or at the latest after maxDrain.
const (
	drainQuiet = 500 * time.Millisecond
	maxDrain   = 900 * time.Millisecond
)

// chunks are for output on its way: only who has some takes one.
var chunks = sync.Pool{New: func() any { return new(wire.OutputFrame) }}

// read takes the output from a pipe or terminal to its end.
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
	// What was printed before the end is still in the pipe if Berm took its time.
	left := pipeSize(raw)
	for err = nil; err == nil && left > 0; {
		var n int
		n, err = p.take(func(f func(uintptr) bool) error {
			return raw.Control(func(fd uintptr) { f(fd) })
		}, stderr)
		left -= n
	}
}

// errOutput is the end of an output, or that it has nothing right now.
var errOutput = errors.New("no output")

// take reads once, as access allows, and adds what there was.
func (p *process) take(access func(func(fd uintptr) bool) error, stderr bool) (n int, err error) {
	var buf *wire.OutputFrame
	var failed error
	err = access(func(fd uintptr) bool {
		buf = chunks.Get().(*wire.OutputFrame)
		if n, failed = readOnce(int(fd), buf.Data()); failed == nil && n > 0 {
			return true
		}
		chunks.Put(buf)
		return !errors.Is(failed, unix.EAGAIN)
	})
	switch {
	case err != nil:
		return 0, err
	case failed != nil || n <= 0: // EIO is a terminal's end
		return 0, errOutput
	}
	p.add(stderr, buf.Data()[:n])
	chunks.Put(buf)
	return n, nil
}

func readOnce(fd int, b []byte) (n int, err error) {
	for {
		err = kernel.do(func() error { n, err = unix.Read(fd, b); return err })
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// pipeSize is how much a pipe or terminal can hold.
func pipeSize(raw syscall.RawConn) int {
	size := wire.MaxData
	_ = raw.Control(func(fd uintptr) {
		if n, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0); err == nil {
			size = n
		}
	})
	return size
}

// bound bounds how long an output is waited for, once the command has ended.
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
	_ = f.SetReadDeadline(by) // it is open
}

// attachment is a connection's hold on a process.
type attachment struct {
	seq  int64 // up to where it has been sent
	gone bool  // Berm has hung up
}

// add keeps output. While there is an attachment, it waits until that has room for it.
func (p *process) add(stderr bool, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(data) > 0 {
		n := len(data)
		if at := p.attached; at != nil {
			room := p.ring.Room(stderr, at.seq)
			if room <= 0 {
				p.change.Wait()
				continue
			}
			n = min(n, room)
		}
		p.ring.Add(stderr, data[:n])
		p.change.Broadcast()
		data = data[n:]
	}
}

// push keeps output without waiting.
func (p *process) push(stderr bool, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ring.Add(stderr, data)
	p.change.Broadcast()
}

// ask is before hold, which takes the turn: who asks later takes over, whoever is told
// to go first. From is as in wire.Process.
func (p *process) ask(from int64) (turn int64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turns++
	_, err = p.place(from)
	return p.turns, err
}

// hold attaches, and ends the attachment that there was.
func (p *process) hold(from, turn int64) (*attachment, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if turn < p.turn {
		return nil, p.takenOver()
	}
	first, err := p.place(from)
	if err != nil {
		return nil, err
	}
	at := &attachment{seq: first}
	p.attached, p.turn = at, turn
	p.awaken()
	return at, nil
}

func (p *process) takenOver() error {
	return &wire.Failure{Class: wire.ClassAborted, Message: "process " + p.id + " was taken over by another attachment"}
}

// awaken has all look at what they wait for again, those who write input too; with
// p.mu.
func (p *process) awaken() {
	if p.input != nil {
		_ = p.input.SetWriteDeadline(time.Now())
	}
	p.change.Broadcast()
}

// place is where output begins; with p.mu.
func (p *process) place(from int64) (int64, error) {
	first, next := p.ring.Bounds()
	switch {
	case from == -1:
		return first, nil
	case from < first || from > next:
		return 0, &wire.Failure{Class: wire.ClassOutOfRange, Message: fmt.Sprintf("the output is kept from %d to %d, and %d isn't in it", first, next, from)}
	}
	return from, nil
}

// release ends an attachment; the output isn't waited for any more.
func (p *process) release(at *attachment) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at.gone = true
	if p.attached == at {
		p.attached = nil
	}
	p.awaken()
}

// follow serves an attachment to the end of the process, or until Berm hangs up.
func (p *process) follow(c *conn, at *attachment) (*wire.ProcessInfo, error) {
	defer p.release(at)
	go p.feed(c, at)
	if err := p.deliver(c, at); err != nil {
		return nil, err
	}
	return p.tell(), nil
}

// told is when the output was sent to its end.
func (p *process) told() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.once && p.attached == nil {
		p.ring.Clear()
	}
}

// deliver sends the output, to the end of the process.
func (p *process) deliver(c *conn, at *attachment) error {
	for {
		buf := (*wire.OutputFrame)(nil)
		p.mu.Lock()
		o, ok := p.ring.After(at.seq)
		for p.attached == at && len(o.Data) == 0 && ok && !p.ended {
			p.change.Wait()
			o, ok = p.ring.After(at.seq)
		}
		if len(o.Data) > 0 {
			buf = chunks.Get().(*wire.OutputFrame)
			o.Data = buf.Data()[:copy(buf.Data(), o.Data)] // it is no more than MaxData
		}
		mine, gone := p.attached == at, at.gone
		if !ok { // nobody was attached while it was printed
			at.seq, _ = p.ring.Bounds()
		}
		p.mu.Unlock()
		switch {
		case gone:
			return errGone
		case !mine:
			return p.takenOver()
		case !ok:
			continue
		case buf == nil:
			return nil
		}
		err := c.w.SendFrame(buf, o)
		chunks.Put(buf)
		if err != nil {
			return errGone
		}
		p.mu.Lock()
		at.seq = o.Seq
		p.change.Broadcast()
		p.mu.Unlock()
	}
}

// feed gives Berm's input to the process. When Berm hangs up, it ends the attachment.
func (p *process) feed(c *conn, at *attachment) {
	for ended := false; ; {
		kind, payload, err := c.r.Next()
		switch {
		case err == nil && kind == wire.KindData && !ended:
			p.write(at, payload)
		case err == nil && kind == wire.KindEnd && !ended:
			p.endInput(at)
			ended = true
		default:
			p.release(at)
			_ = c.c.Close() // deliver may wait for room
			return
		}
	}
}

// write gives input to the process, and waits until it has taken it. What it can't
// take any more is lost.
func (p *process) write(at *attachment, data []byte) {
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	for len(data) > 0 {
		p.mu.Lock()
		input := p.input
		if p.attached != at || input == nil {
			p.mu.Unlock()
			return
		}
		_ = input.SetWriteDeadline(time.Time{}) // it may be closed
		p.mu.Unlock()
		n, err := gated{input}.Write(data)
		data = data[n:]
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
}

// endInput ends it, for good; that of a terminal as a user would.
func (p *process) endInput(at *attachment) {
	var end []byte
	if p.tty && p.control(func(fd int) error { end = endOfFile(fd); return nil }) == nil {
		p.write(at, end)
		return
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.attached == at && p.input != nil && !p.tty {
		shut(p.input)
		p.input = nil
	}
}
