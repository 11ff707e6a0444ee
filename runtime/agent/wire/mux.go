package wire

import (
	"encoding/binary"
	"io"
	"time"

	"github.com/hashicorp/yamux"
)

// MaxStreams is how many operations a session has at once.
const MaxStreams = 1000

// Mux configures either side of a session. Write is how long the other side may take
// nothing until a write fails. Closing is how long a stream that this side has closed
// waits for the other side to do so; 0 is for ever.
func Mux(write, closing time.Duration) *yamux.Config {
	c := yamux.DefaultConfig()
	c.AcceptBacklog = MaxStreams + 24 // more, so that opening a stream never waits
	c.EnableKeepAlive = false         // it would end the sessions of paused containers
	c.ConnectionWriteTimeout = write
	c.StreamOpenTimeout = 0 // an operation has a timeout of its own
	c.StreamCloseTimeout = closing
	c.LogOutput = io.Discard // the other side may have it logged anything
	return c
}

// Joined is a carrier of a session on which each small frame is one write. Yamux writes a
// frame's header and its data apart.
type Joined struct {
	io.ReadWriteCloser
	head []byte // held back
}

const (
	joinMost = 4 << 10
	muxHead  = 12
)

func (j *Joined) Write(p []byte) (int, error) {
	held := len(j.head)
	switch {
	case held == 0 && len(p) == muxHead && p[1] == 0 && binary.BigEndian.Uint32(p[8:]) > 0: // a data frame's
		j.head = append(j.head, p...)
		return len(p), nil
	case held == 0:
		return j.ReadWriteCloser.Write(p)
	}
	small := p[:min(len(p), joinMost)]
	b := append(j.head, small...)
	j.head = b[:0]
	n, err := j.ReadWriteCloser.Write(b)
	n = max(n-held, 0)
	if err == nil && len(p) > len(small) {
		var more int
		more, err = j.ReadWriteCloser.Write(p[len(small):])
		n += more
	}
	return n, err
}
