package main

import (
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// What no reader should have to hold in mind at once.
const (
	maxMethods       = 40 // of a type
	maxFunctionLines = 80
	maxFileLines     = 500 // with code
)

// larger are the types, functions and files that are above a limit, each with the reason.
var larger = map[string]string{
	"lifecycle/chat.Service":  "chats and their files share its locks and records",
	"lifecycle/quota.Service": "all kinds of quota share its accounts",
	"proxy/client.Client":     "a method for each operation of the API, as its users expect",
	"proxy/sandboxapi.api":    "a handler for each route of the API",
}

func TestLimits(t *testing.T) {
	const root = "../.."
	methods, seen := map[string]int{}, map[string]bool{}
	above := func(name string, n, limit int, what string) {
		if n <= limit {
			return
		}
		seen[name] = true
		if larger[name] == "" {
			t.Errorf("%s has %d %s, more than %d", name, n, what, limit)
		}
	}
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); file != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "runtimetest") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		above(rel, codeLines(source), maxFileLines, "lines")
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, file, source, 0)
		if err != nil {
			return err
		}
		for _, decl := range parsed.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok {
				continue
			}
			name := path.Dir(rel) + "." + f.Name.Name
			if f.Recv != nil {
				on := path.Dir(rel) + "." + receiver(f.Recv.List[0].Type)
				methods[on]++
				name = on + "." + f.Name.Name
			}
			above(name, set.Position(f.End()).Line-set.Position(f.Pos()).Line+1, maxFunctionLines, "lines")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range methods {
		above(name, n, maxMethods, "methods")
	}
	for name := range larger {
		if !seen[name] {
			t.Errorf("%s is within the limits: take it off the list", name)
		}
	}
}

// receiver returns the name of a method's type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return "?"
}

// codeLines counts the lines that hold more than comments.
func codeLines(source []byte) int {
	var s scanner.Scanner
	set := token.NewFileSet()
	file := set.AddFile("", set.Base(), len(source))
	s.Init(file, source, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return len(lines)
		}
		first := set.Position(pos).Line
		for i := range 1 + strings.Count(strings.TrimSuffix(lit, "\n"), "\n") {
			lines[first+i] = true
		}
	}
}
