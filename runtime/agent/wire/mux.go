package wire

import (
	"bytes"
	"encoding/binary"
	"io"
	"sync"
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

// Joined is a carrier of a session on which frames go out together. Yamux writes the header
// and the data of a frame apart, and opens and accepts a stream by frames of their own: those
// wait for the next frame. Who opens a stream sends a request or closes it, and nobody waits
// to see it accepted.
type Joined struct {
	io.ReadWriteCloser
	held []byte // headers that haven't gone out
	data bool   // the next write is the data of the last header
}

const (
	joinMost = 4 << 10 // bytes of headers that wait
	muxHead  = 12
)

var joins = sync.Pool{New: func() any { return new(bytes.Buffer) }}

func (j *Joined) Write(p []byte) (int, error) {
	head := !j.data && len(p) == muxHead
	j.data = head && p[1] == 0 && binary.BigEndian.Uint32(p[8:]) > 0
	begins := head && p[1] == 1 && (p[3] == 1 || p[3] == 2) // a window update with SYN or ACK alone
	if (j.data || begins) && len(j.held) < joinMost {
		j.held = append(j.held, p...)
		return len(p), nil
	}
	if len(j.held) == 0 {
		return j.ReadWriteCloser.Write(p)
	}
	b := joins.Get().(*bytes.Buffer)
	defer joins.Put(b)
	b.Reset()
	_, _ = b.Write(j.held)
	_, _ = b.Write(p)
	held := len(j.held)
	j.held = j.held[:0]
	n, err := j.ReadWriteCloser.Write(b.Bytes())
	return max(n-held, 0), err
}
