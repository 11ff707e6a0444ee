package proxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// StatusClientClosed is logged as the status of a request whose caller went away.
const StatusClientClosed = 499

// retrySoon is the Retry-After of errors that should pass soon, such as an engine's outage.
const retrySoon = 2 * time.Second

// Fault is an error as callers see it. A handler may return one.
type Fault struct {
	Status      int
	Code        string // stable
	Title       string // what the code means, in a few words
	Detail      string // what happened; never a secret
	RetryAfter  time.Duration
	Differences []policy.Difference
	Reasons     []policy.Reason
	Result      *lifecycle.ExecResult // of a command that ran in spite of the error
	FirstSeq    *int64                // with code output_gone: output after it is kept; nil if not known
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

// Malformed is the fault of a request that can't be read.
func Malformed(detail string) *Fault { return Unreadable(detail, nil) }

// Unreadable is Malformed with a cause.
func Unreadable(detail string, cause error) *Fault {
	return &Fault{Status: http.StatusBadRequest, Code: "malformed", Title: "Malformed request", Detail: detail, Cause: cause}
}

// UnsupportedMedia is the fault of a body whose type or encoding the call doesn't accept.
func UnsupportedMedia(detail string) *Fault {
	return &Fault{Status: http.StatusUnsupportedMediaType, Code: "unsupported_media_type", Title: "Unsupported media type", Detail: detail}
}

// FaultOf returns an error as callers see it. It includes only texts that were written for
// callers. Of all other errors it shows only the class.
func FaultOf(err error) Fault {
	if errors.Is(err, ErrGoingDown) {
		return Fault{Status: http.StatusServiceUnavailable, Code: "going_down", Title: "Server going down",
			Detail: "the server is going down, and can't finish this", RetryAfter: retrySoon, Cause: err}
	}
	if own, ok := errors.AsType[*Fault](err); ok {
		return *own
	}
	f := publicFault(err)
	f.Cause = err
	return f
}

// rule maps errors of one type to faults. It returns false for an error of another type.
type rule func(error) (Fault, bool)

func as[E error](f func(E) Fault) rule {
	return func(err error) (Fault, bool) {
		e, ok := errors.AsType[E](err)
		if !ok {
			return Fault{}, false
		}
		return f(e), true
	}
}

// says maps an error whose text is meant for callers.
func says[E error](status int, code, title string) rule {
	return as(func(e E) Fault { return Fault{Status: status, Code: code, Title: title, Detail: e.Error()} })
}

// class is how callers see the errors of one of errdefs' classes.
type class struct {
	is          func(error) bool // nil matches all errors
	status      int
	code, title string
}

// saysByClass is says for a type whose errors are of several classes. The first class that
// matches applies. The last one must match all errors.
func saysByClass[E error](classes ...class) rule {
	return as(func(e E) Fault {
		i := slices.IndexFunc(classes, func(c class) bool { return c.is == nil || c.is(e) })
		return Fault{Status: classes[i].status, Code: classes[i].code, Title: classes[i].title, Detail: e.Error()}
	})
}

// rules apply in this order, since an error may wrap others.
var rules = []rule{
	as(func(e *lifecycle.UnavailableError) Fault { // first, since its cause may match another rule
		f := faultOfClass(e)
		f.Detail = cmp.Or(e.Message, f.Detail)
		return f
	}),
	as(func(e *http.MaxBytesError) Fault {
		return Fault{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Title: "Body too large",
			Detail: fmt.Sprintf("the body is larger than %d bytes", e.Limit)}
	}),
	as(func(e *lifecycle.PullingError) Fault {
		return Fault{Status: http.StatusServiceUnavailable, Code: "image_pulling", Title: "Image on its way",
			Detail: e.Error(), RetryAfter: max(e.RetryAfter, time.Second)}
	}),
	as(func(e *policy.DeniedError) Fault {
		f := invalid(e.Error())
		if !e.Invalid() {
			f = Fault{Status: http.StatusForbidden, Code: "policy_denied", Title: "Refused by policy", Detail: e.Error()}
		}
		f.Reasons = e.Reasons
		return f
	}),
	as(func(e *lifecycle.InvalidError) Fault { return invalid(e.Error()) }),
	says[*lifecycle.NotFoundError](http.StatusNotFound, "not_found", "Not found"),
	as(func(e *lifecycle.ConflictError) Fault {
		return Fault{Status: http.StatusConflict, Code: "sandbox_conflict", Title: "Sandbox of another spec",
			Detail: e.Error(), Differences: e.Differences}
	}),
	as(func(e *lifecycle.CapacityError) Fault {
		return Fault{Status: http.StatusTooManyRequests, Code: "capacity", Title: "At capacity",
			Detail: e.Error(), RetryAfter: max(e.RetryAfter, retrySoon)}
	}),
	says[*lifecycle.QuotaError](http.StatusInsufficientStorage, "quota_exceeded", "Quota exceeded"),
	says[*lifecycle.StateError](http.StatusConflict, "wrong_state", "Wrong state"),
	as(func(e *lifecycle.GoneError) Fault {
		f := Fault{Status: http.StatusGone, Code: "output_gone", Title: "Output gone", Detail: e.Error()}
		if e.FirstSeq >= 0 {
			f.FirstSeq = &e.FirstSeq
		}
		return f
	}),
	saysByClass[*lifecycle.ProcessError](
		class{errdefs.IsNotFound, http.StatusNotFound, "process_not_found", "No such command or process"},
		class{errdefs.IsFailedPrecondition, http.StatusConflict, "process_ended", "Command or process can't take it"},
		class{nil, http.StatusConflict, "process_conflict", "Process conflict"},
	),
	saysByClass[*lifecycle.FileError](
		class{errdefs.IsNotFound, http.StatusNotFound, "file_not_found", "No such file"},
		class{errdefs.IsAlreadyExists, http.StatusConflict, "file_exists", "File exists"},
		class{errdefs.IsPermissionDenied, http.StatusForbidden, "file_denied", "Not the sandbox user's to do"},
		class{errdefs.IsResourceExhausted, http.StatusInsufficientStorage, "no_space", "No space left"},
		class{nil, http.StatusConflict, "file_wrong_kind", "File of another kind"},
	),
	says[*lifecycle.PortError](http.StatusBadGateway, "port_unreachable", "Port unreachable"),
	says[*policy.OwnerError](http.StatusNotImplemented, "not_supported", "Not supported"),
	says[*lifecycle.UnsupportedError](http.StatusNotImplemented, "not_supported", "Not supported"),
	says[*quota.NotFoundError](http.StatusNotFound, "workspace_not_found", "No such workspace"),
	says[*quota.FullError](http.StatusInsufficientStorage, "workspace_quota_exceeded", "Workspace quota exceeded"),
	says[*chat.NotFoundError](http.StatusNotFound, "chat_not_found", "No such chat"),
	says[*chat.ConflictError](http.StatusConflict, "chat_conflict", "Chat of another workspace"),
	says[*lifecycle.ActiveError](http.StatusConflict, "chat_has_active_sandbox", "Chat has a sandbox"),
	says[*chat.FileNotFoundError](http.StatusNotFound, "chat_file_not_found", "No such file"),
	saysByClass[*chat.FileError](
		// Only a caller that sent If-None-Match gets this error.
		class{errdefs.IsAlreadyExists, http.StatusPreconditionFailed, "precondition_failed", "Precondition failed"},
		class{errdefs.IsResourceExhausted, http.StatusInsufficientStorage, "no_space", "No space left"},
		class{nil, http.StatusConflict, "chat_file_wrong_kind", "File of another kind"},
	),
	says[*chat.TooLargeError](http.StatusRequestEntityTooLarge, "too_large", "Body too large"),
}

func publicFault(err error) Fault {
	for _, r := range rules {
		if f, ok := r(err); ok {
			return f
		}
	}
	f := faultOfClass(err)
	if _, start := errors.AsType[*lifecycle.StartError](err); start && f.Code != "backend_unavailable" {
		// The engine's error is about its own objects, not about the object that the caller named.
		return Fault{Status: http.StatusServiceUnavailable, Code: "sandbox_start_failed", Title: "Sandbox not started", Detail: startReason(err)}
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
	// An object that the engine doesn't find doesn't mean that there is no such sandbox.
	case errdefs.IsNotFound(err), errdefs.IsFailedPrecondition(err), errdefs.IsConflict(err), errdefs.IsAlreadyExists(err):
		return Fault{Status: http.StatusConflict, Code: "wrong_state", Title: "Wrong state",
			Detail: "the sandbox isn't in a state that allows this"}
	}
	return Fault{Status: http.StatusInternalServerError, Code: "internal", Title: "Internal error",
		Detail: "something went wrong; the server's log tells more under this request id"}
}

// Unreachable is the fault of a request that the engine didn't answer. Engine is its name; it
// may be empty.
func Unreachable(engine string, err error) *Fault {
	f := faultOfClass(errdefs.ErrUnavailable)
	f.Cause = err
	if e, ok := errors.AsType[*lifecycle.UnavailableError](err); ok && e.Message != "" {
		f.Detail = e.Message
	} else if reason := runtime.OutageReason(err); reason != "" {
		f.Detail = cmp.Or(engine, "the container engine") + " gave no answer (" + reason + "); what was asked for may be done or not"
	}
	return &f
}

// startReason returns why a sandbox could not be started. It uses only the error's class, since
// an engine's text may hold secrets. For a failed pull it adds the text from pullReason.
func startReason(err error) string {
	if pull, ok := errors.AsType[*lifecycle.PullError](err); ok {
		return fmt.Sprintf("the image %s can't be pulled: %s", cut(pull.Image, maxPullReason), pullReason(pull.Err))
	}
	_, file := errors.AsType[*fs.PathError](err)
	switch {
	case file:
		return "a directory that the sandbox is to have isn't there, or can't be used"
	case errdefs.IsNotFound(err):
		return "the image, or the network, isn't there and can't be had"
	case errdefs.IsInvalidArgument(err):
		return "the container engine refuses the spec"
	}
	return "the container engine could not start the sandbox"
}

// SetRetryAfter sets the Retry-After header in whole seconds, rounded up. It does nothing for 0.
func SetRetryAfter(w http.ResponseWriter, d time.Duration) {
	if d > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10))
	}
}
