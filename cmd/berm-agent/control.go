package main

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// sink takes a process' input.
type sink interface {
	write(data []byte)
	end()
	close() // no call follows it
}

// inputNow waits until the process has taken it.
type inputNow struct {
	p  *process
	at *attachment
}

func (i inputNow) write(data []byte) { i.p.write(i.at, data) }
func (i inputNow) end()              { i.p.endInput(i.at) }
func (inputNow) close()              {}

// inputAside waits in a goroutine of its own, and then says Ready. Who writes again before
// that waits as well.
type inputAside struct {
	next    chan []byte // nil is the end
	stopped sync.WaitGroup
}

func (p *process) inputAside(c *conn, at *attachment, f *feeder) *inputAside {
	i := &inputAside{next: make(chan []byte)}
	i.stopped.Go(func() {
		for data := range i.next {
			if data == nil {
				p.endInput(at)
				continue
			}
			p.write(at, data)
			f.meanwhile(func() { _ = c.w.Send(wire.KindReady) })
		}
	})
	return i
}

func (i *inputAside) write(data []byte) { i.next <- append([]byte{}, data...) }
func (i *inputAside) end()              { i.next <- nil }

func (i *inputAside) close() {
	close(i.next)
	i.stopped.Wait()
}

// meanwhile does something if the operation goes on, which doesn't end before it's done.
func (f *feeder) meanwhile(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.over {
		do()
	}
}

// controlled does what Berm asks for while the process is followed, if it can be. False:
// that is nothing to ask for then.
func (p *process) controlled(payload []byte) bool {
	var req wire.Request
	if wire.Decode(payload, &req) != nil || req.Process == nil || req.Process.ID != p.id {
		return false
	}
	switch req.Op {
	case wire.OpSignal:
		if checkSignal(req.Process.Signal) != nil {
			return false
		}
		_ = p.send(unix.Signal(req.Process.Signal)) // it may have ended
	case wire.OpResize:
		if checkSize(req.Process.Rows, req.Process.Cols) != nil {
			return false
		}
		_ = p.resize(req.Process.Rows, req.Process.Cols) // likewise
	default:
		return false
	}
	return true
}
