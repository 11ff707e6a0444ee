package lifecycle

import (
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// StartRequest asks for a command whose output is followed while it runs. The Stdin of its
// ExecRequest is the start of the input, and all of it without OpenStdin or TTY. OutputLimit
// and Raw are ignored.
type StartRequest struct {
	ExecRequest
	// ExecID is the caller's own name for the command. A second request with it returns the
	// same command. Empty lets Berm choose. [A-Za-z0-9][A-Za-z0-9_.:-]{0,122}
	ExecID     string
	NewID      bool // ExecID is new, so that no command can have it
	OpenStdin  bool // Write to the stream is its input; otherwise it has Stdin or none
	TTY        bool // a terminal, whose output is all stdout; implies OpenStdin
	Rows, Cols int  // of the terminal; 0 is 24 and 80
	KeepBytes  int  // of output, for later readers; 0 is 1 MiB, at most 4 MiB
	// Follow says that the caller is about to attach: the output waits for that a few
	// seconds, instead of being dropped for what follows.
	Follow bool
	// Once says that no caller reads output again that was followed to its end.
	Once bool
	// Taken is called once, when nothing refers to Stdin any more: the command has taken it,
	// or never will. It may be called after StartExec returns. Nil is allowed.
	Taken func()
}

// ExecRunning is the status of an Execution that hasn't ended.
const ExecRunning ExecStatus = "running"

// Execution is a command that was started with StartExec.
type Execution struct {
	ID              string
	SessionID       string
	Backend         string
	Command         []string
	TTY             bool
	Status          ExecStatus // ExecRunning, or as in an ExecResult
	ExitCode        *int       // nil unless completed
	Signal          int        // that killed it; 0 if none did
	StartedAt       time.Time
	EndedAt         time.Time // zero while it runs
	CPUTime         time.Duration
	PeakMemoryBytes int64
	Timeout         time.Duration // that is in force; 0 is none
	Overridden      []policy.Override
	Created         bool // the sandbox was made for this command
	Recreated       bool
	Existing        bool // an earlier request with this ExecID started it
	// QuotaExceeded says that the workspace was over its quota when the command had ended.
	// The sandbox is stopped then, and the output is lost.
	QuotaExceeded bool
	// QuotaEnforcement is how the workspace's quota is enforced, as in Enforcement; empty
	// without one.
	QuotaEnforcement string
	// Output is kept from FirstSeq on; NextSeq is the Seq of the last.
	FirstSeq, NextSeq int64
}

// Stream follows a command or process. Close leaves it running.
type Stream[T any] interface {
	// Next waits for output. It returns io.EOF when the process has ended and all output was
	// returned. One goroutine may call it at a time. The chunk's bytes are valid until the
	// next call.
	Next() (runtime.Chunk, error)
	// Ended returns the process as it ended, once Next has returned io.EOF.
	Ended() T
	io.Writer // input, from another goroutine than Next
	CloseWrite() error
	io.Closer
}

// ExecStream follows an Execution.
type ExecStream = Stream[Execution]

// ProcessStream follows a Process.
type ProcessStream = Stream[Process]

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

// ProcessRequest asks for a managed process.
type ProcessRequest struct {
	Tenant, Key string
	Create      *CreateRequest // as in ExecRequest
	ID          string         // empty is "default"
	Command     string         // mandatory
	Args        []string
	Env         map[string]string
	WorkingDir  string
	Replace     bool // stops the one of this ID first
	TTY         bool
	Rows, Cols  int
	Ready       *Readiness // what StartProcess waits for; nil is nothing
}

// Readiness says when a process counts as ready: as soon as one of the conditions holds.
type Readiness struct {
	Port    int           // it accepts connections on the sandbox's loopback interface
	Line    string        // a line of its output contains it
	Timeout time.Duration // 0 is 30 s
}

// Process is a managed process.
type Process struct {
	ID        string
	SessionID string
	Command   []string
	TTY       bool
	State     string // "running" or "exited"
	Ready     *bool  // nil if the request had no Readiness
	ExitCode  *int   // nil while it runs
	Signal    int
	StartedAt time.Time
	EndedAt   time.Time
	Stderr    string // the last 64 KiB
	FirstSeq  int64
	NextSeq   int64
	Attached  bool
}

func processError(id string, class error, format string, args ...any) *ProcessError {
	return &ProcessError{ID: id, Class: class, Message: fmt.Sprintf(format, args...)}
}

func noProcess(id string) error {
	return processError(id, errdefs.ErrNotFound, "there is no %q in the sandbox", id)
}

func goneError(first int64, format string, args ...any) *GoneError {
	return &GoneError{Message: fmt.Sprintf(format, args...), FirstSeq: first}
}

// noRoom is the error of a command or process that the sandbox couldn't start.
func noRoom(sb Sandbox) error {
	return &CapacityError{Message: fmt.Sprintf("sandbox %q has no room for another process: nothing was started", sb.Key), RetryAfter: time.Second}
}

// The states of a managed process.
const (
	ProcessRunning = "running"
	ProcessExited  = "exited"
)
