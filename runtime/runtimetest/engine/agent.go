package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

var builtAgent struct {
	mu      sync.Mutex
	program []byte
}

// BuildAgent builds the program berm-agent, as a release has it, once per process. It
// needs the go command, and to run inside this module.
func BuildAgent(ctx context.Context) ([]byte, error) {
	builtAgent.mu.Lock()
	defer builtAgent.mu.Unlock()
	if builtAgent.program == nil {
		program, err := buildAgent(ctx)
		if err != nil {
			return nil, fmt.Errorf("build berm-agent: %w", err)
		}
		builtAgent.program = program
	}
	return bytes.Clone(builtAgent.program), nil
}

// PutAgent puts the program into a directory, and answers its path.
func PutAgent(ctx context.Context, dir string) (string, error) {
	program, err := BuildAgent(ctx)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "berm-agent")
	return path, os.WriteFile(path, program, 0o755) //nolint:gosec // it is to be run
}

func buildAgent(ctx context.Context) (program []byte, err error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(root, "cmd", "berm-agent")); err != nil {
		return nil, fmt.Errorf("find its sources: %w", err)
	}
	dir, err := os.MkdirTemp("", "berm-agent-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	out := filepath.Join(dir, "berm-agent")
	if _, err := output(ctx, root, "./cmd/berm-agent/build.sh", out); err != nil {
		return nil, err
	}
	return os.ReadFile(out)
}

// moduleRoot is the directory of the product's sources, also for a module that uses them.
func moduleRoot(ctx context.Context) (string, error) {
	dir, err := output(ctx, "", "go", "list", "-m", "-f", "{{.Dir}}", "github.com/bermhq/berm")
	return string(bytes.TrimSpace(dir)), err
}

// output runs a program that builds without C, in a directory.
func output(ctx context.Context, dir, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	cmd.WaitDelay = time.Second // for what it has started
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", program, errors.Join(ctx.Err(), err), bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}
