package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	busybox = "docker-image://docker.io/library/busybox:1"
	ref     = "client00"
)

func someSolve() *control.SolveRequest { return &control.SolveRequest{Ref: ref, Frontend: dockerfile} }

// answer answers a job that may read what want says.
func (f *fixture) answer(a any, want map[string]bool) *engineJob {
	f.t.Helper()
	j := <-f.jobs
	for id, ok := range want {
		if _, got := allows(f.t, j.SourcePolicy, id); got != ok {
			f.t.Errorf("%s: %v", id, got)
		}
	}
	j.answer <- a
	return j
}

// TestSolvePins has a build run again for each image that its policy denies.
func TestSolvePins(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		own := f.openSession("t", "own")
		conn := f.asClient("t")
		req := someSolve()
		req.FrontendAttrs = map[string]string{"image-resolve-mode": "pull"}
		req.Exporters = []*control.Exporter{{Type: "image", Attrs: map[string]string{"name": "mine/a,mine/b"}}}
		f.base = func(ref string, pull bool, login Login) (string, error) {
			if !pull {
				t.Error("not pulled")
			}
			return someImage(ref, pull, login)
		}
		f.finish = func(ids, names []string) error {
			if !slices.Equal(ids, []string{"sha256:d", "sha256:c"}) || !slices.Equal(names, []string{"docker.io/mine/a", "docker.io/mine/b"}) {
				t.Error(ids, names)
			}
			f.wantPins(2)
			return nil
		}
		s := f.start(conn, req)
		first := f.answer(deniedBy(busybox), map[string]bool{busybox: false, "local://context": true})
		f.answer(deniedBy(busybox+"2"), map[string]bool{busybox: true, busybox + "2": false})
		last := f.answer(map[string]string{"containerimage.digest": "sha256:d", "containerimage.config.digest": "sha256:c"}, map[string]bool{busybox: true, busybox + "2": true, busybox + "3": false})
		if err := <-s.err; err != nil || (<-s.resp).ExporterResponse["image.name"] != "docker.io/mine/a,docker.io/mine/b" {
			t.Error(err)
		}
		if err := <-f.ends; err != nil {
			t.Error(err)
		}
		f.wantPins(0)
		if first.Ref == last.Ref || strings.Contains(first.Ref, ref) || first.Session != own.header.Get(exposed+"Uuid") || first.Exporters[0].Attrs["name"] != "" || first.FrontendAttrs["cmdline"] == "" {
			t.Error(first.SolveRequest)
		}

		// A ref is a build's for good, and says nothing to other tenants.
		_, err := control.NewControlClient(conn).Solve(t.Context(), someSolve())
		wantCode(t, "ref twice", codes.AlreadyExists, err)
		for _, odd := range []string{"", "short", "UPPERCASE", "with/slash", strings.Repeat("a", 65)} {
			_, err := control.NewControlClient(conn).Solve(t.Context(), &control.SolveRequest{Ref: odd, Frontend: dockerfile})
			wantCode(t, odd, codes.PermissionDenied, err)
		}
		f.openSession("u", "own")
		other := f.start(f.asClient("u"), someSolve())
		f.answer(map[string]string{}, nil)
		wantCode(t, "another's ref", codes.OK, <-other.err)
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.peak < int64(copies*proto.Size(someSolve())) {
			t.Errorf("%d bytes are leased of a message", f.peak)
		}
		for tenant, n := range f.leased {
			if n != 0 {
				t.Errorf("%s leases %d bytes", tenant, n)
			}
		}
	})
}

// TestSolveEnds has each end of a build release its pins, and its judge.
func TestSolveEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(*fixture, *solving) // after one image was pinned
		code codes.Code
		text string
	}{
		"failure":       {func(f *fixture, _ *solving) { f.answer(errors.New("exit code 1"), nil) }, codes.Unknown, "exit code 1"},
		"client's end":  {func(f *fixture, s *solving) { <-f.jobs; s.cancel() }, codes.Canceled, ""},
		"lost client":   {func(f *fixture, s *solving) { <-f.jobs; _ = s.conn.Close() }, codes.Canceled, ""},
		"build's end":   {func(f *fixture, _ *solving) { <-f.jobs; (<-f.builds).cancel() }, codes.Canceled, ""},
		"lost engine":   {func(f *fixture, _ *solving) { <-f.jobs; f.kill() }, codes.Unavailable, ""},
		"no pin helps":  {func(f *fixture, _ *solving) { f.answer(deniedBy(busybox), nil) }, codes.Unknown, "denied by policy"},
		"a pin":         {func(f *fixture, _ *solving) { f.answer(deniedBy("docker-image://"+PinHost+"x:1"), nil) }, codes.Unknown, "denied by policy"},
		"forged result": {func(f *fixture, _ *solving) { f.answer(map[string]string{"containerimage.digest": "sha256:0"}, nil) }, codes.Unknown, "told: verify"},
		"refused image": {func(f *fixture, _ *solving) { f.answer(deniedBy(image+"refused"), nil) }, codes.PermissionDenied, "is refused"},
		"missing image": {func(f *fixture, _ *solving) { f.answer(deniedBy(image+"missing"), nil) }, codes.NotFound, "no image"},
		"too many images": {func(f *fixture, _ *solving) {
			for i := range maxPins - 1 {
				f.answer(deniedBy(fmt.Sprint(busybox, ".", i)), nil)
			}
			f.answer(deniedBy(busybox+"x"), nil)
		}, codes.PermissionDenied, "too many images"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fixture) {
				f.openSession("t", "own")
				f.finish = func([]string, []string) error { return errors.New("verify") }
				req := someSolve()
				req.Exporters = []*control.Exporter{{Type: "image"}}
				s := f.start(f.asClient("t"), req)
				f.answer(deniedBy(busybox), nil)
				tt.end(f, s)
				err := <-s.err
				if wantCode(t, name, tt.code, err); !strings.Contains(err.Error(), tt.text) {
					t.Error(err)
				}
				if <-f.ends == nil {
					t.Error("the build has no error")
				}
				f.wantPins(0)
			})
		})
	}
}

// TestSolveRefused has what is refused reach neither the engine nor the images.
func TestSolveRefused(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		conn := f.asClient("t")
		s := f.start(conn, someSolve())
		wantCode(t, "no session", codes.NotFound, <-s.err)
		wantCode(t, "the build", codes.NotFound, <-f.ends)
		f.openSession("u", "own")
		req := someSolve()
		req.Ref = "client01"
		wantCode(t, "another's session", codes.NotFound, <-f.start(conn, req).err)
		wantCode(t, "the build", codes.NotFound, <-f.ends)
		f.openSession("t", "own")
		for i, change := range []func(*control.SolveRequest){
			func(r *control.SolveRequest) { r.Entitlements = []string{"network.host"} },
			func(r *control.SolveRequest) { r.ProtoReflect().SetUnknown([]byte{0xf8, 0x7f, 1}) },
			func(r *control.SolveRequest) {
				r.Cache = &control.CacheOptions{}
				r.Cache.ProtoReflect().SetUnknown([]byte{0xf8, 0x7f, 1})
			},
		} {
			req := someSolve()
			req.Ref = fmt.Sprint("client1", i)
			change(req)
			wantCode(t, fmt.Sprint(i), codes.PermissionDenied, <-f.start(conn, req).err)
		}
		_, err := check.Value(control.NewControlClient(conn).Status(t.Context(), &control.StatusRequest{Ref: "client10"}))(t).Recv()
		wantCode(t, "status of a refused build", codes.PermissionDenied, err)
		f.begin = status.Error(codes.ResourceExhausted, "full")
		req = someSolve()
		req.Ref = "client02"
		wantCode(t, "no room", codes.ResourceExhausted, <-f.start(conn, req).err)
		err = conn.Invoke(t.Context(), "/moby.buildkit.v1.Control/Other", &control.InfoRequest{}, &control.InfoResponse{})
		wantCode(t, "unknown method", codes.Unimplemented, err)
		if len(f.jobs) > 0 || len(f.ends) != 1 { // of the entitlement
			t.Error("the engine was asked")
		}
	})
}

// TestWaitingBuild asks for the status of a build that waits for its turn.
func TestWaitingBuild(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.builds = make(chan *fakeBuild)
		f.openSession("t", "own")
		conn := f.asClient("t")
		s := f.start(conn, someSolve())
		told := make(chan error, 1)
		stream := check.Value(control.NewControlClient(conn).Status(t.Context(), &control.StatusRequest{Ref: ref}))(t)
		go func() { _, err := stream.Recv(); told <- err }()
		time.Sleep(2 * buildWait) // of the bubble's clock
		<-f.builds
		j := <-f.jobs
		j.answer <- map[string]string{}
		ended(t, <-s.err)
		wantCode(t, "status, by the engine", codes.Unimplemented, <-told)
	})
}

// TestStatus follows a build over its jobs.
func TestStatus(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.openSession("t", "own")
		conn := f.asClient("t")
		asked, tell := make(chan string), make(chan *control.StatusResponse)
		f.onStream(control.Control_Status_FullMethodName, func(s grpc.ServerStream) error {
			var req control.StatusRequest
			if err := s.RecvMsg(&req); err != nil {
				return err
			}
			asked <- req.Ref
			for m := range tell {
				if m == nil {
					return nil
				}
				if err := s.SendMsg(m); err != nil {
					return err
				}
			}
			return nil
		})
		s := f.start(conn, someSolve())
		stream := check.Value(control.NewControlClient(conn).Status(t.Context(), &control.StatusRequest{Ref: ref}))(t)
		first := <-f.jobs
		if got := <-asked; got != first.Ref {
			t.Error(got)
		}
		tell <- &control.StatusResponse{Vertexes: []*control.Vertex{{Error: deniedBy(busybox).Error()}, {Error: "context canceled"}, {Error: "exit code 1"}}}
		said := fmt.Sprint(check.Value(stream.Recv())(t))
		if strings.Contains(said, "denied") || strings.Contains(said, "canceled") || !strings.Contains(said, "exit code 1") {
			t.Error(said)
		}
		first.answer <- deniedBy(busybox)
		tell <- nil
		second := <-f.jobs
		if got := <-asked; got != second.Ref {
			t.Error(got)
		}
		pinned := Pin("o", "t", "sha256:docker.io/library/busybox:1") + ":1@sha256:0"
		tell <- &control.StatusResponse{Vertexes: []*control.Vertex{{Name: "[1/2] FROM " + pinned}}, Statuses: []*control.VertexStatus{{ID: "resolve " + pinned, Name: pinned}}}
		m := check.Value(stream.Recv())(t)
		const shown = "docker.io/library/busybox:1@sha256:0"
		if m.Vertexes[0].Name != "[1/2] FROM "+shown || m.Statuses[0].ID != "resolve "+shown || m.Statuses[0].Name != shown {
			t.Error(m)
		}
		second.answer <- map[string]string{}
		tell <- nil
		if _, err := stream.Recv(); !errors.Is(err, io.EOF) || <-s.err != nil {
			t.Error(err)
		}
	})
}

// TestRefs has no method know a build that is another's, or hasn't begun.
func TestRefs(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.openSession("t", "own")
		s := f.start(f.asClient("t"), someSolve())
		j := <-f.jobs
		for _, in := range []struct{ tenant, ref string }{{"u", ref}, {"t", "nobody00"}, {"t", j.Ref}, {"t", ""}} {
			conn := f.asClient(in.tenant)
			begun := time.Now()
			for name, err := range f.callAll(conn, in.ref) {
				if name == "ListenBuildHistory" { // an empty stream
					wantCode(t, name, codes.OK, err)
					continue
				}
				wantCode(t, name, codes.NotFound, err)
			}
			if time.Since(begun) > time.Minute {
				t.Error("waited for too long")
			}
		}
		j.answer <- map[string]string{}
		ended(t, <-s.err)
		// The build's session isn't open yet, so nothing of the build is, either.
		early := someSolve()
		early.Ref = "client03"
		conn := f.asClient("w")
		s = f.start(conn, early)
		synctest.Wait()
		_, err := control.NewControlClient(conn).UpdateBuildHistory(t.Context(), &control.UpdateBuildHistoryRequest{Ref: early.Ref, Finalize: true})
		wantCode(t, "not begun", codes.NotFound, err)
		stream := check.Value(control.NewControlClient(conn).Status(t.Context(), &control.StatusRequest{Ref: early.Ref}))(t)
		_, err = stream.Recv()
		wantCode(t, "never begun", codes.NotFound, err)
		wantCode(t, "never begun", codes.NotFound, <-s.err)
	})
}

// callAll calls each method that names a build.
func (f *fixture) callAll(conn *grpc.ClientConn, ref string) map[string]error {
	ctx := inBuild(f.t, ref)
	c, g := control.NewControlClient(conn), gateway.NewLLBBridgeClient(conn)
	errs := map[string]error{}
	end := func(name string, err error) {
		if errors.Is(err, io.EOF) {
			err = nil
		}
		errs[name] = err
	}
	st := check.Value(c.Status(ctx, &control.StatusRequest{Ref: ref}))(f.t)
	_, err := st.Recv()
	end("Status", err)
	hi := check.Value(c.ListenBuildHistory(ctx, &control.BuildHistoryRequest{Ref: ref}))(f.t)
	_, err = hi.Recv()
	end("ListenBuildHistory", err)
	_, err = c.UpdateBuildHistory(ctx, &control.UpdateBuildHistoryRequest{Ref: ref, Finalize: true})
	end("UpdateBuildHistory", err)
	_, err = g.Ping(ctx, &gateway.PingRequest{})
	end("Ping", err)
	_, err = g.Solve(ctx, &gateway.SolveRequest{Frontend: dockerfile})
	end("Solve", err)
	_, err = g.Return(ctx, &gateway.ReturnRequest{})
	end("Return", err)
	_, err = g.ReadFile(ctx, &gateway.ReadFileRequest{})
	end("ReadFile", err)
	_, err = g.ReadDir(ctx, &gateway.ReadDirRequest{})
	end("ReadDir", err)
	_, err = g.StatFile(ctx, &gateway.StatFileRequest{})
	end("StatFile", err)
	_, err = g.Evaluate(ctx, &gateway.EvaluateRequest{})
	end("Evaluate", err)
	_, err = g.Warn(ctx, &gateway.WarnRequest{})
	end("Warn", err)
	return errs
}

// TestCheck has only an engine pass that enforces the policy of the canary.
func TestCheck(t *testing.T) {
	for name, tt := range map[string]struct {
		answer any
		want   func(error) bool
	}{
		"enforces": {deniedBy("docker-image://" + PinHost + "canary:1"), func(err error) bool { return err == nil }},
		"accepts":  {map[string]string{}, func(err error) bool { return errors.Is(err, ErrNoPolicy) }},
		"fails":    {errors.New("pull access denied"), func(err error) bool { return errors.Is(err, ErrNoPolicy) }},
		"is lost":  {status.Error(codes.Unavailable, "x"), func(err error) bool { return err != nil && !errors.Is(err, ErrNoPolicy) }},
		"hangs":    {nil, func(err error) bool { return err != nil && !errors.Is(err, ErrNoPolicy) }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fixture) {
				done := make(chan error)
				go func() { done <- f.server.Check(context.Background()) }()
				j := <-f.jobs
				if len(j.Definition.Def) != 2 || j.Frontend != "" || !j.Internal || len(j.Exporters) > 0 {
					t.Error(j)
				}
				for id, ok := range map[string]bool{"docker-image://" + PinHost + "canary:1": false, busybox: false} {
					if _, got := allows(t, j.SourcePolicy, id); got != ok {
						t.Errorf("%s: %v", id, got)
					}
				}
				if tt.answer != nil {
					j.answer <- tt.answer
				}
				if err := <-done; !tt.want(err) {
					t.Error(err)
				}
			})
		})
	}
}
