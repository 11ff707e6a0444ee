package sandboxapi

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/bermhq/berm/proxy"
)

// maxUnused bounds the body that skipBody ignores, in bytes.
const maxUnused = 4 << 10

// skipBody reads and drops the body of a call that has none. Until the body's end, net/http
// doesn't watch the connection, so a long call wouldn't notice that its caller left.
func skipBody(w http.ResponseWriter, r *http.Request) error {
	if _, err := io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, maxUnused)); err != nil {
		return proxy.Unreadable("this call has no body; one of up to 4 KiB is ignored", err)
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // an in-process writer has none
	return nil
}

// stall bounds one read from or write to a caller.
const stall = time.Minute

// uploadPiece is how many bytes of an upload to storage must come within one stall: 1 KiB a
// second. The first piece has two.
const uploadPiece = 60 << 10

// upload is a request's body whose every read has its own deadline.
type upload struct {
	r     io.Reader
	rc    *http.ResponseController
	last  bool      // the request is the last of its connection; see proxy.LastRequest
	n     int64     // bytes read so far
	all   bool      // the body was read to its end
	err   error     // of a read; nil is none
	late  bool      // err is that of a deadline
	until time.Time // when the signed URL of the request expires; zero: never
	pace  *pace     // nil: any pace, as long as each read gets a byte within stall
}

// pace bounds how slowly a sender may send. It counts only the time of reads, not that in
// which the server handles the bytes.
type pace struct {
	left  time.Duration // for the rest of the current piece
	piece int           // bytes of the piece that have come
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

// withUpload returns a handler of an upload to storage. The upload has a pace, since storage
// reserves room for it. If h fails after a failed read, the error of the read is the answer.
func withUpload(h func(w http.ResponseWriter, r *http.Request, body *upload) error) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		body := newUpload(w, r)
		body.pace = &pace{left: 2 * stall}
		defer body.done()
		err := h(w, r, body)
		if err != nil && body.err != nil {
			return body.err // rather than h's error, which follows from it
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
	if !begun.Before(deadline) { // a read could still return bytes that the server has buffered
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

// fault returns the error of a read that failed. With over, the deadline was the URL's expiry.
func (u *upload) fault(over bool, cause error) error {
	if u.late && over {
		return expiredFileURL(cause)
	}
	if u.late {
		return proxy.Unreadable("the body stopped, or came too slowly", cause)
	}
	return proxy.Unreadable("the body could not be read to its end", cause)
}

// done gives the sender a moment to send the rest of the body, unless it was late.
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
