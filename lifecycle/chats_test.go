package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// quotas are workspaces with a chat each and a quota of 100 bytes. What a chat holds is
// known only once it has been measured.
type quotas struct {
	lifecycle.Quotas // of sandboxes' own directories
	mu               sync.Mutex
	held, known      map[string]int64 // by tenant and key
	enforcement      string
	asked            []bool // with changed, of chats
	err              error
}

func chatQuotas(keys ...string) *quotas {
	q := &quotas{Quotas: softQuotas(), held: map[string]int64{}, known: map[string]int64{}, enforcement: "hard"}
	for _, key := range keys {
		q.hold(key, 0)
	}
	return q
}

// hold has the chat a/key hold so much; it becomes one if it isn't.
func (q *quotas) hold(key string, bytes int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held["a/"+key] = bytes
}

// calls answers how it was asked since the last time.
func (q *quotas) calls() []bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	asked := q.asked
	q.asked = nil
	return asked
}

func (q *quotas) Left(ctx context.Context, s lifecycle.Subject, changed bool) error {
	if err := q.Quotas.Left(ctx, s, changed); err != nil {
		return err
	}
	err := q.left(s.Tenant+"/"+s.Key, changed)
	if !changed && errorIs[*lifecycle.QuotaError](err) {
		err = q.left(s.Tenant+"/"+s.Key, true)
	}
	return err
}

func (q *quotas) left(chat string, changed bool) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	held, ok := q.held[chat]
	if !ok {
		return nil
	}
	q.asked = append(q.asked, changed)
	if changed {
		q.known[chat] = held
	}
	if q.err != nil {
		return q.err
	}
	if used := q.known[chat]; used > 100 {
		return &lifecycle.QuotaError{UsedBytes: used, QuotaBytes: 100}
	}
	return nil
}

func (q *quotas) Shared() bool { return true }

func (q *quotas) Enforcement(s lifecycle.Subject) string {
	if own := q.Quotas.Enforcement(s); own != "" {
		return own
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.held[s.Tenant+"/"+s.Key]; ok {
		return q.enforcement
	}
	return ""
}

// filling is a world with the chat k, whose directory is filled by the command fill, and
// emptied by empty.
func filling(t *testing.T, q *quotas) *world {
	t.Helper()
	return newWorld(t, setup{quotas: q, policy: longCommands, fake: runtimetest.FakeOptions{
		Exec: func(_ context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
			switch e.Command[0] {
			case "fill":
				_, _ = io.ReadAll(e.Stdin)
				_, _ = io.WriteString(e.Stdout, "filled")
				q.hold("k", 101)
			case "empty":
				q.hold("k", 100)
			default:
				return runtime.ExecResult{}, errors.ErrUnsupported
			}
			return runtime.ExecResult{}, nil
		},
	}})
}

func refusedFor(err error) bool {
	var quota *lifecycle.QuotaError
	return errors.As(err, &quota) && quota.UsedBytes == 101 && quota.QuotaBytes == 100
}

func TestChatQuota(t *testing.T) {
	q := chatQuotas("k")
	w := filling(t, q)
	req := request("k")
	if sb := w.create(req).Sandbox; sb.Enforcement.WorkspaceQuota != "hard" {
		t.Errorf("enforcement: %+v", sb.Enforcement)
	}
	if res := w.exec("k", "true"); res.QuotaExceeded || res.QuotaEnforcement != "hard" {
		t.Errorf("within its quota: %+v", res)
	}
	if diff := cmp.Diff([]bool{false, true}, q.calls()); diff != "" {
		t.Error("measured anew before and after: " + diff)
	}
	res := w.exec("k", "fill")
	if !res.QuotaExceeded || res.QuotaEnforcement != "hard" || res.Status != lifecycle.ExecCompleted {
		t.Fatalf("fill: %+v", res)
	}
	if got := w.status("k"); got != lifecycle.StatusStopped || len(w.fake.Containers()) != 0 {
		t.Errorf("afterwards: %s", got)
	}
	ctx := context.Background()
	if _, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !refusedFor(err) {
		t.Errorf("over the quota: %v", err)
	}
	if _, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Create: &req, Command: []string{"true"}}); !refusedFor(err) || len(w.fake.Containers()) != 0 {
		t.Errorf("over the quota, with its spec: %v; %d containers", err, len(w.fake.Containers()))
	}
	if _, err := w.start(ctx, process("p", "cat")); !refusedFor(err) || len(w.fake.Containers()) != 0 {
		t.Errorf("a process: %v; %d containers", err, len(w.fake.Containers()))
	}
	q.hold("k", 100) // which is fine, and known at once
	if res := w.exec("k", "true"); !res.Recreated || !res.OK() {
		t.Errorf("with some space freed: %+v", res)
	}

	q.hold("k", 101) // without anybody's notice
	q.calls()
	w.create(request("other"))
	if res := w.exec("other", "true"); !res.OK() || res.QuotaEnforcement != "" || len(q.calls()) != 0 {
		t.Errorf("a key that is no chat: %+v", res)
	}
}

// A chat's sandbox may have a quota of its own; a workspace that can't be asked about
// isn't one with room.
func TestChatQuotaAndOthers(t *testing.T) {
	dir := t.TempDir()
	q := chatQuotas("k")
	w := newWorld(t, setup{quotas: q, policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n"})
	if sb := w.create(mounting("k", dir, 1)).Sandbox; sb.Enforcement.WorkspaceQuota != "soft" {
		t.Errorf("enforcement: %+v", sb.Enforcement)
	}
	w.exec("k", "true")
	q.hold("k", 101)
	if res := w.exec("k", "true"); !res.QuotaExceeded || res.QuotaEnforcement != "soft" {
		t.Errorf("over its workspace's quota: %+v", res)
	}
	q.hold("k", 0)
	w.exec("k", "true")
	away := &lifecycle.UnavailableError{Err: errBroken}
	q.mu.Lock()
	q.err = away
	q.mu.Unlock()
	calls := w.fake.Calls("exec")
	if _, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !errors.Is(err, away) || w.fake.Calls("exec") != calls {
		t.Errorf("without an answer: %v", err)
	}
}

// A key may become a chat while its sandbox lives.
func TestSandboxBecomesAChats(t *testing.T) {
	q := chatQuotas()
	w := filling(t, q)
	if sb := w.create(request("k")).Sandbox; sb.Enforcement.WorkspaceQuota != "" {
		t.Errorf("enforcement: %+v", sb.Enforcement)
	}
	q.hold("k", 0)
	w.exec("k", "true")
	if res := w.exec("k", "fill"); !res.QuotaExceeded || res.QuotaEnforcement != "hard" {
		t.Errorf("fill: %+v", res)
	}
	sb, err := w.Get(context.Background(), "a", "k")
	if err != nil || sb.Enforcement.WorkspaceQuota != "hard" {
		t.Errorf("enforcement: %+v, %v", sb.Enforcement, err)
	}
}

func TestFollowedChatQuota(t *testing.T) {
	for name, attached := range map[string]bool{"attached": true, "alone": false} {
		t.Run(name, func(t *testing.T) {
			q := chatQuotas()
			w := filling(t, q)
			w.create(request("k"))
			q.hold("k", 0) // a chat's from now on
			req := follow("x", "")
			req.Command, req.OpenStdin = []string{"fill"}, true
			w.begin(req)
			if attached {
				s := w.attachExec("x", 0)
				must(t, s.CloseWrite())
				if out, _ := readAll(t, s, 0); out != "filled" || !s.Ended().QuotaExceeded || s.Ended().QuotaEnforcement != "hard" {
					t.Errorf("%+v", s.Ended())
				}
				_ = s.Close()
			} else if err := w.Write(context.Background(), execRef("a", "k", "x"), eof{}, true); err != nil {
				t.Fatal(err)
			}
			w.eventually("the sandbox is stopped", func() bool { return w.status("k") == lifecycle.StatusStopped })
			if e := w.execution("x"); e.Status != lifecycle.ExecCompleted || !e.QuotaExceeded || e.QuotaEnforcement != "hard" || e.ExitCode == nil {
				t.Errorf("asked afterwards: %+v", e)
			}
			req.ID = "y"
			if _, err := w.start(context.Background(), req); !refusedFor(err) {
				t.Errorf("the next: %v", err)
			}
		})
	}
}

type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }

// zeros is a file of so many bytes; each is noted as written.
type zeros struct {
	q    *quotas
	left int64
}

func (z *zeros) Read(b []byte) (int, error) {
	n := min(int64(len(b)), z.left)
	if n == 0 {
		return 0, io.EOF
	}
	z.left -= n
	z.q.mu.Lock()
	defer z.q.mu.Unlock()
	z.q.held["a/k"] += n
	return int(n), nil
}

func TestFilesOfAFullChat(t *testing.T) {
	q := chatQuotas("k")
	w := filling(t, q)
	w.create(request("k"))
	f := w.files("k")
	must(t, write(f, "/tmp/x", "hello"))
	if diff := cmp.Diff([]bool{false, true}, q.calls()); diff != "" {
		t.Error("measured anew before and after: " + diff)
	}
	// As much as comes is not taken, whatever was there when it began.
	long := &zeros{q, 1 << 30}
	if err := do(f, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/long"}, runtime.FileIO{In: long}); !errors.As(err, new(*lifecycle.QuotaError)) {
		t.Errorf("a long file: %v", err)
	}
	if taken := 1<<30 - long.left; taken > 32<<20 {
		t.Errorf("%d bytes of it were taken", taken)
	}
	// What one call has written the next knows of.
	q.hold("k", 0)
	if err := do(f, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/short"}, runtime.FileIO{In: &zeros{q, 101}}); err != nil {
		t.Errorf("a short file: %v", err)
	}
	q.hold("k", 101)
	for name, err := range map[string]error{
		"write": write(f, "/tmp/y", ""),
		"mkdir": change(f, runtime.FileMkdir, "/tmp/dir", ""),
		"copy":  change(f, runtime.FileCopy, "/tmp/x", "/tmp/y"),
		"tar":   do(f, runtime.FileOp{Verb: runtime.FileTarWrite, Path: "/tmp"}, runtime.FileIO{In: eof{}}),
	} {
		if !refusedFor(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := w.status("k"); got != lifecycle.StatusRunning {
		t.Errorf("it is %s", got)
	}
	if err := errors.Join(change(f, runtime.FileMove, "/tmp/x", "/tmp/y"), change(f, runtime.FileRemove, "/tmp/short", "")); err != nil {
		t.Errorf("what frees space: %v", err)
	}
	q.hold("k", 100)
	if err := write(f, "/tmp/z", ""); err != nil {
		t.Errorf("with some space freed: %v", err)
	}
}

func TestWithoutSandbox(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := context.Background()
	active := func(err error, session string) bool {
		var a *lifecycle.ActiveError
		return errors.As(err, &a) && a.Key == "k" && a.SessionID == session
	}
	never := func(context.Context) error {
		t.Error("f was called")
		return nil
	}
	ran := 0
	f := func(context.Context) error { ran++; return nil }
	if err := w.WithoutSandbox(ctx, "a", "k", f); err != nil || ran != 1 || w.HasSandbox("a", "k") {
		t.Errorf("without a sandbox: %v, %d calls", err, ran)
	}
	if err := w.WithoutSandbox(ctx, "a", "no key", never); !errorIs[*lifecycle.InvalidError](err) {
		t.Errorf("a malformed key: %v", err)
	}
	if err := w.WithoutSandbox(ctx, "a", "k", func(context.Context) error { return errBroken }); !errors.Is(err, errBroken) {
		t.Errorf("f's error: %v", err)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if err := w.WithoutSandbox(gone, "a", "k", never); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that went away: %v", err)
	}
	if held := w.Held(); held != [4]int{} {
		t.Errorf("left behind: %v", held)
	}

	sb := w.create(request("k")).Sandbox
	if err := w.WithoutSandbox(ctx, "a", " k ", never); !active(err, sb.SessionID) {
		t.Errorf("with a live one: %v", err)
	}
	if !w.HasSandbox("a", "k") || w.HasSandbox("b", "k") || w.HasSandbox("a", "j") {
		t.Error("who has a sandbox")
	}
	if err := w.WithoutSandbox(ctx, "b", "k", f); err != nil || ran != 2 {
		t.Errorf("another tenant's: %v", err)
	}
	w.die("k")
	if err := w.WithoutSandbox(ctx, "a", "k", never); !active(err, sb.SessionID) || !w.HasSandbox("a", "k") {
		t.Errorf("with one that has stopped: %v", err)
	}
	must(t, second(w.Delete(ctx, "a", "k")))
	if err := w.WithoutSandbox(ctx, "a", "k", f); err != nil || ran != 3 || w.HasSandbox("a", "k") {
		t.Errorf("once it is deleted: %v", err)
	}

	w.fake.SetDown(true)
	w.eventually("that is known", func() bool { return w.Ready(ctx) != nil })
	if err := w.WithoutSandbox(ctx, "a", "k", never); !errorIs[*lifecycle.UnavailableError](err) {
		t.Errorf("without an engine: %v", err)
	}
}

// Who finds a sandbox on its way doesn't wait for it.
func TestWithoutSandboxThatStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Delay: func(op string) time.Duration {
			if op == "create" {
				return time.Hour
			}
			return 0
		}}})
		var made sync.WaitGroup
		made.Go(func() { w.create(request("k")) })
		synctest.Wait()
		begun := time.Now()
		err := w.WithoutSandbox(context.Background(), "a", "k", func(context.Context) error {
			t.Error("f was called")
			return nil
		})
		var active *lifecycle.ActiveError
		if !errors.As(err, &active) || active.SessionID == "" || time.Since(begun) != 0 || !w.HasSandbox("a", "k") {
			t.Errorf("after %s: %v", time.Since(begun), err)
		}
		made.Wait()
		if sb, err := w.Get(context.Background(), "a", "k"); err != nil || sb.SessionID != active.SessionID {
			t.Errorf("%+v, %v", sb, err)
		}
	})
}

// One that has ended but wasn't collected goes first, with its container.
func TestWithoutSandboxThatExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake, breakOp := breaking("remove")
		w := newWorld(t, setup{fake: fake})
		w.createFor("k", time.Minute)
		time.Sleep(2 * time.Minute)
		ran := 0
		f := func(context.Context) error {
			ran++
			if n := len(w.fake.Containers()); n != 0 || w.HasSandbox("a", "k") {
				t.Errorf("%d containers are left", n)
			}
			return nil
		}
		if err := w.WithoutSandbox(context.Background(), "a", "k", f); !errors.Is(err, errBroken) || ran != 0 || !w.HasSandbox("a", "k") {
			t.Errorf("one that can't be removed: %v, %d calls", err, ran)
		}
		breakOp("")
		if err := w.WithoutSandbox(context.Background(), "a", "k", f); err != nil || ran != 1 {
			t.Errorf("%v, %d calls", err, ran)
		}
		if w.store.len() != 0 || w.Held() != [4]int{} {
			t.Errorf("left behind: %d records, %v", w.store.len(), w.Held())
		}
	})
}

// A create waits for its turn, and is no worse for it.
func TestCreateWaitsForWithoutSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		var made sync.WaitGroup
		err := w.WithoutSandbox(context.Background(), "a", "k", func(context.Context) error {
			made.Go(func() { w.create(request("k")) })
			time.Sleep(time.Hour)
			if w.HasSandbox("a", "k") || len(w.fake.Containers()) != 0 {
				t.Error("it was made meanwhile")
			}
			// Other keys don't wait.
			w.create(request("other"))
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		made.Wait()
		if st := w.status("k"); st != lifecycle.StatusRunning {
			t.Errorf("it is %s", st)
		}
	})
}

// Of a create and what may be done only without a sandbox, one comes first, and the other
// finds it so.
func TestWithoutSandboxRaces(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := context.Background()
	var won, lost int
	for i := range 100 {
		key := fmt.Sprintf("k%d", i)
		there := true // the chat, which f deletes; guarded by the key being held
		var both sync.WaitGroup
		var err error
		start := make(chan struct{})
		both.Go(func() {
			<-start
			err = w.WithoutSandbox(ctx, "a", key, func(context.Context) error {
				there = false
				for range 10 {
					if w.HasSandbox("a", key) {
						t.Errorf("%s: it has a sandbox", key)
					}
					time.Sleep(10 * time.Microsecond)
				}
				return nil
			})
		})
		both.Go(func() {
			<-start
			time.Sleep(time.Duration(i) * time.Microsecond) // so that either comes first at times
			w.create(request(key))
		})
		close(start)
		both.Wait()
		switch {
		case err == nil && !there:
			won++
		case errorIs[*lifecycle.ActiveError](err) && there:
			lost++
		default:
			t.Errorf("%s: %v; the chat is there: %t", key, err, there)
		}
		if st := func() lifecycle.Status { sb, _ := w.Get(ctx, "a", key); return sb.Status }(); st != lifecycle.StatusRunning {
			t.Errorf("%s is %s", key, st)
		}
	}
	if n := len(w.fake.Containers()); n != 100 {
		t.Errorf("%d containers", n)
	}
	t.Logf("%d times first, %d times second", won, lost)
}
