package engine

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestDenyServices(t *testing.T) {
	const theirs = "#!/bin/sh\nexit 0\n"
	for _, tt := range []struct {
		name, before, saved, after string
	}{
		{"none", "", "", ""},
		{"theirs", theirs, "", theirs},
		{"left over", denyAll, "", ""},
		{"left over, theirs saved", denyAll, theirs, theirs},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "policy-rc.d")
			for path, text := range map[string]string{file: tt.before, file + ".before-berm-engine": tt.saved} {
				if text == "" {
					continue
				}
				must(t, os.WriteFile(path, []byte(text), 0o755))
			}
			allow, err := denyServices(file)
			must(t, err)
			cmd := exec.Command(file)
			if _ = cmd.Run(); cmd.ProcessState.ExitCode() != 101 {
				t.Errorf("while denied: exit code %d", cmd.ProcessState.ExitCode())
			}
			must(t, allow())
			after, err := os.ReadFile(file)
			if string(after) != tt.after || tt.after == "" && !os.IsNotExist(err) {
				t.Errorf("afterwards %q, %v; want %q", after, err, tt.after)
			}
			if left, _ := filepath.Glob(file + ".*"); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}
