package stream

import (
	"errors"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
)

// Bounds of a batch, which grows while a write to the caller is under way.
const (
	maxBatch  = 256 << 10 // bytes
	maxPieces = 1024      // each of which becomes an event
)

// batch is the output that came since the last batch was taken.
type batch struct {
	pieces []runtime.Chunk // in order; no two neighbours could be one
	size   int             // bytes in them
}

// add copies a chunk into the batch. It extends the last piece if that is of the same stream
// and has room.
func (b *batch) add(c runtime.Chunk) {
	for {
		n := min(len(c.Data), maxEvent)
		if n < len(c.Data) {
			n -= incomplete(c.Data[:n])
		}
		last := len(b.pieces) - 1
		if last < 0 || b.pieces[last].Stderr != c.Stderr || len(b.pieces[last].Data)+n > maxEvent {
			b.pieces = append(b.pieces, runtime.Chunk{Stderr: c.Stderr})
			last++
		}
		p := &b.pieces[last]
		p.Seq, p.Data = c.Seq-int64(len(c.Data)-n), append(p.Data, c.Data[:n]...)
		b.size += n
		if c.Data = c.Data[n:]; len(c.Data) == 0 {
			return
		}
	}
}

// pump reads a source ahead of its writer, by no more than a batch.
type pump struct {
	ready chan struct{} // there is something to take, or the end

	src     Source
	reading proxy.Tasks
	mu      sync.Mutex
	room    sync.Cond
	next    batch
	err     error
	stopped bool
}

// startPump reads from src until stop, which has to be called.
func startPump(src Source) *pump {
	p := &pump{src: src, ready: make(chan struct{}, 1)}
	p.room.L = &p.mu
	p.reading.Abort = func() { p.put(runtime.Chunk{}, errPanic) }
	p.reading.Go(func() {
		for p.put(src.Next()) {
		}
	})
	return p
}

// errPanic ends the output of a source that panicked.
var errPanic = errors.New("panic")

// put waits for room and adds a chunk, or the source's error. It returns false if the reader
// must stop.
func (p *pump) put(c runtime.Chunk, err error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.stopped && p.next.size > 0 && (p.next.size+len(c.Data) > maxBatch || len(p.next.pieces) >= maxPieces) {
		p.room.Wait()
	}
	if p.stopped {
		return false
	}
	if err == nil {
		p.next.add(c)
	}
	p.err = err
	select {
	case p.ready <- struct{}{}:
	default:
	}
	return err == nil
}

// take returns the output that is there, and the source's error once it has ended.
func (p *pump) take() ([]runtime.Chunk, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pieces := p.next.pieces
	p.next = batch{}
	p.room.Signal()
	return pieces, p.err
}

// stop closes the source and waits for its reader. It panics if the source did. It may be
// called again.
func (p *pump) stop() {
	p.mu.Lock()
	again := p.stopped
	p.stopped = true
	p.room.Signal()
	p.mu.Unlock()
	if !again {
		_ = p.src.Close()
	}
	p.reading.Wait()
}

// Text decodes UTF-8 that comes in parts. It replaces invalid bytes by U+FFFD.
type Text struct{ held []byte }

// Add returns the characters that b completes, and holds back an incomplete one.
func (t *Text) Add(b []byte) string {
	if len(t.held) > 0 {
		b = append(t.held, b...)
	}
	whole := len(b) - incomplete(b)
	s := strings.ToValidUTF8(string(b[:whole]), "\ufffd")
	t.held = append([]byte(nil), b[whole:]...)
	return s
}

// incomplete is how many bytes at the end begin a character but don't end it.
func incomplete(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		c := b[len(b)-n]
		if utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}
