package runtime

import (
	"context"
	"io"
	"io/fs"
	"net"
	"time"
)

// Where a container that was made with an Agent has it.
const (
	AgentProgram = "/sbin/berm-init" // the program
	AgentDir     = "/run/berm"       // the directory of the socket at which Berm listens
)

// Agent is Berm's own program in a container, where it is the first process.
type Agent struct {
	Program string // path of the program on the engine's host; seen at AgentProgram, read-only; empty is the init process as without an Agent
	Dir     string // directory on the engine's host, seen at AgentDir, read-only; empty is none
}

// The ways a command can have gone into its container.
const (
	PathAgent  = "agent"
	PathEngine = "engine"
)

// Insider is the optional ability to work inside a container through a program of ours
// that runs in it, with the rights of the container's user and no others. What a
// container can make of the answers is lies about itself.
//
// Errors belong to the classes of errdefs that Runtime's have, and to these as well:
// PermissionDenied (the container's user may not), ResourceExhausted (no space, or no
// more processes), OutOfRange (output that is gone), NotImplemented (this container has
// no such program, or one that is too old).
type Insider interface {
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

// Files is the file system as the container's user sees it. Paths are absolute in the
// container, resolved there, and at most 4,096 bytes.
type Files interface {
	Stat(ctx context.Context, id, path string) (FileInfo, error) // of a link, its target's
	// ReadFile reads a regular file from an offset on; length -1 is to its end. Open,
	// when not nil, is called first with what the file is; its error ends the call.
	ReadFile(ctx context.Context, id, path string, offset, length int64, open func(FileInfo) error, w io.Writer) error
	// WriteFile writes a file: beside it first, then in its place, whole or not at all;
	// or appends to it, which isn't undone.
	WriteFile(ctx context.Context, id string, f FileWrite, r io.Reader) (FileInfo, error)
	// ListDir tells of what is in a directory, sorted by name, and in those below it
	// down to a depth (1 is the directory alone).
	ListDir(ctx context.Context, id, path string, depth int, f func(FileInfo) error) error
	Mkdir(ctx context.Context, id, path string, mode fs.FileMode, parents bool) error
	// Move and Copy replace what is at to only if they are told so, and never a
	// directory that isn't empty. Copy takes whole trees.
	Move(ctx context.Context, id, from, to string, replace bool) error
	Copy(ctx context.Context, id, from, to string, replace bool) error
	// RemoveFile removes; a directory that isn't empty only if recursive.
	RemoveFile(ctx context.Context, id, path string, recursive bool) error
	// Glob finds paths below a directory by a pattern in which ** stands for any
	// number of directories; at most limit.
	Glob(ctx context.Context, id, path, pattern string, limit int, f func(FileInfo) error) error
	// Search finds lines in regular files below a path.
	Search(ctx context.Context, id string, s FileSearch, f func(FileMatch) error) error
	// ReadTar packs a file or tree, under its base name. WriteTar unpacks into a
	// directory, and nothing outside it, whatever links the archive or the directory has.
	ReadTar(ctx context.Context, id, path string, w io.Writer) error
	WriteTar(ctx context.Context, id, path string, r io.Reader) error
	// WatchFiles tells of changes below a directory until ctx ends, which is no error.
	// Ready, when not nil, is called once when changes from then on are sure to be seen.
	WatchFiles(ctx context.Context, id, path string, recursive bool, ready func(), f func(FileEvent) error) error
}

// FileInfo is what a file is.
type FileInfo struct {
	Path    string // absolute; bytes as the container has them
	Size    int64
	Mode    fs.FileMode // type and permissions
	ModTime time.Time
	UID     int
	GID     int
	Target  string // of a symbolic link, in lists only
}

// FileWrite is where and how to write.
type FileWrite struct {
	Path    string
	Mode    fs.FileMode // permissions of a new file; 0 is 0644; one that is there keeps its own
	Mkdir   bool        // make the directories above it
	Append  bool
	NoClash bool // AlreadyExists when it is there
}

// FileSearch is what to look for.
type FileSearch struct {
	Path       string
	Pattern    string // in the syntax of Go's regexp, unless Literal
	Literal    bool
	IgnoreCase bool
	Include    string // of base names, as path.Match has it; empty is all
	Limit      int    // matches; 0 is 1,000, at most 10,000
}

// FileMatch is a line that was found.
type FileMatch struct {
	Path string
	Line int    // from 1
	Text string // of the line, at most 4 KiB
}

// FileEvent is a change.
type FileEvent struct {
	Type string // "create", "modify", "remove", "rename", "attrib", or "overflow": some were lost
	Path string
	Dir  bool
}
