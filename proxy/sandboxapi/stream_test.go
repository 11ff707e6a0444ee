package sandboxapi_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

const (
	execsPath  = "/api/v1/sandboxes/k/execs"
	streamPath = execsPath + "/job-1/stream"
	logsOfPath = "/api/v1/sandboxes/k/processes/tools/logs"
)

var (
	asSSE    = withHeader("Accept", "text/event-stream")
	asNDJSON = withHeader("Accept", "application/x-ndjson")
)

// running gives a tape that goes on, instead of one that has ended.
func (d *door) running() *tape {
	d.manager.streams.tape = newTape()
	return d.manager.streams.tape
}

// open sends a request and answers as soon as its answer begins.
func (d *door) open(ctx context.Context, method, path, body string, change ...func(*http.Request)) *http.Response {
	d.t.Helper()
	resp := d.do(ctx, method, path, body, change...)
	d.t.Cleanup(func() { _ = resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(resp.Body)
		d.t.Fatalf("%s %s: %d %s", method, path, resp.StatusCode, b)
	}
	return resp
}

// events reads JSON lines.
func events(t *testing.T, body string) []apitype.StreamEvent {
	t.Helper()
	var out []apitype.StreamEvent
	for line := range strings.Lines(body) {
		var ev apitype.StreamEvent
		if err := json.Unmarshal([]byte(line), &ev); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		out = append(out, ev)
	}
	return out
}

// short gives what of the events is output, and how they begin and end.
func short(evs []apitype.StreamEvent) []string {
	var out []string
	for _, ev := range evs {
		out = append(out, fmt.Sprintf("%d %s %s%s", ev.Seq, ev.Event, ev.Data, ev.DataBase64))
	}
	return out
}

func TestStreamForms(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "a<b>\n")
	tape.print(true, "no\xffe\n")
	tape.finish(io.EOF)
	const start = `"execution":{"exec_id":"job-1","session_id":"` + sessionID + `","backend":"fake","command":["make"],"tty":false,` +
		`"status":"running","exit_code":null,"signal":0,"duration_ms":0,"cpu_time_ms":0,"peak_memory_bytes":0,` +
		`"started_at":"2026-01-02T15:04:05Z","ended_at":null,"timeout":"30s","overridden":[],` +
		`"created":false,"recreated":false,"existing":false,"first_seq":0,"next_seq":0}`
	const exit = `"status":"completed","exit_code":0,"signal":0,"duration_ms":1500,"cpu_time_ms":12,"peak_memory_bytes":4096`
	sse := "id: 0\nevent: start\ndata: {\"event\":\"start\",\"seq\":0," + start + "}\n\n" +
		"id: 5\nevent: stdout\ndata: {\"event\":\"stdout\",\"seq\":5,\"data\":\"a<b>\\n\"}\n\n" +
		"id: 10\nevent: stderr\ndata: {\"event\":\"stderr\",\"seq\":10,\"data\":\"no\ufffde\\n\"}\n\n" +
		"id: 10\nevent: exit\ndata: {\"event\":\"exit\",\"seq\":10," + exit + "}\n\n"
	lines := `{"event":"start","seq":0,` + start + "}\n" +
		`{"event":"stdout","seq":5,"data":"a<b>\n"}` + "\n" +
		"{\"event\":\"stderr\",\"seq\":10,\"data\":\"no\ufffde\\n\"}\n" +
		`{"event":"exit","seq":10,` + exit + "}\n"
	raw := strings.NewReplacer(`"data":"a<b>\n"`, `"data_base64":"YTxiPgo="`, "\"data\":\"no\ufffde\\n\"", `"data_base64":"bm//ZQo="`)

	body := `{"command":["make"]}`
	for name, tt := range map[string]struct {
		method, path, body string
		change             []func(*http.Request)
		contentType, want  string
	}{
		"follow":             {"GET", streamPath, "", nil, "text/event-stream", sse},
		"follow in lines":    {"GET", streamPath, "", []func(*http.Request){asNDJSON}, "application/x-ndjson", lines},
		"follow raw":         {"GET", streamPath + "?raw=true", "", nil, "text/event-stream", raw.Replace(sse)},
		"exec":               {"POST", execPath, body, []func(*http.Request){asSSE}, "text/event-stream", sse},
		"exec in lines":      {"POST", execPath, body, []func(*http.Request){asNDJSON}, "application/x-ndjson", lines},
		"exec raw":           {"POST", execPath, `{"command":["make"],"raw":true}`, []func(*http.Request){asNDJSON}, "application/x-ndjson", raw.Replace(lines)},
		"start":              {"POST", execsPath + "?stream=true", body, nil, "text/event-stream", sse},
		"start in lines":     {"POST", execsPath, body, []func(*http.Request){asNDJSON}, "application/x-ndjson", lines},
		"the first accepted": {"GET", streamPath, "", []func(*http.Request){withHeader("Accept", "text/html, Application/X-NDJSON;q=0.9, text/event-stream")}, "application/x-ndjson", lines},
	} {
		t.Run(name, func(t *testing.T) {
			a := d.want(200, "", tt.method, tt.path, tt.body, tt.change...)
			if a.Header.Get("Content-Type") != tt.contentType {
				t.Errorf("got %s", a.Header.Get("Content-Type"))
			}
			running := a.body[strings.Index(a.body, `"duration_ms":`)+14:] // it runs still, who knows for how long
			running = strings.Replace(a.body, `"duration_ms":`+running[:strings.IndexByte(running, ',')], `"duration_ms":0`, 1)
			if diff := cmp.Diff(tt.want, running); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// The first byte must not wait for a second.
func TestStreamAtOnce(t *testing.T) {
	for _, tt := range []struct{ method, path, body string }{
		{"GET", streamPath, ""}, {"POST", execPath, `{"command":["a"]}`}, {"POST", execsPath, `{"command":["a"]}`}, {"GET", logsOfPath + "?follow=true", ""},
	} {
		d := newDoor(t)
		tape := d.running()
		resp := d.open(t.Context(), tt.method, tt.path, tt.body, asNDJSON)
		lines := bufio.NewReader(resp.Body)
		next := func(want string) {
			t.Helper()
			line, err := lines.ReadString('\n')
			if evs := events(t, line); err != nil || short(evs)[0] != want {
				t.Errorf("%s: got %q, %v; want %s", tt.path, line, err, want)
			}
		}
		next("0 start ")
		for i := range 3 {
			tape.print(i == 1, "x")
			next(fmt.Sprintf("%d %s x", i+1, []string{"stdout", "stderr"}[i%2]))
		}
		tape.finish(io.EOF)
		next("3 exit ")
		if rest, err := io.ReadAll(lines); len(rest) > 0 || err != nil {
			t.Errorf("%s: after the end: %q, %v", tt.path, rest, err)
		}
	}
}

func TestStreamResumes(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	for i := range 10 {
		tape.print(i%2 == 1, fmt.Sprintf("line %d\n", i))
	}
	tape.finish(io.EOF)
	const whole = "line 0\nline 1\nline 2\nline 3\nline 4\nline 5\nline 6\nline 7\nline 8\nline 9\n"
	for from := range len(whole) + 1 {
		for name, a := range map[string]answer{
			"after":         d.want(200, "", "GET", fmt.Sprintf("%s?after=%d", streamPath, from), "", asNDJSON),
			"Last-Event-ID": d.want(200, "", "GET", streamPath+"?after=0", "", asNDJSON, withHeader("Last-Event-ID", fmt.Sprint(from))),
			"a log":         d.want(200, "", "GET", fmt.Sprintf("%s?follow=true&after=%d", logsOfPath, from), "", asNDJSON),
		} {
			evs, got := events(t, a.body), ""
			for _, ev := range evs {
				got += ev.Data
			}
			if evs[0].Seq != int64(from) || got != whole[from:] {
				t.Errorf("%s %d: got %d %q", name, from, evs[0].Seq, got)
			}
		}
	}
	tape.change(func() { tape.first = 20 })
	for _, path := range []string{streamPath, logsOfPath} {
		p := d.want(410, "output_gone", "GET", path+"?after=19", "").problem(t)
		if p.FirstSeq == nil || *p.FirstSeq != 20 {
			t.Errorf("got %+v", p)
		}
		d.want(200, "", "GET", path+"?after=20", "")
		d.want(200, "", "GET", path, "")
		for _, bad := range []string{"?after=-1", "?after=x", "?after=", "?after=1,", "?after=20,21", "?after=20,-1", "?raw=1"} {
			d.want(422, "validation", "GET", path+bad, "")
		}
		d.want(422, "validation", "GET", path, "", withHeader("Last-Event-ID", "x"))
	}
}

// halves are pieces of two streams that cut lines and characters, while the other goes on.
var halves = []struct {
	stderr bool
	text   string
}{
	{false, "a\xc3"}, {true, "e\n"}, {true, "f\xe2"}, {false, "\xbcb\xf0\x9f"}, {true, "\x82"}, {false, "\x98"}, {true, "\xacg\n\nh"}, {false, "\x80c\nd"}, {true, "i"},
}

// told is what an event told of each stream, and the place to go on after.
type told struct {
	place, stdout, stderr string
}

func placeOf(seq int64, resume string) string {
	if resume != "" {
		return resume
	}
	return strconv.FormatInt(seq, 10)
}

// resumesExactly breaks a stream off after each of its events, and what goes on there
// again, and wants nothing told twice or left out.
func resumesExactly(t *testing.T, goOn func(after string) []told) {
	t.Helper()
	join := func(events []told) (all told) {
		for _, e := range events {
			all.stdout += e.stdout
			all.stderr += e.stderr
		}
		return all
	}
	whole := goOn("0")
	want := join(whole)
	if want.stdout == "" || want.stderr == "" {
		t.Fatalf("nothing was told: %+v", whole)
	}
	for i, e := range whole {
		before, rest := whole[:i+1], goOn(e.place)
		if got := join(slices.Concat(before, rest)); got != want {
			t.Errorf("from %s on: got %q, want %q", e.place, got, want)
		}
		for j, f := range rest {
			if got := join(slices.Concat(before, rest[:j+1], goOn(f.place))); got != want {
				t.Errorf("from %s, and then from %s on: got %q, want %q", e.place, f.place, got, want)
			}
		}
	}
}

func TestStreamHeartbeat(t *testing.T) {
	d := newDoor(t, func(o *sandboxapi.Options) { o.Heartbeat = 5 * time.Millisecond })
	tape := d.running()
	tape.print(false, "x")
	for accept, want := range map[string]string{
		"application/x-ndjson": `{"event":"heartbeat","seq":1}` + "\n",
		"text/event-stream":    ": heartbeat\n",
	} {
		ctx, cancel := context.WithCancel(t.Context())
		resp := d.open(ctx, "GET", streamPath, "", withHeader("Accept", accept))
		lines := bufio.NewReader(resp.Body)
		for beats := 0; beats < 3; {
			line, err := lines.ReadString('\n')
			must(t, err)
			if line == want {
				beats++
			}
		}
		cancel()
	}
}
