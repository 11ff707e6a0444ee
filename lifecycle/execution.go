package lifecycle

import (
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// StartRequest is a command whose output is followed while it runs. Of the ExecRequest
// in it, Stdin is what its input begins with, and all of it without OpenStdin or TTY;
// OutputLimit and Raw have no meaning.
type StartRequest struct {
	ExecRequest
	// ExecID is the caller's own name for the command: asking again with the same one
	// answers the command that is there. Empty lets Berm choose. [A-Za-z0-9][A-Za-z0-9_.:-]{0,122}
	ExecID     string
	NewID      bool // ExecID is nobody else's, so that no command can be there already
	OpenStdin  bool // Write to the stream is its input; otherwise it has Stdin or none
	TTY        bool // a terminal, whose output is all stdout; implies OpenStdin
	Rows, Cols int  // of the terminal; 0 is 24 and 80
	KeepBytes  int  // of output, for those who come back; 0 is 1 MiB, at most 4 MiB
	// Follow says that the caller is about to attach: the output waits for that a few
	// seconds, instead of making room for what follows.
	Follow bool
	// Once says that nobody comes back for output that was followed to its end.
	Once bool
	// Taken is called once, when nothing holds Stdin any more: the command has taken it, or
	// never will. It may be called after StartExec returns. Nil is nothing.
	Taken func()
}

// ExecRunning is the status of an Execution that hasn't ended.
const ExecRunning ExecStatus = "running"

// Execution is a command that was started with StartExec.
type Execution struct {
	ID              string
	SessionID       string
	Backend         string
	Path            string // runtime.PathAgent or runtime.PathEngine
	Command         []string
	TTY             bool
	Status          ExecStatus // ExecRunning, or as in an ExecResult
	ExitCode        *int       // nil unless completed
	Signal          int        // that killed it; 0 if none did
	StartedAt       time.Time
	EndedAt         time.Time // zero while it runs
	CPUTime         time.Duration
	PeakMemoryBytes int64
	Timeout         time.Duration // as it was in force; 0 is none
	Overridden      []policy.Override
	Created         bool // the sandbox was made for this command
	Recreated       bool
	Existing        bool // it was there under this ExecID already
	// QuotaExceeded says that the workspace was over its quota when the command had
	// ended; the sandbox is stopped then, and the output goes with it.
	QuotaExceeded bool
	// QuotaEnforcement is how the workspace's quota is held, as in Enforcement; empty
	// without one.
	QuotaEnforcement string
	// Output is kept from FirstSeq on; NextSeq is the Seq of the last.
	FirstSeq, NextSeq int64
}

// ExecStream follows an Execution. Close leaves the command running.
type ExecStream interface {
	// Next waits for output; io.EOF when the command has ended and all was given.
	// One goroutine at a time; the chunk's bytes are good until the next call.
	Next() (runtime.Chunk, error)
	// Ended is the execution as it ended, once Next has said io.EOF.
	Ended() Execution
	io.Writer // input, from another goroutine than Next
	CloseWrite() error
	io.Closer
}

// GoneError says that output was asked for which isn't kept any more. It is in errdefs'
// OutOfRange class.
type GoneError struct {
	Message  string
	FirstSeq int64 // from where on there is some; -1 if that isn't known
}

// Error gives it in words.
func (e *GoneError) Error() string { return e.Message }

// OutOfRange puts the error into errdefs' OutOfRange class.
func (*GoneError) OutOfRange() {}

// ProcessError says that a command or process of the ID isn't there, is there already,
// has ended, or was taken over by another.
type ProcessError struct {
	ID      string
	Class   error // errdefs.ErrNotFound, ErrAlreadyExists, ErrFailedPrecondition or ErrAborted
	Message string
}

// Error gives it in words.
func (e *ProcessError) Error() string { return e.Message }

// Unwrap gives the class.
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
	Ready       *Readiness // when the start is to be answered; nil: at once
}

// Readiness is when a process counts as ready. The first of what is asked for decides.
type Readiness struct {
	Port    int           // somebody listens at it on the sandbox's loopback interface
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
	Ready     *bool  // nil if nothing was asked for
	ExitCode  *int   // nil while it runs
	Signal    int
	StartedAt time.Time
	EndedAt   time.Time
	Stderr    string // the last 64 KiB
	FirstSeq  int64
	NextSeq   int64
	Attached  bool
}

// ProcessStream is as an ExecStream.
type ProcessStream interface {
	Next() (runtime.Chunk, error)
	Ended() Process
	io.Writer
	CloseWrite() error
	io.Closer
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
