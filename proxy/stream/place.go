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

// Place is up to where each of the two streams of a command's output was told, stdout
// first. They differ while one of them waits for the rest of a character, or of a line,
// and the other goes on.
type Place [2]int64

// Anywhere is the place of who takes what there is.
var Anywhere = Place{-1, -1}

// Seq is up to where everything was told.
func (p Place) Seq() int64 { return min(p[0], p[1]) }

// Resume is what to go on after if seq isn't enough, or empty.
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

// fresh leaves out of a chunk what was told by the place. The rest may be empty.
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

// After tells where to go on: what a browser remembers goes before what the address
// says.
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

// position is how far a stream has come, and from where on some of what came is held
// back still.
type position struct {
	told Place // by an earlier stream
	last int64
	from [2]int64 // after which the held bytes of each stream begin
	held [2]bool
}

// start is the position of one that goes on after a place.
func (p *position) start(told Place) {
	if told != Anywhere {
		p.told = told
		p.reach(told.Seq())
	}
}

// reach notes that all is there up to a place.
func (p *position) reach(seq int64) { p.last = max(p.last, seq) }

// hold notes that the last n bytes of a stream are held back, some of which may have
// been before its last chunk.
func (p *position) hold(stream, n int, c runtime.Chunk) {
	switch {
	case n == 0:
		p.held[stream] = false
	case !p.held[stream] || n <= len(c.Data):
		p.held[stream], p.from[stream] = true, c.Seq-int64(n)
	}
}

func (p *position) release(stream int) { p.held[stream] = false }

// place is up to where the streams were told.
func (p *position) place() (at Place) {
	for i := range at {
		at[i] = max(p.last, p.told[i])
		if p.held[i] {
			at[i] = p.from[i]
		}
	}
	return at
}
