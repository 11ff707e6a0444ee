package cli

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// Every field that the API takes has a flag.
func TestCreateFlagsAreComplete(t *testing.T) {
	cmd := newCreateCommand(&clientFlags{})
	args := []string{
		"--profile=p", "--image=i", "--network=n", "--host-path=/h", "--host-path-mode=ro", "--mount-path=/m", "--mount=/a:/b:rw",
		"--cpus=1", "--memory-mb=2", "--pids-limit=3", "--read-only-rootfs", "--workspace-quota-mb=4", "--env=A=B", "--ttl=1m",
		"--idle-ttl=2m", "--metadata=a=b", "--agent-id=x", "--volume-host-path=/v",
	}
	cmd.ResetFlags()
	request := addSpecFlags(cmd.Flags())
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	req, err := request()
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	if fields := reflect.TypeFor[apitype.SandboxRequest]().NumField(); fields != len(args) {
		t.Errorf("a request has %d fields, and there are %d flags", fields, len(args))
	}
	want := `{"profile":"p","image":"i","network":"n","host_path":"/h","host_path_mode":"ro","mount_path":"/m",` +
		`"extra_mounts":[{"host_path":"/a","mount_path":"/b","mode":"rw"}],"cpus":1,"memory_mb":2,"pids_limit":3,"read_only_rootfs":true,` +
		`"workspace_quota_mb":4,"env":{"A":"B"},"ttl":"1m0s","idle_ttl":"2m0s","metadata":{"a":"b"},"agent_id":"x","volume_host_path":"/v"}`
	if string(got) != want {
		t.Errorf("the request is\n%s\nwant\n%s", got, want)
	}
}

func TestSeconds(t *testing.T) {
	for d, want := range map[time.Duration]int64{time.Second: 1, 1500 * time.Millisecond: 2, time.Nanosecond: 1, 0: 0} {
		if got := seconds(d); got != want {
			t.Errorf("%s is %d s, want %d", d, got, want)
		}
	}
}

func TestShown(t *testing.T) {
	for in, want := range map[string]string{
		"plain": "plain", "with blank": "with blank", "": `""`, "a\nb": `"a\nb"`, "\x1b[2J": `"\x1b[2J"`, "é": "é", "\xff": `"\xff"`,
	} {
		if got := shown(in); got != want {
			t.Errorf("%q is shown as %s, want %s", in, got, want)
		}
	}
	if got := harmless("a\tb\x1b[2J\r\u009b", "\t"); got != "a\tb\ufffd[2J\ufffd\ufffd" {
		t.Errorf("a line is shown as %q", got)
	}
}

func TestOneLine(t *testing.T) {
	if got := oneLine([]string{"sh", "-c", "a b", "", "\x1b"}); got != `sh -c "a b" "" "\x1b"` {
		t.Errorf("a command is shown as %s", got)
	}
	if got := oneLine([]string{strings.Repeat("x", 200)}); got != strings.Repeat("x", maxShown)+"…" {
		t.Errorf("a long command is shown as %s", got)
	}
}

// Names come from sandboxes, too.
func TestShowChatFiles(t *testing.T) {
	t.Parallel()
	kind := "text/x\x1b[2J"
	out := showChatFiles([]apitype.ChatFile{{Name: "a\x1b[2Jb", ContentType: &kind, FileID: "\r"}})
	if strings.ContainsAny(out, "\x1b\r") || !strings.Contains(out, `"a\x1b[2Jb"`) {
		t.Errorf("got %q", out)
	}
}
