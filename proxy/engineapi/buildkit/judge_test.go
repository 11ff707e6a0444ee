package buildkit

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	spb "github.com/moby/buildkit/sourcepolicy/pb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const owner = "berm.owner"

func someRules() policy.BuildKit {
	return policy.BuildKit{Enabled: true, Network: "none", Outputs: []string{"image", "local", "tar", "docker", "oci"}, Secrets: true, SSH: true, Provenance: "min", Cache: "tenant"}
}

// judging is a Build that only judges.
type judging struct {
	Build
	rules  policy.BuildKit
	limits map[string]string
}

func newJudging() *judging {
	return &judging{rules: someRules(), limits: map[string]string{
		"shm-size": "67108864", "force-network-mode": "none", "cgroup-parent": "/builds", "memory": "1", "memswap": "1", "cpuperiod": "2", "cpuquota": "3",
	}}
}

func (j *judging) Rules() policy.BuildKit { return j.rules }

func (j *judging) Limits() (map[string]string, error) { return maps.Clone(j.limits), nil }

func (j *judging) Args(args map[string]string) (map[string]string, error) {
	if _, ok := args["ADMIN"]; ok {
		return nil, denied("args", "ADMIN", "refused", "")
	}
	return args, nil
}

func (j *judging) Labels(own map[string]string) (map[string]string, error) {
	for name := range own {
		if strings.EqualFold(name, owner) {
			return nil, denied("labels", name, "refused", "")
		}
	}
	own[owner] = "me"
	return own, nil
}

func (j *judging) Target(name string) (string, error) {
	if !strings.HasPrefix(name, "mine/") {
		return "", denied("tags", name, "refused", "")
	}
	return "docker.io/" + name, nil
}

// ownSession knows the session "own" only.
func ownSession(id string) (string, error) {
	if id == "own" {
		return "engines", nil
	}
	return "", status.Error(codes.NotFound, "no such session")
}

func refused(err error) bool {
	_, ok := errors.AsType[*policy.DeniedError](err)
	return ok
}

// bytesOf is a text of that many bytes.
func bytesOf(n int) string { return strings.Repeat("x", n) }

func source(id string) []byte {
	b, _ := (&pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: id}}}).Marshal()
	return b
}

// lastOp says which operation is the result.
func lastOp(of []byte) []byte {
	b, _ := (&pb.Op{Inputs: []*pb.Input{{Digest: digestOf(of)}}}).Marshal()
	return b
}

func raw() *pb.Definition {
	op := source("docker-image://busybox")
	return &pb.Definition{Def: [][]byte{op, lastOp(op)}}
}

func TestJudgeSolve(t *testing.T) {
	entry := func(kind string, attrs ...string) *control.CacheOptionsEntry {
		e := &control.CacheOptionsEntry{Type: kind}
		for _, a := range attrs {
			e.Attrs = map[string]string{a: "x"}
		}
		return e
	}
	imports := []*control.CacheOptionsEntry{entry("inline")}
	for name, change := range map[string]func(*control.SolveRequest){
		"definition":              func(r *control.SolveRequest) { r.Definition = raw() },
		"definition, no frontend": func(r *control.SolveRequest) { r.Definition, r.Frontend = raw(), "" },
		"inputs":                  func(r *control.SolveRequest) { r.FrontendInputs = map[string]*pb.Definition{"x": raw()} },
		"inputs, empty":           func(r *control.SolveRequest) { r.FrontendInputs = map[string]*pb.Definition{"x": {}} },
		"gateway":                 func(r *control.SolveRequest) { r.Frontend = "gateway.v0" },
		"frontend's case":         func(r *control.SolveRequest) { r.Frontend = "Dockerfile.v0" },
		"entitlement":             func(r *control.SolveRequest) { r.Entitlements = []string{"network.host"} },
		"source policy":           func(r *control.SolveRequest) { r.SourcePolicy = &spb.Policy{Rules: []*spb.Rule{{}}} },
		"policy session":          func(r *control.SolveRequest) { r.SourcePolicySession = "own" },
		"session exporter":        func(r *control.SolveRequest) { r.EnableSessionExporter = true },
		"proxy network":           func(r *control.SolveRequest) { r.ProxyNetwork = true },
		"another's session":       func(r *control.SolveRequest) { r.Session = "other" },
		"no session":              func(r *control.SolveRequest) { r.Session = "" },
		"session with prefix":     func(r *control.SolveRequest) { r.Session = "p:own" },
		"cache import":            func(r *control.SolveRequest) { r.Cache = &control.CacheOptions{Imports: imports} },
		"cache import, old":       func(r *control.SolveRequest) { r.Cache = &control.CacheOptions{ImportRefsDeprecated: []string{"a"}} },
		"cache export, old":       func(r *control.SolveRequest) { r.Cache = &control.CacheOptions{ExportRefDeprecated: "a"} },
		"cache attrs, old": func(r *control.SolveRequest) {
			r.Cache = &control.CacheOptions{ExportAttrsDeprecated: map[string]string{"a": "b"}}
		},
		"cache to registry": func(r *control.SolveRequest) {
			r.Cache = &control.CacheOptions{Exports: []*control.CacheOptionsEntry{entry("registry", "ref")}}
		},
		"other cache": func(r *control.SolveRequest) {
			r.Cache = &control.CacheOptions{Exports: []*control.CacheOptionsEntry{entry("gha")}}
		},
		"inline cache's ref": func(r *control.SolveRequest) {
			r.Cache = &control.CacheOptions{Exports: []*control.CacheOptionsEntry{entry("inline", "ref")}}
		},
		"old exporter": func(r *control.SolveRequest) { r.ExporterDeprecated = "registry" },
		"old exporter's attribute": func(r *control.SolveRequest) {
			r.ExporterDeprecated, r.ExporterAttrsDeprecated = "image", map[string]string{"push": "true"}
		},
		"attribute": func(r *control.SolveRequest) { r.FrontendAttrs = map[string]string{"source": "x"} },
		"input":     func(r *control.SolveRequest) { r.FrontendAttrs = map[string]string{"context:x": "input:y"} },
	} {
		in := &control.SolveRequest{Frontend: dockerfile, Session: "own"}
		change(in)
		if r, err := judgeSolve(newJudging(), "t", in, ownSession); !refused(err) && status.Code(err) != codes.NotFound {
			t.Errorf("%s: %v, %v", name, r, err)
		}
	}

	in := &control.SolveRequest{
		Ref: "abcdefgh", Frontend: dockerfile, Session: "own", Internal: true, CompatibilityVersion: 20, Definition: &pb.Definition{Metadata: map[string]*pb.OpMetadata{"a": {}}},
		SourcePolicy: &spb.Policy{Version: 1}, Cache: &control.CacheOptions{Exports: []*control.CacheOptionsEntry{entry("inline")}},
		ExporterDeprecated: "moby", ExporterAttrsDeprecated: map[string]string{"name": "mine/a,,mine/b:1", "unpack": "true"},
	}
	r := check.Value(judgeSolve(newJudging(), "t", in, ownSession))(t)
	if len(r.out.FrontendAttrs) == 0 {
		t.Error("nothing is set")
	}
	r.out.FrontendAttrs = nil
	want := &control.SolveRequest{
		Frontend: dockerfile, Session: "engines", Internal: true, CompatibilityVersion: 20, Cache: &control.CacheOptions{Exports: []*control.CacheOptionsEntry{entry("inline")}},
		Exporters: []*control.Exporter{{Type: "moby", Attrs: map[string]string{"unpack": "true"}}},
	}
	if !proto.Equal(r.out, want) || !r.stores || !slices.Equal(r.names, []string{"docker.io/mine/a", "docker.io/mine/b:1"}) {
		t.Errorf("%+v", r)
	}
	in.Exporters = []*control.Exporter{{Type: "local"}} // the deprecated pair isn't appended, as by the engine
	if r := check.Value(judgeSolve(newJudging(), "t", in, ownSession))(t); len(r.out.Exporters) != 1 || r.stores || r.names != nil {
		t.Errorf("%+v", r)
	}
	in.Frontend = "" // the client is the frontend, and may have results of other builds
	in.FrontendAttrs = map[string]string{"context:x": "input:y"}
	check.Value(judgeSolve(newJudging(), "t", in, ownSession))(t)
}

func TestJudgeExporters(t *testing.T) {
	for _, tt := range []struct {
		kind, key, value string
		ok               bool
	}{
		{kind: "moby", ok: true}, {kind: "image", ok: true}, {kind: "docker", ok: true}, {kind: "oci", ok: true}, {kind: "local", ok: true}, {kind: "tar", ok: true},
		{kind: ""}, {kind: "registry"}, {kind: "cacheonly"}, {kind: "Image"}, {kind: "containerd"},
		{"image", "name", "mine/a", true}, {"image", "name", "busybox", false}, {"moby", "name", "mine/a,busybox", false}, {"image", "name", "mine/a," + PinHost + "x", false},
		{"image", "store", "true", true}, {"image", "store", "false", false}, {"image", "push", "true", false}, {"image", "push", "false", false}, {"image", "push-by-digest", "true", false},
		{"image", "Push", "true", false}, {"image", "registry.insecure", "true", false}, {"image", "dangling-name-prefix", "x", false}, {"image", "name-canonical", "true", false},
		{"image", "unpack", "true", true}, {"image", "compression", "zstd", true}, {"image", "compression-level", "3", true}, {"image", "force-compression", "true", true},
		{"image", "oci-mediatypes", "true", true}, {"image", "rewrite-timestamp", "true", true}, {"image", "source-date-epoch", "1", true}, {"image", "annotation.a", "b", true},
		{"image", "annotation-manifest[linux/amd64].a", "b", true}, {"image", "annotations", "b", false}, {"image", "attest:sbom", "", false},
		{"moby", "prefer-image-digest", "true", true}, {"moby", "store", "true", false}, {"docker", "name", "busybox", true}, {"docker", "tar", "true", true}, {"docker", "dest", "/etc", false},
		{"oci", "tar", "false", true}, {"oci", "push", "true", false}, {"local", "mode", "copy", true}, {"local", "mode", "delete", false}, {"local", "dest", "/etc", false},
		{"local", "platform-split", "true", true}, {"tar", "attestation-prefix", "x", true}, {"tar", "mode", "copy", false}, {"image", "compression", bytesOf(maxAttrBytes), false},
	} {
		e := &control.Exporter{Type: tt.kind}
		if tt.key != "" {
			e.Attrs = map[string]string{tt.key: tt.value}
		}
		r := &request{out: &control.SolveRequest{}}
		err := r.judgeExporters(newJudging(), []*control.Exporter{e})
		if tt.ok != (err == nil) || err != nil && !refused(err) {
			t.Errorf("%+v: %v", tt, err)
		}
		if stores := tt.kind == "image" || tt.kind == "moby"; err == nil && (r.stores != stores || (r.out.Exporters[0].Attrs["name"] != "") != (!stores && tt.key == "name")) {
			t.Errorf("%+v: %+v", tt, r)
		}
	}
	for _, kind := range []string{"image", "moby", "local", "registry"} {
		j := newJudging()
		j.rules.Outputs = []string{"tar", "registry"}
		if err := (&request{out: &control.SolveRequest{}}).judgeExporters(j, []*control.Exporter{{Type: kind}}); !refused(err) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	for n, list := range map[int][]*control.Exporter{ // the most, and one more
		maxExporters: slices.Repeat([]*control.Exporter{{Type: "local"}}, maxExporters+1),
		maxNames:     {{Type: "image", Attrs: map[string]string{"name": strings.TrimSuffix(strings.Repeat("mine/a,", maxNames+1), ",")}}},
		1:            {{Type: "image"}, {Type: "moby"}},
	} {
		if err := (&request{out: &control.SolveRequest{}}).judgeExporters(newJudging(), list); !refused(err) {
			t.Errorf("more than %d: %v", n, err)
		}
		if len(list) == 1 {
			list[0].Attrs["name"] = strings.TrimSuffix(list[0].Attrs["name"], ",mine/a")
		} else {
			list = list[1:]
		}
		if err := (&request{out: &control.SolveRequest{}}).judgeExporters(newJudging(), list); err != nil {
			t.Errorf("%d: %v", n, err)
		}
	}
}

// attrTests are attributes of a client's; a value that starts with "!" is refused.
var attrTests = map[string][]string{
	"filename": {"Dockerfile", "a/b", "..a", "!", "!/etc/passwd", "!../x", "!a/../b"}, "target": {"x", "a-b.c", "!", "!a b", "!a\n"},
	"platform": {"", "linux/amd64", "linux/arm/v7", "!linux/amd64,linux/arm64", "!linux/a/b/c"}, "multi-platform": {"", "false", "!true", "!1"},
	"no-cache": {"", "a,b", "!a b"}, "contextkey": {"context", "!"}, "dockerfilekey": {"dockerfile", "!a:b"},
	"requestid": {"", "frontend.lint", "frontend.outline", "frontend.targets", "frontend.subrequests.describe", "!frontend.other", "!frontend.lintx"},
	"context":   {"http://buildkit-session/abc", "https://buildkit-session/abc", "!http://buildkit-session/", "!http://buildkit-session/a/b", "!http://buildkit-session.evil/a", "!https://x/y.tar", "!git://x", "!", "!xhttp://buildkit-session/a"},
	"context:x": {"local:x", "docker-image://busybox:1", "docker-image://busybox@sha256:0", "!docker-image://a b", `!docker-image://a"`, "!oci-layout://x", "!https://x/a.git", "!target:x", "!", "!local:", "!input:x"},
	// Named contexts also stand for images.
	"context:docker.io/library/busybox:latest": {"docker-image://x"}, "context:x::linux/amd64": {"local:x"}, "input-metadata:x": {"!{}"},
	"local-sessionid:context": {"own", "!other", "!", "!p:own"}, "vcs:source": {"https://x"}, "vcs:revision": {"abc"}, "sharedkey:localdir:x": {"k"},
	"label:a": {"b", ""}, "label:" + owner: {"!me"}, "label:BERM.owner": {"!me"},
	"build-arg:A": {"b", ""}, "build-arg:HTTP_PROXY": {"x"}, "build-arg:SOURCE_DATE_EPOCH": {"1"}, "build-arg:ADMIN": {"!x"}, "build-arg:": {"!x"}, "build-arg:a:b": {"!x"}, "build-arg:a b": {"!x"},
	"build-arg:BUILDKIT_INLINE_CACHE": {"1", "!2"}, "build-arg:BUILDKIT_CONTEXT_KEEP_GIT_DIR": {"true", "!x"}, "build-arg:BUILDKIT_DOCKERFILE_CHECK": {"skip=all;error=true", "!$"},
	"build-arg:BUILDKIT_BUILD_NAME": {"x", "!a\nb"}, "build-arg:BUILDKIT_MULTI_PLATFORM": {"0", "false", "", "!1", "!true"},
	"build-arg:BUILDKIT_SYNTAX": {"!x"}, "build-arg:BUILDKIT_SANDBOX_HOSTNAME": {"!x"}, "build-arg:BUILDKIT_CACHE_MOUNT_NS": {"!x"}, "build-arg:BUILDKIT_ATTEST_SBOM": {"!"}, "build-arg:BUILDKIT_ATTEST_PROVENANCE": {"!mode=max"},
	"build-arg:BUILDKIT_GIT_ADVICE": {"!1"}, "build-arg:BUILDKIT_DISABLE_FILEOP": {"!1"}, "build-arg:BUILDKIT_NEW": {"!1"}, "build-arg:buildkit_syntax": {"!x"},
	"attest:provenance": {"mode=min", "type=provenance,mode=min,inline-only=true,version=v1", "disabled=true", "mode=min,inline-only=false", "!mode=max", "!mode=full", "!mode=min,builder-id=x", "!builder-id=x", "!reproducible=true", "!mode=min,mode=max", `!"mode=max"`, "!capture-usage=true"},
	"attest:sbom":       {"!", "!generator=x"}, "attest:other": {"!"}, "Attest:provenance": {"!"},
	"frontend.caps": {"moby.buildkit.frontend.inputs+forward,other"}, "image-resolve-mode": {"pull", "local", "default", "", "!other"}, "force-network-mode": {"none", "default", "", "!host", "!sandbox"},
	"cgroup-parent": {"!x"}, "hostname": {"!x"}, "add-hosts": {"!x=1.2.3.4"}, "ulimit": {"!nofile=1"}, "shm-size": {"!1"}, "memory": {"!1"}, "memswap": {"!1"}, "cpushares": {"!1"}, "cpuperiod": {"!1"}, "cpuquota": {"!1"},
	"cpusetcpus": {"!0"}, "cpusetmems": {"!0"}, "device": {"!x"}, "source": {"!x"}, "cmdline": {"!x"}, "cache-from": {"!x", "!"}, "cache-imports": {"![]"}, "contextsubdir": {"!x"}, "override-copy-image": {"!x"},
	"Filename": {"!Dockerfile"}, "": {"!"}, "gateway-sourcemap": {"!1"}, "entitlements": {"!x"}, "target:x": {"!x"},
}

func TestJudgeAttrs(t *testing.T) {
	for key, values := range attrTests {
		for _, value := range values {
			value, bad := strings.CutPrefix(value, "!")
			a, err := judgeAttrs(newJudging(), "t", map[string]string{key: value}, false, ownSession)
			if bad == (err == nil) || err != nil && !refused(err) && status.Code(err) != codes.NotFound {
				t.Errorf("%s=%s: %v, %v", key, value, a, err)
			}
		}
	}
	same := func(v string) string { return v }
	for key, values := range map[string]func(string) string{
		"vcs:source": same, "no-cache": same, "label:a": same, "build-arg:A": same, "context": same, "context:x": same, "attest:provenance": same,
		"local-sessionid:context": func(string) string { return "engines" }, "image-resolve-mode": func(string) string { return "local" },
		"frontend.caps": func(string) string { return "moby.buildkit.frontend.inputs" },
	} {
		a := check.Value(judgeAttrs(newJudging(), "t", map[string]string{key: attrTests[key][0]}, false, ownSession))(t)
		if want := values(attrTests[key][0]); a.out[key] != want || a.pull != (key == "image-resolve-mode") || (len(a.uploads) == 1) != (key == "context") {
			t.Errorf("%s: %+v", key, a)
		}
	}
	for key, value := range map[string]string{"input-metadata:x": "{}", "context:x": "input:y"} {
		check.Value(judgeAttrs(newJudging(), "t", map[string]string{key: value}, true, ownSession))(t)
	}

	many := map[string]string{}
	for i := range maxAttrs + 1 {
		many[fmt.Sprintf("vcs:%d", i)] = ""
	}
	large := map[string]string{}
	for i := range maxAllBytes / (maxAttrBytes / 2) {
		large[fmt.Sprintf("vcs:%d", i)] = bytesOf(maxAttrBytes / 2)
	}
	for name, in := range map[string]map[string]string{"number": many, "all bytes": large, "bytes": {"vcs:x": bytesOf(maxAttrBytes)}} {
		if _, err := judgeAttrs(newJudging(), "t", in, false, ownSession); !refused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSetAttrs has Berm's attributes win over all that a client asks for.
func TestSetAttrs(t *testing.T) {
	judge := func(tenant string, j *judging, in map[string]string) map[string]string {
		t.Helper()
		return check.Value(judgeAttrs(j, tenant, in, false, ownSession))(t).out
	}
	j := newJudging()
	base := judge("t", j, nil)
	want := maps.Clone(j.limits)
	maps.Copy(want, map[string]string{
		"label:" + owner: "me", "image-resolve-mode": "local", "cmdline": "built-in",
		"hostname": base["hostname"], "build-arg:BUILDKIT_CACHE_MOUNT_NS": base["build-arg:BUILDKIT_CACHE_MOUNT_NS"],
	})
	if !maps.Equal(base, want) {
		t.Errorf("%v\nwant %v", base, want)
	}
	for _, key := range []string{"hostname", "build-arg:BUILDKIT_CACHE_MOUNT_NS"} {
		if base[key] != judge("t", j, nil)[key] || base[key] == judge("u", j, nil)[key] || len(base[key]) < 16 || strings.Contains(base[key], "/") {
			t.Errorf("%s=%s", key, base[key])
		}
	}

	delete(j.limits, "force-network-mode") // the policy allows a network
	for asked, want := range map[string]string{"none": "none", "default": "", "": ""} {
		if got := judge("t", j, map[string]string{"force-network-mode": asked})["force-network-mode"]; got != want {
			t.Errorf("network %q: %q", asked, got)
		}
	}
	if got := judge("t", newJudging(), map[string]string{"force-network-mode": "default"})["force-network-mode"]; got != "none" {
		t.Errorf("network %q", got)
	}
	j.rules.Cache = "off"
	if v, ok := judge("t", j, map[string]string{"no-cache": "a"})["no-cache"]; v != "" || !ok {
		t.Errorf("no-cache=%s, %v", v, ok)
	}

	// Without a mode, BuildKit's provenance is max.
	for rule, values := range map[string]map[string]string{
		"max": {"mode=max": "mode=max", "": "", "mode=min": "mode=min"},
		"min": {"": "mode=min", "type=provenance,inline-only=true": "type=provenance,inline-only=true,mode=min", "mode=min": "mode=min", "version=v1,": "version=v1,mode=min"},
		"off": {"mode=min": "", "disabled=true": ""},
	} {
		for asked, want := range values {
			j.rules.Provenance = rule
			if got, ok := judge("t", j, map[string]string{"attest:provenance": asked})["attest:provenance"]; got != want || ok != (rule != "off") {
				t.Errorf("%s: %q is %q, %v", rule, asked, got, ok)
			}
		}
	}
}

func TestJudgeBridge(t *testing.T) {
	op := source("docker-image://berm.invalid/p/x:1")
	limits := &pb.OpMetadata{LinuxResources: &pb.LinuxResources{Memory: 1}}
	known := func(b []byte) (*pb.OpMetadata, bool) { return limits, string(b) == string(op) }
	inputs := map[string]*pb.Definition{"x": {Def: [][]byte{op, lastOp(op)}}}
	for name, change := range map[string]func(*gateway.SolveRequest){
		"definition":    func(r *gateway.SolveRequest) { r.Definition = raw() },
		"no frontend":   func(r *gateway.SolveRequest) { r.Frontend = "" },
		"gateway":       func(r *gateway.SolveRequest) { r.Frontend = "gateway.v0" },
		"cache import":  func(r *gateway.SolveRequest) { r.CacheImports = []*gateway.CacheOptionsEntry{{Type: "inline"}} },
		"source policy": func(r *gateway.SolveRequest) { r.SourcePolicies = []*spb.Policy{{}} },
		"final":         func(r *gateway.SolveRequest) { r.Final = true },
		"exporter":      func(r *gateway.SolveRequest) { r.ExporterAttr = []byte("{}") },
		"input":         func(r *gateway.SolveRequest) { r.FrontendInputs = map[string]*pb.Definition{"x": raw()} },
		"second input":  func(r *gateway.SolveRequest) { r.FrontendInputs["y"] = raw() },
		"attribute":     func(r *gateway.SolveRequest) { r.FrontendOpt = map[string]string{"cgroup-parent": "/"} },
		"session":       func(r *gateway.SolveRequest) { r.FrontendOpt = map[string]string{"local-sessionid:context": "other"} },
		"no inputs": func(r *gateway.SolveRequest) {
			r.FrontendOpt, r.FrontendInputs = map[string]string{"context:x": "input:x"}, nil
		},
	} {
		in := &gateway.SolveRequest{Frontend: dockerfile, FrontendInputs: maps.Clone(inputs)}
		change(in)
		if out, _, err := judgeBridge(newJudging(), "t", in, ownSession, known); !refused(err) && status.Code(err) != codes.NotFound {
			t.Errorf("%s: %v, %v", name, out, err)
		}
	}
	inputs["x"].Metadata = map[string]*pb.OpMetadata{digestOf(op): {IgnoreCache: true}} // lifts the limits
	inputs["x"].Source = &pb.Source{}
	in := &gateway.SolveRequest{
		Frontend: dockerfile, FrontendInputs: inputs, FrontendOpt: map[string]string{"context:x": "input:x", "image-resolve-mode": "pull"},
		Evaluate: true, AllowResultReturn: true, AllowResultArrayRef: true,
	}
	out, a, err := judgeBridge(newJudging(), "t", in, ownSession, known)
	if err != nil || !a.pull || out.FrontendOpt["cmdline"] == "" || out.FrontendOpt["label:"+owner] != "me" {
		t.Fatal(out, err)
	}
	out.FrontendOpt, in.FrontendOpt = nil, nil
	in.FrontendInputs["x"].Metadata[digestOf(op)], in.FrontendInputs["x"].Source = limits, nil
	if !proto.Equal(out, in) {
		t.Error(out)
	}
}

func TestHasUnknown(t *testing.T) {
	odd := func(m proto.Message) { m.ProtoReflect().SetUnknown([]byte{0xf8, 0x7f, 1}) }
	exporter, entry, op, status, val := &control.Exporter{}, &control.CacheOptionsEntry{}, &pb.Definition{}, &gateway.Ref{}, &structpb.Value{}
	for _, m := range []proto.Message{exporter, entry, op, status, val} {
		odd(m)
	}
	top := &control.StatusRequest{Ref: "x"}
	odd(top)
	for name, m := range map[string]proto.Message{
		"top": top, "list": &control.SolveRequest{Exporters: []*control.Exporter{{}, exporter, {}}}, "message": &control.SolveRequest{Cache: &control.CacheOptions{Exports: []*control.CacheOptionsEntry{entry}}},
		"map": &control.SolveRequest{FrontendInputs: map[string]*pb.Definition{"a": {}, "b": op, "c": {}}}, "oneof": &gateway.ReturnRequest{Result: &gateway.Result{Result: &gateway.Result_Ref{Ref: status}}},
	} {
		if !hasUnknown(m.ProtoReflect()) || !refused(strict(m)) {
			t.Errorf("%s: passed", name)
		}
	}
	if m := (&control.SolveRequest{Ref: "a", FrontendAttrs: map[string]string{"a": "b"}, FrontendInputs: map[string]*pb.Definition{"a": {}}, Exporters: []*control.Exporter{{}}}); strict(m) != nil {
		t.Error("a known field is refused")
	}
}
