package sandboxapi

import (
	"net/http"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

const (
	maxStdin    = 16 << 20
	maxExecBody = maxStdin/3*4 + proxy.MaxBody // the input in base64, and everything else
)

// exec runs a command to its end, or streams its output if the caller accepts a stream.
func (a *api) exec(w http.ResponseWriter, r *http.Request) error {
	if acceptedStream(r) != "" {
		return a.execStreamed(w, r)
	}
	if err := knownQuery(r); err != nil {
		return err
	}
	var body apitype.ExecRequest
	if err := proxy.DecodeBody(w, r, maxExecBody, false, &body); err != nil {
		return err
	}
	for field, there := range map[string]bool{
		"exec_id": body.ExecID != "", "stdin_open": body.StdinOpen, "tty": body.TTY,
		"rows": body.Rows != 0, "cols": body.Cols != 0, "keep_bytes": body.KeepBytes != 0,
	} {
		if there {
			return &lifecycle.InvalidError{Field: field, Message: "needs a streamed answer (Accept: text/event-stream), or a call of …/execs"}
		}
	}
	req, err := execRequest(r, body)
	if err != nil {
		return err
	}
	keep, release := proxy.ExchangeOf(r.Context()).LeaseOutput(r.Context())
	defer release()
	req.Keep = keep
	res, err := a.Manager.Exec(r.Context(), req)
	if err != nil {
		return err
	}
	proxy.ExchangeOf(r.Context()).SessionID = res.SessionID
	if res.QuotaExceeded {
		return &proxy.Fault{
			Status: http.StatusInsufficientStorage, Code: "quota_exceeded", Title: "Quota exceeded",
			Detail: "workspace quota exceeded after execution; the sandbox was stopped, its files are kept", Result: &res,
		}
	}
	return reply(w, http.StatusOK, execResult(res), nil)
}

func execRequest(r *http.Request, b apitype.ExecRequest) (lifecycle.ExecRequest, error) {
	tenant, key := target(r)
	req := lifecycle.ExecRequest{
		Tenant: tenant, Key: key, Command: b.Command, Env: b.Env, WorkingDir: b.Cwd,
		Stdin: b.StdinBase64, Timeout: b.Timeout.Value(), OutputLimit: b.OutputLimit, Raw: b.Raw, Serialize: b.Serialize,
	}
	if b.Stdin != nil {
		if b.StdinBase64 != nil {
			return req, &lifecycle.InvalidError{Field: "stdin_base64", Message: "can't go together with stdin"}
		}
		req.Stdin = []byte(*b.Stdin)
	}
	if len(req.Stdin) > maxStdin {
		return req, &lifecycle.InvalidError{Field: "stdin", Message: "must be at most 16 MiB"}
	}
	var err error
	req.Create, err = sandboxRequest(r, key, b.Sandbox)
	return req, err
}

// sandboxRequest returns the sandbox to create if the key has none; nil creates none. It fails
// if the caller may not create sandboxes.
func sandboxRequest(r *http.Request, key string, b *apitype.SandboxRequest) (*lifecycle.CreateRequest, error) {
	if b == nil {
		return nil, nil //nolint:nilnil // nil creates none
	}
	if err := proxy.Require(r, proxy.ScopeSandboxesWrite); err != nil {
		return nil, err
	}
	create := createRequest(r, key, *b)
	return &create, nil
}

func execResult(res lifecycle.ExecResult) apitype.ExecResult {
	return apitype.ExecResult{
		SessionID: res.SessionID, Backend: res.Backend, Status: string(res.Status), OK: res.OK(), ExitCode: res.ExitCode,
		Stdout: res.Stdout, Stderr: res.Stderr, StdoutBase64: res.StdoutRaw, StderrBase64: res.StderrRaw,
		StdoutTruncated: res.StdoutTruncated, StderrTruncated: res.StderrTruncated,
		DurationMS: int64(res.Duration / time.Millisecond),
		CPUTimeMS:  int64(res.CPUTime / time.Millisecond), PeakMemoryBytes: res.PeakMemoryBytes,
		Timeout: apitype.Duration(res.Timeout), Overridden: overrides(res.Overridden),
		Created: res.Created, Recreated: res.Recreated, SessionTerminated: res.SessionTerminated,
		WorkspaceQuota: workspaceQuota(res.QuotaEnforcement, res.QuotaExceeded),
	}
}

func workspaceQuota(enforcement string, exceeded bool) *apitype.WorkspaceQuota {
	if enforcement == "" {
		return nil
	}
	return &apitype.WorkspaceQuota{Enforcement: enforcement, Exceeded: exceeded}
}
