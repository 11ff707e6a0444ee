package policy

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestExecTimeout(t *testing.T) {
	p := mustParse(t, "profiles: {fixed: {timeout: 45s, locked: [timeout]}, odd: {timeout: 1s, max_timeout: 1500ms}}", Options{})
	tests := []struct {
		profile string
		seconds *int64
		want    time.Duration
		over    []Override
		rule    string
	}{
		{"", nil, 30 * time.Second, nil, ""},
		{"default", ptr(int64(1)), time.Second, nil, ""},
		{"default", ptr(int64(120)), 120 * time.Second, nil, ""},
		{"default", ptr(int64(121)), 120 * time.Second, []Override{{"timeout", int64(121), 120.0, ruleTimeoutMax}}, ""},
		{"network_extended", ptr(int64(300)), 300 * time.Second, nil, ""},
		{"default", ptr(int64(math.MaxInt64)), 120 * time.Second, []Override{{"timeout", int64(math.MaxInt64), 120.0, ruleTimeoutMax}}, ""},
		{"odd", ptr(int64(2)), 1500 * time.Millisecond, []Override{{"timeout", int64(2), 1.5, ruleTimeoutMax}}, ""},
		{"fixed", nil, 45 * time.Second, nil, ""},
		{"fixed", ptr(int64(45)), 45 * time.Second, nil, ""},
		{"fixed", ptr(int64(1)), 45 * time.Second, []Override{{"timeout", int64(1), 45.0, "profiles.fixed.locked"}}, ""},
		{"default", ptr(int64(0)), 0, nil, ruleTimeoutRange},
		{"fixed", ptr(int64(-1)), 0, nil, ruleTimeoutRange},
		{"gone", nil, 0, nil, ruleProfileUnknown},
	}
	for _, tt := range tests {
		got, over, err := p.ExecTimeout(tt.profile, tt.seconds)
		if tt.rule != "" {
			var denied *DeniedError
			if !errors.As(err, &denied) || denied.Reasons[0].Rule != tt.rule || !denied.Invalid() {
				t.Errorf("%+v: %v", tt, err)
			}
			continue
		}
		if d := cmp.Diff(tt.over, over); d != "" || got != tt.want || err != nil {
			t.Errorf("%s: %v %v %s", tt.profile, got, err, d)
		}
	}
}

func TestWorkingDir(t *testing.T) {
	mounted := Spec{HostPath: "/srv/x", HostPathMode: "rw", MountPath: "/workspace"}
	none := Spec{HostPathMode: "none", MountPath: "/workspace"}
	bare := Spec{HostPathMode: "rw", MountPath: "/workspace"}
	tests := []struct {
		name string
		spec Spec
		cwd  string
		want string
		rule string
	}{
		{"mount", mounted, "/workspace", "/workspace", ""},
		{"default", mounted, "", "/workspace", ""},
		{"below", mounted, "/workspace/a/b/", "/workspace/a/b", ""},
		{"dots that stay", mounted, "/workspace/../workspace/./a", "/workspace/a", ""},
		{"dots out", mounted, "/workspace/../etc", "", ruleCwdOutside},
		{"like it", mounted, "/workspacex", "", ruleCwdOutside},
		{"root", mounted, "/", "", ruleCwdOutside},
		{"elsewhere", mounted, "/tmp", "", ruleCwdOutside},
		{"relative", mounted, "a", "", ruleCwdSyntax},
		{"control", mounted, "/workspace/\n", "", ruleCwdSyntax},
		{"too long", mounted, strings.Repeat("/a", 3000), "", ruleCwdSyntax},
		{"none", none, "/etc/", "/etc", ""},
		{"none, default", none, "", "", ""},
		{"bare", bare, "/", "/", ""},
		{"bare, relative", bare, "..", "", ruleCwdSyntax},
	}
	for _, tt := range tests {
		got, err := WorkingDir(tt.spec, tt.cwd)
		if tt.rule == "" {
			if got != tt.want || err != nil {
				t.Errorf("%s: %q %v", tt.name, got, err)
			}
			continue
		}
		var denied *DeniedError
		if !errors.As(err, &denied) || denied.Reasons[0].Rule != tt.rule || denied.Invalid() != (tt.rule == ruleCwdSyntax) || got != "" {
			t.Errorf("%s: %q %v", tt.name, got, err)
		}
	}
}
