package wire

import (
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
