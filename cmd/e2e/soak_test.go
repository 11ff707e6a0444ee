package e2e

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// soakExecs is how many commands a soak runs.
const soakExecs = 100_000

// weight is what a process has of the machine.
type weight struct {
	rss, private  int // kB
	anonymous     int // kB of private, all but what is a file's
	fds           int
	children      int // zombies included
	zombies       int
	childrenNames []string
}

func (w weight) String() string {
	return fmt.Sprintf("%d kB resident, %d kB private, %d of them anonymous, %d fds, %d children, %d zombies", w.rss, w.private, w.anonymous, w.fds, w.children, w.zombies)
}

// idleInit is how much anonymous memory a sandbox' init may have when it has nothing to do, in KiB;
// as a rule it is 2,200 to 2,400 after work.
const idleInit = 3072

// weigh weighs a process.
func weigh(t testing.TB, pid int) weight {
	t.Helper()
	var w weight
	rollup := readString(t, fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	for line := range strings.Lines(rollup) {
		name, value, _ := strings.Cut(line, ":")
		kB, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		switch name {
		case "Rss":
			w.rss = kB
		case "Private_Clean", "Private_Dirty":
			w.private += kB
		case "Anonymous":
			w.anonymous = kB
		}
	}
	fds := check.Value(os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)))(t)
	w.fds = len(fds)
	processes := check.Value(os.ReadDir("/proc"))(t)
	for _, p := range processes {
		stat, err := os.ReadFile("/proc/" + p.Name() + "/stat")
		if err != nil {
			continue // not a process, or one that has ended
		}
		// pid (name) state parent …
		end := strings.LastIndexByte(string(stat), ')')
		fields := strings.Fields(string(stat[end+1:]))
		if fields[1] != strconv.Itoa(pid) {
			continue
		}
		w.children++
		w.childrenNames = append(w.childrenNames, string(stat[:end+1]))
		if fields[0] == "Z" {
			w.zombies++
		}
	}
	return w
}

// forgetPeak has a process' peak memory counted from now on.
func forgetPeak(t testing.TB, pid int) {
	t.Helper()
	must(t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0))
}

// peak is the most memory that a process has had, in kB.
func peak(t testing.TB, pid int) int {
	t.Helper()
	_, rest, _ := strings.Cut(readString(t, fmt.Sprintf("/proc/%d/status", pid)), "VmHWM:")
	rest, _, _ = strings.Cut(rest, "kB")
	return check.Value(strconv.Atoi(strings.TrimSpace(rest)))(t)
}

// settled weighs a process until it has as few fds and children as before, and no more
// anonymous memory than it may, in KiB, or for 15 s.
func settled(t testing.TB, pid int, before weight, slack, anonymous int) weight {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for {
		w := weigh(t, pid)
		if w.fds <= before.fds+slack && w.children <= before.children && w.zombies == 0 && w.anonymous <= anonymous || time.Now().After(deadline) {
			return w
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// soakScript leaves its number behind, prints it on both streams, and ends in one of
// several ways. Some leave a process that outlives them.
const soakScript = `echo $0 >> /tmp/seen
echo "out $0"
echo "err $0" >&2
test $(($0 % 10)) = 1 && { sleep 0.1 >/dev/null 2>&1 & }
test $(($0 % 7)) = 3 && kill -9 $$
exit $(($0 % 120))`

// soakExit is the exit code of a soakScript.
func soakExit(n int) int {
	if n%7 == 3 {
		return 128 + 9
	}
	return n % 120
}

// Many commands in one sandbox: none is lost, none runs twice, each ends as it did, and
// neither the server nor what runs in the sandbox grows by them.
func TestSoakExecs(t *testing.T) { onEachEngine(t, testSoakExecs) }

func testSoakExecs(t *testing.T, kind string) {
	e := commonEngine(t, kind)
	server := newServer(t, e, e.dir(t), testImage)
	server.start(t)
	c := server.client(t, nil)
	sb := check.Value(c.Create(t.Context(), "soak", apitype.SandboxRequest{}))(t)
	// Once it answers, its own command runs, too.
	must(t, second(c.Exec(t.Context(), "soak", apitype.ExecRequest{Command: []string{"true"}})))
	container := check.Value(e.open(t, server).Inspect(t.Context(), sb.ContainerID))(t)

	const workers = 16
	total := soakExecs
	run := func(from, to int) {
		t.Helper()
		g, ctx := errgroup.WithContext(t.Context())
		for worker := range workers {
			g.Go(func() error {
				for n := from + worker; n < to; n += workers {
					res, err := c.Exec(ctx, "soak", apitype.ExecRequest{Command: []string{"sh", "-c", soakScript, strconv.Itoa(n)}})
					if err != nil {
						return fmt.Errorf("command %d: %w", n, err)
					}
					if res.ExitCode == nil || *res.ExitCode != soakExit(n) || res.Stdout != fmt.Sprintf("out %d\n", n) || res.Stderr != fmt.Sprintf("err %d\n", n) {
						return fmt.Errorf("command %d: %+v", n, res)
					}
				}
				return nil
			})
		}
		must(t, g.Wait())
	}
	serverFresh, insideFresh := weigh(t, server.Process.Pid), weigh(t, container.Pid)
	// The first ones have everything opened that stays open.
	warm := total / 4
	run(0, warm)
	serverBefore := settled(t, server.Process.Pid, serverFresh, 2*workers, math.MaxInt)
	insideBefore := settled(t, container.Pid, insideFresh, 2*workers, idleInit)
	began := time.Now()
	run(warm, total)
	rate := float64(total-warm) / time.Since(began).Seconds()
	// A connection or two may have been opened since, as many workers as there are.
	serverAfter := settled(t, server.Process.Pid, serverFresh, 4*workers, math.MaxInt)
	insideAfter := settled(t, container.Pid, insideFresh, 3*workers, idleInit)
	t.Logf("%.1f commands a second", rate)
	t.Logf("server before: %s", serverBefore)
	t.Logf("server after:  %s", serverAfter)
	t.Logf("inside before: %s", insideBefore)
	t.Logf("inside after:  %s", insideAfter)
	for _, p := range []struct {
		name                 string
		fresh, before, after weight
		slack                int // fds
		growth               int // kB that are no leak, however many commands there were
	}{
		{"the server", serverFresh, serverBefore, serverAfter, 2 * workers, 48 << 10},
		{"the sandbox's init", insideFresh, insideBefore, insideAfter, workers, 1 << 10},
	} {
		if p.after.fds > p.before.fds+p.slack {
			t.Errorf("%s has %d fds, and had %d", p.name, p.after.fds, p.before.fds)
		}
		if p.after.zombies > 0 || p.after.children > p.fresh.children {
			t.Errorf("%s has children: %v", p.name, p.after.childrenNames)
		}
		if p.after.rss > p.before.rss+p.growth {
			t.Errorf("%s has %d kB resident, and had %d", p.name, p.after.rss, p.before.rss)
		}
	}

	if insideAfter.anonymous > idleInit {
		t.Errorf("the sandbox's init has %d kB of memory when it has nothing to do", insideAfter.anonymous)
	}

	limit := 4 << 20
	res := check.Value(c.Exec(t.Context(), "soak", apitype.ExecRequest{Command: []string{"cat", "/tmp/seen"}, OutputLimit: &limit}))(t)
	seen := map[string]int{}
	for line := range strings.Lines(res.Stdout) {
		seen[strings.TrimSpace(line)]++
	}
	for n := range total {
		if times := seen[strconv.Itoa(n)]; times != 1 {
			t.Errorf("command %d ran %d times", n, times)
		}
	}
	if len(seen) != total {
		t.Errorf("%d commands were asked for, %d ran", total, len(seen))
	}
	if again, err := c.Get(t.Context(), "soak"); err != nil || again.SessionID != sb.SessionID {
		t.Errorf("the sandbox isn't the same any more: %+v, %v", again, err)
	}
	must(t, second(c.Delete(t.Context(), "soak")))
}
