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
	"github.com/bermhq/berm/runtime/keylock"
)

// Bounds of a command.
const (
	maxArguments    = 4096
	maxArgumentSize = 128 << 10 // bytes of one argument; the kernel takes no more
	maxCommandSize  = 1 << 20   // bytes of all arguments
	outputLimit     = 4000      // code points, unless the caller says otherwise
	maxOutputLimit  = 4 << 20   // code points that a caller can ask for

	startAttempts = 3               // of a command whose sandbox dies before it
	endKnown      = 2 * time.Second // in which an engine knows of a container's end
)

// errTimedOut is the cause of a command's end by its own timeout.
var errTimedOut = errors.New("the command's timeout ran out")

// processes runs commands and managed processes in the sandboxes of a Registry. It shares the
// Registry's mutex.
type processes struct {
	registry *Registry
	engine   *engine
	quotas   *quotas
	opts     *Options
	insider  runtime.Insider // nil if the backend is none
	turns    keylock.Map[keyID]
	starting keylock.Map[processID]
}

func newProcesses(r *Registry) *processes {
	p := &processes{registry: r, engine: r.engine, quotas: r.quotas, opts: r.opts}
	p.insider, _ = r.opts.Runtime.(runtime.Insider)
	r.watch = func(rec *record) watcher { return &monitor{processes: p, rec: rec} }
	return p
}

// command is an ExecRequest that is checked and judged.
type command struct {
	req        ExecRequest
	env        []string
	overridden []policy.Override
	limit      int
}

// Exec runs a command to its end. A timeout is a result, not an error, and so is a sandbox that
// ends during the command.
//
// Errors: those of Create if the request has one, or if the sandbox must be made again and the
// policy has changed, *InvalidError, *policy.DeniedError, *NotFoundError, *StateError,
// *QuotaError (before the command), *CapacityError, *UnavailableError.
func (p *processes) Exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	ctx, span := p.engine.tracer.Start(ctx, "sandbox.exec", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	res, err := p.exec(ctx, req)
	if err != nil {
		failSpan(span, err)
		p.engine.metrics.commands.WithLabelValues("error").Inc()
		return res, err
	}
	span.SetAttributes(attribute.String("berm.session_id", res.SessionID), attribute.String("berm.status", string(res.Status)))
	p.engine.metrics.command(res.Status, res.Path)
	return res, nil
}

func (p *processes) exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	cmd, err := checkCommand(p.opts.Policy(), req)
	if err != nil {
		return ExecResult{}, err
	}
	if err := p.registry.available(); err != nil {
		return ExecResult{}, err
	}
	if req.Serialize {
		id, err := parseID(req.Tenant, req.Key)
		if err != nil {
			return ExecResult{}, err
		}
		unlock, err := p.takeTurn(ctx, id)
		if err != nil {
			return ExecResult{}, err
		}
		defer unlock()
	}
	var res ExecResult
	err = p.inSandbox(ctx, req, useCommand, func(a *Access, made ExecResult) (bool, error) {
		var err error
		res, err = p.run(ctx, cmd, a, made)
		return false, err
	})
	return res, err
}

// takeTurn waits until all callers that came before for the same key have ended their turn.
func (p *processes) takeTurn(ctx context.Context, id keyID) (unlock func(), err error) {
	if unlock, free := p.turns.TryLock(id); free {
		return unlock, nil
	}
	if n := p.turns.Waiting(id); n >= p.opts.Settings.MaxQueued {
		return nil, &CapacityError{
			Message:    fmt.Sprintf("%d commands wait for their turn in sandbox %q, which is as many as may", n, id.key),
			RetryAfter: time.Second,
		}
	}
	p.hurry(id)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.registry.running, func() { cancel(errClosing) })()
	return p.turns.Lock(ctx, id)
}

// inSandbox finds or makes the sandbox of a request, counts one more use of it, and calls f,
// which returns true if the use goes on. It tries again if the container dies before the
// command.
func (p *processes) inSandbox(ctx context.Context, req ExecRequest, u use, f func(*Access, ExecResult) (bool, error)) error {
	var err error
	for range startAttempts {
		if err = p.inSandboxOnce(ctx, req, u, f); !errors.Is(err, errDied) {
			break
		}
	}
	return err
}

func (p *processes) inSandboxOnce(ctx context.Context, req ExecRequest, u use, f func(*Access, ExecResult) (bool, error)) error {
	rec, made, err := p.sandboxFor(ctx, req)
	if err != nil {
		return err
	}
	a, err := p.registry.acquire(rec, u)
	var full *CapacityError
	if m := monitorOf(rec); errors.As(err, &full) && m.polls() { // some may have ended since its last look
		m.look(ctx)
		a, err = p.registry.acquire(rec, u)
	}
	if err != nil {
		return err
	}
	goesOn := false
	defer func() {
		if !goesOn {
			a.Close()
		}
	}()
	goesOn, err = f(a, made)
	return err
}

// sandboxFor returns the sandbox that a command is to run in. It makes it, or makes it again, as
// needed.
func (p *processes) sandboxFor(ctx context.Context, req ExecRequest) (*record, ExecResult, error) {
	var res ExecResult
	id, err := parseID(req.Tenant, req.Key)
	if err != nil {
		return nil, res, err
	}
	if rec := p.registry.recordOf(id); rec != nil { // over its quota, it isn't even made again
		if sb := p.registry.snapshot(rec); sb.Status == StatusStopped {
			if err := p.quotas.quotaLeft(ctx, sb, false); err != nil {
				return nil, res, err
			}
		}
	}
	if req.Create != nil {
		create := *req.Create
		create.Tenant, create.Key = id.tenant, id.key
		made, err := p.registry.observeCreate(ctx, create, true)
		if err != nil {
			return nil, res, err
		}
		res.Created, res.Recreated, res.Overridden = made.Result == ResultCreated, made.Recreated, made.Sandbox.Overridden
	}
	rec, made, err := p.registry.awake(ctx, id)
	res.Recreated = res.Recreated || made
	return rec, res, err
}

// prepare checks that a command may start in a sandbox, and returns its directory.
func (p *processes) prepare(ctx context.Context, cmd *command, sb Sandbox) (cwd string, err error) {
	if err := p.quotas.quotaLeft(ctx, sb, false); err != nil {
		return "", err
	}
	return policy.WorkingDir(sb.Spec, cmd.req.WorkingDir)
}

// run runs the command and returns how it ended.
func (p *processes) run(ctx context.Context, cmd *command, a *Access, res ExecResult) (ExecResult, error) {
	sb := a.sb
	cwd, err := p.prepare(ctx, cmd, sb)
	if err != nil {
		return res, err
	}
	timeout, clamped, err := p.opts.Policy().ExecTimeout(sb.Spec.Profile, cmd.req.Timeout)
	if err != nil {
		return res, err
	}
	res.SessionID = sb.SessionID
	res.Backend = p.engine.backend()
	res.Timeout = timeout
	res.QuotaEnforcement = sb.Enforcement.WorkspaceQuota
	res.Overridden = slices.Concat(res.Overridden, cmd.overridden, clamped)

	stdout, stderr := cmd.captures()
	exec := runtime.Exec{
		Command: cmd.req.Command, Env: cmd.traced(ctx, p.opts, sb), WorkingDir: cwd, User: sb.Spec.User,
		Stdout: stdout, Stderr: stderr,
	}
	if len(cmd.req.Stdin) > 0 {
		exec.Stdin = bytes.NewReader(cmd.req.Stdin)
	}
	start := time.Now()
	runCtx, cancel := context.WithTimeoutCause(ctx, timeout, errTimedOut)
	defer cancel()
	out, err := ask(runCtx, p.engine, "exec", func(ctx context.Context) (runtime.ExecResult, error) {
		return p.opts.Runtime.Exec(ctx, sb.ContainerID, exec)
	})
	res.Duration = time.Since(start)
	res.Path, res.CPUTime, res.PeakMemoryBytes = cmp.Or(out.Path, runtime.PathEngine), out.CPUTime, out.PeakMemoryBytes

	if errors.Is(err, runtime.ErrNotKilled) && !errdefs.IsUnavailable(err) {
		// What can't be killed alone goes with its sandbox. If the engine went away, its
		// containers went with it, or live on as they are.
		res.SessionTerminated = true
		if derr := p.registry.terminate(ctx, a.rec, sb); derr != nil {
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
	default:
		return res, monitorOf(a.rec).notRun(ctx, sb, err)
	}
	cmd.collect(&res, stdout, stderr)
	return res, p.measureAfter(ctx, a.rec, sb, &res)
}

// notRun returns the meaning of an error of Runtime.Exec.
func (m *monitor) notRun(ctx context.Context, sb Sandbox, err error) error {
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err):
		return m.whyNotStarted(ctx, sb, err)
	case errdefs.IsUnavailable(err):
		return &UnavailableError{Err: fmt.Errorf("run in sandbox %s: %w", sb.Key, err)}
	case errdefs.IsResourceExhausted(err):
		if dead := m.registry.checkAlive(ctx, m.rec, sb); dead != nil { // where nothing can be started either
			return dead
		}
		return noRoom(sb)
	default:
		return fmt.Errorf("run in sandbox %s: %w", sb.Key, err)
	}
}

// measureAfter measures the workspace after a command. Over the quota, it stops the sandbox and
// the result says so; the files stay.
func (p *processes) measureAfter(ctx context.Context, rec *record, sb Sandbox, res *ExecResult) error {
	ctx = context.WithoutCancel(ctx) // no caller avoids it by leaving
	var over *QuotaError
	err := p.quotas.quotaLeft(ctx, sb, true)
	if !errors.As(err, &over) {
		return err
	}
	sb = p.registry.enforced(rec, sb)
	res.QuotaExceeded, res.QuotaEnforcement = true, sb.Enforcement.WorkspaceQuota
	return p.registry.stopOverQuota(ctx, rec, sb)
}

// whyNotStarted asks the engine about a container that refused to start a command. The refusal
// may come before the engine knows of the container's end; then it waits for that.
func (m *monitor) whyNotStarted(ctx context.Context, sb Sandbox, refusal error) error {
	for until, wait := time.Now().Add(endKnown), askFirst; ; {
		if err := m.registry.checkAlive(ctx, m.rec, sb); err != nil {
			return err
		}
		if !errdefs.IsFailedPrecondition(refusal) || time.Now().After(until) {
			break
		}
		if err := m.sleep(ctx, &wait, nil); err != nil {
			return err
		}
	}
	// It lives, and the engine has lost the command: it was restarted in between, say.
	return &UnavailableError{Err: errors.New("run in sandbox " + sb.Key + ": " + refusal.Error())} // without its class
}

// sleep waits before the next attempt, or until wake is closed, and doubles the wait.
func (p *processes) sleep(ctx context.Context, wait *time.Duration, wake <-chan struct{}) error {
	timer := time.NewTimer(*wait)
	defer timer.Stop()
	*wait = min(2**wait, askMost)
	select {
	case <-timer.C:
	case <-wake:
	case <-p.registry.running.Done():
		return errClosing
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// checkCommand checks what can be checked without a sandbox.
func checkCommand(pol *policy.Policy, req ExecRequest) (*command, error) {
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
	env, overridden, err := pol.ExecEnv(req.Env)
	if err != nil {
		return nil, err
	}
	cmd.overridden = overridden
	for _, name := range slices.Sorted(maps.Keys(env)) {
		cmd.env = append(cmd.env, name+"="+env[name])
	}
	return cmd, nil
}

// traced returns the environment of the command, with the W3C trace context as TRACEPARENT and
// TRACESTATE. It adds them if there is one, neither the caller nor the operator set either,
// and the policy lets a request set them.
func (c *command) traced(ctx context.Context, opts *Options, sb Sandbox) []string {
	fields := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, fields)
	if len(fields) == 0 {
		return c.env
	}
	vars := map[string]string{}
	for name, value := range fields {
		name = strings.ToUpper(name) // OpenTelemetry's form for environments
		for _, set := range []map[string]string{c.req.Env, sb.Spec.Env, opts.Settings.Env} {
			if _, ok := set[name]; ok {
				return c.env
			}
		}
		vars[name] = value
	}
	judged, overridden, err := opts.Policy().ExecEnv(vars)
	if err != nil || len(overridden) > 0 {
		return c.env
	}
	env := slices.Clone(c.env)
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		env = append(env, name+"="+judged[name])
	}
	return env
}
