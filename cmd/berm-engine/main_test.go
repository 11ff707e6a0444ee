package main

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// TestMain lets the tests start this program: it is the test binary with a variable.
func TestMain(m *testing.M) {
	if os.Getenv("BERM_ENGINE_TEST_MAIN") != "" {
		main()
	}
	os.Exit(m.Run())
}

func program(dockerHost string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "BERM_ENGINE_TEST_MAIN=yes", "DOCKER_HOST="+dockerHost)
	return cmd
}

func TestExistingEngine(t *testing.T) {
	engine.Require(t, "docker")
	d, err := engine.StartDocker(t.Context(), engine.Options{})
	if err != nil {
		engine.Lacking(t, "docker", err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, there := range []bool{false, true} {
		if there {
			if err := d.ImportBusybox(t.Context(), image); err != nil {
				t.Fatal(err)
			}
		}
		cmd := program(d.Host(), "--", "sh", "-c", "echo $DOCKER_HOST $BERM_DEMO_IMAGE; exit 7")
		out, _ := cmd.Output()
		if want := d.Host() + " " + image + "\n"; string(out) != want || cmd.ProcessState.ExitCode() != 7 {
			t.Errorf("printed %q, want %q, and ended with %d", out, want, cmd.ProcessState.ExitCode())
		}
		if found, err := engine.HasImage(t.Context(), d.Host(), image); err != nil || found != there {
			t.Errorf("the image was there before: %t, afterwards: %t, %v", there, found, err)
		}
	}
}

func TestPrivateEngine(t *testing.T) {
	engine.Require(t, "docker")
	cmd := program("", "--private", "--", "sh", "-c", `trap 'echo passed on; kill $!; exit 9' TERM; sleep 1000 >/dev/null 2>&1 & echo $DOCKER_HOST; wait`)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	lines.Scan()
	host := lines.Text()
	if err := engine.Ping(context.Background(), host); err != nil {
		t.Errorf("the private engine doesn't answer: %v", err)
	}
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	lines.Scan()
	if err := cmd.Wait(); lines.Text() != "passed on" || cmd.ProcessState.ExitCode() != 9 {
		t.Errorf("after SIGTERM: printed %q, %v\n%s", lines.Text(), err, &stderr)
	}
	if dir := filepath.Dir(strings.TrimPrefix(host, "unix://")); exists(dir) {
		t.Errorf("%s was left", dir)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func TestExitCodes(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		want int
	}{
		"no command":     {nil, 2},
		"unknown flag":   {[]string{"--nothing", "--", "true"}, 2},
		"unknown engine": {[]string{"--engine", "nothing", "--", "true"}, 2},
		"help":           {[]string{"--help"}, 0},
	} {
		cmd := program("", tt.args...)
		out, _ := cmd.CombinedOutput()
		if got := cmd.ProcessState.ExitCode(); got != tt.want || !strings.Contains(string(out), "usage:") {
			t.Errorf("%s: exit code %d, want %d\n%s", name, got, tt.want, out)
		}
	}
}
