package buildkit

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	control "github.com/moby/buildkit/api/services/control"
	types "github.com/moby/buildkit/api/types"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"golang.org/x/net/http2"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// maxAnswer limits a message from the engine, in bytes.
const maxAnswer = 64 << 20

// Options of New. All are mandatory.
type Options struct {
	// Dial opens a connection to an endpoint of the engine's, "/grpc" or "/session", with
	// the header of an upgrade.
	Dial func(ctx context.Context, path string, header http.Header) (net.Conn, error)
	// Status returns the gRPC status that a client gets for an error of Berm's.
	Status func(error) error
	// Lease begins a lease of memory for one message of a tenant's.
	Lease func(tenant string) Lease
	// Panicked counts and logs a panic of a call, which ends that call only.
	Panicked func(ctx context.Context, v any)
}

// Lease is memory that a message takes. It belongs to one goroutine.
type Lease interface {
	Resize(ctx context.Context, bytes int64) error
	Release()
}

// Server serves BuildKit's API. It is safe for many goroutines.
type Server struct {
	opts     Options
	grpc     *grpc.Server
	streams  *grpc.Server // of sessions only
	engine   *grpc.ClientConn
	sessions sessions

	mu      sync.Mutex
	builds  map[[2]string]*build // by tenant and client's ref
	ended   map[string][]*build  // those of each tenant that have ended, the oldest first
	changed chan struct{}        // closed when one begins

	calls sync.Map // by tenant: *semaphore.Weighted of its calls, but of sessions
}

// New returns a Server. It connects to the engine on the first call.
func New(opts Options) (*Server, error) {
	s := &Server{opts: opts, builds: map[[2]string]*build{}, ended: map[string][]*build{}, changed: make(chan struct{})}
	s.sessions.all, s.sessions.changed = map[[2]string]*session{}, make(chan struct{})
	var err error
	s.engine, err = grpc.NewClient("passthrough:engine",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return opts.Dial(ctx, "/grpc", http.Header{"Connection": {"Upgrade"}, "Upgrade": {"h2c"}})
		}),
		grpc.WithIdleTimeout(time.Minute),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			reconnect(ctx, conn)
			return call(ctx, method, req, reply, conn, opts...)
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, call grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			reconnect(ctx, conn)
			return call(ctx, desc, conn, method, opts...)
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second}}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer), grpc.MaxCallSendMsgSize(maxAnswer)))
	if err != nil {
		return nil, fmt.Errorf("buildkit: %w", err)
	}
	s.grpc, s.streams = s.newGRPC(maxMessage), s.newGRPC(maxSessionMessage)
	control.RegisterControlServer(s.streams, service{Server: s})
	control.RegisterControlServer(s.grpc, service{Server: s})
	gateway.RegisterLLBBridgeServer(s.grpc, bridge{Server: s})
	contentapi.RegisterContentServer(s.grpc, contents{Server: s})
	s.grpc.RegisterService(&traces, nil)
	return s, nil
}

// newGRPC returns a server for messages of so many bytes, which refuses unknown fields in them.
func (s *Server) newGRPC(message int) *grpc.Server {
	return grpc.NewServer(grpc.ForceServerCodecV2(codec{encoding.GetCodecV2("proto")}), grpc.MaxRecvMsgSize(message), grpc.MaxSendMsgSize(maxAnswer),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (_ any, err error) {
			defer s.recovered(ctx, &err)
			if err := strict(req); err != nil {
				return nil, s.status(err)
			}
			resp, err := handle(ctx, req)
			return resp, s.status(err)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
			defer s.recovered(stream.Context(), &err)
			return s.status(handle(srv, strictStream{stream}))
		}))
}

// recovered turns a panic of a call into the call's error. gRPC runs calls in its own goroutines,
// where a panic would end the process.
func (s *Server) recovered(ctx context.Context, err *error) {
	if v := recover(); v != nil {
		s.opts.Panicked(ctx, v)
		*err = status.Error(codes.Internal, "something went wrong; the server's log tells more")
	}
}

// reconnectTime is how long a call waits for an engine that was away.
const reconnectTime = time.Second

// reconnect tries at once to reach an engine that was away, and may be back.
func reconnect(ctx context.Context, conn *grpc.ClientConn) {
	ctx, cancel := context.WithTimeout(ctx, reconnectTime)
	defer cancel()
	for conn.GetState() == connectivity.TransientFailure {
		conn.ResetConnectBackoff()
		if !conn.WaitForStateChange(ctx, connectivity.TransientFailure) {
			return
		}
	}
}

// Close closes the connection to the engine.
func (s *Server) Close() error { return s.engine.Close() }

const (
	// maxStreams limits the calls of one connection at a time.
	maxStreams = 64
	// maxCalls limits the calls of a tenant at a time, over all its connections. All tenants share
	// one connection to the engine, which takes 250. Builds that wait have some, too.
	maxCalls = 120
	// maxHeaders limits a call's headers, in bytes, which aren't leased.
	maxHeaders = 16 << 10
	// Windows of HTTP/2: a call whose data isn't read blocks no other of its connection.
	streamBuffer, connBuffer = 128 << 10, 1 << 20
	// relayBuffer is for what a session reads and writes at once.
	relayBuffer = 128 << 10
)

// unlogged keeps faults of connections out of the log, which clients could fill. It bounds
// headers.
var unlogged = &http.Server{ErrorLog: log.New(io.Discard, "", 0), MaxHeaderBytes: maxHeaders}

// Serve serves a connection that a client has upgraded, until it ends.
func (s *Server) Serve(ctx context.Context, caller Caller, conn net.Conn) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	//nolint:staticcheck // net/http serves listeners, and no single connection
	(&http2.Server{MaxConcurrentStreams: maxStreams, MaxUploadBufferPerStream: streamBuffer, MaxUploadBufferPerConnection: connBuffer}).ServeConn(conn, &http2.ServeConnOpts{
		BaseConfig: unlogged,
		Context:    context.WithValue(ctx, callerKey{}, caller), Handler: http.HandlerFunc(s.serve),
	})
}

// serve serves one call. It paces the messages of a session. For any other call it leases memory
// for the message, which must arrive within messageTime.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	r.Header.Del("Grpc-Encoding") // a compressed message takes more memory than its bytes
	if r.URL.Path == control.Control_Session_FullMethodName {
		s.streams.ServeHTTP(w, pace(r, maxSessionMessage))
		return
	}
	tenant := callerOf(r.Context()).Tenant()
	calls, _ := s.calls.LoadOrStore(tenant, semaphore.NewWeighted(maxCalls))
	if !calls.(*semaphore.Weighted).TryAcquire(1) {
		h := w.Header()
		h.Set("Content-Type", "application/grpc")
		h.Set("Grpc-Status", strconv.Itoa(int(codes.ResourceExhausted)))
		h.Set("Grpc-Message", fmt.Sprintf("%d calls go on, the most that one tenant may have", maxCalls))
		return
	}
	defer calls.(*semaphore.Weighted).Release(1)
	m := &memory{ReadCloser: r.Body, ctx: r.Context(), lease: s.opts.Lease(tenant)}
	defer m.release()
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(messageTime)) // HTTP/2 supports it
	r = r.WithContext(context.WithValue(r.Context(), memoryKey{}, m))
	r.Body = m
	s.grpc.ServeHTTP(w, r)
}

// messageTime limits how long a call's message may take to arrive.
const messageTime = 30 * time.Second

// copies is how often a message is in memory: as bytes, as decoded fields, and in the request to
// the engine.
const copies = 3

// memory is the body of a call. It leases memory for the bytes that are read and for the answer,
// until the answer is sent. A call whose client is gone may go on after that.
type memory struct {
	io.ReadCloser
	ctx context.Context

	mu    sync.Mutex
	lease Lease
	bytes int64
}

type memoryKey struct{}

func (m *memory) add(bytes int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes += bytes
	return m.lease.Resize(m.ctx, copies*m.bytes)
}

func (m *memory) release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lease.Release()
}

func (m *memory) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	if err == nil {
		err = m.add(int64(n))
	}
	return n, err
}

// leaseAnswer leases memory for an answer of at most the given number of bytes.
func leaseAnswer(ctx context.Context, bytes int64) error {
	return ctx.Value(memoryKey{}).(*memory).add(bytes)
}

type callerKey struct{}

func callerOf(ctx context.Context) Caller { return ctx.Value(callerKey{}).(Caller) }

// status returns the gRPC status that a client gets for an error.
func (s *Server) status(err error) error {
	st, ok := status.FromError(err)
	switch {
	case err == nil:
		return nil
	case ok && st.Code() != codes.Unavailable: // whose text names the engine's address
		return err
	case ok:
		return status.Error(codes.Unavailable, "the engine's BuildKit is away")
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, context.DeadlineExceeded.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, context.Canceled.Error())
	}
	return s.opts.Status(err)
}

func strict(m any) error {
	if p, ok := m.(proto.Message); ok && hasUnknown(p.ProtoReflect()) {
		return denied("fields", "", "the request has fields that Berm doesn't know", "fields of BuildKit's API up to this release of Berm")
	}
	return nil
}

// strictStream refuses unknown fields in what a client sends.
type strictStream struct{ grpc.ServerStream }

func (s strictStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return strict(m)
}

func random() string {
	b := make([]byte, 12)
	_, _ = rand.Read(b) // it never fails
	return hex.EncodeToString(b)
}

// service is BuildKit's control API.
type service struct {
	control.UnimplementedControlServer
	*Server
}

func (s service) control() control.ControlClient { return control.NewControlClient(s.engine) }

func (s service) Info(ctx context.Context, _ *control.InfoRequest) (*control.InfoResponse, error) {
	return s.control().Info(ctx, &control.InfoRequest{})
}

// ListWorkers lists the workers, by which a client chooses a platform and an output.
func (s service) ListWorkers(ctx context.Context, _ *control.ListWorkersRequest) (*control.ListWorkersResponse, error) {
	resp, err := s.control().ListWorkers(ctx, &control.ListWorkersRequest{})
	if err != nil {
		return nil, err
	}
	showWorkers(resp.Record)
	return resp, nil
}

// showWorkers removes details of the engine's host from workers.
func showWorkers(workers []*types.WorkerRecord) {
	const snapshotter = "org.mobyproject.buildkit.worker.snapshotter"
	for _, w := range workers {
		kept := map[string]string{}
		if v, ok := w.Labels[snapshotter]; ok {
			kept[snapshotter] = v
		}
		w.Labels, w.GCPolicy, w.CDIDevices = kept, nil, nil
	}
}

// DiskUsage answers an empty list, as the engine's records have no owner.
func (service) DiskUsage(context.Context, *control.DiskUsageRequest) (*control.DiskUsageResponse, error) {
	return &control.DiskUsageResponse{}, nil
}

// Prune removes nothing, as the engine's records have no owner.
func (service) Prune(*control.PruneRequest, control.Control_PruneServer) error { return nil }

// traces takes spans of clients, and drops them undecoded.
var traces = grpc.ServiceDesc{
	ServiceName: "opentelemetry.proto.collector.trace.v1.TraceService",
	Methods: []grpc.MethodDesc{{MethodName: "Export", Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		return new(emptypb.Empty), decode(new(emptypb.Empty))
	}}},
}
