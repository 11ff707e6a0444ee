package runtimetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

var errDied = fmt.Errorf("%w: %w", runtime.ErrInterrupted, errdefs.ErrFailedPrecondition)

// Exec implements runtime.Insider. The built-in commands are cat, echo, env, exit,
// false, id -u and -g, printf (its first argument, with \n), pwd, sleep, true, and
// sh -c with some of these between semicolons, each with >&2 at its end if wanted;
// there is no quoting. Any other exits with 127.
//
// A cat that is killed leaves a read of Stdin under way.
func (f *Fake) Exec(ctx context.Context, id string, e runtime.Exec) (runtime.ExecResult, error) {
	if _, err := f.begin(ctx, "exec", id); err != nil {
		return runtime.ExecResult{}, err
	}
	if len(e.Command) == 0 || e.WorkingDir != "" && !path.IsAbs(e.WorkingDir) {
		return runtime.ExecResult{}, fmt.Errorf("exec in %s: command or directory: %w", id, errdefs.ErrInvalidArgument)
	}
	runCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c, info, err := f.startExec(id, &cancel)
	if err != nil {
		return runtime.ExecResult{}, err
	}
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(c.execs, &cancel)
	}()

	if e.Stdout == nil {
		e.Stdout = io.Discard
	}
	if e.Stderr == nil {
		e.Stderr = io.Discard
	}
	result, err := f.run(runCtx, c, info, e)
	switch {
	case errors.Is(err, runtime.ErrNotKilled):
		return runtime.ExecResult{}, fmt.Errorf("exec in %s: %w", id, err)
	case ctx.Err() != nil:
		return runtime.ExecResult{}, fmt.Errorf("exec in %s: %w", id, ctxError(ctx))
	case runCtx.Err() != nil:
		return runtime.ExecResult{}, fmt.Errorf("exec in %s: %w", id, context.Cause(runCtx))
	case err != nil:
		return runtime.ExecResult{}, err
	}
	if f.opts.Measures && result.CPUTime == 0 {
		result.CPUTime, result.PeakMemoryBytes = fakeCPUTime, fakePeak
	}
	return result, f.after("exec", id)
}

func (f *Fake) startExec(id string, cancel *context.CancelCauseFunc) (*fakeContainer, runtime.Container, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if isClosed(f.down) {
		return nil, runtime.Container{}, fmt.Errorf("exec in %s: %w", id, errDown)
	}
	c, err := f.running("exec", id)
	if err != nil {
		return nil, runtime.Container{}, err
	}
	if c.execs == nil {
		c.execs = make(map[*context.CancelCauseFunc]bool)
	}
	c.execs[cancel] = true
	return c, c.info, nil
}

// run leaves a command to the hook or to the built-in ones.
func (f *Fake) run(ctx context.Context, c *fakeContainer, info runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
	if f.opts.Exec != nil {
		hooked := e
		if hooked.Stdin == nil {
			hooked.Stdin = strings.NewReader("")
		}
		result, err := f.opts.Exec(ctx, info, hooked)
		if !errors.Is(err, errors.ErrUnsupported) {
			return result, err
		}
	}
	script, ok := parseScript(e.Command)
	if !ok {
		_, _ = fmt.Fprintf(e.Stderr, "%s: not found\n", e.Command[0])
		return runtime.ExecResult{ExitCode: 127}, nil
	}
	var code int
	for _, cmd := range script {
		switch cmd.argv[0] {
		case "sleep":
			if d, forever := cmd.duration(); forever {
				<-ctx.Done()
			} else if err := sleep(ctx, d); err == nil {
				code = 0
			}
		case "cat":
			code = cat(ctx, e)
		default:
			var exits bool
			if code, exits = cmd.simple(c, info.Env, e); exits {
				return runtime.ExecResult{ExitCode: code}, nil
			}
		}
		if ctx.Err() != nil {
			break // what killed it decides
		}
	}
	return runtime.ExecResult{ExitCode: code}, nil
}

// command is one of the built-in ones.
type command struct {
	argv     []string
	toStderr bool
}

// parseScript reports whether all commands are built-in ones.
func parseScript(argv []string) ([]command, bool) {
	parts := [][]string{argv}
	if name := path.Base(argv[0]); len(argv) == 3 && (name == "sh" || name == "ash") && argv[1] == "-c" {
		parts = nil
		for part := range strings.SplitSeq(argv[2], ";") {
			if fields := strings.Fields(part); len(fields) > 0 {
				parts = append(parts, fields)
			}
		}
	}
	var script []command
	for _, part := range parts {
		cmd := command{argv: append([]string{path.Base(part[0])}, part[1:]...)}
		if last := len(part) - 1; part[last] == ">&2" {
			cmd.argv, cmd.toStderr = cmd.argv[:last], true
		}
		switch cmd.argv[0] {
		case "cat", "echo", "env", "exit", "false", "id", "printf", "pwd", "sleep", "true":
		default:
			return nil, false
		}
		script = append(script, cmd)
	}
	return script, true
}

// parseMain makes a main process of a command; one that isn't built in sleeps.
func parseMain(argv []string) []command {
	if len(argv) > 0 {
		script, ok := parseScript(argv)
		reads := func(c command) bool { return c.argv[0] == "cat" }
		if ok && !slices.ContainsFunc(script, reads) {
			return script
		}
	}
	return []command{{argv: []string{"sleep", "infinity"}}}
}

// duration is for how long a sleep sleeps.
func (c command) duration() (d time.Duration, forever bool) {
	if len(c.argv) < 2 {
		return 0, true
	}
	seconds, err := strconv.ParseFloat(c.argv[1], 64)
	if err != nil || seconds > 1e9 {
		return 0, true
	}
	return time.Duration(seconds * float64(time.Second)), false
}

// simple runs a command that ends at once, and says whether it ends the script.
func (c command) simple(in *fakeContainer, env []string, e runtime.Exec) (code int, exits bool) {
	out := e.Stdout
	if c.toStderr {
		out = e.Stderr
	}
	var arg string
	if len(c.argv) > 1 {
		arg = c.argv[1]
	}
	switch c.argv[0] {
	case "echo":
		_, _ = io.WriteString(out, strings.Join(c.argv[1:], " ")+"\n")
	case "printf":
		_, _ = io.WriteString(out, strings.ReplaceAll(arg, `\n`, "\n"))
	case "env":
		for _, v := range runtime.MergeEnv(env, e.Env) {
			_, _ = io.WriteString(out, v+"\n")
		}
	case "pwd":
		_, _ = io.WriteString(out, cmp.Or(e.WorkingDir, in.spec.WorkingDir, "/")+"\n")
	case "id":
		uid, gid, _ := strings.Cut(in.user(e.User), ":")
		if arg == "-g" {
			uid = gid
		}
		_, _ = io.WriteString(out, uid+"\n")
	case "false":
		return 1, false
	case "exit":
		code, _ = strconv.Atoi(arg)
		return code & 0xff, true
	}
	return 0, false
}

// cat copies stdin to stdout. The reads have a goroutine of their own, as a reader
// that blocks can't be interrupted.
func cat(ctx context.Context, e runtime.Exec) (code int) {
	if e.Stdin == nil {
		return 0
	}
	chunks := make(chan []byte)
	go func() {
		defer close(chunks)
		for {
			buf := make([]byte, 32<<10)
			n, err := e.Stdin.Read(buf)
			select {
			case chunks <- buf[:n]:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	for {
		select {
		case chunk, ok := <-chunks:
			if !ok {
				return 0
			}
			if _, err := e.Stdout.Write(chunk); err != nil {
				return 1
			}
		case <-ctx.Done():
			return 128 + 9
		}
	}
}
