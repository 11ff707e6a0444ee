package runtime

import (
	"context"
	"io"
	"net"
	"time"
)

// Where a container that was made with an Agent has it.
const (
	AgentProgram = "/sbin/berm-init" // the program
	AgentVersion = 2                 // of what the program and Berm say to each other
	AgentDir     = "/run/berm"       // the directory of the socket at which Berm listens
)

// Agent is Berm's own program in a container, where it is the first process.
type Agent struct {
	Program string // path of the program on the engine's host; seen at AgentProgram, read-only; empty is the init process as without an Agent
	Dir     string // directory on the engine's host, seen at AgentDir, read-only; empty is none
	Stored  bool   // instead of both: the backend's own copy of the program, where the engine has it
}

// Insider is the optional ability to work inside a container through a program of ours
// that runs in it, with the rights of the container's user and no others. What a
// container can make of the answers is lies about itself.
//
// Errors belong to the classes of errdefs that Runtime's have, and to these as well:
// PermissionDenied (the container's user may not), ResourceExhausted (no space, or no
// more processes), OutOfRange (output that is gone), NotImplemented (this container has
// no such program, or one that is too old).
type Insider interface {
	Runner
	Processes
	Files

	// Dial connects to a TCP port on the container's own loopback interface, without
	// any network between. A port that nobody listens at is FailedPrecondition. The
	// connection can be closed for writing alone: it has a CloseWrite method.
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
}

// Processes are commands that have a name in their container, and outlive the call and
// the client that started them.
type Processes interface {
	// Start starts a process. AlreadyExists when one of its ID is there, running or
	// not: Forget it first. What can't be started at all ends with exit code 126 or
	// 127 as in Runtime's Exec, and is no error.
	Start(ctx context.Context, id string, p Process) (ProcessInfo, error)
	// Attach gives the output from a place on, and takes input. There is one at a
	// time: it takes the process over from the one before.
	//
	// From is a Chunk's Seq, after which it goes on; 0 is the beginning, and -1 is all
	// that there is. OutOfRange when some of what should follow isn't kept any more.
	//
	// While somebody is attached, a process waits for its output to be taken; while
	// nobody is, the oldest output makes room for the newest.
	Attach(ctx context.Context, id, process string, from int64) (Attachment, error)
	// Process tells of one, List of all, in the order they were started.
	Process(ctx context.Context, id, process string) (ProcessInfo, error)
	ListProcesses(ctx context.Context, id string) ([]ProcessInfo, error)
	// Signal sends a signal to a process' group. FailedPrecondition when it has ended.
	Signal(ctx context.Context, id, process string, signal int) error
	// Kill kills a process with all its descendants, and returns when they are gone;
	// the error is ErrNotKilled as well if they aren't. One that has ended is no error.
	Kill(ctx context.Context, id, process string) error
	// Resize sets the size of a process' terminal.
	Resize(ctx context.Context, id, process string, rows, cols int) error
	// Forget drops what is kept of a process that has ended. FailedPrecondition when
	// it hasn't; one that isn't there is no error.
	Forget(ctx context.Context, id, process string) error
}

// Process is a command with a name.
type Process struct {
	ID      string // mandatory; [A-Za-z0-9][A-Za-z0-9_.:-]{0,127}, unique in the container
	Label   string // the caller's own, at most 1 KiB; comes back in ProcessInfo
	Command []string
	// Env, WorkingDir and User are as in Exec.
	Env        []string
	WorkingDir string
	User       string
	// Stdin keeps the input open for attachments; otherwise it is closed at once.
	Stdin bool
	// TTY gives the process a terminal of that size; its output is all stdout.
	TTY        bool
	Rows, Cols int // 0 is 24 and 80
	// Hold has the output wait a few seconds for an attachment, from the first byte.
	Hold bool
	// Once lets go of the output when an attachment was given it to its end, rather than
	// keep it until the process is forgotten.
	Once bool
	// Timeout kills it with its descendants; 0 is none.
	Timeout time.Duration
	// KeepBytes is how much of the output is kept; 0 is 64 KiB, at most 4 MiB.
	KeepBytes int
}

// ProcessInfo is what is known of a process.
type ProcessInfo struct {
	ID        string
	Label     string
	Command   []string
	Running   bool
	TTY       bool
	StartedAt time.Time
	EndedAt   time.Time // zero while it runs
	// The rest is how it ended; ExitCode is 128+n after signal n.
	ExitCode  int
	Signal    int
	TimedOut  bool
	Killed    bool // by Kill
	OOMKilled bool
	NotKilled bool // some of its descendants outlived the timeout's kill
	// CPUTime and PeakMemoryBytes are of the process and those of its descendants
	// that it waited for.
	CPUTime         time.Duration
	PeakMemoryBytes int64
	// Output is kept from FirstSeq on; NextSeq is the Seq of the last.
	FirstSeq, NextSeq int64
}

// Attachment is one's hold on a process.
type Attachment interface {
	// Next gives the next output, and waits for it. After the last, io.EOF, Info tells
	// how the process ended. An attachment that another took over ends with Aborted.
	// One goroutine at a time.
	Next() (Chunk, error)
	// Info is how the process ended, once Next has said io.EOF.
	Info() ProcessInfo
	// Write sends input, CloseWrite ends it; from another goroutine than Next. What
	// the process doesn't take holds them up.
	io.Writer
	CloseWrite() error
	// Close lets the process go on by itself.
	io.Closer
}

// Chunk is some output.
type Chunk struct {
	Seq    int64 // bytes of output, of both streams, up to the end of this one
	Stderr bool
	Data   []byte // until the next Next
}
