package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestFilesCommands(t *testing.T) {
	insideCLI(t)
	dir := t.TempDir()
	t.Chdir(dir)
	write(t, filepath.Join(dir, "local.txt"), "one\ntwo\nthree\n")
	must(t, os.Chmod(filepath.Join(dir, "local.txt"), 0o640))
	for _, s := range []step{
		{args: "sandbox files mkdir mine -p /tmp/d/e", stdout: []string{""}},
		{args: "sandbox files put mine local.txt /tmp/d/", stdout: []string{"/tmp/d/local.txt", "0640", "14"}},
		{args: "sandbox files put mine - /tmp/d/e/in.go -o json --mode 0600", stdin: "package x\n", stdout: []string{`"path": "/tmp/d/e/in.go"`, `"mode": "0600"`}},
		{args: "sandbox files put mine - /tmp/d/e/in.go -n", stdin: "x", code: 1, stderr: []string{"berm: "}},
		{args: "sandbox files put mine - /tmp/d/e/in.go --append", stdin: "// more\n", stdout: []string{"in.go"}},
		{args: "sandbox files put mine - /tmp/d/", code: 2, stderr: []string{"no name of its own"}},
		{args: "sandbox files put mine - /tmp/f --mode 9", code: 2, stderr: []string{"octal permissions"}},
		{args: "sandbox files put mine nosuch /tmp/d/", code: 1, stderr: []string{"no such file"}},
		{args: "sandbox files put mine - /tmp/x/y/z -p", stdin: "deep", stdout: []string{"/tmp/x/y/z"}},
		{args: "sandbox files cat mine /tmp/d/local.txt /tmp/d/e/in.go", stdout: []string{"one\ntwo\nthree\npackage x\n// more\n"}},
		{args: "sandbox files ls mine /tmp/d", stdout: []string{"directory", "/tmp/d/e\n", "file", "/tmp/d/local.txt\n"}},
		{args: "sandbox files ls mine /tmp/d --depth 2 -o json", stdout: []string{`"path": "/tmp/d/e/in.go"`, `"truncated": false`}},
		{args: "sandbox files ls mine /tmp/d --limit 1", stdout: []string{"/tmp/d/e"}, stderr: []string{"may be more"}},
		{args: "sandbox files stat mine /tmp/d", stdout: []string{"directory", "/tmp/d"}},
		{args: "sandbox files get mine /tmp/d/local.txt", stdout: []string{""}},
		{args: "sandbox files get mine /tmp/d/e/in.go there.go", stdout: []string{""}},
		{args: "sandbox files get mine /tmp/d/e/in.go -", stdout: []string{"package x\n"}},
		{args: "sandbox files get mine /tmp/nosuch gone", code: 1, stderr: []string{"/tmp/nosuch"}},
		{args: "sandbox files get mine /", code: 2, stderr: []string{"say where to"}},
		{args: "sandbox files get mine /tmp/d/local.txt .", code: 1, stderr: []string{"is a directory"}},
		{args: "sandbox files cp mine /tmp/d/local.txt /tmp/d/copy.txt", stdout: []string{""}},
		{args: "sandbox files mv mine /tmp/d/copy.txt /tmp/d/local.txt --replace", stdout: []string{""}},
		{args: "sandbox files find mine /tmp/d **/*.go", stdout: []string{"/tmp/d/e/in.go\n"}},
		{args: "sandbox files find mine /tmp/d **/*.go -o json", stdout: []string{`"path": "/tmp/d/e/in.go"`}},
		{args: "sandbox files grep mine ^t /tmp/d --include *.txt", stdout: []string{"/tmp/d/local.txt:2:two\n", "/tmp/d/local.txt:3:three\n"}},
		{args: "sandbox files grep mine -F -i PACKAGE /tmp/d -o json", stdout: []string{`"line": 1`}},
		{args: "sandbox files grep mine nosuchtext /tmp/d", code: 1},
	} {
		s.run(t)
	}
	for name, want := range map[string]string{"local.txt": "one\ntwo\nthree\n", "there.go": "package x\n// more\n"} {
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s has %q, %v", name, got, err)
		}
	}
	if entries, err := os.ReadDir("."); err != nil || len(entries) != 2 {
		t.Errorf("the directory has %v, %v", entries, err)
	}

	archive, errs, code := berm(t, "", "sandbox", "files", "tar", "mine", "/tmp/d")
	if code != 0 || errs != "" {
		t.Fatalf("tar: exit code %d, %s", code, errs)
	}
	for _, s := range []step{
		{args: "sandbox files rm mine -r /tmp/d", stdout: []string{""}},
		{args: "sandbox files tar mine -x /tmp", stdin: archive, stdout: []string{""}},
		{args: "sandbox files cat mine /tmp/d/e/in.go", stdout: []string{"package x\n"}},
	} {
		s.run(t)
	}
}

func TestWatchCommand(t *testing.T) {
	insideCLI(t)
	step{args: "sandbox files mkdir mine /tmp/w", stdout: []string{""}}.run(t)
	for _, form := range []string{"table", "json"} {
		ctx, cancel := context.WithCancel(t.Context())
		out := newWatched()
		done := make(chan int)
		go func() {
			done <- run(ctx, []string{"sandbox", "files", "watch", "mine", "/tmp/w", "-o", form}, nil, out, io.Discard)
		}()
		out.until(t, "ready")
		step{args: "sandbox files put mine - /tmp/w/" + form, stdin: "x", stdout: []string{form}}.run(t)
		out.until(t, "/tmp/w/"+form)
		cancel()
		if code := <-done; code != 0 {
			t.Errorf("exit code %d", code)
		}
	}
}

func TestPortCommand(t *testing.T) {
	insideCLI(t)
	for _, s := range []step{
		{args: "sandbox port mine 8000", stdout: []string{os.Getenv("BERM_URL") + "/p/"}},
		{args: "sandbox port mine 8000 --ttl 10m -o json", stdout: []string{`"expires_at"`}},
		{args: "sandbox port mine 8000 --ttl 1000h", code: 1, stderr: []string{"seven days"}},
		{args: "sandbox port nosuch 8000", code: 1, stderr: []string{"nosuch"}},
	} {
		s.run(t)
	}
}

// A server that is started by the command, and ends with it.
func TestForwardPort(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.URL.Path)
	}))
	defer server.Close()
	t.Setenv("BERM_URL", server.URL)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stdout, printed := io.Pipe()
	done := make(chan int)
	go func() {
		done <- run(ctx, []string{"sandbox", "port", "mine", "8000", "--listen", "localhost:0"}, nil, printed, io.Discard)
	}()
	var address string
	if _, err := fmt.Fscanln(stdout, &address); err != nil {
		t.Fatal(err)
	}
	resp := check.Value(http.Get(address + "hello"))(t)
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || string(body) != "/api/v1/sandboxes/mine/ports/8000/hello" {
		t.Errorf("%s: %q, %v", address, body, err)
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestPortUsage(t *testing.T) {
	for _, s := range []step{
		{args: "sandbox port mine 0", code: 2, stderr: []string{"from 1 to 65535"}},
		{args: "sandbox port mine http", code: 2, stderr: []string{"from 1 to 65535"}},
		{args: "sandbox port mine 80 --listen 0.0.0.0:0", code: 2, stderr: []string{"want a loopback address"}},
		{args: "sandbox port mine 80 --listen example.org:80", code: 2, stderr: []string{"want a loopback address"}},
	} {
		s.run(t)
	}
}
