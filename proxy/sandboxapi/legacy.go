package sandboxapi

import (
	"errors"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

// legacyCreate is the old service's get-or-create, errors included.
func (a *api) legacyCreate(w http.ResponseWriter, r *http.Request) error {
	if err := knownQuery(r); err != nil {
		return legacyFault(err)
	}
	var body apitype.LegacyCreateRequest
	if err := proxy.DecodeBody(w, r, proxy.MaxBody, false, &body); err != nil {
		return legacyFault(err)
	}
	req, err := legacyRequest(r, body)
	if err != nil {
		return legacyFault(err)
	}
	res, err := a.Manager.Create(r.Context(), req)
	if err != nil {
		return legacyFault(err)
	}
	sb := res.Sandbox
	ex := proxy.ExchangeOf(r.Context())
	ex.SessionID, ex.ContainerID = sb.SessionID, sb.ContainerID
	return reply(w, http.StatusOK, apitype.LegacySandbox{
		SessionID: sb.SessionID, ChatID: sb.Key, AgentID: sb.AgentID, VolumeHostPath: sb.VolumePath, ContainerID: sb.ContainerID,
		Endpoint: endpoint(sb.Endpoint), Status: string(sb.Status), ExpiresAt: sb.ExpiresAt.UTC(),
	}, nil)
}

func legacyRequest(r *http.Request, b apitype.LegacyCreateRequest) (lifecycle.CreateRequest, error) {
	id, err := uuid.Parse(b.ChatID)
	if err != nil {
		return lifecycle.CreateRequest{}, &lifecycle.InvalidError{Field: "chat_id", Message: "must be a UUID"}
	}
	if strings.TrimSpace(b.AgentID) == "" {
		return lifecycle.CreateRequest{}, &lifecycle.InvalidError{Field: "agent_id", Message: "must not be blank"}
	}
	if b.VolumeHostPath == "" {
		return lifecycle.CreateRequest{}, &lifecycle.InvalidError{Field: "volume_host_path", Message: "must be an absolute path"}
	}
	proxy.ExchangeOf(r.Context()).Key = id.String()
	return createRequest(r, id.String(), apitype.SandboxRequest{AgentID: &b.AgentID, VolumeHostPath: &b.VolumeHostPath}), nil
}

// legacyFault maps an error to one that the old service could answer.
func legacyFault(err error) error {
	f := proxy.FaultOf(err)
	switch f.Code {
	case "malformed", "unsupported_media_type", "too_large", "validation":
		f.Status = http.StatusUnprocessableEntity
	case "sandbox_conflict":
		f.Detail = f.Code
	case "sandbox_start_failed", "backend_unavailable", "image_pulling", "capacity", "policy_denied":
		if denied, ok := errors.AsType[*policy.DeniedError](err); ok {
			f.Reasons = denied.Reasons
		}
		f.Status, f.Detail = http.StatusServiceUnavailable, "sandbox_start_failed: "+f.Detail
	default:
		f.Status = http.StatusInternalServerError
	}
	return &f
}
