package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestRun(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	plain := write("plain", "text", 0o644)
	script := write("script", "echo \"$0 $#\"; exit $#\n", 0o755)
	lost := write("lost", "#!/no/such/interpreter\n", 0o755)
	t.Setenv("OUTER", "outer")
	t.Setenv("OVER", "outer")
	k, _ := serveStdio(t)
	for name, tt := range map[string]struct {
		start          wire.Start
		code, signal   int
		stdout, stderr string
	}{
		"both streams":      {start: wire.Start{Command: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}}, code: 7, stdout: "out\n", stderr: "err\n"},
		"killed":            {start: wire.Start{Command: []string{"sh", "-c", "kill -KILL $$"}}, code: 137, signal: 9},
		"environment":       {start: wire.Start{Command: []string{"sh", "-c", "echo $OUTER $OVER $NEW"}, Env: []string{"NEW=1", "OVER=x", "OVER=y", "NEW=new"}}, stdout: "outer y new\n"},
		"directory":         {start: wire.Start{Command: []string{"pwd"}, Dir: dir}, stdout: dir + "\n"},
		"directory is made": {start: wire.Start{Command: []string{"pwd"}, Dir: dir + "/new/below"}, stdout: dir + "/new/below\n"},
		"program in it":     {start: wire.Start{Command: []string{"./script", "a"}, Dir: dir}, code: 1, stdout: "./script 1\n"},
		"relative PATH":     {start: wire.Start{Command: []string{"script"}, Dir: filepath.Dir(dir), Env: []string{"PATH=/nowhere:" + filepath.Base(dir)}}, stdout: filepath.Base(dir) + "/script 0\n"},
		"its own PATH":      {start: wire.Start{Command: []string{"script", "1", "2"}, Env: []string{"PATH=" + dir}}, code: 2, stdout: script + " 2\n"},
		"no PATH":           {start: wire.Start{Command: []string{"true"}, Env: []string{"PATH="}}, code: 127, stderr: "berm-agent: true: not found\n"},
		"missing":           {start: wire.Start{Command: []string{"no-such-program"}}, code: 127, stderr: "berm-agent: no-such-program: not found\n"},
		"no interpreter":    {start: wire.Start{Command: []string{lost}}, code: 127, stderr: "berm-agent: " + lost + ": not found\n"},
		"not executable":    {start: wire.Start{Command: []string{plain}}, code: 126, stderr: "berm-agent: " + plain + ": permission denied\n"},
		"too long":          {start: wire.Start{Command: []string{"true", strings.Repeat("x", 200<<10)}}, code: 126, stderr: "berm-agent: true: argument list too long\n"},
	} {
		t.Run(name, func(t *testing.T) {
			k.t = t
			tt.start.ID = "x"
			a := k.do(command(tt.start))
			if a.failure != nil {
				t.Fatal(a.failure)
			}
			if a.info.ExitCode != tt.code || a.info.Signal != tt.signal || a.stdout.String() != tt.stdout || a.stderr.String() != tt.stderr {
				t.Errorf("exit code %d, signal %d, %q, %q; want %d, %d, %q, %q",
					a.info.ExitCode, a.info.Signal, &a.stdout, &a.stderr, tt.code, tt.signal, tt.stdout, tt.stderr)
			}
			if a.info.Running || a.info.StartedAt == 0 || a.info.EndedAt < a.info.StartedAt || a.info.OOMKilled || a.info.Killed || a.info.TimedOut {
				t.Errorf("%+v", a.info)
			}
			await(t, "it to be forgotten", func() bool { return k.ask(wire.OpProcess, "x").class() == wire.ClassNotFound })
		})
	}
}

// What a command is started with is its own, not this program's.
func TestRunIsClean(t *testing.T) {
	k, cmd := serveStdio(t)
	// The agent was started with the limit that this process was.
	plain, err := shell("ulimit -Sn")
	must(t, err)
	a := k.run("x", `grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status; ls /proc/self/fd | wc -l; ulimit -Sn; cut -d' ' -f5,6 /proc/self/stat; umask`)
	lines := strings.Split(strings.TrimSpace(a.stdout.String()), "\n")
	if len(lines) != 7 {
		t.Fatalf("%q, %q", &a.stdout, &a.stderr)
	}
	for i, want := range []string{"SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000"} {
		if lines[i] != want {
			t.Errorf("%s, want %s", lines[i], want)
		}
	}
	if lines[3] != "4" { // and that of the directory
		t.Errorf("%s open files", lines[3])
	}
	if lines[4] != strings.TrimSpace(plain) {
		t.Errorf("limit of open files %s, want %s", lines[4], plain)
	}
	if ids := strings.Fields(lines[5]); ids[0] != ids[1] || ids[0] == fmt.Sprint(cmd.Process.Pid) {
		t.Errorf("process group and session %s", lines[5])
	}
}

// A program may take no input, of which nothing is no end.
func TestRunInput(t *testing.T) {
	k, _ := serveStdio(t)
	a, ok := k.begin(command(wire.Start{ID: "x", Command: []string{"sh", "-c", "exec <&-; echo ready; sleep 0.2"}, Stdin: true}))
	for ok && a.stdout.Len() == 0 && k.next(a) {
	}
	in := k.input("x")
	in.write("")
	must(t, in.w.Send(wire.KindData, make([]byte, wire.MaxData)))
	b := new(outcome)
	if in.next(b) || b.class() != wire.ClassPrecondition {
		t.Errorf("%+v", b)
	}
	for k.next(a) {
	}
	if a.failure != nil || a.info.ExitCode != 0 {
		t.Errorf("%+v", a)
	}
}

func TestMuchOutput(t *testing.T) {
	t.Parallel()
	const size = 64 << 20
	k, cmd := serveStdio(t)
	k.patience(2 * time.Minute)
	a, ok := k.begin(command(wire.Start{ID: "x", Command: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}}))
	if !ok {
		t.Fatal(a.failure)
	}
	begun, sum, peak := time.Now(), 0, 0
	for k.next(a) {
		if sum += a.stdout.Len(); sum%(16<<20) < wire.MaxData {
			peak = max(peak, anonymous(t, cmd.Process.Pid))
		}
		a.stdout.Reset()
	}
	if sum != size || a.info.NextSeq != size || a.info.ExitCode != 0 {
		t.Errorf("%d bytes of %d: %+v", sum, size, a.info)
	}
	t.Logf("%.0f MB/s, at most %d KiB", float64(size)/1e6/time.Since(begun).Seconds(), peak)
	if peak > 8<<10 {
		t.Errorf("%d KiB for it", peak)
	}
}

// anonymous is the memory of a process that is no file's, in KiB.
func anonymous(t *testing.T, pid int) int {
	t.Helper()
	return status(t, pid, "RssAnon")
}

// status is a number in what the kernel says of a process.
func status(t *testing.T, pid int, field string) (n int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	_, after, _ := strings.Cut(string(b), "\n"+field+":")
	_, err = fmt.Sscan(after, &n)
	must(t, err)
	return n
}

// Others than the command may have its output open.
func TestOutputAfterTheEnd(t *testing.T) {
	t.Parallel()
	k, _ := serveStdio(t)
	for _, tt := range []struct {
		name, script, stdout string
		most                 time.Duration
	}{
		{"silent", "echo one; sleep 30 &", "one\n", 900 * time.Millisecond},
		{"soon", "(sleep 0.1; echo two) & echo one", "one\ntwo\n", 900 * time.Millisecond},
		{"busy", "while sleep 0.1; do echo; done & sleep 0.01", "\n\n", 1500 * time.Millisecond},
	} {
		begun := time.Now()
		a := k.run(tt.name, tt.script)
		if took := time.Since(begun); took > tt.most+2*time.Second || !strings.HasPrefix(a.stdout.String(), tt.stdout) {
			t.Errorf("%s: %q after %s", tt.name, &a.stdout, took)
		}
	}
}

func TestManyRuns(t *testing.T) {
	t.Parallel()
	k, cmd := serveStdio(t)
	k.patience(2 * time.Minute)
	files := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", cmd.Process.Pid))
		must(t, err)
		return len(list)
	}
	k.run("x", "true")
	before := files()
	for i := range 300 {
		a := k.do(command(wire.Start{ID: fmt.Sprint("x", i), Command: []string{"true"}}))
		if a.failure != nil || a.info.ExitCode != 0 {
			t.Fatalf("%d: %+v", i, a)
		}
	}
	await(t, "the supervisors to be reaped", func() bool { return len(children(cmd.Process.Pid)) == 0 })
	await(t, "files to be closed", func() bool { return files() <= before })
	await(t, "all to be forgotten", func() bool { return k.ask(wire.OpProcess, "x299").class() == wire.ClassNotFound })
	t.Logf("%d KiB of its own", anonymous(t, cmd.Process.Pid))
}

func TestRefusals(t *testing.T) {
	k, _ := serveStdio(t)
	k.start(&wire.Start{ID: "there", Command: []string{"sleep", "1000"}})
	k.start(&wire.Start{ID: "over", Command: []string{"true"}})
	k.await("over")
	plain := filepath.Join(t.TempDir(), "plain")
	must(t, os.WriteFile(plain, nil, 0o600))
	start := func(change func(*wire.Start)) *wire.Request {
		s := &wire.Start{ID: "x", Command: []string{"true"}}
		change(s)
		return command(*s)
	}
	process := func(op wire.Op, p wire.Process) *wire.Request { return &wire.Request{Op: op, Process: &p} }
	for name, tt := range map[string]struct {
		req  *wire.Request
		want wire.Class
	}{
		"no operation":        {&wire.Request{}, wire.ClassUnsupported},
		"unknown operation":   {&wire.Request{Op: "reboot"}, wire.ClassUnsupported},
		"nothing to start":    {&wire.Request{Op: wire.OpStart}, wire.ClassInvalid},
		"no ID":               {start(func(s *wire.Start) { s.ID = "" }), wire.ClassInvalid},
		"bad ID":              {start(func(s *wire.Start) { s.ID = "../x" }), wire.ClassInvalid},
		"long ID":             {start(func(s *wire.Start) { s.ID = strings.Repeat("x", 129) }), wire.ClassInvalid},
		"no command":          {start(func(s *wire.Start) { s.Command = nil }), wire.ClassInvalid},
		"NUL":                 {start(func(s *wire.Start) { s.Command = []string{"a\x00b"} }), wire.ClassInvalid},
		"relative directory":  {start(func(s *wire.Start) { s.Dir = "tmp" }), wire.ClassInvalid},
		"impossible one":      {start(func(s *wire.Start) { s.Dir = plain + "/x" }), wire.ClassInvalid},
		"file for one":        {start(func(s *wire.Start) { s.Dir = plain }), wire.ClassInvalid},
		"environment":         {start(func(s *wire.Start) { s.Env = []string{"NAME"} }), wire.ClassInvalid},
		"label":               {start(func(s *wire.Start) { s.Label = strings.Repeat("x", wire.MaxLabel+1) }), wire.ClassInvalid},
		"much to keep":        {start(func(s *wire.Start) { s.KeepBytes = wire.MaxKeep + 1 }), wire.ClassInvalid},
		"less than nothing":   {start(func(s *wire.Start) { s.KeepBytes = -1 }), wire.ClassInvalid},
		"timeout":             {start(func(s *wire.Start) { s.TimeoutMS = -1 }), wire.ClassInvalid},
		"size":                {start(func(s *wire.Start) { s.TTY, s.Rows = true, 1<<16 }), wire.ClassInvalid},
		"there already":       {start(func(s *wire.Start) { s.ID = "there" }), wire.ClassExists},
		"there, and over":     {start(func(s *wire.Start) { s.ID = "over" }), wire.ClassExists},
		"no process":          {&wire.Request{Op: wire.OpKill}, wire.ClassInvalid},
		"unknown process":     {process(wire.OpKill, wire.Process{ID: "x"}), wire.ClassNotFound},
		"no such signal":      {process(wire.OpSignal, wire.Process{ID: "there", Signal: 65}), wire.ClassInvalid},
		"no signal":           {process(wire.OpSignal, wire.Process{ID: "there"}), wire.ClassInvalid},
		"signal to the ended": {process(wire.OpSignal, wire.Process{ID: "over", Signal: 15}), wire.ClassPrecondition},
		"no terminal":         {process(wire.OpResize, wire.Process{ID: "there"}), wire.ClassPrecondition},
		"forget the running":  {process(wire.OpForget, wire.Process{ID: "there"}), wire.ClassPrecondition},
		"beyond the output":   {follow("there", 1), wire.ClassOutOfRange},
		"before the output":   {follow("there", -2), wire.ClassInvalid},
		"followed somehow":    {process(wire.OpFollow, wire.Process{ID: "there"}), wire.ClassInvalid},
		"command of nobody":   {&wire.Request{Op: wire.OpStart, Start: &wire.Start{ID: "x", Command: []string{"true"}, Exec: true}}, wire.ClassInvalid},
		"no input":            {process(wire.OpInput, wire.Process{ID: "there"}), wire.ClassPrecondition},
	} {
		if a := k.do(tt.req); a.class() != tt.want || a.failure.Message == "" {
			t.Errorf("%s: %+v, want %s", name, a.failure, tt.want)
		}
	}
	for _, req := range []*wire.Request{ // that aren't errors
		process(wire.OpForget, wire.Process{ID: "x"}), process(wire.OpKill, wire.Process{ID: "over"}), process(wire.OpForget, wire.Process{ID: "over"}),
	} {
		if a := k.do(req); a.failure != nil {
			t.Errorf("%s: %v", req.Op, a.failure)
		}
	}
	if all := k.list(); len(all) != 1 || all[0].ID != "there" || !all[0].Running {
		t.Errorf("%+v", all)
	}
}

// What was started over a connection that is all there is ends with it.
func TestServeEnds(t *testing.T) {
	k, cmd := serveStdio(t)
	mark := filepath.Join(t.TempDir(), "mark")
	k.start(&wire.Start{ID: "x", Command: []string{"sh", "-c", "setsid sleep 4711 & echo > " + mark + "; sleep 4711"}})
	await(t, "its start", func() bool { _, err := os.Stat(mark); return err == nil })
	k.hangUp()
	if code := exitOf(t, cmd.Wait()); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if out, err := shell("ps -eo args | grep -c '^sleep 471[1]' || true"); err != nil || out != "0\n" {
		t.Errorf("%s are left, %v", out, err)
	}
}

// A process that ends while it is written to holds nothing up, also with a terminal.
func TestEndsUnderInput(t *testing.T) {
	t.Parallel()
	k, _ := serveStdio(t)
	for i := range 20 {
		for _, tty := range []bool{false, true} {
			id := fmt.Sprint(i, "-", tty)
			a, ok := k.begin(command(wire.Start{ID: id, Command: []string{"sh", "-c", "read x; exec sleep 0.05 >/dev/null 2>&1"}, Stdin: true, TTY: tty}))
			if !ok || !k.next(a) {
				t.Fatal(a.failure)
			}
			in, b := k.input(id), new(outcome)
			in.write("\n")
			for { // a terminal drops what is too much for a line
				must(t, in.w.Send(wire.KindData, make([]byte, wire.MaxData)))
				kind, payload, err := in.r.Next()
				if err != nil || kind != wire.KindReady && kind != wire.KindFailure {
					t.Fatalf("a frame of kind %d, %v", kind, err)
				}
				if kind == wire.KindFailure {
					if err := wire.Decode(payload, &b.failure); err != nil || b.class() != wire.ClassPrecondition {
						t.Fatalf("%+v, %v", b.failure, err)
					}
					break
				}
			}
			for k.next(a) {
				a.stdout.Reset()
			}
			if a.failure != nil || a.info.ExitCode != 0 {
				t.Fatalf("%+v", a)
			}
		}
	}
}
