package buildkit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/gzip"
	_ "google.golang.org/grpc/encoding/proto" // the codec
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func encoded(t *testing.T, op *pb.Op) []byte { return check.Value(op.Marshal())(t) }

// TestInputs gives definitions that end an engine, or read what wasn't judged.
func TestInputs(t *testing.T) {
	source := encoded(t, &pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: "local://x"}}})
	step := encoded(t, &pb.Op{Op: &pb.Op_Exec{Exec: &pb.ExecOp{}}, Inputs: []*pb.Input{{Digest: digestOf(source)}}})
	foreign := encoded(t, &pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: "docker-image://x"}}})
	end := func(in ...*pb.Input) []byte { return encoded(t, &pb.Op{Inputs: in}) }
	input := func(text []byte) *pb.Input { return &pb.Input{Digest: digestOf(text)} }
	known := func(op []byte) (*pb.OpMetadata, bool) { return nil, bytes.Equal(op, source) || bytes.Equal(op, step) }
	for name, tt := range map[string]struct {
		ops  [][]byte
		want bool
	}{
		"whole":                         {[][]byte{source, step, end(input(step))}, true},
		"part":                          {[][]byte{source, end(input(source))}, true},
		"nothing":                       {nil, false},
		"no last one":                   {[][]byte{source, step}, false},
		"only a last one":               {[][]byte{end()}, false},
		"last one without inputs":       {[][]byte{source, step, end()}, false},
		"last one with two inputs":      {[][]byte{source, step, end(input(source), input(step))}, false},
		"last one of what is missing":   {[][]byte{source, end(input(step))}, false},
		"last one of itself":            {[][]byte{source, end(&pb.Input{Digest: "x"})}, false},
		"step of what is missing":       {[][]byte{step, end(input(step))}, false},
		"step before its source":        {[][]byte{step, source, end(input(step))}, false},
		"second result":                 {[][]byte{source, step, end(&pb.Input{Digest: digestOf(step), Index: 1})}, true},
		"negative result":               {[][]byte{source, step, end(&pb.Input{Digest: digestOf(step), Index: -1})}, false},
		"last one with a platform":      {[][]byte{source, step, encoded(t, &pb.Op{Inputs: []*pb.Input{input(step)}, Platform: &pb.Platform{OS: "x"}})}, true},
		"foreign":                       {[][]byte{source, foreign, end(input(source))}, false},
		"foreign as the last one":       {[][]byte{source, foreign}, false},
		"no operation":                  {[][]byte{[]byte("\xff"), end(input(source))}, false},
		"last one in the middle":        {[][]byte{source, end(input(source)), source}, false},
		"last one that does something":  {[][]byte{source, encoded(t, &pb.Op{Inputs: []*pb.Input{input(source)}, Op: &pb.Op_Exec{Exec: &pb.ExecOp{}}})}, false},
		"last one with what is unknown": {[][]byte{source, append(end(input(source)), 0xf8, 0x7f, 1)}, false},
		"rubbish as the last one":       {[][]byte{source, {0xff}}, false},
		"empty last one":                {[][]byte{source, {}}, false},
	} {
		got := returned(&pb.Definition{Def: tt.ops}, known)
		if (got != nil) != tt.want {
			t.Errorf("%s: %v", name, got)
		}
		if got == nil {
			continue
		}
		var last pb.Op
		if err := last.Unmarshal(got.Def[len(got.Def)-1]); err != nil || last.Platform != nil {
			t.Errorf("%s: %v, %v", name, &last, err)
		}
	}
	pinned := encoded(t, &pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: image + PinHost + "x:1"}}})
	other := encoded(t, &pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: "https://" + PinHost}}})
	if got := pinnedIn(&pb.Definition{Def: [][]byte{source, pinned, other, {0xff}}}); !slices.Equal(got, []string{image + PinHost + "x:1"}) {
		t.Error(got)
	}
}

// TestCodec has messages that are small as bytes only.
func TestCodec(t *testing.T) {
	field := func(number protowire.Number, inner []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), inner)
	}
	deep := []byte{}
	for i := range 198 { // a definition's source's information's definition
		deep = field([]protowire.Number{3, 2, 3}[i%3], deep)
	}
	large := check.Value(proto.Marshal(&control.SolveRequest{Ref: "x", Definition: &pb.Definition{Def: [][]byte{bytes.Repeat([]byte("x"), 4<<20)}}}))(t)
	for name, tt := range map[string]struct {
		message []byte
		want    codes.Code
	}{
		"few outputs":   {bytes.Repeat(field(13, nil), 500), codes.OK},
		"large":         {large, codes.OK},
		"many outputs":  {bytes.Repeat(field(13, nil), 4000), codes.ResourceExhausted},
		"many, spread":  {append(bytes.Repeat(field(13, field(1, bytes.Repeat([]byte("x"), 80))), maxParts+1), large...), codes.ResourceExhausted},
		"deep":          {field(2, deep), codes.ResourceExhausted},
		"malformed":     {[]byte("\xff"), codes.Unknown},
		"malformed too": {field(13, []byte("\xff")), codes.Unknown},
	} {
		err := codec{encoding.GetCodecV2("proto")}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(tt.message)}, new(control.SolveRequest))
		if status.Code(err) != tt.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// pinning is a Build that counts pins.
type pinning struct {
	Build
	pins int
}

func (*pinning) Context() context.Context { return context.Background() }

func (*pinning) Base(string, bool, Login) (string, error) { return "sha256:x", nil }

func (p *pinning) Pin(string) (string, func(), error) {
	p.pins++
	return PinHost + "x:1", func() { p.pins-- }, nil
}

// TestEndedBuild has a frontend's call go on when its build is over.
func TestEndedBuild(t *testing.T) {
	judge := &pinning{}
	b := &build{server: &Server{}, judge: judge, req: &request{}, sources: newSources(nil), job: &job{cancel: func() {}}, results: map[string]*gateway.Result{}, changed: make(chan struct{})}
	before := b.job
	b.stop()
	failed := errors.New(`source "docker-image://busybox" denied by policy`)
	if err := b.admit(before, failed); !errors.Is(err, failed) || judge.pins != 0 {
		t.Errorf("%v, %d pins are left", err, judge.pins)
	}
	if b.start(); b.job != before {
		t.Error("a job has started")
	}
}

// TestResultsAreBounded has a frontend solve without end, and operations of which much is kept.
func TestResultsAreBounded(t *testing.T) {
	remembers := func(results int, r *gateway.Result) (*build, error) {
		b := &build{results: map[string]*gateway.Result{}, ops: map[[32]byte]*pb.OpMetadata{}}
		for range results - 1 {
			if err := b.remember(r); err != nil {
				return b, err
			}
		}
		return b, b.remember(r)
	}
	_, err := remembers(17, &gateway.Result{Metadata: map[string][]byte{"x": []byte(strings.Repeat("x", 1<<20))}})
	wantCode(t, "17 MiB", codes.ResourceExhausted, err)
	b, _ := remembers(1, aResult("0"))
	for i := range maxResults {
		err = b.remember(aResult(fmt.Sprint(i)))
		wantCode(t, fmt.Sprint(i), codes.OK, err)
	}
	wantCode(t, "one result more", codes.ResourceExhausted, b.remember(aResult("more")))
	for name, note := range map[string]string{"many": "", "large": bytesOf(maxKept / 10)} {
		def := &pb.Definition{Metadata: map[string]*pb.OpMetadata{}}
		for i := range map[string]int{"many": maxOps + 1, "large": 100}[name] {
			op := source(fmt.Sprint(i))
			def.Def = append(def.Def, op)
			if note != "" {
				def.Metadata[digestOf(op)] = &pb.OpMetadata{Description: map[string]string{"llb.customname": note}}
			}
		}
		r := aResult("one")
		r.GetRef().Def = def
		b, err := remembers(1, r)
		kept := 0
		for _, meta := range b.ops {
			kept += proto.Size(meta)
		}
		if err != nil || name == "many" && len(b.ops) != maxOps || len(b.ops) == 0 || kept > maxKept {
			t.Errorf("%s: %d operations with %d bytes, %v", name, len(b.ops), kept, err)
		}
	}
}

// TestHistoryIsATenantsOwn has another tenant end many builds.
func TestHistoryIsATenantsOwn(t *testing.T) {
	s := &Server{builds: map[[2]string]*build{}, ended: map[string][]*build{}, changed: make(chan struct{})}
	end := func(tenant, ref string) {
		b := &build{tenant: tenant, ref: ref, over: make(chan struct{})}
		if err := s.add(b); err != nil {
			t.Fatal(err)
		}
		s.end(b, nil)
	}
	end("alice", "hers")
	for i := range 1000 {
		end("bob", strings.Repeat("x", i+1))
	}
	if s.builds[[2]string{"alice", "hers"}] == nil || len(s.builds) != maxEnded+1 {
		t.Errorf("%d builds are known", len(s.builds))
	}
}

// TestStatusConceals looks at what a client reads of an engine that is away.
func TestStatusConceals(t *testing.T) {
	s := &Server{opts: Options{Status: func(error) error { return status.Error(codes.NotFound, "told") }}}
	for _, tt := range []struct {
		err  error
		code codes.Code
	}{
		{status.Error(codes.Unavailable, "dial unix /secret/docker.sock"), codes.Unavailable},
		{errors.New("open /secret/file"), codes.NotFound},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
	} {
		if got := s.status(tt.err); status.Code(got) != tt.code || strings.Contains(got.Error(), "secret") {
			t.Errorf("%v: %v", tt.err, got)
		}
	}
}

// TestCompressedMessages has a client send messages that are larger than what is leased.
func TestCompressedMessages(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		client := control.NewControlClient(f.asClient("t"))
		_, err := client.UpdateBuildHistory(t.Context(), &control.UpdateBuildHistoryRequest{Ref: bytesOf(1 << 20)}, grpc.UseCompressor(gzip.Name))
		wantCode(t, "compressed", codes.Internal, err)
	})
}

// TestStalledMessages has a client not end its calls, while a build goes on for long.
func TestStalledMessages(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.openSession("u", "own")
		long := f.start(f.asClient("u"), someSolve())
		defer func() {
			f.answer(map[string]string{}, nil)
			ended(t, <-long.err)
		}()
		conn := f.asClient("t")
		for _, method := range []string{control.Control_Solve_FullMethodName, gateway.LLBBridge_ReadFile_FullMethodName} {
			stream := check.Value(conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, method))(t)
			if err := stream.SendMsg(someSolve()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(messageTime + time.Second) // of the bubble's clock
			f.mu.Lock()
			if n := f.leased["t"]; n != 0 {
				t.Errorf("%s leases %d bytes", method, n)
			}
			f.mu.Unlock()
			wantCode(t, method, codes.Unavailable, stream.RecvMsg(new(control.SolveResponse)))
		}
	})
}

// TestManyCalls has a tenant leave no room for others on the connection to the engine.
func TestManyCalls(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		for _, tenant := range []string{"t", "u"} {
			f.openSession(tenant, "own")
		}
		conn := f.asClient("t")
		f.onStream(control.Control_Status_FullMethodName, func(s grpc.ServerStream) error { <-s.Context().Done(); return s.Context().Err() })
		mine := f.start(conn, someSolve())
		j := <-f.jobs
		refused := make(chan error, 2*engineStreams)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 2 * engineStreams / (maxStreams - 4) {
			conn := f.asClient("t")
			for range maxStreams - 4 {
				stream := check.Value(control.NewControlClient(conn).Status(ctx, &control.StatusRequest{Ref: ref}))(t)
				go func() { _, err := stream.Recv(); refused <- err }()
			}
		}
		synctest.Wait()
		if len(refused) == 0 {
			t.Error("no call is refused")
		}
		for range len(refused) {
			wantCode(t, "one call more", codes.ResourceExhausted, <-refused)
		}
		theirs := f.start(f.asClient("u"), someSolve())
		select {
		case j := <-f.jobs:
			j.answer <- map[string]string{}
			ended(t, <-theirs.err)
		case <-time.After(time.Minute): // of the bubble's clock
			t.Error("another tenant's build doesn't reach the engine")
		}
		cancel()
		j.answer <- map[string]string{}
		ended(t, <-mine.err)
		_, err := control.NewControlClient(conn).Info(t.Context(), &control.InfoRequest{})
		wantCode(t, "a call after the others", codes.Unimplemented, err)
	})
}

// TestPanics has calls panic, each of which is to end alone.
func TestPanics(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.openSession("t", "own")
		conn := f.asClient("t")
		f.finish = func([]string, []string) error { panic("x") }
		solve := someSolve()
		solve.Exporters = []*control.Exporter{{Type: "image"}}
		s := f.start(conn, solve)
		(<-f.jobs).answer <- map[string]string{"containerimage.digest": "sha256:x"}
		wantCode(t, "a build", codes.Internal, <-s.err)
		f.server.mu.Lock()
		f.server.builds[[2]string{"t", "broken00"}] = &build{server: f.server, begun: closed(), over: closed()}
		f.server.mu.Unlock()
		stream := check.Value(control.NewControlClient(conn).Status(t.Context(), &control.StatusRequest{Ref: "broken00"}))(t)
		_, err := stream.Recv()
		wantCode(t, "a stream", codes.Internal, err)
		if n := f.panics.Load(); n != 2 {
			t.Errorf("%d panics are counted", n)
		}
	})
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// TestLargeHeaders has a client send much that isn't leased.
func TestLargeHeaders(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		client := control.NewControlClient(f.asClient("t"))
		for size, want := range map[int]codes.Code{8 << 10: codes.Unimplemented, 32 << 10: codes.Internal} {
			_, err := client.Info(metadata.AppendToOutgoingContext(t.Context(), "x", bytesOf(size)), &control.InfoRequest{})
			wantCode(t, fmt.Sprint(size), want, err)
		}
	})
}

// TestEngineBack calls an engine as soon as it is back, however long it was away.
func TestEngineBack(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.on("/moby.buildkit.v1.Control/Info", func(context.Context, any) (any, error) { return &control.InfoResponse{}, nil })
		client := control.NewControlClient(f.asClient("alice"))
		info := func() error {
			_, err := client.Info(t.Context(), &control.InfoRequest{})
			return err
		}
		if err := info(); err != nil {
			t.Fatal(err)
		}
		f.kill()
		for range 10 {
			begun := time.Now()
			if err := info(); status.Code(err) != codes.Unavailable || time.Since(begun) > reconnectTime {
				t.Errorf("without an engine: %v after %v", err, time.Since(begun))
			}
		}
		f.mu.Lock()
		f.dead = false
		f.mu.Unlock()
		if err := info(); err != nil {
			t.Errorf("once it is back: %v", err)
		}
	})
}
