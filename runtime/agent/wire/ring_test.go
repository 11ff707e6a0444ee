package wire

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"
)

// plain is a Ring that keeps everything.
type plain struct {
	data   []byte
	stderr []byte // 1 for each byte that is of it
}

func (p *plain) add(stderr bool, data []byte) {
	p.data = append(p.data, data...)
	p.stderr = append(p.stderr, bytes.Repeat([]byte{byte(index(stderr))}, len(data))...)
}

// check reads a ring from each place on, up to the end.
func (p *plain) check(t *testing.T, r *Ring, from int64) {
	t.Helper()
	var buf [MaxData]byte
	first, next := r.Bounds()
	if next != int64(len(p.data)) || first > next || first < 0 {
		t.Fatalf("bounds %d and %d of %d bytes", first, next, len(p.data))
	}
	for seq := from; ; {
		o, ok := r.Read(seq, buf[:])
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
		if of := p.stderr[seq:o.Seq]; bytes.Count(of, of[:1]) != len(of) || of[0] != byte(index(o.Stderr)) {
			t.Fatalf("some of %d to %d is of the other stream", seq, o.Seq)
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
		"few bytes":      {max: 8, largest: 3, exact: true},
		"small":          {max: 50, largest: 20, exact: true},
		"many parts":     {max: 5000, largest: 300, exact: true},
		"larger parts":   {max: 3 * MaxData, largest: 3 * minRing, exact: true},
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
					data[i] = byte(rnd.IntN(128)) // no character is held back
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
				if kept := next - first; kept > int64(tt.max) || tt.exact && kept != min(next, int64(tt.max)) || kept < min(next, int64(tt.max)/64) {
					t.Fatalf("seed %d: %d bytes of %d are kept", seed, kept, next)
				}
				if len(r.runs) > 64+tt.max/64 {
					t.Fatalf("seed %d: %d parts", seed, len(r.runs))
				}
				want.check(t, r, first)
				want.check(t, r, first+rnd.Int64N(next-first+1))
				for _, out := range []int64{-1, first - 1, next + 1, next + 1<<40} {
					if o, ok := r.Read(out, make([]byte, 4)); ok {
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
		if first, next := r.Bounds(); first != 22 || next != 30 {
			t.Errorf("%d: from %d to %d", size, first, next)
		}
	}
}

// TestRingHolds checks what is read after each part was added: those that begin with "!"
// are of stderr, and "end" flushes.
func TestRingHolds(t *testing.T) {
	long := strings.Repeat("x", maxHeld)
	for name, parts := range map[string][][2]string{
		"a character":        {{"\xe2", ""}, {"\x82", ""}, {"\xac", "€"}},
		"four bytes":         {{"a\xf0", "a"}, {"\x9f", ""}, {"\x98", ""}, {"\x80b", "😀b"}},
		"invalid after all":  {{"\xe2", ""}, {"b", "\xe2b"}},
		"two beginnings":     {{"\xe2", ""}, {"\xe2", "\xe2"}, {"\x82\xac", "€"}},
		"no beginning":       {{"\x82\xac", "\x82\xac"}, {"\xff", "\xff"}},
		"never a character":  {{"\xf8", "\xf8"}, {"\xc0", "\xc0"}},
		"process ends":       {{"a\xe2\x82", "a"}, {"end", "\xe2\x82"}},
		"of each stream":     {{"\xe2", ""}, {"!\xe2\x82", ""}, {"!\xac", "€"}, {"\x82\xac", "€"}},
		"other output":       {{"\xe2", ""}, {"!" + long, long}, {"!y", "\xe2y"}, {"\x82", "\x82"}},
		"both, process ends": {{"\xe2", ""}, {"!\xe2", ""}, {"end", "\xe2\xe2"}},
	} {
		r, seq, buf := NewRing(1<<20), int64(0), make([]byte, MaxData)
		for _, part := range parts {
			if text, stderr := strings.CutPrefix(part[0], "!"); part[0] == "end" {
				r.Flush()
			} else {
				r.Add(stderr, []byte(text))
			}
			var got string
			for {
				o, ok := r.Read(seq, buf)
				if !ok || o.Seq != seq+int64(len(o.Data)) {
					t.Fatalf("%s: %d after %d", name, o.Seq, seq)
				}
				if seq = o.Seq; len(o.Data) == 0 {
					break
				}
				got += string(o.Data)
			}
			if got != part[1] {
				t.Errorf("%s: after %.9q comes %.9q, want %.9q", name, part[0], got, part[1])
			}
		}
	}
}

// TestRingReadsCharacters checks that neither a small buffer nor the circle's end cuts a
// character.
func TestRingReadsCharacters(t *testing.T) {
	r, seq := NewRing(100), int64(0)
	for range 100 {
		r.Add(false, []byte("a€😀b€😀c"))
		for size := 4; ; size = 4 + (size+1)%4 {
			o, ok := r.Read(seq, make([]byte, size))
			if !ok || !utf8.Valid(o.Data) {
				t.Fatalf("after %d: %q, %t", seq, o.Data, ok)
			}
			if seq = o.Seq; len(o.Data) == 0 {
				break
			}
		}
	}
}

// What there is room for takes nothing away from who reads.
func TestRingRoom(t *testing.T) {
	for _, size := range []int{8, 11, 100, 5000} {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 0))
		r := NewRing(size)
		seq := int64(0)
		for range 3000 {
			stderr := rnd.IntN(2) == 0
			n := min(r.Room(stderr, seq), 1+rnd.IntN(3))
			data := make([]byte, max(0, n))
			for i := range data {
				data[i] = "a\xe2\x82\xac\xf0"[rnd.IntN(5)]
			}
			r.Add(stderr, data)
			first, next := r.Bounds()
			if first > seq || n < 0 || n == 0 && next == seq {
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
