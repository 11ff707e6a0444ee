package sandboxapi

import (
	"net/http"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

// status answers the state of the service, with the counts of the caller's tenant.
func (a *api) status(w http.ResponseWriter, r *http.Request) error {
	c := proxy.ExchangeOf(r.Context()).Caller
	return reply(w, http.StatusOK, a.statusOf(c, a.Manager.Status(r.Context(), c.Tenant), a.Policy()), nil)
}

func (a *api) statusOf(c proxy.Caller, s lifecycle.ServiceStatus, pol *policy.Policy) apitype.Status {
	pr, _ := pol.Profile("")
	return apitype.Status{
		Version: a.Version, Tenant: c.Tenant,
		Backend:         apitype.Backend{Name: s.Backend.Backend, Available: s.Available, Reason: s.Reason, Version: s.Backend.Version},
		ActiveSandboxes: s.ActiveSandboxes, MaxSandboxes: c.MaxSandboxes, RunningProcesses: s.RunningCommands + s.RunningProcesses,
		Profile: pr.Name, Profiles: pol.Profiles(), RecentErrors: len(a.gate.RecentErrors(c.Tenant)),
		Limits: apitype.Limits{
			CPUs: pr.CPUs, MaxCPUs: pr.MaxCPUs, MemoryMB: pr.MemoryMB, MaxMemoryMB: pr.MaxMemoryMB,
			PidsLimit: pr.PidsLimit, MaxPidsLimit: pr.MaxPidsLimit,
			Timeout: apitype.Duration(pr.Timeout), MaxTimeout: apitype.Duration(pr.MaxTimeout),
			TTL: apitype.Duration(pr.TTL), IdleTTL: apitype.Duration(pr.IdleTTL),
		},
	}
}

// errors answers the tenant's recent errors.
func (a *api) errors(w http.ResponseWriter, r *http.Request) error {
	recent := a.gate.RecentErrors(proxy.ExchangeOf(r.Context()).Caller.Tenant)
	return reply(w, http.StatusOK, apitype.ErrorList{Errors: each(recent, func(e proxy.RecentError) apitype.ErrorEntry {
		return apitype.ErrorEntry{
			Time: e.Time, Type: e.Code, Status: e.Status, Message: e.Message, Route: e.Route, Key: e.Key, RequestID: e.RequestID,
		}
	})}, nil)
}

// health answers that the process is alive.
func (a *api) health(w http.ResponseWriter, _ *http.Request) error {
	return reply(w, http.StatusOK, apitype.Health{Status: "ok", Version: a.Version}, nil)
}

// ready answers whether calls can succeed.
func (a *api) ready(w http.ResponseWriter, r *http.Request) error {
	if proxy.Draining(r.Context()) {
		return proxy.ErrGoingDown
	}
	if err := a.Manager.Ready(r.Context()); err != nil {
		f := proxy.FaultOf(&lifecycle.UnavailableError{Err: err})
		f.Detail = "the service isn't ready: the container engine or the store can't be used"
		return &f
	}
	return reply(w, http.StatusOK, apitype.Health{Status: "ready", Version: a.Version}, nil)
}

func (a *api) openAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", jsonType)
	_, _ = w.Write(document)
	return nil
}

func (a *api) page(w http.ResponseWriter, _ *http.Request) error {
	page, err := docsPage()
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", docsPolicy())
	_, _ = w.Write(page)
	return nil
}
