package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// Install installs the distribution's packages for whatever a private engine of a kind
// lacks on this machine; if it lacks nothing, it does nothing. No daemon is started by the
// packages. It needs root and apt; FailedPrecondition says which of them is missing,
// and which packages are wanted. Log gets what apt says.
func Install(ctx context.Context, kind string, log io.Writer) error {
	missing := missingPackages(kind)
	if len(missing) == 0 {
		return nil
	}
	list := strings.Join(missing, " ")
	apt, err := exec.LookPath("apt-get")
	if err != nil {
		return fmt.Errorf("a private engine needs %s, and there is no apt-get to install them: %w", list, errdefs.ErrFailedPrecondition)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("a private engine needs %s, and only root can install them: %w", list, errdefs.ErrFailedPrecondition)
	}
	allow, err := denyServices(policyFile)
	if err != nil {
		return fmt.Errorf("keep packages from starting daemons: %w", err)
	}
	_, _ = fmt.Fprintf(log, "installing %s\n", list)
	err = runApt(ctx, log, apt, "update", "-q")
	if err == nil {
		err = runApt(ctx, log, apt, append([]string{"install", "-q", "-y", "--no-install-recommends"}, missing...)...)
	}
	if err := errors.Join(err, allow()); err != nil {
		return fmt.Errorf("install %s: %w", list, err)
	}
	if left := missingPackages(kind); len(left) > 0 {
		return fmt.Errorf("after the installation there is still no %s: %w", strings.Join(left, " "), errdefs.ErrFailedPrecondition)
	}
	return nil
}

// packages are Debian's, by the programs that private engines need.
var packages = map[string]string{
	"dockerd": "docker.io", "containerd": "containerd", "ctr": "containerd", "runc": "runc",
	"iptables": "iptables", "ip": "iproute2",
}

func missingPackages(kind string) []string {
	var missing []string
	for _, program := range programs[kind] {
		if _, err := find(program); err != nil && !slices.Contains(missing, packages[program]) {
			missing = append(missing, packages[program])
		}
	}
	if _, err := findBusybox(); err != nil {
		missing = append(missing, "busybox-static")
	}
	if kind == "containerd" && findPlugins() != nil {
		missing = append(missing, "containernetworking-plugins")
	}
	return missing
}

func runApt(ctx context.Context, log io.Writer, apt string, args ...string) error {
	cmd := exec.CommandContext(ctx, apt, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
	cmd.Stdout, cmd.Stderr = log, log
	// Let it end in order when ctx does, and leave no half-done package.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("apt-get %s: %w", args[0], errors.Join(ctx.Err(), err))
	}
	return nil
}

// policyFile is asked by Debian's maintainer scripts before they start a service.
const policyFile = "/usr/sbin/policy-rc.d"

// denyAll is recognised by its second line when its writer was killed.
const denyAll = "#!/bin/sh\n# berm-engine: no service starts while it installs packages\nexit 101\n"

// denyServices keeps packages from starting services until allow is called, which
// puts back the file that was there.
func denyServices(file string) (allow func() error, err error) {
	saved := file + ".before-berm-engine"
	current, err := os.ReadFile(file)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, err
	case string(current) != denyAll: // else it was left over
		if err := os.Rename(file, saved); err != nil {
			return nil, err
		}
	}
	allow = func() error {
		if err := os.Rename(saved, file); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return os.Remove(file)
	}
	if err := os.WriteFile(file, []byte(denyAll), 0o755); err != nil {
		return nil, errors.Join(err, allow())
	}
	return allow, nil
}
