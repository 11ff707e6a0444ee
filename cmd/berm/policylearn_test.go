package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/engineapi"
)

func auditLine(t *testing.T, verdict string, reasons ...policy.Reason) string {
	t.Helper()
	line, err := json.Marshal(engineapi.Record{
		Time: time.Now(), RequestID: "r", Caller: "ci", Tenant: "ci", Peer: "uid=0 pid=1", Method: "POST", Route: "/containers/create",
		Version: "1.41", Verdict: verdict, Rule: "x", Reasons: reasons, Objects: []string{"o"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(line) + "\n"
}

func TestPolicyLearn(t *testing.T) {
	dir := t.TempDir()
	capability := policy.Reason{Rule: "containers.capabilities", Field: "HostConfig.CapAdd[0]", Value: "NET_ADMIN", Message: "no"}
	image := policy.Reason{Rule: "images.allow", Field: "Image", Value: "example.com/tool:1", Message: "no"}
	root := policy.Reason{Rule: "mounts.always_refused", Field: "HostConfig.Binds[0]", Value: "/etc", Message: "not /etc, ever"}
	write(t, filepath.Join(dir, "one"), auditLine(t, engineapi.VerdictAllowed)+auditLine(t, engineapi.VerdictDenied, image)+auditLine(t, engineapi.VerdictDenied, root))
	write(t, filepath.Join(dir, "policy.yaml"), "version: 1\nimages: {allow: [busybox]}\n")
	args := []string{"policy", "learn", "--policy", filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "one"), "-"}
	torn := strings.TrimSuffix(auditLine(t, engineapi.VerdictDenied, image), "\"}\n")
	stdout, stderr, code := berm(t, auditLine(t, engineapi.VerdictWouldDeny, capability)+torn, args...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	for _, want := range []string{"CAP_NET_ADMIN", "example.com/tool", "busybox", "# - mounts.always_refused: not /etc, ever"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("lacks %q:\n%s", want, stdout)
		}
	}
	for name, tt := range map[string]struct{ log, want string }{
		"not JSON":     {"x\n", "line 1: "},
		"another kind": {`{"level":"info"}` + "\n", "line 1: "},
		"too long":     {auditLine(t, engineapi.VerdictAllowed) + strings.Repeat("x", 1<<20+1), "line 2 has more than"},
		"two in one":   {strings.Replace(auditLine(t, engineapi.VerdictAllowed), "}\n", "}{}\n", 1), "line 1: "},
	} {
		stdout, stderr, code := berm(t, tt.log, "policy", "learn", "-")
		if code != 1 || !strings.Contains(stderr, tt.want) || stdout != "" {
			t.Errorf("%s: exit code %d, %q, %q", name, code, stdout, stderr)
		}
	}
	if _, stderr, code := berm(t, "", "policy", "learn", filepath.Join(dir, "none")); code != 1 || !strings.Contains(stderr, "no such file") {
		t.Errorf("a missing file: exit code %d, %s", code, stderr)
	}
	if _, _, code := berm(t, "", "policy", "learn"); code != 2 {
		t.Errorf("no file: exit code %d", code)
	}
}
