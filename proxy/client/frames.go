package client

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/bermhq/berm/proxy/apitype"
)

const (
	frameHead  = 8
	eventFrame = 3
)

// framedEvents reads events of the form apitype.Multiplexed, whose first is in the
// header.
func framedEvents(rep reply) (func() (apitype.StreamEvent, error), error) {
	f := &frameReader{r: bufio.NewReader(rep.body)}
	if err := decodeEvent([]byte(rep.header.Get(apitype.StartHeader)), &f.start); err != nil {
		return nil, err
	}
	f.seq = f.start.Seq
	return f.next, nil
}

type frameReader struct {
	r     *bufio.Reader
	start apitype.StreamEvent
	begun bool
	seq   int64
	err   error
}

func (f *frameReader) next() (apitype.StreamEvent, error) {
	if !f.begun {
		f.begun = true
		return f.start, nil
	}
	if f.err != nil {
		return apitype.StreamEvent{}, f.err
	}
	var head [frameHead]byte
	if _, err := io.ReadFull(f.r, head[:]); err != nil {
		if !errors.Is(err, io.EOF) {
			err = fmt.Errorf("%w: %w", errBroken, err)
		}
		return apitype.StreamEvent{}, err
	}
	size := binary.BigEndian.Uint32(head[4:])
	if size > maxEvent || head[0] < 1 || head[0] > eventFrame {
		return apitype.StreamEvent{}, fmt.Errorf("decode event: a frame of %d bytes with the number %d", size, head[0])
	}
	data := make([]byte, size)
	n, err := io.ReadFull(f.r, data)
	if err != nil {
		err = fmt.Errorf("%w: %w", errBroken, err)
		if n == 0 || head[0] == eventFrame {
			return apitype.StreamEvent{}, err
		}
		data, f.err = data[:n], err // what has come of it counts
	}
	ev := apitype.StreamEvent{Event: apitype.EventStdout, DataBase64: data}
	switch {
	case head[0] == eventFrame:
		ev = apitype.StreamEvent{}
		err = decodeEvent(data, &ev)
		return ev, err
	case size == 0:
		ev.Event = apitype.EventHeartbeat
	case head[0] == 2:
		ev.Event = apitype.EventStderr
	}
	f.seq += int64(len(data))
	ev.Seq = f.seq
	return ev, nil
}
