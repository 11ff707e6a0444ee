package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const testImage = "berm.local/busybox:latest"

// startEngine gives a private engine with an image of busybox.
func startEngine(t *testing.T) *engine.Docker {
	t.Helper()
	return startEngineWith(t, engine.Options{})
}

func startEngineWith(t *testing.T, opts engine.Options) *engine.Docker {
	t.Helper()
	engine.Require(t, "docker")
	d, err := engine.StartDocker(t.Context(), opts)
	if err != nil {
		engine.Lacking(t, "docker", err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := d.ImportBusybox(t.Context(), testImage); err != nil {
		t.Fatal(err)
	}
	return d
}

// wantEmpty checks that no sandbox and no network of Berm is left on the engine.
func wantEmpty(t *testing.T, d *engine.Docker) {
	t.Helper()
	rt, err := openRuntime(config.Engine{Kind: "docker", Address: d.Host(), CallTimeout: time.Minute}, nil)
	if err != nil {
		t.Fatal(err)
	}
	containers, err := rt.List(t.Context(), map[string]string{lifecycle.LabelOwner: ""})
	if err != nil || len(containers) > 0 {
		t.Errorf("containers are left: %v, %v", containers, err)
	}
	networks, err := rt.(runtime.Networker).Networks(t.Context(), map[string]string{lifecycle.LabelOwner: ""})
	if err != nil || len(networks) > 0 {
		t.Errorf("networks are left: %v, %v", networks, err)
	}
}

func TestDemo(t *testing.T) {
	d := startEngine(t)
	tmp := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "demo")
	cmd.Env = append(os.Environ(), asBerm, "DOCKER_HOST="+d.Host(), "BERM_DEMO_IMAGE="+testImage, "TMPDIR="+tmp)
	began := time.Now()
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %s, want a minute at most", took)
	}
	for _, want := range []string{"< 201 Created", "< 200 OK", "< 409 Conflict", "< 403 Forbidden", "< 404 Not Found", "kill -9", "All 9 scenes went as promised"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	wantEmpty(t, d)
	wantEmptyDir(t, tmp)
}

// Ctrl-C in the middle leaves no more behind than an end in peace.
func TestDemoInterrupted(t *testing.T) {
	d := startEngine(t)
	tmp := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "demo")
	cmd.Env = append(os.Environ(), asBerm, "DOCKER_HOST="+d.Host(), "BERM_DEMO_IMAGE="+testImage, "TMPDIR="+tmp)
	out := &trigger{text: "2. Run a command", f: func() { _ = cmd.Process.Signal(os.Interrupt) }}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err == nil || !bytes.Contains(out.gathered, []byte("interrupted; everything was removed")) {
		t.Errorf("got %v:\n%s", err, out.gathered)
	}
	wantEmpty(t, d)
	wantEmptyDir(t, tmp)
}

func wantEmptyDir(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left in the temporary directory: %v, %v", entries, err)
	}
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
