package wire

import (
	"cmp"

	"github.com/containerd/errdefs"
)

// Hello is the program's first message.
type Hello struct {
	Version int `json:"version"`
	UID     int `json:"uid"`
	GID     int `json:"gid"`
	// PID is the program's own, in its container's PID namespace.
	PID int `json:"pid,omitempty"`
	// Begun is when the program started, in clock ticks since the machine started.
	Begun uint64 `json:"begun,omitempty"`
}

// Request asks for an operation. Op says which of the other fields is set.
type Request struct {
	Op      Op       `json:"op"`
	Start   *Start   `json:"start,omitempty"`
	Process *Process `json:"process,omitempty"`
	File    *File    `json:"file,omitempty"`
	Port    int      `json:"port,omitempty"`
}

// Op is an operation.
type Op string

// The operations. A Request about processes has a Process, but for OpStart and OpEvents. One about
// files has a File.
const (
	// OpStart starts a process; Result is a ProcessInfo. With a Follow it goes on as OpFollow.
	OpStart Op = "start"
	// OpFollow sends an Item first: a ProcessInfo whose FirstSeq is where the output begins.
	// Then it sends Output. When the process has ended, Result is a ProcessInfo.
	OpFollow Op = "follow"
	// OpInput sends Ready once the input is open, and again whenever the process has taken
	// a Data. End closes the input for good; Result is empty.
	OpInput Op = "input"
	// OpEvents sends a ProcessInfo of every process as Items, and then Ready. Whenever
	// processes have started or ended, it sends Items of those, and Ready.
	OpEvents  Op = "events"
	OpProcess Op = "process" // Result is a ProcessInfo
	OpSignal  Op = "signal"
	OpKill    Op = "kill" // Result comes when the tree is gone
	OpResize  Op = "resize"
	OpForget  Op = "forget"

	OpStat    Op = "stat"     // Result is a FileInfo
	OpRead    Op = "read"     // an Item, FileInfo, then Data; Result is empty
	OpWrite   Op = "write"    // takes Data and End; Result is a FileInfo
	OpDir     Op = "dir"      // Items are of FileInfo
	OpMkdir   Op = "mkdir"    //
	OpMove    Op = "move"     //
	OpCopy    Op = "copy"     //
	OpRemove  Op = "remove"   //
	OpGlob    Op = "glob"     // Items are of FileInfo
	OpSearch  Op = "search"   // Items are of FileMatch
	OpTarRead Op = "tar-read" // Data
	OpTarWrit Op = "tar-write"
	OpWatch   Op = "watch" // Items are of FileEvent, the first of type "ready"; ends when Berm sends End

	// OpDial connects to Port on the loopback interface, and sends Ready once it has. Data
	// and End go both ways. Result comes when both sides have ended.
	OpDial Op = "dial"
)

// Last reports whether a connection ends with the Result of an operation, or with its Failure. After
// others, Berm may send another Request.
func (op Op) Last(failed bool) bool {
	switch op {
	case OpFollow, OpInput, OpEvents, OpWatch, OpDial:
		return true
	case OpWrite, OpTarWrit:
		return failed // Berm may have sent more Data
	}
	return false
}

// Start is a process to be started.
type Start struct {
	ID        string   `json:"id"`
	Label     string   `json:"label,omitempty"`
	Command   []string `json:"command"`
	Env       []string `json:"env,omitempty"`
	Dir       string   `json:"dir,omitempty"`
	Stdin     bool     `json:"stdin,omitempty"`
	TTY       bool     `json:"tty,omitempty"`
	Rows      int      `json:"rows,omitempty"`
	Cols      int      `json:"cols,omitempty"`
	Follow    *Follow  `json:"follow,omitempty"` // from the first byte
	Exec      bool     `json:"exec,omitempty"`   // isn't listed; is killed if its Follow is canceled; sends an Item only with Stdin
	Once      bool     `json:"once,omitempty"`
	TimeoutMS int64    `json:"timeout_ms,omitempty"`
	KeepBytes int      `json:"keep_bytes,omitempty"`
}

// Process names a process, and has the parameters of an operation on it.
type Process struct {
	ID     string  `json:"id"`
	Follow *Follow `json:"follow,omitempty"` // OpFollow
	Signal int     `json:"signal,omitempty"` // OpSignal
	Rows   int     `json:"rows,omitempty"`   // OpResize
	Cols   int     `json:"cols,omitempty"`
}

// Follow is as in the runtime package.
type Follow struct {
	From      int64 `json:"from,omitempty"` // a Seq or FromFirst
	Lossless  bool  `json:"lossless,omitempty"`
	Exclusive bool  `json:"exclusive,omitempty"`
	TakeOver  bool  `json:"take_over,omitempty"`
}

// FromFirst is as in the runtime package.
const FromFirst = -1

// ProcessInfo describes a process. Times are in nanoseconds since 1970; 0 is none.
type ProcessInfo struct {
	ID              string   `json:"id"`
	Label           string   `json:"label,omitempty"`
	Command         []string `json:"command,omitempty"` // cut to 4 KiB
	PID             int      `json:"pid,omitempty"`
	Running         bool     `json:"running,omitempty"`
	TTY             bool     `json:"tty,omitempty"`
	StartedAt       int64    `json:"started_at,omitempty"`
	EndedAt         int64    `json:"ended_at,omitempty"`
	ExitCode        int      `json:"exit_code,omitempty"`
	Signal          int      `json:"signal,omitempty"`
	TimedOut        bool     `json:"timed_out,omitempty"`
	Killed          bool     `json:"killed,omitempty"`
	OOMKilled       bool     `json:"oom_killed,omitempty"`
	CPUTime         int64    `json:"cpu_time,omitempty"` // nanoseconds
	PeakMemoryBytes int64    `json:"peak_memory_bytes,omitempty"`
	FirstSeq        int64    `json:"first_seq,omitempty"`
	NextSeq         int64    `json:"next_seq,omitempty"`
	// NotKilled says that some of the process's tree outlived the kill at the timeout.
	NotKilled bool `json:"not_killed,omitempty"`
}

// File is a path, in bytes, and the parameters of an operation on it. Permissions are Unix'.
type File struct {
	Path       []byte `json:"path"`
	To         []byte `json:"to,omitempty"`     // OpMove, OpCopy
	Offset     int64  `json:"offset,omitempty"` // OpRead
	Length     int64  `json:"length,omitempty"` // OpRead; -1 is to the end
	Mode       uint32 `json:"mode,omitempty"`   // OpWrite, OpMkdir
	Parents    bool   `json:"parents,omitempty"`
	Append     bool   `json:"append,omitempty"`
	NoClash    bool   `json:"no_clash,omitempty"`
	Replace    bool   `json:"replace,omitempty"`
	Recursive  bool   `json:"recursive,omitempty"`
	Depth      int    `json:"depth,omitempty"`
	Limit      int    `json:"limit,omitempty"`
	Pattern    string `json:"pattern,omitempty"`
	Literal    bool   `json:"literal,omitempty"`
	IgnoreCase bool   `json:"ignore_case,omitempty"`
	Include    string `json:"include,omitempty"`
}

// FileInfo describes a file. Mode is st_mode, with the type.
type FileInfo struct {
	Path    []byte `json:"path"`
	Size    int64  `json:"size"`
	Mode    uint32 `json:"mode"`
	ModTime int64  `json:"mod_time"` // nanoseconds since 1970
	UID     int    `json:"uid"`
	GID     int    `json:"gid"`
	Target  []byte `json:"target,omitempty"`
}

// FileMatch is a line that a search found.
type FileMatch struct {
	Path []byte `json:"path"`
	Line int    `json:"line"`
	Text []byte `json:"text"`
}

// FileEvent is a change of a file.
type FileEvent struct {
	Type string `json:"type"` // as in the runtime package, or "ready"
	Path []byte `json:"path,omitempty"`
	Dir  bool   `json:"dir,omitempty"`
}

// Failure says why an operation failed.
type Failure struct {
	Class   Class  `json:"class"`
	Message string `json:"message"`
}

// Class is the kind of a Failure.
type Class string

// The classes. Any other is treated as ClassInternal.
const (
	ClassNotFound     Class = "not_found"
	ClassExists       Class = "exists"
	ClassInvalid      Class = "invalid"
	ClassPrecondition Class = "precondition"
	ClassPermission   Class = "permission"
	ClassExhausted    Class = "exhausted"
	ClassOutOfRange   Class = "out_of_range"
	ClassNotKilled    Class = "not_killed"
	ClassAborted      Class = "aborted"
	ClassUnsupported  Class = "unsupported"
	ClassInternal     Class = "internal"
)

// classes maps to the classes of errdefs.
var classes = map[Class]error{
	ClassNotFound:     errdefs.ErrNotFound,
	ClassExists:       errdefs.ErrAlreadyExists,
	ClassInvalid:      errdefs.ErrInvalidArgument,
	ClassPrecondition: errdefs.ErrFailedPrecondition,
	ClassPermission:   errdefs.ErrPermissionDenied,
	ClassExhausted:    errdefs.ErrResourceExhausted,
	ClassOutOfRange:   errdefs.ErrOutOfRange,
	ClassAborted:      errdefs.ErrAborted,
	ClassUnsupported:  errdefs.ErrNotImplemented,
}

func (f *Failure) Error() string { return f.Message }

// Unwrap returns the class of errdefs that the Failure belongs to.
func (f *Failure) Unwrap() error { return cmp.Or[error](classes[f.Class], errdefs.ErrInternal) }
