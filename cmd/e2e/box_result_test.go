package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/bermhq/berm/proxy/apitype"
)

// What a command comes to.
var boxResults = []boxCase{
	{"can't be killed", resultNotKilled}, // first, as it waits long
	{"fields", resultFields},
	{"killed", resultKilled},
	{"timed_out", resultTimedOut},
	{"truncation", resultTruncated},
	{"bounded in memory", resultBounded},
	{"invalid UTF-8 and raw", resultRaw},
}

func resultFields(r *boxRow) {
	status, answer := r.raw(http.MethodPost, r.key+"/exec", `{"command": "echo out; echo err >&2; exit 3", "sandbox": {}}`)
	for field, want := range map[string]any{
		"session_id": r.get().SessionID, "backend": r.kind, "status": "completed", "ok": false, "exit_code": 3.0, "stdout": "out\n", "stderr": "err\n",
		"stdout_truncated": false, "stderr_truncated": false, "created": true, "recreated": false, "session_terminated": false, "timeout": "30s",
	} {
		if got, ok := answer[field]; !ok || got != want {
			r.Errorf("%s is %v, want %v", field, got, want)
		}
	}
	if ms, ok := answer["duration_ms"].(float64); !ok || ms < 0 || status != http.StatusOK {
		r.Errorf("%d %v", status, answer)
	}
	status, answer = r.raw(http.MethodPost, r.key+"/exec", `{"command": ["sleep", "60"], "timeout": 1}`)
	code, there := answer["exit_code"]
	if ms, _ := answer["duration_ms"].(float64); status != http.StatusOK || code != nil || !there || answer["status"] != "timed_out" || answer["ok"] != false || ms < 1000 {
		r.Errorf("%d %v", status, answer)
	}
}

// A command whose sandbox ends has no exit code.
func resultKilled(r *boxRow) {
	r.create(apitype.SandboxRequest{})
	type outcome struct {
		res *apitype.ExecResult
		err error
	}
	over := make(chan outcome, 1)
	go func() {
		res, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("echo begun; touch /tmp/on; sleep 300"), Timeout: apitype.SecondsOf(110)})
		over <- outcome{res, err}
	}()
	until(r, "the command to run", func() bool { return exists(r.inside("/tmp/on")) })
	if _, err := r.c.Delete(r.ctx, r.key); err != nil {
		r.Fatal(err)
	}
	if o := <-over; o.err != nil || o.res.Status != "killed" || o.res.ExitCode != nil || o.res.OK || o.res.Stdout != "begun\n" {
		r.Errorf("%+v, %v", o.res, o.err)
	}
}

// At its timeout, the whole tree of a command's processes is killed, and nothing else.
func resultTimedOut(r *boxRow) {
	sb := r.create(apitype.SandboxRequest{})
	over := make(chan error, 1)
	go func() {
		res, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{
			Command: shell("touch /tmp/on; until test -e /tmp/go; do sleep 0.1; done; echo other"), Timeout: apitype.SecondsOf(110),
		})
		if err == nil && (!res.OK || res.Stdout != "other\n") {
			err = fmt.Errorf("%+v", res)
		}
		over <- err
	}()
	until(r, "the other command to run", func() bool { return exists(r.inside("/tmp/on")) })
	const tree = `trap '' TERM HUP INT; echo begun; echo worse >&2; sleep 301 & (sleep 302 &) ; setsid sh -c '(sleep 303 &) ; sleep 304' & sleep 305`
	res := r.exec(apitype.ExecRequest{Command: shell(tree), Timeout: apitype.SecondsOf(2), Env: map[string]string{"BOX_MARK": r.key}})
	if res.Status != "timed_out" || res.ExitCode != nil || res.OK || res.SessionTerminated || res.Stdout != "begun\n" || res.Stderr != "worse\n" ||
		time.Duration(res.Timeout) != 2*time.Second || res.DurationMS < 2000 {
		r.Errorf("%+v", res)
	}
	until(r, "its processes to be gone", func() bool { return len(r.marked("BOX_MARK", r.key)) == 0 })
	if got := r.sh("ps -o args"); strings.Contains(got, "sleep 30") {
		r.Errorf("still there:\n%s", got)
	}
	r.sh("touch /tmp/go")
	if err := <-over; err != nil {
		r.Errorf("the other command: %v", err)
	}
	if now := r.get(); now.SessionID != sb.SessionID || now.ContainerID != sb.ContainerID {
		r.Errorf("the sandbox isn't the same any more: %+v", now)
	}
}

// truncation is a text's length, its limit, and what is left of it. A test of lifecycle
// has more of them.
type truncation struct{ n, limit, head, tail, cut int }

var truncations = []truncation{
	{520, 100, 37, 25, 458}, {5000, 4000, 2376, 1585, 1039}, {1048576, 4000, 2374, 1584, 1044618},
}

// printed is a text of n code points, of every length that they have in UTF-8.
func printed(n int) []rune {
	text := make([]rune, n)
	for i := range text {
		text[i] = []rune{'a', 'ß', '中', '😀', '\n', 'z', '0'}[i*i%7]
	}
	return text
}

func notice(cut int) string { return fmt.Sprintf("\n\n... [%d characters truncated] ...\n\n", cut) }

// both prints its input on both streams.
const both = "cat > /tmp/all; cat /tmp/all; cat /tmp/all >&2"

func resultTruncated(r *boxRow) {
	r.create(apitype.SandboxRequest{})
	for _, v := range truncations {
		text := printed(v.n)
		want := string(text[:v.head]) + notice(v.cut) + string(text[v.n-v.tail:])
		if utf8.RuneCountInString(want) != v.limit {
			r.Fatalf("%+v: the vector is wrong", v)
		}
		req := apitype.ExecRequest{Command: shell(both), Stdin: new(string(text)), OutputLimit: &v.limit}
		if v.limit == 4000 {
			req.OutputLimit = nil
		}
		res := r.exec(req)
		if res.Stdout != want || !res.StdoutTruncated || res.Stderr != want || !res.StderrTruncated || !res.OK {
			r.Errorf("%+v: stdout %.120q (%d), stderr %.120q (%d), %v, %v", v, res.Stdout, utf8.RuneCountInString(res.Stdout),
				res.Stderr, utf8.RuneCountInString(res.Stderr), res.StdoutTruncated, res.StderrTruncated)
		}
	}
}

// Whatever a command prints, the server keeps little of it.
func resultBounded(r *boxRow) {
	r.create(apitype.SandboxRequest{})
	const size = 96 << 20
	peak := func() int { return weigh(r.T, r.s.cmd.Process.Pid).rss }
	before, most := peak(), 0
	over := make(chan *apitype.ExecResult, 1)
	go func() {
		res, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell(fmt.Sprintf("yes | head -c %d", size)), Timeout: apitype.SecondsOf(110)})
		if err != nil {
			r.Error(err)
		}
		over <- res
	}()
	for {
		select {
		case res := <-over:
			want := strings.Repeat("y\n", 2000)
			if res == nil || !res.OK || !res.StdoutTruncated || res.Stdout[:2370] != want[:2370] || !strings.Contains(res.Stdout, notice(size-(4000-35-9))) {
				r.Errorf("%+v", res)
			}
			// Others run beside; a server that kept it all would have more than all of it.
			if most > before+(size>>10)*2/3 {
				r.Errorf("the server had %d kB before, and %d kB meanwhile", before, most)
			}
			return
		case <-time.After(20 * time.Millisecond):
			most = max(most, peak())
		}
	}
}

func resultRaw(r *boxRow) {
	r.create(apitype.SandboxRequest{})
	const odd = "a\xffb\xe4\xb8c\xf0\x9f\x98"
	req := apitype.ExecRequest{Command: shell(both), StdinBase64: []byte(odd)}
	if res := r.exec(req); res.Stdout != string([]rune(odd)) || res.Stderr != res.Stdout || res.StdoutTruncated || res.StdoutBase64 != nil {
		r.Errorf("%+v", res)
	}
	req.Raw = true
	if res := r.exec(req); string(res.StdoutBase64) != odd || string(res.StderrBase64) != odd || res.Stdout != "" || res.StdoutTruncated {
		r.Errorf("raw: %+v", res)
	}
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	req.StdinBase64, req.OutputLimit = bytes.Repeat(every, 40), new(10000)
	if res := r.exec(req); !bytes.Equal(res.StdoutBase64, req.StdinBase64[:10000]) || !res.StdoutTruncated {
		r.Errorf("raw and much: %d bytes, %v", len(res.StdoutBase64), res.StdoutTruncated)
	}
}

// A command that can't be killed takes its sandbox along. One in a frozen control group
// can't be, where the kernel's version 1 is in use.
func resultNotKilled(r *boxRow) {
	if !exists("/sys/fs/cgroup/freezer") {
		r.Skip("there is nothing that can't be killed")
	}
	r.create(apitype.SandboxRequest{})
	on := r.inside("/tmp/on")
	for timeout := int64(3); ; timeout *= 2 { // until it is frozen in time
		over := make(chan *apitype.ExecResult, 1)
		go func() {
			res, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{
				Command: shell("touch /tmp/on; echo begun; sleep 300; true"), Timeout: apitype.SecondsOf(timeout), Env: map[string]string{"BOX_MARK": r.key},
			})
			if err != nil {
				r.Error(err)
			}
			over <- res
		}()
		until(r, "the command to run", func() bool { return exists(on) || len(over) > 0 })
		thaw, frozen := r.freeze(r.marked("BOX_MARK", r.key))
		if frozen {
			until(r, "the sandbox to be given up", func() bool {
				return strings.Contains(readString(r.T, r.s.logPath()), "msg=sandbox_terminated tenant=box key="+r.key+" ") || len(over) > 0
			})
		}
		thaw()
		res := <-over
		if res != nil && !frozen {
			r.sh("rm -f /tmp/on")
			continue
		}
		if res == nil || res.Status != "timed_out" || !res.SessionTerminated || res.ExitCode != nil || res.Stdout != "begun\n" {
			r.Errorf("%+v", res)
		}
		break
	}
	r.wantNone()
	until(r, "its processes to be gone", func() bool { return len(r.marked("BOX_MARK", r.key)) == 0 })
}

// freeze keeps processes of the sandbox from everything, their end included. It tells
// whether there were any.
func (x boxSandbox) freeze(pids []int) (thaw func(), frozen bool) {
	x.t.Helper()
	dir := filepath.Join("/sys/fs/cgroup/freezer", "berm-box-"+filepath.Base(x.s.dir)+"-"+x.key)
	if err := os.Mkdir(dir, 0o755); err != nil {
		x.t.Fatal(err)
	}
	put := func(file string, v any) error {
		return os.WriteFile(filepath.Join(dir, file), []byte(fmt.Sprint(v)), 0)
	}
	thaw = sync.OnceFunc(func() {
		if err := put("freezer.state", "THAWED"); err != nil {
			x.t.Error(err)
		}
		until(x.t, "the frozen control group to be empty", func() bool { return os.Remove(dir) == nil || !exists(dir) })
	})
	x.t.Cleanup(thaw)
	for _, pid := range pids {
		frozen = put("cgroup.procs", pid) == nil || frozen // else it has ended
	}
	if err := put("freezer.state", "FROZEN"); err != nil {
		x.t.Fatal(err)
	}
	until(x.t, "them to be frozen", func() bool { return readString(x.t, filepath.Join(dir, "freezer.state")) == "FROZEN" })
	return thaw, frozen && readString(x.t, filepath.Join(dir, "cgroup.procs")) != ""
}
