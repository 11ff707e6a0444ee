package wire

import "sort"

// Ring keeps the last of a process' output. It isn't safe for several goroutines.
type Ring struct {
	max   int
	bytes int
	parts []part // oldest first, none empty
	next  int64
}

// part is output of one stream, up to a place.
type part struct {
	end    int64
	stderr bool
	data   []byte
}

// partSize is up to where a part grows by what follows it.
const partSize = 4 << 10

// NewRing keeps up to max bytes, and fewer when the streams take turns in less than 64
// bytes: what is kept beside the bytes is bounded, too.
func NewRing(max int) *Ring { return &Ring{max: max} }

func (r *Ring) maxParts() int { return 64 + r.max/64 }

// Add appends output, which is copied. What is oldest makes room.
func (r *Ring) Add(stderr bool, data []byte) {
	r.next += int64(len(data))
	data = data[max(0, len(data)-max(0, r.max)):]
	if len(data) == 0 {
		return
	}
	r.bytes += len(data)
	if last := len(r.parts) - 1; last >= 0 && r.parts[last].stderr == stderr && len(r.parts[last].data)+len(data) <= partSize {
		r.parts[last].data = append(r.parts[last].data, data...)
		r.parts[last].end = r.next
	} else {
		r.parts = append(r.parts, part{r.next, stderr, append([]byte(nil), data...)})
	}
	for r.bytes > r.max || len(r.parts) > r.maxParts() {
		first := &r.parts[0]
		if drop := r.bytes - r.max; 0 < drop && drop < len(first.data) {
			first.data = first.data[drop:]
			r.bytes -= drop
			continue
		}
		r.bytes -= len(first.data)
		*first = part{}
		r.parts = r.parts[1:]
	}
}

// Bounds are the places that After takes: from first to next, both included.
func (r *Ring) Bounds() (first, next int64) { return r.next - int64(r.bytes), r.next }

// After gives output that follows a place: of one stream, and at most MaxData bytes.
// The data is good until the next Add. No data: there is none yet. False: the place is
// out of Bounds.
func (r *Ring) After(seq int64) (Output, bool) {
	if first, next := r.Bounds(); seq < first || seq > next {
		return Output{}, false
	}
	i := sort.Search(len(r.parts), func(i int) bool { return r.parts[i].end > seq })
	if i == len(r.parts) {
		return Output{Seq: seq}, true
	}
	p := r.parts[i]
	data := p.data[len(p.data)-int(p.end-seq):]
	data = data[:min(len(data), MaxData)]
	return Output{Seq: seq + int64(len(data)), Stderr: p.stderr, Data: data}, true
}
