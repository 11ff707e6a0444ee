package engineapi

import (
	"encoding/binary"
	"encoding/json"

	"github.com/bermhq/berm/proxy"
)

// farewell is what callers are told by a server that goes down.
var farewell = "berm: " + proxy.ErrGoingDown.Error()

const frameHead = 8 // bytes before those of a frame: which stream they are of, three zeros, how many

// closeMessage is what a stream ends with that is broken off as the server goes down. What its
// caller was sent before is written to it. A nil one has nothing to say.
type closeMessage struct {
	form streamForm
	head []byte // of the frame that has begun
	left uint32 // bytes of it that are still to come
	mid  bool   // the last line hasn't ended
}

type streamForm int

const (
	unknown   streamForm = iota // framed, unless something shows that it is raw
	framed                      // bytes of stdout and stderr in frames
	terminal                    // bytes of a terminal
	textLine                    // nothing is sent before the one answer
	jsonLines                   // messages of progress
)

// formOf is what an engine says of a stream; those before API 1.42 say the same of all.
func formOf(contentType string) streamForm {
	if contentType == "application/vnd.docker.multiplexed-stream" {
		return framed
	}
	return unknown
}

// Write takes what is sent. It never fails.
func (p *closeMessage) Write(b []byte) (int, error) {
	n := len(b)
	if p == nil || n == 0 {
		return n, nil
	}
	p.mid = b[n-1] != '\n'
	for p.form <= framed && len(b) > 0 {
		if p.left > 0 {
			some := min(int64(p.left), int64(len(b)))
			b, p.left = b[some:], p.left-uint32(some)
			continue
		}
		some := min(frameHead-len(p.head), len(b))
		p.head, b = append(p.head, b[:some]...), b[some:]
		if len(p.head) < frameHead {
			break
		}
		if p.head[0] > 3 || p.head[1]|p.head[2]|p.head[3] != 0 {
			p.form = terminal
			break
		}
		p.form, p.left, p.head = framed, binary.BigEndian.Uint32(p.head[4:]), p.head[:0]
	}
	return n, nil
}

// word is empty where nothing can be said without being taken for something else.
func (p *closeMessage) word() []byte {
	if p == nil {
		return nil
	}
	switch {
	case p.form == framed && p.left == 0 && len(p.head) == 0:
		frame := binary.BigEndian.AppendUint32([]byte{2, 0, 0, 0}, uint32(len(farewell)+1))
		return append(frame, farewell+"\n"...)
	case p.form == terminal:
		return []byte("\r\n" + farewell + "\r\n")
	case p.form == textLine:
		return []byte(farewell + "\n")
	case p.form == jsonLines && !p.mid:
		b, _ := json.Marshal(map[string]any{"error": farewell, "errorDetail": map[string]string{"message": farewell}})
		return append(b, '\n')
	}
	return nil
}
