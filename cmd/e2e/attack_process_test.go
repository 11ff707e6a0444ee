package e2e

import (
	"bufio"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// A sandbox's own processes can't kill or stop its first one.
func attackKill(a *attack) {
	session := a.session()
	for _, signal := range []string{"KILL", "STOP", "TERM", "INT", "HUP", "SEGV", "ABRT", "QUIT", "TSTP", "PIPE", "XCPU", "ALRM", "34"} {
		a.answered("kill -"+signal, second(a.exec(60, "kill", "-"+signal, "1")))
		if signal != "KILL" && signal != "STOP" { // the others are passed on to the main process
			a.heals()
			session = a.session()
			continue
		}
		res, err := a.exec(60, "echo", signal)
		if err != nil || !res.OK || res.Stdout != signal+"\n" {
			a.Errorf("after %s: %+v, %v", signal, res, err)
		}
		if got := a.session(); got != session {
			a.Errorf("after %s, the sandbox isn't the same any more", signal)
		}
	}
}

func (a *attack) session() string {
	a.Helper()
	ctx := deadline(a)
	sb := check.Value(a.c.Get(ctx, a.key))(a)
	return sb.SessionID
}

// Everything is killed that can be, with commands under way.
func attackKillAll(a *attack) {
	for range 3 {
		var beside sync.WaitGroup
		for range 4 {
			beside.Go(func() {
				res, err := a.exec(20, "sh", "-c", "echo begun; sleep 30; echo over")
				a.answered("a command beside", err)
				if err == nil && (res.OK || strings.Contains(res.Stdout, "over")) {
					a.Errorf("a command that was killed: %+v", res)
				}
			})
		}
		until(a, "the commands to run", func() bool {
			res, err := a.exec(20, "sh", "-c", "ps | grep -c '[s]leep 30'")
			return err == nil && strings.TrimSpace(res.Stdout) != "0"
		})
		res, err := a.exec(20, "sh", "-c", "kill -9 -1; kill -9 $PPID; kill -9 $$; echo alive")
		a.answered("the killer", err)
		if err == nil && res.OK {
			a.Errorf("the killer: %+v", res)
		}
		beside.Wait()
		a.heals()
	}
}

// Everything is stopped that can be, again and again.
func attackFreeze(a *attack) {
	a.begin("stop") // whose end can't come through
	for range 3 {
		a.echoes(2)
	}
	ctx := deadline(a)
	list, err := a.c.Executions(ctx, a.key)
	a.answered("list", err)
	for _, x := range list {
		a.answered("kill", second(a.c.KillExec(ctx, a.key, x.ExecID)))
	}
	a.heals()
}

// attempts runs the attacker in a mode of many attempts. None may come off.
func (a *attack) attempts(mode string) {
	a.Helper()
	out := a.must(attackerPath, mode)
	for line := range strings.Lines(out) {
		name, how, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if !ok || !strings.HasPrefix(how, "refused: ") {
			a.Errorf("%s: %q", name, how)
		}
	}
	if n := strings.Count(out, "\n"); n < 10 {
		a.Errorf("%d attempts were made: %s", n, out)
	}
}

// The first process is out of reach.
func attackTrace(a *attack) {
	a.attempts("trace")
	a.heals()
}

// What is Berm's in a sandbox can't be changed, and leads nowhere.
func attackTamper(a *attack) {
	before := a.berms()
	a.attempts("tamper")
	if out := a.must("ls", "-a", "/run/berm"); out != ".\n..\ns\n" {
		a.Errorf("in the socket's directory is %q", out)
	}
	ctx := deadline(a)
	for _, path := range []string{"/run/berm/s", "/run/berm/x", "/sbin/berm-init", "/proc/1/root/run/berm/x", "/proc/1/exe"} {
		file := strings.NewReader("own")
		for what, err := range map[string]error{
			"remove": a.c.RemoveFile(ctx, a.key, path, true),
			"move":   a.c.MoveFile(ctx, a.key, path, "/tmp/moved", true),
			"put":    a.c.MoveFile(ctx, a.key, attackerPath, path, true),
			"copy":   a.c.CopyFile(ctx, a.key, attackerPath, path, true),
			"mkdir":  a.c.Mkdir(ctx, a.key, path+"/y", 0, true),
			"unpack": a.c.WriteTar(ctx, a.key, path, strings.NewReader(strings.Repeat("\x00", 1024))),
			"write":  second(a.c.WriteFile(ctx, a.key, path, file, clientWrite{})),
			"append": second(a.c.WriteFile(ctx, a.key, path, strings.NewReader("x"), clientWrite{Append: true})),
		} {
			if a.answered(what+" "+path, err); err == nil {
				a.Errorf("%s %s came off", what, path)
			}
		}
	}
	if after := a.berms(); after != before {
		a.Errorf("what is Berm's was %s, and is %s", before, after)
	}
	a.heals()
}

// berms is what Berm has for its agents on the host.
func (a *attack) berms() string {
	a.Helper()
	var all strings.Builder
	root := filepath.Join(a.server.stateDir(), "agents")
	err := filepath.Walk(root, func(path string, info os.FileInfo, err error) error {
		if err == nil {
			fmt.Fprintf(&all, "%s %s %d\n", strings.TrimPrefix(path, root), info.Mode(), info.Size())
		}
		return err
	})
	must(a, err)
	return all.String()
}

// attackImpostor claims to be the first process of the sandbox, in vain. It can delay that one's
// connections, as both dial the same socket. Those that there are go on.
func attackImpostor(a *attack) {
	ctx := deadline(a)
	end := a.begin("impostor")
	const commands = 20
	for range commands {
		word := rand.Text()
		res, err := a.exec(60, "echo", word)
		if err != nil || !res.OK || res.Stdout != word+"\n" {
			a.Fatalf("%+v, %v", res, err)
		}
		x, err := a.c.StartExec(ctx, a.key, apitype.ExecRequest{Command: apitype.Command{"sleep", "1000"}})
		must(a, err)
		must(a, second(a.c.KillExec(ctx, a.key, x.ExecID)))
	}
	sb := check.Value(a.c.Get(ctx, a.key))(a)
	for line := range strings.Lines(a.server.log.String()) {
		if strings.Contains(line, "agent_absent") && strings.Contains(line, sb.ContainerID) {
			a.Errorf("the agent was out of reach: %s", line)
		}
	}
	if out := end(); out != "heard 0\n" {
		a.Errorf("the impostor: %q", out)
	}
	a.heals()
}

// The first process' limits can be taken by others of its user: commands fail then, or
// go by the engine.
func attackLimits(a *attack) {
	a.must(attackerPath, "limit")
	for range 5 {
		a.echoes(10)
	}
	ctx := deadline(a)
	a.answered("write", second(a.c.WriteFile(ctx, a.key, "/tmp/file", strings.NewReader("x"), clientWrite{})))
	a.answered("start", second(a.c.StartExec(ctx, a.key, apitype.ExecRequest{Command: apitype.Command{"true"}})))
	resp, err := a.c.Port(a.key, 80).Get("http://localhost/")
	if err != nil {
		a.Error(err)
	} else {
		_ = resp.Body.Close()
	}
}

// A fork bomb has all processes there may be, until its time is out. Then it is gone,
// and its sandbox is as before.
func attackForkBomb(a *attack) {
	session := a.session()
	for range 2 {
		var beside sync.WaitGroup
		beside.Go(func() {
			res, err := a.exec(3, attackerPath, "bomb")
			if err != nil || res.Status != "timed_out" || res.SessionTerminated {
				a.Errorf("the bomb: %+v, %v", res, err)
			}
		})
		a.beside(5)
		beside.Wait()
		a.healed(session)
		if out := a.must("ps", "-o", "args"); strings.Contains(out, "bomb") {
			a.Errorf("of the bomb is left: %s", out)
		}
	}
}

// What is left of one that ended by itself isn't killed before its sandbox is.
func attackForkBombs(a *attack) {
	var beside sync.WaitGroup
	for _, command := range [][]string{
		{attackerPath, "bomb"},
		{"setsid", "sh", "-c", "trap '' TERM HUP; " + attackerPath + " bomb & wait"},
		{"sh", "-c", attackerPath + " bomb & " + attackerPath + " bomb & exit"},
	} {
		beside.Go(func() {
			a.answered("a bomb", second(a.exec(3, command...)))
		})
	}
	a.beside(5)
	beside.Wait()
	ctx := deadline(a)
	a.answered("delete", second(a.c.Delete(ctx, a.key)))
	a.heals()
}

// beside asks for this and that while there is no room for it.
func (a *attack) beside(times int) {
	a.Helper()
	for range times {
		a.echoes(5)
		ctx := deadline(a)
		a.answered("list", second(a.c.Processes(ctx, a.key)))
		a.answered("stat", second(a.c.StatFile(ctx, a.key, "/tmp")))
	}
}

// The least limit of processes is one that a sandbox lives with, also when it is full.
func attackTight(a *attack) {
	ctx := deadline(a)
	must(a, second(a.c.Delete(ctx, a.key)))
	one := int64(1)
	a.create(apitype.SandboxRequest{PidsLimit: &one})
	session := a.session()
	for range 3 {
		if !a.echoes(10) {
			a.Error("a command did not run")
		}
	}
	a.answered("what fills it", second(a.exec(10, "sh", "-c", "while sleep 1000 & do :; done"))) // they stay
	for range 5 {
		a.echoes(5)
	}
	if a.session() != session {
		a.Error("the sandbox was made anew")
	}
}

// Output without end is cut, on whichever stream, and ends with the timeout.
func attackOutput(a *attack) {
	limit := 100
	for _, script := range []string{"yes", "cat /dev/zero", "cat /dev/zero >&2", "yes & yes >&2 & cat /dev/urandom", "setsid yes & exec yes"} {
		ctx := deadline(a)
		res, err := a.c.Exec(ctx, a.key, apitype.ExecRequest{
			Command: apitype.Command{"sh", "-c", script}, Timeout: apitype.SecondsOf(1), OutputLimit: &limit,
		})
		if err != nil || res.Status != "timed_out" || !res.StdoutTruncated && !res.StderrTruncated ||
			len([]rune(res.Stdout)) > limit || len([]rune(res.Stderr)) > limit || res.SessionTerminated {
			a.Errorf("%s: %+v, %v", script, res, err)
		}
		until(a, "the processes of "+script+" to be gone", func() bool {
			out := a.must("ps", "-o", "args")
			return !strings.Contains(out, "\nyes") && !strings.Contains(out, "\ncat")
		})
	}
	a.heals()
}

// A reader that never reads holds up what it reads, and nothing else; when it goes, the
// command goes.
func attackOutputUnread(a *attack) {
	var conns []net.Conn
	for range 8 {
		nc := check.Value(new(net.Dialer).DialContext(a.Context(), "tcp", strings.TrimPrefix(a.server.url, "http://")))(a)
		defer func() { _ = nc.Close() }()
		body := `{"command": ["cat", "/dev/zero"], "timeout": 100}`
		fmt.Fprintf(nc, "POST /api/v1/sandboxes/%s/exec HTTP/1.1\r\nHost: localhost\r\nX-API-Token: %s\r\nContent-Type: application/json\r\n"+
			"Accept: application/x-ndjson\r\nContent-Length: %d\r\n\r\n%s", a.key, a.server.token, len(body), body)
		resp, err := http.ReadResponse(bufio.NewReaderSize(nc, 16), nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			a.Fatalf("%v, %v", resp, err)
		}
		conns = append(conns, nc)
	}
	for range 20 {
		if out := a.must("echo", "hello"); out != "hello\n" {
			a.Errorf("%q", out)
		}
		time.Sleep(100 * time.Millisecond) // in which much is printed, if nothing holds it up
	}
	for _, nc := range conns {
		_ = nc.Close()
	}
	until(a, "the commands to be gone", func() bool { return !strings.Contains(a.must("ps", "-o", "args"), "\ncat /dev/zero") })
	a.heals()
}

// All files there may be are open.
func attackOpenFiles(a *attack) {
	end := a.begin("files")
	for range 5 {
		res, err := a.exec(30, "echo", "hello")
		if err != nil || res.Stdout != "hello\n" {
			a.Errorf("%+v, %v", res, err)
		}
	}
	if out := end(); !strings.HasPrefix(out, "taken ") {
		a.Errorf("%q", out)
	}
	a.heals()
}

// Memory that isn't there is taken.
func attackMemory(a *attack) {
	for range 2 {
		res, err := a.exec(60, attackerPath, "hog")
		a.answered("the hog", err)
		// The kernel kills the sandbox's first process if the hog is about to exit, but still has its memory.
		if err == nil && (res.Status != "oom_killed" && res.Status != "killed" || res.ExitCode != nil) && !res.Recreated {
			a.Errorf("the hog: %+v", res)
		}
		a.heals()
		// Its program may have gone with the sandbox.
		ctx := deadline(a)
		a.answered("write", second(a.c.WriteFile(ctx, a.key, attackerPath, strings.NewReader(string(a.attacker)), clientWrite{Mode: 0o755})))
	}
}

// What is asked of a port is answered by something hostile.
func attackPorts(a *attack) {
	for i, tt := range []struct {
		kind   string
		status int // 0 is an answer that is broken off, or none within some seconds
	}{
		{"tell", 200}, {"garbage", 502}, {"headers", 502}, {"header", 502}, {"early", 0}, {"never", 0}, {"close", 502}, {"endless", 0},
		{"short", 0}, {"smuggle", 200}, {"upgrade", 502},
	} {
		port := 8000 + i
		end := a.begin("listen", tt.kind, fmt.Sprint(port))
		within := patience
		if tt.status == 0 {
			within = 2 * time.Second
		}
		status, body, err := a.get(port, within)
		switch {
		case tt.status == 0 && err == nil:
			a.Errorf("%s: %d, %d bytes", tt.kind, status, len(body))
		case tt.status != 0 && (err != nil || status != tt.status):
			a.Errorf("%s: %d, %v", tt.kind, status, err)
		case tt.kind == "tell" && (strings.Contains(body, a.server.token) || !strings.Contains(body, "Host: localhost:8000")):
			a.Errorf("the port was asked %q", body)
		case tt.kind == "smuggle" && body != "ok":
			a.Errorf("the answer is %q", body)
		}
		end()
	}
	a.heals()
}

func (a *attack) get(port int, within time.Duration) (status int, body string, err error) {
	ctx, cancel := context.WithTimeout(a.Context(), within)
	defer cancel()
	resp, body, err := exchange(ctx, a.c.Port(a.key, port), http.MethodGet, "http://localhost/", "")
	if resp != nil {
		status = resp.StatusCode
	}
	return status, body, err
}
