package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func TestExecResults(t *testing.T) {
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Measures: true}})
	req := request("k")
	res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Create: &req, Command: []string{"echo", "hi"}})
	if err != nil || !res.OK() || res.Stdout != "hi\n" || !res.Created || res.Backend != "fake" || res.SessionID == "" || res.Timeout != 30*time.Second {
		t.Fatalf("echo: %+v, %v", res, err)
	}
	if res.CPUTime != time.Millisecond || res.PeakMemoryBytes != 1<<20 {
		t.Errorf("used: %+v", res)
	}
	res = w.exec("k", "exit", "3")
	if res.OK() || res.Status != lifecycle.ExecCompleted || res.ExitCode == nil || *res.ExitCode != 3 {
		t.Errorf("exit 3: %+v", res)
	}
	res, err = w.Exec(context.Background(), lifecycle.ExecRequest{
		Tenant: "a", Key: "k", Command: []string{"cat"}, Stdin: []byte("in\xff"), Raw: true,
	})
	if err != nil || string(res.StdoutRaw) != "in\xff" || res.Stdout != "" {
		t.Errorf("cat: %+v, %v", res, err)
	}
	conflicting := req
	conflicting.Request.PidsLimit = ptr(int64(5))
	if _, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Create: &conflicting, Command: []string{"true"}}); !errorIs[*lifecycle.ConflictError](err) {
		t.Errorf("another spec: %v", err)
	}
	if _, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "none", Command: []string{"true"}}); !errdefs.IsNotFound(err) {
		t.Errorf("no sandbox: %v", err)
	}
	if _, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "b", Key: "k", Command: []string{"true"}}); !errdefs.IsNotFound(err) {
		t.Errorf("another tenant's: %v", err)
	}
}

func TestExecTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		w.create(request("k"))
		start := time.Now()
		res, err := w.Exec(context.Background(), lifecycle.ExecRequest{
			Tenant: "a", Key: "k", Command: []string{"sh", "-c", "echo begun; sleep 100"}, Timeout: ptr(int64(2)),
		})
		if err != nil || res.Status != lifecycle.ExecTimedOut || res.ExitCode != nil || res.Stdout != "begun\n" || res.SessionTerminated {
			t.Errorf("%+v, %v", res, err)
		}
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("took %s", took)
		}
		res, err = w.Exec(context.Background(), lifecycle.ExecRequest{
			Tenant: "a", Key: "k", Command: []string{"true"}, Timeout: ptr(int64(999)),
		})
		if err != nil || res.Timeout != 120*time.Second || len(res.Overridden) != 1 || res.Overridden[0].Field != "timeout" {
			t.Errorf("over the maximum: %+v, %v", res, err)
		}
	})
}

// What the engine says of a command is told as what it is, and costs the sandbox its life only if
// the command can't be killed.
func TestExecOutcomes(t *testing.T) {
	for name, tt := range map[string]struct {
		out  runtime.ExecResult
		err  error
		want func(lifecycle.ExecResult, error) bool
		gone bool
	}{
		"out of memory": {out: runtime.ExecResult{ExitCode: 137, OOMKilled: true}, want: func(res lifecycle.ExecResult, err error) bool {
			return err == nil && res.Status == lifecycle.ExecOOMKilled && !res.OK()
		}},
		"no room": {err: fmt.Errorf("run: %w", runtime.ErrNoRoom), want: func(res lifecycle.ExecResult, err error) bool {
			full, ok := errors.AsType[*lifecycle.CapacityError](err)
			return ok && full.RetryAfter > 0 && res.Status == ""
		}},
		// An engine that was restarted knows nothing of a command that it was just given.
		"forgotten": {err: errdefs.ErrNotFound, want: func(_ lifecycle.ExecResult, err error) bool {
			return errorIs[*lifecycle.UnavailableError](err) && !errdefs.IsNotFound(err)
		}},
		"not killed": {err: errors.Join(context.DeadlineExceeded, runtime.ErrNotKilled), gone: true, want: func(res lifecycle.ExecResult, err error) bool {
			return err == nil && res.Status == lifecycle.ExecTimedOut && res.SessionTerminated
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{fake: runtimetest.FakeOptions{Exec: func(ctx context.Context, _ runtime.Container, _ runtime.Exec) (runtime.ExecResult, error) {
					if tt.gone {
						<-ctx.Done()
					}
					return tt.out, tt.err
				}}})
				w.create(request("k"))
				res, err := w.Exec(t.Context(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"x"}, Timeout: ptr(int64(1))})
				if !tt.want(res, err) || res.ExitCode != nil {
					t.Errorf("%+v, %v", res, err)
				}
				if gone := len(w.fake.Containers()) == 0; gone != tt.gone || gone != (w.store.len() == 0) || !gone && w.status("k") != lifecycle.StatusRunning {
					t.Errorf("%d containers, %d records", len(w.fake.Containers()), w.store.len())
				}
			})
		})
	}
}

func TestExecUnderASandboxThatEnds(t *testing.T) {
	w := newWorld(t, setup{})
	for _, end := range []string{"delete", "kill"} {
		sb := w.create(request(end)).Sandbox
		done := make(chan lifecycle.ExecResult, 1)
		go func() {
			res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: end, Command: []string{"sleep", "100"}})
			if err != nil {
				t.Error(err)
			}
			done <- res
		}()
		w.eventually("the command runs", func() bool {
			return w.Status(context.Background(), "a").RunningCommands == 1 && w.fake.Calls("exec") > 0
		})
		time.Sleep(10 * time.Millisecond) // the engine's own start of the command can't be seen
		if end == "kill" {
			w.fake.Die(sb.ContainerID)
		} else if _, err := w.Delete(context.Background(), "a", end); err != nil {
			t.Fatal(err)
		}
		if res := <-done; res.Status != lifecycle.ExecKilled || res.ExitCode != nil {
			t.Errorf("%s: %+v", end, res)
		}
	}
}

func TestExecJudgesItsEnv(t *testing.T) {
	w := newWorld(t, setup{policy: "version: 1\nenv: {deny: [LD_*], pin: {TZ: UTC}}\n"})
	w.fake.AddImage(runtimetest.DefaultImage, runtime.Image{Env: []string{"LD_PRELOAD=/x.so", "BERM_X=1", "PLAIN=1", "TZ=CET"}})
	w.create(request("k"))
	if got := strings.Join(w.fake.Containers()[0].Env, " "); got != "PLAIN=1 TZ=UTC" {
		t.Errorf("with the image's variables: %q", got)
	}
	_, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"env"}, Env: map[string]string{"LD_PRELOAD": "hunter2"}})
	if !errorIs[*policy.DeniedError](err) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%v", err)
	}
	res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"env"}, Env: map[string]string{"TZ": "CET", "X": "1"}})
	if err != nil || !strings.Contains(res.Stdout, "TZ=UTC\n") || !strings.Contains(res.Stdout, "X=1\n") {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestExecCap(t *testing.T) {
	w := newWorld(t, setup{settings: lifecycle.Settings{MaxCommands: 2}})
	w.create(request("k"))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	for range 2 {
		go func() {
			done <- second(w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"sleep", "100"}}))
		}()
	}
	w.eventually("both run", func() bool { return w.Status(ctx, "a").RunningCommands == 2 })
	if _, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !errorIs[*lifecycle.CapacityError](err) {
		t.Errorf("a third: %v", err)
	}
	cancel()
	for range 2 {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("a caller that went away: %v", err)
		}
	}
	w.exec("k", "true")
}

func TestWorkingDirAndQuota(t *testing.T) {
	dir := t.TempDir()
	var cwd string
	w := newWorld(t, setup{
		policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n",
		fake: runtimetest.FakeOptions{Exec: func(_ context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
			cwd = e.WorkingDir
			if e.Command[0] == "fill" {
				return runtime.ExecResult{}, os.WriteFile(filepath.Join(dir, "big"), make([]byte, 3<<20), 0o644)
			}
			return runtime.ExecResult{}, nil
		}},
	})
	if sb := w.create(mounting("k", dir, 2)).Sandbox; sb.Enforcement != (lifecycle.Enforcement{Mounts: "trusted", WorkspaceQuota: "soft"}) {
		t.Errorf("enforcement: %+v", sb.Enforcement)
	}
	if w.exec("k", "true"); cwd != "/workspace" {
		t.Errorf("default working directory %q", cwd)
	}
	if _, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}, WorkingDir: "/workspace/../etc"}); err == nil {
		t.Error("a working directory outside was taken")
	}
	res := w.exec("k", "fill")
	if !res.QuotaExceeded || res.Status != lifecycle.ExecCompleted {
		t.Fatalf("fill: %+v", res)
	}
	if got := w.status("k"); got != lifecycle.StatusStopped || len(w.fake.Containers()) != 0 {
		t.Errorf("afterwards: %s", got)
	}
	var quota *lifecycle.QuotaError
	if _, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !errors.As(err, &quota) || quota.UsedBytes != 3<<20 {
		t.Errorf("over the quota: %v", err)
	}
	must(t, os.Truncate(filepath.Join(dir, "big"), 2<<20))
	if res := w.exec("k", "true"); !res.Recreated || !res.OK() {
		t.Errorf("with some space freed: %+v", res)
	}
}

// ofRunes returns a size of at least n at which s can be cut between characters.
func ofRunes[S string | []byte](s S, n int) int {
	for n < len(s) && !utf8.RuneStart(s[n]) {
		n++
	}
	return min(n, len(s))
}

// printed runs a command that prints s, in pieces of at least the given size.
func printed(t *testing.T, w *world, s string, piece, limit int) (string, bool) {
	t.Helper()
	output = func(_ context.Context, e runtime.Exec) {
		for len(s) > 0 {
			n := ofRunes(s, piece)
			_, _ = io.WriteString(e.Stdout, s[:n])
			s = s[n:]
		}
	}
	res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"print"}, OutputLimit: &limit})
	must(t, err)
	return res.Stdout, res.StdoutTruncated
}

var output func(context.Context, runtime.Exec)

func printingWorld(t *testing.T) *world {
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Exec: func(ctx context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
		output(ctx, e)
		return runtime.ExecResult{}, nil
	}}})
	w.create(request("k"))
	return w
}

func TestTruncation(t *testing.T) {
	w := printingWorld(t)
	for _, v := range []struct{ n, limit, head, tail, cut int }{
		{520, 100, 37, 25, 458}, {300, 100, 37, 25, 238}, {110, 100, 37, 26, 47}, {201, 200, 97, 66, 38},
		{1099, 1000, 577, 385, 137}, {4001, 4000, 2377, 1586, 38}, {5000, 4000, 2376, 1585, 1039},
		{10000, 4000, 2376, 1585, 6039}, {1048576, 4000, 2374, 1584, 1044618}, {1000, 40, 1, 1, 998},
	} {
		t.Run(fmt.Sprintf("%d,%d", v.n, v.limit), func(t *testing.T) {
			runes := make([]rune, v.n)
			for i := range runes {
				runes[i] = []rune{'a', 'ß', '中', '😀'}[i%4]
			}
			notice := fmt.Sprintf("\n\n... [%d characters truncated] ...\n\n", v.cut)
			want := string(runes[:v.head]) + notice + string(runes[v.n-v.tail:])
			for _, piece := range []int{1, 3, 7, 4096, 1 << 20} {
				if piece < 7 && v.n > 100_000 {
					continue
				}
				if got, cut := printed(t, w, string(runes), piece, v.limit); got != want || !cut {
					t.Errorf("pieces of %d: %q… (%d bytes), want %d bytes", piece, got[:40], len(got), len(want))
				}
			}
		})
	}
	for _, v := range []struct {
		in    string
		limit int
		want  string
		cut   bool
	}{
		{"", 10, "", false}, {"", 0, "", false}, {"x", 0, "", true}, {"x", -1, "", true}, {"", -1, "", true},
		{"0123456789", 10, "0123456789", false}, {"a\xffb", 10, "a\uFFFDb", false}, {"a\xe4\xb8", 10, "a\uFFFD\uFFFD", false},
		{"0123456789x", 10, "\n\n... [11 ", true},
	} {
		for _, piece := range []int{1, 100} {
			if got, cut := printed(t, w, v.in, piece, v.limit); got != v.want || cut != v.cut {
				t.Errorf("%q at %d: %q, %v", v.in, v.limit, got, cut)
			}
		}
	}
}

// TestKeptOutput runs commands that print more than they may keep: the memory for it is asked
// for before it is taken, and output is cut where it is refused.
func TestKeptOutput(t *testing.T) {
	w := printingWorld(t)
	const limit = 1 << 20
	text := strings.Repeat("0123456789", 1<<19) // five times the limit
	output = func(_ context.Context, e runtime.Exec) {
		for i := 0; i < len(text); i += 1 << 10 {
			_, _ = io.WriteString(e.Stdout, text[i:i+1<<10])
		}
	}
	notice := regexp.MustCompile(`\n\n\.\.\. \[(\d+) characters truncated\] \.\.\.\n\n`)
	for _, raw := range []bool{false, true} {
		for _, budget := range []int{8 * limit, limit, 100_000, 4096, 0} {
			kept := 0
			res, err := w.Exec(t.Context(), lifecycle.ExecRequest{
				Tenant: "a", Key: "k", Command: []string{"print"}, OutputLimit: ptr(limit), Raw: raw,
				Keep: func(n int) error {
					if kept+n > budget {
						return errors.New("no memory")
					}
					kept += n
					return nil
				},
			})
			if err != nil || !res.StdoutTruncated {
				t.Fatalf("%d bytes, raw %v: cut %v, %v", budget, raw, res.StdoutTruncated, err)
			}
			got := res.Stdout
			if raw {
				got = string(res.StdoutRaw)
			}
			if kept > 6*limit || len(got) > min(limit, budget+80) || len(got) < min(budget/4, limit/2) {
				t.Errorf("%d bytes, raw %v: leased %d for %d", budget, raw, kept, len(got))
			}
			head, tail := got, ""
			if at := notice.FindStringSubmatchIndex(got); at != nil {
				head, tail = got[:at[0]], got[at[1]:]
				if cut, _ := strconv.Atoi(got[at[2]:at[3]]); len(head)+cut+len(tail) != len(text) {
					t.Errorf("%d bytes: %d of %d characters are told to be cut", budget, cut, len(text)-len(head)-len(tail))
				}
			} else if !raw {
				t.Errorf("%d bytes: %q… says nothing of the cut", budget, got[:min(len(got), 80)])
			}
			if !strings.HasPrefix(text, head) || !strings.HasSuffix(text, tail) {
				t.Errorf("%d bytes, raw %v: it isn't the output's head and tail", budget, raw)
			}
		}
	}
}

// TestKeptCharacters checks that output which is cut for want of memory is cut between characters.
func TestKeptCharacters(t *testing.T) {
	w := printingWorld(t)
	text := strings.Repeat("aé漢😀", 1000)
	output = func(_ context.Context, e runtime.Exec) {
		for _, r := range text {
			_, _ = io.WriteString(e.Stdout, string(r))
		}
	}
	notice := regexp.MustCompile(`\n\n\.\.\. \[(\d+) characters truncated\] \.\.\.\n\n`)
	for budget := 3000; budget < 9000; budget += 61 {
		left := budget
		res, err := w.Exec(t.Context(), lifecycle.ExecRequest{
			Tenant: "a", Key: "k", Command: []string{"print"}, OutputLimit: ptr(1000),
			Keep: func(n int) error {
				if left -= n; left < 0 {
					return errors.New("no memory")
				}
				return nil
			},
		})
		parts := notice.Split(res.Stdout, -1)
		if err != nil || len(parts) != 2 {
			t.Fatalf("%d bytes: %d parts, %v", budget, len(parts), err)
		}
		cut, _ := strconv.Atoi(notice.FindStringSubmatch(res.Stdout)[1])
		if !strings.HasPrefix(text, parts[0]) || !strings.HasSuffix(text, parts[1]) || utf8.RuneCountInString(parts[0]+parts[1])+cut != 4000 {
			t.Errorf("%d bytes: %d characters are told to be cut before %q…", budget, cut, parts[1][:min(len(parts[1]), 20)])
		}
	}
}

func FuzzTruncation(f *testing.F) {
	f.Add([]byte("hello"), 3, 2)
	f.Add([]byte("a\xe4\xb8\xadb\xff\xf0\x9f\x98"), 50, 1)
	f.Fuzz(func(t *testing.T, in []byte, limit, piece int) {
		limit, piece = min(max(limit, -1), 10_000), min(max(piece, 1), 1<<16)
		c := lifecycle.NewTextCapture(limit)
		for rest := in; len(rest) > 0; {
			n := ofRunes(rest, piece)
			if k, err := c.Write(rest[:n]); k != n || err != nil {
				t.Fatalf("Write: %d, %v", k, err)
			}
			rest = rest[n:]
		}
		got, cut := c.Collected()
		runes := []rune(string(in))
		switch {
		case len(runes) <= limit:
			if got != string(runes) || cut {
				t.Fatalf("%q at %d: %q, %v", in, limit, got, cut)
			}
		case limit <= 0:
			if got != "" || !cut {
				t.Fatalf("%q at %d: %q, %v", in, limit, got, cut)
			}
		default:
			head, tail, notice := lifecycle.Split(len(runes), limit)
			want := notice
			if head+tail > 0 {
				want = string(runes[:head]) + notice + string(runes[len(runes)-tail:])
			}
			if got != want || !cut || len([]rune(got)) > limit {
				t.Fatalf("%q at %d: %q, want %q", in, limit, got, want)
			}
		}
	})
}

func FuzzParseKey(f *testing.F) {
	for _, s := range []string{"chat", " a ", "../x", "6F9619FF-8B86-D011-B42D-00C04FC964FF", "a:b.c-d_e", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		key, err := lifecycle.ParseKey(s)
		if err != nil {
			return
		}
		if again, err := lifecycle.ParseKey(key); err != nil || again != key {
			t.Fatalf("%q: %q is not canonical: %q, %v", s, key, again, err)
		}
		if len(key) > 128 || strings.ContainsAny(key, "/\\ \n\x00") || strings.HasPrefix(key, ".") {
			t.Fatalf("%q: %q", s, key)
		}
	})
}
