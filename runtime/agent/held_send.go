package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// wish is what the program is asked to do with the process while that runs.
type wish struct {
	request []byte
	sending bool
	sent    bool
}

// feed sends what attachments write, and wishes, until the process ends. Those who have
// them don't send them themselves, as what was begun can't be left, and those that follow
// would wait with them.
func (h *held) feed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.about.Running && h.unsent == nil {
		var err error
		switch w := h.wish; {
		case w != nil && !w.sent:
			w.sending = true
			err = h.send(wire.KindRequest, w.request)
			w.sending, w.sent = false, err == nil
		case len(h.input) > 0 && !h.unready:
			h.unready = h.control
			err = h.send(wire.KindData, h.input)
			h.input = h.input[:0]
		case h.ended && len(h.input) == 0 && !h.unready && !h.closed:
			h.closed = true
			err = h.send(wire.KindEnd, nil)
		default:
			h.changed.Wait()
			continue
		}
		h.unsent = err
		h.changed.Broadcast()
	}
}

// send sends a frame; the lock is held, but not meanwhile.
func (h *held) send(kind wire.Kind, payload []byte) error {
	h.mu.Unlock()
	defer h.mu.Lock()
	return h.x.w.Send(kind, payload)
}

// ready is when the process has taken the input that was sent.
func (h *held) ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.control || !h.unready {
		return fmt.Errorf("%w: Ready for input that wasn't sent", wire.ErrProtocol)
	}
	h.unready = false
	h.changed.Broadcast()
	return nil
}

var errOver = runtime.Precondition("it has ended")

// ask has the program do something with the process. Without an error it was told to, and
// does it unless the process is about to end.
func (h *held) ask(ctx context.Context, req *wire.Request) error {
	request, err := json.Marshal(req)
	if err != nil {
		return err
	}
	mine := &wish{request: request}
	ctx, cancel := context.WithTimeout(ctx, h.b.r.pace.answer)
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.changed.Broadcast()
	})()
	h.mu.Lock()
	defer h.mu.Unlock()
	defer func() {
		if h.wish == mine {
			h.wish = nil
			h.changed.Broadcast()
		}
	}()
	for !mine.sent {
		switch {
		case h.x == nil:
			return errNoProcess // it is being started
		case mine.sending && ctx.Err() == nil: // what it is told may be what ends it
		case !h.about.Running || h.killed:
			return errOver
		case !h.control:
			return runtime.WithClass(errdefs.ErrNotImplemented, errors.New("the container's agent is too old for that, and the process can only be killed"))
		case h.unsent != nil:
			return runtime.Precondition("%w", h.unsent)
		case ctx.Err() != nil:
			return runtime.Ended(ctx)
		case h.wish == nil:
			h.wish = mine
			h.changed.Broadcast()
		}
		h.changed.Wait()
	}
	return nil
}

func (h *held) signal(ctx context.Context, signal int) error {
	err := h.ask(ctx, &wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: h.info().ID, Signal: signal}})
	if signal == 9 && errdefs.IsNotImplemented(err) {
		return h.kill(ctx)
	}
	return err
}

func (h *held) resize(ctx context.Context, rows, cols int) error {
	info := h.info()
	if !info.TTY {
		return runtime.Precondition("it has no terminal")
	}
	return h.ask(ctx, &wire.Request{Op: wire.OpResize, Process: &wire.Process{ID: info.ID, Rows: rows, Cols: cols}})
}
