package buildkit

import (
	"context"
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

const (
	maxSessions = 64 // of a tenant
	// maxSessionMessage limits a message of a session over BuildKit's own API, in bytes.
	// Clients send 32 KiB.
	maxSessionMessage = 256 << 10
	maxContext        = 1 << 30  // bytes that a client may send in a session
	maxHeader         = 64 << 10 // bytes of a header or a trailer of a client's answer
	// sessionWait is how long a build waits for its session, which the client opens meanwhile.
	sessionWait = 5 * time.Second
	// loginTime limits how long a client may take to answer for its credentials.
	loginTime = 10 * time.Second

	exposed = "X-Docker-Expose-Session-" // begins the headers that open a session

	askCredentials = "/moby.filesync.v1.Auth/Credentials"
)

// offered are the client's methods that the engine may call. The method for credentials isn't
// among them: Berm calls it itself, once it has judged the image.
var offered = []string{
	"/moby.filesync.v1.FileSync/DiffCopy", "/moby.filesync.v1.FileSync/TarStream", "/moby.filesync.v1.FileSend/DiffCopy",
	"/moby.upload.v1.Upload/Pull", "/grpc.health.v1.Health/Check",
}

var (
	secretMethods = []string{"/moby.buildkit.secrets.v1.Secrets/GetSecret"}
	sshMethods    = []string{"/moby.sshforward.v1.SSH/CheckAgent", "/moby.sshforward.v1.SSH/ForwardAgent"}
)

// session is a client's session. The engine knows it by another ID.
type session struct {
	id      string           // the engine's
	client  *grpc.ClientConn // nil until the session is open
	methods []string         // the client's methods that the engine may call
	login   bool             // the client offers the method for credentials
	left    atomic.Int64     // bytes that the client may still send
}

type sessions struct {
	mu      sync.Mutex
	all     map[[2]string]*session // by tenant and client's ID
	changed chan struct{}          // closed when one opens
}

// reserve takes an ID for a session that is about to open.
func (s *sessions) reserve(tenant, id string, new *session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for key := range s.all {
		if key[0] == tenant {
			n++
		}
	}
	switch {
	case s.all[[2]string{tenant, id}] != nil:
		return status.Error(codes.InvalidArgument, "the session exists")
	case n >= maxSessions:
		return status.Errorf(codes.ResourceExhausted, "%d sessions are open, the most that one tenant may have", n)
	}
	s.all[[2]string{tenant, id}] = new
	return nil
}

func (s *sessions) open(new *session, client *grpc.ClientConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	new.client = client
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *sessions) remove(tenant, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, [2]string{tenant, id})
}

// await returns an open session of the tenant's. It waits up to sessionWait for it.
func (s *sessions) await(ctx context.Context, tenant, id string) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, sessionWait)
	defer cancel()
	for {
		s.mu.Lock()
		found, changed := s.all[[2]string{tenant, id}], s.changed
		ready := found != nil && found.client != nil
		s.mu.Unlock()
		if ready {
			return found, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, status.Error(codes.NotFound, "no such session")
		}
	}
}

// Session serves a client's session, which the header describes, until one side ends it.
// Opened is called when the connection may be taken over, and returns it.
func (s *Server) Session(ctx context.Context, caller Caller, header http.Header, opened func() (net.Conn, error)) error {
	uuid := header.Values(exposed + "Uuid")
	if len(uuid) != 1 || !sessionID(uuid[0]) {
		return status.Error(codes.InvalidArgument, "malformed session ID")
	}
	rules, err := caller.Rules(ctx)
	if err != nil {
		return err
	}
	new := &session{id: random()}
	new.left.Store(maxContext)
	allowed := slices.Clone(offered)
	if rules.Secrets {
		allowed = append(allowed, secretMethods...)
	}
	if rules.SSH {
		allowed = append(allowed, sshMethods...)
	}
	for _, method := range header.Values(exposed + "Grpc-Method") {
		i := slices.IndexFunc(allowed, func(m string) bool { return strings.EqualFold(m, method) })
		if i >= 0 {
			new.methods = append(new.methods, allowed[i])
		}
		new.login = new.login || strings.EqualFold(method, askCredentials)
	}
	if err := s.sessions.reserve(caller.Tenant(), uuid[0], new); err != nil {
		return err
	}
	defer s.sessions.remove(caller.Tenant(), uuid[0])
	engine, err := s.opts.Dial(ctx, "/session", sessionHeader(new, caller.Tenant(), header))
	if err != nil {
		return err
	}
	defer func() { _ = engine.Close() }()
	conn, err := opened()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return s.relaySession(ctx, new, conn, engine)
}

var sessionID = like(`[A-Za-z0-9_-]{1,128}`)

// sessionHeader returns the header that opens a session at the engine.
func sessionHeader(s *session, tenant string, in http.Header) http.Header {
	h := http.Header{}
	h.Set("Connection", "Upgrade")
	h.Set("Upgrade", "h2c")
	h.Set(exposed+"Uuid", s.id)
	h.Set(exposed+"Name", "berm")
	// The engine keeps a directory per shared key, and fetches only files that differ.
	h.Set(exposed+"Sharedkey", derive("sharedkey", tenant, in.Get(exposed+"Sharedkey")))
	h[textproto.CanonicalMIMEHeaderKey(exposed+"Grpc-Method")] = s.methods
	return h
}

// relaySession serves the engine on one connection with the client's methods on the other.
func (s *Server) relaySession(ctx context.Context, new *session, conn, engine net.Conn) error {
	client, err := overConn(watched{conn, func() { _ = engine.Close() }})
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	client.Connect() // reads from the connection, so that its end is noticed
	s.sessions.open(new, client)
	server := grpc.NewServer(grpc.ForceServerCodecV2(frames{}), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage),
		grpc.InitialWindowSize(streamBuffer), grpc.InitialConnWindowSize(connBuffer), grpc.ReadBufferSize(relayBuffer), grpc.WriteBufferSize(relayBuffer),
		grpc.UnknownServiceHandler(func(_ any, from grpc.ServerStream) error {
			if method, _ := grpc.MethodFromServerStream(from); !slices.Contains(new.methods, method) {
				return status.Errorf(codes.Unimplemented, "%s isn't offered", method)
			}
			return relay(from, client, &new.left)
		}))
	defer server.Stop()
	stop := context.AfterFunc(ctx, func() { _ = engine.Close() })
	defer stop()
	_ = server.Serve(newSingle(engine)) // until that connection ends
	return nil
}

// single is a listener with one connection, which is closed when that has ended.
type single struct {
	net.Conn
	conns chan net.Conn // closed at the end
}

func newSingle(conn net.Conn) single {
	l := single{conn, make(chan net.Conn, 1)}
	l.conns <- watched{conn, sync.OnceFunc(func() { close(l.conns) })}
	return l
}

func (l single) Accept() (net.Conn, error) {
	if conn, ok := <-l.conns; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}

func (l single) Addr() net.Addr { return l.LocalAddr() }

// watched is a connection that reports its end.
type watched struct {
	net.Conn
	ended func()
}

func (c watched) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		c.ended()
	}
	return n, err
}

// overConn returns a gRPC client over an open connection. The client can't reconnect.
func overConn(conn net.Conn) (*grpc.ClientConn, error) {
	conns := make(chan net.Conn, 1)
	conns <- conn
	return grpc.NewClient("passthrough:session", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithIdleTimeout(0), grpc.WithMaxHeaderListSize(maxHeader),
		grpc.WithInitialWindowSize(connBuffer), grpc.WithInitialConnWindowSize(connBuffer), grpc.WithReadBufferSize(relayBuffer), grpc.WithWriteBufferSize(relayBuffer),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case conn := <-conns:
				return conn, nil
			default:
				return nil, net.ErrClosed
			}
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)))
}

// credentials is Login for a session.
func (s *session) credentials(ctx context.Context, registry string) (user, password string, err error) {
	if !s.login {
		return "", "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, loginTime)
	defer cancel()
	asked := &frame{mem.BufferSlice{mem.SliceBuffer(protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), registry))}}
	var answer frame
	if err := s.client.Invoke(ctx, askCredentials, asked, &answer, grpc.ForceCodecV2(frames{}), grpc.MaxCallRecvMsgSize(1<<20)); err != nil {
		return "", "", err
	}
	defer answer.data.Free()
	var fields [3]string // by number
	for b := answer.data.Materialize(); len(b) > 0; {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 || kind != protowire.BytesType || number > 2 {
			return "", "", status.Error(codes.InvalidArgument, "malformed credentials")
		}
		text, m := protowire.ConsumeString(b[n:])
		if m < 0 {
			return "", "", status.Error(codes.InvalidArgument, "malformed credentials")
		}
		fields[number], b = text, b[n+m:]
	}
	return fields[1], fields[2], nil
}

// Session is a session over BuildKit's own API.
func (s service) Session(stream control.Control_SessionServer) error {
	header := http.Header{}
	in, _ := metadata.FromIncomingContext(stream.Context())
	for key, values := range in {
		header[textproto.CanonicalMIMEHeaderKey(key)] = values
	}
	near, far := net.Pipe()
	go func() { // it ends with the stream
		defer func() { _ = far.Close() }()
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			if _, err := far.Write(m.Data); err != nil {
				return
			}
			used(stream.Context(), proto.Size(m))
		}
	}()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for buf := make([]byte, 32<<10); ; {
			n, err := far.Read(buf)
			if err != nil || stream.Send(&control.BytesMessage{Data: slices.Clone(buf[:n])}) != nil {
				return
			}
		}
	}()
	err := s.Server.Session(stream.Context(), callerOf(stream.Context()), header, func() (net.Conn, error) { return near, nil })
	_ = near.Close()
	_ = far.Close()
	<-sent
	return err
}
