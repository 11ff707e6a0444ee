package buildkit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	spb "github.com/moby/buildkit/sourcepolicy/pb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"
)

func allowAll() *spb.Policy {
	return &spb.Policy{Version: 1, Rules: []*spb.Rule{{Action: spb.PolicyAction_ALLOW, Selector: &spb.Selector{Identifier: "*"}}}}
}

// raw is a message of fields that its type doesn't have.
func raw(b []byte) *emptypb.Empty {
	m := new(emptypb.Empty)
	m.ProtoReflect().SetUnknown(b)
	return m
}

// invoke makes a call with bytes for a message.
func (c *client) invoke(ctx context.Context, method string, b []byte) error {
	return c.grpc.Invoke(ctx, method, raw(b), new(emptypb.Empty))
}

func field(b []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), value)
}

// weight is what a server has.
type weight struct{ rss, fds int } // rss in kB

func (r *rig) weight(t testing.TB) (w weight) {
	time.Sleep(time.Second)
	dir := "/proc/" + strconv.Itoa(r.berm.Process.Pid)
	status, err := os.ReadFile(dir + "/status")
	must(t, err)
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			w.rss, _ = strconv.Atoi(strings.Fields(v)[0])
		}
	}
	fds, err := os.ReadDir(dir + "/fd")
	must(t, err)
	w.fds = len(fds)
	return w
}

// peak is the most memory since the last call, in kB.
func (r *rig) peak() (kb int) {
	dir := "/proc/" + strconv.Itoa(r.berm.Process.Pid)
	status, _ := os.ReadFile(dir + "/status")
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, _ = strconv.Atoi(strings.Fields(v)[0])
		}
	}
	_ = os.WriteFile(dir+"/clear_refs", []byte("5"), 0)
	return kb
}

// rests checks that nothing is left of the attacks.
func (r *rig) rests(t *testing.T, calm weight) {
	for range 100 {
		if len(r.pins(t.Context())) == 0 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if left := r.pins(t.Context()); len(left) > 0 {
		t.Errorf("pins are left: %q", left)
	}
	var now weight
	for range 40 { // what the engine ends takes its time
		if now = r.weight(t); now.fds <= calm.fds+20 {
			break
		}
	}
	t.Logf("Berm had %+v, and has %+v", calm, now)
	if now.fds > calm.fds+20 {
		t.Error("connections are left")
	}
}

// heavy is an attack on Berm's memory. The engine has no limit, so it isn't asked.
func heavy(name string, try func(ctx context.Context, s *side) error) attack {
	return attack{name: name, tame: "2: not tried", try: func(ctx context.Context, s *side) error {
		if s.bare {
			return errHarmless
		}
		s.peak()
		before := s.peak()
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		err := try(ctx, s)
		most := s.peak()
		fmt.Printf("%s: %d MB, with %d before\n", name, most>>10, before>>10)
		if most-before > 400<<10 {
			return nil
		}
		for begun := time.Now(); ; time.Sleep(time.Second) {
			after := s.innocent(context.WithoutCancel(ctx))
			if after == nil {
				break
			}
			if time.Since(begun) > patience/2 {
				return fmt.Errorf("an innocent build after it: %v", after) //nolint:errorlint // no refusal
			}
			fmt.Printf("%s: not yet: %v\n", name, after)
		}
		return errors.Join(errHarmless, err)
	}}
}

// many makes a call from many goroutines on one connection. It returns the first error.
func many(n int, call func() error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = call() })
	}
	all.Wait()
	return errors.Join(errs[:1]...)
}

const solveMethod = "/moby.buildkit.v1.Control/Solve"

// unknown sends a message with fields that its type doesn't have. The engine ignores them, so it
// isn't asked.
func unknown(name, method string, message func() []byte) attack {
	return attack{name: name, tame: "2: not tried", try: func(ctx context.Context, s *side) error {
		if s.bare {
			return errHarmless
		}
		return s.bob.invoke(ctx, method, message())
	}}
}

var wireAttacks = []attack{
	unknown("unknown field", solveMethod, func() []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, 999, protowire.VarintType), 1)
	}),
	unknown("unknown field of a field", solveMethod, func() []byte {
		return field(field(nil, 1, []byte(newRef())), 13, protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1))
	}),
	unknown("unknown field in a map", solveMethod, func() []byte {
		inner := protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1)
		return field(field(nil, 1, []byte(newRef())), 10, field(field(nil, 1, []byte("k")), 2, inner))
	}),
	unknown("unknown group", solveMethod, func() []byte {
		return protowire.AppendTag(protowire.AppendTag(nil, 99, protowire.StartGroupType), 99, protowire.EndGroupType)
	}),
	unknown("nested deeply", solveMethod, func() []byte {
		inner := []byte{}
		for i := range 30_000 { // definition, source, info, definition
			inner = field(nil, []protowire.Number{3, 2, 3}[i%3], inner)
		}
		return field(nil, 2, inner)
	}),
	{name: "unknown field of a stream", tame: ": the engine ignores it", try: func(ctx context.Context, s *side) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		stream, err := s.bob.grpc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/moby.buildkit.v1.Control/Status")
		if err != nil {
			return err
		}
		_ = stream.SendMsg(raw(field(field(nil, 1, []byte(newRef())), 99, []byte("x"))))
		_ = stream.CloseSend()
		return stream.RecvMsg(new(emptypb.Empty))
	}},
	unknownMethod("/moby.buildkit.v1.Control/Nothing"),
	unknownMethod("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
	unknownMethod("/containerd.services.images.v1.Images/List"),
	unknownMethod("/containerd.services.leases.v1.Leases/List"),
	{name: "resolve an image's configuration", try: func(ctx context.Context, s *side) error {
		return s.bridged(ctx, func(ctx context.Context, c *client, _ string) (*gateway.Result, error) {
			got, err := c.gateway().ResolveImageConfig(ctx, &gateway.ResolveImageConfigRequest{Ref: foreign, ResolveMode: "local"})
			if err == nil && strings.Contains(string(got.Config), marker) {
				err = errors.New("42")
			}
			return nil, err
		})
	}},
	{name: "container of a frontend", tame: "2: not tried, as it ends some engines", try: func(ctx context.Context, s *side) error {
		if s.bare {
			return errHarmless
		}
		return s.bridged(ctx, func(ctx context.Context, c *client, _ string) (*gateway.Result, error) {
			_, err := c.gateway().NewContainer(ctx, &gateway.NewContainerRequest{ContainerID: "x"})
			if err != nil && !strings.Contains(err.Error(), "Unimplemented") {
				err = errors.New("42")
			}
			return nil, err
		})
	}},
	{name: "garbage", try: garbage([]byte(strings.Repeat("\x00\xffgarbage", 100)))},
	{name: "preface and garbage", try: garbage([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 1000)))},
	{name: "HTTP/1 within", try: garbage([]byte("GET /images/json HTTP/1.1\r\nHost: x\r\n\r\n"))},
	heavy("large messages", func(ctx context.Context, s *side) error {
		b := field(nil, 1, bytes.Repeat([]byte("x"), 7<<20))
		return many(64, func() error { return s.bob.invoke(ctx, solveMethod, b) })
	}),
	heavy("messages of 17 MiB", func(ctx context.Context, s *side) error {
		b := field(nil, 1, bytes.Repeat([]byte("x"), 13<<20))
		return many(4, func() error { return s.bob.invoke(ctx, solveMethod, b) })
	}),
	heavy("many outputs", func(ctx context.Context, s *side) error {
		b := bytes.Repeat(field(nil, 13, nil), 3<<20)
		return many(4, func() error { return s.bob.invoke(ctx, solveMethod, b) })
	}),
	heavy("many spans", func(ctx context.Context, s *side) error {
		b := field(nil, 1, field(nil, 2, bytes.Repeat(field(nil, 2, nil), 3<<20)))
		return many(4, func() error {
			return s.bob.invoke(ctx, "/opentelemetry.proto.collector.trace.v1.TraceService/Export", b)
		})
	}),
	heavy("many large files", func(ctx context.Context, s *side) error {
		return s.bridgedBy(ctx, "FROM "+base+"\nRUN dd if=/dev/zero of=/f bs=1M count=15", func(ctx context.Context, c *client, session string) (*gateway.Result, error) {
			own, err := gatewaySolve("dockerfile.v0", nil)(ctx, c, session)
			if err != nil {
				return nil, err
			}
			return own, many(200, func() error {
				_, err := c.gateway().ReadFile(ctx, &gateway.ReadFileRequest{FilePath: "/f", Ref: own.GetRef().GetId()})
				return err
			})
		})
	}),
	heavy("many results", func(ctx context.Context, s *side) error {
		return s.bridged(ctx, func(ctx context.Context, c *client, session string) (own *gateway.Result, err error) {
			long := strings.Repeat("x", 25<<10)
			for n := range 2000 {
				attrs := map[string]string{"build-arg:X": strconv.Itoa(n), "label:l": long}
				if own, err = gatewaySolve("dockerfile.v0", attrs, func(req *gateway.SolveRequest) { req.Evaluate = false })(ctx, c, session); err != nil {
					return own, err
				}
			}
			return own, nil
		})
	}),
	heavy("many uploads", func(ctx context.Context, s *side) error {
		return s.bridged(ctx, func(ctx context.Context, c *client, session string) (own *gateway.Result, err error) {
			for n := range 300 {
				_, err = gatewaySolve("dockerfile.v0", map[string]string{"context": fmt.Sprintf("http://buildkit-session/u%d", n), "filename": "x"})(ctx, c, session)
			}
			return nil, err
		})
	}),
	heavy("many sessions", func(ctx context.Context, s *side) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		var err error
		var conns []io.Closer
		for range 80 {
			conn, e := s.bob.upgrade(ctx, "/session", map[string][]string{"X-Docker-Expose-Session-Uuid": {newRef()}})
			if e != nil {
				err = e
				break
			}
			conns = append(conns, conn)
		}
		for _, c := range conns {
			_ = c.Close()
		}
		if err == nil {
			return errors.New("80 sessions are open")
		}
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
			conn, e := s.bob.upgrade(context.WithoutCancel(ctx), "/session", map[string][]string{"X-Docker-Expose-Session-Uuid": {newRef()}})
			if e == nil {
				_ = conn.Close()
				return err
			}
		}
		return errors.New("sessions outlive their clients")
	}),
	heavy("many builds that are refused", func(ctx context.Context, s *side) error {
		r, err := s.alice.run(ctx, build{dockerfile: "FROM " + base})
		if err != nil {
			return err
		}
		for range 300 {
			_, err = s.bob.control().Solve(ctx, &control.SolveRequest{Ref: newRef(), Frontend: "x"})
		}
		if _, lost := s.alice.histories(ctx, r.ref); lost != nil {
			return fmt.Errorf("Alice lost her history: %w", lost)
		}
		return err
	}),
	heavy("builds at once", func(ctx context.Context, s *side) error {
		errs := make([]error, 8)
		var all sync.WaitGroup
		for i := range errs {
			b := build{dockerfile: "FROM " + base + "\nRUN echo " + s.word() + "; sleep 2"}
			all.Go(func() { _, errs[i] = s.bob.run(ctx, b) })
		}
		all.Wait()
		refused := 0
		for _, err := range errs {
			if err != nil {
				refused++
			}
		}
		if refused == 0 {
			return errors.New("none of 8 builds was refused: they ran, or waited for their turn")
		}
		return errors.Join(errs...)
	}),
}

func unknownMethod(method string) attack {
	return attack{name: method, tame: ": it has none of them", try: func(ctx context.Context, s *side) error { return s.bob.invoke(ctx, method, nil) }}
}

// garbage sends what isn't HTTP/2, and looks for an answer of the engine's.
func garbage(b []byte) func(context.Context, *side) error {
	return func(ctx context.Context, s *side) error {
		if s.bare {
			return nil
		}
		for _, path := range []string{"/grpc", "/session"} {
			conn, err := s.bob.upgrade(ctx, path, map[string][]string{"X-Docker-Expose-Session-Uuid": {newRef()}})
			if err != nil {
				return err
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
			_, _ = conn.Write(b)
			got, _ := io.ReadAll(conn)
			if bytes.Contains(got, []byte("RepoTags")) {
				return nil
			}
		}
		return errHarmless
	}
}
