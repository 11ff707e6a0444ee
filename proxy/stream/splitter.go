package stream

import (
	"bytes"

	"github.com/bermhq/berm/runtime"
)

// splitter cuts the output of the two streams into lines. For each stream it holds back an
// incomplete line, and tracks how much was sent.
type splitter struct {
	told Place // sent by an earlier stream
	last int64 // output was read up to here
	held [2][]byte
	from [2]int64 // the seq after which the held bytes begin
}

// piece is a line of one stream, or a part of one.
type piece struct {
	stderr  bool
	data    []byte // until the next piece
	seq     int64
	partial bool // cut without an end
}

// newSplitter returns a splitter that skips output which was sent before the place told.
func newSplitter(told Place) *splitter {
	if told == Anywhere {
		return &splitter{}
	}
	return &splitter{told: told, last: told.Seq()}
}

// feed emits the pieces that a chunk completes.
func (s *splitter) feed(c runtime.Chunk, emit func(piece) error) error {
	i := streamOf(c)
	c = s.told.fresh(c)
	buf := c.Data
	if len(s.held[i]) > 0 {
		buf = append(s.held[i], buf...)
	} else {
		s.from[i] = c.Seq - int64(len(buf))
	}
	s.held[i] = buf
	for len(c.Data) > 0 {
		n, end := cutLine(buf)
		if n+end == 0 {
			break
		}
		data := buf[:n]
		buf = buf[n+end:]
		seq := c.Seq - int64(len(buf))
		s.held[i], s.from[i] = buf, seq
		s.last = max(s.last, seq)
		if err := emit(piece{c.Stderr, data, seq, end == 0}); err != nil {
			return err
		}
	}
	s.held[i] = bytes.Clone(buf) // the chunk's bytes are the source's
	s.last = max(s.last, c.Seq)
	return nil
}

// rest emits the held bytes of both streams as partial lines.
func (s *splitter) rest(emit func(piece) error) error {
	for i, data := range s.held {
		if s.held[i] = nil; len(data) > 0 {
			if err := emit(piece{i == 1, data, s.last, true}); err != nil {
				return err
			}
		}
	}
	return nil
}

// place returns the place up to which each stream was sent.
func (s *splitter) place() (at Place) {
	for i := range at {
		at[i] = max(s.last, s.told[i])
		if len(s.held[i]) > 0 {
			at[i] = s.from[i]
		}
	}
	return at
}

// cutLine returns the length of the first line of the held bytes, and that of its line end.
// Both are 0 if there is no whole line yet. It cuts a line that is too long between
// characters; then end is 0.
func cutLine(held []byte) (n, end int) {
	most := min(len(held), maxEvent)
	if i := bytes.IndexByte(held[:most], '\n'); i >= 0 {
		return i, 1
	}
	if most < maxEvent {
		return 0, 0
	}
	return most - incomplete(held[:most]), 0
}
