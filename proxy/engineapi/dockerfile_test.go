package engineapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// dockerfileCases are Dockerfiles, and the images that they use; nil if they are refused.
var dockerfileCases = map[string]struct {
	dockerfile string
	images     []string
}{
	"one":                          {"FROM busybox\nRUN true\n", []string{"busybox"}},
	"lower case":                   {"from busybox\n", []string{"busybox"}},
	"platform":                     {"FROM --platform=linux/amd64 busybox:1\n", []string{"busybox:1"}},
	"stages":                       {"FROM golang AS Build\nFROM scratch\nCOPY --from=build /a /b\nCOPY --from=0 /a /b\n", []string{"golang"}},
	"copy from an image":           {"FROM busybox\nCOPY --chown=0:0 --from=evil/x:1 /a /b\n", []string{"busybox", "evil/x:1"}},
	"continued":                    {"FROM \\\n  busy\\\nbox\n", []string{"busybox"}},
	"comment in between":           {"FROM \\\n# FROM evil\n\n  busybox\n", []string{"busybox"}},
	"carriage returns":             {"FROM busybox\r\nRUN true\r\n", []string{"busybox"}},
	"onbuild copy":                 {"FROM busybox\nONBUILD COPY --from=evil /a /b\n", nil},
	"onbuild copy a file":          {"FROM busybox\nONBUILD COPY /a /b\n", []string{"busybox"}},
	"onbuild stage":                {"FROM busybox AS evil\nFROM busybox\nONBUILD COPY --from=evil /a /b\n", nil},
	"its own stage":                {"FROM busybox AS evil\nCOPY --from=evil /a /b\n", []string{"busybox", "evil"}},
	"a later stage":                {"FROM busybox\nCOPY --from=evil /a /b\nFROM busybox AS evil\n", []string{"busybox", "evil"}},
	"stage of a stage":             {"FROM busybox AS a\nFROM a AS b\nCOPY --from=b /a /b\n", []string{"busybox", "b"}},
	"two froms":                    {"FROM busybox AS a\nFROM busybox\nCOPY --from=a --from=evil /a /b\n", nil},
	"stage's name":                 {"FROM busybox AS a/b\n", nil},
	"quoted label":                 {"FROM busybox\nLABEL a=b \"be\"rm.tenant=other\n", nil},
	"escaped label":                {"FROM busybox\nLABEL b\\erm.tenant other\n", nil},
	"before the first stage":       {"RUN true\nFROM busybox\n", nil},
	"workdir in proc":              {"FROM busybox\nWORKDIR /x/../proc/self/fd/8\n", nil},
	"label by a variable":          {"FROM busybox\nARG X=berm.tenant\nLABEL $X=other\n", nil},
	"labels":                       {"FROM busybox\nLABEL a=\"b c $D\" e='f' g=$H\n", []string{"busybox"}},
	"add json":                     {"FROM busybox\nADD [\"a b\", \"/c\"]\n", []string{"busybox"}},
	"nothing":                      {"", nil},
	"no FROM":                      {"RUN true\n", nil},
	"variable":                     {"ARG X=busybox\nFROM $X\n", []string{"busybox"}},
	"escape directive":             {"# escape=`\nFROM `\nbusybox\nRUN echo \\x `\n  y\n", []string{"busybox"}},
	"syntax directive":             {"#syntax = evil/frontend\nFROM busybox\n", []string{"busybox"}},
	"two backslashes":              {"FROM busybox\nRUN echo \\\\\nFROM evil\n", nil},
	"here-document":                {"FROM busybox\nRUN <<EOF\nFROM x\nEOF\n", nil},
	"mount":                        {"FROM busybox\nRUN --mount=type=bind,from=evil true\n", nil},
	"quoted from":                  {"FROM busybox\nCOPY --fr\"om\"=evil /a /b\n", []string{"busybox", "evil"}},
	"escaped from":                 {"FROM busybox\nCOPY --fr\\om=evil /a /b\n", []string{"busybox", "evil"}},
	"variable from":                {"FROM busybox\nCOPY --from=$X /a /b\n", nil},
	"add url":                      {"FROM busybox\nADD http://x/ /y\n", nil},
	"add variable":                 {"FROM busybox\nADD $X /y\n", nil},
	"add escaped":                  {"FROM busybox\nADD http:\\//x /y\n", nil},
	"add quoted":                   {"FROM busybox\nADD ht\"tp:/\"/x /y\n", nil},
	"add almost json":              {"FROM busybox\nADD [ ht\"tp:/\"/x /y\n", nil},
	"add json escaped":             {"FROM busybox\nADD [\"http\\u003a//x\", \"/y\"]\n", nil},
	"add git":                      {"FROM busybox\nADD git@github.com:a/b.git /y\n", nil},
	"onbuild add":                  {"FROM busybox\nONBUILD ADD http://x/ /y\n", nil},
	"onbuild onbuild":              {"FROM busybox\nONBUILD ONBUILD RUN true\n", nil},
	"label":                        {"FROM busybox\nLABEL berm.tenant=other\n", nil},
	"unknown":                      {"FROM busybox\nINCLUDE x\n", nil},
	"other line break":             {"FROM busybox\nRUN true\u2028FROM evil\n", nil},
	"lone carriage return":         {"FROM busybox\nRUN true\rFROM evil\n", nil},
	"backslash and Unicode space":  {"FROM busybox\nRUN true \\\u00a0\nCOPY --from=evil /a /b\n", nil},
	"the same in the middle":       {"FROM busybox\nRUN true\u2003x\n", nil},
	"backslash and form feed":      {"FROM busybox\nRUN true \\\f\nCOPY --from=evil /a /b\n", nil},
	"backslash at the end":         {"FROM busybox\nRUN true \\", []string{"busybox"}},
	"backslash after escape":       {"# escape=`\nFROM busybox\nRUN dir C:\\\nCOPY --from=evil /a /b\n", nil},
	"expansion after escape":       {"# escape=`\nFROM busybox\nENV A=`$B\n", nil},
	"label after escape":           {"# escape=`\nFROM busybox\nLABEL b`erm.tenant=other\n", nil},
	"escape twice":                 {"# escape=`\n# escape=\\\nFROM busybox\n", nil},
	"escape late":                  {"# a comment\n# escape=`\nFROM busybox\nRUN true `\nUSER 1\n", []string{"busybox"}},
	"check directive":              {"# check=skip=all\nFROM busybox\n", []string{"busybox"}},
	"text after JSON":              {"FROM busybox\nRUN [\"true\"] x\n", nil},
	"text after JSON, healthcheck": {"FROM busybox\nHEALTHCHECK CMD [\"true\"] x\n", nil},
	"JSON of numbers":              {"FROM busybox\nRUN [1]\n", nil},
	"test command":                 {"FROM busybox\nRUN [ -e /etc ] && true\n", []string{"busybox"}},
	"end of options":               {"FROM busybox\nRUN -- --mount=type=bind,from=evil true\n", nil},
	"onbuild mount":                {"FROM busybox\nONBUILD RUN --mount=type=bind,from=evil true\n", nil},
	"onbuild here-document":        {"FROM busybox\nONBUILD RUN <<EOF\nFROM x\nEOF\n", nil},
	"onbuild from":                 {"FROM busybox\nONBUILD FROM evil\n", nil},
	"onbuild label":                {"FROM busybox\nONBUILD LABEL berm.tenant=other\n", nil},
	"copy of a here-document":      {"FROM busybox\nCOPY <<EOF /x\nFROM x\nEOF\n", nil},
	"here-document in JSON":        {"FROM busybox\nRUN [\"sh\", \"-c\", \"cat <<EOF\"]\n", []string{"busybox"}},
	"Kelvin sign":                  {"FROM busybox\nHEALTHCHEC\u212a NONE\n", []string{"busybox"}},
	"healthcheck":                  {"FROM busybox\nHEALTHCHECK --interval=1s --retries=2 CMD [\"a\", \"b c\"]\n", []string{"busybox"}},
	"old forms":                    {"FROM busybox\nENV a b  c\nLABEL d e \"f\"\nMAINTAINER me\n", []string{"busybox"}},
	"argument of the request":      {"ARG X=busybox\nARG Y\nFROM ${X}:$Y\n", []string{"busybox:given"}},
	"argument overridden":          {"ARG Z=busybox\nFROM $Z\n", []string{"given/z"}},
	"argument by default":          {"ARG X\nFROM ${X:-busybox}\n", []string{"busybox"}},
	"argument of an argument":      {"ARG X=box A=\"busy\"\nARG B=$A$X\nFROM $B\n", []string{"busybox"}},
	"argument not declared":        {"FROM ${Y:-busybox}\n", []string{"busybox"}},
	"argument of a stage":          {"FROM busybox\nARG X=evil\nFROM $X\n", nil},
	"argument that is a stage":     {"ARG X=Evil\nFROM busybox AS evil\nFROM $X\n", []string{"busybox"}},
	"argument of two words":        {"ARG X=\"busybox AS evil\"\nFROM $X\n", nil},
	"argument that is empty":       {"ARG X\nFROM $X\n", nil},
	"label by a default":           {"FROM busybox\nLABEL ${X:-berm.tenant}=other\n", nil},
	"label by a default of words":  {"FROM busybox\nLABEL \"${X:-a b}erm.tenant\"=other\n", nil},
	"label in quotes":              {"FROM busybox\nLABEL \"and this\"=that\n", []string{"busybox"}},
	"reserved label in quotes":     {"FROM busybox\nLABEL \"Berm.tenant\"=other\n", nil},
	"reserved label, old form":     {"FROM busybox\nLABEL berm.tenant other\n", nil},
	"reserved label, second":       {"FROM busybox\nLABEL a=b \\\n  BERM.x=c\n", nil},
	"add an allowed address":       {"FROM busybox\nADD https://files.local/pub/x /y\n", []string{"busybox"}},
	"onbuild add an allowed one":   {"FROM busybox\nONBUILD ADD https://files.local/pub/x /y\n", []string{"busybox"}},
	"add above an allowed one":     {"FROM busybox\nADD https://files.local/pub/%2e%2e/x /y\n", nil},
	"add from an allowed user":     {"FROM busybox\nADD https://files.local/pub/@evil/x /y\n", nil},
	"add from another port":        {"FROM busybox\nADD https://files.local:1/pub/x /y\n", nil},
	"add an address among files":   {"FROM busybox\nADD a http://x/ /y/\n", nil},
	"add to a variable":            {"FROM busybox\nADD a $X\n", []string{"busybox"}},
	"long variable":                {"ARG X=" + strings.Repeat("x", 2000) + "\nFROM busybox\n", nil},
	"long line":                    {"FROM busybox\nRUN true " + strings.Repeat("xxxxxxx \\\n", 10_000) + "\n", nil},
	"nested variables":             {"FROM busybox\nRUN <<" + strings.Repeat("${a:-", 8000) + strings.Repeat("}", 8000), nil},
	"many instructions":            {"FROM busybox\n" + strings.Repeat("USER 1\n", 3000), nil},
}

// rewritten reads a Dockerfile and writes it anew.
func rewritten(text string) (d *dockerfile, out []byte, err error) {
	if d, err = readDockerfile([]byte(text), map[string]string{"Y": "given", "Z": "given/z"}, []string{"https://files.local/pub/"}); err == nil {
		out, err = d.encode(nil, map[string]string{"berm.a": `b "c" $d\`})
	}
	return d, out, err
}

func TestDockerfile(t *testing.T) {
	for name, tt := range dockerfileCases {
		var got []string
		d, out, err := rewritten(tt.dockerfile)
		if err == nil {
			got = d.images
		}
		if !slices.Equal(got, tt.images) || (err == nil) != (tt.images != nil) {
			t.Errorf("%s: %q, %v\n%s", name, got, err, out)
		}
	}
}

func TestTriggers(t *testing.T) {
	for trigger, allowed := range map[string]bool{
		"COPY . /x":                      true,
		" copy --chown=1 a b":            true,
		`RUN ["a", "b"]`:                 true,
		"RUN a \\":                       false,
		"RUN a \\\n b":                   false,
		"RUN a\nCOPY --from=evil a b":    false,
		"# escape=`\nRUN a":              false,
		"# a comment":                    false,
		"":                               false,
		`RUN ["a"] b`:                    false,
		"RUN a\u00a0":                    false,
		"RUN --mount=type=bind a":        false,
		`RUN ["cat", "<<EOF"]`:           false,
		"FROM evil":                      false,
		"ONBUILD RUN a":                  false,
		"COPY --from=evil a b":           false,
		"ADD https://files.local/pub/ a": true,
		"ADD https://files.local/ a":     false,
		"LABEL berm.tenant=other":        false,
		"LABEL $A=other":                 false,
	} {
		if err := checkTrigger(trigger, []string{"https://files.local/pub/"}); (err == nil) != allowed {
			t.Errorf("%q: %v", trigger, err)
		}
	}
}

// reading is what a parser makes of a Dockerfile.
type reading struct {
	Error  string
	All    []readInstruction
	Images []string // of FROM and COPY --from, stages' names among them
}

type readInstruction struct {
	Word  string
	Flags []string
	Args  []string
	JSON  bool
	Sub   []readInstruction
}

// current reads a Dockerfile with the parser in use, as testdata/dockerfile08 does with
// that of Docker Engine 20.10. Names of images that stages have are left out of used.
func current(t *testing.T, text []byte) (got reading, used []string) {
	t.Helper()
	parsed, err := parser.Parse(bytes.NewReader(text))
	if err != nil || parsed.EscapeToken != parser.DefaultEscapeToken {
		t.Fatalf("%q: %v", text, err)
	}
	var read func(*parser.Node) readInstruction
	read = func(n *parser.Node) readInstruction {
		out := readInstruction{Word: n.Value, Flags: append([]string{}, n.Flags...), Args: []string{}, JSON: n.Attributes["json"], Sub: []readInstruction{}}
		for next := n.Next; next != nil; next = next.Next {
			if out.Args = append(out.Args, next.Value); (n.Value == "ENV" || n.Value == "LABEL") && len(out.Args)%2 == 0 {
				next = next.Next // the separator, which the old parser doesn't keep
			}
			for _, c := range next.Children {
				out.Sub = append(out.Sub, read(c))
			}
		}
		return out
	}
	for _, n := range parsed.AST.Children {
		got.All = append(got.All, read(n))
	}
	stages, _, err := instructions.Parse(parsed.AST, nil)
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	var names []string
	use := func(name string, stage bool) {
		if got.Images = append(got.Images, name); !stage && !slices.Contains(names, strings.ToLower(name)) && !slices.Contains(used, name) {
			used = append(used, name)
		}
	}
	for i, s := range stages {
		if use(s.BaseName, s.BaseName == "scratch"); strings.Contains(s.BaseName, "$") {
			t.Errorf("%q has a variable in FROM", text)
		}
		for _, c := range s.Commands {
			switch c := c.(type) {
			case *instructions.CopyCommand:
				if n, err := strconv.Atoi(c.From); c.From != "" {
					use(c.From, err == nil && n < 1000)
				}
			case *instructions.LabelCommand:
				for _, l := range c.Labels {
					if name, _, err := shell.NewLex('\\').ProcessWord(l.Key, shell.EnvsFromSlice(nil)); err != nil || strings.Contains(name, "$") || strings.HasPrefix(strings.ToLower(name), labelPrefix) {
						t.Errorf("%q names label %q, %v", text, name, err)
					}
				}
			}
		}
		if stages[i].Name != "" {
			names = append(names, stages[i].Name)
		}
	}
	return got, used
}

// oldParser runs the parser of Docker Engine 20.10, which needs a module of its own, as
// there can't be two versions of one in a build. It is built for the long tests only.
func oldParser(t testing.TB) func(text string) reading {
	t.Helper()
	dir := t.TempDir()
	program := check.Value(os.ReadFile("testdata/dockerfile08/main.go"))(t)
	const module = "module dockerfile08\n\ngo 1.26\n\nrequire github.com/moby/buildkit v0.8.4-0.20221020190723-eeb7b65ab7d6\n"
	must(t, errors.Join(os.WriteFile(dir+"/main.go", program, 0o600), os.WriteFile(dir+"/go.mod", []byte(module), 0o600)))
	for _, args := range [][]string{{"mod", "tidy"}, {"build", "-o", "parser", "."}} {
		c := exec.CommandContext(t.Context(), "go", args...)
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("go %v: %v: %s", args, err, out)
		}
	}
	c := exec.CommandContext(t.Context(), dir+"/parser")
	in := check.Value(c.StdinPipe())(t)
	out := check.Value(c.StdoutPipe())(t)
	must(t, c.Start())
	t.Cleanup(func() { _, _ = in.Close(), c.Wait() })
	ask, answers := json.NewEncoder(in), json.NewDecoder(out)
	return func(text string) (got reading) {
		if err := errors.Join(ask.Encode(text), answers.Decode(&got)); err != nil {
			panic(err)
		}
		return got
	}
}

// TestDockerfileOn20 compares the parser in use with that of Docker Engine 20.10, whose
// readings are recorded. With BERM_SOAK=1 they are recorded anew.
func TestDockerfileOn20(t *testing.T) {
	const file = "testdata/dockerfile08/recorded.json"
	recorded := map[string]reading{}
	if os.Getenv("BERM_SOAK") != "" {
		old := oldParser(t)
		for _, tt := range dockerfileCases {
			if _, out, err := rewritten(tt.dockerfile); err == nil {
				recorded[string(out)] = old(string(out))
			}
		}
		text, err := json.MarshalIndent(recorded, "", " ")
		must(t, errors.Join(err, os.WriteFile(file, append(text, '\n'), 0o600)))
	}
	text, err := os.ReadFile(file)
	must(t, errors.Join(err, json.Unmarshal(text, &recorded)))
	for name, tt := range dockerfileCases {
		if d, out, err := rewritten(tt.dockerfile); err == nil {
			want, ok := recorded[string(out)]
			got, used := current(t, bytes.ReplaceAll(out, []byte("LABEL berm."), []byte("LABEL xxxx.")))
			was, _ := json.Marshal(want)
			is, _ := json.Marshal(got)
			if !ok || string(is) != strings.ReplaceAll(string(was), `"berm.a"`, `"xxxx.a"`) || !slices.Equal(used, d.images) {
				t.Errorf("%s: it reads\n%s, %q, and 20.10 reads, %v,\n%s", name, is, used, ok, was)
			}
		}
	}
}

// FuzzDockerfile checks that what is accepted is written so that it reads the same, and
// that it uses the images that are judged and no others. With BERM_SOAK=1 it asks the parser
// of Docker Engine 20.10, too.
func FuzzDockerfile(f *testing.F) {
	for _, tt := range dockerfileCases {
		f.Add(tt.dockerfile)
	}
	var old func(string) reading
	if os.Getenv("BERM_SOAK") != "" {
		old = oldParser(f)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, _, err := rewritten(text)
		if err != nil {
			return
		}
		out := check.Value(d.encode(nil, nil))(t)
		again, err := readDockerfile(out, d.args, d.urls)
		if err != nil {
			t.Fatalf("%q is written %q: %v", text, out, err)
		}
		if twice, err := again.encode(nil, nil); err != nil || !bytes.Equal(twice, out) || !slices.Equal(again.images, d.images) {
			t.Errorf("%q is written %q, and then %q, %v", text, out, twice, err)
		}
		got, used := current(t, out)
		if !slices.Equal(used, d.images) {
			t.Errorf("%q uses %q, not %q", out, used, d.images)
		}
		if old == nil {
			return
		}
		was := old(string(out))
		if was.Error != "" {
			return // the engine refuses it
		}
		if a, b := fmt.Sprint(got), fmt.Sprint(was); a != b {
			t.Errorf("%q reads\n%s, and on 20.10\n%s", out, a, b)
		}
	})
}
