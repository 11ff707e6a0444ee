package sandboxapi

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
)

// Output is written as any other event would be.
func FuzzEncode(f *testing.F) {
	f.Add("a<b>&\n\r\t\b\x00\x1f\x7f\"\\/", []byte{}, int64(5), "")
	f.Add("ü€😀\u2028", []byte{0, 1, 0xff}, int64(0), "3,4")
	f.Add("", []byte("x"), int64(1<<60), "")
	f.Fuzz(func(t *testing.T, text string, raw []byte, seq int64, resume string) {
		want := apitype.StreamEvent{
			Event: apitype.EventStdout, Seq: seq, Resume: strings.ToValidUTF8(resume, "?"), Data: strings.ToValidUTF8(text, "?"), DataBase64: raw,
		}
		if want.Data == "" && len(raw) == 0 {
			return
		}
		e := &eventWriter{}
		if err := e.encode(&want); err != nil {
			t.Fatal(err)
		}
		if n := bytes.IndexByte(e.buf.Bytes(), '\n'); n != e.buf.Len()-1 {
			t.Fatalf("%q isn't one line", e.buf.Bytes())
		}
		var got apitype.StreamEvent
		if err := json.Unmarshal(e.buf.Bytes(), &got); err != nil {
			t.Fatalf("%q: %v", e.buf.Bytes(), err)
		}
		if len(raw) == 0 {
			want.DataBase64, got.DataBase64 = nil, nil
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	ev := &apitype.StreamEvent{Event: apitype.EventStdout, Seq: 1 << 20, DataBase64: make([]byte, maxEvent)}
	e := &eventWriter{}
	b.SetBytes(maxEvent)
	b.ReportAllocs()
	for b.Loop() {
		e.buf.Reset()
		if err := e.encode(ev); err != nil {
			b.Fatal(err)
		}
	}
}
