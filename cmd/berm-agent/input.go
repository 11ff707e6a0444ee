package main

import (
	"errors"
	"os"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// openInput makes c the writer, if there is none.
func (p *process) openInput(c *conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.input == nil:
		return precondition("the input of process %s is closed", p.id)
	case p.writer != nil:
		return &wire.Failure{Class: wire.ClassExists, Message: "process " + p.id + " has a writer"}
	}
	p.writer = c
	return nil
}

// leaveInput ends c's turn as the writer, and interrupts a write that waits.
func (p *process) leaveInput(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.writer == c {
		p.writer = nil
		if p.input != nil {
			_ = p.input.SetWriteDeadline(time.Now())
		}
	}
}

// feed does OpInput.
func (c *conn) feed(p *process, _ *wire.Process) (any, error) {
	if err := p.openInput(c); err != nil {
		return nil, err
	}
	defer p.leaveInput(c)
	data, done := make(chan []byte), make(chan struct{})
	defer close(done)
	go func() { // reads on to notice that Berm hangs up, even if the process reads no input
		defer close(data)
		defer p.leaveInput(c)
		for {
			kind, payload, err := c.r.Next()
			if err != nil || kind != wire.KindData && kind != wire.KindEnd {
				return
			}
			var b []byte // nil is the end
			if kind == wire.KindData {
				b = append([]byte{}, payload...)
			}
			select {
			case data <- b:
			case <-done:
				return
			}
		}
	}()
	for c.w.Send(wire.KindReady, nil) == nil {
		b, ok := <-data
		switch {
		case !ok:
			return nil, errGone
		case b == nil:
			return nil, p.endInput(c)
		}
		if err := p.write(c, b); err != nil {
			return nil, err
		}
	}
	return nil, errGone
}

// write writes data to the input, and waits until the pipe or terminal has taken all of it.
func (p *process) write(c *conn, data []byte) error {
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	for len(data) > 0 {
		p.mu.Lock()
		input := p.input
		switch {
		case p.writer != c:
			p.mu.Unlock()
			return errGone
		case input == nil:
			p.mu.Unlock()
			return precondition("the input of process %s is closed", p.id)
		}
		_ = input.SetWriteDeadline(time.Time{}) // it may be closed
		p.mu.Unlock()
		n, err := gated(input).Write(data)
		data = data[n:]
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return precondition("process %s takes no input: %s", p.id, reason(err))
		}
	}
	return nil
}

// endInput closes the input for good. To a terminal, it writes the end-of-file character instead.
func (p *process) endInput(c *conn) error {
	var end []byte
	if p.tty && p.control(func(fd int) error { end = endOfFile(fd); return nil }) == nil {
		return p.write(c, end)
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.input != nil && !p.tty {
		shut(p.input)
		p.input = nil
	}
	return nil
}
