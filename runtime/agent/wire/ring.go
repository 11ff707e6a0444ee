package wire

import "sort"

// Ring keeps the last of a process' output. It isn't safe for several goroutines.
type Ring struct {
	max  int
	buf  []byte // a circle, which grows up to max as it is needed
	head int    // where the oldest byte is in buf
	size int    // bytes kept
	runs []run  // oldest first, none empty; no two neighbours are of one stream
	next int64
}

// run is output of one stream, up to a place.
type run struct {
	end    int64
	stderr bool
}

const minRing = 4 << 10 // bytes that a circle begins with

// NewRing keeps up to max bytes, and fewer when the streams take turns in less than 64
// bytes: what is kept beside the bytes is bounded, too.
func NewRing(max int) *Ring { return &Ring{max: max} }

func (r *Ring) maxRuns() int { return 64 + r.max/64 }

// Add appends output, which is copied. What is oldest makes room.
func (r *Ring) Add(stderr bool, data []byte) {
	if over := len(data) - max(0, r.max); over > 0 {
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

// Clear drops all that is kept, with its memory.
func (r *Ring) Clear() {
	r.drop(r.size)
	r.buf, r.runs = nil, nil
}

// drop makes room of the oldest.
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

// grow makes the circle large enough.
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

// Bounds are the places that After takes: from first to next, both included.
func (r *Ring) Bounds() (first, next int64) { return r.next - int64(r.size), r.next }

// Room is how much of a stream can be added without losing anything that follows a
// place, which is within Bounds.
func (r *Ring) Room(stderr bool, seq int64) int {
	last := len(r.runs) - 1
	if last < 0 || r.runs[last].stderr == stderr || len(r.runs)-r.runAfter(seq) < r.maxRuns() {
		return r.max - int(r.next-seq)
	}
	return 0
}

// runAfter is the run in which what follows a place is.
func (r *Ring) runAfter(seq int64) int {
	return sort.Search(len(r.runs), func(i int) bool { return r.runs[i].end > seq })
}

// After gives output that follows a place: of one stream, and at most MaxData bytes.
// The data is good until the next Add. No data: there is none yet. False: the place is
// out of Bounds.
func (r *Ring) After(seq int64) (Output, bool) {
	first, next := r.Bounds()
	if seq < first || seq > next {
		return Output{}, false
	}
	i := r.runAfter(seq)
	if i == len(r.runs) {
		return Output{Seq: seq}, true
	}
	at := (r.head + int(seq-first)) % len(r.buf)
	n := min(int(r.runs[i].end-seq), len(r.buf)-at, MaxData)
	return Output{Seq: seq + int64(n), Stderr: r.runs[i].stderr, Data: r.buf[at : at+n]}, true
}
