package buildkit

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	control "github.com/moby/buildkit/api/services/control"
	types "github.com/moby/buildkit/api/types"
	"github.com/moby/buildkit/client/buildid"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	trace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// frontend is a client that is the frontend of its build.
type frontend struct {
	*fixture
	conn   *grpc.ClientConn
	bridge gateway.LLBBridgeClient
	solve  *solving
	job    *engineJob // the first
	ctx    context.Context
}

func newFrontend(t *testing.T, change func(*control.SolveRequest)) *frontend {
	f := newFixture(t)
	f.openSession("t", "own")
	conn := f.asClient("t")
	req := &control.SolveRequest{Ref: ref}
	if change != nil {
		change(req)
	}
	s := f.start(conn, req)
	return &frontend{f, conn, gateway.NewLLBBridgeClient(conn), s, <-f.jobs, inBuild(t, ref)}
}

// aResult is one of the engine's, of some operations.
func aResult(id string, ops ...[]byte) *gateway.Result {
	return &gateway.Result{
		Result:   &gateway.Result_Ref{Ref: &gateway.Ref{Id: id, Def: &pb.Definition{Def: ops}}},
		Metadata: map[string][]byte{"containerimage.config": []byte("engine's")},
	}
}

// TestGatewaySolve has images pinned as in Solve. Each call goes to the last job.
func TestGatewaySolve(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFrontend(t, nil)
		var jobs []*engineJob
		f.on(gateway.LLBBridge_Solve_FullMethodName, func(ctx context.Context, req any) (any, error) {
			j := <-f.jobs // the upload's, and two images'
			if jobs = append(jobs, j); buildid.FromIncomingContext(ctx) != j.Ref {
				t.Error(j)
			}
			if r := req.(*gateway.SolveRequest); r.FrontendOpt["label:"+owner] != "me" || r.FrontendOpt["local-sessionid:context"] == "own" {
				t.Error(r)
			}
			switch len(jobs) {
			case 1:
				return nil, deniedBy(busybox)
			case 2: // the answer to a check
				return &gateway.SolveResponse{Result: &gateway.Result{Metadata: map[string][]byte{"result.json": []byte(`{"error":"` + strings.ReplaceAll(deniedBy(busybox+"2").Error(), `"`, `\"`) + `"}`)}}}, nil
			}
			return &gateway.SolveResponse{Result: aResult("one")}, nil
		})
		done := make(chan error)
		go func() {
			_, err := f.bridge.Solve(f.ctx, &gateway.SolveRequest{Frontend: dockerfile, FrontendOpt: map[string]string{"local-sessionid:context": "own", "context": "http://buildkit-session/abc"}})
			done <- err
		}()
		if err := <-done; err != nil || len(jobs) != 3 {
			t.Fatal(err)
		}
		f.wantPins(2)
		for _, old := range []*engineJob{f.job, jobs[0], jobs[1]} {
			<-old.ctx.Done()
		}
		last := jobs[2]
		for _, id := range []string{busybox, busybox + "2", "http://buildkit-session/abc"} {
			if _, ok := allows(t, last.SourcePolicy, id); !ok {
				t.Error(id)
			}
		}
		for _, m := range []string{gateway.LLBBridge_Ping_FullMethodName, gateway.LLBBridge_ReadFile_FullMethodName, gateway.LLBBridge_ReadDir_FullMethodName,
			gateway.LLBBridge_StatFile_FullMethodName, gateway.LLBBridge_Evaluate_FullMethodName} {
			f.on(m, func(ctx context.Context, _ any) (any, error) {
				if got := buildid.FromIncomingContext(ctx); got != last.Ref {
					t.Errorf("%s in job %q", m, got)
				}
				return map[string]any{
					gateway.LLBBridge_Ping_FullMethodName:     &gateway.PongResponse{Workers: []*types.WorkerRecord{{ID: "w", Labels: map[string]string{"host": "x"}, GCPolicy: []*types.GCPolicy{{}}}}},
					gateway.LLBBridge_ReadFile_FullMethodName: &gateway.ReadFileResponse{}, gateway.LLBBridge_ReadDir_FullMethodName: &gateway.ReadDirResponse{},
					gateway.LLBBridge_StatFile_FullMethodName: &gateway.StatFileResponse{}, gateway.LLBBridge_Evaluate_FullMethodName: &gateway.EvaluateResponse{},
				}[m], nil
			})
		}
		if pong := check.Value(f.bridge.Ping(f.ctx, &gateway.PingRequest{}))(t); len(pong.Workers[0].Labels)+len(pong.Workers[0].GCPolicy) > 0 {
			t.Error(pong)
		}
		check.Value(f.bridge.ReadFile(f.ctx, &gateway.ReadFileRequest{Ref: "one"}))(t)
		check.Value(f.bridge.ReadDir(f.ctx, &gateway.ReadDirRequest{Ref: "one"}))(t)
		check.Value(f.bridge.StatFile(f.ctx, &gateway.StatFileRequest{Ref: "one"}))(t)
		check.Value(f.bridge.Evaluate(f.ctx, &gateway.EvaluateRequest{Ref: "one"}))(t)
		check.Value(f.bridge.Warn(f.ctx, &gateway.WarnRequest{}))(t) // dropped
		if inputs := check.Value(f.bridge.Inputs(f.ctx, &gateway.InputsRequest{}))(t); len(inputs.Definitions) > 0 {
			t.Error(inputs)
		}
		last.answer <- map[string]string{}
		if err := <-f.solve.err; err != nil {
			t.Error(err)
		}
		ended(t, <-f.ends)
		f.wantPins(0)
	})
}

// TestGatewayRefused has what is refused not reach the engine.
func TestGatewayRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFrontend(t, nil)
		f.on(gateway.LLBBridge_Solve_FullMethodName, func(context.Context, any) (any, error) { return nil, deniedBy(image + "refused") })
		for name, req := range map[string]*gateway.SolveRequest{
			"definition": {Frontend: dockerfile, Definition: raw()}, "input": {Frontend: dockerfile, FrontendInputs: map[string]*pb.Definition{"x": raw()}}, "image": {Frontend: dockerfile},
		} {
			_, err := f.bridge.Solve(f.ctx, req)
			wantCode(t, name, codes.PermissionDenied, err)
		}
		_, err := f.bridge.Solve(f.ctx, &gateway.SolveRequest{Frontend: dockerfile, FrontendOpt: map[string]string{"local-sessionid:context": "other"}})
		wantCode(t, "another's session", codes.NotFound, err)
		for _, m := range []string{"ResolveImageConfig", "ResolveSourceMeta", "NewContainer", "ReleaseContainer", "ReadFileContainer", "ReadDirContainer", "StatFileContainer", "Other"} {
			wantCode(t, m, codes.Unimplemented, f.conn.Invoke(f.ctx, "/moby.buildkit.v1.frontend.LLBBridge/"+m, &gateway.PingRequest{}, &gateway.PongResponse{}))
		}
		for m, want := range map[string]codes.Code{"/containerd.services.content.v1.Content/List": codes.Unimplemented, "/containerd.services.content.v1.Content/Write": codes.Unimplemented, gateway.LLBBridge_ExecProcess_FullMethodName: codes.Unimplemented} {
			stream := check.Value(f.conn.NewStream(f.ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, m))(t)
			_, _ = stream.SendMsg(&gateway.PingRequest{}), stream.CloseSend()
			wantCode(t, m, want, stream.RecvMsg(&gateway.PingRequest{}))
		}
		check.Value(trace.NewTraceServiceClient(f.conn).Export(t.Context(), &trace.ExportTraceServiceRequest{}))(t) // dropped
	})
}

// TestGatewayReturn has only the engine's own results be results.
func TestGatewayReturn(t *testing.T) {
	withImage := func(r *control.SolveRequest) { r.Exporters = []*control.Exporter{{Type: "image"}} }
	forged := &gateway.Result{Result: &gateway.Result_Ref{Ref: &gateway.Ref{Id: "one"}}, Metadata: map[string][]byte{"containerimage.config": []byte("forged")}}
	empty := &gateway.Result{Result: &gateway.Result_Ref{Ref: &gateway.Ref{}}, Metadata: forged.Metadata}
	failed := status.New(codes.Unknown, "m")
	detailed := check.Value(failed.WithDetails(&gateway.PingRequest{}))(t)
	for name, tt := range map[string]struct {
		change func(*control.SolveRequest)
		in     *gateway.ReturnRequest
		want   *gateway.ReturnRequest // nil: refused
	}{
		"forged":           {withImage, &gateway.ReturnRequest{Result: forged}, &gateway.ReturnRequest{Result: aResult("one")}},
		"of several":       {withImage, &gateway.ReturnRequest{Result: &gateway.Result{Result: &gateway.Result_Refs{Refs: &gateway.RefMap{Refs: map[string]*gateway.Ref{"a": {Id: "one"}}}}}}, &gateway.ReturnRequest{Result: aResult("one")}},
		"deprecated":       {withImage, &gateway.ReturnRequest{Result: &gateway.Result{Result: &gateway.Result_RefDeprecated{RefDeprecated: "one"}}}, &gateway.ReturnRequest{Result: aResult("one")}},
		"unknown":          {nil, &gateway.ReturnRequest{Result: aResult("two")}, nil},
		"deprecated, new":  {nil, &gateway.ReturnRequest{Result: &gateway.Result{Result: &gateway.Result_RefDeprecated{RefDeprecated: "two"}}}, nil},
		"none":             {nil, &gateway.ReturnRequest{}, &gateway.ReturnRequest{Result: &gateway.Result{Result: &gateway.Result_Ref{Ref: &gateway.Ref{}}}}},
		"empty":            {nil, &gateway.ReturnRequest{Result: empty}, &gateway.ReturnRequest{Result: &gateway.Result{Result: &gateway.Result_Ref{Ref: &gateway.Ref{}}}}},
		"empty as image":   {withImage, &gateway.ReturnRequest{Result: empty}, nil},
		"error":            {nil, &gateway.ReturnRequest{Error: detailed.Proto()}, &gateway.ReturnRequest{Error: failed.Proto()}},
		"error and result": {nil, &gateway.ReturnRequest{Result: forged, Error: failed.Proto()}, &gateway.ReturnRequest{Error: failed.Proto()}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFrontend(t, tt.change)
				f.on(gateway.LLBBridge_Solve_FullMethodName, func(context.Context, any) (any, error) {
					return &gateway.SolveResponse{Result: aResult("one")}, nil
				})
				got := make(chan *gateway.ReturnRequest, 1)
				f.on(gateway.LLBBridge_Return_FullMethodName, func(_ context.Context, req any) (any, error) {
					got <- req.(*gateway.ReturnRequest)
					return &gateway.ReturnResponse{}, nil
				})
				check.Value(f.bridge.Solve(f.ctx, &gateway.SolveRequest{Frontend: dockerfile}))(t)
				_, err := f.bridge.Return(f.ctx, tt.in)
				if tt.want == nil {
					if wantCode(t, name, codes.PermissionDenied, err); len(got) > 0 {
						t.Error("returned")
					}
				} else if r := <-got; err != nil || !proto.Equal(r, tt.want) {
					t.Error(r, err)
				}
			})
		})
	}
}

// TestGatewayInputs lets a build use what an earlier build of the tenant's returned, and
// the images of that.
func TestGatewayInputs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFrontend(t, nil)
		op, limited := source(image+PinHost+"x:1"), &pb.OpMetadata{LinuxResources: &pb.LinuxResources{Memory: 1}}
		f.on(gateway.LLBBridge_Solve_FullMethodName, func(context.Context, any) (any, error) {
			r := aResult("one", op)
			r.GetRef().Def.Metadata = map[string]*pb.OpMetadata{digestOf(op): limited}
			return &gateway.SolveResponse{Result: r}, nil
		})
		check.Value(f.bridge.Solve(f.ctx, &gateway.SolveRequest{Frontend: dockerfile}))(t)
		f.job.answer <- map[string]string{}
		ended(t, <-f.solve.err)
		with := &gateway.SolveRequest{Frontend: dockerfile, FrontendInputs: map[string]*pb.Definition{"x": {Def: [][]byte{op, lastOp(op)}}}, FrontendOpt: map[string]string{"context:x": "input:x"}}
		for tenant, want := range map[string]codes.Code{"t": codes.OK, "u": codes.PermissionDenied} {
			f.on(gateway.LLBBridge_Solve_FullMethodName, func(_ context.Context, req any) (any, error) {
				if got := req.(*gateway.SolveRequest).FrontendInputs["x"].Metadata[digestOf(op)]; !proto.Equal(got, limited) {
					t.Error(got)
				}
				return &gateway.SolveResponse{}, nil
			})
			f.openSession(tenant, "own2")
			f.session = "own2"
			conn := f.asClient(tenant)
			f.start(conn, &control.SolveRequest{Ref: "client09"})
			first := <-f.jobs
			done := make(chan error)
			go func() {
				_, err := gateway.NewLLBBridgeClient(conn).Solve(inBuild(t, "client09"), with)
				done <- err
			}()
			if want == codes.OK {
				second := <-f.jobs
				if _, ok := allows(t, first.SourcePolicy, image+PinHost+"x:1"); ok {
					t.Error("allowed before")
				}
				if _, ok := allows(t, second.SourcePolicy, image+PinHost+"x:1"); !ok {
					t.Error("refused")
				}
			}
			wantCode(t, tenant, want, <-done)
		}
	})
}

// TestGatewayEnds has no call leave a pin behind a build that ends meanwhile.
func TestGatewayEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFrontend(t, nil)
		pinning, on := make(chan bool), make(chan bool)
		f.pin = func(string) { pinning <- true; <-on }
		f.on(gateway.LLBBridge_Solve_FullMethodName, func(context.Context, any) (any, error) { return nil, deniedBy(busybox) })
		done := make(chan error)
		go func() { _, err := f.bridge.Solve(f.ctx, &gateway.SolveRequest{Frontend: dockerfile}); done <- err }()
		<-pinning
		f.solve.cancel()
		wantCode(t, "the build", codes.Canceled, <-f.ends)
		on <- true
		if <-done == nil {
			t.Error("no error")
		}
		f.wantPins(0)
	})
}

// TestHistory has a tenant see the records of its own builds, and what they name.
func TestHistory(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		f.openSession("t", "own")
		conn := f.asClient("t")
		s := f.start(conn, someSolve())
		j := <-f.jobs
		j.answer <- map[string]string{}
		ended(t, <-s.err)
		blob := func(d string) *control.Descriptor { return &control.Descriptor{Digest: d} }
		f.onStream(control.Control_ListenBuildHistory_FullMethodName, func(s grpc.ServerStream) error {
			var req control.BuildHistoryRequest
			if err := s.RecvMsg(&req); err != nil || req.Ref != j.Ref || !req.EarlyExit || len(req.Filter) > 0 || req.Limit > 0 {
				t.Error(&req, err)
			}
			for _, ref := range []string{"another", j.Ref} {
				_ = s.SendMsg(&control.BuildHistoryEvent{Record: &control.BuildHistoryRecord{
					Ref: ref, Logs: blob("logs" + ref), ExternalError: blob("error"), Trace: blob("trace"),
					Result:  &control.BuildResultInfo{Attestations: []*control.Descriptor{blob("one")}, Results: map[int64]*control.Descriptor{0: blob("result")}},
					Results: map[string]*control.BuildResultInfo{"p": {Attestations: []*control.Descriptor{blob("two")}}},
				}})
			}
			return s.SendMsg(&control.BuildHistoryEvent{})
		})
		f.onStream("/containerd.services.content.v1.Content/Read", func(s grpc.ServerStream) error {
			if in, _ := metadata.FromIncomingContext(s.Context()); len(in["containerd-namespace"]) != 1 || len(in["x-other"]) > 0 {
				t.Error(in)
			}
			return s.SendMsg(&contentapi.ReadContentResponse{Data: []byte("x")})
		})
		f.on("/containerd.services.content.v1.Content/Info", func(context.Context, any) (any, error) { return &contentapi.InfoResponse{}, nil })
		content := func(conn *grpc.ClientConn, digest string) bool {
			ctx := metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", "buildkit", "x-other", "y")
			_, ierr := contentapi.NewContentClient(conn).Info(ctx, &contentapi.InfoRequest{Digest: digest})
			stream := check.Value(contentapi.NewContentClient(conn).Read(ctx, &contentapi.ReadContentRequest{Digest: digest}))(t)
			_, rerr := stream.Recv()
			for _, err := range []error{ierr, rerr} {
				if err != nil {
					wantCode(t, digest, codes.NotFound, err)
				}
			}
			return ierr == nil && rerr == nil
		}
		logs := "logs" + j.Ref
		if content(conn, logs) || content(conn, "") {
			t.Error("the record isn't read yet")
		}
		stream := check.Value(control.NewControlClient(conn).ListenBuildHistory(t.Context(), &control.BuildHistoryRequest{Ref: ref, EarlyExit: true, Filter: []string{"x"}, Limit: 3}))(t)
		if e := check.Value(stream.Recv())(t); e.Record.Ref != ref {
			t.Error(e)
		}
		if e, err := stream.Recv(); err == nil {
			t.Error(e)
		}
		other := f.asClient("u")
		for digest, ok := range map[string]bool{logs: true, "error": true, "one": true, "two": true, "trace": false, "result": false, "logsanother": false, "sha256:0": false, "": false} {
			if got := content(conn, digest); got != ok || content(other, digest) {
				t.Errorf("%q: %v", digest, got)
			}
		}

		check.Value(contentapi.NewContentClient(conn).Info(t.Context(), &contentapi.InfoRequest{Digest: logs}))(t) // in no namespace
		f.on(control.Control_UpdateBuildHistory_FullMethodName, func(_ context.Context, req any) (any, error) {
			if r := req.(*control.UpdateBuildHistoryRequest); r.Ref != j.Ref || !r.Finalize || r.Delete || r.Pinned {
				t.Error(r)
			}
			return &control.UpdateBuildHistoryResponse{}, nil
		})
		for _, tt := range []struct {
			req  *control.UpdateBuildHistoryRequest
			want codes.Code
		}{
			{&control.UpdateBuildHistoryRequest{Ref: ref, Finalize: true}, codes.OK}, {&control.UpdateBuildHistoryRequest{Ref: ref, Delete: true}, codes.PermissionDenied},
			{&control.UpdateBuildHistoryRequest{Ref: ref, Pinned: true}, codes.PermissionDenied}, {&control.UpdateBuildHistoryRequest{Ref: ref}, codes.PermissionDenied},
			{&control.UpdateBuildHistoryRequest{Ref: ref, Finalize: true, Delete: true}, codes.PermissionDenied}, {&control.UpdateBuildHistoryRequest{Ref: ref, Finalize: true, Pinned: true}, codes.PermissionDenied},
		} {
			_, err := control.NewControlClient(conn).UpdateBuildHistory(t.Context(), tt.req)
			wantCode(t, tt.req.String(), tt.want, err)
		}
		for tenant, in := range map[string]string{"u": ref, "t": ""} { // another's, and everybody's
			stream := check.Value(control.NewControlClient(f.asClient(tenant)).ListenBuildHistory(t.Context(), &control.BuildHistoryRequest{Ref: in}))(t)
			if e, err := stream.Recv(); e != nil {
				t.Error(e, err)
			}
		}
	})
}

// TestInfo has the engine's records and host stay unknown.
func TestInfo(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fixture) {
		c := control.NewControlClient(f.asClient("t"))
		const snapshotter = "org.mobyproject.buildkit.worker.snapshotter"
		f.on(control.Control_ListWorkers_FullMethodName, func(_ context.Context, req any) (any, error) {
			if len(req.(*control.ListWorkersRequest).Filter) > 0 {
				t.Error(req)
			}
			return &control.ListWorkersResponse{Record: []*types.WorkerRecord{{
				ID: "w", Labels: map[string]string{snapshotter: "overlayfs", "org.mobyproject.buildkit.worker.hostname": "secret"}, GCPolicy: []*types.GCPolicy{{}}, CDIDevices: []*types.CDIDevice{{}},
			}}}, nil
		})
		f.on(control.Control_Info_FullMethodName, func(context.Context, any) (any, error) {
			return &control.InfoResponse{BuildkitVersion: &types.BuildkitVersion{Version: "v"}}, nil
		})
		workers := check.Value(c.ListWorkers(t.Context(), &control.ListWorkersRequest{Filter: []string{"x"}}))(t)
		if want := (&types.WorkerRecord{ID: "w", Labels: map[string]string{snapshotter: "overlayfs"}}); !proto.Equal(workers.Record[0], want) {
			t.Error(workers)
		}
		if info := check.Value(c.Info(t.Context(), &control.InfoRequest{}))(t); info.BuildkitVersion.Version != "v" {
			t.Error(info)
		}
		if usage := check.Value(c.DiskUsage(t.Context(), &control.DiskUsageRequest{}))(t); len(usage.Record) > 0 {
			t.Error(usage)
		}
		prune := check.Value(c.Prune(t.Context(), &control.PruneRequest{All: true}))(t)
		if m, err := prune.Recv(); m != nil || err == nil {
			t.Error(m, err)
		}
	})
}

// TestGatewayTogether has two calls of a frontend need images at the same time. The job of
// one ends that of the other.
func TestGatewayTogether(t *testing.T) {
	for name, images := range map[string][2]string{"another": {busybox, busybox + "2"}, "the same": {busybox, busybox}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFrontend(t, nil)
				var mu sync.Mutex
				jobs := map[string]*engineJob{f.job.Ref: f.job}
				go func() {
					for {
						select {
						case j := <-f.jobs:
							mu.Lock()
							jobs[j.Ref] = j
							mu.Unlock()
						case <-t.Context().Done():
							return
						}
					}
				}()
				var both sync.WaitGroup // of the first calls
				both.Add(2)
				first := map[string]bool{}
				f.on(gateway.LLBBridge_Solve_FullMethodName, func(ctx context.Context, req any) (any, error) {
					time.Sleep(time.Second) // of the bubble's clock, in which the job becomes known
					target := req.(*gateway.SolveRequest).FrontendOpt["target"]
					mu.Lock()
					j, again := jobs[buildid.FromIncomingContext(ctx)], first[target]
					first[target] = true
					mu.Unlock()
					if !again {
						both.Done()
						both.Wait()
					}
					source := images[0]
					if target == "b" {
						source = images[1]
					}
					if j == nil { // the other call ended it before the engine knew it
						return nil, status.Error(codes.NotFound, "no such job")
					}
					if _, ok := allows(t, j.SourcePolicy, source); !ok {
						return nil, deniedBy(source)
					}
					time.Sleep(time.Second) // in which the other call starts a job
					if err := j.ctx.Err(); err != nil {
						return nil, err
					}
					return &gateway.SolveResponse{Result: aResult(target)}, nil
				})
				errs := make(chan error)
				for target, mode := range map[string]string{"a": "pull", "b": "local"} {
					go func() {
						_, err := f.bridge.Solve(f.ctx, &gateway.SolveRequest{Frontend: dockerfile, FrontendOpt: map[string]string{"target": target, "image-resolve-mode": mode}})
						errs <- err
					}()
				}
				ended(t, <-errs)
				ended(t, <-errs)
			})
		})
	}
}

// TestGatewayReads has a frontend read its own results, in messages of Berm's.
func TestGatewayReads(t *testing.T) {
	const file, dir, stat, evaluate = gateway.LLBBridge_ReadFile_FullMethodName, gateway.LLBBridge_ReadDir_FullMethodName, gateway.LLBBridge_StatFile_FullMethodName, gateway.LLBBridge_Evaluate_FullMethodName
	long := bytesOf(maxPath + 1)
	answers := map[string]proto.Message{file: &gateway.ReadFileResponse{}, dir: &gateway.ReadDirResponse{}, stat: &gateway.StatFileResponse{}, evaluate: &gateway.EvaluateResponse{}}
	bubble(t, func(t *testing.T) {
		f := newFrontend(t, nil)
		f.on(gateway.LLBBridge_Solve_FullMethodName, func(context.Context, any) (any, error) {
			return &gateway.SolveResponse{Result: aResult("one")}, nil
		})
		check.Value(f.bridge.Solve(f.ctx, &gateway.SolveRequest{Frontend: dockerfile}))(t)
		got := make(chan proto.Message, 1)
		for method, answer := range answers {
			f.on(method, func(_ context.Context, req any) (any, error) { got <- req.(proto.Message); return answer, nil })
		}
		for _, tt := range []struct {
			method   string
			in, want proto.Message // nil: refused
		}{
			{file, &gateway.ReadFileRequest{Ref: "one", FilePath: "a"}, &gateway.ReadFileRequest{Ref: "one", FilePath: "a", Range: &gateway.FileRange{Length: maxFile + 1}}},
			{file, &gateway.ReadFileRequest{Ref: "one", FilePath: "a", Range: &gateway.FileRange{Offset: 2, Length: 3}}, &gateway.ReadFileRequest{Ref: "one", FilePath: "a", Range: &gateway.FileRange{Offset: 2, Length: 3}}},
			{file, &gateway.ReadFileRequest{Ref: "one", Range: &gateway.FileRange{Length: 1 << 40}}, &gateway.ReadFileRequest{Ref: "one", Range: &gateway.FileRange{Length: maxFile + 1}}},
			{file, &gateway.ReadFileRequest{Ref: "one", Range: &gateway.FileRange{Length: -1}}, nil},
			{file, &gateway.ReadFileRequest{Ref: "one", Range: &gateway.FileRange{Offset: -1, Length: 1}}, nil},
			{file, &gateway.ReadFileRequest{Ref: "one", FilePath: long}, nil},
			{file, &gateway.ReadFileRequest{Ref: "two", FilePath: "a"}, nil},
			{file, &gateway.ReadFileRequest{FilePath: "a"}, nil},
			{dir, &gateway.ReadDirRequest{Ref: "one", DirPath: "a", IncludePattern: "*", MountIndex: 1}, &gateway.ReadDirRequest{Ref: "one", DirPath: "a", IncludePattern: "*"}},
			{dir, &gateway.ReadDirRequest{Ref: "one", DirPath: long}, nil},
			{dir, &gateway.ReadDirRequest{Ref: "one", IncludePattern: long}, nil},
			{dir, &gateway.ReadDirRequest{Ref: "two"}, nil},
			{stat, &gateway.StatFileRequest{Ref: "one", Path: "a", MountIndex: 1}, &gateway.StatFileRequest{Ref: "one", Path: "a"}},
			{stat, &gateway.StatFileRequest{Ref: "one", Path: long}, nil},
			{stat, &gateway.StatFileRequest{Ref: "two"}, nil},
			{evaluate, &gateway.EvaluateRequest{Ref: "one"}, &gateway.EvaluateRequest{Ref: "one"}},
			{evaluate, &gateway.EvaluateRequest{Ref: "two"}, nil},
		} {
			err := f.conn.Invoke(f.ctx, tt.method, tt.in, proto.Clone(answers[tt.method]))
			if tt.want != nil {
				if r := <-got; err != nil || !proto.Equal(r, tt.want) {
					t.Error(tt.in, r, err)
				}
			} else if err == nil || len(got) > 0 {
				t.Errorf("%s took %.100v", tt.method, tt.in)
				<-got
			}
		}
	})
}
