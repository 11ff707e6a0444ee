package buildkit

import (
	"go/ast"
	gobuild "go/build"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	controlAPI = "moby.buildkit.v1."
	gatewayAPI = "moby.buildkit.v1.frontend."
	contentAPI = "containerd.services.content.v1."
)

// judgedMethods are all methods of the services that Server serves. Those after the bar are
// Unimplemented, so nobody need judge their fields.
var judgedMethods = map[string]string{
	controlAPI + "Control":                                "DiskUsage Info ListWorkers ListenBuildHistory Prune Session Solve Status UpdateBuildHistory |",
	gatewayAPI + "LLBBridge":                              "Evaluate Inputs Ping ReadDir ReadFile Return Solve StatFile Warn | ExecProcess NewContainer ReadDirContainer ReadFileContainer ReleaseContainer ResolveImageConfig ResolveSourceMeta StatFileContainer",
	contentAPI + "Content":                                "Info Read | Abort Delete List ListStatuses Status Update Write",
	"opentelemetry.proto.collector.trace.v1.TraceService": "Export |",
}

// judgedFields are the fields of all messages in the requests of those methods, and in the
// answers that Berm changes. A new one needs a judgement in this package first.
var judgedFields = map[string]string{
	controlAPI + "SolveRequest": "CompatibilityVersion Cache Definition EnableSessionExporter Entitlements ExporterAttrsDeprecated ExporterDeprecated Exporters Frontend FrontendAttrs FrontendInputs Internal " +
		"ProxyNetwork Ref Session SourcePolicy SourcePolicySession",
	controlAPI + "CacheOptions": "ExportAttrsDeprecated ExportRefDeprecated Exports ImportRefsDeprecated Imports", controlAPI + "CacheOptionsEntry": "Attrs Type", controlAPI + "Exporter": "Attrs Type",
	controlAPI + "StatusRequest": "Ref", controlAPI + "BuildHistoryRequest": "ActiveOnly EarlyExit Filter Limit Ref", controlAPI + "UpdateBuildHistoryRequest": "Delete Finalize Pinned Ref",
	controlAPI + "BytesMessage": "data", controlAPI + "InfoRequest": "", controlAPI + "ListWorkersRequest": "filter", // which are dropped, as are:
	controlAPI + "DiskUsageRequest": "ageLimit filter", controlAPI + "PruneRequest": "all filter keepDuration maxUsedSpace minFreeSpace reservedSpace",
	gatewayAPI + "SolveRequest": "CacheImports Definition Evaluate ExporterAttr Final Frontend FrontendInputs FrontendOpt SourcePolicies allowResultArrayRef allowResultReturn", gatewayAPI + "CacheOptionsEntry": "Attrs Type",
	gatewayAPI + "ReturnRequest": "error result", gatewayAPI + "Result": "attestations metadata ref refDeprecated refs refsDeprecated", // only references are read
	gatewayAPI + "Ref": "def id", gatewayAPI + "RefMap": "refs", gatewayAPI + "RefMapDeprecated": "refs", gatewayAPI + "Attestations": "attestation",
	gatewayAPI + "Attestation": "inTotoPredicateType inTotoSubjects kind metadata path ref", gatewayAPI + "InTotoSubject": "digest kind name", "google.rpc.Status": "code details message", "google.protobuf.Any": "type_url value",
	gatewayAPI + "ReadFileRequest": "FilePath MountIndex Range Ref", gatewayAPI + "FileRange": "Length Offset", gatewayAPI + "ReadDirRequest": "DirPath IncludePattern MountIndex Ref", gatewayAPI + "StatFileRequest": "MountIndex Path Ref",
	gatewayAPI + "EvaluateRequest": "Ref", gatewayAPI + "WarnRequest": "detail digest info level ranges short url", gatewayAPI + "PingRequest": "", gatewayAPI + "InputsRequest": "",
	contentAPI + "InfoRequest": "digest", contentAPI + "ReadContentRequest": "digest offset size",
	// Definitions: only those of operations that the engine returned, with its metadata.
	"pb.Definition": "Source def metadata", "pb.OpMetadata": "caps description export_cache ignore_cache linux_resources progress_group", "pb.Op": "build constraints diff exec file inputs merge passthrough platform source",
	"pb.LinuxResources": "cpuPeriod cpuQuota cpuShares cpusetCpus cpusetMems memory memorySwap", "pb.ExportCache": "Value", "pb.ProgressGroup": "id name weak", "pb.Source": "infos locations",
	"pb.SourceInfo": "data definition filename language", "pb.Locations": "locations", "pb.Location": "ranges sourceIndex", "pb.Range": "end start", "pb.Position": "character line",
	// Policies of clients are refused.
	controlAPI + "sourcepolicy.Policy": "rules version", controlAPI + "sourcepolicy.Rule": "action selector updates", controlAPI + "sourcepolicy.Selector": "constraints identifier match_type",
	controlAPI + "sourcepolicy.AttrConstraint": "condition key value", controlAPI + "sourcepolicy.Update": "attrs identifier",
	// Answers.
	controlAPI + "types.WorkerRecord": "BuildkitVersion CDIDevices GCPolicy ID Labels platforms", controlAPI + "types.BuildkitVersion": "dockerfileVersion package revision version",
	controlAPI + "BuildHistoryRecord": "CompletedAt CreatedAt Exporters ExporterResponse Frontend FrontendAttrs Generation Ref Result Results error externalError logs numCachedSteps numCompletedSteps numTotalSteps numWarnings pinned trace",
	controlAPI + "BuildResultInfo":    "Attestations ResultDeprecated Results", controlAPI + "StatusResponse": "logs statuses vertexes warnings", controlAPI + "Vertex": "cached completed digest error inputs name progressGroup started",
	controlAPI + "VertexStatus": "ID completed current name started timestamp total vertex",
}

func descriptor[D protoreflect.Descriptor](t *testing.T, name string) D {
	t.Helper()
	return check.Value(protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name)))(t).(D)
}

// sameWords fails unless a list, but for a bar, has exactly these words.
func sameWords(t *testing.T, what, list string, words []string) {
	t.Helper()
	want := strings.Fields(strings.ReplaceAll(list, "|", ""))
	for _, w := range words {
		if !slices.Contains(want, w) {
			t.Errorf("nobody has judged %s.%s", what, w)
		}
	}
	for _, w := range want {
		if !slices.Contains(words, w) {
			t.Errorf("%s.%s is judged, but isn't there", what, w)
		}
	}
}

// TestEveryFieldIsJudged fails if BuildKit's API has methods or fields that aren't in the
// tables above, so that an update of it can't widen what clients may ask for.
func TestEveryFieldIsJudged(t *testing.T) {
	seen := map[string]bool{}
	var walk func(m protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		name := string(m.FullName())
		if seen[name] {
			return
		}
		seen[name] = true
		var words []string
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			words = append(words, string(f.Name()))
			if f.IsMap() {
				f = f.MapValue()
			}
			if f.Message() != nil {
				walk(f.Message())
			}
		}
		if list, ok := judgedFields[name]; ok {
			sameWords(t, name, list, words)
		} else {
			t.Errorf("nobody has judged %s", name)
		}
	}
	for service, list := range judgedMethods {
		methods := descriptor[protoreflect.ServiceDescriptor](t, service).Methods()
		served, _, _ := strings.Cut(list, "|")
		var words []string
		for i := range methods.Len() {
			m := methods.Get(i)
			if words = append(words, string(m.Name())); slices.Contains(strings.Fields(served), string(m.Name())) && m.Name() != "Export" {
				walk(m.Input())
			}
		}
		sameWords(t, service, list, words)
	}
	for name, list := range judgedFields { // answers, and what only bytes refer to
		if !seen[name] {
			fields := descriptor[protoreflect.MessageDescriptor](t, name).Fields()
			var words []string
			for i := range fields.Len() {
				words = append(words, string(fields.Get(i).Name()))
			}
			sameWords(t, name, list, words)
		}
	}
}

// TestEveryServiceIsListed has no service beside those of the tables.
func TestEveryServiceIsListed(t *testing.T) {
	s := check.Value(New(Options{}))(t)
	defer func() { _ = s.Close() }()
	if got, want := slices.Sorted(maps.Keys(s.grpc.GetServiceInfo())), slices.Sorted(maps.Keys(judgedMethods)); !slices.Equal(got, want) {
		t.Errorf("%v\nwant %v", got, want)
	}
}

// TestEveryAttributeIsJudged fails if the Dockerfile frontend's source names an attribute
// that attrTests lacks.
func TestEveryAttributeIsJudged(t *testing.T) {
	names := map[string]bool{}
	for _, pkg := range []string{"dockerui", "dockerfile/builder"} {
		dir := check.Value(gobuild.Import("github.com/moby/buildkit/frontend/"+pkg, ".", gobuild.FindOnly))(t).Dir
		files := check.Value(filepath.Glob(filepath.Join(dir, "*.go")))(t)
		for _, file := range files {
			ast.Inspect(check.Value(parser.ParseFile(token.NewFileSet(), file, nil, 0))(t), func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.ValueSpec: // keyTarget = "target"
					for i, id := range n.Names {
						if lower := strings.ToLower(id.Name); i < len(n.Values) && (strings.HasPrefix(lower, "key") || strings.HasSuffix(lower, "prefix")) {
							note(names, n.Values[i])
						}
					}
				case *ast.IndexExpr: // opts["cmdline"]
					if x, ok := n.X.(*ast.Ident); ok && x.Name == "opts" {
						note(names, n.Index)
					} else if x, ok := n.X.(*ast.SelectorExpr); ok && x.Sel.Name == "Opts" {
						note(names, n.Index)
					}
				}
				return true
			})
		}
	}
	if len(names) < 35 {
		t.Errorf("only %v", names)
	}
	for name := range names {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(attrTests)), func(key string) bool {
			return key == name || strings.HasSuffix(name, ":") && strings.HasPrefix(key, name)
		}) {
			t.Errorf("nobody has judged the attribute %s", name)
		}
	}
}

// note notes a literal, or that at the start of a sum.
func note(names map[string]bool, x ast.Expr) {
	if sum, ok := x.(*ast.BinaryExpr); ok {
		x = sum.X
	}
	if lit, ok := x.(*ast.BasicLit); ok && lit.Kind == token.STRING {
		if name, err := strconv.Unquote(lit.Value); err == nil {
			names[name] = true
		}
	}
}
