package lifecycle

import (
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Kind is the kind of a process.
type Kind string

// The kinds of processes. The ID of a process in its sandbox begins with its kind and a dot.
const (
	KindExec    Kind = "exec" // a command with a timeout
	KindManaged Kind = "proc" // a process that runs until it is stopped
)

// ProcessRef names a process of a sandbox.
type ProcessRef struct {
	Tenant, Key string
	Kind        Kind
	ID          string // empty is "default" for KindManaged
}

// StartRequest asks for a process. Stdin is the start of the input, or all of it without
// OpenStdin or TTY. OutputLimit, Raw and Keep are ignored. For KindManaged, so are Timeout and
// Serialize.
type StartRequest struct {
	ExecRequest
	Kind Kind // empty is KindExec
	// ID is the caller's own name. [A-Za-z0-9][A-Za-z0-9_.:-]{0,122}
	//
	// For a command, a second request with the ID returns the same command; empty lets Berm
	// choose. A managed process replaces an ended one of the ID; empty is "default".
	ID         string
	NewID      bool // ID is new, so that no command can have it
	OpenStdin  bool // callers can write more input with Write; always so for KindManaged
	TTY        bool // a terminal, whose output is all stdout; implies OpenStdin
	Rows, Cols int  // of the terminal; 0 is 24 and 80
	KeepBytes  int  // of output, for later readers; 0 is 1 MiB, or 256 KiB for KindManaged; at most 4 MiB
	Follow     bool // Start returns a Stream from the first byte on; not with Ready
	// Once says that no caller will read the output again after it was followed to its end.
	Once bool
	// Taken is called once, when nothing refers to Stdin any more, perhaps after Start has
	// returned. Nil is allowed.
	Taken   func()
	Replace bool       // stop a running managed process of this ID first
	Ready   *Readiness // condition that Start waits for, with KindManaged; nil doesn't wait
}

// Readiness says when a process counts as ready: as soon as one of the conditions holds.
type Readiness struct {
	Port    int           // it accepts connections on the sandbox's loopback interface
	Line    string        // a line of its output contains it
	Timeout time.Duration // 0 is 30 s
}

// ExecRunning is the status of a Process that hasn't ended.
const ExecRunning ExecStatus = "running"

// Process is a command or managed process that was started.
type Process struct {
	ID              string
	SessionID       string
	Backend         string
	Command         []string
	TTY             bool
	Status          ExecStatus // ExecRunning, or as in an ExecResult
	ExitCode        *int       // nil while it runs, and if it ended with its sandbox; of a command, nil unless completed
	Signal          int        // that ended it; 0 if none did
	StartedAt       time.Time
	EndedAt         time.Time // zero while it runs
	CPUTime         time.Duration
	PeakMemoryBytes int64
	Timeout         time.Duration // that is in force; 0 is none
	Overridden      []policy.Override
	Created         bool // the sandbox was made for it
	Recreated       bool
	Existing        bool   // an earlier request with this ID started it
	Ready           *bool  // nil if the request had no Readiness
	Stderr          string // the last 64 KiB, of a managed process; empty in lists
	Attached        bool   // a caller is attached: see Follow
	// QuotaExceeded says that the workspace was over its quota when the command had ended.
	// The sandbox is stopped then, and the output is lost.
	QuotaExceeded bool
	// QuotaEnforcement is how the workspace's quota is enforced, as in Enforcement; empty
	// without one.
	QuotaEnforcement string
	// Output is kept from FirstSeq on; NextSeq is the Seq of the last.
	FirstSeq, NextSeq int64
}

// Running reports whether the process hasn't ended.
func (p Process) Running() bool { return p.Status == ExecRunning }

// FollowRequest says how to follow a process.
type FollowRequest struct {
	// From is the Seq after which to go on: 0 for the beginning, -1 for all that is kept.
	From int64
	// Attach makes the process wait for the caller to read its output. One caller at a time is
	// attached; TakeOver ends another's attachment. Without Attach, Next returns a *GoneError if
	// the caller reads too slowly, so that the output isn't kept any more.
	Attach   bool
	TakeOver bool
}

// Stream follows a process. Close leaves it running.
type Stream interface {
	// Next waits for output. It returns io.EOF when the process has ended and all output was
	// returned. One goroutine may call it at a time. The chunk's bytes are valid until the
	// next call.
	Next() (runtime.Chunk, error)
	// Ended returns the final state of the process, once Next has returned io.EOF.
	Ended() Process
	io.Writer // input, if the Stream is attached; from another goroutine than Next
	CloseWrite() error
	io.Closer
}

// GoneError says that the requested output isn't kept any more. It is in errdefs' OutOfRange
// class.
type GoneError struct {
	Message  string
	FirstSeq int64 // where the kept output begins; -1 if that isn't known
}

// Error returns the message.
func (e *GoneError) Error() string { return e.Message }

// OutOfRange puts the error into errdefs' OutOfRange class.
func (*GoneError) OutOfRange() {}

// ProcessError says that a command or process of the ID doesn't exist, exists already, has ended,
// or was taken over by another caller.
type ProcessError struct {
	ID      string
	Class   error // errdefs.ErrNotFound, ErrAlreadyExists, ErrFailedPrecondition or ErrAborted
	Message string
}

// Error returns the message.
func (e *ProcessError) Error() string { return e.Message }

// Unwrap returns the class.
func (e *ProcessError) Unwrap() error { return e.Class }

func processError(id string, class error, format string, args ...any) *ProcessError {
	return &ProcessError{ID: id, Class: class, Message: fmt.Sprintf(format, args...)}
}

func noProcess(id string) error {
	return processError(id, errdefs.ErrNotFound, "there is no %q in the sandbox", id)
}

func goneError(first int64, format string, args ...any) *GoneError {
	return &GoneError{Message: fmt.Sprintf(format, args...), FirstSeq: first}
}

// noRoom is the error if the sandbox has no resources to start a command or process.
func noRoom(sb Sandbox) error {
	return &CapacityError{Message: fmt.Sprintf("sandbox %q has no room for another process: nothing was started", sb.Key), RetryAfter: time.Second}
}
