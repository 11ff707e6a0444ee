// Package containerd runs sandboxes on containerd 1.6 or newer, without Docker. The
// engine need not be up when the Runtime is made, and may be restarted at any time.
//
// Berm must run on the engine's host, with the host's root file system, mount namespace and
// process namespace. It needs CAP_SYS_ADMIN and CAP_NET_ADMIN to make the containers' network
// namespaces and files.
package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
	"github.com/bermhq/berm/runtime/containerd/network"
	"github.com/bermhq/berm/runtime/keylock"
)

// cleanupTimeout bounds the removal of what a failed call made.
const cleanupTimeout = 10 * time.Second

var (
	_ runtime.Runtime = (*Runtime)(nil)
	_ runtime.Starter = (*Runtime)(nil)
)

// Options of New.
type Options struct {
	// Address is the engine's socket, a path or "unix:///path". Empty is the
	// environment's CONTAINERD_ADDRESS, or else /run/containerd/containerd.sock.
	Address string
	// Namespace is containerd's namespace for all containers and images. Empty is "berm".
	Namespace string
	// Root is a directory of the engine's host for the files of containers and networks.
	// The engine and this process must see it at the same path. It is made if missing.
	// Processes that share a namespace need different roots. Mandatory; at most 90
	// characters.
	Root string
	// Agent is the berm-agent program. It is the init process of containers, and writes
	// their logs. Mandatory.
	Agent []byte
	// Snapshotter of containerd that makes root file systems. Empty is "overlayfs".
	Snapshotter string
	// CgroupParent is the parent of the containers' cgroups. Empty is "/berm".
	CgroupParent string
	// Netns is the path of the network namespace where bridges are made. Empty is
	// this process's own.
	Netns string
	// PluginDirs are searched for CNI plug-ins. Nil is /opt/cni/bin, /usr/lib/cni and
	// /usr/libexec/cni.
	PluginDirs []string
	// Subnets is the pool of which each network gets a /24. The zero value is
	// 10.213.0.0/16.
	Subnets netip.Prefix
	// CallTimeout is how long the engine may take to answer one call. 0 is 30 seconds.
	CallTimeout time.Duration
	// RegistryAuth returns the credentials for a registry by its host name and port;
	// an empty user with a secret is an identity token. Nil, and empty strings, send none.
	RegistryAuth func(ctx context.Context, host string) (user, secret string, err error)
	// Logger logs failures that no error reports. Nil discards.
	Logger *slog.Logger
}

// Runtime is a runtime.Runtime on containerd. It may be used by many goroutines at once.
type Runtime struct {
	opts     Options
	root     root
	client   *client.Client
	host     runtime.Info // fields that don't depend on the engine
	log      *slog.Logger
	agent    agentFile
	images   *image.Store
	chores   chores
	starts   keylock.Map[string] // of programs, and pauses, by the container's id
	networks *network.Manager
	remains  remains
	userNS   atomic.Bool   // containers can have user namespaces of their own
	patience time.Duration // endPatience; shorter in tests
}

// New makes a Runtime. It doesn't talk to the engine; it fails when an option is
// unusable, or the root can't be made.
func New(opts Options) (*Runtime, error) {
	opts.Address = strings.TrimPrefix(cmp.Or(opts.Address, os.Getenv("CONTAINERD_ADDRESS"), "/run/containerd/containerd.sock"), "unix://")
	opts.Namespace = cmp.Or(opts.Namespace, "berm")
	opts.Snapshotter = cmp.Or(opts.Snapshotter, "overlayfs")
	opts.CgroupParent = cmp.Or(opts.CgroupParent, "/berm")
	opts.CallTimeout = cmp.Or(opts.CallTimeout, 30*time.Second)
	if opts.PluginDirs == nil {
		opts.PluginDirs = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}
	}
	if !opts.Subnets.IsValid() {
		opts.Subnets = netip.MustParsePrefix("10.213.0.0/16")
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case !filepath.IsAbs(opts.Address):
		return nil, fmt.Errorf("engine address %q: only the path of a unix socket can be used", opts.Address)
	case !filepath.IsAbs(opts.Root) || len(opts.Root) > maxRoot:
		return nil, fmt.Errorf("root directory %q: an absolute path of at most %d characters is needed", opts.Root, maxRoot)
	case len(opts.Agent) == 0:
		return nil, errors.New("there is no berm-agent, which containers need as their init process")
	case !opts.Subnets.Addr().Is4() || opts.Subnets.Bits() > 24:
		return nil, fmt.Errorf("subnets %s: an IPv4 prefix of at most 24 bits is needed", opts.Subnets)
	case opts.CallTimeout < 0:
		return nil, errors.New("the call timeout is negative")
	}
	r := &Runtime{opts: opts, root: root(opts.Root), patience: endPatience, remains: remains{opts.Namespace, opts.Address, opts.CgroupParent, opts.Logger}, log: opts.Logger, networks: network.New(network.Options{
		Root: opts.Root, Namespace: opts.Namespace, Netns: opts.Netns, PluginDirs: opts.PluginDirs,
		Subnets: opts.Subnets, CallTimeout: opts.CallTimeout, Logger: opts.Logger,
	})}
	var err error
	if r.host, err = hostInfo(); err != nil {
		return nil, err
	}
	// The client dials when it is used, and again whenever the connection is lost.
	if r.client, err = client.New(opts.Address, client.WithDefaultNamespace(opts.Namespace), client.WithTimeout(time.Second),
		client.WithExtraDialOpts([]grpc.DialOption{grpc.WithChainUnaryInterceptor(tracedCall), grpc.WithChainStreamInterceptor(tracedStream)})); err != nil {
		return nil, fmt.Errorf("engine address %q: %w", opts.Address, err)
	}
	r.images = image.New(image.Options{
		Client: r.client, Snapshotter: opts.Snapshotter, Root: opts.Root, Lease: r.withLease, RegistryAuth: opts.RegistryAuth, Logger: opts.Logger,
	})
	return r, nil
}

// Close closes the connection. It waits up to a few seconds for the background work of calls.
// Calls that are under way fail.
func (r *Runtime) Close() error {
	r.chores.wait()
	return r.client.Close()
}

// Info asks the engine for its version. The other fields describe this machine, where the
// engine runs, too.
func (r *Runtime) Info(ctx context.Context) (runtime.Info, error) {
	out := r.host
	err := r.call(ctx, "ask the engine who it is", func(ctx context.Context) error {
		v, err := r.client.Version(ctx)
		out.Version = v.Version
		return err
	})
	return out, err
}

func hostInfo() (runtime.Info, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return runtime.Info{}, fmt.Errorf("ask the kernel for its memory: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(cgroupRoot, &fs); err != nil {
		return runtime.Info{}, fmt.Errorf("find the cgroups: %w", err)
	}
	version := "1" // hybrid too: the controllers are version 1's
	if fs.Type == unix.CGROUP2_SUPER_MAGIC {
		version = "2"
	}
	return runtime.Info{
		Backend:       "containerd",
		OS:            goruntime.GOOS,
		Architecture:  goruntime.GOARCH,
		CPUs:          goruntime.NumCPU(),
		MemoryBytes:   int64(info.Totalram) * int64(info.Unit), //nolint:gosec // no machine has 8 EiB
		CgroupVersion: version,
	}, nil
}

const cgroupRoot = "/sys/fs/cgroup"

// Image looks an image up in the engine's own store.
func (r *Runtime) Image(ctx context.Context, ref string) (runtime.Image, error) {
	var out runtime.Image
	err := r.call(ctx, fmt.Sprintf("look up image %q", ref), func(ctx context.Context) (err error) {
		out, err = r.images.Find(ctx, ref)
		return err
	})
	return out, err
}

// Pull brings an image from its registry and unpacks it. It may take as long as ctx
// does. Registries on loopback may speak plain HTTP.
func (r *Runtime) Pull(ctx context.Context, ref string, progress func(runtime.PullProgress)) (runtime.Image, error) {
	if err := r.images.Pull(ctx, ref, progress); err != nil {
		return runtime.Image{}, fmt.Errorf("pull image %q: %w", ref, err)
	}
	return r.Image(ctx, ref)
}

// EnsureNetwork makes a network unless one of its name exists. It repairs an existing one if the host
// has lost parts of it, as after a reboot.
func (r *Runtime) EnsureNetwork(ctx context.Context, want runtime.Network) error {
	return r.networks.EnsureNetwork(ctx, want)
}

// Networks lists the networks that carry all the labels.
func (r *Runtime) Networks(ctx context.Context, labels map[string]string) ([]runtime.Network, error) {
	return r.networks.Networks(ctx, labels)
}

// RemoveNetwork removes a network that no container uses.
func (r *Runtime) RemoveNetwork(ctx context.Context, name string) error {
	return r.networks.RemoveNetwork(ctx, name)
}

// call runs f within the call timeout, in the engine's namespace, and classes its error.
func (r *Runtime) call(ctx context.Context, op string, f func(context.Context) error) error {
	callCtx, cancel := r.bounded(ctx)
	defer cancel()
	return failure(ctx, op, f(callCtx))
}

// bounded returns a context, in the engine's namespace, that ends with ctx or the call
// timeout. It hides ctx's deadline from the engine, which would answer with an error without
// a class just before the deadline.
func (r *Runtime) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	out, cancel := context.WithTimeout(context.WithoutCancel(r.namespaced(ctx)), r.opts.CallTimeout)
	if ctx.Err() != nil {
		cancel() // AfterFunc may take longer than a call does
	}
	stop := context.AfterFunc(ctx, cancel)
	return out, func() { stop(); cancel() }
}

func (r *Runtime) namespaced(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, r.opts.Namespace)
}

// linger is runtime.Linger with the call timeout.
func (r *Runtime) linger(ctx context.Context) (context.Context, context.CancelFunc) {
	return runtime.Linger(ctx, r.opts.CallTimeout)
}

// failure gives an error the class that runtime.Runtime promises. Ctx is the caller's own.
func failure(ctx context.Context, op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", op, classify(ctx, err))
}

// native gives an error that came over gRPC its class, as some methods of the client don't.
// It leaves other errors alone: errgrpc.ToNative would take away the class that they have.
func native(err error) error {
	if _, remote := status.FromError(err); !remote {
		return err
	}
	return errgrpc.ToNative(err)
}

func classify(ctx context.Context, err error) error { return runtime.Classify(ctx, native(err)) }
