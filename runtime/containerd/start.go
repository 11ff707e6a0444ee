package containerd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
)

const (
	// stderrGrace is how long Wait waits for standard error after the program's end.
	stderrGrace = time.Second

	// endPatience is how long a program may take to end after its input has ended.
	endPatience = 20 * time.Second

	// endTimeout bounds the calls that delete a program in the engine. The engine waits up
	// to 10 s for descendants that have the output open.
	endTimeout = 30 * time.Second

	// waitTick is how often await retries while the engine is unavailable.
	waitTick = 500 * time.Millisecond

	// stdinTimeout is how long a shim may take to open its end of a program's input.
	stdinTimeout = 10 * time.Second
)

// Start starts a program in a running container. Its working directory is "/": an OCI
// runtime that enters another one can be led out of the container (CVE-2024-21626).
func (r *Runtime) Start(ctx context.Context, id string, p runtime.Program) (runtime.Stdio, error) {
	var out *stdio
	err := r.call(ctx, "start program in container "+id, func(callCtx context.Context) error {
		if err := runtime.CheckProgram(p); err != nil {
			return err
		}
		// A start in a frozen cgroup would hang, with the container's lock held by the shim.
		// So a pause waits for this lock, too.
		unlock, err := r.starts.Lock(callCtx, id)
		if err != nil {
			return callCtx.Err()
		}
		defer unlock()
		process, err := r.programProcess(callCtx, id, p)
		if err != nil {
			return err
		}
		s, err := newStdio(callCtx, r, id)
		if err != nil {
			return err
		}
		// From here on the engine may act even if ctx ends.
		workCtx, cancel := r.linger(callCtx)
		defer cancel()
		if err := s.start(workCtx, process, p.Command[0]); err != nil {
			return err
		}
		if err := ended(ctx); err != nil {
			_ = s.Close()
			return err
		}
		out = s
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// programProcess returns the engine's description of a program.
func (r *Runtime) programProcess(ctx context.Context, id string, p runtime.Program) (*specs.Process, error) {
	rec, err := r.record(ctx, id)
	if err != nil {
		return nil, err
	}
	spec, err := decodeSpec(rec)
	if err != nil {
		return nil, err
	}
	pid, err := r.runningPid(ctx, id)
	if err != nil {
		return nil, err
	}
	out := spec.Process
	out.Terminal, out.ConsoleSize = false, nil
	out.Cwd = "/"
	out.Args = p.Command
	return out, become(out, pid, p.User)
}

// become sets a process's user and capabilities to those of a user. An empty user leaves the
// process as it is.
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
	// The bounding set has what the container may have. The kernel clears the other sets for
	// a user that isn't root.
	if p.Capabilities != nil {
		caps := *p.Capabilities
		caps.Permitted, caps.Effective, caps.Inheritable, caps.Ambient = caps.Bounding, caps.Bounding, nil, nil
		p.Capabilities = &caps
	}
	return nil
}

// program is a program in the engine.
type program struct {
	r         *Runtime
	container string
	id        string // in the engine
	place     *place // the directory of its pipes; locked, so that no sweep removes it
}

// endInput makes the shim close its end of the program's input.
func (x program) endInput(ctx context.Context) {
	ctx, cancel := x.r.bounded(ctx)
	defer cancel()
	_, err := x.r.client.TaskService().CloseIO(ctx, &tasks.CloseIORequest{ContainerID: x.container, ExecID: x.id, Stdin: true})
	if err = native(err); err != nil && !errdefs.IsNotFound(err) {
		x.r.log.DebugContext(ctx, "stdin_not_closed", "container_id", x.container, "error", err)
	}
}

// end ends a program's input, kills the program if it doesn't end in time, and deletes it in
// the engine. It reports whether the engine has deleted it.
func (x program) end(ctx context.Context, patience time.Duration) bool {
	ctx, cancel := context.WithTimeout(x.r.namespaced(context.WithoutCancel(ctx)), endTimeout)
	defer cancel()
	x.endInput(ctx)
	service, begun := x.r.client.TaskService(), time.Now()
	for delay := 10 * time.Millisecond; ; delay = min(2*delay, time.Second) {
		_, err := service.DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: x.container, ExecID: x.id})
		if err = native(err); err == nil || errdefs.IsNotFound(err) {
			return true
		}
		if time.Since(begun) >= patience { // else it would end only with the container
			_, _ = service.Kill(ctx, &tasks.KillRequest{ContainerID: x.container, ExecID: x.id, Signal: uint32(unix.SIGKILL)})
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			x.r.log.DebugContext(ctx, "program_not_ended", "container_id", x.container, "error", err)
			return false
		}
	}
}

// stdio is a runtime.Stdio on named pipes. The shim has their other ends.
type stdio struct {
	program
	stdin, stdout, stderr *os.File
	spare                 []*os.File // write ends: a reader gets no EOF before the shim has opened its own

	said   runtime.Head  // the program's standard error
	read   chan struct{} // closed at the end of standard error
	once   sync.Once     // for Close
	giveUp context.CancelFunc
	ended  chan struct{} // closed when the program has ended; code and err are set then
	code   int
	err    error
}

// newStdio makes the pipes of a program.
func newStdio(ctx context.Context, r *Runtime, container string) (*stdio, error) {
	s := &stdio{program: program{r: r, container: container, id: uuid.NewString()}, read: make(chan struct{}), ended: make(chan struct{})}
	dir := r.root.path("containers", container, "exec")
	err := os.Mkdir(dir, 0o700)
	if err == nil || errors.Is(err, fs.ErrExist) {
		s.place, err = newPlace(ctx, filepath.Join(dir, s.id))
	}
	if errors.Is(err, fs.ErrNotExist) { // the parent goes with the container
		return nil, runtime.Precondition("the container has no directory here: it is being removed, or another root's")
	}
	if err != nil {
		return nil, err
	}
	for name, end := range map[string]**os.File{"stdin": nil, "stdout": &s.stdout, "stderr": &s.stderr} {
		if err = unix.Mkfifo(s.place.file(name), 0o600); err == nil && end != nil {
			err = s.openOutput(name, end)
		}
		if err != nil {
			s.remove(true)
			return nil, fmt.Errorf("make the program's pipes: %w", err)
		}
	}
	return s, nil
}

func (s *stdio) openOutput(name string, end **os.File) (err error) {
	if *end, err = os.OpenFile(s.place.file(name), os.O_RDONLY|unix.O_NONBLOCK, 0); err != nil {
		return err
	}
	spare, err := os.OpenFile(s.place.file(name), os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err == nil {
		s.spare = append(s.spare, spare)
	}
	return err
}

// start makes the engine start the program. When it returns an error, it removes what it made,
// in the background.
func (s *stdio) start(ctx context.Context, process *specs.Process, path string) (err error) {
	defer func() {
		s.closeSpare()
		if err != nil {
			s.r.chores.background(func() { s.remove(s.end(ctx, 0)) })
		}
	}()
	spec, err := typeurl.MarshalAnyToProto(process)
	if err != nil {
		return fmt.Errorf("encode the program: %w", err)
	}
	service := s.r.client.TaskService()
	_, err = service.Exec(ctx, &tasks.ExecProcessRequest{
		ContainerID: s.container, ExecID: s.id, Spec: spec,
		Stdin: s.place.file("stdin"), Stdout: s.place.file("stdout"), Stderr: s.place.file("stderr"),
	})
	if err == nil {
		_, err = service.Start(ctx, &tasks.StartRequest{ContainerID: s.container, ExecID: s.id})
	}
	if err = native(err); err != nil {
		return s.notStarted(ctx, err, path)
	}
	if err := s.openStdin(ctx); err != nil {
		return fmt.Errorf("open the program's input: %w", err)
	}
	go func() {
		defer close(s.read)
		_, _ = io.Copy(&s.said, s.stderr)
	}()
	waitCtx, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	s.giveUp = giveUp
	go s.await(waitCtx)
	return nil
}

func (s *stdio) closeSpare() {
	for _, f := range s.spare {
		_ = f.Close()
	}
	s.spare = nil
}

// notStarted returns the error of a program that the engine didn't start.
func (s *stdio) notStarted(ctx context.Context, err error, path string) error {
	if !unexplained(err) {
		return err
	}
	pid, why := s.r.runningPid(ctx, s.container)
	if why != nil {
		return why
	}
	if first, ferr := readProcess(int(pid)); ferr == nil && (first.over() || first.ends()) { // the engine doesn't know yet
		return runtime.Precondition("the container isn't running")
	}
	if !errdefs.IsUnknown(err) {
		return err
	}
	if runtime.BlamesProgram(err.Error(), path) {
		return runtime.WithClass(errdefs.ErrNotFound, fmt.Errorf("the container has no program %s that can be executed", path))
	}
	// The error names files of the host, so callers don't get it.
	s.r.log.WarnContext(ctx, "program_not_started", "container_id", s.container, "error", err)
	return runtime.ErrNoRoom
}

// unexplained reports whether only the container's state can tell what an error means. The
// errors of OCI runtimes have no class.
func unexplained(err error) bool {
	return !runtime.HasClass(err) && (errdefs.IsUnknown(err) || errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err))
}

// openStdin opens the program's input once the shim has opened its end. Input that is written
// before is lost.
func (s *stdio) openStdin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stdinTimeout)
	defer cancel()
	return await(ctx, func() (bool, error) {
		f, err := os.OpenFile(s.place.file("stdin"), os.O_WRONLY|unix.O_NONBLOCK, 0)
		if errors.Is(err, unix.ENXIO) {
			return false, nil
		}
		s.stdin = f
		return true, err
	})
}

// await waits for the program's end. It asks again if the engine was unavailable.
func (s *stdio) await(ctx context.Context) {
	defer close(s.ended)
	for {
		res, err := s.r.client.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: s.container, ExecID: s.id})
		s.code, s.err = int(res.GetExitStatus()), native(err)
		if !errdefs.IsUnavailable(s.err) {
			return
		}
		select {
		case <-time.After(waitTick):
		case <-ctx.Done():
			return
		}
	}
}

// Read reads the program's standard output.
func (s *stdio) Read(p []byte) (int, error) { return s.stdout.Read(p) }

// Write writes to the program's standard input.
func (s *stdio) Write(p []byte) (int, error) { return s.stdin.Write(p) }

// Close ends the program's input and output. A program that then doesn't end is killed
// after a while.
func (s *stdio) Close() error {
	s.once.Do(func() {
		// Drain the output, as the shim would block without a reader.
		rest, err := os.OpenFile(s.place.file("stdout"), os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err == nil {
			go func() { _, _ = io.Copy(io.Discard, rest) }()
		}
		_, _ = s.stdin.Close(), s.stdout.Close()
		s.r.chores.background(func() {
			ctx := context.Background()
			s.endInput(ctx)
			select {
			case <-s.ended:
			case <-time.After(s.r.patience):
			}
			forgotten := s.end(ctx, 0)
			s.giveUp()
			_ = rest.Close()
			s.remove(forgotten)
		})
	})
	return nil
}

// remove closes the output pipes. It removes their directory if the engine has deleted the
// program; otherwise a sweep does.
func (s *stdio) remove(forgotten bool) {
	s.closeSpare()
	for _, f := range []*os.File{s.stdout, s.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
	if forgotten {
		_ = s.place.remove() // what stays goes with the container
	}
	s.place.release()
}

// Wait waits for the program's end, and returns how it ended.
func (s *stdio) Wait(ctx context.Context) (int, string, error) {
	op := "wait for program in container " + s.container
	select {
	case <-s.ended:
	case <-ctx.Done():
		return 0, s.said.String(), fmt.Errorf("%s: %w", op, runtime.Ended(ctx))
	}
	if s.err != nil {
		err := s.err
		callCtx, cancel := s.r.bounded(ctx)
		defer cancel()
		if _, why := s.r.runningPid(callCtx, s.container); errdefs.IsNotFound(why) || errdefs.IsFailedPrecondition(why) {
			err = runtime.Interrupted("gone")
		}
		return 0, s.said.String(), failure(ctx, op, err)
	}
	select {
	case <-s.read:
	case <-ctx.Done():
	case <-time.After(stderrGrace):
	}
	return s.code, s.said.String(), nil
}
