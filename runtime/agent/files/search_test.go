package files

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/bermhq/berm/runtime/agent/wire"
)

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
		"too deep":         {file: wire.File{Pattern: strings.Repeat("(", 5000) + strings.Repeat(")", 5000)}, class: wire.ClassInvalid},
		"a pipe":           {file: wire.File{Path: []byte("/pipe"), Pattern: "x"}, class: wire.ClassInvalid},
		"a device":         {file: wire.File{Path: []byte("/zero"), Pattern: "x"}, class: wire.ClassInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			f := tt.file
			f.Path = []byte(dir + string(tt.file.Path))
			if f.Limit == 0 {
				f.Limit = 1000
			}
			c := operate(t, wire.OpSearch, &f, "")
			if tt.class != "" {
				if c.fails(t, tt.class); c.ready {
					t.Error("it was said only after Ready")
				}
				return
			}
			var lines []string
			for _, m := range c.succeeds(t).matches {
				lines = append(lines, fmt.Sprintf("%s:%d:%s", strings.TrimPrefix(string(m.Path), dir+"/"), m.Line, m.Text))
			}
			equal(t, lines, tt.want)
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
	file.WriteString(strings.Repeat("z", wire.MaxData-1) + "\n")           // 5: just the buffer
	file.WriteString(strings.Repeat("z", wire.MaxData) + "\n")             // 6
	file.WriteString("\xff" + strings.Repeat("\xbf", 2*maxText) + "deep")  // 7
	if err := os.WriteFile(dir+"/f", file.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	lines := func(pattern string) (numbers []int) {
		for _, m := range operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: pattern, Limit: 1000}, "").succeeds(t).matches {
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

func TestGlob(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{
		"a.go": "", "b.txt": "", "src/c.go": "", "src/deep/d.go": "", "src/deep/er/e.go": "", "src/[x]": "", "link": "->src", "bad\xff.go": "",
	})
	for pattern, want := range map[string][]string{
		"*.go":                       {"a.go", "bad\xff.go"},
		"**/*.go":                    {"a.go", "bad\xff.go", "src/c.go", "src/deep/d.go", "src/deep/er/e.go"},
		"**/**/*.go":                 {"a.go", "bad\xff.go", "src/c.go", "src/deep/d.go", "src/deep/er/e.go"},
		"src/*/*.go":                 {"src/deep/d.go"},
		"src/**/e.go":                {"src/deep/er/e.go"},
		"src/**":                     {"src/[x]", "src/c.go", "src/deep", "src/deep/d.go", "src/deep/er", "src/deep/er/e.go"},
		"./src//c.go":                {"src/c.go"},
		"src/\\[x\\]":                {"src/[x]"},
		"[ab].*":                     {"a.go", "b.txt"},
		"link":                       {"link"},
		"link/*":                     nil,
		"none":                       nil,
		"**/deep/**":                 {"src/deep/d.go", "src/deep/er", "src/deep/er/e.go"},
		"**/er":                      {"src/deep/er"},
		"src/**/deep/**/e.go":        {"src/deep/er/e.go"},
		strings.Repeat("**/*/", 20):  nil,
		strings.Repeat("*", 4000):    {"a.go", "b.txt", "bad\xff.go", "link", "src"},
		strings.Repeat("?*", 1000):   nil,
		strings.Repeat("**/", 200):   {"a.go", "b.txt", "bad\xff.go", "link", "src", "src/[x]", "src/c.go", "src/deep", "src/deep/d.go", "src/deep/er", "src/deep/er/e.go"},
		strings.Repeat("**/d*/", 10): nil,
	} {
		c := operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: pattern, Limit: 1000}, "").succeeds(t)
		if got := c.names(dir); !slices.Equal(got, want) {
			t.Errorf("%.100s: %q, want %q", pattern, got, want)
		}
	}
	for _, pattern := range []string{"", "/", "/etc/*", "../*", "a/../b", "[", "a/[", "**/[x", ".", strings.Repeat("a/", 64)} {
		c := operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: pattern}, "")
		if c.fails(t, wire.ClassInvalid); c.ready {
			t.Errorf("%.100q was said only after Ready", pattern)
		}
	}
	for limit, want := range map[int]int{1: 1, 3: 3, 1000: 5} {
		c := operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**/*.go", Limit: limit}, "").succeeds(t)
		if len(c.files) != want {
			t.Errorf("limit %d: %d", limit, len(c.files))
		}
	}
	operate(t, wire.OpGlob, &wire.File{Path: []byte(dir + "/a.go"), Pattern: "*"}, "").fails(t, wire.ClassInvalid)
}

// A pattern matches as its meaning, tried out, has it.
func FuzzGlob(f *testing.F) {
	for _, seed := range [][2]string{{"**/*.go", "a/b.go"}, {"a/**/b", "a/b"}, {"**", "x/y"}, {"a*/**/[bc]/**", "ab/x/c/d"}, {"**/a/**/a", "a/a/a"}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		g, err := parseGlob(pattern)
		elements := strings.Split(name, "/")
		if err != nil || len(g) > 12 || len(elements) > 12 || slices.Contains(elements, "") {
			return
		}
		p := g.start()
		for i, element := range elements {
			if i > 0 && !g.goesOn(p) {
				p = 0
				break
			}
			p = g.next(p, element)
		}
		if got, want := g.matched(p), matches(g, elements); got != want {
			t.Errorf("%q of %q: %t, want %t", name, g, got, want)
		}
	})
}

func matches(g glob, elements []string) bool {
	switch {
	case len(g) == 0:
		return len(elements) == 0
	case g[0] == anyDirs:
		return matches(g[1:], elements) || len(elements) > 0 && matches(g, elements[1:])
	case len(elements) == 0:
		return false
	}
	ok, err := path.Match(g[0], elements[0])
	return err == nil && ok && matches(g[1:], elements[1:])
}
