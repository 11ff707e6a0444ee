package buildkit

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// maxMessage limits a message from a client, in bytes.
const maxMessage = 8 << 20

// frame is a message that isn't decoded.
type frame struct{ data mem.BufferSlice }

// frames is the codec of relayed calls.
type frames struct{}

func (frames) Name() string { return "proto" }

func (frames) Marshal(v any) (mem.BufferSlice, error) { return v.(*frame).data, nil }

func (frames) Unmarshal(data mem.BufferSlice, v any) error {
	data.Ref()
	v.(*frame).data = data
	return nil
}

// relay forwards one call from the engine to a client.
func relay(from grpc.ServerStream, client *grpc.ClientConn, left *atomic.Int64) error {
	method, _ := grpc.MethodFromServerStream(from)
	ctx, cancel := context.WithCancel(passedOn(from.Context()))
	defer cancel()
	to, err := client.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodecV2(frames{}))
	if err != nil {
		return err
	}
	go func() { // it ends with the engine's stream
		for {
			var f frame
			if err := from.RecvMsg(&f); err != nil {
				if errors.Is(err, io.EOF) {
					_ = to.CloseSend()
				} else {
					cancel()
				}
				return
			}
			if to.SendMsg(&f) != nil {
				return
			}
		}
	}()
	for first := true; ; first = false {
		var f frame
		err := to.RecvMsg(&f)
		if first {
			if head, herr := to.Header(); herr == nil {
				_ = from.SetHeader(withoutReserved(head))
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			from.SetTrailer(withoutReserved(to.Trailer()))
			return nil
		case err != nil:
			from.SetTrailer(withoutReserved(to.Trailer()))
			return err
		case left.Add(-int64(f.data.Len())) < 0:
			f.data.Free()
			return status.Error(codes.ResourceExhausted, "the build context is larger than 1 GiB")
		}
		if err := from.SendMsg(&f); err != nil {
			return err
		}
	}
}

// passedOn returns a context for a call to the client, with the metadata of the engine's call.
func passedOn(ctx context.Context) context.Context {
	in, _ := metadata.FromIncomingContext(ctx)
	return metadata.NewOutgoingContext(ctx, withoutReserved(in))
}

// withoutReserved leaves out the metadata that each HTTP/2 connection sets for itself.
func withoutReserved(in metadata.MD) metadata.MD {
	out := metadata.MD{}
	for key, values := range in {
		if !strings.HasPrefix(key, ":") && !strings.HasPrefix(key, "grpc-") && key != "content-type" && key != "user-agent" {
			out[key] = values
		}
	}
	return out
}

// paced is the body of a stream. Its reads wait while a whole message's bytes are read and not
// used yet. Otherwise gRPC's server would keep all that it can read in memory.
type paced struct {
	io.ReadCloser
	most    int
	mu      sync.Mutex
	changed sync.Cond
	ahead   int // bytes that were read, and not used yet
	closed  bool
}

type pacedKey struct{}

// pace makes the body of a request paced. Message is the most bytes of one message.
func pace(r *http.Request, message int) *http.Request {
	p := &paced{ReadCloser: r.Body, most: message + messageHead}
	p.changed.L = &p.mu
	r = r.WithContext(context.WithValue(r.Context(), pacedKey{}, p))
	r.Body = p
	return r
}

// messageHead is the length of gRPC's prefix of each message, in bytes.
const messageHead = 5

// used reports that a message of a paced stream was used, so that more can be read. Message is
// its length in bytes.
func used(ctx context.Context, message int) {
	p := ctx.Value(pacedKey{}).(*paced)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ahead = max(0, p.ahead-message-messageHead)
	p.changed.Signal()
}

func (p *paced) Read(b []byte) (int, error) {
	p.mu.Lock()
	for p.ahead >= p.most && !p.closed {
		p.changed.Wait()
	}
	p.mu.Unlock()
	n, err := p.ReadCloser.Read(b)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ahead += n
	return n, err
}

func (p *paced) Close() error {
	p.mu.Lock()
	p.closed = true
	p.changed.Signal()
	p.mu.Unlock()
	return p.ReadCloser.Close()
}
