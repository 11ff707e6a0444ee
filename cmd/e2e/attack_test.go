package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	// What an attack may leave a server with, and what it may have meanwhile. The race
	// detector multiplies memory.
	attackFDs      = 50
	attackFDsPeak  = 400
	attackRSS      = 128 << 10 // kB
	attackRSSPeak  = 256 << 10
	attackerPath   = "/tmp/attacker"
	attackMark     = "ATTACK_MARK"
	attackedMemory = 256 // MB
	attackedPids   = 64
)

// attackFixture is a server with one sandbox that means no harm, and others that do.
type attackFixture struct {
	e        *testEngine
	server   *server
	c        *client.Client
	attacker []byte // the program testdata/attacker
	calm     weight // of the server
}

// attack is one sandbox that does.
type attack struct {
	*attackFixture
	*testing.T
	key  string
	mark string // in the environment of all that runs there
}

// What runs in a sandbox hurts that sandbox at most: the server answers in time, and
// stays small; the other sandboxes go on; the host sees nothing of it, and nothing is
// left when the sandbox is deleted.
func TestAttacks(t *testing.T) { testAttacks(t, "docker") }

// TestSoakAttacks is TestAttacks on the other engine.
func TestSoakAttacks(t *testing.T) { testAttacks(t, "containerd") }

func testAttacks(t *testing.T, kind string) {
	t.Parallel()
	s := newAttackFixture(t, kind)
	for _, tt := range []struct {
		name   string
		attack func(*attack)
	}{
		{"kill", attackKill},
		{"kill all", attackKillAll},
		{"freeze", attackFreeze},
		{"trace", attackTrace},
		{"tamper", attackTamper},
		{"impostor", attackImpostor},
		{"limits of init", attackLimits},
		{"fork bomb", attackForkBomb},
		{"fork bombs", attackForkBombs},
		{"tight", attackTight},
		{"output", attackOutput},
		{"output unread", attackOutputUnread},
		{"open files", attackOpenFiles},
		{"memory", attackMemory},
		{"full disk", attackFullDisk},
		{"traps", attackTraps},
		{"links out", attackLinksOut},
		{"swapped links", attackSwappedLinks},
		{"names", attackNames},
		{"ports", attackPorts},
	} {
		t.Run(tt.name, func(t *testing.T) { s.run(t, tt.attack) })
	}
	must(t, second(s.c.Delete(t.Context(), "innocent")))
	s.server.stop()
	wantNothing(t, s.e, s.server)
}

func newAttackFixture(t *testing.T, kind string) *attackFixture {
	t.Helper()
	s := &attackFixture{e: commonEngine(t, kind), attacker: buildAttacker(t)}
	dir := s.e.dir(t)
	workspace := makeDir(t, dir, "workspace")
	s.server = newServer(t, s.e, dir, testImage)
	s.server.policy(t, "mounts: {allowed_roots: ["+workspace+"]}\n")
	s.server.start(t)
	s.c = s.server.client(t, &http.Transport{})
	must(t, second(s.c.Create(t.Context(), "innocent", apitype.SandboxRequest{})))
	for range 20 { // they have everything opened that stays open
		must(t, s.innocent(t.Context()))
	}
	s.calm = settled(t, s.server.Process.Pid, weight{fds: 1 << 20, children: 1 << 20}, 0, math.MaxInt)
	return s
}

// buildAttacker builds the program that runs in the sandboxes.
func buildAttacker(t *testing.T) []byte {
	t.Helper()
	file := filepath.Join(t.TempDir(), "attacker")
	buildProgram(t, file, "./testdata/attacker")
	return check.Value(os.ReadFile(file))(t)
}

// run runs one attack in a sandbox of its own, beside the innocent one.
func (s *attackFixture) run(t *testing.T, f func(*attack)) {
	a := &attack{attackFixture: s, T: t, key: "attack", mark: rand.Text()}
	pid := s.server.Process.Pid
	forgetPeak(t, pid)
	a.create(apitype.SandboxRequest{})
	ctx, cancel := context.WithCancel(t.Context())
	var beside sync.WaitGroup
	fds := 0
	beside.Go(func() { fds = a.watch(ctx) })
	defer func() {
		cancel()
		beside.Wait()
		rss := peak(t, pid)
		a.Logf("the server had %d kB and %d fds at most, and %d kB and %d fds before all", rss, fds, a.calm.rss, a.calm.fds)
		if rss > a.calm.rss+attackRSSPeak || fds > a.calm.fds+attackFDsPeak {
			a.Error("the server grew under the attack")
		}
		a.end()
	}()
	f(a)
}

// create makes the sandbox, and puts the program there.
func (a *attack) create(req apitype.SandboxRequest) {
	a.Helper()
	memory, pids := int64(attackedMemory), int64(attackedPids)
	if req.PidsLimit == nil {
		req.PidsLimit = &pids
	}
	req.MemoryMB, req.Env = &memory, map[string]string{attackMark: a.mark}
	ctx := deadline(a)
	must(a, second(a.c.Create(ctx, a.key, req)))
	must(a, second(a.c.WriteFile(ctx, a.key, attackerPath, bytes.NewReader(a.attacker), client.WriteOptions{Mode: 0o755})))
}

// innocent runs a command in the innocent sandbox.
func (s *attackFixture) innocent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	word := rand.Text()
	res, err := s.c.Exec(ctx, "innocent", apitype.ExecRequest{Command: apitype.Command{"echo", word}, Timeout: apitype.SecondsOf(60)})
	if err == nil && (!res.OK || res.Stdout != word+"\n" || res.Recreated) {
		err = fmt.Errorf("the innocent sandbox answered %+v", res)
	}
	return err
}

// watch uses the innocent sandbox, and looks at the host, until ctx ends. It returns the most
// fds that the server had.
func (a *attack) watch(ctx context.Context) (most int) {
	for ; ctx.Err() == nil; time.Sleep(200 * time.Millisecond) {
		if err := a.innocent(a.Context()); err != nil {
			a.Errorf("the innocent sandbox: %v", err)
			return most
		}
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.server.Process.Pid))
		if err != nil {
			a.Errorf("the server: %v", err)
			return most
		}
		most = max(most, len(fds))
		for _, p := range marked(a.mark) {
			if p.outside {
				a.Errorf("a process is outside of its sandbox: %s", p)
			}
		}
	}
	return most
}

// end deletes the sandbox, and looks for what is left of it.
func (a *attack) end() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.Context()), patience)
	defer cancel()
	if _, err := a.c.Delete(ctx, a.key); err != nil {
		a.Errorf("delete: %v", err)
	}
	if err := a.innocent(ctx); err != nil {
		a.Error(err)
	}
	until(a, "its processes to be gone", func() bool { return len(marked(a.mark)) == 0 })
	until(a, "its container to be gone", func() bool { return containersOf(a.T, a.e, a.server) == 1 })
	until(a, "its directory to be gone", func() bool { return len(agentDirs(a.server.stateDir())) == 1 })
	after := settled(a.T, a.server.Process.Pid, a.calm, attackFDs, math.MaxInt)
	if after.fds > a.calm.fds+attackFDs || after.children > a.calm.children || after.rss > a.calm.rss+attackRSS {
		a.Errorf("the server had %s, and has %s", a.calm, after)
	}
}

// seen is a process of a sandbox as the host sees it.
type seen struct {
	pid     string
	command string
	outside bool // it has the host's process namespace
}

func (p seen) String() string { return p.pid + " " + p.command }

// marked are the processes that have a mark in their environment.
func marked(mark string) []seen {
	own, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return []seen{{command: err.Error(), outside: true}}
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	var found []seen
	for _, dir := range dirs {
		env, err := os.ReadFile(dir + "/environ")
		if err != nil || !bytes.Contains(env, []byte(attackMark+"="+mark+"\x00")) {
			continue
		}
		ns, err := os.Readlink(dir + "/ns/pid")
		if err != nil {
			continue // it has ended
		}
		command, _ := os.ReadFile(dir + "/cmdline")
		found = append(found, seen{filepath.Base(dir), string(bytes.ReplaceAll(command, []byte{0}, []byte{' '})), ns == own})
	}
	return found
}

// answered fails unless a call was answered, with yes or with a reasoned no.
func (a *attack) answered(what string, err error) {
	a.Helper()
	switch refused := refusal(err); {
	case err == nil:
	case refused.Status == 0:
		a.Errorf("%s: no answer: %v", what, err)
	case refused.Status == http.StatusInternalServerError || refused.Code == "":
		a.Errorf("%s: %d %v", what, refused.Status, err)
	}
}

// exec runs a command, which may take so many seconds.
func (a *attack) exec(seconds int64, command ...string) (*apitype.ExecResult, error) {
	ctx, cancel := context.WithTimeout(a.Context(), time.Duration(seconds)*time.Second+patience)
	defer cancel()
	limit := 1 << 16
	return a.c.Exec(ctx, a.key, apitype.ExecRequest{Command: command, Timeout: apitype.SecondsOf(seconds), OutputLimit: &limit})
}

// must runs a command that ends well, and gives its output.
func (a *attack) must(command ...string) string {
	a.Helper()
	res, err := a.exec(60, command...)
	if err != nil || !res.OK {
		a.Fatalf("%q: %+v, %v", command, res, err)
	}
	return res.Stdout
}

// heals checks that the sandbox's commands are right again.
// It may have been made anew, or be gone because what ran in it couldn't be killed.
func (a *attack) heals() {
	a.Helper()
	ctx := deadline(a)
	if _, err := a.c.Get(ctx, a.key); refusal(err).Status == http.StatusNotFound {
		a.create(apitype.SandboxRequest{})
	}
	until(a, "a command", func() bool { return a.echoes(10) })
}

// healed checks that after a while they are, in the same sandbox.
func (a *attack) healed(session string) {
	a.Helper()
	a.heals()
	if a.session() != session {
		a.Error("the sandbox was made anew")
	}
}

// echoes reports whether a command ran. It may be refused, or cut short, but never
// answered wrongly.
func (a *attack) echoes(seconds int64) bool {
	a.Helper()
	word := rand.Text()
	res, err := a.exec(seconds, "echo", word)
	a.answered("a command", err)
	switch {
	case err != nil || res.Status != "completed":
		return false
	case !res.OK || res.Stdout != word+"\n":
		a.Errorf("a command's output is wrong: %+v", res)
		return false
	}
	return true
}

// begin starts the attacker in a mode that goes on, and waits until it is at it. End has
// it end, and gives its output.
func (a *attack) begin(args ...string) (end func() string) {
	a.Helper()
	ctx := deadline(a)
	id := rand.Text()
	_, err := a.c.StartExec(ctx, a.key, apitype.ExecRequest{
		Command: append(apitype.Command{attackerPath}, args...), Timeout: apitype.SecondsOf(120), ExecID: id,
	})
	a.answered("the attacker", err) // which may be in the way of the answer
	until(a, "the attack to begin", func() bool {
		_, err := a.c.StatFile(ctx, a.key, "/tmp/on")
		return err == nil
	})
	return func() string {
		a.Helper()
		ctx := deadline(a)
		must(a, second(a.c.WriteFile(ctx, a.key, "/tmp/off", strings.NewReader(""), client.WriteOptions{})))
		var out string
		until(a, "the attack's end", func() bool { // it may be in the way of who looks
			var err error
			out, err = a.follow(ctx, id)
			a.answered("follow", err)
			return err == nil
		})
		a.must("rm", "-f", "/tmp/on", "/tmp/off")
		return out
	}
}

// follow gives all output of a command that was started.
func (a *attack) follow(ctx context.Context, id string) (string, error) {
	var out strings.Builder
	from := int64(0)
	for ev, err := range a.c.FollowExec(ctx, a.key, id, client.StreamOptions{After: &from}) {
		if err != nil {
			return "", err
		}
		out.WriteString(ev.Data)
	}
	return out.String(), nil
}
