package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/policy"
)

// hostTree makes a root directory with some files of a kernel.
func hostTree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(name)), 0o755))
		write(t, filepath.Join(root, name), content)
	}
	return root
}

func TestDoctorHost(t *testing.T) {
	t.Parallel()
	const status = "Name:\tberm\nCapEff:\t000001fffeffffff\nSeccomp:\t0\n"
	const bare = "Name:\tberm\nCapEff:\t0000000000000000\n"
	swap := "Filename\tType\tSize\tUsed\tPriority\n/dev/vdb\tpartition\t1\t0\t-2\n"
	for name, tt := range map[string]struct {
		files map[string]string
		kind  string
		away  bool // the engine doesn't share the root
		want  map[string]grade
		found string
	}{
		"version 2": {
			files: map[string]string{
				"proc/self/status": status, "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n", "proc/swaps": swap,
				"sys/module/apparmor/parameters/enabled": "Y\n", "etc/os-release": "NAME=x\nPRETTY_NAME=\"Some Linux 1\"\n", "proc/sys/kernel/osrelease": "6.1.0\n",
			},
			want:  map[string]grade{},
			found: "Some Linux 1, Linux 6.1.0, ",
		},
		"hybrid, swap uncounted": {
			files: map[string]string{
				"proc/self/status": status, "sys/fs/cgroup/memory/x": "", "sys/fs/cgroup/cpu/x": "", "sys/fs/cgroup/pids/x": "", "sys/fs/cgroup/unified/cgroup.controllers": "",
				"proc/swaps": swap, "sys/fs/selinux/enforce": "1",
			},
			want:  map[string]grade{"host.swap": gradeSoft},
			found: "v1 (hybrid): memory, cpu, pids",
		},
		"swap counted": {
			files: map[string]string{
				"proc/self/status": status, "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": "", "sys/fs/cgroup/cpu/x": "", "sys/fs/cgroup/pids/x": "", "proc/swaps": swap,
			},
			want:  map[string]grade{"host.lsm": gradeSoft},
			found: "counted",
		},
		"a controller is missing": {
			files: map[string]string{"proc/self/status": status, "sys/fs/cgroup/cgroup.controllers": "cpu pids\n", "sys/fs/selinux/enforce": "1"},
			want:  map[string]grade{"host.cgroups": gradeBad},
			found: "v2: cpu, pids",
		},
		"missing, elsewhere": {
			files: map[string]string{"proc/self/status": bare, "sys/fs/selinux/enforce": "0"}, away: true,
			want:  map[string]grade{"host.lsm": gradeSoft},
			found: "none to be seen, as seen from this container",
		},
		"without seccomp and rights": {
			files: map[string]string{"proc/self/status": bare, "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n", "sys/fs/selinux/enforce": "1"}, kind: "containerd",
			want:  map[string]grade{"host.seccomp": gradeBad, "host.user": gradeBad},
			found: "uid 7, without CAP_SYS_ADMIN and CAP_NET_ADMIN",
		},
		"few inotify instances": {
			files: map[string]string{
				"proc/self/status": status, "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n", "sys/fs/selinux/enforce": "1",
				"proc/sys/fs/inotify/max_user_instances": "128\n", "proc/sys/kernel/pty/max": "4096\n",
			},
			want:  map[string]grade{"host.limits": gradeSoft},
			found: "fs.inotify.max_user_instances 128, kernel.pty.max 4096",
		},
		"enough for Docker": {
			files: map[string]string{"proc/self/status": bare + "Seccomp: 2\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n", "sys/fs/selinux/enforce": "1"}, kind: "docker",
			want:  map[string]grade{},
			found: "enough for Docker",
		},
		"no /proc": {want: map[string]grade{"host.system": gradeSoft}, found: "proc/self/status"},
	} {
		h, err := lookAtHost(hostTree(t, tt.files), 7)
		h.err = err
		findings := h.judge(tt.kind, !tt.away)
		var all strings.Builder
		got := gradesOf(findings)
		for _, f := range findings {
			all.WriteString(f.Found + "\n")
			if f.Grade == gradeOK {
				delete(got, f.ID)
			}
		}
		if d := cmp.Diff(tt.want, got); d != "" || !strings.Contains(all.String(), tt.found) {
			t.Errorf("%s: %s\n%s", name, d, &all)
		}
	}
}

func TestJudgeOwner(t *testing.T) {
	both := uint64(1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE)
	owned := parsePolicy(t, "version: 1\nmounts: {owner: \"1000:1000\"}\n")
	for name, tt := range map[string]struct {
		policy *policy.Policy
		host   hostFacts
		chats  string
		want   grade
	}{
		"no policy":         {nil, hostFacts{}, "/chats", ""},
		"none":              {parsePolicy(t, ""), hostFacts{}, "/chats", ""},
		"root":              {owned, hostFacts{caps: both}, "/chats", gradeOK},
		"Berm's own":        {owned, hostFacts{uid: 1000}, "/chats", gradeOK},
		"no CAP_CHOWN":      {owned, hostFacts{caps: both &^ (1 << unix.CAP_CHOWN)}, "/chats", gradeBad},
		"no DAC_OVERRIDE":   {owned, hostFacts{uid: 7, caps: 1 << unix.CAP_CHOWN}, "/chats", gradeBad},
		"nothing is needed": {owned, hostFacts{uid: 7}, "", gradeSoft},
		"not known":         {owned, hostFacts{err: serve.ErrStuck}, "/chats", ""},
	} {
		findings := tt.host.judgeOwner(tt.policy, tt.chats)
		if got := gradesOf(findings)["policy.owner"]; got != tt.want || len(findings) > 0 && !strings.Contains(findings[0].Found, "mounts.owner is 1000:1000") {
			t.Errorf("%s: %+v, want %q", name, findings, tt.want)
		}
	}
}
