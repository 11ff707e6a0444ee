// Package engine starts private container engines for tests and demonstrations:
// daemons of their own in a network namespace of their own, which leave nothing
// behind. It needs Linux and root.
package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Docker is a private Docker Engine: a containerd, a dockerd, and what they keep.
// Its methods may be called from many goroutines at once.
//
// When the process dies without Close, the daemons die with it, and a watchdog removes
// the rest. If that dies, too, the next StartDocker does.
type Docker struct {
	*ground
	mu      sync.Mutex // guards the daemons
	dockerd *daemon    // nil while it is killed
}

// StartDocker starts a private engine and waits until it answers, which takes about
// a second. The caller closes it. FailedPrecondition says that this machine or this
// user can't have one.
func StartDocker(ctx context.Context, opts Options) (*Docker, error) {
	g, err := newGround("docker", opts)
	if err != nil {
		return nil, fmt.Errorf("start a private engine: %w", err)
	}
	d := &Docker{ground: g}
	if err = g.prepare(ctx); err == nil {
		err = d.startDockerd(ctx)
	}
	if err == nil && opts.Image != "" {
		err = d.ImportBusybox(ctx, opts.Image)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a private engine: %w", err), d.Close())
	}
	return d, nil
}

// Host is the engine's address, as in DOCKER_HOST.
func (d *Docker) Host() string { return "unix://" + d.place.path("docker.sock") }

// Containerd is the address of the containerd below, a socket's path.
func (d *Docker) Containerd() string { return d.socket() }

// Pid is the process id of dockerd; 0 while it is killed. Stopping it with SIGSTOP
// makes an engine that hangs.
func (d *Docker) Pid() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dockerd == nil {
		return 0
	}
	return d.dockerd.cmd.Process.Pid
}

// Kill ends dockerd with SIGKILL and waits for its end. Containers live on until
// Start, which ends them, as dockerd does without live restore.
func (d *Docker) Kill() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dockerd != nil {
		d.dockerd.kill()
		d.dockerd = nil
	}
}

// Start starts dockerd again after Kill, and waits until it answers.
func (d *Docker) Start(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dockerd != nil {
		return nil
	}
	if d.containerd == nil {
		return fmt.Errorf("the engine is closed: %w", errdefs.ErrFailedPrecondition)
	}
	return d.startDockerd(ctx)
}

// Close kills the engine and its containers and removes all that they left. It may
// be called more than once.
func (d *Docker) Close() error {
	d.Kill()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.close()
}

func (d *Docker) startDockerd(ctx context.Context) error {
	begun := time.Now()
	config := make(map[string]any)
	maps.Copy(config, d.opts.Config)
	if major, err := dockerdMajor(ctx); err != nil {
		return err
	} else if major < 24 {
		config["deprecated-key-path"] = d.place.path("key.json") // else in /etc/docker
	}
	runtimes := make(map[string]any)
	for name, program := range d.opts.Runtimes {
		runtimes[name] = map[string]string{"path": program}
	}
	config["runtimes"] = runtimes
	b, err := json.Marshal(config)
	if err != nil {
		return err
	}
	if err := os.WriteFile(d.place.path("daemon.json"), b, 0o600); err != nil {
		return err
	}
	args := []string{
		"--config-file", d.place.path("daemon.json"), "--containerd", d.socket(),
		"--data-root", d.place.path("data"), "--exec-root", d.place.path("exec"),
		"--pidfile", d.place.path("docker.pid"), "--host", d.Host(),
		"--cgroup-parent", "/" + d.place.name, "--exec-opt", "native.cgroupdriver=cgroupfs",
		"--userland-proxy=false",
	}
	if d.opts.NoNetns {
		args = append(args, "--bridge=none", "--iptables=false", "--ip-masq=false", "--ip-forward=false")
	}
	// A pid file that was left names a process that is gone, or by now another one.
	if err := os.Remove(d.place.path("docker.pid")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	d.dockerd, err = startDaemon(d.place.path("dockerd.log"), d.Netns(), "dockerd", args...)
	if err != nil {
		return err
	}
	if err := d.dockerd.await(ctx, d.opts.StartTimeout, func(ctx context.Context) error { return Ping(ctx, d.Host()) }); err != nil {
		d.dockerd.kill()
		d.dockerd = nil
		return err
	}
	_, _ = fmt.Fprintf(d.opts.Log, "private Docker Engine at %s, up in %s\n", d.Host(), time.Since(begun).Round(time.Millisecond))
	return nil
}

var versionPattern = regexp.MustCompile(`version v?(\d+)\.`)

func dockerdMajor(ctx context.Context) (int, error) {
	path, err := find("dockerd")
	if err != nil {
		return 0, err
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return 0, fmt.Errorf("%s --version: %w", path, err)
	}
	m := versionPattern.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("%s --version says %q", path, out)
	}
	return strconv.Atoi(string(m[1]))
}

// find looks a program up in PATH and where the distributions keep daemons.
func find(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range systemDirs {
		path := filepath.Join(dir, name)
		if unix.Access(path, unix.X_OK) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s isn't installed: %w", name, errdefs.ErrFailedPrecondition)
}
