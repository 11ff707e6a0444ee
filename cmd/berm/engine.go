package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hold"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/docker"
)

// openRuntime makes the client of an engine, which needn't be up yet. A nil logger
// discards.
func openRuntime(cfg config.Engine, log *slog.Logger) (runtime.Runtime, error) {
	if cfg.Kind != "docker" {
		return nil, fmt.Errorf("engine.kind: %s is not in this build yet; use docker", cfg.Kind)
	}
	return docker.New(docker.Options{Host: cfg.Address, CallTimeout: cfg.CallTimeout, Logger: log})
}

// engineSocket is the path of the engine's unix socket, empty if it has none.
func engineSocket(cfg config.Engine) string {
	address := cfg.Address
	if address == "" {
		address = os.Getenv("DOCKER_HOST")
	}
	if address == "" {
		address = "unix:///var/run/docker.sock"
	}
	if u, err := url.Parse(address); err == nil && u.Scheme == "unix" {
		return u.Path
	}
	return ""
}

// view is what the engine shares with this process.
type view struct {
	root   bool // the root file system: a path means the same to both
	mounts bool // the mount namespace: what is mounted here is mounted there
}

// engineView finds out by asking the kernel who is behind the engine's socket. While
// nobody is, or when it leads to another machine, it goes by whether this process
// runs in a container: most likely without its engine.
func engineView(ctx context.Context, cfg config.Engine) view {
	socket := engineSocket(cfg)
	if socket == "" {
		return view{root: !inContainer()}
	}
	pid, err := peer(ctx, socket)
	if err != nil {
		outside := !inContainer()
		return view{root: outside, mounts: outside}
	}
	proc := filepath.Join("/proc", strconv.Itoa(pid)) // 0 is a process that we can't see, and has none
	return view{root: sameFile("/", proc+"/root"), mounts: sameFile("/proc/self/ns/mnt", proc+"/ns/mnt")}
}

// peer is the process that listens on a unix socket.
func peer(ctx context.Context, socket string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, errors.New("not a unix socket")
	}
	raw, err := unix.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return int(cred.Pid), nil
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// inContainer goes by the marks that Docker, Podman and Kubernetes leave.
func inContainer() bool {
	for _, mark := range []string{"/.dockerenv", "/run/.containerenv"} {
		if _, err := os.Stat(mark); err == nil {
			return true
		}
	}
	return os.Getenv("KUBERNETES_SERVICE_HOST") != ""
}

// newHolder pins mounts where that can be done, and compares them where it can't;
// then the error says why, and nothing has failed. Others is hold.NewVerifier's.
func newHolder(dir string, v view, others func(sessionID string) []policy.Mount) (lifecycle.Holder, error) {
	if !v.mounts {
		return hold.NewVerifier(others), errors.New("the engine doesn't share Berm's mount namespace")
	}
	pinner, err := hold.NewPinner(dir)
	if err != nil {
		return hold.NewVerifier(others), err
	}
	return pinner, nil
}

// holdable refuses a policy that demands what the holder can't do.
func holdable(h lifecycle.Holder, why error) func(*policy.Policy) error {
	return func(p *policy.Policy) error {
		if p.HoldRequired() && h.Mode() != hold.ModeHeld {
			return fmt.Errorf("policy: mounts.hold is required, as it is by default, but mounts can't be held here: %w; "+
				"give berm CAP_SYS_ADMIN and the engine's mount namespace, or accept with mounts.hold: auto that they are compared instead", why)
		}
		return nil
	}
}
