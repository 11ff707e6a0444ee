package wire

// Ring keeps the last of a process' output. It isn't safe for several goroutines.
type Ring struct {
	max   int
	bytes int
	parts []part // oldest first
	next  int64
}

type part struct {
	stderr bool
	data   []byte
}

// NewRing keeps up to max bytes.
func NewRing(max int) *Ring { return &Ring{max: max} }

// partSize is up to where a part grows by what follows it.
const partSize = 4 << 10

// Add appends output, which is copied, at most MaxData bytes of it. What is oldest
// makes room.
func (r *Ring) Add(stderr bool, data []byte) {
	if len(data) == 0 {
		return
	}
	r.next += int64(len(data))
	if over := len(data) - r.max; over > 0 {
		data = data[over:]
	}
	r.bytes += len(data)
	if last := len(r.parts) - 1; last >= 0 && r.parts[last].stderr == stderr && len(r.parts[last].data)+len(data) <= partSize {
		r.parts[last].data = append(r.parts[last].data, data...)
	} else {
		r.parts = append(r.parts, part{stderr, append([]byte(nil), data...)})
	}
	for drop := r.bytes - r.max; drop > 0; drop = r.bytes - r.max {
		first := &r.parts[0]
		if drop < len(first.data) {
			first.data = first.data[drop:]
			r.bytes -= drop
			break
		}
		r.bytes -= len(first.data)
		*first = part{}
		r.parts = r.parts[1:]
	}
}

// Bounds are the places that After takes: from first to next, both included.
func (r *Ring) Bounds() (first, next int64) { return r.next - int64(r.bytes), r.next }

// After gives the output that follows a place, up to the end or where the stream
// changes. The data is good until the next Add. No data: there is none yet. False: the
// place is out of Bounds.
func (r *Ring) After(seq int64) (Output, bool) {
	first, next := r.Bounds()
	if seq < first || seq > next {
		return Output{}, false
	}
	at := first
	for _, p := range r.parts {
		end := at + int64(len(p.data))
		if seq < end {
			return Output{Seq: end, Stderr: p.stderr, Data: p.data[seq-at:]}, true
		}
		at = end
	}
	return Output{Seq: seq}, true
}
