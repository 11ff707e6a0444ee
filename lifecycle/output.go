package lifecycle

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// capture keeps a command's output in bounded memory.
type capture interface {
	io.Writer
	collected() (kept string, truncated bool)
}

// grown returns a buffer with room for n more bytes, of at most most bytes in all. It returns the
// buffer as it is, and false, if keep refuses the memory.
func grown(buf []byte, n, most int, keep func(bytes int) error) ([]byte, bool) {
	need := min(len(buf)+n, most)
	if need <= cap(buf) {
		return buf, true
	}
	size := min(max(need, 2*cap(buf), 512), most)
	if keep != nil && keep(size-cap(buf)) != nil {
		return buf, false
	}
	return append(make([]byte, 0, size), buf...), true
}

// rawCapture keeps the first limit bytes, or fewer if keep refuses the memory.
type rawCapture struct {
	limit int
	keep  func(bytes int) error
	kept  []byte
	cut   bool
}

func (c *rawCapture) Write(p []byte) (int, error) {
	written := len(p)
	if !c.cut {
		c.kept, _ = grown(c.kept, len(p), max(c.limit, 0), c.keep)
		room := min(cap(c.kept)-len(c.kept), len(p))
		c.cut = room < len(p)
		c.kept = append(c.kept, p[:room]...)
	}
	return written, nil
}

func (c *rawCapture) collected() (string, bool) { return string(c.kept), c.cut || c.limit < 0 }

// textCapture keeps the head and the tail of a text, at most limit code points. A byte that isn't
// UTF-8 counts as one, and becomes U+FFFD.
type textCapture struct {
	limit int
	keep  func(bytes int) error
	n     int    // code points so far
	head  []byte // the first limit of them
	headN int    // code points in head
	tail  []byte // the end of what follows head: at least what is shown of it
	short bool   // keep refused memory, so output is missing
}

// Write adds output, which ends between characters where the process allows that.
func (c *textCapture) Write(p []byte) (int, error) {
	written := len(p)
	c.n += utf8.RuneCount(p)
	if c.limit <= 0 {
		return written, nil
	}
	end, n := 0, 0
	for ; !c.short && c.headN+n < c.limit && end < len(p); n++ {
		_, size := utf8.DecodeRune(p[end:])
		end += size
	}
	c.grow(&c.head, end, utf8.UTFMax*c.limit)
	if !c.short {
		c.head, c.headN, p = append(c.head, p[:end]...), c.headN+n, p[end:]
	}
	// A cut may split a code point. So the tail has room for a few more than are shown.
	c.grow(&c.tail, len(p), 2*utf8.UTFMax*(c.limit*2/5+3))
	if half := cap(c.tail) / 2; len(c.tail)+len(p) > cap(c.tail) {
		p = p[max(len(p)-half, 0):]
		c.tail = append(c.tail[:0], c.tail[max(len(c.tail)+len(p)-half, 0):]...)
	}
	c.tail = append(c.tail, p...)
	return written, nil
}

// grow makes room for n more bytes of head or tail, of at most most bytes in all.
func (c *textCapture) grow(buf *[]byte, n, most int) {
	if !c.short {
		var ok bool
		*buf, ok = grown(*buf, n, most, c.keep)
		c.short = !ok
	}
}

func (c *textCapture) collected() (string, bool) {
	switch {
	case c.n == c.headN:
		return text(c.head), c.limit < 0
	case c.limit <= 0:
		return "", true
	}
	for range utf8.UTFMax - 1 {
		if c.short && len(c.tail) > 0 && !utf8.RuneStart(c.tail[0]) { // a cut has split a code point
			c.tail = c.tail[1:]
		}
	}
	h, t, notice := split(max(c.n, c.limit+1), c.limit)
	if h+t == 0 {
		return notice, true
	}
	head, tail := firstRunes(c.head, h), lastRunes(c.tail, t)
	switch more := t - (c.n - c.headN); {
	case c.short:
		notice = cutNotice(c.n - utf8.RuneCountInString(head) - utf8.RuneCountInString(tail))
	case more > 0:
		tail = lastRunes(c.head, more) + tail
	}
	return head + notice + tail, true
}

// text returns p as valid UTF-8, with one U+FFFD for each byte that isn't.
func text(p []byte) string { return strings.Map(func(r rune) rune { return r }, string(p)) }

// firstRunes returns the first n code points, or all if there are fewer.
func firstRunes(p []byte, n int) string {
	end := 0
	for ; n > 0 && end < len(p); n-- {
		_, size := utf8.DecodeRune(p[end:])
		end += size
	}
	return text(p[:end])
}

// lastRunes returns the last n code points, or all if there are fewer.
func lastRunes(p []byte, n int) string {
	start := len(p)
	for ; n > 0 && start > 0; n-- {
		_, size := utf8.DecodeLastRune(p[:start])
		start -= size
	}
	return text(p[start:])
}

func cutNotice(n int) string { return fmt.Sprintf("\n\n... [%d characters truncated] ...\n\n", n) }

// split returns how many of n code points to keep at the head and at the tail, and the notice
// between them. All three together have limit code points.
func split(n, limit int) (head, tail int, notice string) {
	for range 4 {
		notice = cutNotice(n - head - tail)
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
	return head, tail, cutNotice(n - head - tail)
}
