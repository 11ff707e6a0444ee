package buildkit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	"github.com/moby/buildkit/solver/pb"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// canaryTime limits the job that tests the engine.
const canaryTime = 10 * time.Second

// Check fails unless the engine enforces source policies: it runs a job whose only source
// the policy denies. Older engines ignore policies, and would give builds every image.
func (s *Server) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, canaryTime)
	defer cancel()
	source, err := (&pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: image + PinHost + "canary:1"}}}).Marshal()
	if err != nil {
		return err
	}
	last, err := (&pb.Op{Inputs: []*pb.Input{{Digest: digestOf(source)}}}).Marshal()
	if err != nil {
		return err
	}
	_, err = control.NewControlClient(s.engine).Solve(ctx, &control.SolveRequest{
		Ref: "b" + random(), Definition: &pb.Definition{Def: [][]byte{source, last}}, Cache: &control.CacheOptions{}, Internal: true,
		SourcePolicy: newSources(nil).policy(),
	})
	switch {
	case err != nil && strings.Contains(err.Error(), "denied by policy"):
		return nil
	case slices.Contains([]codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.Canceled}, status.Code(err)), ctx.Err() != nil:
		return fmt.Errorf("ask the engine's BuildKit whether it enforces source policies: %w", err)
	}
	return ErrNoPolicy
}

// ErrNoPolicy is Check's for an engine without source policies.
var ErrNoPolicy = status.Error(codes.FailedPrecondition, "this engine's BuildKit has no source policy: use DOCKER_BUILDKIT=0, or a newer engine")

func digestOf(b []byte) string { return digest.FromBytes(b).String() }
