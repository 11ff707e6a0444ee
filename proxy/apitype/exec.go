package apitype

import (
	"encoding/json"
	"errors"
)

// ExecRequest is a command to be run to its end.
type ExecRequest struct {
	Command     Command           `json:"command"`
	Env         map[string]string `json:"env,omitempty"`
	Cwd         string            `json:"cwd,omitempty"` // absolute; empty is the mount path
	Stdin       *string           `json:"stdin,omitempty"`
	StdinBase64 []byte            `json:"stdin_base64,omitempty"` // instead of Stdin
	Timeout     Seconds           `json:"timeout,omitzero"`       // left out: the profile's default
	OutputLimit *int              `json:"output_limit,omitempty"` // code points (bytes, if raw) per stream; nil is 4,000
	Raw         bool              `json:"raw,omitempty"`          // answer StdoutBase64 and StderrBase64
	Sandbox     *SandboxRequest   `json:"sandbox,omitempty"`      // makes the sandbox if there is none
	Serialize   bool              `json:"serialize,omitempty"`    // wait for earlier commands with Serialize

	// The following fields are for commands that are started or streamed. OutputLimit is
	// only for commands whose whole result is the answer.

	ExecID    string `json:"exec_id,omitempty"`    // the caller's own ID; a repeated start finds the command
	StdinOpen bool   `json:"stdin_open,omitempty"` // more input follows, in further calls
	TTY       bool   `json:"tty,omitempty"`        // a terminal, whose output is all stdout
	Rows      int    `json:"rows,omitempty"`       // of the terminal; 0 is 24
	Cols      int    `json:"cols,omitempty"`       // of the terminal; 0 is 80
	KeepBytes int    `json:"keep_bytes,omitempty"` // of output, for callers that resume; 0 is 1 MiB, at most 4 MiB
}

// Command is a program and its arguments. In JSON it may also be one string,
// which /bin/sh runs.
type Command []string

// UnmarshalJSON takes an array of strings or a string.
func (c *Command) UnmarshalJSON(b []byte) error {
	var line string
	if string(b) != "null" && json.Unmarshal(b, &line) == nil {
		*c = Command{"/bin/sh", "-c", line}
		return nil
	}
	var args []*string
	if json.Unmarshal(b, &args) != nil || args == nil {
		return errors.New("must be an array of strings or a string")
	}
	*c = make(Command, len(args))
	for i, a := range args {
		if a == nil {
			return errors.New("must be an array of strings or a string")
		}
		(*c)[i] = *a
	}
	return nil
}

// ExecResult is how a command ended, with its output.
type ExecResult struct {
	SessionID       string `json:"session_id"`
	Backend         string `json:"backend"`
	Status          string `json:"status"` // "completed", "timed_out", "killed" or "oom_killed"
	OK              bool   `json:"ok"`     // completed with exit code 0
	ExitCode        *int   `json:"exit_code"`
	Stdout          string `json:"stdout"`
	Stderr          string `json:"stderr"`
	StdoutBase64    []byte `json:"stdout_base64,omitempty"`
	StderrBase64    []byte `json:"stderr_base64,omitempty"`
	StdoutTruncated bool   `json:"stdout_truncated"`
	StderrTruncated bool   `json:"stderr_truncated"`
	DurationMS      int64  `json:"duration_ms"`
	CPUTimeMS       int64  `json:"cpu_time_ms"`       // of the command and the children it waited for; 0 if not known
	PeakMemoryBytes int64  `json:"peak_memory_bytes"` // of the same

	Timeout           Duration   `json:"timeout"` // the effective one
	Overridden        []Override `json:"overridden"`
	Created           bool       `json:"created"`            // the sandbox was made for this command
	Recreated         bool       `json:"recreated"`          // its container had died and was made anew
	SessionTerminated bool       `json:"session_terminated"` // the command could not be killed, so the sandbox was

	WorkspaceQuota *WorkspaceQuota `json:"workspace_quota,omitempty"` // nil without one
}

// LogChunk is one line of a log in the form application/x-ndjson.
type LogChunk struct {
	Stream string `json:"stream"` // "stdout" or "stderr"; or EventGoingDown, the last, without data
	Data   string `json:"data"`
}
