package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestFilesCommands(t *testing.T) {
	insideCLI(t)
	dir := t.TempDir()
	t.Chdir(dir)
	write(t, filepath.Join(dir, "local.txt"), "one\ntwo\nthree\n")
	must(t, os.Chmod(filepath.Join(dir, "local.txt"), 0o640))
	for _, s := range []check.Step{
		{Args: "sandbox files mkdir mine -p /tmp/d/e", Stdout: []string{""}},
		{Args: "sandbox files put mine local.txt /tmp/d/", Stdout: []string{"/tmp/d/local.txt", "0640", "14"}},
		{Args: "sandbox files put mine - /tmp/d/e/in.go -o json --mode 0600", Stdin: "package x\n", Stdout: []string{`"path": "/tmp/d/e/in.go"`, `"mode": "0600"`}},
		{Args: "sandbox files put mine - /tmp/d/e/in.go -n", Stdin: "x", Code: 1, Stderr: []string{"berm: "}},
		{Args: "sandbox files put mine - /tmp/d/e/in.go --append", Stdin: "// more\n", Stdout: []string{"in.go"}},
		{Args: "sandbox files put mine - /tmp/d/", Code: 2, Stderr: []string{"no name of its own"}},
		{Args: "sandbox files put mine - /tmp/f --mode 9", Code: 2, Stderr: []string{"octal permissions"}},
		{Args: "sandbox files put mine nosuch /tmp/d/", Code: 1, Stderr: []string{"no such file"}},
		{Args: "sandbox files put mine - /tmp/x/y/z -p", Stdin: "deep", Stdout: []string{"/tmp/x/y/z"}},
		{Args: "sandbox files cat mine /tmp/d/local.txt /tmp/d/e/in.go", Stdout: []string{"one\ntwo\nthree\npackage x\n// more\n"}},
		{Args: "sandbox files ls mine /tmp/d", Stdout: []string{"directory", "/tmp/d/e\n", "file", "/tmp/d/local.txt\n"}},
		{Args: "sandbox files ls mine /tmp/d --depth 2 -o json", Stdout: []string{`"path": "/tmp/d/e/in.go"`, `"truncated": false`}},
		{Args: "sandbox files ls mine /tmp/d --limit 1", Stdout: []string{"/tmp/d/e"}, Stderr: []string{"may be more"}},
		{Args: "sandbox files ls mine /tmp/nosuch", Code: 1, Stderr: []string{"file_not_found"}},
		{Args: "sandbox files stat mine /tmp/d", Stdout: []string{"directory", "/tmp/d"}},
		{Args: "sandbox files get mine /tmp/d/local.txt", Stdout: []string{""}},
		{Args: "sandbox files get mine /tmp/d/e/in.go there.go", Stdout: []string{""}},
		{Args: "sandbox files get mine /tmp/d/e/in.go -", Stdout: []string{"package x\n"}},
		{Args: "sandbox files get mine /tmp/nosuch gone", Code: 1, Stderr: []string{"/tmp/nosuch"}},
		{Args: "sandbox files get mine /", Code: 2, Stderr: []string{"say where to"}},
		{Args: "sandbox files get mine /tmp/d/local.txt .", Code: 1, Stderr: []string{"is a directory"}},
		{Args: "sandbox files cp mine /tmp/d/local.txt /tmp/d/copy.txt", Stdout: []string{""}},
		{Args: "sandbox files mv mine /tmp/d/copy.txt /tmp/d/local.txt --replace", Stdout: []string{""}},
		{Args: "sandbox files find mine /tmp/d **/*.go", Stdout: []string{"/tmp/d/e/in.go\n"}},
		{Args: "sandbox files find mine /tmp/d **/*.go -o json", Stdout: []string{`"path": "/tmp/d/e/in.go"`}},
		{Args: "sandbox files grep mine ^t /tmp/d --include *.txt", Stdout: []string{"/tmp/d/local.txt:2:two\n", "/tmp/d/local.txt:3:three\n"}},
		{Args: "sandbox files grep mine -F -i PACKAGE /tmp/d -o json", Stdout: []string{`"line": 1`}},
		{Args: "sandbox files grep mine nosuchtext /tmp/d", Code: 1},
	} {
		s.Run(t, berm)
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
	for _, s := range []check.Step{
		{Args: "sandbox files rm mine -r /tmp/d", Stdout: []string{""}},
		{Args: "sandbox files tar mine -x /tmp", Stdin: archive, Stdout: []string{""}},
		{Args: "sandbox files cat mine /tmp/d/e/in.go", Stdout: []string{"package x\n"}},
	} {
		s.Run(t, berm)
	}
}

func TestWatchCommand(t *testing.T) {
	insideCLI(t)
	check.Step{Args: "sandbox files mkdir mine /tmp/w", Stdout: []string{""}}.Run(t, berm)
	for _, form := range []string{"table", "json"} {
		ctx, cancel := context.WithCancel(t.Context())
		stdout, printed := io.Pipe()
		lines := bufio.NewScanner(stdout)
		until := func(text string) {
			t.Helper()
			for lines.Scan() {
				if strings.Contains(lines.Text(), text) {
					return
				}
			}
			t.Fatalf("it ended without %q", text)
		}
		done := make(chan int, 1)
		go func() {
			done <- run(ctx, []string{"sandbox", "files", "watch", "mine", "/tmp/w", "-o", form}, nil, printed, io.Discard)
			_ = printed.Close()
		}()
		until("ready")
		check.Step{Args: "sandbox files put mine - /tmp/w/" + form, Stdin: "x", Stdout: []string{form}}.Run(t, berm)
		until("/tmp/w/" + form)
		cancel()
		_ = stdout.Close()
		if code := <-done; code != 0 {
			t.Errorf("exit code %d", code)
		}
	}
}

func TestPortCommand(t *testing.T) {
	insideCLI(t)
	for _, s := range []check.Step{
		{Args: "sandbox port mine 8000", Stdout: []string{os.Getenv("BERM_URL") + "/p/"}},
		{Args: "sandbox port mine 8000 --ttl 10m -o json", Stdout: []string{`"expires_at"`}},
		{Args: "sandbox port mine 8000 --ttl 1000h", Code: 1, Stderr: []string{"seven days"}},
		{Args: "sandbox port nosuch 8000", Code: 1, Stderr: []string{"nosuch"}},
		{Args: "sandbox port mine 0", Code: 2, Stderr: []string{"from 1 to 65535"}},
		{Args: "sandbox port mine http", Code: 2, Stderr: []string{"from 1 to 65535"}},
		{Args: "sandbox port mine 80 --listen 0.0.0.0:0", Code: 2, Stderr: []string{"want a loopback address"}},
		{Args: "sandbox port mine 80 --listen example.org:80", Code: 2, Stderr: []string{"want a loopback address"}},
	} {
		s.Run(t, berm)
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
