package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// read is a file below a directory, with its mode.
func read(t *testing.T, path ...string) (string, fs.FileMode) {
	t.Helper()
	info := check.Value(os.Stat(filepath.Join(path...)))(t)
	data := check.Value(os.ReadFile(filepath.Join(path...)))(t)
	return string(data), info.Mode().Perm()
}

func TestInitCompose(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "stack")
	stdout, stderr, code := berm(t, "", "init", "compose", dir, "--image", "r.example/berm:1.2", "--with-docker-api")
	if code != 0 || !strings.Contains(stdout, "cd "+dir+"\n") || !strings.Contains(stdout, "docker compose up -d") {
		t.Fatalf("exit code %d: %s%s", code, stdout, stderr)
	}
	if env, _ := read(t, dir, ".env"); !strings.Contains(env, "BERM_IMAGE=r.example/berm:1.2\n") {
		t.Errorf(".env:\n%s", env)
	}
	token, mode := read(t, dir, "secrets/token")
	if info, err := os.Stat(filepath.Join(dir, "secrets")); mode != 0o600 || err != nil || info.Mode().Perm() != 0o700 || len(token) < 20 {
		t.Errorf("the token has %d characters and mode %s, its directory %s: %v", len(token), mode, info.Mode(), err)
	}
	if strings.Contains(stdout, strings.TrimSpace(token)) {
		t.Error("the output has the token")
	}
	for _, name := range []string{"compose.yaml", "compose.override.yaml", "policy/minimal.yaml"} {
		if content, mode := read(t, dir, name); content == "" || mode != 0o644 {
			t.Errorf("%s has %d bytes and mode %s", name, len(content), mode)
		}
	}

	write(t, filepath.Join(dir, "compose.yaml"), "mine")
	must(t, os.Remove(filepath.Join(dir, ".env")))
	_, stderr, code = berm(t, "", "init", "compose", dir)
	if code != config.ExitFailure || !strings.Contains(stderr, "compose.yaml is there already") || !strings.Contains(stderr, "--force") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	if content, _ := read(t, dir, "compose.yaml"); content != "mine" {
		t.Error("what was there was replaced")
	}
	if _, err := os.Stat(filepath.Join(dir, ".env")); err == nil {
		t.Error("something was written")
	}

	if _, stderr, code := berm(t, "", "init", "compose", dir, "--force"); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if content, _ := read(t, dir, "compose.yaml"); content == "mine" {
		t.Error("--force replaced nothing")
	}
	if again, mode := read(t, dir, "secrets/token"); again != token || mode != 0o600 {
		t.Errorf("--force exchanged the token, mode %s", mode)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 5 {
		t.Errorf("%v, %v", entries, err)
	}

	if err := os.Chmod(filepath.Join(dir, "secrets"), 0o755); err != nil { //nolint:gosec // that is what is refused
		t.Fatal(err)
	}
	if _, stderr, code := berm(t, "", "init", "compose", dir, "--force"); code != config.ExitFailure || !strings.Contains(stderr, "open to others") {
		t.Errorf("secrets for all: exit code %d: %s", code, stderr)
	}
}

func TestInitComposeRefusals(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args []string
		want string
	}{
		"stack":      {[]string{"--stack", "x"}, "want minimal, agent-app"},
		"docker api": {[]string{"--stack", "containerd", "--with-docker-api"}, "needs a Docker Engine"},
		"image":      {[]string{"--image", "Berm:x"}, "--image Berm:x"},
		"no version": {[]string{"--image", "berm"}, "name a version"},
		"latest":     {[]string{"--image", "berm:latest"}, "name a version"},
		"two lines":  {[]string{"--image", "berm:1\nX=1"}, "--image"},
		"arguments":  {[]string{"x"}, "accepts at most 1 arg"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			args := append([]string{"init", "compose", dir}, tt.args...)
			if _, stderr, code := berm(t, "", args...); code != config.ExitUsage || !strings.Contains(stderr, tt.want) {
				t.Errorf("exit code %d: %s", code, stderr)
			}
			wantEmptyDir(t, dir)
		})
	}
}

func TestInitHost(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"machine", "containerd"} {
		dir := filepath.Join(t.TempDir(), "etc")
		stdout, stderr, code := berm(t, "", "init", kind, dir)
		if code != 0 || !strings.Contains(stdout, "berm serve --config "+dir+"/berm.yaml") {
			t.Fatalf("%s: exit code %d: %s%s", kind, code, stdout, stderr)
		}
		token, mode := read(t, dir, "token")
		if mode != 0o600 || len(token) < 20 || strings.Contains(stdout, strings.TrimSpace(token)) {
			t.Errorf("%s: the token has %d characters and mode %s, or is told:\n%s", kind, len(token), mode, stdout)
		}
		if settings, mode := read(t, dir, "berm.yaml"); mode != 0o644 || strings.Contains(settings, "--config /etc/berm") {
			t.Errorf("%s: mode %s:\n%s", kind, mode, settings)
		}
		check.Step{Args: "config check --config " + dir + "/berm.yaml", Stdout: []string{"valid"}}.Run(t, berm)
		check.Step{Args: "config print --config " + dir + "/berm.yaml", Stdout: []string{"policy_file: " + dir + "/policy.yaml # file", "token_file: " + dir + "/token # file"}}.Run(t, berm)

		// What is commented out can be used, too.
		settings, _ := read(t, dir, "berm.yaml")
		write(t, filepath.Join(dir, "all.yaml"), regexp.MustCompile(`(?m)^( *)# ((?:- \{)?[a-z_]+: )`).ReplaceAllString(settings, "$1$2"))
		if all, _ := read(t, dir, "all.yaml"); strings.Count(all, "\n      # ")+strings.Count(all, "\n  # ") > 0 {
			t.Errorf("not all of it is tried:\n%s", all)
		}
		check.Step{Args: "config check --config " + dir + "/all.yaml", Stdout: []string{"valid"}}.Run(t, berm)

		write(t, filepath.Join(dir, "policy.yaml"), "version: 1\n")
		if _, stderr, code := berm(t, "", "init", kind, dir); code != config.ExitFailure || !strings.Contains(stderr, "policy.yaml is there already") {
			t.Errorf("%s again: exit code %d: %s", kind, code, stderr)
		}
		if _, stderr, code := berm(t, "", "init", kind, dir, "--force"); code != 0 {
			t.Errorf("%s by force: exit code %d: %s", kind, code, stderr)
		}
		if again, mode := read(t, dir, "token"); again != token || mode != 0o600 {
			t.Errorf("--force exchanged the token, mode %s", mode)
		}
		if policy, _ := read(t, dir, "policy.yaml"); policy == "version: 1\n" {
			t.Error("--force replaced nothing")
		}
	}
	for _, bad := range []string{"a\nb", "a$b", "a:b", "a#b"} {
		for _, kind := range []string{"machine", "compose", "containerd"} {
			if _, stderr, code := berm(t, "", "init", kind, filepath.Join(t.TempDir(), bad)); code != config.ExitUsage || !strings.Contains(stderr, "can't name") {
				t.Errorf("%s %q: exit code %d: %s", kind, bad, code, stderr)
			}
		}
	}
	check.Step{Args: "compose init", Code: config.ExitUsage, Stderr: []string{"unknown command", "init"}}.Run(t, berm)
}
