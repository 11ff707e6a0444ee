package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
)

// frame is a frame as it goes over the wire, with whatever size it claims.
func frame(kind Kind, size uint32, payload string) string {
	b := binary.BigEndian.AppendUint32([]byte{byte(kind)}, size)
	return string(b) + payload
}

func TestNext(t *testing.T) {
	long := strings.Repeat("x", MaxData)
	for name, tt := range map[string]struct {
		in   string
		want []string // payloads, before the error
		err  error
	}{
		"nothing":            {"", nil, io.EOF},
		"one":                {frame(KindData, 2, "ab"), []string{"ab"}, io.EOF},
		"two":                {frame(KindData, 2, "ab") + frame(KindEnd, 0, ""), []string{"ab", ""}, io.EOF},
		"empty data":         {frame(KindData, 0, ""), []string{""}, io.EOF},
		"half a head":        {frame(KindData, 2, "ab") + "\x05\x00", []string{"ab"}, io.ErrUnexpectedEOF},
		"no payload":         {frame(KindData, 2, ""), nil, io.ErrUnexpectedEOF},
		"half a payload":     {frame(KindData, 2, "a"), nil, io.ErrUnexpectedEOF},
		"kind 0":             {frame(0, 0, ""), nil, ErrProtocol},
		"kind after last":    {frame(KindFailure+1, 0, ""), nil, ErrProtocol},
		"most data":          {frame(KindData, MaxData, long), []string{long}, io.EOF},
		"more data":          {frame(KindData, MaxData+1, long+"x"), nil, ErrProtocol},
		"more of a message":  {frame(KindItem, MaxMessage+1, ""), nil, ErrProtocol},
		"more of a request":  {frame(KindRequest, MaxRequest+1, ""), nil, ErrProtocol},
		"largest size":       {frame(KindResult, 1<<32-1, ""), nil, ErrProtocol},
		"ready with payload": {frame(KindReady, 1, "x"), nil, ErrProtocol},
		"go with payload":    {frame(KindGo, 1, "x"), nil, ErrProtocol},
		"end with payload":   {frame(KindEnd, 1, "x"), nil, ErrProtocol},
		"output of 8 bytes":  {frame(KindOutput, 8, "12345678"), nil, ErrProtocol},
		"output of 9 bytes":  {frame(KindOutput, 9, "123456789"), []string{"123456789"}, io.EOF},
		"longest output":     {frame(KindOutput, 9+MaxData, "123456789"+long), []string{"123456789" + long}, io.EOF},
		"longer output":      {frame(KindOutput, 10+MaxData, "123456789"+long+"x"), nil, ErrProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			for how, src := range map[string]io.Reader{
				"whole":               strings.NewReader(tt.in),
				"byte by byte":        iotest.OneByteReader(strings.NewReader(tt.in)),
				"data with the error": iotest.DataErrReader(strings.NewReader(tt.in)),
			} {
				r := NewReader(src)
				var got []string
				var err error
				for {
					var payload []byte
					if _, payload, err = r.Next(); err != nil {
						break
					}
					got = append(got, string(payload))
				}
				if !errors.Is(err, tt.err) {
					t.Errorf("%s: error %v, want %v", how, err, tt.err)
				}
				if !slices.Equal(got, tt.want) {
					t.Errorf("%s: %.100q, want %.100q", how, got, tt.want)
				}
			}
		})
	}
}

// pausing has a deadline pass after each of its parts.
type pausing struct {
	parts []string
	now   bool
}

func (p *pausing) Read(b []byte) (int, error) {
	if len(p.parts) == 0 {
		return 0, io.EOF
	}
	if p.now = !p.now; !p.now {
		return 0, os.ErrDeadlineExceeded
	}
	n := copy(b, p.parts[0])
	if p.parts[0] = p.parts[0][n:]; p.parts[0] == "" {
		p.parts = p.parts[1:]
	} else {
		p.now = false
	}
	return n, nil
}

// After a deadline in the middle of a frame, it is that frame which goes on: what is in
// it is never read as one.
func TestNextGoesOn(t *testing.T) {
	forged := frame(KindResult, 2, "{}")
	in := frame(KindOutput, 29, "123456789"+forged+forged+"abcdef") + frame(KindEnd, 0, "") + frame(KindData, 9, forged+"xy")
	want, err := readAll(NewReader(strings.NewReader(in)))
	if len(want) != 3 || !errors.Is(err, io.EOF) {
		t.Fatalf("%q, %v", want, err)
	}
	for at := range len(in) + 1 {
		r := NewReader(&pausing{parts: []string{in[:at], in[at:]}})
		if got, err := readAll(r); !slices.Equal(got, want) || !errors.Is(err, io.EOF) {
			t.Errorf("cut at %d: %q, %v", at, got, err)
		}
	}
	r := NewReader(&pausing{parts: strings.Split(in, "")})
	if got, err := readAll(r); !slices.Equal(got, want) || !errors.Is(err, io.EOF) {
		t.Errorf("cut everywhere: %q, %v", got, err)
	}
	// The end in the middle of a frame is noticed after it, too.
	r = NewReader(&pausing{parts: []string{in[:3], "", in[3:9]}})
	if got, err := readAll(r); len(got) > 0 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut off: %q, %v", got, err)
	}
}

// readAll reads on whenever a deadline has passed.
func readAll(r *Reader) (frames []string, err error) {
	for {
		kind, payload, err := r.Next()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return frames, err
		default:
			frames = append(frames, frame(kind, uint32(len(payload)), string(payload)))
		}
	}
}

// A size alone has no memory set aside for it.
func TestNextGrowsAsBytesCome(t *testing.T) {
	r := NewReader(strings.NewReader(frame(KindRequest, MaxRequest, "x")))
	if _, err := r.Expect(KindRequest); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	if cap(r.buf) > keepBuffer {
		t.Errorf("%d bytes for a frame of which 1 came", cap(r.buf))
	}
	large := strings.Repeat("x", MaxRequest)
	r = NewReader(strings.NewReader(frame(KindRequest, MaxRequest, large) + frame(KindData, 1, "y")))
	if payload, err := r.Expect(KindRequest); err != nil || string(payload) != large {
		t.Fatalf("%d bytes, %v", len(payload), err)
	}
	if _, payload, err := r.Next(); err != nil || string(payload) != "y" || cap(r.buf) > keepBuffer {
		t.Errorf("after a large frame: %q, %v, and a buffer of %d bytes", payload, err, cap(r.buf))
	}
}

// TestNextRefusesRequest checks that only who asks for one has room for a Request.
func TestNextRefusesRequest(t *testing.T) {
	r := NewReader(strings.NewReader(frame(KindRequest, 2, "{}")))
	if _, _, err := r.Next(); !errors.Is(err, ErrProtocol) || len(r.buf) > 0 {
		t.Errorf("%v, and %d bytes were read", err, len(r.buf))
	}
}

func TestExpect(t *testing.T) {
	in := frame(KindReady, 0, "") + frame(KindData, 1, "x") + frame(KindGo, 0, "")
	r := NewReader(strings.NewReader(in))
	if _, err := r.Expect(KindReady); err != nil {
		t.Error(err)
	}
	if payload, err := r.Expect(KindData); err != nil || string(payload) != "x" {
		t.Errorf("%q, %v", payload, err)
	}
	if _, err := r.Expect(KindReady); !errors.Is(err, ErrProtocol) {
		t.Errorf("go in place of ready: %v", err)
	}
	if _, err := r.Expect(KindReady); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

func TestDecode(t *testing.T) {
	for in, ok := range map[string]bool{
		`{"version":1}`:                        true,
		`{"version":1,"later":{"x":[1]}}`:      true,
		`{}`:                                   true,
		``:                                     false,
		`{`:                                    false,
		`{"version":"1"}`:                      false,
		`{"version":1} {}`:                     false,
		`[1]`:                                  false,
		`{"version":99999999999999999999}`:     false,
		strings.Repeat("[", MaxMessage):        false,
		strings.Repeat(`{"version":`, 1<<14):   false,
		`{"version":1,"uid":1,"gid":-1}` + " ": true,
	} {
		if err := Decode([]byte(in), new(Hello)); (err == nil) != ok || err != nil && !errors.Is(err, ErrProtocol) {
			t.Errorf("%.40q: %v", in, err)
		}
	}
}

func TestParseOutput(t *testing.T) {
	seq := func(n uint64) string { return string(binary.BigEndian.AppendUint64(nil, n)) }
	for name, tt := range map[string]struct {
		in   string
		want Output
		ok   bool
	}{
		"stdout":            {"\x00" + seq(3) + "abc", Output{Seq: 3, Data: []byte("abc")}, true},
		"stderr":            {"\x01" + seq(9) + "abc", Output{Seq: 9, Stderr: true, Data: []byte("abc")}, true},
		"empty":             {"\x00" + seq(0), Output{Data: []byte{}}, true},
		"last place":        {"\x00" + seq(MaxNumber) + "a", Output{Seq: MaxNumber, Data: []byte("a")}, true},
		"third stream":      {"\x02" + seq(3) + "abc", Output{}, false},
		"before the first":  {"\x00" + seq(2) + "abc", Output{}, false},
		"after the last":    {"\x00" + seq(MaxNumber+1) + "a", Output{}, false},
		"before all":        {"\x00" + seq(1<<63), Output{}, false},
		"short":             {"\x00" + seq(3)[:7], Output{}, false},
		"nothing":           {"", Output{}, false},
		"less than nothing": {"\x00" + seq(1<<64-1) + "a", Output{}, false},
	} {
		got, err := ParseOutput([]byte(tt.in))
		if (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
		if got.Seq != tt.want.Seq || got.Stderr != tt.want.Stderr || !bytes.Equal(got.Data, tt.want.Data) {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

// What a Writer takes, a Reader takes, and the other way round.
func TestSend(t *testing.T) {
	for kind := range KindFailure + 3 {
		for _, size := range []int{0, 1, outputHead - 1, outputHead, MaxData, MaxData + 1, outputHead + MaxData, outputHead + MaxData + 1,
			MaxMessage, MaxMessage + 1, MaxRequest, MaxRequest + 1} {
			var buf bytes.Buffer
			payload := bytes.Repeat([]byte{'x'}, size)
			sent := NewWriter(&buf).Send(kind, payload)
			if sent != nil && (!errors.Is(sent, ErrProtocol) || buf.Len() > 0) {
				t.Errorf("kind %d, %d bytes: %v, and %d bytes sent", kind, size, sent, buf.Len())
			}
			got, read, err := NewReader(strings.NewReader(frame(kind, uint32(size), string(payload)))).whole(kind)
			if (err == nil) != (sent == nil) {
				t.Errorf("kind %d, %d bytes: sent with %v, read with %v", kind, size, sent, err)
			}
			if err != nil {
				continue
			}
			if again, same, err := NewReader(&buf).whole(kind); got != kind || again != kind || err != nil || !bytes.Equal(read, payload) || !bytes.Equal(same, payload) {
				t.Errorf("kind %d, %d bytes: read as kind %d, %d bytes, %v", kind, size, again, len(same), err)
			}
		}
	}
}

func TestSendJSON(t *testing.T) {
	w := NewWriter(new(lock))
	if w.SendJSON(KindRequest, Request{}) != nil || w.SendJSON(KindRequest, func() {}) == nil {
		t.Error("a function went out, or a request didn't")
	}
}

// lock is a writer that notices two calls at once.
type lock struct {
	bytes.Buffer
	mu sync.Mutex
}

func (l *lock) Write(b []byte) (int, error) {
	if !l.mu.TryLock() {
		return 0, errors.New("two at a time")
	}
	defer l.mu.Unlock()
	return l.Buffer.Write(b)
}

func send(w *Writer, o Output) error {
	var frame OutputFrame
	o.Data = frame.Data()[:copy(frame.Data(), o.Data)]
	return w.SendFrame(&frame, o)
}

func TestSendFromMany(t *testing.T) {
	w := NewWriter(new(lock))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for n := range 200 {
				if err := errors.Join(send(w, Output{Seq: 1 << 20, Data: make([]byte, n)}), w.Send(KindData, make([]byte, n))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// halfWriter breaks off once, in mid-frame.
type halfWriter struct {
	bytes.Buffer
	broken bool
}

var errHalf = errors.New("half")

func (h *halfWriter) Write(b []byte) (int, error) {
	if h.broken {
		return h.Buffer.Write(b)
	}
	h.broken = true
	n, _ := h.Buffer.Write(b[:len(b)/2])
	return n, errHalf
}

func TestSendAfterFailure(t *testing.T) {
	var dst halfWriter
	w := NewWriter(&dst)
	for range 2 {
		if err := w.Send(KindData, []byte("abcd")); !errors.Is(err, errHalf) {
			t.Errorf("error %v, want %v", err, errHalf)
		}
	}
	if got := frame(KindData, 4, "abcd"); !strings.HasPrefix(got, dst.String()) {
		t.Errorf("after half a frame came more: %q", dst.String())
	}
}

// FuzzReader reads arbitrary bytes: without a panic, without more memory than a few
// times what came, alike however it comes, and so that writing it gives the same.
func FuzzReader(f *testing.F) {
	for _, seed := range []string{
		"", frame(KindData, 2, "ab"), frame(KindEnd, 0, "") + frame(KindData, 0, ""), frame(KindRequest, MaxRequest, "{"),
		frame(KindResult, 1<<32-1, ""), frame(KindOutput, 12, "\x01\x00\x00\x00\x00\x00\x00\x00\x03abc"), frame(KindOutput, 10, "\x01\x7f\xff\xff\xff\xff\xff\xff\xffa"), frame(99, 0, ""),
		frame(KindHello, 13, `{"version":1}`), frame(KindFailure, 2, "{}") + "\x01",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var back bytes.Buffer
		w := NewWriter(&back)
		whole, slow := NewReader(bytes.NewReader(in)), NewReader(iotest.OneByteReader(bytes.NewReader(in)))
		var err error
		for {
			var kind Kind
			var payload []byte
			kind, payload, err = whole.Next()
			if most := 2*len(in) + keepBuffer; cap(whole.buf) > most {
				t.Fatalf("a buffer of %d bytes for %d that came", cap(whole.buf), len(in))
			}
			slowKind, slowPayload, slowErr := slow.Next()
			if kind != slowKind || !bytes.Equal(payload, slowPayload) || (err == nil) != (slowErr == nil) || err != nil && err.Error() != slowErr.Error() {
				t.Fatalf("%d %q %v, and byte by byte %d %q %v", kind, payload, err, slowKind, slowPayload, slowErr)
			}
			if err != nil {
				break
			}
			if err := w.Send(kind, payload); err != nil {
				t.Fatalf("what was read can't be written: %v", err)
			}
			switch kind {
			case KindOutput:
				o, err := ParseOutput(payload)
				if err != nil {
					continue
				}
				if o.Seq < 0 || o.Seq > MaxNumber {
					t.Fatalf("output that ends at %d", o.Seq)
				}
				var again bytes.Buffer
				if err := send(NewWriter(&again), o); err != nil || !bytes.Equal(again.Bytes()[frameHead:], payload) {
					t.Fatalf("output %q was written as %q, %v", payload, again.Bytes(), err)
				}
			case KindHello, KindRequest, KindItem, KindResult, KindFailure:
				for _, v := range []any{new(Hello), new(Request), new(ProcessInfo), new(FileInfo), new(FileMatch), new(FileEvent), new(Failure)} {
					if err := Decode(payload, v); err != nil && !errors.Is(err, ErrProtocol) {
						t.Fatal(err)
					}
				}
			}
		}
		if !bytes.HasPrefix(in, back.Bytes()) {
			t.Fatalf("%q was read, and written as %q", in, back.Bytes())
		}
		if rest := len(in) - back.Len(); errors.Is(err, io.EOF) != (rest == 0) {
			t.Fatalf("%v with %d bytes left", err, rest)
		}
	})
}

// TestCut checks that texts are cut between characters, and bytes that are none anywhere.
func TestCut(t *testing.T) {
	for _, tt := range []struct {
		text string
		most int
		want string
	}{
		{"short", 5, "short"}, {"shorter", 5, "short"}, {"aé", 2, "a"}, {"a€€", 4, "a€"}, {"a😀", 4, "a"}, {"é", 1, ""}, {"é", 0, ""},
		{"\x80\x80\x80\x80\x80\x80\x80", 6, "\x80\x80"},
	} {
		if got, bytes := Cut(tt.text, tt.most), Cut([]byte(tt.text), tt.most); got != tt.want || string(bytes) != tt.want {
			t.Errorf("%q to %d: %q, %q, want %q", tt.text, tt.most, got, bytes, tt.want)
		}
	}
}
