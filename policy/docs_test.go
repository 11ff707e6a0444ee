package policy

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v3"
)

func readDocs(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../docs/policy.md")
	must(t, err)
	return string(data)
}

// The rules of the code are those of the docs.
func TestDocsListTheRules(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "rules.go", nil, 0)
	must(t, err)
	var code, docs []string
	ast.Inspect(f, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok && strings.HasPrefix(spec.Names[0].Name, "rule") {
			lit, ok := spec.Values[0].(*ast.BasicLit)
			if !ok {
				t.Fatalf("%s is no literal", spec.Names[0])
			}
			rule, err := strconv.Unquote(lit.Value)
			must(t, err)
			code = append(code, rule)
		}
		return true
	})
	_, rules, _ := strings.Cut(readDocs(t), "\n## Rules\n")
	for _, m := range regexp.MustCompile("(?m)^- `([^`]+)`").FindAllStringSubmatch(rules, -1) {
		docs = append(docs, m[1])
	}
	slices.Sort(code)
	slices.Sort(docs)
	if d := cmp.Diff(code, docs); d != "" || len(code) == 0 {
		t.Error(d)
	}
}

// docs/policy.yaml has every key, and is the built-in policy.
func TestDocsHaveEveryKey(t *testing.T) {
	data, err := os.ReadFile("../docs/policy.yaml")
	must(t, err)
	if !bytes.Contains(data, []byte("\n    # extends: ")) { // no built-in profile may have it
		t.Error("extends is missing")
	}
	var docs map[string]any
	must(t, yaml.Unmarshal(data, &docs))
	for path, typ := range map[string]reflect.Type{
		"": reflect.TypeFor[file](), "profiles default": reflect.TypeFor[fileProfile](), "profiles default engine_api": reflect.TypeFor[EngineAPI](),
		"mounts": reflect.TypeFor[mountsFile](), "networks on": reflect.TypeFor[NetworkRule](), "env": reflect.TypeFor[envFile](),
		"images": reflect.TypeFor[imagesFile](), "resources": reflect.TypeFor[resourcesFile](), "ttl": reflect.TypeFor[ttlFile](), "profiles default engine_api buildkit": reflect.TypeFor[BuildKit](),
	} {
		at := docs
		for _, key := range strings.Fields(path) {
			at, _ = at[key].(map[string]any)
		}
		want := fields(typ)
		delete(want, "extends")
		if d := cmp.Diff(sortedKeys(want), sortedKeys(at)); d != "" {
			t.Errorf("%s: %s", path, d)
		}
	}

	got, err := Parse(data, Options{})
	must(t, err)
	want, err := Parse(nil, Options{})
	must(t, err)
	got.file.Profiles, want.file.Profiles = nil, nil // compared as they are in force
	if d := cmp.Diff(want.profiles, got.profiles); d != "" {
		t.Errorf("profiles: %s", d)
	}
	same(t, want.file, got.file, cmpopts.EquateEmpty())
}

func TestDocsExampleParses(t *testing.T) {
	_, example, _ := strings.Cut(readDocs(t), "```yaml\n")
	example, _, _ = strings.Cut(example, "```")
	h := fakeHost{"/workspaces": "/workspaces", "/workspaces/default": "/workspaces/default"}
	p, err := Parse([]byte(example), Options{Resolve: h.resolve, Secret: func(SecretSource) (string, error) { return "x", nil }})
	must(t, err)
	if v := p.Sandbox(Request{Profile: "build"}); !v.Allowed() || v.Spec.Mounts[0].Local != "/workspaces/default" {
		t.Errorf("%+v", v)
	}
}
