package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func (a *reply) matches(t *testing.T, dir string) []string {
	t.Helper()
	var lines []string
	for _, item := range a.items {
		m := decode[wire.FileMatch](t, item)
		lines = append(lines, fmt.Sprintf("%s:%d:%s", strings.TrimPrefix(string(m.Path), dir+"/"), m.Line, m.Text))
	}
	return lines
}

func TestSearch(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{
		"a.txt": "one\ntwo\nThree\r\nlast one", "b.go": "a.b\naxb\n", "s/c.txt": "\n\none", "bin": "one\x00one\n", "late bin": strings.Repeat("x\n", 5000) + "\x00\none",
		"pipe": "|", "link": "->a.txt", "out": "->/", "zero": "->/dev/zero", "u\xff": "\xff one\n", "empty": "",
	})
	for name, tt := range map[string]struct {
		file  wire.File
		want  []string
		class wire.Class
	}{
		"plain":            {file: wire.File{Pattern: "one"}, want: []string{"a.txt:1:one", "a.txt:4:last one", "late bin:5002:one", "s/c.txt:3:one", "u\xff:1:\xff one"}},
		"anchored":         {file: wire.File{Pattern: "^.*ee$"}, want: []string{"a.txt:3:Three"}},
		"any case":         {file: wire.File{Pattern: "THREE", IgnoreCase: true}, want: []string{"a.txt:3:Three"}},
		"literal":          {file: wire.File{Pattern: "a.b", Literal: true}, want: []string{"b.go:1:a.b"}},
		"literal any case": {file: wire.File{Pattern: "A.B", Literal: true, IgnoreCase: true}, want: []string{"b.go:1:a.b"}},
		"not literal":      {file: wire.File{Pattern: "a.b"}, want: []string{"b.go:1:a.b", "b.go:2:axb"}},
		"either":           {file: wire.File{Pattern: "TWO|axb", IgnoreCase: true}, want: []string{"a.txt:2:two", "b.go:2:axb"}},
		"included":         {file: wire.File{Pattern: "one", Include: "*.txt"}, want: []string{"a.txt:1:one", "a.txt:4:last one", "s/c.txt:3:one"}},
		"limited":          {file: wire.File{Pattern: "one", Limit: 2}, want: []string{"a.txt:1:one", "a.txt:4:last one"}},
		"a file":           {file: wire.File{Path: []byte("/a.txt"), Pattern: "tw"}, want: []string{"a.txt:2:two"}},
		"a link to one":    {file: wire.File{Path: []byte("/link"), Pattern: "tw"}, want: []string{"link:2:two"}},
		"a binary":         {file: wire.File{Path: []byte("/bin"), Pattern: "one"}},
		"empty lines":      {file: wire.File{Path: []byte("/s"), Pattern: "^$"}, want: []string{"s/c.txt:1:", "s/c.txt:2:"}},
		"nothing":          {file: wire.File{Pattern: "nothing like that"}},
		"slow elsewhere":   {file: wire.File{Pattern: "(x+x+)+y"}},
		"bad":              {file: wire.File{Pattern: "("}, class: wire.ClassInvalid},
		"bad, balanced":    {file: wire.File{Pattern: "a)(b", IgnoreCase: true}, class: wire.ClassInvalid},
		"too large":        {file: wire.File{Pattern: "((x{1000}){1000}){1000}"}, class: wire.ClassInvalid},
		"too long":         {file: wire.File{Pattern: strings.Repeat("x", maxSearchBytes+1), Literal: true}, class: wire.ClassInvalid},
		"too deep":         {file: wire.File{Pattern: strings.Repeat("(", 5000) + strings.Repeat(")", 5000)}, class: wire.ClassInvalid},
		"bad include":      {file: wire.File{Pattern: "x", Include: "["}, class: wire.ClassInvalid},
		"too many":         {file: wire.File{Pattern: "x", Limit: maxSearchLimit + 1}, class: wire.ClassInvalid},
		"a pipe":           {file: wire.File{Path: []byte("/pipe"), Pattern: "x"}, class: wire.ClassInvalid},
		"a device":         {file: wire.File{Path: []byte("/zero"), Pattern: "x"}, class: wire.ClassInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			f := tt.file
			f.Path = []byte(dir + string(tt.file.Path))
			a := operate(t, wire.OpSearch, &f, nil)
			if tt.class != "" {
				if a.fails(t, tt.class); a.ready {
					t.Error("it was said only after Ready")
				}
				return
			}
			equal(t, a.succeeds(t).matches(t, dir), tt.want)
		})
	}
}

func TestSearchLongLines(t *testing.T) {
	dir := t.TempDir()
	var file bytes.Buffer
	file.WriteString(strings.Repeat("x", maxLine-4) + "deep" + "beyond\n") // 1
	file.WriteString("é" + strings.Repeat("é", 100_000) + " deep\n")       // 2
	file.WriteString(strings.Repeat("y", 3*maxLine) + "\n")                // 3
	file.WriteString("deep\n")                                             // 4
	file.WriteString(strings.Repeat("z", searchReadBytes-1) + "\n")        // 5: just the buffer
	file.WriteString(strings.Repeat("z", searchReadBytes) + "\n")          // 6
	file.WriteString("\xff" + strings.Repeat("\xbf", 2*maxText) + "deep")  // 7
	if err := os.WriteFile(dir+"/f", file.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	lines := func(pattern string) (numbers []int) {
		a := operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: pattern}, nil).succeeds(t)
		for _, item := range a.items {
			m := decode[wire.FileMatch](t, item)
			if len(m.Text) > maxText || m.Line == 2 && (!utf8.Valid(m.Text) || len(m.Text) < maxText-1) {
				t.Errorf("line %d: %d bytes", m.Line, len(m.Text))
			}
			numbers = append(numbers, m.Line)
		}
		return numbers
	}
	for pattern, want := range map[string]string{"deep": "[1 2 4 7]", "beyond": "[]", "^y*$": "[3]", "^z*$": "[5 6]", "xdeep$": "[1]"} {
		if got := fmt.Sprint(lines(pattern)); got != want {
			t.Errorf("%s: %s, want %s", pattern, got, want)
		}
	}
}
