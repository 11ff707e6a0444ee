package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestDemo(t *testing.T) { onEachEngine(t, testDemo) }

func testDemo(t *testing.T, kind string) {
	t.Parallel() // much of its time it waits
	e := commonEngine(t, kind)
	tmp := e.dir(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "demo", "--engine", kind)
	cmd.Env = append(append(os.Environ(), e.env...), "BERM_DEMO_IMAGE="+testImage, "TMPDIR="+tmp)
	began := time.Now()
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %s, want a minute at most", took)
	}
	for _, want := range []string{"running", "reused", "sandbox_conflict", "policy_denied", "not_found", "kill -9", "still here", "All went as promised"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	wantNothing(t, e)
	wantEmptyDir(t, tmp)
}

// Ctrl-C in the middle leaves no more behind than an end in peace.
func TestDemoInterrupted(t *testing.T) { onEachEngine(t, testDemoInterrupted) }

func testDemoInterrupted(t *testing.T, kind string) {
	t.Parallel() // much of its time it waits
	e := commonEngine(t, kind)
	tmp := e.dir(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "demo", "--engine", kind)
	cmd.Env = append(append(os.Environ(), e.env...), "BERM_DEMO_IMAGE="+testImage, "TMPDIR="+tmp)
	out := &trigger{text: "Run a command", f: func() { _ = cmd.Process.Signal(os.Interrupt) }}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err == nil || !bytes.Contains(out.gathered, []byte("interrupted; everything was removed")) {
		t.Errorf("got %v:\n%s", err, out.gathered)
	}
	wantNothing(t, e)
	wantEmptyDir(t, tmp)
}

// trigger gathers what is written, and does something once it contains a text.
type trigger struct {
	gathered []byte
	text     string
	f        func()
}

func (w *trigger) Write(p []byte) (int, error) {
	w.gathered = append(w.gathered, p...)
	if w.f != nil && bytes.Contains(w.gathered, []byte(w.text)) {
		w.f()
		w.f = nil
	}
	return len(p), nil
}
