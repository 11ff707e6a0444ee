package sandboxapi

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/bermhq/berm/proxy"
)

// maxUnused is how many bytes of a body are let through to a call that has none.
const maxUnused = 4 << 10

// skipBody reads a body that means nothing to its end. Until that has come, net/http
// doesn't look at the connection, and a call that takes long can't see its caller leave.
func skipBody(w http.ResponseWriter, r *http.Request) error {
	if _, err := io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, maxUnused)); err != nil {
		return proxy.Unreadable("this call has no body; one of up to 4 KiB is ignored", err)
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // an in-process writer has none
	return nil
}

// stall is for one read or write with a caller that doesn't go on.
const stall = time.Minute

// uploadPiece is how many bytes of what goes into storage have to come within one stall, of
// the first of them within two: 1 KiB a second.
const uploadPiece = 60 << 10

// upload is a request's body whose every read has its own deadline.
type upload struct {
	r     io.Reader
	rc    *http.ResponseController
	last  bool      // request of its connection
	n     int64     // bytes that came
	all   bool      // was read
	err   error     // of a read; nil is none
	late  bool      // err is that it didn't come in time
	until time.Time // when what lets its sender in ends; zero: never
	pace  *pace     // nil: it may come as slowly as it likes, as long as it comes
}

// pace is what a sender may take. The time that its bytes are worked on isn't the sender's.
type pace struct {
	left  time.Duration // for the rest of the piece
	piece int           // bytes of it that are there
}

func (p *pace) came(n int, took time.Duration) {
	p.left -= took
	if p.piece += n; p.piece >= uploadPiece {
		p.left, p.piece = stall, 0
	}
}

func newUpload(w http.ResponseWriter, r *http.Request) *upload {
	return &upload{r: r.Body, rc: http.NewResponseController(w), last: proxy.LastRequest(r)}
}

// taking is a handler of what goes into storage, where room is kept for it: so it has a
// pace. If its body can't be read to its end, that is the answer.
func taking(h func(w http.ResponseWriter, r *http.Request, body *upload) error) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		body := newUpload(w, r)
		body.pace = &pace{left: 2 * stall}
		defer body.done()
		err := h(w, r, body)
		if err != nil && body.err != nil {
			return body.err // rather than what has become of it
		}
		return err
	}
}

func (u *upload) Read(b []byte) (n int, err error) {
	if u.err != nil {
		return 0, u.err
	}
	begun := time.Now()
	deadline := begun.Add(stall)
	if u.pace != nil && u.pace.left < stall {
		deadline = begun.Add(u.pace.left)
	}
	over := !u.until.IsZero() && u.until.Before(deadline)
	if over {
		deadline = u.until
	}
	if !begun.Before(deadline) { // what the server has already could still be had
		err = os.ErrDeadlineExceeded
	} else {
		_ = u.rc.SetReadDeadline(deadline) // an in-process reader has none
		n, err = u.r.Read(b)
		u.n += int64(n)
	}
	if u.pace != nil {
		u.pace.came(n, time.Since(begun))
	}
	switch {
	case errors.Is(err, io.EOF):
		u.all = true
		_ = u.rc.SetReadDeadline(time.Time{}) // handling the body may take longer
	case err != nil:
		u.late = errors.Is(err, os.ErrDeadlineExceeded)
		u.err = u.fault(over, err)
		err = u.err
	}
	return n, err
}

// fault says why the body has no end.
func (u *upload) fault(over bool, cause error) error {
	if u.late && over {
		return expiredFileURL(cause)
	}
	if u.late {
		return proxy.Unreadable("the body stopped, or came too slowly", cause)
	}
	return proxy.Unreadable("the body could not be read to its end", cause)
}

// done gives the sender a moment to send the rest, unless it was late already.
func (u *upload) done() {
	switch {
	case u.all:
		return
	case u.late:
		_ = u.rc.SetReadDeadline(time.Now())
	default:
		_ = u.rc.SetReadDeadline(time.Now().Add(proxy.BodyLinger))
	}
	if u.last {
		_, _ = io.Copy(io.Discard, u.r)
	}
}
