// Package serve is the server. It checks the configuration, the engine and the host, and wires
// and runs the server's parts. It also backs up and restores the server's store.
package serve

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent"
	"github.com/bermhq/berm/runtime/containerd"
	"github.com/bermhq/berm/runtime/docker"
)

// Engine is the client of an engine.
type Engine interface {
	agent.Engine
	io.Closer
	Survey(ctx context.Context) (runtime.Survey, error)
}

// OpenRuntime returns a client of an engine, which needn't be up yet. The client's own files lie
// below stateDir. The client doesn't use the agent, so any number may be open beside a server. A
// nil logger discards.
func OpenRuntime(cfg config.Engine, stateDir string, log *slog.Logger) (Engine, error) {
	if cfg.Kind == "docker" {
		return newDocker(cfg, log)
	}
	opts, err := containerdOptions(cfg, stateDir)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("engine.kind: containerd needs a berm that runs as root, with CAP_SYS_ADMIN and CAP_NET_ADMIN, on the engine's host")
	}
	opts.Logger = log
	return containerd.New(opts)
}

// WithAgent returns a runtime that works in sandboxes through the agent. If the engine can't see
// this host's files, WithAgent logs the reason, and the engine gets a copy of the program.
func WithAgent(engine agent.Engine, cfg config.Engine, stateDir string, v View, log *slog.Logger) (*agent.Runtime, error) {
	root := agentRoot(stateDir)
	opts := agent.Options{Engine: engine, Root: root, Logger: log}
	program, err := CheckAgent(cfg, stateDir, v)
	switch {
	case cfg.AgentDir == config.AgentNone:
		log.Info("agent_off", "error", err.Error())
	case err != nil:
		log.Warn("agent_off", "error", err.Error())
	default:
		path, err := runtime.PutProgram(filepath.Join(root, "bin"), program)
		if err != nil {
			return nil, err
		}
		if path, err = filepath.Rel(root, path); err != nil {
			return nil, err
		}
		opts.HostRoot, opts.Program = cfg.AgentDir, filepath.Join(cmp.Or(cfg.AgentDir, root), path)
	}
	return agent.New(opts)
}

func agentRoot(stateDir string) string { return filepath.Join(stateDir, "agents") }

// CheckAgent returns the agent's program, or why the engine can't give it to sandboxes from
// the state directory.
func CheckAgent(cfg config.Engine, stateDir string, v View) ([]byte, error) {
	root := agentRoot(stateDir)
	switch {
	case cfg.AgentDir == config.AgentNone:
		return nil, errors.New("engine.agent_dir is none")
	case cfg.AgentDir != "":
	case EngineSocket(cfg) == "":
		return nil, errors.New("the engine may be on another machine; if it is on this one, engine.agent_dir says where it sees " + root)
	case !v.Root:
		return nil, errors.New("the engine doesn't share Berm's file system; engine.agent_dir says where it sees " + root)
	}
	var fs unix.Statfs_t
	dir := Existing(root)
	if err := unix.Statfs(dir, &fs); err != nil {
		return nil, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	if fs.Flags&unix.ST_NOEXEC != 0 {
		return nil, errors.New("state_dir is on a file system that is mounted noexec")
	}
	return builtinAgent()
}

// Existing returns path, or the nearest directory above it that exists.
func Existing(path string) string {
	for ; path != "/" && path != "."; path = filepath.Dir(path) {
		if _, err := os.Stat(path); err == nil {
			break
		}
	}
	return path
}

// CheckEngine validates an engine's settings. It neither asks the engine nor makes anything.
func CheckEngine(cfg config.Engine, stateDir string) error {
	if cfg.Kind != "docker" {
		_, err := containerdOptions(cfg, stateDir)
		return err
	}
	_, err := newDocker(cfg, nil)
	return err
}

func newDocker(cfg config.Engine, log *slog.Logger) (*docker.Runtime, error) {
	auth, err := openRegistryAuth(cfg.RegistryAuthFile)
	if err != nil {
		return nil, err
	}
	return docker.New(docker.Options{Host: cfg.Address, CallTimeout: cfg.CallTimeout, RegistryAuth: auth, Program: builtinAgent, Logger: log})
}

func containerdOptions(cfg config.Engine, stateDir string) (containerd.Options, error) {
	opts := containerd.Options{
		Address: cfg.Address, Namespace: cfg.Namespace, Root: filepath.Join(stateDir, "containerd"),
		Snapshotter: cfg.Snapshotter, CgroupParent: cfg.CgroupParent, Netns: cfg.Netns, CallTimeout: cfg.CallTimeout, Subnets: cfg.Pool(),
	}
	if len(cfg.CNIPluginDirs) > 0 {
		opts.PluginDirs = cfg.CNIPluginDirs
	}
	var err error
	if opts.Agent, err = builtinAgent(); err != nil {
		return opts, err
	}
	opts.RegistryAuth, err = openRegistryAuth(cfg.RegistryAuthFile)
	return opts, err
}

// EngineSocket returns the path of the engine's unix socket, or "" if the address is another.
func EngineSocket(cfg config.Engine) string {
	address := EngineAddress(cfg)
	if cfg.Kind == "containerd" {
		return strings.TrimPrefix(address, "unix://")
	}
	if u, err := url.Parse(address); err == nil && u.Scheme == "unix" {
		return u.Path
	}
	return ""
}

// EngineAddress returns the engine's address: the configured one, that of the environment, or the
// default.
func EngineAddress(cfg config.Engine) string {
	if cfg.Kind == "containerd" {
		return cmp.Or(cfg.Address, os.Getenv("CONTAINERD_ADDRESS"), "/run/containerd/containerd.sock")
	}
	return cmp.Or(cfg.Address, os.Getenv("DOCKER_HOST"), "unix:///var/run/docker.sock")
}

// EngineName returns the engine's name for error messages, without credentials.
func EngineName(cfg config.Engine) string {
	address, _, _ := strings.Cut(runtime.WithoutUser(EngineAddress(cfg)), "?")
	if cfg.Kind == "containerd" {
		return "containerd at " + address
	}
	return "the Docker Engine at " + address
}

// View says what the engine shares with this process.
type View struct {
	Root   bool // the root file system: a path means the same to both
	Mounts bool // the mount namespace: both see the same mounts
	pids   bool // the PID namespace: a process has the same number for both
	Asked  bool // false: the engine was away, and the other fields are assumptions
}

// Suits refuses containerd if this process is known not to share its root file system and mount
// namespace.
func (v View) Suits(kind string) error {
	if kind == "containerd" && v.Asked && (!v.Root || !v.Mounts) {
		return errors.New("engine.kind: containerd needs a berm that shares the engine's root file system and mount namespace, and this one doesn't; " +
			"run it on the engine's host, or in a container with the host's processes (pid: host) and --enter-engine")
	}
	return nil
}

// EngineView asks the kernel for the process behind the engine's socket, and compares its
// namespaces. If there is no process, or the engine has no unix socket, EngineView assumes that
// the engine shares nothing with a process in a container.
func EngineView(ctx context.Context, cfg config.Engine) View {
	socket := EngineSocket(cfg)
	if socket == "" {
		return View{Root: !InContainer(), Asked: true}
	}
	pid, err := Peer(ctx, socket)
	if err != nil {
		outside := !InContainer()
		return View{Root: outside, Mounts: outside, pids: outside}
	}
	proc := filepath.Join("/proc", strconv.Itoa(pid)) // a process that we can't see is 0, and /proc/0 doesn't exist
	return View{
		Root: sameFile("/", proc+"/root"), Mounts: sameFile("/proc/self/ns/mnt", proc+"/ns/mnt"), pids: sameFile("/proc/self/ns/pid", proc+"/ns/pid"), Asked: true,
	}
}

// Peer returns the ID of the process that listens on a unix socket. It is 0 for a process in a PID
// namespace that this one can't see.
func Peer(ctx context.Context, socket string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	cred, ok := proxy.PeerOf(conn)
	if !ok {
		return 0, errors.New("the kernel doesn't tell whose socket it is")
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

// InContainer reports whether this process runs in a container of Docker, Podman or Kubernetes.
func InContainer() bool {
	for _, mark := range []string{"/.dockerenv", "/run/.containerenv"} {
		if _, err := os.Stat(mark); err == nil {
			return true
		}
	}
	return os.Getenv("KUBERNETES_SERVICE_HOST") != ""
}

// Errors of View.Holds.
var (
	ErrOtherMounts = errors.New("the engine doesn't share Berm's mount namespace, or Berm can't see the engine's process")
	ErrOtherPIDs   = errors.New("the engine doesn't share Berm's PID namespace")
)

// Holds returns why mounts can't be held with this view, or nil.
func (v View) Holds() error {
	switch {
	case !v.Mounts:
		return ErrOtherMounts
	case !v.pids: // a container's mounts can't be verified
		return ErrOtherPIDs
	}
	return nil
}

// NewHolder returns a holder that pins mounts. If that isn't possible, it returns unheld and the
// reason.
func NewHolder(stateDir string, v View, unheld *mountpin.Trusted) (h lifecycle.Holder, why error) {
	if why = v.Holds(); why == nil {
		var pinner *mountpin.Pinner
		if pinner, why = mountpin.NewPinner(filepath.Join(stateDir, "hold")); why == nil {
			pinner.Mark = unheld.Mark // a later server may have to judge held directories without holding them
			return pinner, nil
		}
	}
	return unheld, why
}

// NewTrusted returns a holder that allows what the policy trusts. InUse returns the mounts
// of all containers.
func NewTrusted(stateDir string, pol func() *policy.Policy, inUse func(context.Context) ([]policy.Mount, error)) *mountpin.Trusted {
	judge := func(m policy.Mount, others []policy.Mount) error { return pol().Unheld(m, others) }
	return mountpin.NewTrusted(filepath.Join(stateDir, "trusted"), judge, inUse)
}

// HoldRemedy tells the operator how to make holding possible.
const HoldRemedy = "give berm CAP_SYS_ADMIN and the engine's mount and PID namespaces, or list directories where nothing sandboxed writes in mounts.trusted_roots"
