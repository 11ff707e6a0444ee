package containerd

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

func TestTraceGoesToTheEngine(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "containerd.sock")
	l, err := net.Listen("unix", socket)
	must(t, err)
	got := make(chan metadata.MD, 1)
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		md, _ := metadata.FromIncomingContext(s.Context())
		got <- md
		return status.Error(codes.Unimplemented, "no")
	}))
	go func() { _ = server.Serve(l) }() // it ends with Stop
	defer server.Stop()
	r := newRuntimeWith(t, Options{Address: socket, Root: dir, Agent: []byte("program")})

	const parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
	traced := propagation.TraceContext{}.Extract(t.Context(), propagation.MapCarrier{"traceparent": parent, "tracestate": "a=1"})
	calls := map[string]func(context.Context){
		"call":   func(ctx context.Context) { _, _ = r.Info(ctx) },
		"stream": func(ctx context.Context) { _, _ = r.client.Subscribe(ctx) },
	}
	for name, call := range calls {
		for _, tt := range []struct {
			ctx           context.Context
			parent, state []string
		}{{traced, []string{parent}, []string{"a=1"}}, {t.Context(), nil, nil}} {
			call(tt.ctx)
			md := <-got
			if diff := cmp.Diff([][]string{tt.parent, tt.state}, [][]string{md.Get("traceparent"), md.Get("tracestate")}); diff != "" {
				t.Errorf("%s: (-want +got):\n%s", name, diff)
			}
		}
	}
}
