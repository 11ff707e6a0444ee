package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
)

const (
	// markerEnv is set for each command, with a value of its own, and inherited by
	// its descendants: it is how they are told from other processes.
	markerEnv = "BERM_EXEC_ID"

	exitSIGKILL = 128 + int(unix.SIGKILL)
)

// errNoDir says that a command's working directory has to be made first.
var errNoDir = errors.New("the working directory isn't there")

// Exec runs a command in a running container, to its end.
//
// OOMKilled means that the command ended with code 137 and that the kernel killed
// some process in the container for want of memory while it ran.
//
// Two things hold it up that it can't help: a Stdout or Stderr that blocks, and, in
// a goroutine that outlives the call, a Stdin whose Read does.
func (r *Runtime) Exec(ctx context.Context, id string, e runtime.Exec) (runtime.ExecResult, error) {
	op := "run command in container " + id
	if err := validateExec(e); err != nil {
		return runtime.ExecResult{}, fmt.Errorf("%s: %w", op, err)
	}
	x, err := r.run(ctx, id, command{Exec: e})
	if errors.Is(err, errNoDir) {
		if err = r.makeDir(ctx, id, e); err == nil {
			x, err = r.run(ctx, id, command{Exec: e, dirMade: true})
		}
	}
	if err != nil {
		return runtime.ExecResult{}, fmt.Errorf("%s: %w", op, err)
	}
	return x.result, nil
}

func validateExec(e runtime.Exec) error {
	if err := runtime.CheckExec(e); err != nil {
		return err
	}
	for _, s := range slices.Concat(e.Command, []string{e.WorkingDir}) {
		if strings.ContainsRune(s, 0) {
			return runtime.Invalid("the command or its directory has a zero byte")
		}
	}
	return checkEnv(e.Env)
}

// makeDir makes a command's working directory, as the command's user.
func (r *Runtime) makeDir(ctx context.Context, id string, e runtime.Exec) error {
	x, err := r.run(ctx, id, command{Exec: runtime.Exec{Command: []string{e.WorkingDir}, User: e.User}, mode: "mkdir"})
	switch {
	case err != nil:
		return err
	case x.result.ExitCode != 0:
		return runtime.Invalid("the working directory %q can't be made", e.WorkingDir)
	}
	return nil
}

// command is what to run. All goes through the agent in the container, which tells
// a program that isn't there from one that fails in the same words whatever the
// engine's OCI runtime is, and changes the directory from inside: a runtime that does
// that on the way in can be led out of the container by a path below /proc.
type command struct {
	runtime.Exec
	mode    string // of the agent; empty is "exec"
	dirMade bool   // so there is no need to look for the directory
	ask     bool   // the engine for the container, whatever is remembered of it
}

// process is the command for the engine; base is the container's own process.
func (c command) process(base *specs.Process, marker string) *specs.Process {
	out := *base
	out.Terminal, out.ConsoleSize = false, nil
	out.Cwd = "/"
	out.Env = mergeEnv(base.Env, append(slices.Clone(c.Env), markerEnv+"="+marker))
	switch {
	case c.mode != "":
		out.Args = append([]string{runtime.AgentProgram, c.mode, "--"}, c.Command...)
	default:
		dir := c.WorkingDir
		if dir == "" {
			dir = ownWorkingDir(base)
		}
		out.Args = append([]string{runtime.AgentProgram, "exec", dir, "--"}, c.Command...)
	}
	return &out
}

// container is one that runs, as a command finds it.
type container struct {
	*habitat               // nil when its processes can't be seen from here
	process  specs.Process // its own
	pid      uint32        // of its first process, as the engine tells it
	known    bool          // all this is remembered: the engine wasn't asked
}

func (c *container) close() {
	if c.habitat != nil {
		c.habitat.close()
	}
}

// gone tells whether it is known to have ended.
func (c *container) gone() bool { return c.habitat != nil && c.dead() }

// running finds a container to run something in. Unless it has to, the engine is asked for
// its first process only when that isn't known, or has ended.
func (r *Runtime) running(ctx context.Context, id string, ask bool) (*container, error) {
	m, err := r.mainOf(ctx, id)
	if err != nil {
		return nil, err
	}
	out := &container{process: *m.spec}
	if !ask {
		out.habitat = m.find(id)
	}
	if out.habitat != nil {
		out.pid, out.known = uint32(out.init.pid), true //nolint:gosec // the kernel's own limit is 22 bits
		return out, nil
	}
	if out.pid, err = r.runningPid(ctx, id); err != nil {
		return nil, err
	}
	out.habitat, err = openHabitat(id, int(out.pid))
	switch {
	case errors.Is(err, errUnseen):
		out.habitat, err = nil, nil
	case err != nil: // it may have ended this moment
		if _, again := r.runningPid(ctx, id); again != nil {
			err = again
		} else if errors.Is(err, fs.ErrNotExist) {
			err = runtime.Precondition("the container isn't running")
		}
	}
	if err != nil {
		return nil, err
	}
	if out.habitat != nil {
		// The engine says that it runs: a Berm that was killed meanwhile has frozen it.
		if frozen, err := out.freezer.asked(); err == nil && frozen {
			_ = out.freezer.set(false)
		}
	}
	if out.habitat != nil && m.shimRefuses {
		first := out.init
		m.first.Store(&first)
	}
	return out, nil
}

// runningPid is FailedPrecondition for a container that can run nothing now.
func (r *Runtime) runningPid(ctx context.Context, id string) (uint32, error) {
	p, err := r.taskProcess(ctx, id)
	if err != nil {
		return 0, err
	}
	switch state(p.Status) {
	case runtime.StateRunning:
		return p.Pid, nil
	case runtime.StatePaused:
		return 0, runtime.Precondition("the container is paused")
	}
	return 0, runtime.Precondition("the container isn't running")
}

// taskProcess is what the engine tells of a container's first process. NotFound when
// there is no such container, FailedPrecondition when it has no processes.
func (r *Runtime) taskProcess(ctx context.Context, id string) (*tasktypes.Process, error) {
	if !idPattern.MatchString(id) {
		return nil, noContainer(id)
	}
	res, err := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); err == nil {
		return res.Process, nil
	}
	if errdefs.IsNotFound(err) {
		if _, err := r.record(ctx, id); err != nil {
			return nil, err
		}
		err = runtime.Precondition("the container isn't running")
	}
	return nil, err
}

// maxMains bounds how many containers' main processes are remembered.
const maxMains = 1024

// mainProcess is what is remembered of a container's main process.
type mainProcess struct {
	spec        *specs.Process          // as Create has described it; it never changes, and is only read
	shimRefuses bool                    // commands while the container is paused, by itself
	first       atomic.Pointer[process] // as the host sees it; nil while it isn't known
}

// find looks for the first process that is known. Nil when there is none, or it has ended.
func (m *mainProcess) find(container string) *habitat {
	first := m.first.Load()
	if first == nil {
		return nil
	}
	h, err := openHabitat(container, first.pid)
	if err != nil {
		return nil
	}
	if !h.init.same(*first) || h.init.over() {
		h.close()
		return nil
	}
	return h
}

// mainOf is what is known of a container's main process.
func (r *Runtime) mainOf(ctx context.Context, id string) (*mainProcess, error) {
	r.commands.mu.Lock()
	m := r.commands.mains[id]
	r.commands.mu.Unlock()
	if m != nil {
		return m, nil
	}
	rec, err := r.record(ctx, id)
	if err != nil {
		return nil, err
	}
	spec, err := decodeSpec(rec)
	if err != nil {
		return nil, err
	}
	m = &mainProcess{spec: spec.Process, shimRefuses: rec.Runtime.Name == runcShim}
	r.commands.mu.Lock()
	defer r.commands.mu.Unlock()
	if r.commands.mains == nil || len(r.commands.mains) >= maxMains {
		r.commands.mains = map[string]*mainProcess{}
	}
	r.commands.mains[id] = m
	return m, nil
}

// become makes a process one of the given user's; empty leaves it as it is.
func become(p *specs.Process, pid uint32, user string) error {
	if user == "" {
		return nil
	}
	a, err := image.ProcessAccount(pid, user)
	if err == nil && !samePath(fmt.Sprintf("/proc/%d/ns/user", pid), "/proc/self/ns/user") {
		err = inRange(a)
	}
	if err != nil {
		return err
	}
	p.User = specs.User{UID: a.UID, GID: a.GID, AdditionalGids: a.Groups}
	// The bounding set is what the container may have; the kernel leaves nothing of
	// the others to a user that isn't root.
	if p.Capabilities != nil {
		caps := *p.Capabilities
		caps.Permitted, caps.Effective, caps.Inheritable, caps.Ambient = caps.Bounding, caps.Bounding, nil, nil
		p.Capabilities = &caps
	}
	return nil
}

// hasDir tells whether a directory is there, in the eyes of the container's root. An
// odd answer is that it is: the agent has the last word.
func (c *container) hasDir(dir string) bool {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", c.pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true
	}
	defer func() { _ = unix.Close(root) }()
	fd, err := image.OpenIn(root, dir, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_MAGICLINKS)
	if err == nil {
		_ = unix.Close(fd)
	}
	return !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR)
}
