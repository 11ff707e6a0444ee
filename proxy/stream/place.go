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

// Place is how much of a command's output was sent, in bytes, by stream: stdout first. The
// two differ while one stream waits for the rest of a character or line.
type Place [2]int64

// Anywhere is the place of a caller who takes all output that is kept.
var Anywhere = Place{-1, -1}

// Seq is the place before which everything was sent.
func (p Place) Seq() int64 { return min(p[0], p[1]) }

// Resume is what After needs to go on exactly; empty if Seq is enough.
func (p Place) Resume() string {
	if p[0] == p[1] {
		return ""
	}
	return p.String()
}

// String is what After reads.
func (p Place) String() string {
	if p[0] == p[1] {
		return strconv.FormatInt(p[0], 10)
	}
	return fmt.Sprintf("%d,%d", p[0], p[1])
}

// fresh cuts what was sent off a chunk. The rest may be empty.
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

// After returns where a request goes on: Last-Event-ID, which browsers send, else the
// parameter after.
func After(r *http.Request, q url.Values) (Place, error) {
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
			return p, &lifecycle.InvalidError{Field: field, Message: "must be the seq or the resume of an event, or 0"}
		}
		p[i] = n
	}
	return p, nil
}
