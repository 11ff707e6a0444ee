package buildkit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
)

// derive is how Berm makes up names.
func derive(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// owner is Berm's engine.instance.
const owner = "attacked"

// pinOf is the name of a pin.
func pinOf(tenant, id string) string {
	return "berm.invalid/p/" + derive("owner", owner) + "/" + derive("pin", tenant, id) + ":1"
}

func cacheNamespace(tenant string) string { return derive("cache", owner+"/"+tenant) }

// call is a frontend's call in its build.
type call func(ctx context.Context, c *client, session string) (*gateway.Result, error)

// gatewaySolve is a Solve of a frontend's.
func gatewaySolve(frontend string, attrs map[string]string, change ...func(*gateway.SolveRequest)) call {
	return func(ctx context.Context, c *client, _ string) (*gateway.Result, error) {
		opt := map[string]string{}
		for k, v := range attrs {
			opt[k] = v
		}
		req := &gateway.SolveRequest{Frontend: frontend, FrontendOpt: opt, AllowResultReturn: true, AllowResultArrayRef: true, Evaluate: true}
		for _, f := range change {
			f(req)
		}
		resp, err := c.gateway().Solve(ctx, req)
		return resp.GetResult(), err
	}
}

// bridged runs a call of Bob's as the frontend of a build of his.
func (s *side) bridged(ctx context.Context, f call) error {
	return s.bridgedBy(ctx, "FROM "+base+"\nARG X\nRUN echo $X", f)
}

func (s *side) bridgedBy(ctx context.Context, dockerfile string, f call) error {
	var came error
	r, err := s.bob.run(ctx, build{dockerfile: dockerfile, frontend: func(ctx context.Context, ref, session string) error {
		ctx = inBuild(ctx, ref)
		result, err := f(ctx, s.bob, session)
		came = err
		return s.bob.returns(ctx, result, err)
	}})
	if r != nil && strings.Contains(r.log, marker) {
		return nil
	}
	if err := exited(came); err == nil {
		return nil
	}
	err = errors.Join(came, err)
	return errors.Join(err, harmless(err))
}

// returns ends a build with a result or an error.
func (c *client) returns(ctx context.Context, result *gateway.Result, err error) error {
	req := &gateway.ReturnRequest{Result: result}
	if err != nil {
		st := status.Convert(err).Proto()
		req.Error, req.Result = st, nil
	}
	_, err = c.gateway().Return(ctx, req)
	return err
}

// definition is one of operations, of which the last is the result.
func definition(ops ...*pb.Op) *pb.Definition {
	def := &pb.Definition{Metadata: map[string]*pb.OpMetadata{}}
	var last string
	for _, op := range append(ops, &pb.Op{}) {
		if last != "" {
			for _, in := range op.Inputs {
				in.Digest = last
			}
			if op.Op == nil {
				op.Inputs = []*pb.Input{{Digest: last}}
			}
		}
		text, err := op.Marshal()
		if err != nil {
			panic(err)
		}
		def.Def = append(def.Def, text)
		last = digest.FromBytes(text).String()
		def.Metadata[last] = new(pb.OpMetadata) // without which it is none
	}
	return def
}

func sourceOp(identifier string, attrs map[string]string) *pb.Op {
	return &pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: identifier, Attrs: attrs}}, Platform: &pb.Platform{OS: "linux", Architecture: "amd64"}}
}

func execOp(script string) *pb.Op {
	return &pb.Op{
		Op: &pb.Op_Exec{Exec: &pb.ExecOp{
			Meta:   &pb.Meta{Args: []string{"/bin/sh", "-c", script}, Cwd: "/", Env: []string{"PATH=/bin:/usr/bin"}},
			Mounts: []*pb.Mount{{Input: 0, Dest: "/", Output: 0}},
		}},
		Inputs: []*pb.Input{{}}, Platform: &pb.Platform{OS: "linux", Architecture: "amd64"},
	}
}

// forged reads Alice's image.
func (s *side) forged() *pb.Definition {
	return definition(sourceOp("docker-image://"+alices, map[string]string{"image.resolvemode": "local"}), execOp("echo "+s.word()+"; cat /secret"))
}

var definitionAttacks = []attack{
	{name: "raw", try: func(ctx context.Context, s *side) error {
		return s.leaks(ctx, build{change: func(req *control.SolveRequest) { req.Frontend, req.Definition = "", s.forged() }})
	}},
	{name: "raw with a frontend", tame: ": the frontend takes its place", try: func(ctx context.Context, s *side) error {
		return s.leaks(ctx, build{dockerfile: "FROM " + base, change: func(req *control.SolveRequest) { req.Definition = s.forged() }})
	}},
	{name: "as an input", try: func(ctx context.Context, s *side) error {
		return s.leaks(ctx, build{dockerfile: "FROM x\nRUN echo " + s.word() + "; cat /secret", attrs: map[string]string{"context:x": "input:x"}, change: func(req *control.SolveRequest) {
			req.FrontendInputs = map[string]*pb.Definition{"x": s.forged()}
		}})
	}},
	{name: "of a frontend", try: func(ctx context.Context, s *side) error {
		return s.bridged(ctx, gatewaySolve("", nil, func(req *gateway.SolveRequest) { req.Definition = s.forged() }))
	}},
	{name: "as a frontend's input", try: func(ctx context.Context, s *side) error {
		return s.bridged(ctx, gatewaySolve("dockerfile.v0", map[string]string{"context:x": "input:x"}, func(req *gateway.SolveRequest) {
			req.FrontendInputs = map[string]*pb.Definition{"x": s.forged()}
			req.FrontendOpt["context:busybox"] = "input:x"
		}))
	}},
	{name: "one operation changed", try: oneChanged(func(op *pb.Op) bool {
		if e := op.GetExec(); e != nil {
			e.Mounts = append(e.Mounts, &pb.Mount{Input: -1, Dest: "/c", MountType: pb.MountType_CACHE, CacheOpt: &pb.CacheOpt{ID: "x"}, Output: -1})
			e.Meta.Args = []string{"/bin/sh", "-c", "exit 42"}
			return true
		}
		return false
	})},
	{name: "the last one changed", tame: ": it only says which is the result", try: oneChanged(func(op *pb.Op) bool {
		if op.Op == nil {
			op.Op = &pb.Op_Exec{Exec: execOp("exit 42").GetExec()}
			return true
		}
		return false
	})},
	{name: "policies of a frontend", try: func(ctx context.Context, s *side) error {
		return s.bridged(ctx, gatewaySolve("dockerfile.v0", map[string]string{"build-arg:BUILDKIT_SYNTAX": "front.local/front:1"}, func(req *gateway.SolveRequest) {
			req.SourcePolicies = append(req.SourcePolicies, allowAll())
		}))
	}},
	{name: "policy", try: func(ctx context.Context, s *side) error {
		return s.leaks(ctx, build{dockerfile: strings.ReplaceAll(copied, "WORD", s.word()), change: func(req *control.SolveRequest) { req.SourcePolicy = allowAll() }})
	}},
	{name: "policy session", tame: ": the session answers nothing", try: func(ctx context.Context, s *side) error {
		return s.leaks(ctx, build{dockerfile: strings.ReplaceAll(copied, "WORD", s.word()), change: func(req *control.SolveRequest) { req.SourcePolicySession = req.Session }})
	}},
}

// oneChanged has the engine solve something, changes one of the operations, and gives the
// whole back as an input.
func oneChanged(change func(*pb.Op) bool) func(context.Context, *side) error {
	return func(ctx context.Context, s *side) error {
		return s.bridged(ctx, func(ctx context.Context, c *client, session string) (*gateway.Result, error) {
			first, err := gatewaySolve("dockerfile.v0", map[string]string{"build-arg:X": s.word()})(ctx, c, session)
			if err != nil {
				return nil, err
			}
			def := first.GetRef().GetDef()
			if def == nil {
				return nil, errors.New("the result has no definition")
			}
			ops := make([]*pb.Op, len(def.Def))
			renamed := map[string]string{}
			for i, text := range def.Def {
				ops[i] = new(pb.Op)
				if err := ops[i].Unmarshal(text); err != nil {
					return nil, err
				}
				for _, in := range ops[i].Inputs {
					if to := renamed[in.Digest]; to != "" {
						in.Digest = to
					}
				}
				change(ops[i])
				now, err := ops[i].Marshal()
				if err != nil {
					return nil, err
				}
				renamed[digest.FromBytes(text).String()] = digest.FromBytes(now).String()
				def.Def[i] = now
			}
			def.Metadata = map[string]*pb.OpMetadata{}
			for _, to := range renamed {
				def.Metadata[to] = new(pb.OpMetadata)
			}
			return gatewaySolve("dockerfile.v0", map[string]string{"context:busybox": "input:x"}, func(req *gateway.SolveRequest) {
				req.FrontendInputs = map[string]*pb.Definition{"x": def}
			})(ctx, c, session)
		})
	}
}

// strange has the engine read a definition whose operations are the engine's own, but that
// makes no sense. It may end the engine, which isn't asked itself.
func strange(name string, change func(def *pb.Definition)) attack {
	return attack{name: name, tame: "2: not tried", try: func(ctx context.Context, s *side) error {
		if s.bare {
			return errHarmless
		}
		err := s.bridged(ctx, func(ctx context.Context, c *client, session string) (*gateway.Result, error) {
			first, err := gatewaySolve("dockerfile.v0", map[string]string{"build-arg:X": s.word()})(ctx, c, session)
			if err != nil {
				return nil, err
			}
			def := first.GetRef().GetDef()
			change(def)
			return gatewaySolve("dockerfile.v0", map[string]string{"context:busybox": "input:x"}, func(req *gateway.SolveRequest) {
				req.FrontendInputs = map[string]*pb.Definition{"x": def}
			})(ctx, c, session)
		})
		return s.survived(ctx, err)
	}}
}

// survived is err, unless the engine is gone. It brings the engine back.
func (s *side) survived(ctx context.Context, err error) error {
	if s.innocent(ctx) == nil {
		return err
	}
	s.engine.Kill()
	if err := s.engine.Start(ctx); err != nil {
		return err
	}
	for range 50 {
		if s.innocent(ctx) == nil {
			break
		}
	}
	return nil // the harm
}

func lastOp(in ...*pb.Input) []byte {
	text, err := (&pb.Op{Inputs: in}).Marshal()
	if err != nil {
		panic(err)
	}
	return text
}

// end gives a definition another last operation.
func end(def *pb.Definition, in ...*pb.Input) {
	def.Def[len(def.Def)-1] = lastOp(in...)
}

var strangeAttacks = []attack{
	strange("nothing", func(def *pb.Definition) { def.Def = nil }),
	strange("only a last operation", func(def *pb.Definition) { def.Def = [][]byte{lastOp()} }),
	strange("last operation without inputs", func(def *pb.Definition) { end(def) }),
	strange("input that is missing", func(def *pb.Definition) { end(def, &pb.Input{Digest: digest.FromString("x").String()}) }),
	strange("input that is no digest", func(def *pb.Definition) { end(def, &pb.Input{Digest: "x"}) }),
	strange("index that is missing", func(def *pb.Definition) {
		end(def, &pb.Input{Digest: digest.FromBytes(def.Def[len(def.Def)-2]).String(), Index: 99})
	}),
	strange("index below zero", func(def *pb.Definition) {
		end(def, &pb.Input{Digest: digest.FromBytes(def.Def[len(def.Def)-2]).String(), Index: -1})
	}),
	strange("operation that is missing", func(def *pb.Definition) { def.Def = def.Def[1:] }),
	strange("operations in another order", func(def *pb.Definition) { def.Def[0], def.Def[1] = def.Def[1], def.Def[0] }),
	strange("source that is missing", func(def *pb.Definition) {
		def.Source = &pb.Source{Locations: map[string]*pb.Locations{"x": {Locations: []*pb.Location{{SourceIndex: 99}}}}}
	}),
	strange("source of another definition", func(def *pb.Definition) {
		def.Source = &pb.Source{Infos: []*pb.SourceInfo{{Definition: definition(sourceOp("docker-image://"+alices, nil))}}}
	}),
	{name: "details of an error", tame: "2: not tried", try: func(ctx context.Context, s *side) error {
		if s.bare {
			return errHarmless
		}
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base, frontend: func(ctx context.Context, ref, _ string) error {
			req := &gateway.ReturnRequest{Error: status.New(codes.Unknown, "evil").Proto()}
			for _, kind := range []string{"Source", "Vertex", "Solve", "FileAction", "ContentCache", "Subrequest", "FrontendCap", "Op", "stack.Stack"} {
				req.Error.Details = append(req.Error.Details, &anypb.Any{TypeUrl: "type.googleapis.com/errdefs." + kind}, &anypb.Any{TypeUrl: "github.com/moby/buildkit/" + kind + "+json", Value: []byte("{}")})
			}
			_, err := s.bob.gateway().Return(inBuild(ctx, ref), req)
			return err
		}})
		if err != nil && strings.Contains(err.Error(), "evil") {
			err = errHarmless
		}
		return s.survived(ctx, err)
	}},
}
