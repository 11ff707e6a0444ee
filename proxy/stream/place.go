package stream

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
)

// Place is a place in the output for each stream, stdout first: the seq up to which that stream
// was sent. The two differ while one stream waits for the rest of a line.
type Place [2]int64

// Anywhere is the place of a caller who takes all output that is kept.
var Anywhere = Place{-1, -1}

// Seq returns the seq up to which both streams were sent.
func (p Place) Seq() int64 { return min(p[0], p[1]) }

// one fails unless the place is the same in both streams.
func (p Place) one() error {
	if p[0] != p[1] {
		return &lifecycle.InvalidError{Field: "after", Message: "must be one place, unless lines are attached to"}
	}
	return nil
}

// String writes the place in the form that a request's parameter after has.
func (p Place) String() string {
	if p[0] == p[1] {
		return strconv.FormatInt(p[0], 10)
	}
	return fmt.Sprintf("%d,%d", p[0], p[1])
}

// fresh cuts bytes that were sent already off the front of a chunk. The rest may be empty.
func (p Place) fresh(c runtime.Chunk) runtime.Chunk {
	told := p[streamOf(c)]
	c.Data = c.Data[max(0, int64(len(c.Data))-max(0, c.Seq-told)):]
	return c
}

func streamOf(c runtime.Chunk) int {
	if c.Stderr {
		return 1
	}
	return 0
}

// After returns where a request for events goes on: Last-Event-ID, which browsers send, else
// the parameter after; -1 is where the kept output begins.
func After(r *http.Request, q url.Values) (int64, error) {
	p, err := after(r, q)
	if err == nil {
		err = p.one()
	}
	return p.Seq(), err
}

// after is After for attachments in lines, where the places of the two streams may differ.
func after(r *http.Request, q url.Values) (Place, error) {
	field, s := "after", q.Get("after")
	if id := r.Header.Get("Last-Event-ID"); id != "" {
		field, s = "Last-Event-ID", id
	} else if !q.Has("after") {
		return Anywhere, nil
	}
	stdout, stderr, two := strings.Cut(s, ",")
	if !two {
		stderr = stdout
	}
	var p Place
	for i, s := range []string{stdout, stderr} {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < 0 {
			return p, &lifecycle.InvalidError{Field: field, Message: "must be the seq of an event, the resume of a line, or 0"}
		}
		p[i] = n
	}
	return p, nil
}
