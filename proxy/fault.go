package proxy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/workspace"
	"github.com/bermhq/berm/policy"
)

// StatusClientClosed is what is logged for a caller that went away; nobody sees it.
const StatusClientClosed = 499

// retrySoon is after how long to ask again when the engine is away.
const retrySoon = 2 * time.Second

// Fault is an error as callers see it. It may also be returned by a handler.
type Fault struct {
	Status      int
	Code        string // stable
	Title       string // what the code means, in a few words
	Detail      string // what happened; never a secret
	RetryAfter  time.Duration
	Differences []policy.Difference
	Reasons     []policy.Reason
	Result      *lifecycle.ExecResult // of a command that ran all the same
	FirstSeq    *int64                // after which there still is output, of output that is gone; nil if not known
	Cause       error                 // for the log only; nil if Detail says it all
}

// Error gives the cause, else the detail.
func (f *Fault) Error() string {
	if f.Cause != nil {
		return f.Cause.Error()
	}
	return f.Detail
}

func invalid(detail string) Fault {
	return Fault{Status: http.StatusUnprocessableEntity, Code: "validation", Title: "Invalid request", Detail: detail}
}

// FaultOf says how callers see an error. What they read comes from errors that
// were made to be read; of all others only the class is told.
func FaultOf(err error) Fault {
	if errors.Is(err, ErrGoingDown) {
		return Fault{Status: http.StatusServiceUnavailable, Code: "going_down", Title: "Server going down",
			Detail: "the server is going down, and can't finish this", RetryAfter: retrySoon, Cause: err}
	}
	var own *Fault
	if errors.As(err, &own) {
		return *own
	}
	f := publicFault(err)
	f.Cause = err
	return f
}

func publicFault(err error) Fault {
	var (
		away     *lifecycle.UnavailableError
		inval    *lifecycle.InvalidError
		denied   *policy.DeniedError
		missing  *lifecycle.NotFoundError
		conflict *lifecycle.ConflictError
		capacity *lifecycle.CapacityError
		quota    *lifecycle.QuotaError
		state    *lifecycle.StateError
		pulling  *lifecycle.PullingError
		start    *lifecycle.StartError
		tooLarge *http.MaxBytesError
		gone     *lifecycle.GoneError
		process  *lifecycle.ProcessError
		cant     *lifecycle.UnsupportedError
		file     *lifecycle.FileError
		port     *lifecycle.PortError
		owner    *policy.OwnerError
	)
	switch {
	case errors.As(err, &away): // whatever its cause is
		return faultOfClass(away)
	case errors.As(err, &tooLarge):
		return Fault{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Title: "Body too large",
			Detail: fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit)}
	case errors.As(err, &pulling):
		return Fault{Status: http.StatusServiceUnavailable, Code: "image_pulling", Title: "Image on its way",
			Detail: pulling.Error(), RetryAfter: atLeast(pulling.RetryAfter, time.Second)}
	case errors.As(err, &denied):
		f := invalid(denied.Error())
		if !denied.Invalid() {
			f = Fault{Status: http.StatusForbidden, Code: "policy_denied", Title: "Refused by policy", Detail: denied.Error()}
		}
		f.Reasons = denied.Reasons
		return f
	case errors.As(err, &inval):
		return invalid(inval.Error())
	case errors.As(err, &missing):
		return Fault{Status: http.StatusNotFound, Code: "not_found", Title: "Not found", Detail: missing.Error()}
	case errors.As(err, &conflict):
		return Fault{Status: http.StatusConflict, Code: "sandbox_conflict", Title: "Sandbox of another spec",
			Detail: conflict.Error(), Differences: conflict.Differences}
	case errors.As(err, &capacity):
		return Fault{Status: http.StatusTooManyRequests, Code: "capacity", Title: "At capacity",
			Detail: capacity.Error(), RetryAfter: atLeast(capacity.RetryAfter, retrySoon)}
	case errors.As(err, &quota):
		return Fault{Status: http.StatusInsufficientStorage, Code: "quota_exceeded", Title: "Quota exceeded", Detail: quota.Error()}
	case errors.As(err, &state):
		return Fault{Status: http.StatusConflict, Code: "wrong_state", Title: "Wrong state", Detail: state.Error()}
	case errors.As(err, &gone):
		f := Fault{Status: http.StatusGone, Code: "output_gone", Title: "Output gone", Detail: gone.Error()}
		if gone.FirstSeq >= 0 {
			f.FirstSeq = &gone.FirstSeq
		}
		return f
	case errors.As(err, &process):
		return faultOfProcess(process)
	case errors.As(err, &file):
		return faultOfFile(file)
	case errors.As(err, &port):
		return Fault{Status: http.StatusBadGateway, Code: "port_unreachable", Title: "Port unreachable", Detail: port.Error()}
	case errors.As(err, &owner):
		return Fault{Status: http.StatusNotImplemented, Code: "not_supported", Title: "Not supported", Detail: owner.Error()}
	case errors.As(err, &cant):
		return Fault{Status: http.StatusNotImplemented, Code: "not_supported", Title: "Not supported", Detail: cant.Error()}
	}
	if f, ok := faultOfStorage(err); ok {
		return f
	}

	f := faultOfClass(err)
	if errors.As(err, &start) && f.Code != "backend_unavailable" {
		// The class is that of an engine's object, not of the caller's.
		return Fault{Status: http.StatusServiceUnavailable, Code: "sandbox_start_failed", Title: "Sandbox not started", Detail: startReason(err)}
	}
	return f
}

// faultOfProcess maps what is said of one command or process by its ID.
func faultOfProcess(err *lifecycle.ProcessError) Fault {
	switch {
	case errdefs.IsNotFound(err):
		return Fault{Status: http.StatusNotFound, Code: "process_not_found", Title: "No such command or process", Detail: err.Error()}
	case errdefs.IsFailedPrecondition(err):
		return Fault{Status: http.StatusConflict, Code: "process_ended", Title: "Command or process can't take it", Detail: err.Error()}
	}
	return Fault{Status: http.StatusConflict, Code: "process_conflict", Title: "Process conflict", Detail: err.Error()}
}

// faultOfFile maps what is said of one file in a sandbox.
func faultOfFile(err *lifecycle.FileError) Fault {
	f := Fault{Status: http.StatusConflict, Code: "file_wrong_kind", Title: "File of another kind", Detail: err.Error()}
	switch {
	case errdefs.IsNotFound(err):
		f.Status, f.Code, f.Title = http.StatusNotFound, "file_not_found", "No such file"
	case errdefs.IsAlreadyExists(err):
		f.Code, f.Title = "file_exists", "File exists"
	case errdefs.IsPermissionDenied(err):
		f.Status, f.Code, f.Title = http.StatusForbidden, "file_denied", "Not the sandbox user's to do"
	case errdefs.IsResourceExhausted(err):
		f.Status, f.Code, f.Title = http.StatusInsufficientStorage, "no_space", "No space left"
	}
	return f
}

// faultOfStorage maps what is said of workspaces, chats and their files; false is
// another error.
func faultOfStorage(err error) (Fault, bool) {
	var (
		noWorkspace *workspace.NotFoundError
		full        *workspace.QuotaError
		noChat      *chat.NotFoundError
		conflict    *chat.ConflictError
		active      *lifecycle.ActiveError
		noFile      *chat.FileNotFoundError
		file        *chat.FileError
		tooLarge    *chat.TooLargeError
	)
	switch {
	case errors.As(err, &noWorkspace):
		return Fault{Status: http.StatusNotFound, Code: "workspace_not_found", Title: "No such workspace", Detail: noWorkspace.Error()}, true
	case errors.As(err, &full):
		return Fault{Status: http.StatusInsufficientStorage, Code: "workspace_quota_exceeded", Title: "Workspace quota exceeded", Detail: full.Error()}, true
	case errors.As(err, &noChat):
		return Fault{Status: http.StatusNotFound, Code: "chat_not_found", Title: "No such chat", Detail: noChat.Error()}, true
	case errors.As(err, &conflict):
		return Fault{Status: http.StatusConflict, Code: "chat_conflict", Title: "Chat of another workspace", Detail: conflict.Error()}, true
	case errors.As(err, &active):
		return Fault{Status: http.StatusConflict, Code: "chat_has_active_sandbox", Title: "Chat has a sandbox", Detail: active.Error()}, true
	case errors.As(err, &noFile):
		return Fault{Status: http.StatusNotFound, Code: "chat_file_not_found", Title: "No such file", Detail: noFile.Error()}, true
	case errors.As(err, &file):
		return faultOfChatFile(file), true
	case errors.As(err, &tooLarge):
		return Fault{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Title: "Body too large", Detail: tooLarge.Error()}, true
	}
	return Fault{}, false
}

// faultOfChatFile maps what is said of one file of a chat.
func faultOfChatFile(err *chat.FileError) Fault {
	f := Fault{Status: http.StatusConflict, Code: "chat_file_wrong_kind", Title: "File of another kind", Detail: err.Error()}
	switch {
	case errdefs.IsAlreadyExists(err): // which is an error only to those who asked for that
		f.Status, f.Code, f.Title = http.StatusPreconditionFailed, "precondition_failed", "Precondition failed"
	case errdefs.IsResourceExhausted(err):
		f.Status, f.Code, f.Title = http.StatusInsufficientStorage, "no_space", "No space left"
	}
	return f
}

// faultOfClass maps errors that carry no text for callers.
func faultOfClass(err error) Fault {
	switch {
	case errdefs.IsUnavailable(err), errdefs.IsDeadlineExceeded(err), errdefs.IsCanceled(err),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return Fault{Status: http.StatusServiceUnavailable, Code: "backend_unavailable", Title: "Container engine unavailable",
			Detail: "the container engine can't be reached or didn't answer in time", RetryAfter: retrySoon}
	case errdefs.IsNotImplemented(err):
		return Fault{Status: http.StatusNotImplemented, Code: "not_supported", Title: "Not supported",
			Detail: "the container engine in use can't do this"}
	case errdefs.IsInvalidArgument(err):
		return invalid("the container engine refuses a value of the request")
	// What the engine doesn't find is no reason to say that there is no sandbox.
	case errdefs.IsNotFound(err), errdefs.IsFailedPrecondition(err), errdefs.IsConflict(err), errdefs.IsAlreadyExists(err):
		return Fault{Status: http.StatusConflict, Code: "wrong_state", Title: "Wrong state",
			Detail: "the sandbox isn't in a state that allows this"}
	}
	return Fault{Status: http.StatusInternalServerError, Code: "internal", Title: "Internal error",
		Detail: "something went wrong; the server's log tells more under this request id"}
}

// startReason tells why a sandbox could not be started, by class only: engines'
// own words may carry what isn't for callers.
func startReason(err error) string {
	var file *fs.PathError
	switch {
	case errors.As(err, &file):
		return "a directory that the sandbox is to have isn't there, or can't be used"
	case errdefs.IsNotFound(err):
		return "the image, or the network, isn't there and can't be had"
	case errdefs.IsInvalidArgument(err):
		return "the container engine refuses the spec"
	}
	return "the container engine could not start the sandbox"
}

func atLeast(d, least time.Duration) time.Duration { return max(d, least) }

// setRetryAfter sets the header in whole seconds, rounded up; nothing for 0.
func setRetryAfter(w http.ResponseWriter, d time.Duration) {
	if d > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10))
	}
}
