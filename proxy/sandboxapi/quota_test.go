package sandboxapi_test

import (
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
)

// TestQuotaOfCommands checks that each way to the end of a command says how it left the
// workspace, beside how it ended.
func TestQuotaOfCommands(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.finish(io.EOF)
	if x := d.want(200, "", "GET", execsPath+"/job-1", "").body; strings.Contains(x, "workspace_quota") {
		t.Errorf("without a quota: %s", x)
	}
	s := d.manager.streams
	s.execution.QuotaEnforcement, s.ended.QuotaEnforcement, s.ended.QuotaExceeded = "soft", "soft", true
	d.manager.exec.QuotaEnforcement = "soft"
	want := &apitype.WorkspaceQuota{Enforcement: "soft", Exceeded: true}

	for name, a := range map[string]answer{
		"followed": d.want(200, "", "GET", streamPath, "", asNDJSON),
		"streamed": d.want(200, "", "POST", execPath, `{"command":["a"]}`, asNDJSON),
	} {
		evs := events(t, a.body)
		if q := evs[0].Execution.WorkspaceQuota; q == nil || q.Exceeded {
			t.Errorf("%s, at its start: %+v", name, q)
		}
		last := evs[len(evs)-1]
		if last.Exit == nil || last.Status != "completed" || last.ExitCode == nil {
			t.Fatalf("%s: the result is lost: %+v", name, last)
		}
		if diff := cmp.Diff(want, last.WorkspaceQuota); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	var end apitype.AttachEnd
	if err := json.Unmarshal([]byte(closed(t, d.dial(execAttachPath)).Reason), &end); err != nil || !end.QuotaExceeded || end.ExitCode == nil {
		t.Errorf("attached: %+v, %v", end, err)
	}

	s.execution = s.ended
	var x apitype.Execution
	d.want(200, "", "GET", execsPath+"/job-1", "").decode(t, &x)
	if diff := cmp.Diff(want, x.WorkspaceQuota); diff != "" {
		t.Error(diff)
	}
	var res apitype.ExecResult
	d.want(200, "", "POST", execPath, `{"command":["a"]}`).decode(t, &res)
	if res.WorkspaceQuota == nil || res.WorkspaceQuota.Exceeded {
		t.Errorf("within its quota: %+v", res.WorkspaceQuota)
	}
	d.manager.exec.QuotaExceeded = true
	p := d.want(507, "quota_exceeded", "POST", execPath, `{"command":["a"]}`).problem(t)
	if p.Result == nil || cmp.Diff(want, p.Result.WorkspaceQuota) != "" {
		t.Errorf("over its quota: %+v", p.Result)
	}
}
