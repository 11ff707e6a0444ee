package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/go-cni"
	"github.com/docker/docker/api/types/container"
	docker "github.com/docker/docker/client"
	"github.com/docker/docker/pkg/stdcopy"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// dockerContender is Docker's own client. Its containers are just like Berm's.
type dockerContender struct {
	*docker.Client
	models map[bool]container.InspectResponse // by whether there is a network
}

func (c *dockerContender) String() string { return "docker" }

func newDockerContender(b *testing.B, e *testEngine, berm *bermContender) *dockerContender {
	b.Helper()
	c := &dockerContender{Client: dockerClient(b, docker.WithHost(e.config.Address)), models: map[bool]container.InspectResponse{}}
	for _, network := range []bool{false, true} {
		model := check.Value(c.ContainerInspect(b.Context(), berm.model(b, network)))(b)
		// A stranger's: the server is not to take it for its own.
		for name := range model.Config.Labels {
			model.Config.Labels[name+".copy"] = model.Config.Labels[name]
			delete(model.Config.Labels, name)
		}
		c.models[network] = model
	}
	return c
}

func (c *dockerContender) create(ctx context.Context, key string, network bool) error {
	like := c.models[network]
	made, err := c.ContainerCreate(ctx, like.Config, like.HostConfig, nil, nil, key)
	if err != nil {
		return err
	}
	return c.ContainerStart(ctx, made.ID, container.StartOptions{})
}

func (c *dockerContender) exec(ctx context.Context, key string) error { return execEcho(ctx, c, key) }

// run does what an exec takes of anybody, to get the output and the exit code.
func (c *dockerContender) run(ctx context.Context, key string, command []string, stdout io.Writer) error {
	made, err := c.ContainerExecCreate(ctx, key, container.ExecOptions{Cmd: command, AttachStdout: true, AttachStderr: true})
	if err != nil {
		return err
	}
	conn, err := c.ContainerExecAttach(ctx, made.ID, container.ExecAttachOptions{})
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := stdcopy.StdCopy(stdout, io.Discard, conn.Reader); err != nil {
		return err
	}
	state, err := c.ContainerExecInspect(ctx, made.ID)
	if err == nil && state.ExitCode != 0 {
		err = fmt.Errorf("%+v", state)
	}
	return err
}

func (c *dockerContender) remove(ctx context.Context, key string) error {
	return c.ContainerRemove(ctx, key, container.RemoveOptions{Force: true})
}

// containerdContender is containerd's own client, and CNI's. Its containers have the
// specs of Berm's, but no writer of their own for what they print.
type containerdContender struct {
	*containerd.Client
	name   string
	engine *testEngine
	dir    string
	image  containerd.Image
	models map[bool]containers.Container // by whether there is a network
	specs  map[bool]*oci.Spec
	cni    cni.CNI
	execs  atomic.Int64
}

func (c *containerdContender) String() string { return c.name }

// benchNetwork is set up as Berm sets its own up: what would masquerade is a rule of
// the whole network, not of a container.
const benchNetwork = `{
  "cniVersion": "0.4.0", "name": "bench",
  "plugins": [
    {"type": "bridge", "bridge": "bench0", "isGateway": true, "ipMasq": false,
     "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.212.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}`

func newContainerdContender(b *testing.B, e *testEngine, berm *bermContender) *containerdContender {
	b.Helper()
	raw := check.Value(containerd.New(e.containerd.Address()))(b)
	b.Cleanup(func() { _ = raw.Close() })
	name := strings.TrimPrefix(berm.String(), "berm over ")
	c := &containerdContender{Client: raw, name: name, engine: e, dir: e.dir(b), models: map[bool]containers.Container{}, specs: map[bool]*oci.Spec{}}
	ctx := c.namespaced(b.Context())
	c.image = check.Value(raw.GetImage(ctx, testImage))(b)
	for _, network := range []bool{false, true} {
		model := check.Value(raw.LoadContainer(ctx, berm.model(b, network)))(b)
		c.models[network] = check.Value(model.Info(ctx))(b)
		c.specs[network] = check.Value(model.Spec(ctx))(b)
	}
	c.cni = check.Value(cni.New(cni.WithPluginDir([]string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}), cni.WithMinNetworkCount(2)))(b)
	must(b, c.cni.Load(cni.WithLoNetwork, cni.WithConfListBytes(fmt.Appendf(nil, benchNetwork, filepath.Join(c.dir, "ipam")))))
	return c
}

func (c *containerdContender) namespaced(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, c.engine.config.Namespace)
}

func (c *containerdContender) netns(key string) string { return filepath.Join(c.dir, "netns-"+key) }

func (c *containerdContender) create(ctx context.Context, key string, network bool) error {
	ctx = c.namespaced(ctx)
	spec := *c.specs[network]
	linux := *spec.Linux
	linux.CgroupsPath = filepath.Join(c.engine.config.CgroupParent, key)
	linux.Namespaces = slices.Clone(linux.Namespaces)
	if network {
		if err := makeBenchNetns(c.netns(key)); err != nil {
			return err
		}
		if err := c.inEngineNetns(func() error {
			_, err := c.cni.SetupSerially(ctx, key, c.netns(key))
			return err
		}); err != nil {
			return err
		}
		for i, ns := range linux.Namespaces {
			if ns.Type == specs.NetworkNamespace {
				linux.Namespaces[i].Path = c.netns(key)
			}
		}
	}
	spec.Linux = &linux
	runtime := c.models[network].Runtime
	made, err := c.NewContainer(ctx, key, containerd.WithSnapshotter("overlayfs"), containerd.WithNewSnapshot(key, c.image),
		containerd.WithSpec(&spec), func(_ context.Context, _ *containerd.Client, made *containers.Container) error {
			made.Runtime = runtime
			return nil
		})
	if err != nil {
		return err
	}
	task, err := made.NewTask(ctx, cio.LogFile(filepath.Join(c.dir, key+".log")))
	if err != nil {
		return err
	}
	return task.Start(ctx)
}

func (c *containerdContender) exec(ctx context.Context, key string) error {
	return execEcho(ctx, c, key)
}

func (c *containerdContender) run(ctx context.Context, key string, command []string, stdout io.Writer) error {
	ctx = c.namespaced(ctx)
	made, err := c.LoadContainer(ctx, key)
	if err != nil {
		return err
	}
	task, err := made.Task(ctx, nil)
	if err != nil {
		return err
	}
	process := *c.specs[false].Process
	process.Args = command
	p, err := task.Exec(ctx, fmt.Sprintf("exec-%d", c.execs.Add(1)), &process,
		cio.NewCreator(cio.WithStreams(nil, stdout, io.Discard), cio.WithFIFODir(filepath.Join(c.dir, "fifo"))))
	if err != nil {
		return err
	}
	exited, err := p.Wait(ctx)
	if err != nil {
		return err
	}
	if err := p.Start(ctx); err != nil {
		return err
	}
	status := <-exited
	p.IO().Wait()
	_, err = p.Delete(ctx)
	if code := status.ExitCode(); err == nil && code != 0 {
		err = fmt.Errorf("exit code %d, %w", code, status.Error())
	}
	return err
}

func (c *containerdContender) remove(ctx context.Context, key string) error {
	ctx = c.namespaced(ctx)
	made, err := c.LoadContainer(ctx, key)
	if err != nil {
		return err
	}
	task, err := made.Task(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := task.Delete(ctx, containerd.WithProcessKill); err != nil {
		return err
	}
	if err := made.Delete(ctx, containerd.WithSnapshotCleanup); err != nil {
		return err
	}
	if _, err := os.Lstat(c.netns(key)); err == nil {
		if err := c.inEngineNetns(func() error { return c.cni.Remove(ctx, key, c.netns(key)) }); err != nil {
			return err
		}
		if err := errors.Join(unix.Unmount(c.netns(key), unix.MNT_DETACH), os.Remove(c.netns(key))); err != nil {
			return err
		}
	}
	return os.Remove(filepath.Join(c.dir, key+".log"))
}

// inEngineNetns runs a function where the engine's bridges are.
func (c *containerdContender) inEngineNetns(f func() error) error {
	return onOwnThread(func() error {
		ns, err := os.Open(c.engine.config.Netns)
		if err == nil {
			err = errors.Join(unix.Setns(int(ns.Fd()), syscall.CLONE_NEWNET), ns.Close())
		}
		if err == nil {
			err = f()
		}
		return err
	})
}

// makeBenchNetns makes a network namespace that stays at a path.
func makeBenchNetns(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	return onOwnThread(func() error {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
		}
		return err
	})
}

// onOwnThread runs a function on a thread that ends with it.
func onOwnThread(f func() error) error {
	done := make(chan error)
	go func() {
		goruntime.LockOSThread()
		done <- f()
	}()
	return <-done
}
