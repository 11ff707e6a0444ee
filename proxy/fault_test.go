package proxy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

func TestFaultOf(t *testing.T) {
	ended, end := context.WithCancelCause(t.Context())
	end(proxy.ErrGoingDown)
	inner := errors.New("dial unix /var/run/docker.sock: password=hunter2")
	reason := policy.Reason{Rule: "mounts.always_refused", Message: "not /etc"}
	for name, tt := range map[string]struct {
		err    error
		status int
		code   string
		retry  bool
	}{
		"invalid":           {&lifecycle.InvalidError{Field: "x", Message: "bad"}, 422, "validation", false},
		"denied":            {&policy.DeniedError{Reasons: []policy.Reason{reason}}, 403, "policy_denied", false},
		"denied as invalid": {&policy.DeniedError{Reasons: []policy.Reason{{Invalid: true, Message: "bad"}}}, 422, "validation", false},
		"denied, partly invalid": {&policy.DeniedError{Reasons: []policy.Reason{reason, {Invalid: true}}},
			403, "policy_denied", false},
		"not found":   {&lifecycle.NotFoundError{Key: "k"}, 404, "not_found", false},
		"conflict":    {&lifecycle.ConflictError{Key: "k", Differences: []policy.Difference{{Field: "cpus"}}}, 409, "sandbox_conflict", false},
		"state":       {&lifecycle.StateError{Key: "k", Status: "paused"}, 409, "wrong_state", false},
		"capacity":    {&lifecycle.CapacityError{Message: "full"}, 429, "capacity", true},
		"quota":       {&lifecycle.QuotaError{UsedBytes: 2, QuotaBytes: 1}, 507, "quota_exceeded", false},
		"pulling":     {&lifecycle.PullingError{}, 503, "image_pulling", true},
		"unavailable": {&lifecycle.UnavailableError{Err: inner}, 503, "backend_unavailable", true},
		"unavailable for what is missing": {&lifecycle.UnavailableError{Err: &lifecycle.NotFoundError{Key: "k"}},
			503, "backend_unavailable", true},
		"unavailable by class":  {fmt.Errorf("create: %w: %w", errdefs.ErrUnavailable, inner), 503, "backend_unavailable", true},
		"deadline":              {fmt.Errorf("x: %w", context.DeadlineExceeded), 503, "backend_unavailable", true},
		"going down":            {proxy.Explained(ended, &proxy.Fault{Status: 404, Code: "other"}), 503, "going_down", true},
		"shutting down":         {fmt.Errorf("x: %w", context.Canceled), 503, "backend_unavailable", true},
		"not implemented":       {errdefs.ErrNotImplemented, 501, "not_supported", false},
		"start":                 {&lifecycle.StartError{Err: inner}, 503, "sandbox_start_failed", false},
		"start, no such image":  {&lifecycle.StartError{Err: errdefs.ErrNotFound}, 503, "sandbox_start_failed", false},
		"start, no directory":   {&lifecycle.StartError{Err: &fs.PathError{Op: "open", Path: "/hunter2", Err: fs.ErrNotExist}}, 503, "sandbox_start_failed", false},
		"start, refused values": {&lifecycle.StartError{Err: errdefs.ErrInvalidArgument}, 503, "sandbox_start_failed", false},
		"start, engine away":    {&lifecycle.StartError{Err: errdefs.ErrUnavailable}, 503, "backend_unavailable", true},
		"start, not given away": {&lifecycle.StartError{Err: &policy.OwnerError{Owner: policy.Owner{UID: 1}}}, 501, "not_supported", false},
		"not given away":        {&fs.PathError{Op: "symlink", Err: &policy.OwnerError{}}, 501, "not_supported", false},
		"start, denied":         {&lifecycle.StartError{Err: &policy.DeniedError{Reasons: []policy.Reason{reason}}}, 403, "policy_denied", false},
		"engine's invalid":      {errdefs.ErrInvalidArgument.WithMessage("hunter2"), 422, "validation", false},
		"engine's not found":    {errdefs.ErrNotFound.WithMessage("hunter2"), 409, "wrong_state", false},
		"engine's precondition": {errdefs.ErrFailedPrecondition.WithMessage("hunter2"), 409, "wrong_state", false},
		"too large":             {&http.MaxBytesError{Limit: 1}, 413, "too_large", false},
		"own":                   {&proxy.Fault{Status: 418, Code: "teapot", Detail: "x"}, 418, "teapot", false},
		"anything":              {inner, 500, "internal", false},
		"output gone":           {&lifecycle.GoneError{Message: "gone", FirstSeq: 7}, 410, "output_gone", false},
		"no such process":       {&lifecycle.ProcessError{ID: "x", Class: errdefs.ErrNotFound, Message: "none"}, 404, "process_not_found", false},
		"process there":         {&lifecycle.ProcessError{ID: "x", Class: errdefs.ErrAlreadyExists, Message: "runs"}, 409, "process_conflict", false},
		"process ended":         {&lifecycle.ProcessError{ID: "x", Class: errdefs.ErrFailedPrecondition, Message: "ended"}, 409, "process_ended", false},
		"no such workspace":     {&quota.NotFoundError{ID: "w"}, 404, "workspace_not_found", false},
		"workspace full":        {&quota.FullError{UsedBytes: 2, QuotaBytes: 1}, 507, "workspace_quota_exceeded", false},
		"chat too much":         {&quota.FullError{Chat: "c", QuotaBytes: 1}, 507, "workspace_quota_exceeded", false},
		"no such chat":          {&chat.NotFoundError{ID: "c"}, 404, "chat_not_found", false},
		"another's chat":        {&chat.ConflictError{ID: "c", WorkspaceID: "w"}, 409, "chat_conflict", false},
		"active":                {&lifecycle.ActiveError{Key: "c", SessionID: "s"}, 409, "chat_has_active_sandbox", false},
		"no such chat file":     {&chat.FileNotFoundError{Name: "f"}, 404, "chat_file_not_found", false},
		"chat file there":       {&chat.FileError{Name: "f", Class: errdefs.ErrAlreadyExists, Message: "is there"}, 412, "precondition_failed", false},
		"chat file, other kind": {&chat.FileError{Name: "f", Class: errdefs.ErrFailedPrecondition, Message: "is a directory"}, 409, "chat_file_wrong_kind", false},
		"chat file, no space":   {&chat.FileError{Name: "f", Class: errdefs.ErrResourceExhausted, Message: "finds no space"}, 507, "no_space", false},
		"history too large":     {&chat.TooLargeError{Limit: 1}, 413, "too_large", false},
		"storage away":          {&lifecycle.UnavailableError{Err: &chat.NotFoundError{ID: "c"}}, 503, "backend_unavailable", true},
		"no agent":              {&lifecycle.UnsupportedError{Key: "k", Err: inner}, 501, "not_supported", false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, err := range []error{tt.err, fmt.Errorf("wrapped: %w", tt.err)} {
				f := proxy.FaultOf(err)
				if f.Status != tt.status || f.Code != tt.code || (f.RetryAfter > 0) != tt.retry || f.Detail == "" {
					t.Errorf("got %d %s %v %q, want %d %s", f.Status, f.Code, f.RetryAfter, f.Detail, tt.status, tt.code)
				}
				if strings.Contains(f.Detail, "hunter2") {
					t.Errorf("it tells too much: %s", f.Detail)
				}
			}
		})
	}
	f := proxy.FaultOf(&lifecycle.CapacityError{Message: "full", RetryAfter: time.Minute})
	if f.RetryAfter != time.Minute {
		t.Errorf("the retry is after %v", f.RetryAfter)
	}
	const away = "the Docker Engine at unix:///e has not answered for 12s"
	if f := proxy.FaultOf(&lifecycle.UnavailableError{Err: inner, Message: away}); f.Detail != away || f.RetryAfter == 0 {
		t.Errorf("of an engine that is away: %+v", f)
	}
	for err, want := range map[error]string{
		&lifecycle.UnavailableError{Err: inner, Message: away}: away,
		fmt.Errorf("hunter2: %w", io.ErrUnexpectedEOF):         "the engine gave no answer (connection closed); what was asked for may be done or not",
		inner: "the container engine can't be reached or didn't answer in time",
	} {
		if f := proxy.Unreachable("the engine", err); f.Status != 503 || f.Code != "backend_unavailable" || f.Detail != want || f.RetryAfter == 0 {
			t.Errorf("unreachable: %+v", f)
		}
	}
	for first, want := range map[int64]bool{-1: false, 0: true, 7: true} {
		if f := proxy.FaultOf(&lifecycle.GoneError{Message: "gone", FirstSeq: first}); (f.FirstSeq != nil) != want || want && *f.FirstSeq != first {
			t.Errorf("first_seq %d: got %v", first, f.FirstSeq)
		}
	}
	if f := proxy.FaultOf(fmt.Errorf("in context: %w", inner)); f.Error() != "in context: "+inner.Error() {
		t.Errorf("the log would say %q", f.Error())
	}
}
