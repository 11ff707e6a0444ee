package lifecycle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// errTimedOut is the cause with which a command's timeout ends its context.
var errTimedOut = errors.New("the command's timeout ran out")

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
	p.engine.metrics.command(res.Status)
	return res, nil
}

func (p *processes) exec(ctx context.Context, req ExecRequest) (ExecResult, error) {
	cmd, err := checkCommand(p.opts.Policy(), req)
	if err != nil {
		return ExecResult{}, err
	}
	id, err := p.registry.open(req.Tenant, req.Key)
	if err != nil {
		return ExecResult{}, err
	}
	if req.Serialize {
		unlock, err := p.takeTurn(ctx, id)
		if err != nil {
			return ExecResult{}, err
		}
		defer unlock()
	}
	var res ExecResult
	err = p.inSandbox(ctx, req, useCommand, func(rec *record, sb Sandbox, made ExecResult) (bool, error) {
		var err error
		res, err = p.run(ctx, cmd, rec, sb, made)
		return false, err
	})
	return res, err
}

// takeTurn waits until all earlier callers of the same key have ended their turn.
func (p *processes) takeTurn(ctx context.Context, id keyID) (unlock func(), err error) {
	if unlock, free := p.turns.TryLock(id); free {
		return unlock, nil
	}
	if n := p.turns.Waiting(id); n >= maxQueued {
		return nil, &CapacityError{
			Message:    fmt.Sprintf("%d commands wait for their turn in sandbox %q, which is as many as may", n, id.key),
			RetryAfter: time.Second,
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.registry.running, func() { cancel(errClosing) })()
	return p.turns.Lock(ctx, id)
}

// inSandbox finds or makes the sandbox of a request, counts one more use of it, and calls f. The
// use goes on after f if f returns true. If the container dies before the command, it retries.
func (p *processes) inSandbox(ctx context.Context, req ExecRequest, u use, f func(*record, Sandbox, ExecResult) (bool, error)) error {
	var err error
	for range startAttempts {
		if err = p.inSandboxOnce(ctx, req, u, f); !errors.Is(err, errDied) {
			break
		}
	}
	return err
}

func (p *processes) inSandboxOnce(ctx context.Context, req ExecRequest, u use, f func(*record, Sandbox, ExecResult) (bool, error)) error {
	rec, made, err := p.sandboxFor(ctx, req)
	if err != nil {
		return err
	}
	sb, leave, err := p.registry.acquire(rec, u)
	if err != nil {
		return err
	}
	goesOn := false
	defer func() {
		if !goesOn {
			leave()
		}
	}()
	goesOn, err = f(rec, sb, made)
	return err
}

// sandboxFor returns the sandbox for a command. It makes the sandbox if needed, also again after
// its container died.
func (p *processes) sandboxFor(ctx context.Context, req ExecRequest) (*record, ExecResult, error) {
	var res ExecResult
	id, err := parseID(req.Tenant, req.Key)
	if err != nil {
		return nil, res, err
	}
	if _, sb := p.registry.recordOf(id); sb.Status == StatusStopped { // over its quota, it isn't made again
		if err := p.quotas.Left(ctx, subject(sb), false); err != nil {
			return nil, res, err
		}
	}
	if req.Create != nil {
		create := *req.Create
		create.Tenant, create.Key, create.Patient = id.tenant, id.key, true
		made, err := p.registry.Create(ctx, create)
		if err != nil {
			return nil, res, err
		}
		res.Created, res.Recreated, res.Overridden = made.Result == ResultCreated, made.Recreated, made.Sandbox.Overridden
	}
	rec, made, err := p.registry.awake(ctx, id)
	res.Recreated = res.Recreated || made
	return rec, res, err
}

// prepare checks that a command may start in a sandbox, and returns its working directory.
func (p *processes) prepare(ctx context.Context, cmd *command, sb Sandbox) (cwd string, err error) {
	if err := p.quotas.Left(ctx, subject(sb), false); err != nil {
		return "", err
	}
	return policy.WorkingDir(sb.Spec, cmd.req.WorkingDir)
}

// run runs the command and returns how it ended.
func (p *processes) run(ctx context.Context, cmd *command, rec *record, sb Sandbox, res ExecResult) (ExecResult, error) {
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
		return p.insider.Exec(ctx, sb.ContainerID, exec)
	})
	res.Duration = time.Since(start)
	res.CPUTime, res.PeakMemoryBytes = out.CPUTime, out.PeakMemoryBytes

	if errors.Is(err, runtime.ErrNotKilled) && !errdefs.IsUnavailable(err) {
		// The command can only be killed with its sandbox. If the engine is gone, there is
		// nothing to do: its containers are gone too, or live on.
		res.SessionTerminated = true
		if derr := p.registry.terminate(ctx, rec, sb); derr != nil {
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
		return res, monitorOf(rec).handle(sb, KindExec, "").notStarted(ctx, err)
	}
	cmd.collect(&res, stdout, stderr)
	return res, p.measureAfter(ctx, rec, sb, &res)
}

// measureAfter measures the workspace after a command. If it is over its quota, measureAfter stops
// the sandbox and sets QuotaExceeded. The files stay.
func (p *processes) measureAfter(ctx context.Context, rec *record, sb Sandbox, res *ExecResult) error {
	ctx = context.WithoutCancel(ctx) // a caller can't avoid the measurement by leaving
	err := p.quotas.Left(ctx, subject(sb), true)
	if _, over := errors.AsType[*QuotaError](err); !over {
		return err
	}
	sb = p.registry.enforced(rec, sb)
	res.QuotaExceeded, res.QuotaEnforcement = true, sb.Enforcement.WorkspaceQuota
	return p.registry.stopOverQuota(ctx, rec, sb)
}
