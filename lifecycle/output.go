package lifecycle

import (
	"bytes"
	"fmt"
	"io"
	"unicode/utf8"
)

// collector keeps what a command prints, in bounded memory.
type collector interface {
	io.Writer
	collected() (kept string, truncated bool)
}

func (c *command) collectors() (stdout, stderr collector) {
	if c.req.Raw {
		return &rawCollector{limit: c.limit}, &rawCollector{limit: c.limit}
	}
	return &textCollector{limit: c.limit}, &textCollector{limit: c.limit}
}

// collect puts what was kept into the result.
func (c *command) collect(res *ExecResult, stdout, stderr collector) {
	out, outCut := stdout.collected()
	errOut, errCut := stderr.collected()
	res.StdoutTruncated, res.StderrTruncated = outCut, errCut
	if c.req.Raw {
		res.StdoutRaw, res.StderrRaw = []byte(out), []byte(errOut)
		return
	}
	res.Stdout, res.Stderr = out, errOut
}

// rawCollector keeps the first limit bytes.
type rawCollector struct {
	limit int
	kept  bytes.Buffer
	cut   bool
}

func (c *rawCollector) Write(p []byte) (int, error) {
	room := max(c.limit-c.kept.Len(), 0)
	c.cut = c.cut || len(p) > room
	c.kept.Write(p[:min(room, len(p))])
	return len(p), nil
}

func (c *rawCollector) collected() (string, bool) { return c.kept.String(), c.cut || c.limit < 0 }

// textCollector keeps the head and the tail of a text of which at most limit code
// points are wanted. A byte that isn't UTF-8 counts as one, and becomes U+FFFD.
type textCollector struct {
	limit   int
	n       int    // code points so far
	head    []byte // the first limit of them
	headN   int    // code points in head
	tail    []byte // at least the last limit of them, if there are as many
	partial []byte // the start of a code point whose rest hasn't come
}

func (c *textCollector) Write(p []byte) (int, error) {
	written := len(p)
	for len(c.partial) > 0 && len(p) > 0 && !utf8.FullRune(c.partial) {
		c.partial = append(c.partial, p[0])
		p = p[1:]
	}
	if utf8.FullRune(c.partial) {
		whole := c.partial
		c.partial = nil
		// Several code points: an invalid byte, say, and what follows it.
		for len(whole) > 0 && utf8.FullRune(whole) {
			_, size := utf8.DecodeRune(whole)
			c.add(whole[:size])
			whole = whole[size:]
		}
		c.partial = append(c.partial, whole...)
		if len(c.partial) > 0 && len(p) > 0 {
			n, err := c.Write(p)
			return written - len(p) + n, err
		}
	}
	if end := len(p) - incomplete(p); len(c.partial) == 0 {
		c.add(p[:end])
		c.partial = append(c.partial, p[end:]...)
	}
	return written, nil
}

// incomplete is the length of the start of a code point at the end of p.
func incomplete(p []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		if b := p[len(p)-n]; utf8.RuneStart(b) {
			if utf8.FullRune(p[len(p)-n:]) {
				return 0
			}
			return n
		}
	}
	return 0
}

// add takes whole code points.
func (c *textCollector) add(p []byte) {
	c.n += utf8.RuneCount(p)
	if c.limit <= 0 {
		return
	}
	rest := p
	for c.headN < c.limit && len(rest) > 0 {
		_, size := utf8.DecodeRune(rest)
		c.head = append(c.head, rest[:size]...)
		c.headN++
		rest = rest[size:]
	}
	// A cut may fall into a code point, and spoils a few of them at the tail's start.
	keep := utf8.UTFMax * (c.limit + 2)
	if len(p) > keep {
		p = p[len(p)-keep:]
	}
	c.tail = append(c.tail, p...)
	if len(c.tail) > 2*keep {
		c.tail = append(c.tail[:0], c.tail[len(c.tail)-keep:]...)
	}
}

func (c *textCollector) collected() (string, bool) {
	if len(c.partial) > 0 {
		p := c.partial
		c.partial = nil
		c.add(p)
	}
	switch {
	case c.n <= c.limit:
		return text(c.head), false
	case c.limit <= 0:
		return "", true
	}
	head, tail, notice := split(c.n, c.limit)
	if head+tail == 0 {
		return notice, true
	}
	return firstRunes(c.head, head) + notice + lastRunes(c.tail, tail), true
}

// text makes valid UTF-8, with one U+FFFD for each byte that isn't.
func text(p []byte) string { return string([]rune(string(p))) }

func firstRunes(p []byte, n int) string { return string([]rune(string(p))[:n]) }

func lastRunes(p []byte, n int) string {
	r := []rune(string(p))
	return string(r[len(r)-n:])
}

// split works out how many code points of n to keep at the head and at the tail,
// and the notice between them, so that all is limit code points long.
func split(n, limit int) (head, tail int, notice string) {
	for range 4 {
		notice = fmt.Sprintf("\n\n... [%d characters truncated] ...\n\n", n-head-tail)
		room := limit - len(notice)
		if room <= 0 {
			return 0, 0, notice[:min(limit, len(notice))]
		}
		h := room * 3 / 5
		t := room - h
		if h == head && t == tail {
			break
		}
		head, tail = h, t
	}
	return head, tail, fmt.Sprintf("\n\n... [%d characters truncated] ...\n\n", n-head-tail)
}
