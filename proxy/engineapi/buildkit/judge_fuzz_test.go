package buildkit

import (
	"maps"
	"slices"
	"strings"
	"testing"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	spb "github.com/moby/buildkit/sourcepolicy/pb"
	"google.golang.org/protobuf/proto"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// decoded reads a message as the gRPC server does. It returns false for one that Berm
// refuses for its fields, and fails if an unknown field passed.
func decoded(t *testing.T, data []byte, m proto.Message) bool {
	t.Helper()
	if proto.Unmarshal(data, m) != nil {
		return false
	}
	if strict(m) != nil {
		return false
	}
	known := m.ProtoReflect().New().Interface()
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, known); err != nil || proto.Size(m) != proto.Size(known) {
		t.Errorf("an unknown field passes: %v", m)
	}
	return true
}

// neverAttrs are attributes of which attrTests allow no value.
func neverAttrs() (keys []string) {
	for key, values := range attrTests {
		if !slices.ContainsFunc(values, func(v string) bool { return !strings.HasPrefix(v, "!") }) {
			keys = append(keys, key)
		}
	}
	return keys
}

// checkAttrs fails unless attributes are within what may reach the engine.
func checkAttrs(t *testing.T, out map[string]string, never []string) {
	t.Helper()
	set := check.Value(judgeAttrs(newJudging(), "t", nil, false, ownSession))(t).out
	size := 0
	for key, value := range out {
		size += len(key) + len(value)
		mine, ours := set[key]
		switch name, _, _ := strings.Cut(key, ":"); {
		case ours && value != mine:
			t.Errorf("%s=%s isn't Berm's", key, value)
		case ours:
		case slices.Contains(never, key) && name != "input-metadata":
			t.Errorf("%s=%s passes", key, value)
		case name == "local-sessionid" && value != "engines":
			t.Errorf("%s=%s is no session of the tenant's", key, value)
		case key == "attest:provenance" && strings.Contains(value, "max"):
			t.Errorf("%s=%s", key, value)
		case strings.HasPrefix(strings.ToUpper(key), "BUILD-ARG:BUILDKIT_") && ownArgs[strings.TrimPrefix(key, "build-arg:")] == nil:
			t.Errorf("%s=%s passes", key, value)
		}
	}
	for key := range set {
		if _, ok := out[key]; !ok {
			t.Errorf("%s is missing", key)
		}
	}
	if size > maxAllBytes+4096 || len(out) > maxAttrs+len(set) {
		t.Errorf("%d attributes of %d bytes", len(out), size)
	}
}

// FuzzJudgeSolve has nothing of a client's Solve pass but what was judged.
func FuzzJudgeSolve(f *testing.F) {
	seeds := []*control.SolveRequest{
		{Definition: raw()}, {FrontendInputs: map[string]*pb.Definition{"x": raw()}}, {Entitlements: []string{"network.host"}}, {SourcePolicy: &spb.Policy{Rules: []*spb.Rule{{}}}}, {SourcePolicySession: "own"},
		{EnableSessionExporter: true}, {ProxyNetwork: true}, {Session: "other"}, {Cache: &control.CacheOptions{Imports: []*control.CacheOptionsEntry{{Type: "inline"}}}}, {Internal: true},
		{ExporterDeprecated: "moby", ExporterAttrsDeprecated: map[string]string{"name": "mine/a"}},
		{Exporters: []*control.Exporter{{Type: "image", Attrs: map[string]string{"name": "mine/a,mine/b", "push": "true"}}, {Type: "local"}}},
	}
	for key, values := range attrTests {
		for _, v := range values {
			seeds = append(seeds, &control.SolveRequest{FrontendAttrs: map[string]string{key: strings.TrimPrefix(v, "!")}})
		}
	}
	for _, s := range seeds {
		s.Frontend = dockerfile
		if s.Session == "" {
			s.Session = "own"
		}
		data := check.Value(proto.Marshal(s))(f)
		f.Add(data)
		f.Add(append(data, 0xf8, 0x7f, 1))
	}
	never := neverAttrs()
	f.Fuzz(func(t *testing.T, data []byte) {
		var in control.SolveRequest
		if !decoded(t, data, &in) {
			return
		}
		r, err := judgeSolve(newJudging(), "t", &in, ownSession)
		if err != nil {
			return
		}
		o := r.out
		if o.Ref != "" || o.Definition != nil || o.FrontendInputs != nil || o.Entitlements != nil || o.SourcePolicy != nil || o.SourcePolicySession != "" || o.EnableSessionExporter || o.ProxyNetwork ||
			o.Session != "engines" || o.ExporterDeprecated != "" || o.ExporterAttrsDeprecated != nil || o.Frontend != "" && o.Frontend != dockerfile || hasUnknown(o.ProtoReflect()) {
			t.Errorf("passes: %v", o)
		}
		c := o.Cache
		if c == nil || c.Imports != nil || c.ImportRefsDeprecated != nil || c.ExportRefDeprecated != "" || c.ExportAttrsDeprecated != nil {
			t.Errorf("cache: %v", c)
		}
		for _, e := range c.GetExports() {
			if e.Type != "inline" || len(e.Attrs) > 0 {
				t.Errorf("cache: %v", e)
			}
		}
		stores := 0
		for _, e := range o.Exporters {
			if !slices.Contains([]string{"image", "moby", "docker", "oci", "local", "tar"}, e.Type) {
				t.Errorf("exporter: %v", e)
			}
			image := e.Type == "image" || e.Type == "moby"
			if image {
				stores++
			}
			for key := range e.Attrs {
				if strings.Contains(strings.ToLower(key), "push") && !annotation(key) || key == "name" && image || key == "dest" || key == "name-canonical" {
					t.Errorf("exporter: %v", e)
				}
			}
		}
		if stores > 1 || (stores == 1) != r.stores || len(r.names) > maxNames || len(o.Exporters) > maxExporters {
			t.Errorf("%d images, %+v", stores, r)
		}
		for _, name := range r.names {
			if !strings.HasPrefix(name, "docker.io/mine/") {
				t.Error(name)
			}
		}
		checkAttrs(t, o.FrontendAttrs, never)
	})
}

// FuzzJudgeBridge has nothing of a frontend's Solve pass but what was judged.
func FuzzJudgeBridge(f *testing.F) {
	op, limits := source(image+PinHost+"x:1"), &pb.OpMetadata{LinuxResources: &pb.LinuxResources{Memory: 1}}
	known := func(b []byte) (*pb.OpMetadata, bool) { return limits, string(b) == string(op) }
	inputs := map[string]*pb.Definition{"x": {Def: [][]byte{op, lastOp(op)}, Metadata: map[string]*pb.OpMetadata{digestOf(op): {}}}}
	for _, s := range []*gateway.SolveRequest{
		{}, {Definition: raw()}, {FrontendInputs: inputs}, {FrontendInputs: map[string]*pb.Definition{"x": raw()}}, {Final: true}, {ExporterAttr: []byte("{}")}, {CacheImports: []*gateway.CacheOptionsEntry{{}}},
		{SourcePolicies: []*spb.Policy{{}}}, {FrontendOpt: map[string]string{"context:x": "input:x", "input-metadata:x": "{}"}, FrontendInputs: inputs}, {FrontendOpt: map[string]string{"local-sessionid:x": "own", "memory": "1"}},
	} {
		s.Frontend = dockerfile
		f.Add(check.Value(proto.Marshal(s))(f))
	}
	never := neverAttrs()
	f.Fuzz(func(t *testing.T, data []byte) {
		var in gateway.SolveRequest
		if !decoded(t, data, &in) {
			return
		}
		o, _, err := judgeBridge(newJudging(), "t", &in, ownSession, known)
		if err != nil {
			return
		}
		if o.Definition != nil || o.Frontend != dockerfile || o.CacheImports != nil || o.SourcePolicies != nil || o.Final || o.ExporterAttr != nil || hasUnknown(o.ProtoReflect()) {
			t.Errorf("passes: %v", o)
		}
		for _, def := range o.FrontendInputs {
			for i, b := range def.Def {
				if _, ok := known(b); !ok && (i != len(def.Def)-1 || (&pb.Op{}).Unmarshal(b) != nil) {
					t.Errorf("passes: %v", def)
				}
			}
			for m := range maps.Values(def.Metadata) {
				if m != limits {
					t.Errorf("passes: %v", m)
				}
			}
			if def.Source != nil {
				t.Errorf("passes: %v", def.Source)
			}
		}
		checkAttrs(t, o.FrontendOpt, never)
	})
}
