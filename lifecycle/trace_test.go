package lifecycle_test

import (
	"context"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/propagation"

	"github.com/bermhq/berm/lifecycle"
)

func TestCommandsKnowTheirTrace(t *testing.T) {
	const parent, state = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01", "a=1"
	ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{"traceparent": parent, "tracestate": state})
	both := []string{"TRACEPARENT=" + parent, "TRACESTATE=" + state}
	tests := map[string]struct {
		ctx                context.Context // nil: the traced one
		policy             string
		operator, own, cmd map[string]string // variables of the operator, the create and the command
		want               []string
	}{
		"no trace":         {ctx: context.Background()},
		"traced":           {want: both},
		"beside others":    {cmd: map[string]string{"A": "1"}, want: append([]string{"A=1"}, both...)},
		"the command's":    {cmd: map[string]string{"TRACEPARENT": "x"}, want: []string{"TRACEPARENT=x"}},
		"its state alone":  {cmd: map[string]string{"TRACESTATE": "x"}, want: []string{"TRACESTATE=x"}},
		"the sandbox's":    {own: map[string]string{"TRACEPARENT": "x"}, want: []string{"TRACEPARENT=x"}},
		"the operator's":   {operator: map[string]string{"TRACEPARENT": "x"}, want: []string{"TRACEPARENT=x"}},
		"denied":           {policy: "version: 1\nenv: {deny: [TRACE*]}\n"},
		"not allowed":      {policy: "version: 1\nenv: {allow: [LANG]}\n"},
		"pinned":           {policy: "version: 1\nenv: {pin: {TRACEPARENT: x}}\n", want: []string{"TRACEPARENT=x"}},
		"its state pinned": {policy: "version: 1\nenv: {pin: {TRACESTATE: x}}\n", want: []string{"TRACESTATE=x"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{policy: tt.policy, settings: lifecycle.Settings{Env: tt.operator}})
			req := request("k")
			req.Request.Env = tt.own
			w.create(req)
			if tt.ctx == nil {
				tt.ctx = ctx
			}
			exec := lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"env"}, Env: tt.cmd}
			check := func(how, out string) {
				t.Helper()
				for _, line := range tt.want {
					if !strings.Contains("\n"+out, "\n"+line+"\n") {
						t.Errorf("%s: %s is missing in %q", how, line, out)
					}
				}
				traced := 0
				for _, line := range tt.want {
					if strings.HasPrefix(line, "TRACE") {
						traced++
					}
				}
				if got := strings.Count("\n"+out, "\nTRACE"); got != traced {
					t.Errorf("%s: %d variables, want %d: %q", how, got, traced, out)
				}
			}
			res, err := w.Exec(tt.ctx, exec)
			must(t, err)
			check("run", res.Stdout)
			must(t, second(w.start(tt.ctx, lifecycle.StartRequest{ExecRequest: exec, ID: "e"})))
			stdout, _ := readAll(t, w.attachExec("e", 0), 0)
			check("started", stdout)
		})
	}
}
