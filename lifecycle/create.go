package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Bounds of what a caller can have kept with a sandbox.
const (
	maxMetadata      = 64
	maxMetadataName  = 128
	maxMetadataValue = 4096
	maxAgentID       = 256
)

// failureKept is how long a failed create that was answered "pulling" waits to
// be told.
const failureKept = 10 * time.Minute

// wanted is a judged create.
type wanted struct {
	id         keyID
	spec       policy.Spec
	overridden []policy.Override
	metadata   map[string]string
	agentID    string
	volume     string
	ownEnv     bool // the request brings its own environment
	max        int  // the caller's own cap on sandboxes; 0 is none
}

// flight is a create under way. It holds its key, and outlives its callers.
type flight struct {
	want    *wanted
	pulling chan struct{} // closed when it turns out that the image must be pulled
	done    chan struct{} // closed when the fields below are set
	result  CreateResult
	err     error

	cancel    context.CancelCauseFunc     // ends it, with nothing made
	starting  Sandbox                     // what Get shows meanwhile; never changed
	recreated bool                        // the key's live sandbox had died
	progress  func() runtime.PullProgress // set before pulling is closed
}

// Create answers the tenant's sandbox for a key, and makes it if there is none.
//
// Errors: *InvalidError, *policy.DeniedError, *ConflictError, *CapacityError,
// *PullingError, *StartError (errors.As finds the engine's cause), *UnavailableError.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (CreateResult, error) {
	return m.observeCreate(ctx, req, false)
}

// observeCreate is Create with what it tells of itself. With patient, an image
// that is being pulled is waited for.
func (m *Manager) observeCreate(ctx context.Context, req CreateRequest, patient bool) (CreateResult, error) {
	ctx, span := m.tracer.Start(ctx, "sandbox.create", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	res, err := m.create(ctx, req, patient)
	var conflict *ConflictError
	var pulling *PullingError
	switch {
	case err == nil:
		span.SetAttributes(
			attribute.String("berm.session_id", res.Sandbox.SessionID),
			attribute.String("container.id", res.Sandbox.ContainerID),
			attribute.String("berm.result", string(res.Result)))
		if res.Result == ResultReused { // the others were told of when they were made
			m.metrics.creates.WithLabelValues(string(ResultReused)).Inc()
			m.log.InfoContext(ctx, "sandbox_reused", sandboxAttrs(res.Sandbox)...)
		}
	case errors.As(err, &pulling):
		m.log.InfoContext(ctx, "sandbox_pulling", sandboxAttrs(pulling.Sandbox)...)
	case errors.As(err, &conflict):
		failSpan(span, err)
		m.metrics.creates.WithLabelValues(string(ResultConflict)).Inc()
		m.log.WarnContext(ctx, "sandbox_conflict", "tenant", req.Tenant, "key", conflict.Key,
			"session_id", conflict.SessionID, "container_id", conflict.ContainerID, "differences", conflict.Differences)
	default:
		failSpan(span, err)
		m.metrics.creates.WithLabelValues(string(ResultError)).Inc()
		m.log.WarnContext(ctx, "sandbox_create_failed", "tenant", req.Tenant, "key", req.Key, "error", err)
	}
	return res, err
}

func (m *Manager) create(ctx context.Context, req CreateRequest, patient bool) (CreateResult, error) {
	want, err := m.judge(m.opts.Policy(), req)
	if err != nil {
		return CreateResult{}, err
	}
	if err := m.available(); err != nil {
		return CreateResult{}, err
	}
	f, err := m.hold(ctx, want.id, true)
	if err != nil {
		return CreateResult{}, err
	}
	joined := f != nil
	if joined {
		if d := want.differences(f.starting, false); len(d) > 0 {
			return CreateResult{}, &ConflictError{Key: want.id.key, SessionID: f.starting.SessionID, Differences: d}
		}
	} else {
		now := time.Now()
		old := m.recordOf(want.id)
		if old != nil {
			if sb := m.snapshot(old); !sb.Expired(now) {
				if d := want.differences(sb, old.adopted); len(d) > 0 {
					m.drop(want.id)
					return CreateResult{}, &ConflictError{
						Key: want.id.key, SessionID: sb.SessionID, ContainerID: sb.ContainerID, Differences: d,
					}
				}
				if sb.Status != StatusStopped {
					m.drop(want.id)
					sb.Overridden = want.overridden
					return CreateResult{Sandbox: sb, Result: ResultReused}, nil
				}
				if err := want.keep(sb, m.opts.Policy()); err != nil {
					m.drop(want.id)
					return CreateResult{}, err
				}
			}
		}
		if err := m.untoldFailure(want, now); err != nil {
			m.drop(want.id)
			return CreateResult{}, err
		}
		if f, err = m.launch(ctx, want, old); err != nil {
			m.drop(want.id)
			return CreateResult{}, err
		}
	}
	res, err := m.await(ctx, f, joined, patient)
	var pulling *PullingError
	if errors.As(err, &pulling) {
		pulling.Sandbox.Overridden = want.overridden
	}
	res.Sandbox.Overridden = want.overridden // of this request, whoever's made the sandbox
	return res, err
}

// await waits for a flight to end, or to turn out long.
func (m *Manager) await(ctx context.Context, f *flight, joined, patient bool) (CreateResult, error) {
	pulling := f.pulling
	if patient {
		pulling = nil
	}
	select {
	case <-f.done:
	case <-pulling:
		select {
		case <-f.done: // both at once: the end is the better answer
		default:
			return CreateResult{}, f.pullingError()
		}
	case <-ctx.Done():
		return CreateResult{}, fmt.Errorf("create sandbox %s: %w", f.want.id.key, context.Cause(ctx))
	}
	if f.err != nil {
		m.told(f.want.id)
		return CreateResult{}, f.err
	}
	res := f.result
	if joined {
		res.Result, res.Recreated = ResultReused, false
	}
	return res, nil
}

// giveUp ends a create that waits for its image, or did.
func (f *flight) giveUp(why error) {
	select {
	case <-f.pulling:
		f.cancel(why)
	default:
	}
}

func (f *flight) pullingError() *PullingError {
	sb := f.starting
	p := f.progress()
	sb.Pull = &p
	return &PullingError{Sandbox: sb, Progress: p, RetryAfter: time.Second}
}

// untoldFailure answers how the last create of the same spec failed, once.
func (m *Manager) untoldFailure(want *wanted, now time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.slots[want.id]
	fail := s.failure
	s.failure = nil
	if fail == nil || now.Sub(fail.at) > failureKept || len(want.differences(fail.sb, false)) > 0 {
		return nil
	}
	return fail.err
}

// told notes that somebody was answered a create's failure.
func (m *Manager) told(id keyID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.slots[id]; s != nil {
		s.failure = nil
		m.freeLocked(id, s)
	}
}

// judge checks a request and asks the policy about it.
func (m *Manager) judge(pol *policy.Policy, req CreateRequest) (*wanted, error) {
	key, err := ParseKey(req.Key)
	if err != nil {
		return nil, err
	}
	if req.Tenant == "" {
		return nil, &InvalidError{Field: "tenant", Message: "is mandatory"}
	}
	if err := checkMetadata(req.Metadata); err != nil {
		return nil, err
	}
	if len(req.AgentID) > maxAgentID || strings.ContainsFunc(req.AgentID, isControl) {
		return nil, &InvalidError{Field: "agent_id", Message: fmt.Sprintf("must be at most %d bytes without control characters", maxAgentID)}
	}
	volume := req.VolumePath
	preq := req.Request
	if volume != "" {
		if !path.IsAbs(volume) {
			return nil, &InvalidError{Field: "volume_host_path", Message: "must be an absolute path"}
		}
		volume = path.Clean(volume)
		preq.ExtraMounts = append(slices.Clone(preq.ExtraMounts), policy.MountRequest{
			HostPath: volume, MountPath: m.opts.Settings.VolumePath, Mode: "rw",
		})
	}
	verdict := pol.Sandbox(preq)
	if err := verdict.Err(); err != nil {
		return nil, err
	}
	if err := m.opts.Settings.overlap(verdict.Spec); err != nil {
		return nil, err
	}
	return &wanted{
		id:         keyID{req.Tenant, key},
		spec:       verdict.Spec,
		overridden: verdict.Overridden,
		metadata:   maps.Clone(req.Metadata),
		agentID:    req.AgentID,
		volume:     volume,
		ownEnv:     len(req.Request.Env) > 0,
		max:        req.MaxSandboxes,
	}, nil
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f }

func checkMetadata(md map[string]string) error {
	if len(md) > maxMetadata {
		return &InvalidError{Field: "metadata", Message: fmt.Sprintf("at most %d entries", maxMetadata)}
	}
	for name, value := range md {
		if name == "" || len(name) > maxMetadataName || !utf8.ValidString(name) {
			return &InvalidError{Field: "metadata", Message: fmt.Sprintf("names must have 1 to %d bytes", maxMetadataName)}
		}
		if len(value) > maxMetadataValue || !utf8.ValidString(value) {
			return &InvalidError{Field: "metadata." + name, Message: fmt.Sprintf("values must have at most %d bytes", maxMetadataValue)}
		}
	}
	return nil
}

// differences compares what is wanted with what is there. Of an adopted sandbox,
// only what the old service knew can be compared.
func (w *wanted) differences(sb Sandbox, adopted bool) []policy.Difference {
	var d []policy.Difference
	if !adopted {
		d = policy.Diff(sb.Spec, w.spec)
	}
	if sb.AgentID != w.agentID {
		d = append(d, policy.Difference{Field: "agent_id", Current: sb.AgentID, Requested: w.agentID})
	}
	if sb.VolumePath != w.volume {
		d = append(d, policy.Difference{Field: "volume_host_path", Current: sb.VolumePath, Requested: w.volume})
	}
	return d
}

// keep carries over what a sandbox that is made anew doesn't lose, as far as the
// policy in force lets it.
func (w *wanted) keep(sb Sandbox, pol *policy.Policy) (err error) {
	if len(w.metadata) == 0 {
		w.metadata = sb.Metadata
	}
	if !w.ownEnv {
		w.spec.Env, _, err = pol.ExecEnv(sb.Spec.Env)
	}
	return err
}

// judgeAgain asks the policy in force about a sandbox that an earlier one allowed.
func (m *Manager) judgeAgain(sb Sandbox, adopted bool) (*wanted, error) {
	s := sb.Spec
	req := CreateRequest{
		Tenant: sb.Tenant, Key: sb.Key, Metadata: sb.Metadata, AgentID: sb.AgentID, VolumePath: sb.VolumePath,
		Request: policy.Request{
			Profile: s.Profile, Image: &s.Image, Network: &s.Network, HostPath: &s.HostPath, HostPathMode: &s.HostPathMode,
			MountPath: &s.MountPath, CPUs: &s.CPUs, MemoryMB: &s.MemoryMB, PidsLimit: &s.PidsLimit,
			ReadOnlyRootfs: &s.ReadOnlyRootfs, WorkspaceQuotaMB: &s.WorkspaceQuotaMB, Env: s.Env, TTL: &s.TTL, IdleTTL: &s.IdleTTL,
		},
	}
	for _, mt := range s.ExtraMounts {
		if sb.VolumePath == "" || mt.MountPath != m.opts.Settings.VolumePath { // that one comes from VolumePath
			req.Request.ExtraMounts = append(req.Request.ExtraMounts, policy.MountRequest{HostPath: mt.HostPath, MountPath: mt.MountPath, Mode: mt.Mode})
		}
	}
	want, err := m.judge(m.opts.Policy(), req)
	if err != nil {
		return nil, err
	}
	if d := want.differences(sb, adopted); len(d) > 0 {
		return nil, &ConflictError{Key: sb.Key, SessionID: sb.SessionID, ContainerID: sb.ContainerID, Differences: d}
	}
	want.overridden = sb.Overridden
	return want, nil
}

func sandboxAttrs(sb Sandbox) []any {
	return []any{"tenant", sb.Tenant, "key", sb.Key, "session_id", sb.SessionID, "container_id", sb.ContainerID}
}
