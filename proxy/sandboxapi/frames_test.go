package sandboxapi_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
	rt "github.com/bermhq/berm/runtime"
)

var asFrames = withHeader("Accept", apitype.Multiplexed)

// framed gives the events of a stream in frames as short gives those of others.
func framed(t *testing.T, h http.Header, body string) []string {
	t.Helper()
	var start apitype.StreamEvent
	if err := json.Unmarshal([]byte(h.Get(apitype.StartHeader)), &start); err != nil || h.Get("Content-Type") != apitype.Multiplexed {
		t.Fatalf("%v: %v", h, err)
	}
	evs := []apitype.StreamEvent{start}
	for seq := start.Seq; body != ""; {
		size := 8
		if len(body) >= size {
			size += int(binary.BigEndian.Uint32([]byte(body[4:8])))
		}
		if len(body) < size || body[1:4] != "\x00\x00\x00" || size > 8<<20 {
			t.Fatalf("%.40q of %d bytes is no frame", body, len(body))
		}
		data := body[8:size]
		ev := apitype.StreamEvent{Event: apitype.EventStdout, Data: data}
		switch body[0] {
		case 1:
		case 2:
			ev.Event = apitype.EventStderr
		case 3:
			ev = apitype.StreamEvent{}
			if err := json.Unmarshal([]byte(data), &ev); err != nil || len(body) > size {
				t.Fatalf("%v: %q, and %d bytes after it", err, data, len(body)-size)
			}
			if ev.Seq != seq {
				t.Errorf("%d bytes up to %+v", seq, ev)
			}
		default:
			t.Fatalf("a frame of stream %d", body[0])
		}
		if body[0] != 3 {
			seq += int64(len(data))
			ev.Seq = seq
		}
		evs = append(evs, ev)
		body = body[size:]
	}
	return short(evs)
}

func TestFrames(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "a<b>\n")
	tape.print(true, "no\xffe\n")
	tape.print(false, "\xc3")
	tape.finish(io.EOF)
	whole := []string{"0 start ", "5 stdout a<b>\n", "10 stderr no\xffe\n", "11 stdout \xc3", "11 exit "}
	for name, tt := range map[string]struct {
		method, path, body string
		change             []func(*http.Request)
		want               []string
	}{
		"follow":        {"GET", streamPath, "", nil, whole},
		"exec":          {"POST", execPath, `{"command":["make"]}`, nil, whole},
		"start":         {"POST", execsPath, `{"command":["make"],"raw":true}`, nil, whole},
		"from a place":  {"GET", streamPath + "?after=7", "", nil, []string{"7 start ", "10 stderr \xffe\n", "11 stdout \xc3", "11 exit "}},
		"Last-Event-ID": {"GET", streamPath, "", []func(*http.Request){withHeader("Last-Event-ID", "11")}, []string{"11 start ", "11 exit "}},
	} {
		t.Run(name, func(t *testing.T) {
			a := d.want(200, "", tt.method, tt.path, tt.body, append(tt.change, asFrames)...)
			if diff := cmp.Diff(tt.want, framed(t, a.Header, a.body)); diff != "" {
				t.Error(diff)
			}
		})
	}
	d.want(422, "validation", "GET", streamPath+"?after=3,7", "", asFrames)
	a := d.want(200, "", "GET", logsOfPath, "", withHeader("Accept", apitype.Multiplexed+", application/x-ndjson"))
	if got := a.Header.Get("Content-Type"); got != "application/x-ndjson" {
		t.Errorf("a log comes as %s", got)
	}
}

// Who counts bytes must know from where on.
func TestFramesBeginSomewhere(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "0123456789")
	tape.finish(io.EOF)
	tape.change(func() { tape.first = 6 })
	a := d.want(200, "", "GET", streamPath, "", asFrames)
	if diff := cmp.Diff([]string{"6 start ", "10 stdout 6789", "10 exit "}, framed(t, a.Header, a.body)); diff != "" {
		t.Error(diff)
	}
	d.want(410, "output_gone", "GET", streamPath+"?after=5", "", asFrames)
}

func TestFramesTakenOver(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(true, "x")
	tape.finish(errdefs.ErrAborted)
	a := d.want(200, "", "GET", streamPath, "", asFrames)
	if diff := cmp.Diff([]string{"0 start ", "1 stderr x", "1 taken_over "}, framed(t, a.Header, a.body)); diff != "" {
		t.Error(diff)
	}
}

// Without its last frame, a stream was broken off, and looks like it.
func TestFramesBrokenOff(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "x")
	tape.finish(errdefs.ErrUnavailable)
	b, err := io.ReadAll(d.open(t.Context(), "GET", streamPath, "", asFrames).Body)
	if string(b) != "\x01\x00\x00\x00\x00\x00\x00\x01x" || err == nil {
		t.Errorf("got %q, %v", b, err)
	}
}

func TestFramesHeartbeat(t *testing.T) {
	d := beating(t, 5*time.Millisecond)
	d.running()
	resp := d.open(t.Context(), "GET", streamPath, "", asFrames)
	head := make([]byte, 8)
	for range 3 {
		if _, err := io.ReadFull(resp.Body, head); err != nil || string(head) != "\x01\x00\x00\x00\x00\x00\x00\x00" {
			t.Fatalf("got %q, %v", head, err)
		}
	}
}

// Whatever there is to tell, the header stays short, and one.
func TestFramesHeader(t *testing.T) {
	d := newDoor(t)
	d.running().finish(io.EOF)
	x := &d.manager.streams.execution
	x.Command, x.Backend = []string{strings.Repeat("x", 4096)}, "a\x7f\r\nü😀"
	a := d.want(200, "", "GET", streamPath, "", asFrames)
	h := a.Header.Get(apitype.StartHeader)
	var start apitype.StreamEvent
	if err := json.Unmarshal([]byte(h), &start); err != nil || start.Execution.Backend != "a\x7f\r\nü😀" || len(start.Execution.Command) > 0 || len(h) > 2000 {
		t.Errorf("%q: %+v, %v", h, start.Execution, err)
	}
}

// Much output comes through whole, in large frames.
func TestFramesMuch(t *testing.T) {
	d := newDoor(t)
	d.client = &http.Client{}
	tape := d.running()
	const chunks, size = 4_000, 1000
	text := []byte(strings.Repeat("0123456789", size/10))
	tape.endless = func(read int64) rt.Chunk {
		if read == chunks*size {
			return rt.Chunk{}
		}
		return rt.Chunk{Data: text, Stderr: read/size%1000 == 999}
	}
	resp := d.open(t.Context(), "GET", streamPath, "", asFrames)
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	evs := framed(t, resp.Header, string(b))
	if last := evs[len(evs)-1]; last != fmt.Sprintf("%d exit ", chunks*size) {
		t.Errorf("%d frames, the last is %.50q", len(evs), last)
	}
}
