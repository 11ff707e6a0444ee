package wire

import (
	"bytes"
	"encoding/binary"
	"io"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// MaxStreams is the most operations that a container has at once.
const MaxStreams = 1000

// Mux returns the configuration of either side of a session. A write fails after the time write if the
// other side reads nothing. A stream that this side has closed waits for the other side to close it, at
// most for the time closing; 0 is forever.
func Mux(write, closing time.Duration) *yamux.Config {
	c := yamux.DefaultConfig()
	c.AcceptBacklog = MaxStreams + 24 // more, so that opening a stream never waits
	c.EnableKeepAlive = false         // it would end the sessions of paused containers
	c.ConnectionWriteTimeout = write
	c.StreamOpenTimeout = 0 // an operation has a timeout of its own
	c.StreamCloseTimeout = closing
	c.LogOutput = io.Discard // the other side could get anything logged
	return c
}

// Joined is a carrier of a session that joins frames into fewer writes. Yamux writes a frame's header
// apart from its data, and opens and accepts a stream with extra frames. Joined holds both back until
// the next frame. Nothing waits for them: the side that opens a stream sends a request or closes it,
// and never waits until the stream is accepted.
type Joined struct {
	io.ReadWriteCloser
	held []byte // headers held back
	data bool   // the next write is the data of the last header
}

const (
	joinMost = 4 << 10 // bytes of headers held back
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
