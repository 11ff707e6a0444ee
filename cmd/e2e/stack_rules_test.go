package e2e

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// stackDir has the stacks' files.
const stackDir = "../../compose"

// loadStack reads the stack of some files as Compose v2 does.
func loadStack(t *testing.T, dir string, environ []string, files ...string) *types.Project {
	t.Helper()
	for i, name := range files {
		files[i] = filepath.Join(dir, name)
	}
	opts, err := cli.NewProjectOptions(files, cli.WithName("test"), cli.WithWorkingDirectory(dir), cli.WithEnv(environ), cli.WithEnvFiles(), cli.WithDotEnv)
	must(t, err)
	return check.Value(opts.LoadProject(t.Context()))(t)
}

// flaws are what is against the rules that every service keeps.
func flaws(s types.ServiceConfig) (found []string) {
	unless := func(ok bool, flaw string) {
		if !ok {
			found = append(found, flaw)
		}
	}
	_, tag, tagged := strings.Cut(s.Image, ":")
	unless(tagged && tag != "latest", "has no version in its image "+s.Image)
	unless(s.MemLimit > 0 && s.CPUS > 0 && s.PidsLimit > 0, "has no limits of memory, CPU and processes")
	unless(s.HealthCheck != nil && len(s.HealthCheck.Test) > 1 && s.HealthCheck.Timeout != nil, "has no health check")
	unless(s.Restart == "unless-stopped", "isn't started again")
	for _, port := range s.Ports {
		unless(port.HostIP == "127.0.0.1", "publishes a port to others than this host")
	}
	for _, v := range s.Volumes {
		socket := v.Type == types.VolumeTypeBind && strings.HasSuffix(v.Source, ".sock")
		unless(!socket || s.Name == "berm", "has an engine's socket")
	}
	if s.Name == "engine" { // Docker in Docker has to be privileged
		unless(len(s.Ports) == 0, "is an engine with a port")
		return found
	}
	unless(!s.Privileged, "is privileged")
	unless(s.ReadOnly, "can write to its root file system")
	unless(s.Name != "berm" || len(s.Tmpfs) > 0, "has nowhere to put a backup that is checked")
	unless(slices.Equal(s.CapDrop, []string{"ALL"}), "doesn't drop all capabilities")
	unless(slices.Contains(s.SecurityOpt, "no-new-privileges:true"), "may gain privileges")
	unless(s.Name == "berm" || s.Pid == "" && len(s.CapAdd) == 0 && s.NetworkMode == "", "has more than it needs")
	return found
}

// The rules themselves, so that a slip in them doesn't pass for clean files.
func TestStackFlaws(t *testing.T) {
	t.Parallel()
	good := func() types.ServiceConfig { return loadStack(t, stackDir, nil, "agent-app.yaml").Services["app"] }
	if found := flaws(good()); len(found) > 0 {
		t.Fatalf("%v", found)
	}
	for name, spoil := range map[string]func(*types.ServiceConfig){
		"no tag":     func(s *types.ServiceConfig) { s.Image = "busybox" },
		"latest":     func(s *types.ServiceConfig) { s.Image = "busybox:latest" },
		"no memory":  func(s *types.ServiceConfig) { s.MemLimit = 0 },
		"no health":  func(s *types.ServiceConfig) { s.HealthCheck = nil },
		"no restart": func(s *types.ServiceConfig) { s.Restart = "" },
		"open port":  func(s *types.ServiceConfig) { s.Ports = []types.ServicePortConfig{{Target: 1}} },
		"socket": func(s *types.ServiceConfig) {
			s.Volumes = append(s.Volumes, types.ServiceVolumeConfig{Type: "bind", Source: "/x/docker.sock"})
		},
		"privileged":   func(s *types.ServiceConfig) { s.Privileged = true },
		"writable":     func(s *types.ServiceConfig) { s.ReadOnly = false },
		"capabilities": func(s *types.ServiceConfig) { s.CapDrop = nil },
		"capability":   func(s *types.ServiceConfig) { s.CapAdd = []string{"SYS_ADMIN"} },
		"privileges":   func(s *types.ServiceConfig) { s.SecurityOpt = nil },
		"host's pids":  func(s *types.ServiceConfig) { s.Pid = "host" },
		"no /tmp":      func(s *types.ServiceConfig) { s.Name, s.Tmpfs = "berm", nil },
	} {
		s := good()
		spoil(&s)
		if found := flaws(s); len(found) != 1 {
			t.Errorf("%s: %v", name, found)
		}
	}
}
