package lifecycle_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
)

// journal keeps what is logged, as JSON.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

func (j *journal) logger() *slog.Logger {
	return slog.New(slog.NewJSONHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// entries answers what was logged under messages that begin so, without its time.
func (j *journal) entries(t *testing.T, prefix string) []map[string]any {
	t.Helper()
	var all []map[string]any
	for line := range strings.Lines(j.String()) {
		var e map[string]any
		must(t, json.Unmarshal([]byte(line), &e))
		if delete(e, "time"); strings.HasPrefix(e["msg"].(string), prefix) {
			all = append(all, e)
		}
	}
	return all
}

func TestLogOfALife(t *testing.T) {
	ctx := context.Background()
	var j journal
	fake, breakOp := breaking("")
	w := newWorld(t, setup{logger: j.logger(), fake: fake})
	var want []map[string]any
	expect := func(level, msg string, sb lifecycle.Sandbox, more ...any) {
		e := map[string]any{
			"level": level, "msg": msg, "tenant": "a", "key": "k", "session_id": sb.SessionID, "container_id": sb.ContainerID,
		}
		for i := 0; i < len(more); i += 2 {
			e[more[i].(string)] = more[i+1]
		}
		want = append(want, e)
	}
	must := func(_ any, err error) {
		t.Helper()
		must(t, err)
	}
	mustNot := func(_ any, err error) {
		t.Helper()
		if err == nil {
			t.Fatal("no error")
		}
	}

	first := w.create(request("k")).Sandbox
	expect("INFO", "sandbox_created", first)
	w.create(request("k"))
	expect("INFO", "sandbox_reused", first)
	other := request("k")
	other.AgentID, other.Request.MemoryMB = "agent", ptr(first.Spec.MemoryMB-1)
	mustNot(w.Create(ctx, other))
	expect("WARN", "sandbox_conflict", first, "differences", []any{
		map[string]any{"field": "memory_mb", "current": float64(first.Spec.MemoryMB), "requested": float64(first.Spec.MemoryMB - 1)},
		map[string]any{"field": "agent_id", "current": "", "requested": "agent"},
	})
	must(w.Pause(ctx, "a", "k"))
	expect("INFO", "sandbox_paused", first)
	must(w.Resume(ctx, "a", "k"))
	expect("INFO", "sandbox_resumed", first)
	renewed, err := w.Renew(ctx, "a", "k", 0)
	must(renewed, err)
	expect("INFO", "sandbox_renewed", first, "expires_at", renewed.ExpiresAt.Format(time.RFC3339Nano))

	w.die("k")
	second := w.create(request("k")).Sandbox
	expect("INFO", "sandbox_replaced", second)
	w.die("k")
	w.exec("k", "true")
	third, err := w.Get(ctx, "a", "k")
	must(third, err)
	expect("INFO", "sandbox_replaced", third)
	expect("INFO", "sandbox_recreated", third)

	breakOp("remove")
	mustNot(w.Delete(ctx, "a", "k"))
	expect("WARN", "sandbox_delete_failed", third, "error", errBroken.Error())
	breakOp("")
	must(w.Delete(ctx, "a", "k"))
	expect("INFO", "sandbox_deleted", third)
	must(w.Delete(ctx, "a", "k"))
	expect("INFO", "sandbox_delete_not_found", lifecycle.Sandbox{})
	breakOp("create")
	_, err = w.Create(ctx, request("k"))
	mustNot(nil, err)
	want = append(want, map[string]any{"level": "WARN", "msg": "sandbox_create_failed", "tenant": "a", "key": "k", "error": err.Error()})

	if diff := cmp.Diff(want, j.entries(t, "sandbox_")); diff != "" {
		t.Errorf("logged: %s", diff)
	}
}

// Whatever happens, nothing that a caller, or the operator, may want kept secret is
// in logs, spans, metrics or the labels of containers.
func TestNoSecretIsTold(t *testing.T) {
	const secret = "hunter2"
	ctx := context.Background()
	t.Setenv("BERM_TEST_TOKEN", secret)
	var j journal
	fake, breakOp := breaking("")
	w := newTraced(t, setup{
		logger:   j.logger(),
		policy:   "version: 1\nenv: {deny: [LD_*], inject: {TOKEN: {env: BERM_TEST_TOKEN}}}\n",
		settings: lifecycle.Settings{Env: map[string]string{"OPERATORS": secret}, AdoptLegacy: true},
		fake:     fake,
	})
	var labels strings.Builder
	req := request("k")
	req.Metadata = map[string]string{"note": secret}
	req.Request.Env = map[string]string{"CALLERS": secret, "TOKEN": secret}
	run := func(change func(*lifecycle.ExecRequest)) {
		e := lifecycle.ExecRequest{
			Tenant: "a", Key: "k", Command: []string{"sh", "-c", "echo " + secret},
			Env: map[string]string{"COMMANDS": secret, "TOKEN": secret}, Stdin: []byte(secret),
		}
		change(&e)
		_, _ = w.Exec(ctx, e) // what fails must be silent, too
		for _, c := range w.fake.Containers() {
			fmt.Fprintln(&labels, c.Name, c.Labels)
		}
	}
	create := func(change func(*lifecycle.CreateRequest)) {
		r := req
		change(&r)
		_, _ = w.Create(ctx, r)
	}
	nothing := func(*lifecycle.ExecRequest) {}

	sb := w.create(req).Sandbox
	create(func(r *lifecycle.CreateRequest) { r.Metadata = map[string]string{"note": strings.Repeat(secret, 1000)} })
	create(func(r *lifecycle.CreateRequest) { r.Request.Env = map[string]string{"LD_PRELOAD": secret} })
	create(func(r *lifecycle.CreateRequest) { r.Request.Env = map[string]string{"NUL": secret + "\x00"} })
	create(func(r *lifecycle.CreateRequest) { r.Request.MemoryMB = ptr(sb.Spec.MemoryMB - 1) })
	run(nothing)
	run(func(e *lifecycle.ExecRequest) { e.Create = &req })
	run(func(e *lifecycle.ExecRequest) { e.Env = map[string]string{"LD_PRELOAD": secret} })
	run(func(e *lifecycle.ExecRequest) { e.Command = []string{secret + "\x00"} })
	run(func(e *lifecycle.ExecRequest) { e.WorkingDir = secret })
	for _, op := range []string{"exec", "pause", "remove"} {
		breakOp(op)
		run(nothing)
		_, _ = w.Pause(ctx, "a", "k")
		_, _ = w.Delete(ctx, "a", "k")
		breakOp("")
		_, _ = w.Create(ctx, req)
	}
	cs := w.fake.Containers()
	if len(cs) != 1 {
		t.Fatalf("%d containers", len(cs))
	}
	for _, name := range []string{"OPERATORS", "CALLERS", "TOKEN"} {
		if !slices.Contains(cs[0].Env, name+"="+secret) {
			t.Errorf("%s isn't there to be told", name)
		}
	}
	w.die("k")
	breakOp("create")
	run(nothing)
	create(func(*lifecycle.CreateRequest) {})
	breakOp("")
	w.store.setFail(errBroken)
	run(nothing)
	w.store.setFail(nil)
	run(nothing)
	w.stop()
	again := newTraced(t, setup{engine: w.fake, store: w.store, logger: j.logger()})
	if _, err := again.Delete(ctx, "a", "k"); err != nil {
		t.Error(err)
	}
	again.stop()

	var spans strings.Builder
	for _, s := range append(w.spans.Ended(), again.spans.Ended()...) {
		fmt.Fprintln(&spans, s.Name(), s.Attributes(), s.Events(), s.Status())
	}
	metrics, err := w.reg.Gather()
	must(t, err)
	for what, told := range map[string]string{
		"logs": j.String(), "spans": spans.String(), "metrics": fmt.Sprint(metrics), "labels": labels.String(),
	} {
		if i := strings.Index(told, secret); i >= 0 {
			t.Errorf("%s: %s", what, told[max(i-300, 0):min(i+50, len(told))])
		}
		if len(told) < 500 {
			t.Errorf("%s: too little to be true: %s", what, told)
		}
	}
}
