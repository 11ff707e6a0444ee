package lifecycle_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// traced is a world whose spans are kept.
type traced struct {
	*world
	spans *tracetest.SpanRecorder
}

func newTraced(t *testing.T, s setup) traced {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	s.tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	return traced{newWorld(t, s), spans}
}

// last answers the span of that name that ended last.
func (w traced) last(name string) sdktrace.ReadOnlySpan {
	w.t.Helper()
	var found sdktrace.ReadOnlySpan
	for _, s := range w.spans.Ended() {
		if s.Name() == name {
			found = s
		}
	}
	if found == nil {
		w.t.Fatalf("no span is called %s", name)
	}
	return found
}

func attributesOf(s sdktrace.ReadOnlySpan) map[string]any {
	all := map[string]any{}
	for _, a := range s.Attributes() {
		all[string(a.Key)] = a.Value.AsInterface()
	}
	return all
}

// check checks a span's attributes, all of them, its status, and the names of the
// calls to the engine that are its children.
func (w traced) check(name string, attrs map[string]any, failed bool, calls ...string) {
	w.t.Helper()
	span := w.last(name)
	if diff := cmp.Diff(attrs, attributesOf(span)); diff != "" {
		w.t.Errorf("%s: attributes: %s", name, diff)
	}
	if got := span.Status().Code == codes.Error; got != failed {
		w.t.Errorf("%s: status %+v", name, span.Status())
	}
	var made []string
	for _, s := range w.spans.Ended() {
		if s.Parent().SpanID() != span.SpanContext().SpanID() {
			continue
		}
		made = append(made, s.Name())
		if s.SpanKind() != trace.SpanKindClient || s.SpanContext().TraceID() != span.SpanContext().TraceID() {
			w.t.Errorf("%s: kind %s, trace %s", s.Name(), s.SpanKind(), s.SpanContext().TraceID())
		}
	}
	if diff := cmp.Diff(calls, made); diff != "" {
		w.t.Errorf("%s: calls to the engine: %s", name, diff)
	}
}

func TestSpansOfALife(t *testing.T) {
	ctx := context.Background()
	w := newTraced(t, setup{})
	w.check("reconcile", map[string]any{"berm.sandboxes": int64(0), "berm.removed": int64(0)}, false, "runtime.sweep", "runtime.ensure_network", "runtime.networks", "runtime.list")
	sb := w.create(request("k")).Sandbox
	ids := func(more ...string) map[string]any {
		all := map[string]any{"berm.key": "k", "berm.session_id": sb.SessionID}
		for i := 0; i < len(more); i += 2 {
			all[more[i]] = more[i+1]
		}
		return all
	}
	w.check("sandbox.create", ids("container.id", sb.ContainerID, "berm.result", "created"), false, "runtime.image", "runtime.create")
	w.create(request("k"))
	w.check("sandbox.create", ids("container.id", sb.ContainerID, "berm.result", "reused"), false)
	w.exec("k", "true")
	w.check("sandbox.exec", ids("berm.status", "completed"), false, "runtime.exec")
	w.die("k")
	sb = w.create(request("k")).Sandbox
	w.check("sandbox.create", ids("container.id", sb.ContainerID, "berm.result", "replaced"), false, "runtime.remove", "runtime.image", "runtime.create")
	must(t, second(w.Delete(ctx, "a", "k")))
	w.check("sandbox.delete", ids("container.id", sb.ContainerID), false, "runtime.remove")
	must(t, second(w.Delete(ctx, "a", "k")))
	w.check("sandbox.delete", map[string]any{"berm.key": "k"}, false)
	if _, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); err == nil {
		t.Fatal("there is a sandbox")
	}
	w.check("sandbox.exec", map[string]any{"berm.key": "k"}, true)
}

// The span of a create that failed names nothing that doesn't exist, nor what it
// didn't make.
func TestSpansOfFailedCreates(t *testing.T) {
	failing, _ := breaking("create")
	for _, tt := range []struct {
		name   string
		fake   runtimetest.FakeOptions
		prep   func(*world)
		change func(*lifecycle.CreateRequest)
		class  string
		calls  []string
	}{
		{"engine", failing, nil, nil, "internal", []string{"runtime.image", "runtime.create"}},
		{"store", runtimetest.FakeOptions{}, func(w *world) { w.store.setFail(errBroken) }, nil, "internal",
			[]string{"runtime.image", "runtime.create", "runtime.remove"}},
		{"invalid", runtimetest.FakeOptions{}, nil, func(r *lifecycle.CreateRequest) { r.VolumePath = "relative" }, "invalid_argument", nil},
		{"denied", runtimetest.FakeOptions{}, nil, func(r *lifecycle.CreateRequest) { r.Request.Image = ptr("registry.local/no:1") }, "policy_denied", nil},
		{"conflict", runtimetest.FakeOptions{}, func(w *world) { w.create(request("k")) },
			func(r *lifecycle.CreateRequest) { r.AgentID = "another" }, "conflict", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newTraced(t, setup{fake: tt.fake})
			if tt.prep != nil {
				tt.prep(w.world)
			}
			req := request("k")
			if tt.change != nil {
				tt.change(&req)
			}
			if _, err := w.Create(context.Background(), req); err == nil {
				t.Fatal("it was made")
			}
			w.check("sandbox.create", map[string]any{"berm.key": "k"}, true, tt.calls...)
			if got := w.last("sandbox.create").Status().Description; got != tt.class {
				t.Errorf("class %s, want %s", got, tt.class)
			}
			if tt.name == "engine" {
				w.check("runtime.create", map[string]any{"error.type": "internal"}, true)
			}
		})
	}
}
