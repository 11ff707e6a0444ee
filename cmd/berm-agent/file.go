package main

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/files"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// fileHandler returns the handler of an operation on files or ports, nil if it is neither.
func fileHandler(op wire.Op) handler {
	if op == wire.OpDial {
		return dialPort
	}
	if !files.Does(op) {
		return nil
	}
	return func(c *conn, req *wire.Request) (any, error) {
		p := &peer{upload: upload{conn: c}, gate: disk}
		result, err := files.Do(files.OwnRoot, p, op, req.File)
		if p.lost.Load() {
			err = errGone
		}
		return result, err
	}
}

// peer is the client of an operation on files, which leaves its gate while it waits for Berm.
type peer struct {
	upload
	gate
	lost atomic.Bool // an error was errGone
}

// outside leaves the gate during a call that waits for Berm.
func (p *peer) outside(call func() error) error {
	p.Unlock()
	defer p.Lock()
	err := call()
	if errors.Is(err, errGone) {
		p.lost.Store(true)
	}
	return err
}

func (p *peer) Ready() error     { return p.outside(p.ready) }
func (p *peer) Item(v any) error { return p.outside(func() error { return p.item(v) }) }

// Alive returns errGone if Berm has hung up.
func (p *peer) Alive() error {
	return p.outside(func() error {
		if p.gone() {
			return errGone
		}
		return nil
	})
}

// Read reads from the upload.
func (p *peer) Read(b []byte) (n int, err error) {
	err = p.outside(func() error { n, err = p.upload.Read(b); return err })
	return n, err
}

// Write sends Data.
func (p *peer) Write(b []byte) (int, error) {
	for done := 0; done < len(b); {
		n := min(len(b)-done, wire.MaxData)
		if err := p.outside(func() error { return p.send(wire.KindData, b[done:done+n]) }); err != nil {
			return done, err
		}
		done += n
	}
	return len(b), nil
}

// buffers are shared for data in transit: there may be many operations, and little memory.
var buffers = sync.Pool{New: func() any { return new([wire.MaxData]byte) }}

// upload reads the Data that comes with an operation. Its errors are errGone and, after End, io.EOF.
type upload struct {
	*conn
	rest  []byte
	ended bool
}

// next returns some bytes, valid until the next call.
func (u *upload) next() ([]byte, error) {
	if u.ended {
		return nil, io.EOF
	}
	switch kind, payload, err := u.r.Next(); {
	case err == nil && kind == wire.KindData:
		return payload, nil
	case err == nil && kind == wire.KindEnd:
		u.ended = true
		return nil, io.EOF
	}
	return nil, errGone
}

// Read copies from the frame, and needs no buffer of its own.
func (u *upload) Read(p []byte) (int, error) {
	for len(u.rest) == 0 {
		var err error
		if u.rest, err = u.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// again makes a system call on files, in the gate, and repeats it while signals interrupt it.
func again(call func() error) error {
	for {
		if err := disk.do(call); err != unix.EINTR { //nolint:errorlint // system calls give nothing else
			return err
		}
	}
}
