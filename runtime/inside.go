package runtime

import (
	"context"
	"io"
	"net"
	"time"
)

// Version and places of the Agent in a container.
const (
	AgentProgram = "/sbin/berm-init" // the program
	AgentVersion = 4                 // of the protocol between the program and Berm
	AgentDir     = "/run/berm"       // the directory of the socket at which Berm listens
)

// Agent is Berm's own program in a container, where it is the first process.
type Agent struct {
	Program string // path of the program on the engine's host; seen at AgentProgram, read-only; empty is the init process as without an Agent
	Dir     string // directory on the engine's host, seen at AgentDir, read-only; empty is none
	Stored  bool   // instead of both: the backend's own copy of the program, where the engine has it
}

// Insider works inside a container through Berm's program there. The program has the
// rights of the container's user and no others. A container can forge the answers, but
// only about itself.
//
// Errors belong to the classes that Runtime lists, or to these:
//
//   - PermissionDenied: the container's user may not do this.
//   - ResourceExhausted: no space is left, or no process can be added.
//   - OutOfRange: the output is gone.
//   - NotImplemented: the container's program is missing or too old.
type Insider interface {
	// Exec runs a command in a running container, to its end.
	//
	// It returns when the process has exited and its output has been delivered. A
	// descendant that keeps the output open delays the return by at most a second.
	// A command that is missing or not executable ends with exit code 126 or 127, as
	// in a shell. If it can't be started for lack of room, the error is ErrNoRoom.
	//
	// When ctx ends first, Exec kills the process and all its descendants, and leaves
	// the container running. The error is of ctx's class and wraps context.Cause(ctx).
	// If they could not be killed, the error is ErrNotKilled as well. When the
	// container is removed or dies during the command, the error is
	// FailedPrecondition and ErrInterrupted. A FailedPrecondition or NotFound without
	// ErrInterrupted says that the command never started.
	Exec(ctx context.Context, id string, e Exec) (ExecResult, error)

	Processes

	// File does one operation on the file system as the container's user sees it. Its
	// error is that of op.Check, of one of the classes above, or an error of fio's own
	// readers, writers and functions. A read from beyond the end of a file is OutOfRange.
	File(ctx context.Context, id string, op FileOp, fio FileIO) error

	// Dial connects to a TCP port on the container's own loopback interface. It works
	// without a network. If nothing listens on the port, the error is FailedPrecondition.
	Dial(ctx context.Context, id string, port int) (Conn, error)
}

// Conn is a connection that can be closed for writing alone.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// Processes starts and follows processes: commands that have an ID in their container.
// They outlive the call and the client that started them.
type Processes interface {
	// Start starts a process. AlreadyExists when one of its ID exists, running or not:
	// Forget it first. A command that is missing or not executable is no error: it ends
	// with exit code 126 or 127, as in Exec.
	//
	// The Follower is nil unless the Process has a Follow. It has the output from the
	// first byte.
	Start(ctx context.Context, id string, p Process) (ProcessInfo, Follower, error)
	// Follow follows the output of a process. ResourceExhausted when the process has 64
	// followers already.
	Follow(ctx context.Context, id, process string, f Follow) (Follower, error)
	// Input opens the input of a process for one writer. AlreadyExists when it has
	// one; FailedPrecondition when the input is closed, or the process has ended.
	Input(ctx context.Context, id, process string) (Input, error)
	// Events follows the starts and ends of a container's processes.
	Events(ctx context.Context, id string) (Events, error)
	// Process describes one process. ListProcesses describes all, in the order they were started.
	Process(ctx context.Context, id, process string) (ProcessInfo, error)
	ListProcesses(ctx context.Context, id string) ([]ProcessInfo, error)
	// Signal sends a signal to a process' group. FailedPrecondition when it has ended.
	Signal(ctx context.Context, id, process string, signal int) error
	// Kill kills a process with all its descendants, and returns when they are gone. If
	// some survive, the error is ErrNotKilled as well. A process that has ended is no
	// error.
	Kill(ctx context.Context, id, process string) error
	// Resize sets the size of a process' terminal.
	Resize(ctx context.Context, id, process string, rows, cols int) error
	// Forget drops a process that has ended, with its output. FailedPrecondition when it hasn't ended.
	// A missing process is no error.
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
	// Follow, if not nil, makes Start return a Follower; its From is ignored.
	Follow *Follow
	// Once drops the output once a follower has received all of it. Without Once, the
	// output is kept until the process is forgotten.
	Once bool
	// Timeout kills the process with its descendants; 0 is none.
	Timeout time.Duration
	// KeepBytes is how much of the output is kept; 0 is 64 KiB, at most 4 MiB.
	KeepBytes int
}

// ProcessInfo describes a process.
type ProcessInfo struct {
	ID        string
	Label     string
	Command   []string
	PID       int    // in the container; 0 if it couldn't be started
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
	NotKilled bool // some descendants outlived the kill at the timeout
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

// Follow says how to follow a process' output. Unless a follower is lossless, the newest
// output replaces the oldest once KeepBytes are kept.
type Follow struct {
	// From is the Seq of the Chunk to go on after; 0 is the beginning. OutOfRange when
	// output from there on isn't kept any more.
	From int64
	// Lossless makes the process wait until this follower has taken the output. Other
	// followers that fall behind end with OutOfRange.
	Lossless bool
	// Exclusive allows no other exclusive follower. AlreadyExists when there is one.
	Exclusive bool
	// TakeOver is Exclusive, and ends the other exclusive follower with Aborted.
	TakeOver bool
}

// Follower follows a process' output until it is closed. It doesn't delay other followers,
// unless it is lossless and the process waits for it.
type Follower interface {
	// Next returns the next output, and waits for it. After the last it returns io.EOF.
	// One goroutine at a time.
	//
	// A Chunk ends between two UTF-8 characters, if the output allows that. Part of a
	// character is held back until the rest comes, the process ends, or 64 KiB of the
	// other stream have followed.
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
	// Next first returns all processes, maybe none. Later calls wait, and return the
	// processes that have started or ended since, without forgotten ones. After an
	// error, open Events again and compare. One goroutine at a time.
	Next() ([]ProcessInfo, error)
	io.Closer
}

// Chunk is some output.
type Chunk struct {
	Seq    int64 // bytes of output, of both streams, up to the end of this one
	Stderr bool
	Data   []byte // until the next Next
}
