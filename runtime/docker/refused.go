package docker

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/bermhq/berm/runtime"
)

// exec gives errors that are classed already.
//
// The engine answers a process that it couldn't start like one that has ended, with a
// code of its own and the words of its OCI runtime, whether the program isn't there or
// nothing can be started at all. Where the container has the agent, that is asked to
// start the program, and tells one from the other.
func (r *Runtime) exec(ctx context.Context, s *session, id string, e runtime.Exec) (runtime.ExecResult, error) {
	var input *replay
	if e.Stdin != nil {
		input = &replay{src: e.Stdin}
	}
	try := func(e runtime.Exec) (*execution, error) {
		if input != nil {
			e.Stdin = input.reader()
		}
		return r.run(ctx, s, id, e)
	}
	x, err := try(e)
	if err != nil || x.refusal == nil {
		return x.result, err
	}
	// The process never was. It may be that the container is no longer, or that the
	// working directory isn't yet.
	if err := x.alive(ctx); errdefs.IsFailedPrecondition(err) {
		return runtime.ExecResult{}, runtime.Precondition("the container isn't running")
	}
	agent, err := x.hasAgent(ctx)
	if err != nil {
		return runtime.ExecResult{}, err
	}
	if !agent && x.blames(e.Command[0]) {
		return x.refused(e)
	}
	if e.WorkingDir != "" {
		if err := r.makeDir(ctx, s, id, e, agent); err != nil {
			return runtime.ExecResult{}, err
		}
	}
	if agent {
		e.Command = slices.Concat([]string{runtime.AgentProgram, "exec", ".", "--"}, e.Command)
		return started(ctx, e, try)
	}
	if x, err = try(e); err != nil || x.refusal == nil {
		return x.result, err
	}
	if !x.blames(e.Command[0]) {
		return runtime.ExecResult{}, x.noRoom(ctx)
	}
	return x.refused(e)
}

// blames tells whether the engine's words are about the program: that it is missing, or
// can't be executed. There is nothing else to tell by, and who names a program so that
// they are taken for that is told of its own program.
func (x *execution) blames(program string) bool {
	said := string(x.refusal)
	named := slices.ContainsFunc([]string{strconv.Quote(program), "`" + program + "`", "exec " + program + ":"}, func(name string) bool {
		return strings.Contains(said, name)
	})
	said = strings.ToLower(said)
	return named && slices.ContainsFunc([]string{
		"not found", "no such file or directory", "permission denied", "format error", "is a directory", "not a directory",
		"argument list too long", "text file busy", "too many levels of symbolic links", "file name too long",
	}, func(why string) bool { return strings.Contains(said, why) })
}

// refused is the result of a command whose program can't be executed.
func (x *execution) refused(e runtime.Exec) (runtime.ExecResult, error) {
	if e.Stderr != nil {
		if _, err := e.Stderr.Write(x.refusal); err != nil {
			return runtime.ExecResult{}, fmt.Errorf("deliver output: %w", err)
		}
	}
	return x.result, nil
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

// started runs a command of Berm's own: one that can't be started has no room.
func started(ctx context.Context, e runtime.Exec, run func(runtime.Exec) (*execution, error)) (runtime.ExecResult, error) {
	begin := &beginning{w: e.Stderr}
	e.Stderr = begin
	x, err := run(e)
	switch {
	case err != nil:
		return runtime.ExecResult{}, err
	case x.refusal != nil && x.blames(e.Command[0]): // with what it was given, say
		return x.refused(e)
	case x.refusal != nil:
		return runtime.ExecResult{}, x.noRoom(ctx)
	case x.result.ExitCode == runtime.ExitNoThread && string(begin.kept) == runtime.NoThread:
		return runtime.ExecResult{}, runtime.ErrNoRoom
	}
	return x.result, nil
}

// makeDir makes the command's working directory, as the command's user.
func (r *Runtime) makeDir(ctx context.Context, s *session, id string, e runtime.Exec, agent bool) error {
	mkdir := runtime.Exec{Command: []string{"mkdir", "-p", "--", e.WorkingDir}, WorkingDir: "/", User: e.User}
	run := func(e runtime.Exec) (*execution, error) { return r.run(ctx, s, id, e) }
	if agent {
		mkdir.Command = []string{runtime.AgentProgram, "mkdir", "--", e.WorkingDir}
	}
	res, err := started(ctx, mkdir, run)
	if err == nil && res.ExitCode != 0 {
		err = runtime.Invalid("the working directory %q can't be made", e.WorkingDir)
	}
	return err
}

// hasAgent tells whether the agent's program is in the container.
func (x *execution) hasAgent(ctx context.Context) (bool, error) {
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	c, err := x.s.ContainerInspect(callCtx, x.container)
	if err != nil {
		return false, classify(ctx, err)
	}
	return slices.ContainsFunc(c.Mounts, func(m container.MountPoint) bool {
		return m.Type == mount.TypeBind && m.Destination == runtime.AgentProgram
	}), nil
}

// beginning passes on what is written, and keeps as much of it as tells that the agent
// had no room for its threads.
type beginning struct {
	w    io.Writer // nil discards
	kept []byte
}

func (b *beginning) Write(p []byte) (int, error) {
	b.kept = append(b.kept, p[:min(len(p), len(runtime.NoThread)-len(b.kept))]...)
	if b.w == nil {
		return len(p), nil
	}
	return b.w.Write(p)
}
