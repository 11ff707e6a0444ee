package apitype

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

// Execution is a command that one call started, and that other calls follow or end.
type Execution struct {
	ExecID    string   `json:"exec_id"`
	SessionID string   `json:"session_id"`
	Backend   string   `json:"backend"`
	Command   []string `json:"command"`
	TTY       bool     `json:"tty"`
	Exit
	StartedAt time.Time  `json:"started_at"`
	EndedAt   *time.Time `json:"ended_at"` // nil while it runs

	Timeout    Duration   `json:"timeout"` // the effective one; 0 is none
	Overridden []Override `json:"overridden"`
	Created    bool       `json:"created"`   // the sandbox was made for this command
	Recreated  bool       `json:"recreated"` // its container had died and was made anew
	Existing   bool       `json:"existing"`  // an earlier call with this exec_id started it

	// Output is kept that follows FirstSeq, up to NextSeq.
	FirstSeq int64 `json:"first_seq"`
	NextSeq  int64 `json:"next_seq"`
}

// Exit is the state of a command or process, and how it ended.
type Exit struct {
	// Status is "running", or else how it ended. A command is "completed", "timed_out",
	// "killed" or "oom_killed"; a process is "exited".
	Status          string `json:"status"`
	ExitCode        *int   `json:"exit_code"`         // nil unless it ended by itself
	Signal          int    `json:"signal"`            // that ended it; 0 if none did
	DurationMS      int64  `json:"duration_ms"`       // so far, if it runs
	CPUTimeMS       int64  `json:"cpu_time_ms"`       // 0 if not known
	PeakMemoryBytes int64  `json:"peak_memory_bytes"` // 0 if not known

	WorkspaceQuota *WorkspaceQuota `json:"workspace_quota,omitempty"` // of a command's sandbox; nil if it has none
}

// WorkspaceQuota says whether a command left its workspace within the quota.
type WorkspaceQuota struct {
	Enforcement string `json:"enforcement"` // "hard" or "soft", as in Enforcement
	// Exceeded says that the workspace was over its quota when the command had ended. The
	// sandbox is stopped then, and its files are kept.
	Exceeded bool `json:"exceeded"`
}

// ExecutionList is a sandbox's commands in the order they were started.
type ExecutionList struct {
	Execs []Execution `json:"execs"`
}

// The kinds of StreamEvent.
const (
	EventStart     = "start"      // the first: the command or process
	EventStdout    = "stdout"     // output
	EventStderr    = "stderr"     // output
	EventExit      = "exit"       // the last: how it ended
	EventTakenOver = "taken_over" // the last: another follower has taken over
	EventGoingDown = "going_down" // the last: the server goes down; the command or process may go on
	EventHeartbeat = "heartbeat"  // nothing has happened for a while
)

// StreamEvent is one line of a stream in application/x-ndjson, and the data of one event
// in text/event-stream.
type StreamEvent struct {
	Event string `json:"event"`
	// Seq is the place in the output up to which everything was sent, in bytes of both
	// streams together. A request with it as the parameter after resumes the stream.
	Seq        int64      `json:"seq"`
	Data       string     `json:"data,omitempty"`        // output as text
	DataBase64 []byte     `json:"data_base64,omitempty"` // output as bytes, if they were asked for
	Execution  *Execution `json:"execution,omitempty"`   // with EventStart
	Process    *Process   `json:"process,omitempty"`     // with EventStart
	*Exit                 // with EventExit
}

// SignalRequest is the body of a call that sends a signal.
type SignalRequest struct {
	Signal Signal `json:"signal"`
}

// ResizeRequest is a terminal's size.
type ResizeRequest struct {
	Rows int `json:"rows"`
	Cols int `json:"cols"`
}

// Written is the answer to input.
type Written struct {
	Bytes int64 `json:"bytes"`
}

// ProcessRequest asks for a managed process.
type ProcessRequest struct {
	ProcessID string            `json:"process_id,omitempty"` // empty is "default"
	Command   string            `json:"command"`
	Args      []string          `json:"args,omitempty"`
	Env       map[string]string `json:"env,omitempty"`
	Cwd       string            `json:"cwd,omitempty"`     // absolute; empty is the mount path
	Replace   bool              `json:"replace,omitempty"` // stop an earlier process of this ID first
	TTY       bool              `json:"tty,omitempty"`
	Rows      int               `json:"rows,omitempty"` // 0 is 24
	Cols      int               `json:"cols,omitempty"` // 0 is 80
	Ready     *Readiness        `json:"ready,omitempty"`
	Sandbox   *SandboxRequest   `json:"sandbox,omitempty"` // makes the sandbox if there is none
}

// Readiness says when a process counts as ready, so that the call that started it is
// answered. If both Port and Line are set, the first that happens decides.
type Readiness struct {
	Port    int       `json:"port,omitempty"`    // a process listens on it
	Line    string    `json:"line,omitempty"`    // a line of its output contains it
	Timeout *Duration `json:"timeout,omitempty"` // nil is 30 s
}

// Process is a managed process.
type Process struct {
	ProcessID string     `json:"process_id"`
	SessionID string     `json:"session_id"`
	Command   []string   `json:"command"` // with its arguments
	TTY       bool       `json:"tty"`
	State     string     `json:"state"`     // "running" or "exited"
	Ready     *bool      `json:"ready"`     // nil if nothing was asked for
	ExitCode  *int       `json:"exit_code"` // nil while it runs
	Signal    int        `json:"signal"`    // that killed it; 0 if none did
	StartedAt time.Time  `json:"started_at"`
	EndedAt   *time.Time `json:"ended_at"` // nil while it runs
	Stderr    string     `json:"stderr"`   // the last 64 KiB
	Attached  bool       `json:"attached"`
	// Output is kept that follows FirstSeq, up to NextSeq.
	FirstSeq int64 `json:"first_seq"`
	NextSeq  int64 `json:"next_seq"`
}

// ProcessList is a sandbox's managed processes in the order they were started.
type ProcessList struct {
	Processes []Process `json:"processes"`
}

// AttachLine is one message of an attachment in lines.
type AttachLine struct {
	Stream string `json:"stream"` // "stdout" or "stderr"
	// Seq is the place in the output at which the line ends.
	Seq  int64  `json:"seq"`
	Line string `json:"line"` // without its end
	// Partial says that the message has no line end. Either the line is very long and
	// goes on in the stream's next message, or the output ended within it.
	Partial bool `json:"partial,omitempty"`
	// Resume is the value of the parameter after that resumes the attachment, if that
	// isn't Seq. For example, a line of the other stream began before this one ended.
	// Empty otherwise.
	Resume string `json:"resume,omitempty"`
}

// AttachStart is the first message of an attachment in bytes, which begin after the place Seq
// in the output.
type AttachStart struct {
	Seq int64 `json:"seq"`
}

// AttachControl is a text message that a caller sends in an attachment in bytes. Exactly one
// field is set.
type AttachControl struct {
	Resize     *ResizeRequest `json:"resize,omitempty"`
	Signal     *Signal        `json:"signal,omitempty"`
	CloseStdin bool           `json:"close_stdin,omitempty"`
}

// AttachError is the answer to an AttachControl or a message of input that failed.
type AttachError struct {
	Error struct {
		Code   string `json:"code"`
		Detail string `json:"detail"`
	} `json:"error"`
}

// AttachEnd is the reason in the close frame of an attachment whose command or process
// has ended.
type AttachEnd struct {
	ExitCode *int   `json:"exit_code"`
	Signal   int    `json:"signal,omitempty"`
	Status   string `json:"status"`
	// QuotaExceeded is as in WorkspaceQuota.
	QuotaExceeded bool `json:"quota_exceeded,omitempty"`
}

// Signal is a signal's number on Linux. Its JSON is a number or a name: 15, "TERM" or
// "SIGTERM". It always encodes as a number.
type Signal int

// signals are the names of signals, by number.
var signals = []string{
	1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 5: "TRAP", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1",
	11: "SEGV", 12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM", 16: "STKFLT", 17: "CHLD", 18: "CONT", 19: "STOP", 20: "TSTP",
	21: "TTIN", 22: "TTOU", 23: "URG", 24: "XCPU", 25: "XFSZ", 26: "VTALRM", 27: "PROF", 28: "WINCH", 29: "IO", 30: "PWR", 31: "SYS",
}

const maxSignal = 64

// ParseSignal takes a number from 1 to 64, or a name with or without SIG before it.
func ParseSignal(s string) (Signal, error) {
	if n, err := strconv.Atoi(s); err == nil && n >= 1 && n <= maxSignal {
		return Signal(n), nil
	}
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	for n, known := range signals {
		if known == name && name != "" {
			return Signal(n), nil
		}
	}
	return 0, errors.New(`must be a signal's name, like "TERM", or its number, from 1 to 64`)
}

// UnmarshalJSON takes a number or a name.
func (s *Signal) UnmarshalJSON(b []byte) error {
	v, err := ParseSignal(unquote(b))
	if err == nil {
		*s = v
	}
	return err
}
