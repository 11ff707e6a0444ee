package client_test

import (
	"cmp"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// A stream in frames that breaks off again and again still gives everything, once.
func TestFramesTakenUpAgain(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	req := withSandbox(apitype.ExecRequest{Command: apitype.Command{"sh", "-c", strings.Repeat("echo 0123456789; ", 100) + "echo end >&2"}, ExecID: "job-1", Raw: true})
	cut := &cutting{next: b.http.Transport, after: 300}
	c, err := client.New(client.Options{BaseURL: b.url, Token: red, HTTPClient: &http.Client{Transport: cut}})
	if err != nil {
		t.Fatal(err)
	}
	var at int64
	n := 0
	for ev, err := range c.ExecStream(ctx, "k", req) {
		if err != nil {
			t.Fatal(err)
		}
		switch ev.Event {
		case apitype.EventStart:
			if n++; n > 1 || len(ev.Execution.Command) != 3 || ev.Execution.ExecID != "job-1" {
				t.Errorf("start %d: %+v", n, ev.Execution)
			}
		case apitype.EventStdout, apitype.EventStderr:
			if at += int64(len(ev.DataBase64)); ev.Seq != at {
				t.Errorf("%d bytes up to %d", at, ev.Seq)
			}
		case apitype.EventExit:
			if *ev.ExitCode != 0 || ev.Seq != at || at != 100*11+4 {
				t.Errorf("after %d: %+v", at, ev)
			}
		}
	}
	if cut.calls < 2 {
		t.Errorf("%d calls", cut.calls)
	}
}

func TestFramesTries(t *testing.T) {
	const (
		exit = `{"event":"exit","seq":9,"status":"completed","exit_code":0}`
		x    = "\x01\x00\x00\x00\x00\x00\x00\x01x"
		beat = "\x01\x00\x00\x00\x00\x00\x00\x00"
		over = "\x03\x00\x00\x00\x00\x00\x00\x1e" + `{"event":"taken_over","seq":1}`
	)
	end := "\x03\x00\x00\x00\x00\x00\x00" + string(rune(len(exit))) + exit
	for name, tt := range map[string]struct {
		bodies  []string // the last one is repeated
		calls   int
		out     string
		wantErr string
	}{
		"whole":               {[]string{x + beat + end}, 1, "x", ""},
		"in two parts":        {[]string{x, x + end}, 2, "xx", ""},
		"cut within a head":   {[]string{x + x[:5], x + end}, 2, "xx", ""},
		"cut within data":     {[]string{x + x[:8], x + end}, 2, "xx", ""},
		"cut, and gone on":    {[]string{"\x02\x00\x00\x00\x00\x00\x00\x05ab", "\x02\x00\x00\x00\x00\x00\x00\x03cde" + end}, 2, "", ""},
		"cut within the exit": {[]string{x + end[:20], end}, 2, "x", ""},
		"none goes on":        {[]string{beat}, 5, "", "broke off"},
		"taken over":          {[]string{x + over}, 1, "x", client.ErrTakenOver.Error()},
		"too large":           {[]string{"\x01\x00\x00\x00\x7f\x00\x00\x00xxx"}, 5, "", "decode event"},
		"of another stream":   {[]string{"\x04\x00\x00\x00\x00\x00\x00\x01x"}, 5, "", "decode event"},
		"no event":            {[]string{"\x03\x00\x00\x00\x00\x00\x00\x01x"}, 5, "", "decode event"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				calls := 0
				hc := &http.Client{Transport: transport(func(r *http.Request) *http.Response {
					if !strings.HasPrefix(r.Header.Get("Accept"), apitype.Multiplexed+",") || calls > 0 && !r.URL.Query().Has("after") {
						t.Errorf("call %d: %s, Accept %s", calls, r.URL, r.Header.Get("Accept"))
					}
					a := answer(200, "", tt.bodies[min(calls, len(tt.bodies)-1)])
					a.Header.Set("Content-Type", apitype.Multiplexed)
					a.Header.Set(apitype.StartHeader, `{"event":"start","seq":`+cmp.Or(r.URL.Query().Get("after"), "0")+`}`)
					calls++
					return a
				})}
				c, err := client.New(client.Options{BaseURL: "http://localhost", HTTPClient: hc})
				if err != nil {
					t.Fatal(err)
				}
				out, _, _, _, err := collect(c.ExecStream(t.Context(), "k", apitype.ExecRequest{Command: apitype.Command{"x"}, ExecID: "job", Raw: true}))
				if out != tt.out || calls != tt.calls || (err == nil) != (tt.wantErr == "") || err != nil && !strings.Contains(err.Error(), tt.wantErr) {
					t.Errorf("got %q, %v after %d calls", out, err, calls)
				}
			})
		})
	}
}
