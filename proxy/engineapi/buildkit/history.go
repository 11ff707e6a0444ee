package buildkit

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	control "github.com/moby/buildkit/api/services/control"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// each calls f for each message of a stream.
func each[T any](stream grpc.ServerStreamingClient[T], err error, f func(*T) error) error {
	for err == nil {
		var m *T
		if m, err = stream.Recv(); err == nil {
			err = f(m)
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// known returns a build of the tenant's that has begun, or nil.
func (s *Server) known(ctx context.Context, ref string) *build {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.builds[[2]string{callerOf(ctx).Tenant(), ref}]; b != nil && b.hasBegun() {
		return b
	}
	return nil
}

// ListenBuildHistory sends the record of a build of the tenant's. All others have no owner.
func (s service) ListenBuildHistory(in *control.BuildHistoryRequest, stream control.Control_ListenBuildHistoryServer) error {
	b := s.known(stream.Context(), in.Ref)
	if b == nil {
		return nil
	}
	j, _ := b.current()
	from, err := s.control().ListenBuildHistory(stream.Context(), &control.BuildHistoryRequest{Ref: j.ref, EarlyExit: in.EarlyExit, ActiveOnly: in.ActiveOnly})
	return each(from, err, func(e *control.BuildHistoryEvent) error {
		if e.Record == nil || e.Record.Ref != j.ref {
			return nil
		}
		e.Record.Ref = in.Ref
		b.recordOf(e.Record)
		return stream.Send(e)
	})
}

// recordOf notes the content that a build's record names.
func (b *build) recordOf(r *control.BuildHistoryRecord) {
	b.mu.Lock()
	defer b.mu.Unlock()
	blobs := []*control.Descriptor{r.Logs, r.ExternalError}
	for _, result := range append(slices.Collect(maps.Values(r.Results)), r.Result) {
		blobs = append(blobs, result.GetAttestations()...)
	}
	for _, d := range blobs {
		if digest := d.GetDigest(); digest != "" {
			b.digests[digest] = true
		}
	}
}

// UpdateBuildHistory completes the record of a build of the tenant's.
func (s service) UpdateBuildHistory(ctx context.Context, in *control.UpdateBuildHistoryRequest) (*control.UpdateBuildHistoryResponse, error) {
	b := s.known(ctx, in.Ref)
	if b == nil {
		return nil, status.Error(codes.NotFound, "no such build")
	}
	if !in.Finalize || in.Delete || in.Pinned {
		return nil, denied("history", "UpdateBuildHistory", "the build history can't be changed", "Finalize")
	}
	j, _ := b.current()
	return s.control().UpdateBuildHistory(ctx, &control.UpdateBuildHistoryRequest{Ref: j.ref, Finalize: true})
}

// contents serves the content that the records of a tenant's own builds name.
type contents struct {
	contentapi.UnimplementedContentServer
	*Server
}

func (s contents) content() contentapi.ContentClient { return contentapi.NewContentClient(s.engine) }

// owns fails unless a record of the tenant's names the content.
func (s contents) owns(ctx context.Context, digest string) error {
	tenant := callerOf(ctx).Tenant()
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, b := range s.builds {
		if key[0] == tenant && b.names(digest) {
			return nil
		}
	}
	return status.Errorf(codes.NotFound, "content %s: not found", digest)
}

func (b *build) names(digest string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.digests[digest]
}

// inNamespace returns a context for a call in the namespace that the client names.
func inNamespace(ctx context.Context) context.Context {
	const key = "containerd-namespace"
	in, _ := metadata.FromIncomingContext(ctx)
	out := metadata.MD{}
	if v := in.Get(key); len(v) == 1 {
		out.Set(key, v[0])
	}
	return metadata.NewOutgoingContext(ctx, out)
}

func (s contents) Info(ctx context.Context, in *contentapi.InfoRequest) (*contentapi.InfoResponse, error) {
	if err := s.owns(ctx, in.Digest); err != nil {
		return nil, err
	}
	return s.content().Info(inNamespace(ctx), &contentapi.InfoRequest{Digest: in.Digest})
}

func (s contents) Read(in *contentapi.ReadContentRequest, stream contentapi.Content_ReadServer) error {
	if err := s.owns(stream.Context(), in.Digest); err != nil {
		return err
	}
	from, err := s.content().Read(inNamespace(stream.Context()), &contentapi.ReadContentRequest{Digest: in.Digest, Offset: in.Offset, Size: in.Size})
	return each(from, err, stream.Send)
}
