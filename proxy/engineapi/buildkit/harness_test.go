package buildkit

import (
	"context"
	"errors"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	control "github.com/moby/buildkit/api/services/control"
	"github.com/moby/buildkit/client/buildid"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

// bubble runs a test by a clock of its own. The HTTP/2 server keeps channels in a sync.Pool,
// which two collections empty, and no other bubble may use.
func bubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	runtime.GC()
	runtime.GC()
	synctest.Test(t, f)
}

// inBubble is bubble with a fixture.
func inBubble(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	bubble(t, func(t *testing.T) { test(t, newFixture(t)) })
}

// engineStreams is how many calls dockerd takes on one connection, by golang.org/x/net/http2.
const engineStreams = 250

// engineJob is a Solve that the engine was asked for.
type engineJob struct {
	*control.SolveRequest
	ctx    context.Context // of the call
	answer chan any        // an error, or the exporter's response
}

// fixture is a Server between clients and an engine, which a test plays.
type fixture struct {
	t      *testing.T
	server *Server
	jobs   chan *engineJob
	opened chan http.Header // sessions of the engine's, of which the other side is in sides
	sides  chan net.Conn

	mu      sync.Mutex
	unary   map[string]func(ctx context.Context, req any) (any, error) // by method
	streams map[string]func(grpc.ServerStream) error
	dead    bool // the engine refuses connections
	hangs   bool // the engine opens no session
	conns   []net.Conn

	session string // that Solves name
	rules   policy.BuildKit
	builds  chan *fakeBuild // those that have begun
	begin   error
	base    func(ref string, pull bool, login Login) (string, error)
	pin     func(id string) // while an image is pinned
	pins    map[string]int  // by image ID: how often it is pinned now
	ends    chan error      // outcomes
	finish  func(ids, names []string) error
	panics  atomic.Int64
	leased  map[string]int64 // by tenant, now
	peak    int64            // of one message
}

func newFixture(t *testing.T) *fixture {
	f := &fixture{
		t: t, jobs: make(chan *engineJob), opened: make(chan http.Header, maxSessions), sides: make(chan net.Conn, maxSessions),
		session: "own", rules: someRules(), builds: make(chan *fakeBuild, 300), pins: map[string]int{}, ends: make(chan error, 300), leased: map[string]int64{},
		unary: map[string]func(context.Context, any) (any, error){}, streams: map[string]func(grpc.ServerStream) error{},
		base: someImage,
		pin:  func(string) {}, finish: func([]string, []string) error { return nil },
	}
	f.unary[control.Control_Solve_FullMethodName] = f.job
	l := pipes.Listen()
	engine := grpc.NewServer(
		grpc.MaxConcurrentStreams(engineStreams),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			f.mu.Lock()
			h := f.unary[info.FullMethod]
			f.mu.Unlock()
			if h == nil {
				return next(ctx, req)
			}
			return h(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			f.mu.Lock()
			h := f.streams[info.FullMethod]
			f.mu.Unlock()
			if h == nil {
				return next(srv, stream)
			}
			return h(stream)
		}))
	control.RegisterControlServer(engine, struct {
		control.UnimplementedControlServer
	}{})
	gateway.RegisterLLBBridgeServer(engine, struct {
		gateway.UnimplementedLLBBridgeServer
	}{})
	contentapi.RegisterContentServer(engine, struct {
		contentapi.UnimplementedContentServer
	}{})
	served := make(chan struct{})
	go func() { defer close(served); _ = engine.Serve(l) }()
	f.server = check.Value(New(Options{
		Dial: func(ctx context.Context, path string, header http.Header) (net.Conn, error) {
			if f.hangs && path == "/session" {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			near, far := net.Pipe()
			f.mu.Lock()
			defer f.mu.Unlock()
			switch {
			case f.dead:
				return nil, errors.New("no engine")
			case path == "/session":
				f.opened <- header
				f.sides <- far
				return near, nil
			}
			f.conns = append(f.conns, far)
			l.Hand(far)
			return near, nil
		},
		Status: func(err error) error {
			if refused(err) {
				return status.Error(codes.PermissionDenied, err.Error())
			}
			return status.Error(codes.Unknown, "told: "+err.Error())
		},
		Lease:    func(tenant string) Lease { return &fakeLease{f: f, tenant: tenant} },
		Panicked: func(context.Context, any) { f.panics.Add(1) },
	}))(t)
	t.Cleanup(func() {
		_ = f.server.Close()
		engine.Stop()
		<-served
	})
	return f
}

// someImage is Base with images of all names but two.
func someImage(ref string, _ bool, _ Login) (string, error) {
	switch ref {
	case "refused":
		return "", denied("images", ref, "the image is refused", "")
	case "missing":
		return "", status.Error(codes.NotFound, "no image")
	}
	return "sha256:" + ref, nil
}

// on has the engine answer a method.
func (f *fixture) on(method string, h func(ctx context.Context, req any) (any, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unary[method] = h
}

func (f *fixture) onStream(method string, h func(grpc.ServerStream) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.streams[method] = h
}

// kill ends the engine's connections and refuses others.
func (f *fixture) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = true
	for _, c := range f.conns {
		_ = c.Close()
	}
}

// job answers the engine's Solve as the test says.
func (f *fixture) job(ctx context.Context, req any) (any, error) {
	j := &engineJob{req.(*control.SolveRequest), ctx, make(chan any)}
	select {
	case f.jobs <- j:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case a := <-j.answer:
		if err, ok := a.(error); ok {
			return nil, err
		}
		return &control.SolveResponse{ExporterResponse: a.(map[string]string)}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// asClient returns a connection as a tenant.
func (f *fixture) asClient(tenant string) *grpc.ClientConn {
	near, far := net.Pipe()
	served := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	go func() { defer close(served); f.server.Serve(ctx, fakeCaller{f, tenant}, far) }()
	conn := check.Value(overConn(near))(f.t)
	f.t.Cleanup(func() { _ = conn.Close(); cancel(); <-served })
	return conn
}

// openSession opens a session as a tenant's client, which serves methods.
func (f *fixture) openSession(tenant, id string, methods ...string) *clientSession {
	f.t.Helper()
	near, far := net.Pipe()
	c := &clientSession{conn: near, err: make(chan error, 1)}
	header := http.Header{exposed + "Uuid": {id}, exposed + "Name": {"x"}, exposed + "Sharedkey": {"key"}, exposed + "Grpc-Method": methods}
	ctx, cancel := context.WithCancel(context.Background())
	taken := make(chan struct{})
	go func() {
		c.err <- f.server.Session(ctx, fakeCaller{f, tenant}, header, func() (net.Conn, error) { close(taken); return far, nil })
	}()
	f.t.Cleanup(func() { cancel(); _ = near.Close() })
	select {
	case <-taken:
		c.header, c.engine = <-f.opened, <-f.sides
	case err := <-c.err:
		c.err <- err
	}
	return c
}

type clientSession struct {
	conn, engine net.Conn    // the client's side, and the engine's
	header       http.Header // what the engine was told
	err          chan error
}

// serve serves the session's methods on the client's side, and returns a client on the engine's.
func (c *clientSession) serve(t *testing.T, handle func(grpc.ServerStream) error) *grpc.ClientConn {
	server := grpc.NewServer(grpc.ForceServerCodecV2(frames{}), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error { return handle(s) }))
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(newSingle(c.conn)) }()
	engine := check.Value(overConn(c.engine))(t)
	t.Cleanup(func() { _ = engine.Close(); server.Stop(); <-done })
	return engine
}

type fakeCaller struct {
	f      *fixture
	tenant string
}

func (c fakeCaller) Tenant() string                                 { return c.tenant }
func (c fakeCaller) Rules(context.Context) (policy.BuildKit, error) { return c.f.rules, nil }

func (c fakeCaller) Begin(ctx context.Context) (Build, error) {
	if c.f.begin != nil {
		return nil, c.f.begin
	}
	j := newJudging()
	j.rules = c.f.rules
	b := &fakeBuild{judging: j, f: c.f}
	b.ctx, b.cancel = context.WithCancel(ctx)
	c.f.builds <- b
	return b, nil
}

// fakeBuild records what is asked of a Build.
type fakeBuild struct {
	*judging
	f      *fixture
	ctx    context.Context
	cancel func()
}

func (b *fakeBuild) Context() context.Context { return b.ctx }
func (b *fakeBuild) URLs() []string           { return nil }
func (b *fakeBuild) End(err error)            { b.cancel(); b.f.ends <- err }

func (b *fakeBuild) Base(ref string, pull bool, login Login) (string, error) {
	return b.f.base(ref, pull, login)
}

func (b *fakeBuild) Pin(id string) (string, func(), error) {
	b.f.pin(id)
	b.f.count(id, 1)
	return Pin("o", "t", id) + ":1", func() { b.f.count(id, -1) }, nil
}

func (b *fakeBuild) Finish(ids, names []string) error { return b.f.finish(ids, names) }

func (f *fixture) count(id string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pins[id] += n
}

// wantPins fails unless so many images are pinned, each once.
func (f *fixture) wantPins(want int) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for id, uses := range f.pins {
		if n += uses; uses < 0 || uses > 1 {
			f.t.Errorf("%s is pinned %d times", id, uses)
		}
	}
	if n != want {
		f.t.Errorf("%d pins, not %d", n, want)
	}
}

type fakeLease struct {
	f      *fixture
	tenant string
	bytes  int64
}

func (l *fakeLease) Resize(_ context.Context, bytes int64) error {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.f.leased[l.tenant] += bytes - l.bytes
	l.bytes, l.f.peak = bytes, max(l.f.peak, bytes)
	return nil
}

func (l *fakeLease) Release() { _ = l.Resize(nil, 0) } //nolint:staticcheck // it isn't used

// deniedBy is BuildKit's error for a source.
func deniedBy(source string) error {
	return status.Errorf(codes.Unknown, "failed to solve: source %q denied by policy", source)
}

// solving is a client's Solve that runs.
type solving struct {
	conn   *grpc.ClientConn
	cancel func()
	resp   chan *control.SolveResponse
	err    chan error
}

// start begins a client's Solve in its session.
func (f *fixture) start(conn *grpc.ClientConn, req *control.SolveRequest) *solving {
	ctx, cancel := context.WithCancel(context.Background())
	s := &solving{conn, cancel, make(chan *control.SolveResponse, 1), make(chan error, 1)}
	req.Session = f.session
	go func() {
		resp, err := control.NewControlClient(conn).Solve(ctx, req)
		s.resp <- resp
		s.err <- err
	}()
	f.t.Cleanup(cancel)
	return s
}

// inBuild is a context for gateway calls in a build.
func inBuild(t *testing.T, ref string) context.Context {
	return buildid.AppendToOutgoingContext(t.Context(), ref)
}

// ended fails if something didn't end well.
func ended(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

func wantCode(t testing.TB, what string, want codes.Code, err error) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("%s: %v, not %v", what, err, want)
	}
}
