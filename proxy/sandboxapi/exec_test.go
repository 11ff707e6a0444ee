package sandboxapi_test

import (
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/apitype"
)

const execPath = "/api/v1/sandboxes/k/exec"

func TestExecTranslates(t *testing.T) {
	d := newDoor(t)
	for name, tt := range map[string]struct {
		body string
		want lifecycle.ExecRequest
	}{
		"least":  {`{"command":["true"]}`, lifecycle.ExecRequest{Command: []string{"true"}}},
		"string": {`{"command":"a | b"}`, lifecycle.ExecRequest{Command: []string{"/bin/sh", "-c", "a | b"}}},
		"most": {`{"command":["cat","-"],"env":{"A":"b"},"cwd":"/w","stdin":"in\u00fc","timeout":"30","output_limit":0,"raw":true}`,
			lifecycle.ExecRequest{
				Command: []string{"cat", "-"}, Env: map[string]string{"A": "b"}, WorkingDir: "/w", Stdin: []byte("inü"),
				Timeout: ptr[int64](30), OutputLimit: ptr(0), Raw: true,
			}},
		"bytes":   {`{"command":["cat"],"stdin_base64":"AP8="}`, lifecycle.ExecRequest{Command: []string{"cat"}, Stdin: []byte{0, 255}}},
		"timeout": {`{"command":["a"],"timeout":999.0}`, lifecycle.ExecRequest{Command: []string{"a"}, Timeout: ptr[int64](999)}},
		"sandbox": {`{"command":["a"],"sandbox":{"image":"i","metadata":{"m":"d"}}}`, lifecycle.ExecRequest{
			Command: []string{"a"},
			Create: &lifecycle.CreateRequest{
				Tenant: "red", Key: "k", MaxSandboxes: 7, Metadata: map[string]string{"m": "d"}, Request: policy.Request{Image: ptr("i")},
			},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			d.want(200, "", "POST", execPath, tt.body)
			tt.want.Tenant, tt.want.Key = "red", "k"
			if diff := cmp.Diff(tt.want, d.manager.execed); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestExecInvalid(t *testing.T) {
	d := newDoor(t)
	for _, body := range []string{
		`{"command":null}`, `{"command":[1]}`,
		`{"command":["a"],"stdin":"x","stdin_base64":"eA=="}`, `{"command":["a"],"stdin_base64":"!"}`,
		`{"command":["a"],"timeout":null}`, `{"command":["a"],"timeout":""}`, `{"command":["a"],"timeout":999.5}`,
		`{"command":["a"],"raw":"yes"}`,
	} {
		d.want(422, "validation", "POST", execPath, body)
	}
	d.want(415, "unsupported_media_type", "POST", execPath, "") // a body is needed
	if d.manager.execed.Key != "" {
		t.Error("one of them reached the manager")
	}
	d.want(200, "", "POST", execPath, `{"command":["a"]}`, withToken(powerless))
	d.want(403, "forbidden", "POST", execPath, `{"command":["a"],"sandbox":{}}`, withToken(powerless))
}

// Input may be larger than other bodies; TestExecInput has its bound.
func TestExecLargeInput(t *testing.T) {
	d := newDoor(t)
	in := base64.StdEncoding.EncodeToString(make([]byte, 1<<20))
	d.want(200, "", "POST", execPath, `{"command":["cat"],"stdin_base64":"`+in+`"}`)
	if len(d.manager.execed.Stdin) != 1<<20 {
		t.Errorf("got %d bytes", len(d.manager.execed.Stdin))
	}
}

// TestKeysComeBeforeBodies checks that a call about a sandbox that isn't there is refused
// before its body is read, unless the body could ask for one and the caller may make it.
func TestKeysComeBeforeBodies(t *testing.T) {
	d := newDoor(t)
	const malformed = `{"colour":"red"}`
	for _, path := range []string{"/renew", "/pause", "/execs/x/signal", "/execs/x/resize", "/processes/x/signal", "/files/mkdir", "/files/move", "/files/copy", "/urls"} {
		d.manager.err = missing.err
		d.want(404, "not_found", "POST", "/api/v1/sandboxes/k"+path, malformed)
	}
	for _, path := range []string{"/exec", "/execs", "/processes"} {
		d.manager.err = missing.err
		d.want(404, "not_found", "POST", "/api/v1/sandboxes/k"+path, malformed, withToken(powerless))
		d.want(400, "malformed", "POST", "/api/v1/sandboxes/k"+path, malformed)
	}
	library, s := newLibrary(t)
	s.err = &chat.NotFoundError{ID: "none"}
	library.want(404, "chat_not_found", "POST", chatPath+"/file-urls", malformed)
}

func TestExecAnswer(t *testing.T) {
	d := newDoor(t)
	code := 3
	d.manager.exec = lifecycle.ExecResult{
		SessionID: sessionID, Backend: "fake", Status: lifecycle.ExecCompleted, ExitCode: &code, Stdout: "o", Stderr: "e",
		StdoutRaw: []byte{0, 255}, StdoutTruncated: true, Duration: 1500 * time.Microsecond, Timeout: 2 * time.Minute,
		CPUTime: 2500 * time.Microsecond, PeakMemoryBytes: 7,
		Overridden: []policy.Override{{Field: "timeout", Requested: 999, Effective: 120, Rule: "profiles.default.max_timeout"}},
		Created:    true, Recreated: true, SessionTerminated: true,
	}
	var got apitype.ExecResult
	d.want(200, "", "POST", execPath, `{"command":["a"]}`).decode(t, &got)
	want := apitype.ExecResult{
		SessionID: sessionID, Backend: "fake", Status: "completed", ExitCode: &code, Stdout: "o", Stderr: "e", StdoutBase64: []byte{0, 255},
		StdoutTruncated: true, DurationMS: 1, CPUTimeMS: 2, PeakMemoryBytes: 7, Timeout: apitype.Duration(2 * time.Minute),
		Overridden: []apitype.Override{{Field: "timeout", Requested: 999.0, Effective: 120.0, Rule: "profiles.default.max_timeout"}},
		Created:    true, Recreated: true, SessionTerminated: true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}

	d.manager.exec.ExitCode, d.manager.exec.Status = nil, lifecycle.ExecTimedOut
	a := d.want(200, "", "POST", execPath, `{"command":["a"]}`)
	if !strings.Contains(a.body, `"exit_code":null`) || !strings.Contains(a.body, `"ok":false`) {
		t.Errorf("got %s", a.body)
	}

	d.manager.exec.QuotaExceeded = true
	if p := d.want(507, "quota_exceeded", "POST", execPath, `{"command":["a"]}`).problem(t); p.Result == nil || p.Result.Stdout != "o" {
		t.Errorf("the result is lost: %+v", p)
	}
}
