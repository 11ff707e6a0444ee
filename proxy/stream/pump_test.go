package stream

import (
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"unicode/utf8"

	"github.com/bermhq/berm/runtime"
)

// flicker prints one byte after another, to the two streams in turn, until it is closed.
type flicker struct {
	seq    int64
	closed chan struct{}
}

func (f *flicker) Next() (runtime.Chunk, error) {
	select {
	case <-f.closed:
		return runtime.Chunk{}, net.ErrClosed
	default:
	}
	f.seq++
	return runtime.Chunk{Seq: f.seq, Stderr: f.seq%2 == 0, Data: []byte("x")}, nil
}

func (*flicker) Write(b []byte) (int, error) { return len(b), nil }
func (*flicker) CloseWrite() error           { return nil }
func (f *flicker) Close() error              { close(f.closed); return nil }

// broken is a source that panics.
type broken struct{ flicker }

func (*broken) Next() (runtime.Chunk, error) { panic("boo") }

// A panic of a source ends its request and not the server.
func TestPumpPanics(t *testing.T) {
	p := startPump(&broken{flicker{closed: make(chan struct{})}})
	<-p.ready
	if _, err := p.take(); err == nil {
		t.Error("the output has no end")
	}
	defer func() {
		if recover() == nil {
			t.Error("the panic isn't repeated in the request's goroutine")
		}
	}()
	p.stop()
}

// What comes in many small pieces is held back sooner than its bytes say.
func TestPumpPieces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := startPump(&flicker{closed: make(chan struct{})})
		defer p.stop()
		for range 3 {
			synctest.Wait() // until it waits for room
			pieces, err := p.take()
			if len(pieces) != maxPieces || err != nil {
				t.Errorf("a batch of %d pieces, %v", len(pieces), err)
			}
		}
	})
}

// Output is cut between characters into pieces, each with its place.
func TestBatch(t *testing.T) {
	var b batch
	text, got := strings.Repeat("€", maxEvent/2), ""
	b.add(runtime.Chunk{Seq: int64(len(text)), Data: []byte(text)})
	b.add(runtime.Chunk{Seq: int64(len(text)) + 1, Data: []byte("x")})
	for _, p := range b.pieces {
		if got += string(p.Data); p.Seq != int64(len(got)) || len(p.Data) > maxEvent || !utf8.Valid(p.Data) {
			t.Errorf("%d bytes up to %d after %d", len(p.Data), p.Seq, len(got))
		}
	}
	if got != text+"x" || len(b.pieces) != 2 || b.size != len(got) {
		t.Errorf("%d of %d bytes in %d pieces", len(got), b.size, len(b.pieces))
	}
}
