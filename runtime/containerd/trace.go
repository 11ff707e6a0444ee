package containerd

import (
	"context"

	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// traced adds the trace of a call, if any, to the call's metadata. The format is W3C's, as
// OpenTelemetry expects.
func traced(ctx context.Context) context.Context {
	fields := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, fields)
	for name, value := range fields {
		ctx = metadata.AppendToOutgoingContext(ctx, name, value)
	}
	return ctx
}

func tracedCall(ctx context.Context, method string, in, out any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return invoke(traced(ctx), method, in, out, conn, opts...)
}

func tracedStream(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return open(traced(ctx), desc, conn, method, opts...)
}
