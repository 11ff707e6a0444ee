package wire

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// plain is a Ring that keeps everything.
type plain struct {
	data   []byte
	stderr []bool // of each byte
}

func (p *plain) add(stderr bool, data []byte) {
	p.data = append(p.data, data...)
	for range data {
		p.stderr = append(p.stderr, stderr)
	}
}

// check reads a ring from each place on, up to the end.
func (p *plain) check(t *testing.T, r *Ring, from int64) {
	t.Helper()
	first, next := r.Bounds()
	if next != int64(len(p.data)) || first > next || first < 0 {
		t.Fatalf("bounds %d and %d of %d bytes", first, next, len(p.data))
	}
	for seq := from; ; {
		o, ok := r.After(seq)
		if !ok {
			t.Fatalf("%d isn't in %d to %d", seq, first, next)
		}
		if o.Seq != seq+int64(len(o.Data)) || len(o.Data) > MaxData || o.Seq > next {
			t.Fatalf("after %d of %d, %d bytes up to %d", seq, next, len(o.Data), o.Seq)
		}
		if len(o.Data) == 0 {
			if seq != next {
				t.Fatalf("nothing after %d of %d", seq, next)
			}
			return
		}
		if !bytes.Equal(o.Data, p.data[seq:o.Seq]) {
			t.Fatalf("after %d: %q, want %q", seq, o.Data, p.data[seq:o.Seq])
		}
		for i := seq; i < o.Seq; i++ {
			if p.stderr[i] != o.Stderr {
				t.Fatalf("byte %d is of the other stream", i)
			}
		}
		seq = o.Seq
	}
}

func TestRing(t *testing.T) {
	for name, tt := range map[string]struct {
		max, largest int // of an Add
		alternate    bool
		exact        bool // all is kept that there is room for
	}{
		"one byte":       {max: 1, largest: 3, exact: true},
		"small":          {max: 50, largest: 20, exact: true},
		"many parts":     {max: 5000, largest: 300, exact: true},
		"larger parts":   {max: 64 << 10, largest: 3 * minRing, exact: true},
		"larger than it": {max: 100, largest: 400, exact: true},
		"taking turns":   {max: 1 << 10, largest: 2, alternate: true},
	} {
		t.Run(name, func(t *testing.T) {
			seed := rand.Uint64()
			rnd := rand.New(rand.NewPCG(seed, 0))
			r, want := NewRing(tt.max), &plain{}
			for i := range 600 {
				data := make([]byte, rnd.IntN(tt.largest+1))
				for i := range data {
					data[i] = byte(rnd.IntN(256))
				}
				stderr := rnd.IntN(3) == 0
				if tt.alternate {
					stderr = i%2 == 0
				}
				given := bytes.Clone(data)
				r.Add(stderr, given)
				clear(given) // it was copied
				want.add(stderr, data)
				first, next := r.Bounds()
				if kept := next - first; kept > int64(tt.max) || tt.exact && kept != min(next, int64(tt.max)) {
					t.Fatalf("seed %d: %d bytes of %d are kept", seed, kept, next)
				}
				if len(r.runs) > r.maxRuns() {
					t.Fatalf("seed %d: %d parts", seed, len(r.runs))
				}
				want.check(t, r, first)
				want.check(t, r, first+rnd.Int64N(next-first+1))
				for _, out := range []int64{-1, first - 1, next + 1, next + 1<<40} {
					if o, ok := r.After(out); ok {
						t.Fatalf("seed %d: after %d of %d to %d comes %+v", seed, out, first, next, o)
					}
				}
			}
		})
	}
}

func TestRingWithoutRoom(t *testing.T) {
	for _, size := range []int{0, -1} {
		r := NewRing(size)
		for i := range 10 {
			r.Add(i%2 == 0, []byte("abc"))
		}
		if first, next := r.Bounds(); first != 30 || next != 30 || len(r.runs) > 0 {
			t.Errorf("%d: from %d to %d in %d parts", size, first, next, len(r.runs))
		}
		if o, ok := r.After(30); !ok || o.Seq != 30 || len(o.Data) > 0 {
			t.Errorf("%d: %+v, %t", size, o, ok)
		}
	}
}

// More than goes into a frame comes in several.
func TestRingGivesFrames(t *testing.T) {
	r, want := NewRing(4*MaxData), &plain{}
	data := bytes.Repeat([]byte("abc"), MaxData)
	r.Add(true, data)
	want.add(true, data)
	want.check(t, r, 0)
}

// Streams that take turns cost what lies beside each byte, but not without bound.
func TestRingTakingTurns(t *testing.T) {
	const size = 4 << 20
	r := NewRing(size)
	for i := range size {
		r.Add(i%2 == 0, []byte{'x'})
	}
	if len(r.runs) > 64+size/64 {
		t.Errorf("%d parts", len(r.runs))
	}
	if first, next := r.Bounds(); next != size || next-first < size/64 {
		t.Errorf("from %d to %d", first, next)
	}
}

// What there is room for takes nothing away from who reads.
func TestRingRoom(t *testing.T) {
	for _, size := range []int{0, 1, 6, 100, 5000} {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 0))
		r := NewRing(size)
		seq := int64(0)
		for range 3000 {
			stderr := rnd.IntN(2) == 0
			n := min(r.Room(stderr, seq), 1+rnd.IntN(3))
			r.Add(stderr, make([]byte, max(0, n)))
			first, next := r.Bounds()
			if first > seq || n < 0 || size > 0 && n == 0 && next == seq {
				t.Fatalf("seed %d: from %d to %d, read up to %d, room for %d", seed, first, next, seq, n)
			}
			if n == 0 || rnd.IntN(50) == 0 {
				seq += rnd.Int64N(next - seq + 1)
			}
		}
		r.Clear()
		if first, next := r.Bounds(); first != next || r.buf != nil {
			t.Errorf("from %d to %d", first, next)
		}
		r.Add(true, []byte("x"))
	}
}

func BenchmarkRing(b *testing.B) {
	const size = 4 << 20
	r := NewRing(size)
	line := bytes.Repeat([]byte("x"), 70)
	for i := range size / 70 {
		r.Add(i%2 == 0, line)
	}
	b.Run("add", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			r.Add(i%2 == 0, line)
		}
	})
	b.Run("after", func(b *testing.B) {
		_, next := r.Bounds()
		for b.Loop() {
			if _, ok := r.After(next - 1); !ok {
				b.Fatal("out of bounds")
			}
		}
	})
}
