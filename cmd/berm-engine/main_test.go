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

// program is this program without an engine in its environment, but for addresses.
func program(addresses []string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "BERM_ENGINE_TEST_MAIN=yes", "DOCKER_HOST=", "CONTAINERD_ADDRESS=", "CONTAINERD_NAMESPACE=", "BERM_ENGINE_NAMESPACE=")
	cmd.Env = append(cmd.Env, addresses...)
	return cmd
}

// eachKind runs a test for each kind of engine.
func eachKind(t *testing.T, test func(t *testing.T, k kind)) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			engine.Require(t, k.name)
			test(t, k)
		})
	}
}

func TestExistingEngine(t *testing.T) {
	eachKind(t, func(t *testing.T, k kind) {
		p, err := k.start(t.Context(), t.Output())
		if err != nil {
			engine.Lacking(t, k.name, err)
		}
		defer func() {
			if err := p.close(); err != nil {
				t.Error(err)
			}
		}()
		for _, there := range []bool{false, true} {
			if there {
				if err := p.ImportBusybox(t.Context(), image); err != nil {
					t.Fatal(err)
				}
			}
			cmd := program([]string{k.addressVar + "=" + p.address, "BERM_ENGINE_NETNS=/theirs"},
				"--engine", k.name, "--", "sh", "-c", "echo $"+k.addressVar+" $BERM_DEMO_IMAGE $CONTAINERD_NAMESPACE $BERM_ENGINE_NETNS; exit 7")
			out, _ := cmd.Output()
			want := p.address + " " + image + " /theirs\n"
			if k.name == "containerd" {
				want = p.address + " " + image + " berm /theirs\n"
			}
			if string(out) != want || cmd.ProcessState.ExitCode() != 7 {
				t.Errorf("printed %q, want %q, and ended with %d", out, want, cmd.ProcessState.ExitCode())
			}
			if found, err := p.HasImage(t.Context(), image); err != nil || found != there {
				t.Errorf("the image was there before: %t, afterwards: %t, %v", there, found, err)
			}
			if n, ok := p.store.(namespaced); ok {
				if found, err := n.HasNamespace(t.Context()); err != nil || found != there {
					t.Errorf("the namespace was there before: %t, afterwards: %t, %v", there, found, err)
				}
			}
		}
	})
}

func TestPrivateEngine(t *testing.T) {
	eachKind(t, func(t *testing.T, k kind) {
		cmd := program([]string{"BERM_ENGINE_NETNS=/theirs", "BERM_ENGINE_ADDRESS=/theirs"}, "--engine", k.name, "--private", "--", "sh", "-c",
			`trap 'echo passed on; kill $!; exit 9' TERM; sleep 1000 >/dev/null 2>&1 & echo $`+k.addressVar+` "$BERM_ENGINE_ADDRESS$BERM_ENGINE_NETNS $BERM_ENGINE_CGROUP_PARENT"; wait`)
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
		address, rest, _ := strings.Cut(lines.Text(), " ")
		if err := k.at(address).Ping(context.Background()); err != nil {
			t.Errorf("the private engine doesn't answer: %v", err)
		}
		dir := filepath.Dir(strings.TrimPrefix(address, "unix://"))
		want := " "
		if k.name == "containerd" {
			want = dir + "/netns /" + filepath.Base(dir)
		}
		if rest != want {
			t.Errorf("of the engine the command is told %q, want %q", rest, want)
		}
		if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		lines.Scan()
		if err := cmd.Wait(); lines.Text() != "passed on" || cmd.ProcessState.ExitCode() != 9 {
			t.Errorf("after SIGTERM: printed %q, %v\n%s", lines.Text(), err, &stderr)
		}
		if exists(dir) {
			t.Errorf("%s was left", dir)
		}
	})
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
		cmd := program(nil, tt.args...)
		out, _ := cmd.CombinedOutput()
		if got := cmd.ProcessState.ExitCode(); got != tt.want || !strings.Contains(string(out), "usage:") {
			t.Errorf("%s: exit code %d, want %d\n%s", name, got, tt.want, out)
		}
	}
}
