package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	control "github.com/moby/buildkit/api/services/control"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const diffCopy = "/moby.filesync.v1.FileSync/DiffCopy"

// call makes a call of a session's method with one message.
func call(t *testing.T, conn *grpc.ClientConn, method, message string) (string, error) {
	t.Helper()
	stream, err := conn.NewStream(metadata.AppendToOutgoingContext(t.Context(), "dir-name", "context"), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodecV2(frames{}))
	if err != nil {
		return "", err
	}
	_, _ = stream.SendMsg(frameOf(message)), stream.CloseSend() // RecvMsg returns the status
	all := ""
	for {
		var f frame
		if err := stream.RecvMsg(&f); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return all, err
		}
		all += string(f.data.Materialize())
	}
}

func frameOf(s string) *frame { return &frame{mem.BufferSlice{mem.SliceBuffer(s)}} }

// echo returns what it gets.
func echo(s grpc.ServerStream) error {
	for {
		var f frame
		if err := s.RecvMsg(&f); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := s.SendMsg(&f); err != nil {
			return err
		}
	}
}

// TestSession relays the methods that the policy allows, and the client offers.
func TestSession(t *testing.T) {
	const secret, ssh, auth, exporter, verifier = "/moby.buildkit.secrets.v1.Secrets/GetSecret", "/moby.sshforward.v1.SSH/ForwardAgent", "/moby.filesync.v1.Auth/FetchToken", "/moby.exporter.v1.Exporter/FindExporters", "/moby.policy.v1.PolicyVerifier/CheckPolicy"
	all := []string{strings.ToLower(diffCopy), secret, ssh, auth, askCredentials, exporter, verifier, "/containerd.services.content.v1.Content/Read"}
	for name, tt := range map[string]struct {
		methods      []string
		secrets, ssh bool
		want         []string
	}{
		"all": {all, true, true, []string{diffCopy, secret, ssh}}, "no secrets": {all, false, true, []string{diffCopy, ssh}}, "no ssh": {all, true, false, []string{diffCopy, secret}},
		"not offered": {[]string{secret}, true, true, []string{secret}}, "none": {nil, true, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fixture) {
				f.rules.Secrets, f.rules.SSH = tt.secrets, tt.ssh
				s := f.openSession("t", "own", tt.methods...)
				if got := s.header.Values(exposed + "Grpc-Method"); !slices.Equal(got, tt.want) {
					t.Errorf("offered: %v", got)
				}
				engine := s.serve(t, func(s grpc.ServerStream) error {
					if in, _ := metadata.FromIncomingContext(s.Context()); !slices.Equal(in["dir-name"], []string{"context"}) {
						t.Error(in)
					}
					return echo(s)
				})
				for _, m := range append(all[1:], diffCopy) {
					got, err := call(t, engine, m, "hello")
					if slices.Contains(tt.want, m) {
						if err != nil || got != "hello" {
							t.Errorf("%s: %q, %v", m, got, err)
						}
						continue
					}
					wantCode(t, m, codes.Unimplemented, err)
				}
			})
		})
	}
}

// TestSessionIDs has each tenant name its own sessions only, under names of Berm's.
func TestSessionIDs(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		first := f.openSession("t", "own")
		other := f.openSession("u", "own") // of another tenant
		for _, key := range []string{"Uuid", "Sharedkey"} {
			a, b := first.header.Get(exposed+key), other.header.Get(exposed+key)
			if a == b || len(a) < 24 || a == "own" || a == "key" {
				t.Errorf("%s: %s, %s", key, a, b)
			}
		}
		if again := f.openSession("t", "own2"); again.header.Get(exposed+"Sharedkey") != first.header.Get(exposed+"Sharedkey") {
			t.Error("the shared key isn't the tenant's")
		}
		for name, s := range map[string]*clientSession{"twice": f.openSession("t", "own"), "empty": f.openSession("t", ""), "odd": f.openSession("t", "a:b"), "long": f.openSession("t", bytesOf(129))} {
			wantCode(t, name, codes.InvalidArgument, <-s.err)
		}
		for _, ids := range [][]string{nil, {"a", "b"}} {
			err := f.server.Session(t.Context(), fakeCaller{f, "t"}, http.Header{exposed + "Uuid": ids}, nil)
			wantCode(t, fmt.Sprint(ids), codes.InvalidArgument, err)
		}
		for i := range maxSessions - 2 {
			f.openSession("t", fmt.Sprint("n", i))
		}
		wantCode(t, "one more", codes.ResourceExhausted, <-f.openSession("t", "more").err)
		f.openSession("u", "more") // has its own 64

		_ = first.engine.Close() // the engine ends it
		ended(t, <-first.err)
		if s := f.openSession("t", "own"); s.header == nil {
			t.Error(<-s.err)
		}
	})
}

// TestSessionEnds ends a session at once with its client, which offers no health check.
func TestSessionEnds(t *testing.T) {
	client := func(_ *fixture, s *clientSession) { _ = s.conn.Close() }
	for name, end := range map[string]func(*fixture, *clientSession){
		"client": client, "silent client": client, "busy client": client,
		"engine": func(_ *fixture, s *clientSession) { _ = s.engine.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fixture) {
				s := f.openSession("t", "own", diffCopy)
				if name != "silent client" {
					engine := s.serve(t, func(s grpc.ServerStream) error { <-s.Context().Done(); return nil })
					engine.Connect()
					if name == "busy client" {
						go func() { _, _ = call(t, engine, diffCopy, "x") }()
					}
				}
				synctest.Wait()
				end(f, s)
				synctest.Wait() // in which no time passes
				select {
				case err := <-s.err:
					ended(t, err)
				default:
					t.Error("it is still there")
				}
				if len(f.server.sessions.all) > 0 {
					t.Error("the ID is kept")
				}
			})
		})
	}
	inBubble(t, func(t *testing.T, f *fixture) { // it never opens
		f.dead = true
		if err := <-f.openSession("t", "own").err; err == nil || len(f.server.sessions.all) > 0 {
			t.Error(err)
		}
		f.dead = false
		err := f.server.Session(t.Context(), fakeCaller{f, "t"}, http.Header{exposed + "Uuid": {"own"}}, func() (net.Conn, error) { return nil, io.EOF })
		if !errors.Is(err, io.EOF) || len(f.server.sessions.all) > 0 {
			t.Error(err)
		}
	})
}

// TestSessionBytes limits what a client sends in all calls of a session.
func TestSessionBytes(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		s := f.openSession("t", "own", diffCopy)
		engine := s.serve(t, echo)
		f.server.sessions.mu.Lock()
		own := f.server.sessions.all[[2]string{"t", "own"}]
		f.server.sessions.mu.Unlock()
		if own.left.Load() != maxContext {
			t.Error(own.left.Load())
		}
		own.left.Store(10)
		for _, want := range []codes.Code{codes.OK, codes.OK, codes.ResourceExhausted, codes.ResourceExhausted} {
			got, err := call(t, engine, diffCopy, "12345")
			if wantCode(t, "5 bytes", want, err); err != nil && got != "" {
				t.Error(got)
			}
		}
	})
	inBubble(t, func(t *testing.T, f *fixture) {
		s := f.openSession("t", "own", diffCopy)
		engine := s.serve(t, echo)
		_, err := call(t, engine, diffCopy, bytesOf(maxMessage+1))
		wantCode(t, "large message", codes.ResourceExhausted, err)
	})
}

// TestCredentials has only Berm ask a client, for the registry of a judged image.
func TestCredentials(t *testing.T) {
	field := func(n protowire.Number, s string) string {
		return string(protowire.AppendString(protowire.AppendTag(nil, n, protowire.BytesType), s))
	}
	const registry = "registry.example.com"
	for name, tt := range map[string]struct {
		offered bool
		answer  string // "": none comes
		want    string
		code    codes.Code
	}{
		"both": {true, field(1, "me") + field(2, "word"), "me word", codes.OK}, "token": {true, field(2, "word"), " word", codes.OK}, "empty": {true, field(1, ""), " ", codes.OK},
		"not offered": {false, field(1, "me"), " ", codes.OK}, "other field": {true, field(3, "x"), " ", codes.InvalidArgument}, "garbage": {true, "\xff", " ", codes.InvalidArgument},
		"cut": {true, field(1, "me")[:3], " ", codes.InvalidArgument}, "number": {true, "\x08\x01", " ", codes.InvalidArgument}, "silence": {true, "", " ", codes.DeadlineExceeded},
		"large": {true, field(1, bytesOf(1<<20)), " ", codes.ResourceExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fixture) {
				methods := []string{diffCopy}
				if tt.offered {
					methods = append(methods, askCredentials)
				}
				s := f.openSession("t", "own", methods...)
				s.serve(t, func(s grpc.ServerStream) error {
					var in frame
					if err := s.RecvMsg(&in); err != nil || string(in.data.Materialize()) != field(1, registry) {
						t.Errorf("asked %q, %v", in.data.Materialize(), err)
					}
					if m, _ := grpc.MethodFromServerStream(s); m != askCredentials {
						t.Error(m)
					}
					if tt.answer == "" {
						<-s.Context().Done()
						return s.Context().Err()
					}
					return s.SendMsg(frameOf(tt.answer))
				})
				f.base = func(ref string, _ bool, login Login) (string, error) {
					user, password, err := login(t.Context(), registry)
					if wantCode(t, name, tt.code, err); user+" "+password != tt.want {
						t.Errorf("%q %q", user, password)
					}
					return someImage(ref, false, nil)
				}
				b := f.start(f.asClient("t"), someSolve())
				f.answer(deniedBy(busybox), nil)
				f.answer(map[string]string{}, nil)
				if err := <-b.err; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestControlSession has a session over BuildKit's own API be one like any other.
func TestControlSession(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), exposed+"Uuid", "own", exposed+"Grpc-Method", diffCopy, exposed+"Grpc-Method", askCredentials))
		stream := check.Value(control.NewControlClient(f.asClient("t")).Session(ctx))(t)
		header := <-f.opened
		if id := header.Get(exposed + "Uuid"); id == "own" || len(header.Values(exposed+"Grpc-Method")) != 1 {
			t.Error(header)
		}
		near, far := net.Pipe()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer func() { _ = far.Close() }()
			for {
				m, err := stream.Recv()
				if err != nil {
					return
				}
				if _, err := far.Write(m.Data); err != nil {
					return
				}
			}
		}()
		go func() {
			for buf := make([]byte, 1<<10); ; {
				n, err := far.Read(buf)
				if err != nil || stream.Send(&control.BytesMessage{Data: slices.Clone(buf[:n])}) != nil {
					return
				}
			}
		}()
		engine := (&clientSession{conn: near, engine: <-f.sides}).serve(t, echo)
		if got, err := call(t, engine, diffCopy, "hello"); got != "hello" {
			t.Error(got, err)
		}
		cancel()
		<-ended
		synctest.Wait()
		f.server.sessions.mu.Lock()
		defer f.server.sessions.mu.Unlock()
		if len(f.server.sessions.all) > 0 {
			t.Error("the session is kept")
		}
	})
}

// flood sends without end, and returns how many bytes a reader takes that doesn't go on.
func flood(message int, send func() error) int {
	n := make(chan int, 1)
	n <- 0
	go func() {
		for send() == nil {
			if all := <-n + message; all < 8*maxMessage {
				n <- all
				continue
			}
			n <- 8 * maxMessage
			return
		}
	}()
	synctest.Wait()
	return <-n
}

// TestSlowClient has Berm not hold an image that the client asked for, and doesn't read. The
// engine still sees that the client is there.
func TestSlowClient(t *testing.T) {
	const health = "/grpc.health.v1.Health/Check"
	inBubble(t, func(t *testing.T, f *fixture) {
		engine := f.openSession("t", "own", diffCopy, health).serve(t, func(s grpc.ServerStream) error {
			if m, _ := grpc.MethodFromServerStream(s); m == health {
				return echo(s)
			}
			<-s.Context().Done()
			return nil
		})
		stream := check.Value(engine.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, diffCopy, grpc.ForceCodecV2(frames{})))(t)
		part := bytesOf(1 << 20)
		if n := flood(len(part), func() error { return stream.SendMsg(frameOf(part)) }); n > 2*maxMessage {
			t.Errorf("%d bytes for the client", n)
		}
		checked := make(chan error, 1)
		go func() { _, err := call(t, engine, health, "hello"); checked <- err }()
		synctest.Wait()
		select {
		case err := <-checked:
			ended(t, err)
		default:
			t.Error("the health check waits")
		}
	})
}

// TestFastClient has Berm not hold what a client sends in a session that the engine hasn't
// opened.
func TestFastClient(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.hangs = true
		client := control.NewControlClient(f.asClient("t"))
		session := func(id string) grpc.BidiStreamingClient[control.BytesMessage, control.BytesMessage] {
			return check.Value(client.Session(metadata.AppendToOutgoingContext(t.Context(), exposed+"Uuid", id)))(t)
		}
		stream, part := session("own"), &control.BytesMessage{Data: make([]byte, 32<<10)}
		if n := flood(len(part.Data), func() error { return stream.Send(part) }); n > 4<<20 {
			t.Errorf("%d bytes of the client", n)
		}
		stream = session("large")
		_ = stream.Send(&control.BytesMessage{Data: make([]byte, maxSessionMessage)}) // Recv returns the status
		_, err := stream.Recv()
		wantCode(t, "large message", codes.ResourceExhausted, err)
	})
}

// TestLargeHeader has a client answer with more in the header than messages may have.
func TestLargeHeader(t *testing.T) {
	for size, want := range map[int]codes.Code{1 << 10: codes.OK, 2 << 20: codes.Internal} {
		inBubble(t, func(t *testing.T, f *fixture) {
			engine := f.openSession("t", "own", diffCopy).serve(t, func(s grpc.ServerStream) error {
				s.SetTrailer(metadata.Pairs("x", bytesOf(size)))
				return echo(s)
			})
			_, err := call(t, engine, diffCopy, "hello")
			wantCode(t, fmt.Sprint(size), want, err)
		})
	}
}
