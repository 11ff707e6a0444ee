package buildkit

import (
	"fmt"
	"slices"
	"strings"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/bermhq/berm/proxy/engineapi/body"
)

// hasUnknown reports whether a message has fields, at any level, that this package doesn't know.
func hasUnknown(m protoreflect.Message) bool {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	found := false
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			if f.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, e protoreflect.Value) bool {
					found = hasUnknown(e.Message())
					return !found
				})
			}
		case f.Message() == nil:
		case f.IsList():
			for i := 0; i < v.List().Len() && !found; i++ {
				found = hasUnknown(v.List().Get(i).Message())
			}
		default:
			found = hasUnknown(v.Message())
		}
		return !found
	})
	return found
}

const dockerfile = "dockerfile.v0"

var refName = like(`[a-z0-9]{8,64}`)

// request is a client's Solve, after judgement.
type request struct {
	out     *control.SolveRequest // without a ref and a source policy
	uploads []string
	pull    bool
	names   []string // for the image
	stores  bool     // the result becomes an image of the engine's
}

// judgeSolve judges each field of a client's request.
func judgeSolve(b Build, tenant string, in *control.SolveRequest, session func(string) (string, error)) (*request, error) {
	for _, f := range []struct {
		name string
		bad  bool
	}{
		{"Definition", len(in.Definition.GetDef()) > 0},
		{"FrontendInputs", len(in.FrontendInputs) > 0},
		{"Frontend", in.Frontend != "" && in.Frontend != dockerfile},
		{"Entitlements", len(in.Entitlements) > 0},
		{"SourcePolicy", len(in.SourcePolicy.GetRules()) > 0},
		{"SourcePolicySession", in.SourcePolicySession != ""},
		{"EnableSessionExporter", in.EnableSessionExporter},
		{"ProxyNetwork", in.ProxyNetwork},
	} {
		if f.bad {
			return nil, denied("solve", f.name, "this value is refused", "the options of docs/engine-differences.md")
		}
	}
	r := &request{}
	cache, err := judgeCache(in.Cache)
	if err != nil {
		return nil, err
	}
	exporters := in.Exporters
	if len(exporters) == 0 && in.ExporterDeprecated != "" {
		exporters = []*control.Exporter{{Type: in.ExporterDeprecated, Attrs: in.ExporterAttrsDeprecated}}
	}
	r.out = &control.SolveRequest{Frontend: in.Frontend, Cache: cache, Internal: in.Internal, CompatibilityVersion: in.CompatibilityVersion}
	if err := r.judgeExporters(b, exporters); err != nil {
		return nil, err
	}
	a, err := judgeAttrs(b, tenant, in.FrontendAttrs, in.Frontend == "", session)
	if err != nil {
		return nil, err
	}
	r.out.FrontendAttrs, r.uploads, r.pull = a.out, a.uploads, a.pull
	r.out.Session, err = session(in.Session)
	return r, err
}

// judgeCache allows an image to carry its own cache. An import would enter the cache that
// all tenants share.
func judgeCache(in *control.CacheOptions) (*control.CacheOptions, error) {
	out := &control.CacheOptions{}
	if len(in.GetImports())+len(in.GetImportRefsDeprecated())+len(in.GetExportAttrsDeprecated()) > 0 || in.GetExportRefDeprecated() != "" {
		return nil, denied("cache", "Cache", "cache imports and exports are refused", "--cache-to type=inline")
	}
	for _, e := range in.GetExports() {
		if e.Type != "inline" || len(e.Attrs) > 0 {
			return nil, denied("cache", "Cache", "a cache export of type "+body.Shorten(e.Type)+" is refused", "--cache-to type=inline")
		}
		out.Exports = append(out.Exports, &control.CacheOptionsEntry{Type: e.Type})
	}
	return out, nil
}

const maxExporters = 8

// exporterAttrs are the attributes of each exporter that change only the form of a result.
var exporterAttrs = map[string][]string{
	"image":  {"name", "oci-mediatypes", "compression", "compression-level", "force-compression", "rewrite-timestamp", "source-date-epoch", "unpack", "store"},
	"moby":   {"name", "oci-mediatypes", "source-date-epoch", "prefer-image-digest", "unpack"},
	"docker": {"name", "tar", "oci-mediatypes", "compression", "rewrite-timestamp", "source-date-epoch"},
	"oci":    {"name", "tar", "oci-mediatypes", "compression", "rewrite-timestamp", "source-date-epoch"},
	"local":  {"source-date-epoch", "attestation-prefix", "platform-split", "mode"},
	"tar":    {"source-date-epoch", "attestation-prefix", "platform-split"},
}

var annotation = like(`annotation[-\[.].*`)

// only are attributes that may have one value.
var only = map[string]string{"store": "true", "mode": "copy"}

// judgeExporters judges where a result goes. An image gets its names after it was verified.
func (r *request) judgeExporters(b Build, in []*control.Exporter) error {
	if len(in) > maxExporters {
		return denied("outputs", "Exporters", "there are too many outputs", fmt.Sprintf("up to %d", maxExporters))
	}
	outputs := b.Rules().Outputs
	for _, e := range in {
		known := exporterAttrs[e.Type]
		kind, made := e.Type, e.Type
		if kind == "moby" || kind == "image" {
			kind, made = "image", "moby" // which keeps images without a name
		}
		if known == nil || !slices.Contains(outputs, kind) {
			return denied("outputs", "Exporters", "an output of type "+body.Shorten(e.Type)+" is refused", strings.Join(outputs, ", "))
		}
		if err := limitAttrs(e.Attrs); err != nil {
			return err
		}
		out := map[string]string{}
		for key, value := range e.Attrs {
			if !slices.Contains(known, key) && !annotation(key) || only[key] != "" && only[key] != value {
				return denied("outputs", "Exporters", fmt.Sprintf("%s=%s is refused for an output of type %s", body.Shorten(key), body.Shorten(value), e.Type), strings.Join(known, ", "))
			}
			out[key] = value
		}
		if kind == "image" {
			if r.stores { // only one could be verified
				return denied("outputs", "Exporters", "two outputs are images", "one image, with up to 16 names")
			}
			r.stores = true
			if err := r.judgeNames(b, out["name"]); err != nil {
				return err
			}
			delete(out, "name")
		}
		r.out.Exporters = append(r.out.Exporters, &control.Exporter{Type: made, Attrs: out})
	}
	return nil
}

const maxNames = 16

func (r *request) judgeNames(b Build, list string) error {
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		full, err := b.Target(name)
		if err != nil {
			return err
		}
		if r.names = append(r.names, full); len(r.names) > maxNames {
			return denied("outputs", "Exporters", "the image has too many names", fmt.Sprintf("up to %d", maxNames))
		}
	}
	return nil
}

// known returns the metadata of an operation that the engine has returned to a tenant.
type known func(op []byte) (*pb.OpMetadata, bool)

// judgeBridge judges the Solve of a client that is the frontend.
func judgeBridge(b Build, tenant string, in *gateway.SolveRequest, session func(string) (string, error), known known) (*gateway.SolveRequest, *attrs, error) {
	for _, f := range []struct {
		name string
		bad  bool
	}{
		{"Definition", len(in.Definition.GetDef()) > 0},
		{"Frontend", in.Frontend != dockerfile},
		{"CacheImports", len(in.CacheImports) > 0},
		{"SourcePolicies", len(in.SourcePolicies) > 0},
		{"Final", in.Final},
		{"ExporterAttr", len(in.ExporterAttr) > 0},
	} {
		if f.bad {
			return nil, nil, denied("solve", f.name, "this value of a frontend's Solve is refused", "the options of docs/engine-differences.md")
		}
	}
	inputs := map[string]*pb.Definition{}
	for name, def := range in.FrontendInputs {
		if inputs[name] = returned(def, known); inputs[name] == nil {
			return nil, nil, denied("solve", "FrontendInputs", "the input "+body.Shorten(name)+" isn't a result of this tenant's", "results that the engine returned")
		}
	}
	a, err := judgeAttrs(b, tenant, in.FrontendOpt, len(in.FrontendInputs) > 0, session)
	if err != nil {
		return nil, nil, err
	}
	return &gateway.SolveRequest{
		Frontend: dockerfile, FrontendOpt: a.out, FrontendInputs: inputs, Evaluate: in.Evaluate,
		AllowResultReturn: in.AllowResultReturn, AllowResultArrayRef: in.AllowResultArrayRef,
	}, a, nil
}

// returned copies a definition of known operations, or returns nil. It takes the engine's
// metadata, since a client's could lift a step's limits. Each operation must come after its
// inputs, which engines don't check. The last operation needn't be known: it only selects a
// result of the others, and resultOf encodes it anew.
func returned(def *pb.Definition, known known) *pb.Definition {
	out := &pb.Definition{Metadata: map[string]*pb.OpMetadata{}}
	before := map[string]bool{}
	for i, text := range def.GetDef() {
		var op pb.Op
		if op.Unmarshal(text) != nil || slices.ContainsFunc(op.Inputs, func(in *pb.Input) bool { return !before[in.Digest] }) {
			return nil
		}
		meta, ok := known(text)
		switch last := i == len(def.Def)-1; {
		case last:
			if text = resultOf(&op); text == nil {
				return nil
			}
		case !ok:
			return nil
		}
		digest := digestOf(text)
		if before[digest] = true; ok {
			out.Metadata[digest] = meta
		}
		out.Def = append(out.Def, text)
	}
	if len(before) == 0 {
		return nil
	}
	return out
}

// resultOf encodes the last operation of a definition anew. It returns nil unless the operation
// only selects a result. A negative index would crash the engine.
func resultOf(op *pb.Op) []byte {
	if op.Op != nil || len(op.Inputs) != 1 || op.Inputs[0].Index < 0 || hasUnknown(op.ProtoReflect()) {
		return nil
	}
	text, _ := (&pb.Op{Inputs: []*pb.Input{{Digest: op.Inputs[0].Digest, Index: op.Inputs[0].Index}}}).Marshal() // of a valid text
	return text
}
