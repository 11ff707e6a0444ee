package policy

import (
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
)

func readDocs(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// The rules of the code are those of the docs.
func TestDocsListTheRules(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "rules.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var code, docs []string
	ast.Inspect(f, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok && strings.HasPrefix(spec.Names[0].Name, "rule") {
			lit, ok := spec.Values[0].(*ast.BasicLit)
			if !ok {
				t.Fatalf("%s is no literal", spec.Names[0])
			}
			rule, err := strconv.Unquote(lit.Value)
			if err != nil {
				t.Fatal(err)
			}
			code = append(code, rule)
		}
		return true
	})
	_, rules, _ := strings.Cut(readDocs(t), "\n## Rules\n")
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(rules, -1) {
		docs = append(docs, m[1])
	}
	slices.Sort(code)
	slices.Sort(docs)
	if d := cmp.Diff(code, docs); d != "" || len(code) == 0 {
		t.Error(d)
	}
}

// Every key of the file has its row under its section, and no row is left over.
func TestDocsListTheKeys(t *testing.T) {
	_, docs, _ := strings.Cut(readDocs(t), "\n## Keys\n")
	docs, _, _ = strings.Cut(docs, "\n## Rules\n")
	ft := reflect.TypeFor[file]()
	for i := range ft.NumField() {
		section := keys(ft)[i]
		if section == "version" {
			continue
		}
		typ := ft.Field(i).Type
		if typ.Kind() == reflect.Map {
			typ = typ.Elem()
		}
		_, text, found := strings.Cut(docs, "\n### "+section+"\n")
		if !found {
			t.Errorf("section %s is missing", section)
		}
		text, _, _ = strings.Cut(text, "\n### ")
		_, text, _ = strings.Cut(text, "| key |")
		text, _, _ = strings.Cut(text, "\n\n")
		var rows []string
		for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(text, -1) {
			rows = append(rows, m[1])
		}
		want := keys(typ)
		slices.Sort(rows)
		slices.Sort(want)
		if d := cmp.Diff(want, rows); d != "" {
			t.Errorf("%s: %s", section, d)
		}
	}
}

func TestDocsExampleParses(t *testing.T) {
	_, example, _ := strings.Cut(readDocs(t), "```yaml\n")
	example, _, _ = strings.Cut(example, "```")
	h := fakeHost{"/workspaces": "/workspaces", "/workspaces/default": "/workspaces/default"}
	p, err := Parse([]byte(example), Options{Resolve: h.resolve, Secret: func(SecretSource) (string, error) { return "x", nil }})
	if err != nil {
		t.Fatal(err)
	}
	if v := p.Sandbox(Request{Profile: "build"}); !v.Allowed() || v.Spec.Mounts[0].Local != "/workspaces/default" {
		t.Errorf("%+v", v)
	}
}
