package main

import (
	"go/ast"
	"go/scanner"
	"go/token"
	"path"
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
	eachSource(t, 0, func(rel string, source []byte, set *token.FileSet, file *ast.File) {
		if strings.HasPrefix(rel, "runtime/runtimetest/") {
			return
		}
		above(rel, codeLines(source), maxFileLines, "lines")
		for _, decl := range file.Decls {
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
	})
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
