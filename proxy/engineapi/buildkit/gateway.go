package buildkit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/moby/buildkit/client/buildid"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// bridge is the API of a client that is the frontend of its own build.
type bridge struct {
	gateway.UnimplementedLLBBridgeServer
	*Server
}

func (s bridge) bridge() gateway.LLBBridgeClient { return gateway.NewLLBBridgeClient(s.engine) }

// build returns the tenant's build that a call is part of.
func (s bridge) build(ctx context.Context) (*build, error) {
	return s.await(ctx, callerOf(ctx).Tenant(), buildid.FromIncomingContext(ctx))
}

// inJob returns a context for a call in the build's last job.
func (b *build) inJob(ctx context.Context) context.Context {
	j, _ := b.current()
	return j.in(ctx)
}

func (j *job) in(ctx context.Context) context.Context {
	return buildid.AppendToOutgoingContext(metadata.NewOutgoingContext(ctx, metadata.MD{}), j.ref)
}

// Solve has the engine's own Dockerfile frontend solve a part of the build.
func (s bridge) Solve(ctx context.Context, in *gateway.SolveRequest) (*gateway.SolveResponse, error) {
	b, err := s.build(ctx)
	if err != nil {
		return nil, err
	}
	req, a, err := judgeBridge(b.judge, b.tenant, in, func(id string) (string, error) {
		found, err := s.sessions.await(ctx, b.tenant, id)
		if err != nil {
			return "", err
		}
		return found.id, nil
	}, func(op []byte) (*pb.OpMetadata, bool) { return s.knows(b.tenant, op) })
	if err != nil {
		return nil, err
	}
	if err := b.allow(a, req); err != nil {
		return nil, err
	}
	for {
		j, _ := b.current()
		resp, err := s.bridge().Solve(j.in(ctx), req)
		if err == nil {
			err = failure(resp.Result)
		}
		if err == nil {
			if err = b.remember(resp.Result); err == nil {
				err = leaseAnswer(ctx, int64(proto.Size(resp)))
			}
			return resp, err
		}
		if err := b.admit(j, err); err != nil {
			return nil, err
		}
	}
}

// failure returns the error in the answer to a subrequest such as a check, if it names a source.
func failure(r *gateway.Result) error {
	if text := string(r.GetMetadata()["result.json"]); missing(text) != "" {
		return errors.New(text)
	}
	return nil
}

// allow adds what a request may read. It starts a job if that is more than before.
func (b *build) allow(a *attrs, req *gateway.SolveRequest) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := len(b.sources.uploads) + len(b.sources.inputs)
	b.req.pull = b.req.pull || a.pull
	for _, url := range a.uploads {
		b.sources.uploads[url] = true
	}
	for _, def := range req.FrontendInputs {
		for _, id := range pinnedIn(def) {
			b.sources.inputs[id] = true
		}
	}
	switch now := len(b.sources.uploads) + len(b.sources.inputs); {
	case now > maxGiven:
		return denied("sources", "", "the build reads too many uploads and inputs", fmt.Sprintf("up to %d", maxGiven))
	case now > before:
		b.start()
	}
	return nil
}

// references returns all references of a result.
func references(r *gateway.Result) []*gateway.Ref {
	refs := slices.Collect(maps.Values(r.GetRefs().GetRefs()))
	if ref := r.GetRef(); ref != nil {
		refs = append(refs, ref)
	}
	for _, id := range append(slices.Collect(maps.Values(r.GetRefsDeprecated().GetRefs())), r.GetRefDeprecated()) {
		if id != "" {
			refs = append(refs, &gateway.Ref{Id: id})
		}
	}
	return refs
}

// Return ends a build with the engine's own result, as the client's copy may carry another
// image configuration.
func (s bridge) Return(ctx context.Context, in *gateway.ReturnRequest) (*gateway.ReturnResponse, error) {
	b, err := s.build(ctx)
	if err != nil {
		return nil, err
	}
	out := &gateway.ReturnRequest{}
	if in.Error != nil {
		out.Error = status.New(codes.Code(in.Error.Code), in.Error.Message).Proto()
	} else {
		if out.Result = b.own(in.Result); out.Result == nil {
			return nil, denied("result", "Result", "the result isn't one that this build solved", "a result of the engine's")
		}
	}
	return s.bridge().Return(b.inJob(ctx), out)
}

// own returns the engine's result to which the references of a client's result belong. A client that only
// asks what the engine can do returns an empty result.
func (b *build) own(in *gateway.Result) *gateway.Result {
	b.mu.Lock()
	defer b.mu.Unlock()
	refs := references(in)
	if !slices.ContainsFunc(refs, func(r *gateway.Ref) bool { return r.GetId() != "" }) {
		if found := b.results[""]; found != nil || len(b.req.out.Exporters) > 0 {
			return found
		}
		return &gateway.Result{Result: &gateway.Result_Ref{Ref: &gateway.Ref{}}}
	}
	return b.results[refs[0].GetId()]
}

func (s bridge) Ping(ctx context.Context, _ *gateway.PingRequest) (*gateway.PongResponse, error) {
	b, err := s.build(ctx)
	if err != nil {
		return nil, err
	}
	resp, err := s.bridge().Ping(b.inJob(ctx), &gateway.PingRequest{})
	if err == nil {
		showWorkers(resp.Workers)
	}
	return resp, err
}

// maxFile limits what one call reads of a file or a directory, in bytes.
const maxFile = 4 << 20

// maxPath limits a path or a pattern, in bytes.
const maxPath = 4096

// reading returns a context for a call that reads a result of the build that the call is part
// of, and leases the memory for what it reads.
func (s bridge) reading(ctx context.Context, ref string, paths ...string) (context.Context, error) {
	b, err := s.build(ctx)
	if err != nil {
		return nil, err
	}
	if !b.returnedRef(ref) {
		return nil, status.Error(codes.NotFound, "no such result")
	}
	if slices.ContainsFunc(paths, func(p string) bool { return len(p) > maxPath }) {
		return nil, denied("gateway", "", "the path is too long", fmt.Sprintf("up to %d bytes", maxPath))
	}
	return b.inJob(ctx), leaseAnswer(ctx, maxFile)
}

func (b *build) returnedRef(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.results[id]
	return ok
}

// ReadFile bounds what is read, as some engines take a whole file into memory.
func (s bridge) ReadFile(ctx context.Context, in *gateway.ReadFileRequest) (*gateway.ReadFileResponse, error) {
	ctx, err := s.reading(ctx, in.Ref, in.FilePath)
	if err != nil {
		return nil, err
	}
	part := &gateway.FileRange{Length: maxFile + 1}
	if asked := in.Range; asked != nil {
		if asked.Offset < 0 || asked.Length < 0 { // which some engines take for all of the file
			return nil, denied("gateway", "ReadFile", "the range is negative", "offsets and lengths from 0 on")
		}
		part = &gateway.FileRange{Offset: asked.Offset, Length: min(asked.Length, part.Length)}
	}
	resp, err := s.bridge().ReadFile(ctx, &gateway.ReadFileRequest{FilePath: in.FilePath, Range: part, Ref: in.Ref})
	if len(resp.GetData()) > maxFile {
		return nil, denied("gateway", "ReadFile", "the file is too large", fmt.Sprintf("up to %d bytes", maxFile))
	}
	return resp, err
}

func (s bridge) ReadDir(ctx context.Context, in *gateway.ReadDirRequest) (*gateway.ReadDirResponse, error) {
	ctx, err := s.reading(ctx, in.Ref, in.DirPath, in.IncludePattern)
	if err != nil {
		return nil, err
	}
	return s.bridge().ReadDir(ctx, &gateway.ReadDirRequest{DirPath: in.DirPath, IncludePattern: in.IncludePattern, Ref: in.Ref}, grpc.MaxCallRecvMsgSize(maxFile))
}

func (s bridge) StatFile(ctx context.Context, in *gateway.StatFileRequest) (*gateway.StatFileResponse, error) {
	ctx, err := s.reading(ctx, in.Ref, in.Path)
	if err != nil {
		return nil, err
	}
	return s.bridge().StatFile(ctx, &gateway.StatFileRequest{Path: in.Path, Ref: in.Ref}, grpc.MaxCallRecvMsgSize(maxFile))
}

func (s bridge) Evaluate(ctx context.Context, in *gateway.EvaluateRequest) (*gateway.EvaluateResponse, error) {
	ctx, err := s.reading(ctx, in.Ref)
	if err != nil {
		return nil, err
	}
	return s.bridge().Evaluate(ctx, &gateway.EvaluateRequest{Ref: in.Ref})
}

// Warn drops a warning: the client that gives it is the only one to read it.
func (s bridge) Warn(ctx context.Context, _ *gateway.WarnRequest) (*gateway.WarnResponse, error) {
	_, err := s.build(ctx)
	return &gateway.WarnResponse{}, err
}

func (bridge) Inputs(context.Context, *gateway.InputsRequest) (*gateway.InputsResponse, error) {
	return &gateway.InputsResponse{}, nil
}
