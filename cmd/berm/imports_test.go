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

// parts are leaves that only the listed packages, and those below them, may import. A
// part imports nothing of ours but runtime; those of proxy import what its children do.
var parts = map[string]func(pkg string) bool{
	"lifecycle/hostdir":          in("lifecycle"),
	"lifecycle/quota/project":    in("cmd/berm", "lifecycle/quota"),
	"proxy/engineapi/body":       in("proxy/engineapi"),
	"proxy/engineapi/upstream":   in("proxy/engineapi"),
	"proxy/portproxy":            in("proxy/sandboxapi"),
	"proxy/stream":               in("proxy/sandboxapi"),
	"runtime/agent/files":        in("cmd/berm-agent", "runtime/agent", "runtime/runtimetest"),
	"runtime/agent/wire":         in("cmd/berm-agent", "runtime/agent", "runtime/runtimetest"),
	"runtime/atomicfile":         in("cmd/berm", "lifecycle", "runtime"),
	"runtime/containerd/image":   in("runtime/containerd"),
	"runtime/containerd/logs":    in("runtime/containerd"),
	"runtime/containerd/network": in("runtime/containerd"),
	"runtime/keylock":            in("lifecycle", "proxy", "runtime"),
}

// alone are the parts that import nothing of ours at all: what is in every sandbox has
// to be small, and the rest must be usable by all. Only files speaks wire's types.
var alone = in("lifecycle/hostdir", "runtime/agent/files", "runtime/agent/wire", "runtime/atomicfile", "runtime/keylock")

// mayImport is the one line that the house stands on:
// cmd -> proxy -> lifecycle -> runtime, with policy, runtime and proxy/apitype as
// leaves. Children see their ancestors, no package sees a child or a sibling but for
// parts, and only cmd sees everything.
func mayImport(pkg, dep string) bool {
	if allowed, part := parts[dep]; part {
		return allowed(pkg) && (!alone(pkg) || pkg == "runtime/agent/files" && dep == "runtime/agent/wire")
	}
	if _, part := parts[pkg]; part && !in("proxy/stream", "proxy/portproxy")(pkg) {
		return !alone(pkg) && (dep == "runtime" || in("proxy/engineapi")(pkg) && (dep == "policy" || dep == "proxy"))
	}
	ancestor := strings.HasPrefix(pkg, dep+"/")
	leaf := dep == "policy" || dep == "runtime"
	switch {
	case in("cmd/berm")(dep):
		return pkg == "cmd/berm" || dep == "cmd/berm/config" && in("cmd/berm")(pkg) || dep == "cmd/berm/serve" && in("cmd/berm/cli", "cmd/berm/doctor")(pkg)
	case in("cmd/berm/config")(pkg): // what the operator sets, and nothing that uses it
		return dep == "policy"
	case in("cmd/berm/cli")(pkg): // clients, like any other, and commands on files
		return dep == "policy" || dep == "proxy" || in("compose", "lifecycle/store", "proxy/apitype", "proxy/client", "proxy/engineapi", "proxy/sandboxapi")(dep)
	case in("cmd/berm")(pkg):
		return !in("runtime/runtimetest", "proxy/sandboxapi/openapitest")(dep) // test code stays out of the binary
	case in("cmd/berm-agent")(pkg):
		return false // it is in every sandbox, and small
	case in("cmd")(pkg):
		return true
	case in("proxy/apitype")(pkg):
		return false
	case in("proxy/client")(pkg):
		return dep == "proxy/apitype"
	case in("proxy")(pkg):
		return ancestor || leaf || dep == "proxy/apitype" || dep == "lifecycle" ||
			slices.Contains([]string{"lifecycle/chat", "lifecycle/mountpin", "lifecycle/process", "lifecycle/restart", "lifecycle/workspace"}, dep)
	case pkg == "lifecycle/chat" && dep == "lifecycle/workspace":
		return true // what holds chats, and their quota
	case (pkg == "lifecycle/chat" || pkg == "lifecycle/workspace") && dep == "lifecycle/quota":
		return true
	case pkg == "lifecycle/store" && (dep == "lifecycle/workspace" || dep == "lifecycle/chat" || dep == "lifecycle/quota" || dep == "lifecycle/restart"):
		return true // whose stores it is
	case in("lifecycle")(pkg):
		return ancestor || leaf
	case in("policy", "runtime")(pkg):
		return ancestor
	}
	return false
}

// verdict says what is wrong with an import; empty if nothing is.
func verdict(pkg, imported string) string {
	if imported == module || strings.HasPrefix(imported, module+"/") {
		if !mayImport(pkg, strings.TrimPrefix(strings.TrimPrefix(imported, module), "/")) {
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
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if wrong := verdict(pkg, imported); wrong != "" {
				t.Errorf("%s: %s %s", rel, imported, wrong)
			}
		}
	})
	for _, pkg := range []string{"cmd/berm", "policy", "lifecycle", "runtime"} {
		if !packages[pkg] {
			t.Errorf("no file of %s was looked at", pkg)
		}
	}
}

func TestTopLevel(t *testing.T) {
	entries, err := os.ReadDir("../..")
	if err != nil {
		t.Fatal(err)
	}
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
		"cmd sees all":                {"cmd/berm", module + "/runtime/docker", true},
		"cmd sees its config":         {"cmd/berm", module + "/cmd/berm/config", true},
		"the command line to config":  {"cmd/berm/cli", module + "/cmd/berm/config", true},
		"the command line to serve":   {"cmd/berm/cli", module + "/cmd/berm/serve", true},
		"the command line to doctor":  {"cmd/berm/cli", module + "/cmd/berm/doctor", false},
		"serve to the command line":   {"cmd/berm/serve", module + "/cmd/berm/cli", false},
		"the command line to parts":   {"cmd/berm/cli", module + "/lifecycle", false},
		"config to the server":        {"cmd/berm/config", module + "/lifecycle", false},
		"the command line's client":   {"cmd/berm/cli", module + "/proxy/client", true},
		"doctor to serve":             {"cmd/berm/doctor", module + "/cmd/berm/serve", true},
		"others to cmd":               {"proxy", module + "/cmd/berm/config", false},
		"cmd without test code":       {"cmd/berm", module + "/runtime/runtimetest", false},
		"tool with test code":         {"cmd/berm-engine", module + "/runtime/runtimetest/engine", true},
		"agent alone":                 {"cmd/berm-agent", module + "/runtime", false},
		"agent to the protocol":       {"cmd/berm-agent", module + "/runtime/agent/wire", true},
		"protocol in lifecycle":       {"lifecycle", module + "/runtime/agent/wire", false},
		"protocol alone":              {"runtime/agent/wire", module + "/runtime", false},
		"proxy to lifecycle":          {"proxy/sandboxapi", module + "/lifecycle", true},
		"proxy to parent":             {"proxy/sandboxapi", module + "/proxy", true},
		"proxy to apitype":            {"proxy/sandboxapi", module + "/proxy/apitype", true},
		"proxy to policy":             {"proxy", module + "/policy", true},
		"proxy to sibling":            {"proxy/sandboxapi", module + "/proxy/engineapi", false},
		"parent to child":             {"proxy", module + "/proxy/sandboxapi", false},
		"proxy to lifecycle's child":  {"proxy/sandboxapi", module + "/lifecycle/store", false},
		"client to apitype":           {"proxy/client", module + "/proxy/apitype", true},
		"client to parent":            {"proxy/client", module + "/proxy", false},
		"client to others":            {"proxy/client", "github.com/google/uuid", false},
		"client to standard library":  {"proxy/client", "net/http", true},
		"apitype to anything of ours": {"proxy/apitype", module + "/policy", false},
		"lifecycle to runtime":        {"lifecycle", module + "/runtime", true},
		"lifecycle to proxy":          {"lifecycle", module + "/proxy", false},
		"child to lifecycle":          {"lifecycle/store", module + "/lifecycle", true},
		"lifecycle's siblings":        {"lifecycle/store", module + "/lifecycle/mountpin", false},
		"lifecycle to host dirs":      {"lifecycle", module + "/lifecycle/hostdir", true},
		"proxy to chats":              {"proxy", module + "/lifecycle/chat", true},
		"chats to workspaces":         {"lifecycle/chat", module + "/lifecycle/workspace", true},
		"the store to chats":          {"lifecycle/store", module + "/lifecycle/chat", true},
		"proxy to host dirs":          {"proxy/sandboxapi", module + "/lifecycle/hostdir", false},
		"host dirs alone":             {"lifecycle/hostdir", module + "/lifecycle", false},
		"a part to its parent":        {"proxy/engineapi/body", module + "/proxy/engineapi", false},
		"a parent to its part":        {"proxy/engineapi", module + "/proxy/engineapi/body", true},
		"a part elsewhere":            {"proxy/sandboxapi", module + "/proxy/engineapi/body", false},
		"a part to another":           {"runtime/agent/wire", module + "/runtime/agent/files", false},
		"files to its protocol":       {"runtime/agent/files", module + "/runtime/agent/wire", true},
		"a stream's errors":           {"proxy/stream", module + "/proxy", true},
		"a stream to its user":        {"proxy/stream", module + "/proxy/sandboxapi", false},
		"the keyed lock":              {"lifecycle/chat", module + "/runtime/keylock", true},
		"name that begins alike":      {"lifecycle", module + "/runtimes", false},
		"policy is a leaf":            {"policy", module + "/runtime", false},
		"runtime is a leaf":           {"runtime", module + "/policy", false},
		"backend to runtime":          {"runtime/docker", module + "/runtime", true},
		"backends apart":              {"runtime/docker", module + "/runtime/runtimetest", false},
		"http in lifecycle":           {"lifecycle/reaper", "net/http", false},
		"http in docker backend":      {"runtime/docker", "net/http", true},
		"containerd in cmd":           {"cmd/berm", "github.com/containerd/containerd/v2/client", false},
		"containerd in its backend":   {"runtime/containerd", "github.com/containerd/containerd/v2/client", true},
		"docker client in backend":    {"runtime/docker", "github.com/docker/docker/client", true},
		"docker client in cmd":        {"cmd/berm", "github.com/docker/docker/client", false},
		"prometheus's client in cmd":  {"cmd/berm", "github.com/prometheus/client_golang/prometheus", true},
		"prometheus itself in cmd":    {"cmd/berm", "github.com/prometheus/prometheus/promql/parser", false},
		"unknown layer":               {"util", module + "/runtime", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if wrong := verdict(tt.pkg, tt.imported); (wrong == "") != tt.ok {
				t.Errorf("%s importing %s: %q", tt.pkg, tt.imported, wrong)
			}
		})
	}
}
