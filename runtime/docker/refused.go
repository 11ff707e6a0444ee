package docker

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/bermhq/berm/runtime"
)

// exec runs a command. Its errors are classed.
//
// The working directory is changed inside the container: an OCI runtime that enters it on
// its way in can be led out by a link to one of its own descriptors below /proc
// (CVE-2024-21626). The agent's program does that, or else the container's own shell. Only
// a directory that nothing inside can exchange is left to the engine.
func (r *Runtime) exec(ctx context.Context, s *session, id string, e runtime.Exec) (runtime.ExecResult, error) {
	callCtx, cancel := context.WithTimeout(ctx, r.timeout)
	c, err := s.ContainerInspect(callCtx, id)
	cancel()
	if err != nil {
		return runtime.ExecResult{}, classify(ctx, err)
	}
	p := placeOf(c)
	dir := cmp.Or(e.WorkingDir, p.dir)
	e.WorkingDir = "/"
	program, making := e.Command[0], runtime.Exec{Command: []string{"/bin/sh", "-c", `mkdir -p -- "$0" && cd -- "$0"`, dir}, WorkingDir: "/", User: e.User}
	switch {
	case p.agent:
		e.Command = slices.Concat([]string{runtime.AgentProgram, "exec", dir, "--"}, e.Command)
		making.Command = []string{runtime.AgentProgram, "mkdir", "--", dir}
	case slices.Contains(p.fixed, dir):
		e.WorkingDir = dir
	default:
		e.Command = slices.Concat([]string{"/bin/sh", "-c", enterScript, dir}, e.Command)
	}
	begin := &beginning{w: e.Stderr}
	e.Stderr = begin
	x, err := r.started(ctx, s, id, e, begin)
	if err != nil || e.WorkingDir == dir {
		return x.result, err
	}
	if !p.agent && forkFailed(x.result.ExitCode, dir, string(begin.kept)) {
		return runtime.ExecResult{}, runtime.ErrNoRoom
	}
	if x.refusal != nil {
		if p.agent || program == "/bin/sh" {
			return x.result, nil
		}
		return runtime.ExecResult{}, runtime.Invalid("the working directory %q: the container has no /bin/sh to enter it by", dir)
	}
	// The directory can be why. It is there now, if it can be.
	if x.result.ExitCode == exitDirectory {
		begin := &beginning{}
		making.Stderr = begin
		made, err := r.started(ctx, s, id, making, begin)
		if err == nil && made.result.ExitCode != 0 {
			err = runtime.Invalid("the working directory %q can't be made", dir)
		}
		if err != nil {
			return runtime.ExecResult{}, err
		}
	}
	return x.result, nil
}

// enterScript enters its first argument, which it makes if it is missing, and runs the
// others there.
const enterScript = `cd -- "$0" 2>/dev/null || { mkdir -p -- "$0" && cd -- "$0"; } || exit 126; exec "$@"`

// forkFailed reports whether enterScript couldn't start mkdir, and so ran nothing. Shells
// begin what they say with $0, which is the directory.
func forkFailed(code int, dir, said string) bool {
	return code != 0 && strings.HasPrefix(said, dir+": ") && strings.Contains(said, "fork")
}

// exitDirectory is how the agent and enterScript end for want of the directory.
const exitDirectory = 126

// place is what a container offers to enter a directory by.
type place struct {
	agent bool     // its program is there
	dir   string   // the container's own working directory
	fixed []string // directories that nothing inside can exchange
}

// placeOf reads a place from what the engine tells of a container. What is mounted right
// below the root can't be renamed or replaced inside.
func placeOf(c container.InspectResponse) place {
	p := place{fixed: []string{"/"}}
	if cfg := c.Config; cfg != nil {
		p.dir = cfg.WorkingDir
		if len(cfg.Entrypoint) == 1 && cfg.Entrypoint[0] == runtime.AgentProgram && len(cfg.Cmd) > 1 && cfg.Cmd[1] != "." {
			p.dir = cfg.Cmd[1]
		}
	}
	p.dir = cmp.Or(p.dir, "/")
	for _, m := range c.Mounts {
		p.agent = p.agent || m.Type == mount.TypeBind && m.Destination == runtime.AgentProgram
		if path.Dir(m.Destination) == "/" {
			p.fixed = append(p.fixed, m.Destination)
		}
	}
	return p
}

// noRoom is the error of a process that can't be started, when the engine's words don't tell why.
func (x *execution) noRoom(ctx context.Context) error {
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	if lacksFirst(callCtx, x.s, x.container) {
		return runtime.Precondition("the container isn't running any more")
	}
	return runtime.ErrNoRoom
}

// started runs a command to its end. One that can't be started has no room, unless the
// engine's words are about its program: then they are its standard error. Begin is the
// command's standard error.
func (r *Runtime) started(ctx context.Context, s *session, id string, e runtime.Exec, begin *beginning) (*execution, error) {
	x, err := r.run(ctx, s, id, e)
	switch {
	case err != nil:
		return x, err
	case x.refusal != nil && errdefs.IsFailedPrecondition(x.alive(ctx)):
		return x, runtime.Precondition("the container isn't running")
	case x.refusal != nil && runtime.BlamesProgram(string(x.refusal), e.Command[0]):
		if _, err := begin.Write(x.refusal); err != nil {
			return x, fmt.Errorf("deliver output: %w", err)
		}
	case x.refusal != nil:
		return x, x.noRoom(ctx)
	case x.result.ExitCode == runtime.ExitNoThread && strings.HasPrefix(string(begin.kept), runtime.NoThread):
		return x, runtime.ErrNoRoom
	}
	return x, nil
}

// maxBeginning is enough of an error to tell that there was no room, in bytes.
const maxBeginning = 8 << 10

// beginning passes on what is written, and keeps the beginning of it.
type beginning struct {
	w    io.Writer // nil discards
	kept []byte
}

func (b *beginning) Write(p []byte) (int, error) {
	b.kept = append(b.kept, p[:min(len(p), maxBeginning-len(b.kept))]...)
	if b.w == nil {
		return len(p), nil
	}
	return b.w.Write(p)
}
