package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// BuildBerm builds berm as a release has it, its agent in it whether that was built
// before or not, and answers its path below dir. It needs what BuildAgent needs.
func BuildBerm(ctx context.Context, dir string) (string, error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	agent, err := PutAgent(ctx, dir)
	if err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(root, "cmd/berm/serve/agent/berm-agent"): agent}})
	if err != nil {
		return "", err
	}
	file, out := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "berm")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return "", err
	}
	_, err = output(ctx, root, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-overlay", file, "-o", out, "./cmd/berm")
	return out, err
}

// BuildBermImage builds the image of a built berm, as `make image` does, on the Docker
// Engine at a host. It needs the docker command, too.
func BuildBermImage(ctx context.Context, host, ref, berm string) (err error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "berm-image-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	layout := exec.CommandContext(ctx, "make", "--no-print-directory", "image-layout", "BERM="+berm, "LAYOUT="+dir)
	layout.Dir = root
	build := exec.CommandContext(ctx, "docker", "build", "--quiet", "--tag", ref, "--file", filepath.Join(root, "compose/Dockerfile"), "--target", "local", dir)
	build.Env = append(os.Environ(), "DOCKER_HOST="+host, "DOCKER_CONTEXT=", "DOCKER_BUILDKIT=0")
	for _, cmd := range []*exec.Cmd{layout, build} {
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args[:2], " "), errors.Join(ctx.Err(), err), bytes.TrimSpace(out))
		}
	}
	return nil
}
