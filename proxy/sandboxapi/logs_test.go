package sandboxapi_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
)

const logsPath = "/api/v1/sandboxes/k/logs"

func TestLogs(t *testing.T) {
	d := newDoor(t)
	d.manager.logs = func(stdout, stderr io.Writer) error {
		for i, w := range []io.Writer{stdout, stderr, stdout} {
			if w != nil {
				_, _ = fmt.Fprintf(w, "line %d \xc3", i)
				_, _ = io.WriteString(w, "\xbc\n")
			}
		}
		return nil
	}
	for _, tt := range []struct{ query, accept, contentType, want string }{
		{"", "", "text/plain; charset=utf-8", "line 0 ü\nline 1 ü\nline 2 ü\n"},
		{"?stream=both", "*/*", "text/plain; charset=utf-8", "line 0 ü\nline 1 ü\nline 2 ü\n"},
		{"?stream=stdout", "", "text/plain; charset=utf-8", "line 0 ü\nline 2 ü\n"},
		{"?stream=stderr", "text/plain", "text/plain; charset=utf-8", "line 1 ü\n"},
		{"?stream=stderr", "text/html, application/x-ndjson;q=0.5", "application/x-ndjson",
			`{"stream":"stderr","data":"line 1 "}` + "\n" + `{"stream":"stderr","data":"ü\n"}` + "\n"},
	} {
		a := d.want(200, "", "GET", logsPath+tt.query, "", withHeader("Accept", tt.accept))
		if a.body != tt.want || a.Header.Get("Content-Type") != tt.contentType {
			t.Errorf("%s %s: got %s %q", tt.query, tt.accept, a.Header.Get("Content-Type"), a.body)
		}
	}
	d.manager.logs = nil
	if a := d.want(200, "", "GET", logsPath, ""); a.body != "" {
		t.Errorf("got %q", a.body)
	}
}

func TestLogOptions(t *testing.T) {
	d := newDoor(t)
	since := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	d.want(200, "", "GET", logsPath+"?follow=true&tail=5&timestamps=true&since=2026-01-02T03:04:05.000006Z", "")
	want := runtime.LogOptions{Follow: true, Tail: 5, Timestamps: true, Since: since}
	if diff := cmp.Diff(want, d.manager.logged); diff != "" {
		t.Error(diff)
	}
	d.want(200, "", "GET", logsPath+"?follow=false&since=10m", "")
	if ago := time.Since(d.manager.logged.Since); ago < 10*time.Minute || ago > 11*time.Minute || d.manager.logged.Follow {
		t.Errorf("got %+v", d.manager.logged)
	}
	for _, q := range []string{"tail=0", "tail=-1", "tail=x", "tail=1000001", "follow=yes", "follow=", "timestamps=1", "since=", "since=-5m", "since=yesterday", "stream=stdin", "stream="} {
		d.want(422, "validation", "GET", logsPath+"?"+q, "")
	}
}

func TestLogsFollow(t *testing.T) {
	d := newDoor(t)
	begin, end := make(chan struct{}), make(chan struct{})
	d.manager.logs = func(stdout, _ io.Writer) error {
		<-begin
		_, err := io.WriteString(stdout, "first\n")
		<-end
		return err
	}
	resp := d.do(t.Context(), "GET", logsPath+"?follow=true", "") // answered though there is nothing to say yet
	defer func() { _ = resp.Body.Close() }()
	close(begin)
	line, err := bufio.NewReader(resp.Body).ReadString('\n') // before the end
	if line != "first\n" || err != nil {
		t.Errorf("got %q, %v", line, err)
	}
	close(end)
}

func TestLogsBreakOff(t *testing.T) {
	d := newDoor(t)
	d.manager.logs = func(stdout, _ io.Writer) error {
		_, _ = io.WriteString(stdout, strings.Repeat("x", 100)+"\n")
		return errors.New("boo")
	}
	if !d.brokenOff(logsPath) {
		t.Error("a part of the log looks whole")
	}
}
