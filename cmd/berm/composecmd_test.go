package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
)

// read is a file below a directory, with its mode.
func read(t *testing.T, path ...string) (string, fs.FileMode) {
	t.Helper()
	info, err := os.Stat(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(data), info.Mode().Perm()
}

func TestComposeInit(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "stack")
	stdout, stderr, code := berm(t, "", "compose", "init", "--dir", dir, "--image", "r.example/berm:1.2", "--with-docker-api")
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
		t.Error("the token is told")
	}
	for _, name := range []string{"compose.yaml", "compose.override.yaml", "policy/minimal.yaml"} {
		if content, mode := read(t, dir, name); content == "" || mode != 0o644 {
			t.Errorf("%s has %d bytes and mode %s", name, len(content), mode)
		}
	}

	write(t, filepath.Join(dir, "compose.yaml"), "mine")
	if err := os.Remove(filepath.Join(dir, ".env")); err != nil {
		t.Fatal(err)
	}
	_, stderr, code = berm(t, "", "compose", "init", "--dir", dir)
	if code != config.ExitFailure || !strings.Contains(stderr, "compose.yaml is there already") || !strings.Contains(stderr, "--force") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	if content, _ := read(t, dir, "compose.yaml"); content != "mine" {
		t.Error("what was there was replaced")
	}
	if _, err := os.Stat(filepath.Join(dir, ".env")); err == nil {
		t.Error("something was written")
	}

	if _, stderr, code := berm(t, "", "compose", "init", "--dir", dir, "--force"); code != 0 {
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
	if _, stderr, code := berm(t, "", "compose", "init", "--dir", dir, "--force"); code != config.ExitFailure || !strings.Contains(stderr, "open to others") {
		t.Errorf("secrets for all: exit code %d: %s", code, stderr)
	}
}

func TestComposeInitRefusals(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args []string
		want string
	}{
		"stack":       {[]string{"--stack", "x"}, "want minimal, agent-app"},
		"engine":      {[]string{"--engine", "x"}, "want docker, dind or containerd"},
		"both":        {[]string{"--engine", "containerd", "--stack", "agent-app"}, "doesn't go with"},
		"docker api":  {[]string{"--engine", "containerd", "--with-docker-api"}, "needs a Docker Engine"},
		"image":       {[]string{"--image", "Berm:x"}, "--image Berm:x"},
		"no version":  {[]string{"--image", "berm"}, "name a version"},
		"latest":      {[]string{"--image", "berm:latest"}, "name a version"},
		"two lines":   {[]string{"--image", "berm:1\nX=1"}, "--image"},
		"directory":   {[]string{"--dir", "a\nb"}, "can't name"},
		"arguments":   {[]string{"x"}, "unknown command"},
		"interpolate": {[]string{"--dir", "a$b"}, "can't name"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			args := append([]string{"compose", "init", "--dir", dir}, tt.args...)
			if _, stderr, code := berm(t, "", args...); code != config.ExitUsage || !strings.Contains(stderr, tt.want) {
				t.Errorf("exit code %d: %s", code, stderr)
			}
			wantEmptyDir(t, dir)
		})
	}
}
