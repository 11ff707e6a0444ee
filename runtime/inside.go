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
	AgentVersion = 3                 // of what the program and Berm say to each other
	AgentDir     = "/run/berm"       // the directory of the socket at which Berm listens
)

// Agent is Berm's own program in a container, where it is the first process.
type Agent struct {
	Program string // path of the program on the engine's host; seen at AgentProgram, read-only; empty is the init process as without an Agent
	Dir     string // directory on the engine's host, seen at AgentDir, read-only; empty is none
	Stored  bool   // instead of both: the backend's own copy of the program, where the engine has it
}

// Insider works inside a container through a program of ours that runs in it, with the
// rights of the container's user and no others. What a container can make of the answers
// is lies about itself.
//
// Errors belong to the classes of errdefs that Runtime's have, and to these as well:
// PermissionDenied (the container's user may not), ResourceExhausted (no space, or no
// more processes), OutOfRange (output that is gone), NotImplemented (this container has
// no such program, or one that is too old).
type Insider interface {
	// Exec runs a command in a running container, to its end.
	//
	// It returns when the process has exited and its output has been delivered; a
	// descendant that keeps the output open delays it by no more than a second.
	// A command that is missing or not executable ends with exit code 126 or 127,
	// as a shell would have it. One that couldn't be started for another reason has
	// no result: see ErrNoRoom.
	//
	// When ctx ends first, the process and all its descendants are killed, the
	// container lives on, and the error is of ctx's class and wraps
	// context.Cause(ctx). If they could not be killed, the error is ErrNotKilled
	// as well. When the container is removed or dies in mid-command, the error is
	// FailedPrecondition and ErrInterrupted; without ErrInterrupted, a
	// FailedPrecondition or NotFound says that the command never started.
	Exec(ctx context.Context, id string, e Exec) (ExecResult, error)

	Processes

	// File does one operation on the file system as the container's user sees it. Its
	// error is that of op.Check, one of the classes above, or an error of the caller's
	// own readers, writers and functions. OutOfRange is a read from beyond the end of
	// a file.
	File(ctx context.Context, id string, op FileOp, fio FileIO) error

	// Dial connects to a TCP port on the container's own loopback interface, without
	// any network between. A port that nobody listens at is FailedPrecondition.
	Dial(ctx context.Context, id string, port int) (Conn, error)
}

// Conn is a connection that can be closed for writing alone.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// Processes are commands that have a name in their container, and outlive the call and
// the client that started them.
type Processes interface {
	// Start starts a process. AlreadyExists when one of its ID is there, running or
	// not: Forget it first. What can't be started at all ends with exit code 126 or
	// 127 as in Runtime's Exec, and is no error.
	//
	// The Follower is nil unless the Process has a Follow. It has the output from the
	// first byte.
	Start(ctx context.Context, id string, p Process) (ProcessInfo, Follower, error)
	// Follow follows the output of a process. A process has up to 64 followers;
	// ResourceExhausted when there are as many.
	Follow(ctx context.Context, id, process string, f Follow) (Follower, error)
	// Input opens the input of a process for one writer. AlreadyExists when it has
	// one; FailedPrecondition when the input is closed, or the process has ended.
	Input(ctx context.Context, id, process string) (Input, error)
	// Events follows the starts and ends of a container's processes.
	Events(ctx context.Context, id string) (Events, error)
	// Process returns what is known of one, ListProcesses of all, in the order they
	// were started.
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
	// Stdin keeps the input open for Input; otherwise it is closed at once.
	Stdin bool
	// TTY gives the process a terminal of that size; its output is all stdout.
	TTY        bool
	Rows, Cols int // 0 is 24 and 80
	// Follow has Start return a Follower; its From is ignored.
	Follow *Follow
	// Once lets go of the output when a follower was given it to its end, rather than
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
	PID       int    // in the container; 0 for what couldn't be started
	User      string // "uid:gid"
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

// FromFirst is a place at which a Follow can begin, besides a Seq: with the oldest output that
// is kept.
const FromFirst = -1

// Follow says how to follow a process' output. While no lossless follower is there, the
// oldest output makes room for the newest.
type Follow struct {
	// From is a Chunk's Seq, after which it goes on; 0 is the beginning. OutOfRange when
	// some of what should follow isn't kept any more.
	From int64
	// Lossless makes the process wait until this follower has taken the output. Other
	// followers that fall behind end with OutOfRange.
	Lossless bool
	// Exclusive allows no other exclusive follower. AlreadyExists when there is one.
	Exclusive bool
	// TakeOver is Exclusive, and ends the other exclusive follower with Aborted.
	TakeOver bool
}

// Follower follows a process' output until it is closed. It delays no other one.
type Follower interface {
	// Next returns the next output, and waits for it. After the last it returns io.EOF.
	// One goroutine at a time.
	//
	// A Chunk ends between two UTF-8 characters, where the output allows that: a piece
	// of a character is kept back until its rest comes, the process ends, or 64 KiB of
	// the other stream have followed.
	Next() (Chunk, error)
	// Info returns how the process ended, once Next has returned io.EOF.
	Info() ProcessInfo
	io.Closer
}

// Input is the open input of a process.
type Input interface {
	// Write returns when the process' pipe or terminal has taken the bytes. Close from
	// another goroutine ends a Write that waits.
	io.Writer
	// CloseWrite ends the input for good.
	CloseWrite() error
	// Close makes room for another writer.
	io.Closer
}

// Events follows the processes of a container until it is closed.
type Events interface {
	// Next first returns all processes, maybe none. Then it waits, and returns those that
	// have started or ended since; those that were forgotten aren't among them. After
	// an error nothing more comes: open Events again, and compare. One goroutine at a time.
	Next() ([]ProcessInfo, error)
	io.Closer
}

// Chunk is some output.
type Chunk struct {
	Seq    int64 // bytes of output, of both streams, up to the end of this one
	Stderr bool
	Data   []byte // until the next Next
}
