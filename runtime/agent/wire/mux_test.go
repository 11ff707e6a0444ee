package wire

import (
	"bytes"
	"encoding/binary"
	"io"
	"slices"
	"testing"
)

// record is a carrier that records its writes.
type record struct {
	io.ReadCloser
	writes [][]byte
}

func (r *record) Write(p []byte) (int, error) {
	r.writes = append(r.writes, bytes.Clone(p))
	return len(p), nil
}

func muxFrame(kind, flags byte, length int) []byte {
	return binary.BigEndian.AppendUint32([]byte{0, kind, 0, flags, 0, 0, 0, 1}, uint32(length))
}

// TestJoined checks what goes out in one write, and that all of it does.
func TestJoined(t *testing.T) {
	const window, syn, ack, fin = 1, 1, 2, 4
	opened, accepted, closed := muxFrame(window, syn, 0), muxFrame(window, ack, 0), muxFrame(window, fin, 0)
	big := make([]byte, 3*joinMost)
	for name, tt := range map[string]struct {
		in   [][]byte
		want []int // the lengths of the writes
	}{
		"opened with data":        {[][]byte{opened, muxFrame(0, 0, 5), []byte("hello")}, []int{29}},
		"accepted with data":      {[][]byte{accepted, muxFrame(0, 0, 5), []byte("hello"), closed}, []int{29, 12}},
		"data that looks like it": {[][]byte{muxFrame(0, 0, 12), accepted, muxFrame(0, 0, 12), muxFrame(0, 0, 12), closed}, []int{24, 24, 12}},
		"opened and accepted":     {[][]byte{opened, accepted, opened, muxFrame(0, 0, 1), []byte("x")}, []int{49}},
		"closed at once":          {[][]byte{accepted, closed, muxFrame(window, syn|fin, 0), muxFrame(window, ack|fin, 0)}, []int{24, 12, 12}},
		"updates":                 {[][]byte{muxFrame(window, 0, 1), muxFrame(2, syn, 7)}, []int{12, 12}},
		"much data":               {[][]byte{accepted, muxFrame(0, 0, len(big)), big}, []int{24 + len(big)}},
		"many that are accepted":  {append(slices.Repeat([][]byte{accepted}, joinMost/muxHead+1), accepted), []int{joinMost/muxHead*muxHead + 2*muxHead}},
	} {
		var r record
		j := &Joined{ReadWriteCloser: &r}
		for _, p := range tt.in {
			if n, err := j.Write(p); n != len(p) || err != nil {
				t.Errorf("%s: wrote %d of %d bytes, %v", name, n, len(p), err)
			}
		}
		var got []int
		for _, w := range r.writes {
			got = append(got, len(w))
		}
		if !slices.Equal(got, tt.want) || !bytes.Equal(slices.Concat(r.writes...), slices.Concat(tt.in...)) {
			t.Errorf("%s: writes of %v bytes, want %v", name, got, tt.want)
		}
	}
}
