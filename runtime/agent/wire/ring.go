package wire

import (
	"sort"
	"unicode/utf8"
)

// Ring keeps the latest output of a process. It isn't safe for concurrent use.
//
// Ring holds back part of a character at the end of a stream until the rest comes, so that
// Read ends between characters.
type Ring struct {
	max  int
	buf  []byte   // circular; grows up to max
	head int      // index of the oldest byte in buf
	size int      // bytes kept
	runs []run    // oldest first, none empty; neighbours are of different streams
	next int64    // bytes added so far
	held [2]piece // of stdout and stderr
}

// run is consecutive output of one stream.
type run struct {
	end    int64 // the seq at its end
	stderr bool
}

// piece is the beginning of a character.
type piece struct {
	b     [utf8.UTFMax]byte
	n     int
	since int // bytes of the other stream that came after it
}

const (
	minRing   = 4 << 10  // bytes that a buffer begins with
	leastRing = 8        // room for two held pieces, and more
	maxHeld   = 64 << 10 // bytes of the other stream after which a piece is released
)

// NewRing returns a Ring that keeps up to max bytes, and at least 8. It keeps fewer if the
// streams alternate after less than 64 bytes, as the number of runs is bounded too.
func NewRing(max int) *Ring {
	if max < leastRing {
		max = leastRing
	}
	return &Ring{max: max}
}

func (r *Ring) maxRuns() int { return 64 + r.max/64 }

func index(stderr bool) int {
	if stderr {
		return 1
	}
	return 0
}

// Add appends a copy of output, and drops the oldest output beyond the limit.
func (r *Ring) Add(stderr bool, data []byte) {
	if len(data) == 0 {
		return
	}
	own, other := &r.held[index(stderr)], &r.held[index(!stderr)]
	if other.n > 0 {
		if other.since += len(data); other.since > maxHeld {
			r.release(!stderr)
		}
	}
	if own.n > 0 {
		n := own.n + copy(own.b[own.n:], data)
		if !utf8.FullRune(own.b[:n]) { // the piece has all of data now
			own.n = n
			return
		}
		r.release(stderr)
	}
	n := len(data) - unfinished(data)
	r.put(stderr, data[:n])
	own.n, own.since = copy(own.b[:], data[n:]), 0
}

// Flush appends the parts of characters that were held back.
func (r *Ring) Flush() {
	r.release(false)
	r.release(true)
}

func (r *Ring) release(stderr bool) {
	held := &r.held[index(stderr)]
	r.put(stderr, held.b[:held.n])
	held.n = 0
}

// unfinished counts the bytes at the end of data that only begin a character.
func unfinished(data []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(data); n++ {
		if tail := data[len(data)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

func (r *Ring) put(stderr bool, data []byte) {
	if over := len(data) - r.max; over > 0 {
		r.drop(r.size)
		r.next += int64(over)
		data = data[over:]
	}
	if len(data) == 0 {
		return
	}
	r.drop(r.size + len(data) - r.max)
	r.grow(r.size + len(data))
	at := (r.head + r.size) % len(r.buf)
	copy(r.buf, data[copy(r.buf[at:], data):])
	r.size += len(data)
	r.next += int64(len(data))
	if last := len(r.runs) - 1; last >= 0 && r.runs[last].stderr == stderr {
		r.runs[last].end = r.next
		return
	}
	if r.runs = append(r.runs, run{r.next, stderr}); len(r.runs) > r.maxRuns() {
		first, _ := r.Bounds()
		r.drop(int(r.runs[0].end - first))
	}
}

// Clear drops all output, and frees its memory.
func (r *Ring) Clear() {
	r.drop(r.size)
	r.buf, r.runs, r.held = nil, nil, [2]piece{}
}

// drop drops the n oldest bytes.
func (r *Ring) drop(n int) {
	if n <= 0 {
		return
	}
	if r.size -= n; r.size == 0 {
		r.head, r.runs = 0, r.runs[:0]
		return
	}
	r.head = (r.head + n) % len(r.buf)
	first, _ := r.Bounds()
	for r.runs[0].end <= first {
		r.runs = r.runs[1:]
	}
}

// grow makes the buffer large enough for need bytes.
func (r *Ring) grow(need int) {
	if need <= len(r.buf) {
		return
	}
	buf := make([]byte, min(max(need, 4*len(r.buf), minRing), r.max))
	if r.size > 0 {
		end := min(r.head+r.size, len(r.buf))
		n := copy(buf, r.buf[r.head:end])
		copy(buf[n:], r.buf[:r.size-n])
	}
	r.buf, r.head = buf, 0
}

// Bounds returns the lowest and the highest seq that Read accepts.
func (r *Ring) Bounds() (first, next int64) { return r.next - int64(r.size), r.next }

// Room returns how many bytes of a stream can be added without dropping output after seq,
// which must be within Bounds.
func (r *Ring) Room(stderr bool, seq int64) int {
	// The held pieces become at most two more runs.
	if len(r.runs)-r.runAfter(seq) >= r.maxRuns()-2 {
		last := len(r.runs) - 1
		if r.runs[last].stderr != stderr || r.held[index(!stderr)].n > 0 {
			return 0
		}
	}
	return r.max - int(r.next-seq) - r.held[0].n - r.held[1].n
}

// runAfter returns the index of the run that has the output after seq.
func (r *Ring) runAfter(seq int64) int {
	return sort.Search(len(r.runs), func(i int) bool { return r.runs[i].end > seq })
}

// Read copies output of one stream that follows seq into buf, which must have room for a
// character. The Output has no data if there is none yet. Read returns false if seq is out
// of Bounds.
func (r *Ring) Read(seq int64, buf []byte) (Output, bool) {
	first, next := r.Bounds()
	if seq < first || seq > next {
		return Output{}, false
	}
	i := r.runAfter(seq)
	if i == len(r.runs) {
		return Output{Seq: seq}, true
	}
	at, left := (r.head+int(seq-first))%len(r.buf), int(min(r.runs[i].end-seq, int64(len(buf))))
	n := copy(buf[:left], r.buf[at:])
	n += copy(buf[n:left], r.buf)
	if int64(n) < r.runs[i].end-seq {
		n -= unfinished(buf[:n])
	}
	return Output{Seq: seq + int64(n), Stderr: r.runs[i].stderr, Data: buf[:n]}, true
}
