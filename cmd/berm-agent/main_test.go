package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// agent is the program, as a release has it.
var agent string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "berm-agent-test-")
	if err == nil {
		agent = filepath.Join(dir, "berm-agent")
		err = build()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // they wait for most of their time
		panic(err)
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func build() error {
	program, err := engine.BuildAgent(context.Background())
	if err != nil {
		return err
	}
	// Others may read and run it, as in a container.
	if err := os.Chmod(filepath.Dir(agent), 0o755); err != nil {
		return err
	}
	return os.WriteFile(agent, program, 0o755)
}

// await polls until a condition holds.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// start starts a command that ends with the test at the latest.
func startCmd(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
}

func exitOf(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	t.Fatal(err)
	return 0
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{
		{}, {"unknown"}, {"init"}, {"init", "/", "true"}, {"init", "--", "true"}, {"init", "/", "--"}, {"log"}, {"log", "/tmp"},
		{"log", "/tmp", "max"}, {"log", "/tmp", "max", "none"}, {"max", "10"}, {"serve", "x"},
	} {
		out, err := exec.Command(agent, args...).CombinedOutput()
		if code := exitOf(t, err); code != exitUsage || len(out) == 0 {
			t.Errorf("%q: exit code %d, %q", args, code, out)
		}
	}
}

var must = check.Must // ends a test if a step of its own fails
