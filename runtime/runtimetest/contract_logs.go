package runtimetest

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func loggerCases() []contractCase {
	return []contractCase{
		{"logs/options", testLogs},
		{"logs/follow", testLogsFollow},
		{"logs/follow to the end", testLogsFollowToTheEnd},
		{"logs/bounded", testLogsBounded},
	}
}

func testLogs(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "echo one; sleep 0.1; echo two >&2; sleep 0.3; echo three"}
	c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)

	var all, none bytes.Buffer
	must(t, b.rt.Logs(b.ctx, c.ID, runtime.LogOptions{Timestamps: true}, &all, &none))
	var times []time.Time
	for line := range strings.Lines(all.String() + none.String()) {
		stamp, _, _ := strings.Cut(line, " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		if err != nil || time.Since(at) > time.Minute {
			t.Fatalf("timestamp of %q: %v", line, err)
		}
		times = append(times, at)
	}
	if len(times) != 3 || !times[1].After(times[0]) {
		t.Fatalf("with timestamps: %q and %q", &all, &none)
	}
	for _, tt := range []struct {
		name           string
		opts           runtime.LogOptions
		stdout, stderr string
	}{
		{"all", runtime.LogOptions{}, "one\nthree\n", "two\n"},
		{"tail 1", runtime.LogOptions{Tail: 1}, "three\n", ""},
		{"tail 2", runtime.LogOptions{Tail: 2}, "three\n", "two\n"},
		{"tail 10", runtime.LogOptions{Tail: 10}, "one\nthree\n", "two\n"},
		{"since the last", runtime.LogOptions{Since: times[1]}, "three\n", ""},
		{"since now", runtime.LogOptions{Since: time.Now()}, "", ""},
		{"follow", runtime.LogOptions{Follow: true}, "one\nthree\n", "two\n"},
	} {
		var stdout, stderr bytes.Buffer
		if err := b.rt.Logs(b.ctx, c.ID, tt.opts, &stdout, &stderr); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if stdout.String() != tt.stdout || stderr.String() != tt.stderr {
			t.Errorf("%s: %q and %q, want %q and %q", tt.name, &stdout, &stderr, tt.stdout, tt.stderr)
		}
	}
	if err := b.rt.Logs(b.ctx, c.ID, runtime.LogOptions{}, nil, nil); err != nil {
		t.Errorf("without writers: %v", err)
	}
	class(t, "logs", b.rt.Logs(b.ctx, noID, runtime.LogOptions{}, nil, nil), errdefs.IsNotFound, "NotFound")
}

func testLogsFollow(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "echo one; sleep 1; echo two; sleep 100000"}
	c := b.create(t, spec)
	follow := func(ctx context.Context, until string) (<-chan struct{}, <-chan error) {
		out, done := newSignalWriter(until), make(chan error, 1)
		go func() { done <- b.rt.Logs(ctx, c.ID, runtime.LogOptions{Follow: true}, out, nil) }()
		return out.seen, done
	}
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	seen, done := follow(ctx, "one\ntwo\n")
	select {
	case <-seen:
	case err := <-done:
		t.Fatalf("ended before the container: %v", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("ended by the context: %v", err)
	}
	seen, done = follow(b.ctx, "one\ntwo\n")
	<-seen
	must(t, b.rt.Remove(b.ctx, c.ID))
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("ended by the container: %v", err)
		}
	case <-b.ctx.Done():
		t.Error("follow didn't end with the container")
	}
}

// testLogsFollowToTheEnd has several followers, from before the end to after it.
func testLogsFollowToTheEnd(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "echo one; sleep 1; echo two >&2; echo three; exit 3"}
	c := b.create(t, spec)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			var stdout, stderr bytes.Buffer
			if err := b.rt.Logs(b.ctx, c.ID, runtime.LogOptions{Follow: true}, &stdout, &stderr); err != nil {
				t.Error(err)
			}
			if stdout.String() != "one\nthree\n" || stderr.String() != "two\n" {
				t.Errorf("followed %q and %q", &stdout, &stderr)
			}
		})
	}
	wg.Wait()
	ended := b.awaitState(t, c.ID, runtime.StateExited)
	if late := time.Since(ended.FinishedAt); late > 10*time.Second {
		t.Errorf("the followers ended %s after the container", late)
	}
}

// kept returns what a log has kept of both streams.
func (b *fixture) kept(t *testing.T, id string) string {
	t.Helper()
	var out bytes.Buffer
	must(t, b.rt.Logs(b.ctx, id, runtime.LogOptions{}, &out, &out))
	return out.String()
}

// testLogsBounded checks that a log keeps the end of the output, within its bound. The bound
// includes an engine's own bytes, so that the text may be much shorter.
func testLogsBounded(t *testing.T, b *fixture) {
	const limit, lines = 16 << 10, 1500
	var script, all strings.Builder
	for i := range lines {
		line := fmt.Sprintf("line %05d %s", i, strings.Repeat("x", 38))
		fmt.Fprintf(&script, "echo %s;", line)
		all.WriteString(line + "\n")
	}
	spec := b.spec()
	spec.Command, spec.LogMaxBytes = []string{"sh", "-c", script.String()}, limit
	got := b.kept(t, b.awaitState(t, b.create(t, spec).ID, runtime.StateExited).ID)
	if len(got) > limit || len(got) < limit/8 {
		t.Errorf("%d bytes are kept of %d, the bound is %d", len(got), all.Len(), limit)
	}
	if !strings.HasSuffix(all.String(), got) {
		t.Errorf("what is kept isn't the end: %.100q … %q", got, got[max(0, len(got)-100):])
	}
}

// testLogsText prints long lines, control characters and invalid UTF-8. An engine that keeps
// logs in JSON returns replacement characters for the latter.
func testLogsText(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Command = []string{"sh", "-c", `head -c 100000 /dev/zero | tr '\0' x; echo; ` +
		`printf 'nul \000 bell \007 escape \033 quote " back\\slash \303\274\342\234\223\r\n'; printf 'not \377 text\n\n'; printf 'no newline'`}
	c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	want := strings.Repeat("x", 100000) + "\nnul \x00 bell \a escape \x1b quote \" back\\slash ü✓\r\nnot \ufffd text\n\nno newline"
	if got := strings.ToValidUTF8(b.kept(t, c.ID), "\ufffd"); got != want {
		t.Errorf("%d bytes came back, want %d: …%q", len(got), len(want), got[min(len(got), 99990):])
	}
}

// testLogsFlood prints more than a log keeps. The container mustn't wait for its log, nor stop
// at the bound.
func testLogsFlood(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.LogMaxBytes = 1 << 20
	spec.Command = []string{"sh", "-c", "yes 'a line of the flood' | head -n 1000000; echo the end"}
	c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
	if got := b.kept(t, c.ID); int64(len(got)) > spec.LogMaxBytes || !strings.HasSuffix(got, "a line of the flood\nthe end\n") {
		t.Errorf("%d bytes are kept, which end in %q", len(got), got[max(0, len(got)-40):])
	}
}
