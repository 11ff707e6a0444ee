package lifecycle

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Bounds of a command.
const (
	maxArguments    = 4096
	maxArgumentSize = 128 << 10 // bytes of one argument; the kernel takes no more
	maxCommandSize  = 1 << 20   // bytes of all arguments
	outputLimit     = 4000      // code points, unless the caller says otherwise
	maxOutputLimit  = 4 << 20   // code points that a caller can ask for

	endKnown = 2 * time.Second // in which an engine knows of a container's end
)

// errTimedOut is the cause of a command's end by its own timeout.
var errTimedOut = errors.New("the command's timeout ran out")

// command is a checked and judged ExecRequest.
type command struct {
	req        ExecRequest
	env        []string
	overridden []policy.Override
	limit      int
}

// Exec runs a command to its end. A timeout is a result, not an error, and so is a
// sandbox that ends under its command.
//
// Errors: those of Create when it comes along, or the sandbox has to be made again
// and the policy is another by now, *InvalidError, *policy.DeniedError,
// *NotFoundError, *StateError, *QuotaError (before the command), *CapacityError,
// *UnavailableError.
func (m *Manager) Exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	ctx, span := m.tracer.Start(ctx, "sandbox.exec", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	res, err := m.exec(ctx, req)
	if err != nil {
		failSpan(span, err)
		m.metrics.commands.WithLabelValues("error").Inc()
		return res, err
	}
	span.SetAttributes(attribute.String("berm.session_id", res.SessionID), attribute.String("berm.status", string(res.Status)))
	m.metrics.command(res.Status, res.Path)
	return res, nil
}

func (m *Manager) exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	cmd, err := m.checkCommand(req)
	if err != nil {
		return ExecResult{}, err
	}
	if err := m.available(); err != nil {
		return ExecResult{}, err
	}
	if req.Serialize {
		id, err := req.keyID()
		if err != nil {
			return ExecResult{}, err
		}
		if err := m.takeTurn(ctx, id); err != nil {
			return ExecResult{}, err
		}
		defer m.passTurn(id)
	}
	var res ExecResult
	err = m.inSandbox(ctx, req, kindExec, func(rec *record, sb Sandbox, made ExecResult) (bool, error) {
		var err error
		res, err = m.run(ctx, cmd, rec, sb, made)
		return false, err
	})
	return res, err
}

// keyID is whose sandbox the request is for.
func (r ExecRequest) keyID() (keyID, error) {
	key, err := ParseKey(r.Key)
	return keyID{r.Tenant, key}, err
}

// inSandbox finds or makes the sandbox of a request, counts one more of a kind in, and
// calls f, which says whether it goes on being counted.
func (m *Manager) inSandbox(ctx context.Context, req ExecRequest, k kind, f func(*record, Sandbox, ExecResult) (bool, error)) error {
	var err error
	for range startAttempts {
		// Its container may have died without the news being here yet. Now it is.
		if err = m.inSandboxOnce(ctx, req, k, f); !errors.Is(err, errNeverStarted) {
			break
		}
	}
	return err
}

func (m *Manager) inSandboxOnce(ctx context.Context, req ExecRequest, k kind, f func(*record, Sandbox, ExecResult) (bool, error)) error {
	rec, made, err := m.sandboxFor(ctx, req)
	if err != nil {
		return err
	}
	sb, err := m.begin(rec, k)
	var full *CapacityError
	if errors.As(err, &full) && m.tended(rec) { // what has ended may not be known yet
		m.look(ctx, rec)
		sb, err = m.begin(rec, k)
	}
	if err != nil {
		return err
	}
	goesOn := false
	defer func() {
		if !goesOn {
			m.finish(rec, k)
		}
	}()
	goesOn, err = f(rec, sb, made)
	return err
}

// startAttempts is how often a command is started whose sandbox dies before it.
const startAttempts = 3

// errNeverStarted says that the sandbox's container was dead before the command.
var errNeverStarted = errors.New("the sandbox's container is dead")

// neverStarted is errNeverStarted for those who try no more.
func neverStarted(sb Sandbox) error {
	return fmt.Errorf("%w: %w", errNeverStarted, &StateError{
		Key: sb.Key, Status: StatusStopped, Want: "it died before the command could start; try again",
	})
}

// sandboxFor answers the sandbox that a command is to run in, made or made again
// as needed.
func (m *Manager) sandboxFor(ctx context.Context, req ExecRequest) (*record, ExecResult, error) {
	var res ExecResult
	id, err := req.keyID()
	if err != nil {
		return nil, res, err
	}
	if rec := m.recordOf(id); rec != nil { // over its quota, it isn't even made again
		if sb := m.snapshot(rec); sb.Status == StatusStopped {
			if err := m.quotaLeft(ctx, sb, false); err != nil {
				return nil, res, err
			}
		}
	}
	if req.Create != nil {
		create := *req.Create
		create.Tenant, create.Key = id.tenant, id.key
		made, err := m.observeCreate(ctx, create, true)
		if err != nil {
			return nil, res, err
		}
		res.Created, res.Recreated, res.Overridden = made.Result == ResultCreated, made.Recreated, made.Sandbox.Overridden
	}
	rec, made, err := m.awake(ctx, id)
	res.Recreated = res.Recreated || made
	return rec, res, err
}

// awake answers the sandbox of a key, made again if its container died, and tells
// whether it was this call that did.
func (m *Manager) awake(ctx context.Context, id keyID) (rec *record, made bool, err error) {
	if rec = m.recordOf(id); rec == nil {
		if rec, err = m.madeSoon(ctx, id); err != nil {
			return nil, false, err
		}
	}
	switch m.snapshot(rec).Status {
	case StatusExpired:
		return nil, false, &NotFoundError{Key: id.key}
	case StatusStopped:
		if made, err = m.remake(ctx, id); err != nil {
			return nil, false, err
		}
		if rec = m.recordOf(id); rec == nil {
			return nil, made, &NotFoundError{Key: id.key}
		}
	}
	return rec, made, nil
}

// madeSoon waits for a sandbox that is being made.
func (m *Manager) madeSoon(ctx context.Context, id keyID) (*record, error) {
	m.mu.Lock()
	var f *flight
	if s := m.slots[id]; s != nil {
		f = s.flight
	}
	m.mu.Unlock()
	if f != nil {
		if _, err := m.await(ctx, f, true, true); err != nil {
			return nil, err
		}
	}
	rec := m.recordOf(id)
	if rec == nil {
		return nil, &NotFoundError{Key: id.key}
	}
	return rec, nil
}

// remake makes a sandbox again whose container died, just as it was, if the policy
// in force still has it so. It tells whether it was this call that did.
func (m *Manager) remake(ctx context.Context, id keyID) (bool, error) {
	f, err := m.hold(ctx, id, true)
	if err != nil {
		return false, err
	}
	joined := f != nil
	if !joined {
		rec := m.recordOf(id)
		if rec == nil {
			m.drop(id)
			return false, nil
		}
		dead := m.snapshot(rec)
		if dead.Status != StatusStopped {
			m.drop(id)
			return false, nil
		}
		want, err := m.judgeAgain(dead, rec.adopted)
		if err == nil {
			f, err = m.launch(ctx, want, rec)
		}
		if err != nil {
			m.drop(id)
			return false, err
		}
	}
	if _, err := m.await(ctx, f, joined, true); err != nil {
		return false, err
	}
	m.log.InfoContext(ctx, "sandbox_recreated", sandboxAttrs(f.result.Sandbox)...)
	return true, nil
}

// begin notes that a command or a process runs, so that the sandbox doesn't idle out.
func (m *Manager) begin(rec *record, k kind) (Sandbox, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	sb := rec.snapshotLocked(time.Now())
	switch sb.Status {
	case StatusRunning:
	case StatusStopped: // just now, or it has made way for the one that is made anew
		return sb, neverStarted(sb)
	default:
		return sb, &StateError{Key: sb.Key, Status: sb.Status, Want: "commands need it running; resume or create it first"}
	}
	most, what := m.opts.Settings.MaxCommands, "commands running"
	if k == kindProcess {
		most, what = m.opts.Settings.MaxProcesses, "processes running"
	}
	return sb, rec.enterLocked(rec.counter(k), most, what)
}

// enterLocked counts in one more of what a sandbox has only so many of at once.
func (r *record) enterLocked(n *int, most int, what string) error {
	if *n >= most {
		return &CapacityError{
			Message:    fmt.Sprintf("sandbox %q has %d %s, which is as many as it may", r.sb.Key, *n, what),
			RetryAfter: time.Second,
		}
	}
	*n++
	r.usedLocked()
	return nil
}

// usedLocked notes that the sandbox was used, so that its idle time starts anew.
func (r *record) usedLocked() { r.sb.LastUsedAt, r.stale = time.Now().UTC(), true }

func (m *Manager) finish(rec *record, k kind) {
	m.mu.Lock()
	defer m.mu.Unlock()
	*rec.counter(k)--
	rec.usedLocked()
}

// touch notes that the sandbox was used.
func (m *Manager) touch(rec *record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	rec.usedLocked()
}

// prepare checks that a command may start in a sandbox, and answers where.
func (m *Manager) prepare(ctx context.Context, cmd *command, sb Sandbox) (cwd string, err error) {
	if err := m.quotaLeft(ctx, sb, false); err != nil {
		return "", err
	}
	return policy.WorkingDir(sb.Spec, cmd.req.WorkingDir)
}

// run runs the command and tells how it ended.
func (m *Manager) run(ctx context.Context, cmd *command, rec *record, sb Sandbox, res ExecResult) (ExecResult, error) {
	cwd, err := m.prepare(ctx, cmd, sb)
	if err != nil {
		return res, err
	}
	timeout, clamped, err := m.opts.Policy().ExecTimeout(sb.Spec.Profile, cmd.req.Timeout)
	if err != nil {
		return res, err
	}
	res.SessionID = sb.SessionID
	res.Backend = m.backend()
	res.Timeout = timeout
	res.QuotaEnforcement = sb.Enforcement.WorkspaceQuota
	res.Overridden = slices.Concat(res.Overridden, cmd.overridden, clamped)

	stdout, stderr := cmd.collectors()
	exec := runtime.Exec{
		Command: cmd.req.Command, Env: m.traced(ctx, cmd, sb), WorkingDir: cwd, User: sb.Spec.User,
		Stdout: stdout, Stderr: stderr,
	}
	if len(cmd.req.Stdin) > 0 {
		exec.Stdin = bytes.NewReader(cmd.req.Stdin)
	}
	start := time.Now()
	runCtx, cancel := context.WithTimeoutCause(ctx, timeout, errTimedOut)
	defer cancel()
	var out runtime.ExecResult
	err = m.call(runCtx, "exec", func(ctx context.Context) error {
		var err error
		if m.insider == nil {
			return &UnsupportedError{Key: sb.Key}
		}
		out, err = m.insider.Exec(ctx, sb.ContainerID, exec)
		return err
	})
	res.Duration = time.Since(start)
	res.Path, res.CPUTime, res.PeakMemoryBytes = cmp.Or(out.Path, runtime.PathEngine), out.CPUTime, out.PeakMemoryBytes

	if errors.Is(err, runtime.ErrNotKilled) && !errdefs.IsUnavailable(err) {
		// What can't be killed alone goes with its sandbox. An engine that went away
		// is no reason for that: its containers went with it, or live on as they are.
		res.SessionTerminated = true
		if derr := m.terminate(ctx, rec, sb); derr != nil {
			return res, derr
		}
	}
	switch {
	case err == nil && out.OOMKilled:
		res.Status = ExecOOMKilled
	case err == nil:
		res.Status, res.ExitCode = ExecCompleted, &out.ExitCode
	case errors.Is(context.Cause(runCtx), errTimedOut) && ctx.Err() == nil:
		res.Status = ExecTimedOut
	case errors.Is(err, runtime.ErrInterrupted):
		res.Status = ExecKilled
	case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err):
		return res, m.whyNotStarted(ctx, rec, sb, err)
	case errdefs.IsUnavailable(err):
		return res, &UnavailableError{Err: fmt.Errorf("run in sandbox %s: %w", sb.Key, err)}
	case errdefs.IsResourceExhausted(err):
		if dead := m.lookAgain(ctx, rec, sb); dead != nil { // where nothing can be started either
			return res, dead
		}
		return res, noRoom(sb)
	default:
		return res, fmt.Errorf("run in sandbox %s: %w", sb.Key, err)
	}
	cmd.collect(&res, stdout, stderr)
	return res, m.quotaAfter(ctx, rec, sb, &res)
}

// whyNotStarted looks at a container that refused to start a command. The refusal may
// have come of seeing the container's end before the engine does: then it waits for that.
func (m *Manager) whyNotStarted(ctx context.Context, rec *record, sb Sandbox, refusal error) error {
	for until, wait := time.Now().Add(endKnown), askFirst; ; wait *= 2 {
		if err := m.lookAgain(ctx, rec, sb); err != nil {
			return err
		}
		if !errdefs.IsFailedPrecondition(refusal) || time.Now().After(until) {
			break
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
	// It lives, and the engine has lost the command: it was restarted in between, say.
	return &UnavailableError{Err: errors.New("run in sandbox " + sb.Key + ": " + refusal.Error())} // without its class
}

// lookAgain asks the engine whether the container runs, and is an error unless it does:
// errNeverStarted when it is dead. What can't be proven dead is left as it is.
func (m *Manager) lookAgain(ctx context.Context, rec *record, sb Sandbox) error {
	var c runtime.Container
	err := m.call(ctx, "inspect", func(ctx context.Context) error {
		var err error
		c, err = m.opts.Runtime.Inspect(ctx, sb.ContainerID)
		return err
	})
	switch {
	case errdefs.IsNotFound(err) || err == nil && statusOf(c.State) == StatusStopped:
		m.containerGone(sb.ContainerID)
		return neverStarted(sb)
	case err != nil:
		return fmt.Errorf("run in sandbox %s: %w", sb.Key, err)
	case c.State == runtime.StatePaused:
		m.changeStatus(rec, StatusRunning, StatusPaused)
		return &StateError{Key: sb.Key, Status: StatusPaused, Want: "commands need it running; resume it first"}
	}
	return nil
}

func (m *Manager) backend() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.info.Backend
}

// checkCommand checks what can be checked without a sandbox.
func (m *Manager) checkCommand(req ExecRequest) (*command, error) {
	cmd := &command{req: req, limit: outputLimit}
	if len(req.Command) == 0 || req.Command[0] == "" {
		return nil, &InvalidError{Field: "command", Message: "must not be empty"}
	}
	if len(req.Command) > maxArguments {
		return nil, &InvalidError{Field: "command", Message: fmt.Sprintf("at most %d arguments", maxArguments)}
	}
	size := 0
	for _, arg := range req.Command {
		size += len(arg)
		if strings.ContainsRune(arg, 0) {
			return nil, &InvalidError{Field: "command", Message: "must not contain NUL"}
		}
		if len(arg) >= maxArgumentSize || size > maxCommandSize {
			return nil, &InvalidError{Field: "command", Message: "is too long; pass long input by stdin"}
		}
	}
	if req.OutputLimit != nil {
		cmd.limit = *req.OutputLimit
		if cmd.limit > maxOutputLimit {
			return nil, &InvalidError{Field: "output_limit", Message: fmt.Sprintf("at most %d", maxOutputLimit)}
		}
	}
	env, overridden, err := m.opts.Policy().ExecEnv(req.Env)
	if err != nil {
		return nil, err
	}
	cmd.overridden = overridden
	for _, name := range slices.Sorted(maps.Keys(env)) {
		cmd.env = append(cmd.env, name+"="+env[name])
	}
	return cmd, nil
}

// traced gives the environment of a command, with the W3C trace context that it is run
// in as TRACEPARENT and TRACESTATE: if there is one, if neither the caller nor the
// operator set either, and as far as the policy lets a request set them.
func (m *Manager) traced(ctx context.Context, cmd *command, sb Sandbox) []string {
	fields := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, fields)
	if len(fields) == 0 {
		return cmd.env
	}
	vars := map[string]string{}
	for name, value := range fields {
		name = strings.ToUpper(name) // as OpenTelemetry has it for environments
		for _, set := range []map[string]string{cmd.req.Env, sb.Spec.Env, m.opts.Settings.Env} {
			if _, ok := set[name]; ok {
				return cmd.env
			}
		}
		vars[name] = value
	}
	judged, overridden, err := m.opts.Policy().ExecEnv(vars)
	if err != nil || len(overridden) > 0 {
		return cmd.env
	}
	env := slices.Clone(cmd.env)
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		env = append(env, name+"="+judged[name])
	}
	return env
}

// terminate removes a sandbox whole.
func (m *Manager) terminate(ctx context.Context, rec *record, sb Sandbox) error {
	ctx = context.WithoutCancel(ctx)
	id := keyID{sb.Tenant, sb.Key}
	if _, err := m.hold(ctx, id, false); err != nil {
		return err
	}
	defer m.drop(id)
	if m.recordOf(id) != rec {
		return nil // it is gone already
	}
	m.log.WarnContext(ctx, "sandbox_terminated", append(sandboxAttrs(sb), "reason", "a command could not be killed")...)
	return m.clear(ctx, id, rec)
}
