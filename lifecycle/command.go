package lifecycle

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// idPattern matches the names that callers give commands and processes.
var idPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,122}$`)

// Bounds of a command.
const (
	maxArguments    = 4096
	maxArgumentSize = 128 << 10 // bytes of one argument; the kernel takes no more
	maxCommandSize  = 1 << 20   // bytes of all arguments
	outputLimit     = 4000      // code points, unless the caller says otherwise
	maxOutputLimit  = 4 << 20   // code points that a caller can ask for
	maxQueued       = 64        // commands that wait in one sandbox for their turn
)

// Bounds of a command that is followed.
const (
	keepBytes    = 1 << 20   // of a command's output, unless the caller says otherwise
	keepManaged  = 256 << 10 // of a managed process'
	maxKeepBytes = 4 << 20
	maxScreen    = 4096 // rows or columns of a terminal
)

// command is an ExecRequest that is checked and judged.
type command struct {
	req        ExecRequest
	env        []string
	overridden []policy.Override
	limit      int
}

// checkCommand checks what can be checked without a sandbox.
func checkCommand(pol *policy.Policy, req ExecRequest) (*command, error) {
	cmd := &command{req: req, limit: outputLimit}
	if len(req.Command) == 0 || req.Command[0] == "" {
		return nil, &InvalidError{Field: "command", Message: "must not be empty"}
	}
	if len(req.Command) > maxArguments {
		return nil, &InvalidError{Field: "command", Message: fmt.Sprintf("at most %d arguments", maxArguments)}
	}
	size := 0
	for _, arg := range req.Command {
		size += len(arg)
		if strings.ContainsRune(arg, 0) {
			return nil, &InvalidError{Field: "command", Message: "must not contain NUL"}
		}
		if len(arg) >= maxArgumentSize || size > maxCommandSize {
			return nil, &InvalidError{Field: "command", Message: "is too long; pass long input by stdin"}
		}
	}
	if req.OutputLimit != nil {
		cmd.limit = *req.OutputLimit
		if cmd.limit > maxOutputLimit {
			return nil, &InvalidError{Field: "output_limit", Message: fmt.Sprintf("at most %d", maxOutputLimit)}
		}
	}
	env, overridden, err := pol.ExecEnv(req.Env)
	if err != nil {
		return nil, err
	}
	cmd.overridden = overridden
	for _, name := range slices.Sorted(maps.Keys(env)) {
		cmd.env = append(cmd.env, name+"="+env[name])
	}
	return cmd, nil
}

// traced returns the environment of the command, with the W3C trace context as TRACEPARENT and
// TRACESTATE. It adds them if there is one, neither the caller nor the operator set either,
// and the policy lets a request set them.
func (c *command) traced(ctx context.Context, opts *Options, sb Sandbox) []string {
	fields := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, fields)
	if len(fields) == 0 {
		return c.env
	}
	vars := map[string]string{}
	for name, value := range fields {
		name = strings.ToUpper(name) // OpenTelemetry's form for environments
		for _, set := range []map[string]string{c.req.Env, sb.Spec.Env, opts.Settings.Env} {
			if _, ok := set[name]; ok {
				return c.env
			}
		}
		vars[name] = value
	}
	judged, overridden, err := opts.Policy().ExecEnv(vars)
	if err != nil || len(overridden) > 0 {
		return c.env
	}
	env := slices.Clone(c.env)
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		env = append(env, name+"="+judged[name])
	}
	return env
}

// checkID checks a caller's name for a process of the kind.
func (k Kind) checkID(id string) error {
	if idPattern.MatchString(id) {
		return nil
	}
	field := "exec_id"
	if k == KindManaged {
		field = "process_id"
	}
	return &InvalidError{Field: field, Message: "must match [A-Za-z0-9][A-Za-z0-9_.:-]{0,122}"}
}

func checkScreen(rows, cols int) error {
	if rows < 1 || rows > maxScreen || cols < 1 || cols > maxScreen {
		return &InvalidError{Field: "rows", Message: fmt.Sprintf("rows and cols must be from 1 to %d", maxScreen)}
	}
	return nil
}

// statusOfEnd returns how a process ended, as in an ExecResult.
func statusOfEnd(info runtime.ProcessInfo) ExecStatus {
	switch {
	case info.TimedOut:
		return ExecTimedOut
	case info.OOMKilled:
		return ExecOOMKilled
	case info.Killed:
		return ExecKilled
	}
	return ExecCompleted
}

// check checks what can be checked without a sandbox.
func (r StartRequest) check(pol *policy.Policy) (*command, error) {
	if r.ID != "" {
		if err := r.Kind.checkID(r.ID); err != nil {
			return nil, err
		}
	}
	if !r.TTY && (r.Rows != 0 || r.Cols != 0) {
		return nil, &InvalidError{Field: "rows", Message: "needs a terminal: tty"}
	}
	if err := checkScreen(cmp.Or(r.Rows, 1), cmp.Or(r.Cols, 1)); err != nil {
		return nil, err
	}
	if r.KeepBytes < 0 || r.KeepBytes > maxKeepBytes {
		return nil, &InvalidError{Field: "keep_bytes", Message: fmt.Sprintf("must be from 0 to %d", maxKeepBytes)}
	}
	if err := r.Ready.check(); err != nil {
		return nil, err
	}
	exec := r.ExecRequest
	exec.OutputLimit = nil
	return checkCommand(pol, exec)
}

// hash returns a hash of all that makes a repeated request the same.
func (r StartRequest) hash() string {
	input := r.Stdin
	if len(input) > sha256.Size { // Marshal would copy a long input
		sum := sha256.Sum256(input)
		input = sum[:]
	}
	b, _ := json.Marshal(struct { // strings and numbers can't fail
		Command    []string
		Env        map[string]string
		WorkingDir string
		Stdin      []byte
		Timeout    *int64
		Serialize  bool
		OpenStdin  bool
		TTY        bool
		KeepBytes  int
	}{r.Command, r.Env, r.WorkingDir, input, r.Timeout, r.Serialize, r.OpenStdin, r.TTY, r.KeepBytes})
	sum := sha256.Sum256(b)
	return base64.RawURLEncoding.EncodeToString(sum[:16])
}

func (c *command) captures() (stdout, stderr capture) {
	if c.req.Raw {
		return &rawCapture{limit: c.limit, keep: c.req.Keep}, &rawCapture{limit: c.limit, keep: c.req.Keep}
	}
	return &textCapture{limit: c.limit, keep: c.req.Keep}, &textCapture{limit: c.limit, keep: c.req.Keep}
}

// collect stores the kept output in the result.
func (c *command) collect(res *ExecResult, stdout, stderr capture) {
	out, outCut := stdout.collected()
	errOut, errCut := stderr.collected()
	res.StdoutTruncated, res.StderrTruncated = outCut, errCut
	if c.req.Raw {
		res.StdoutRaw, res.StderrRaw = []byte(out), []byte(errOut)
		return
	}
	res.Stdout, res.Stderr = out, errOut
}

// use returns the use of a sandbox as which a process of the kind counts.
func (k Kind) use() use {
	if k == KindManaged {
		return useProcess
	}
	return useCommand
}

// kindOf returns the kind of a process in a sandbox, and the caller's ID. Both are empty if Berm
// didn't start it.
func kindOf(proc string) (Kind, string) {
	k, id, _ := strings.Cut(proc, ".")
	if kind := Kind(k); (kind == KindExec || kind == KindManaged) && idPattern.MatchString(id) {
		return kind, id
	}
	return "", ""
}

// label is what Berm attaches to a process in a sandbox. The sandbox can read and forge it.
type label struct {
	Hash       string `json:"h,omitempty"` // of the request
	TimeoutMS  int64  `json:"t,omitempty"`
	Stdin      bool   `json:"i,omitempty"`
	Serialized bool   `json:"s,omitempty"`
}

func (l label) String() string {
	b, _ := json.Marshal(l) // strings and numbers can't fail
	return string(b)
}

// maxTimeout is more than any policy allows.
const maxTimeout = 10 * 365 * 24 * time.Hour

// parseLabel decodes a process label. It returns the zero label if s is malformed.
func parseLabel(s string) (l label) {
	if len(s) > 1024 || json.Unmarshal([]byte(s), &l) != nil || l.TimeoutMS < 0 || l.TimeoutMS > int64(maxTimeout/time.Millisecond) {
		return label{}
	}
	return l
}

func (l label) timeout() time.Duration { return time.Duration(l.TimeoutMS) * time.Millisecond }
