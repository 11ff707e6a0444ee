package main

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const module = "github.com/bermhq/berm"

// topLevel is all that may stand at the root of the repository.
var topLevel = []string{
	".ci", ".git", ".gitattributes", ".github", ".gitignore", ".golangci.yml", "CHANGELOG.md", "CONTRIBUTING.md", "DEVELOPERS.md", "LICENSE", "Makefile", "README.md", "SECURITY.md",
	"bin", "cmd", "compose", "docs", "go.mod", "go.sum", "lifecycle", "policy", "proxy", "runtime",
}

// confined are imports that only some packages may have: the first matching
// prefix decides.
var confined = []struct {
	imported string
	allowed  func(pkg string) bool
}{
	{"github.com/docker/docker", in("runtime/docker", "runtime/runtimetest/engine", "proxy/engineapi", "cmd/berm-engine")},
	{"github.com/containerd/containerd/api/services/content", in("runtime/containerd", "proxy/engineapi/buildkit")}, // blobs of builds
	{"github.com/containerd/containerd", in("runtime/containerd")},
	{"github.com/containerd/go-cni", in("runtime/containerd")},
	{"github.com/spf13/cobra", in("cmd")},
	{"go.yaml.in/yaml", in("cmd/berm/config", "policy")}, // policy.Decode is the strict decoder; config prints
	{"modernc.org/sqlite", in("lifecycle/store")},
	{"github.com/prometheus/prometheus", in()}, // only tests
	{"github.com/compose-spec/compose-go", in()},
	// The Docker client speaks HTTP, and so do the registries that containerd's client
	// pulls from, so the backends may name HTTP's types.
	{"net/http", func(pkg string) bool {
		return !in("policy", "lifecycle", "runtime")(pkg) || in("runtime/docker", "runtime/containerd", "runtime/runtimetest/engine")(pkg)
	}},
}

// in tells whether a package is one of the roots or below one.
func in(roots ...string) func(string) bool {
	return func(pkg string) bool {
		return slices.ContainsFunc(roots, func(root string) bool { return pkg == root || strings.HasPrefix(pkg, root+"/") })
	}
}

// mayImport is what each package may import of ours. It is the one line that the house
// stands on: cmd -> proxy -> lifecycle -> runtime, with policy, runtime and proxy/apitype as
// leaves. Children see their parents, and no package sees a child or a sibling but for
// parts: leaves that the packages named here use. Test code stays out of the binaries.
var mayImport = map[string][]string{
	"cmd/berm":        {"cmd/berm/cli", "cmd/berm/config", "cmd/berm/doctor", "cmd/berm/serve"},
	"cmd/berm-agent":  {"runtime/agent/files", "runtime/agent/wire"}, // it is in every sandbox, and small
	"cmd/berm-engine": {"runtime/runtimetest/engine"},
	// The commands are clients like any others, or work on files.
	"cmd/berm/cli": {
		"cmd/berm/config", "cmd/berm/serve", "compose", "lifecycle/store", "policy", "proxy", "proxy/apitype", "proxy/client", "proxy/engineapi",
		"proxy/sandboxapi", "runtime/atomicfile",
	},
	"cmd/berm/config": {"policy"}, // what the operator sets, and nothing that uses it
	"cmd/berm/doctor": {
		"cmd/berm/config", "cmd/berm/serve", "lifecycle", "lifecycle/mountpin", "lifecycle/quota/project", "lifecycle/restart", "lifecycle/store",
		"policy", "proxy/apitype", "proxy/engineapi", "runtime",
	},
	"cmd/berm/serve": {
		"cmd/berm/config", "lifecycle", "lifecycle/chat", "lifecycle/mountpin", "lifecycle/quota", "lifecycle/store",
		"policy", "proxy", "proxy/apitype", "proxy/engineapi", "proxy/sandboxapi", "runtime", "runtime/agent",
		"runtime/atomicfile", "runtime/containerd", "runtime/docker",
	},
	"cmd/berm/serve/storetest": {"lifecycle", "lifecycle/store", "runtime/runtimetest/check"},
	"compose":                  nil,

	"proxy":                    {"lifecycle", "lifecycle/chat", "lifecycle/quota", "policy", "runtime"},
	"proxy/apitype":            nil,
	"proxy/client":             {"proxy/apitype"},
	"proxy/engineapi":          {"lifecycle", "lifecycle/mountpin", "lifecycle/restart", "policy", "proxy", "proxy/engineapi/body", "proxy/engineapi/buildkit", "proxy/engineapi/upstream", "runtime", "runtime/keylock"},
	"proxy/engineapi/body":     {"policy", "proxy", "runtime"},
	"proxy/engineapi/buildkit": {"policy", "proxy/engineapi/body"},
	"proxy/engineapi/upstream": {"policy", "proxy", "runtime"},
	"proxy/portproxy":          {"lifecycle", "policy", "proxy", "proxy/apitype", "runtime"},
	"proxy/sandboxapi": {
		"lifecycle", "lifecycle/chat", "lifecycle/quota", "policy", "proxy", "proxy/apitype", "proxy/portproxy", "proxy/stream", "runtime", "runtime/keylock",
	},
	"proxy/sandboxapi/openapitest": { // runs the whole server, too
		"lifecycle", "lifecycle/chat", "lifecycle/mountpin/mountpintest", "lifecycle/quota", "lifecycle/store", "policy",
		"proxy", "proxy/sandboxapi", "runtime", "runtime/runtimetest",
	},
	"proxy/stream": {"lifecycle", "policy", "proxy", "proxy/apitype", "runtime"},

	"lifecycle":                       {"lifecycle/hostdir", "policy", "runtime", "runtime/atomicfile", "runtime/keylock"},
	"lifecycle/chat":                  {"lifecycle", "lifecycle/hostdir", "lifecycle/quota", "policy", "runtime", "runtime/keylock"},
	"lifecycle/hostdir":               nil,
	"lifecycle/mountpin":              {"lifecycle", "lifecycle/hostdir", "policy", "runtime", "runtime/keylock"},
	"lifecycle/mountpin/mountpintest": {"lifecycle", "policy"},
	"lifecycle/quota":                 {"lifecycle", "lifecycle/hostdir", "lifecycle/quota/project", "policy", "runtime", "runtime/keylock"},
	"lifecycle/quota/project":         {"lifecycle/hostdir"},
	"lifecycle/restart":               nil,
	"lifecycle/store":                 {"lifecycle", "lifecycle/chat", "lifecycle/quota", "lifecycle/restart", "runtime/atomicfile"},
	"policy":                          nil,

	"runtime":                    {"runtime/atomicfile"},
	"runtime/agent":              {"runtime", "runtime/agent/wire", "runtime/atomicfile", "runtime/keylock"},
	"runtime/agent/files":        {"runtime/agent/wire"},
	"runtime/agent/wire":         nil,
	"runtime/atomicfile":         nil,
	"runtime/containerd":         {"runtime", "runtime/atomicfile", "runtime/containerd/image", "runtime/containerd/logs", "runtime/containerd/network", "runtime/keylock"},
	"runtime/containerd/image":   {"runtime"},
	"runtime/containerd/logs":    {"runtime"},
	"runtime/containerd/network": {"runtime", "runtime/atomicfile"},
	"runtime/docker":             {"runtime", "runtime/atomicfile", "runtime/keylock"},
	"runtime/keylock":            nil,
	"runtime/runtimetest":        {"runtime", "runtime/agent/files", "runtime/agent/wire"},
	"runtime/runtimetest/engine": {"runtime"},
	"runtime/runtimetest/check":  nil,
	"runtime/runtimetest/pipes":  nil,
	"runtime/runtimetest/pty":    nil,
}

// verdict says what is wrong with an import; empty if nothing is.
func verdict(pkg, imported string) string {
	if dep, ours := strings.CutPrefix(imported, module+"/"); ours {
		if !slices.Contains(mayImport[pkg], dep) {
			return "is against the import rule"
		}
		return ""
	}
	first, _, _ := strings.Cut(imported, "/")
	if in("proxy/apitype", "proxy/client")(pkg) && strings.Contains(first, ".") {
		return "is not in the standard library"
	}
	for _, c := range confined {
		if imported == c.imported || strings.HasPrefix(imported, c.imported+"/") {
			if !c.allowed(pkg) {
				return "is confined to other packages"
			}
			return ""
		}
	}
	return ""
}

// eachSource parses all files of the product, with those parts that mode asks for, and calls
// do with each file's path from the root of the repository.
func eachSource(t *testing.T, mode parser.Mode, do func(rel string, source []byte, set *token.FileSet, file *ast.File)) {
	t.Helper()
	const root = "../.."
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch name := d.Name(); {
		case d.IsDir() && file != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go"):
			return nil
		}
		rel, relErr := filepath.Rel(root, file)
		source, err := os.ReadFile(file)
		if err := errors.Join(relErr, err); err != nil {
			return err
		}
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, file, source, mode)
		if err == nil {
			do(filepath.ToSlash(rel), source, set, parsed)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestImports(t *testing.T) {
	packages := map[string]bool{}
	eachSource(t, parser.ImportsOnly, func(rel string, _ []byte, _ *token.FileSet, file *ast.File) {
		pkg := path.Dir(rel)
		packages[pkg] = true
		for _, spec := range file.Imports {
			imported := check.Value(strconv.Unquote(spec.Path.Value))(t)
			if wrong := verdict(pkg, imported); wrong != "" {
				t.Errorf("%s: %s %s", rel, imported, wrong)
			}
		}
	})
	for pkg := range mayImport {
		if !packages[pkg] {
			t.Errorf("no file of %s was looked at", pkg)
		}
	}
}

func TestTopLevel(t *testing.T) {
	entries := check.Value(os.ReadDir("../.."))(t)
	for _, e := range entries {
		if !slices.Contains(topLevel, e.Name()) {
			t.Errorf("%s doesn't belong at the root of the repository", e.Name())
		}
	}
}

// The rule itself, so that a slip in it doesn't pass for a clean tree.
func TestImportRule(t *testing.T) {
	tests := map[string]struct {
		pkg, imported string
		ok            bool
	}{
		"down":                       {"proxy/sandboxapi", module + "/lifecycle", true},
		"up":                         {"lifecycle", module + "/proxy", false},
		"name that begins alike":     {"lifecycle", module + "/runtimes", false},
		"unknown layer":              {"util", module + "/runtime", false},
		"client to others":           {"proxy/client", "github.com/google/uuid", false},
		"client to standard library": {"proxy/client", "net/http", true},
		"http in lifecycle":          {"lifecycle/chat", "net/http", false},
		"http in docker backend":     {"runtime/docker", "net/http", true},
		"containerd in cmd":          {"cmd/berm", "github.com/containerd/containerd/v2/client", false},
		"containerd in its backend":  {"runtime/containerd", "github.com/containerd/containerd/v2/client", true},
		"docker client in backend":   {"runtime/docker", "github.com/docker/docker/client", true},
		"docker client in cmd":       {"cmd/berm", "github.com/docker/docker/client", false},
		"prometheus's client in cmd": {"cmd/berm", "github.com/prometheus/client_golang/prometheus", true},
		"prometheus itself in cmd":   {"cmd/berm", "github.com/prometheus/prometheus/promql/parser", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if wrong := verdict(tt.pkg, tt.imported); (wrong == "") != tt.ok {
				t.Errorf("%s importing %s: %q", tt.pkg, tt.imported, wrong)
			}
		})
	}
}
