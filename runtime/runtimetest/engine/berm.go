package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Berm is the path of the program berm: BERM_BIN, or else what make build has built.
func Berm() (string, error) {
	path := os.Getenv("BERM_BIN")
	if path == "" {
		root, err := moduleRoot(context.Background())
		if err != nil {
			return "", err
		}
		path = filepath.Join(root, "bin", "berm")
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("the tests run berm, which make build builds: %w", err)
	}
	return filepath.Abs(path)
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
