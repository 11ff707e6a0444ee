package sandboxapi

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

const jsonType = "application/json"

// reply answers v, unless there is an error.
func reply(w http.ResponseWriter, status int, v any, err error) error {
	if err != nil {
		return err
	}
	return proxy.WriteJSON(w, status, jsonType, v)
}

// noContent answers with status 204, unless there is an error.
func noContent(w http.ResponseWriter, err error) error {
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
	}
	return err
}

// put is get-or-create.
func (a *api) put(w http.ResponseWriter, r *http.Request, body apitype.SandboxRequest) error {
	_, key := target(r)
	res, err := a.Manager.Create(r.Context(), createRequest(r, key, body))
	if pulling, ok := errors.AsType[*lifecycle.PullingError](err); ok {
		w.Header().Set("Location", location(key))
		proxy.SetRetryAfter(w, max(pulling.RetryAfter, time.Second))
		sb := pulling.Sandbox
		sb.Pull = &pulling.Progress
		return writeSandbox(w, r, http.StatusAccepted, sandbox(sb), nil)
	}
	if err != nil {
		return err
	}
	out := sandbox(res.Sandbox)
	out.Result, out.Recreated = string(res.Result), res.Recreated
	status := http.StatusOK
	if res.Result != lifecycle.ResultReused {
		status = http.StatusCreated
		w.Header().Set("Location", location(key))
	}
	return writeSandbox(w, r, status, out, nil)
}

func (a *api) get(w http.ResponseWriter, r *http.Request) error {
	tenant, key := target(r)
	sb, err := a.Manager.Get(r.Context(), tenant, key)
	return writeSandbox(w, r, http.StatusOK, sandbox(sb), err)
}

// delete answers in the old service's shape, with status 200 even if there was no sandbox.
func (a *api) delete(w http.ResponseWriter, r *http.Request) error {
	tenant, key := target(r)
	res, err := a.Manager.Delete(r.Context(), tenant, key)
	if err != nil {
		return err
	}
	ex := proxy.ExchangeOf(r.Context())
	ex.SessionID, ex.ContainerID = res.SessionID, res.ContainerID
	return reply(w, http.StatusOK, apitype.DeleteResult{
		ChatID: key, Result: string(res.Result), SessionID: orNil(res.SessionID), ContainerID: orNil(res.ContainerID),
	}, nil)
}

func (a *api) renew(w http.ResponseWriter, r *http.Request, body apitype.RenewRequest) error {
	tenant, key := target(r)
	var ttl time.Duration
	if body.TTL != nil {
		if ttl = time.Duration(*body.TTL); ttl <= 0 {
			return &lifecycle.InvalidError{Field: "ttl", Message: "must be more than 0"}
		}
	}
	sb, err := a.Manager.Renew(r.Context(), tenant, key, ttl)
	return writeSandbox(w, r, http.StatusOK, sandbox(sb), err)
}

// change returns a handler of a call that has no body and answers the sandbox.
func (a *api) change(f func(manager, context.Context, string, string) (lifecycle.Sandbox, error)) proxy.Handler {
	return a.existing(withBody(true, func(w http.ResponseWriter, r *http.Request, _ struct{}) error {
		tenant, key := target(r)
		sb, err := f(a.Manager, r.Context(), tenant, key)
		return writeSandbox(w, r, http.StatusOK, sandbox(sb), err)
	}))
}

func (a *api) stats(w http.ResponseWriter, r *http.Request) error {
	tenant, key := target(r)
	s, err := a.Manager.Stats(r.Context(), tenant, key)
	return reply(w, http.StatusOK, apitype.Stats{
		Time: s.Time.UTC(), CPUSeconds: s.CPUUsage.Seconds(), MemoryBytes: s.MemoryBytes, MemoryLimitBytes: s.MemoryLimitBytes,
		Pids: s.Pids, RxBytes: s.RxBytes, TxBytes: s.TxBytes,
	}, err)
}

// createRequest translates a body, and adds the caller.
func createRequest(r *http.Request, key string, b apitype.SandboxRequest) lifecycle.CreateRequest {
	c := proxy.ExchangeOf(r.Context()).Caller
	return lifecycle.CreateRequest{
		Tenant: c.Tenant, Key: key, Metadata: b.Metadata, AgentID: value(b.AgentID), VolumePath: value(b.VolumeHostPath),
		MaxSandboxes: c.MaxSandboxes, Request: PolicyRequest(b),
	}
}

// PolicyRequest is the part of a body that the policy judges.
func PolicyRequest(b apitype.SandboxRequest) policy.Request {
	req := policy.Request{
		Profile: value(b.Profile), Image: b.Image, Network: b.Network,
		HostPath: b.HostPath, HostPathMode: b.HostPathMode, MountPath: b.MountPath,
		CPUs: b.CPUs, MemoryMB: b.MemoryMB, PidsLimit: b.PidsLimit, ReadOnlyRootfs: b.ReadOnlyRootfs,
		WorkspaceQuotaMB: b.WorkspaceQuotaMB, Env: b.Env,
		TTL: (*time.Duration)(b.TTL), IdleTTL: (*time.Duration)(b.IdleTTL),
	}
	for _, m := range b.ExtraMounts {
		req.ExtraMounts = append(req.ExtraMounts, policy.MountRequest(m))
	}
	return req
}

func sandbox(sb lifecycle.Sandbox) apitype.Sandbox {
	out := apitype.Sandbox{
		Key: sb.Key, Tenant: sb.Tenant, SessionID: sb.SessionID, ContainerID: sb.ContainerID, Status: string(sb.Status),
		Spec: spec(sb.Spec), Overridden: overrides(sb.Overridden), Metadata: map[string]string{},
		AgentID: sb.AgentID, VolumeHostPath: sb.VolumePath,
		Endpoint: endpoint(sb.Endpoint), Enforcement: apitype.Enforcement(sb.Enforcement),
		CreatedAt: sb.CreatedAt.UTC(), ExpiresAt: sb.ExpiresAt.UTC(), Deadline: sb.Deadline.UTC(), LastUsedAt: sb.LastUsedAt.UTC(),
	}
	maps.Copy(out.Metadata, sb.Metadata)
	if sb.Error != "" {
		// An engine's error may contain secrets.
		out.Error = "the sandbox could not be made; create it again to be told why"
	}
	if !sb.IdleExpiresAt.IsZero() {
		t := sb.IdleExpiresAt.UTC()
		out.IdleExpiresAt = &t
	}
	if sb.Pull != nil {
		out.Pull = pull(*sb.Pull)
	}
	return out
}

func spec(s policy.Spec) apitype.Spec {
	out := apitype.Spec{
		Profile: s.Profile, Image: s.Image, Network: s.Network, HostPath: s.HostPath, HostPathMode: s.HostPathMode, MountPath: s.MountPath,
		ExtraMounts: []apitype.Mount{}, CPUs: s.CPUs, MemoryMB: s.MemoryMB, PidsLimit: s.PidsLimit, ReadOnlyRootfs: s.ReadOnlyRootfs,
		WorkspaceQuotaMB: s.WorkspaceQuotaMB, TmpfsMB: s.TmpfsMB, EnvNames: slices.AppendSeq([]string{}, maps.Keys(s.Env)),
		User: s.User, CapAdd: s.CapAdd, RuntimeClass: s.RuntimeClass, Agent: s.Agent, Userns: s.Userns,
		TTL: apitype.Duration(s.TTL), IdleTTL: apitype.Duration(s.IdleTTL), MaxLifetime: apitype.Duration(s.MaxLifetime),
	}
	slices.Sort(out.EnvNames)
	for _, m := range s.ExtraMounts {
		out.ExtraMounts = append(out.ExtraMounts, apitype.Mount{HostPath: m.HostPath, MountPath: m.MountPath, Mode: m.Mode})
	}
	return out
}

func overrides(in []policy.Override) []apitype.Override {
	return each(in, func(o policy.Override) apitype.Override { return apitype.Override(o) })
}

func endpoint(e lifecycle.Endpoint) *apitype.Endpoint {
	if e.IP == "" {
		return nil
	}
	return &apitype.Endpoint{IP: e.IP, Port: e.Port}
}

func pull(p runtime.PullProgress) *apitype.Pull {
	return &apitype.Pull{Status: p.Status, CurrentBytes: p.CurrentBytes, TotalBytes: p.TotalBytes}
}

// writeSandbox answers a sandbox, and adds its IDs to the request's log line.
func writeSandbox(w http.ResponseWriter, r *http.Request, status int, sb apitype.Sandbox, err error) error {
	if err == nil {
		ex := proxy.ExchangeOf(r.Context())
		ex.SessionID, ex.ContainerID = sb.SessionID, sb.ContainerID
	}
	return reply(w, status, sb, err)
}

func location(key string) string { return base + "/" + url.PathEscape(key) }

func orNil(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func value(p *string) string {
	if p == nil {
		return ""
	}
	return *p
}
