package e2e

import (
	"os"
	"os/exec"
	"testing"
)

// TestDemo runs the demonstration, which checks its own steps and leaves nothing.
func TestDemo(t *testing.T) {
	t.Parallel()
	e := commonEngine(t, "docker")
	dir := e.dir(t)
	cmd := exec.CommandContext(t.Context(), bin, "demo", "--engine", "docker")
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+e.config.Address, "BERM_DEMO_IMAGE="+testImage, "TMPDIR="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	wantEmptyDir(t, dir)
}
