package buildkit

import (
	"bytes"
	"regexp"
	"testing"

	"github.com/moby/buildkit/solver/pb"
)

func encoded(t *testing.T, op *pb.Op) []byte {
	t.Helper()
	text, err := op.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestInputs gives definitions that end an engine, or read what wasn't judged.
func TestInputs(t *testing.T) {
	source := encoded(t, &pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: "local://x"}}})
	step := encoded(t, &pb.Op{Op: &pb.Op_Exec{Exec: &pb.ExecOp{}}, Inputs: []*pb.Input{{Digest: digestOf(source)}}})
	foreign := encoded(t, &pb.Op{Op: &pb.Op_Source{Source: &pb.SourceOp{Identifier: "docker-image://x"}}})
	end := func(in ...*pb.Input) []byte { return encoded(t, &pb.Op{Inputs: in}) }
	input := func(text []byte) *pb.Input { return &pb.Input{Digest: digestOf(text)} }
	known := func(op []byte) bool { return bytes.Equal(op, source) || bytes.Equal(op, step) }
	for name, tt := range map[string]struct {
		ops  [][]byte
		want bool
	}{
		"whole":                       {[][]byte{source, step, end(input(step))}, true},
		"part":                        {[][]byte{source, end(input(source))}, true},
		"nothing":                     {nil, false},
		"no last one":                 {[][]byte{source, step}, false},
		"only a last one":             {[][]byte{end()}, false},
		"last one without inputs":     {[][]byte{source, step, end()}, false},
		"last one with two inputs":    {[][]byte{source, step, end(input(source), input(step))}, false},
		"last one of what is missing": {[][]byte{source, end(input(step))}, false},
		"last one of itself":          {[][]byte{source, end(&pb.Input{Digest: "x"})}, false},
		"step of what is missing":     {[][]byte{step, end(input(step))}, false},
		"step before its source":      {[][]byte{step, source, end(input(step))}, false},
		"foreign":                     {[][]byte{source, foreign, end(input(source))}, false},
		"foreign as the last one":     {[][]byte{source, foreign}, false},
		"no operation":                {[][]byte{[]byte("\xff"), end(input(source))}, false},
	} {
		if got := returned(&pb.Definition{Def: tt.ops}, known); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestAddedFilesStayBelow gives addresses of ADD for a prefix of the policy's.
func TestAddedFilesStayBelow(t *testing.T) {
	const prefix = "http://x.local/pub/"
	rules := newSources([]string{prefix}).policy().Rules
	pattern := regexp.MustCompile(rules[len(rules)-1].Selector.Identifier)
	for rest, want := range map[string]bool{
		"f": true, "a/b-1.tar.gz": true, "../private/f": false, "a/../../private/f": false, "a/..": false, "./f": false, ".f": false,
		"/f": false, "a//f": false, "%2e%2e/f": false, "f?x": false, "f#x": false, "": false, "f\n": false, `a\..\f`: false,
	} {
		if got := pattern.MatchString(prefix + rest); got != want {
			t.Errorf("%q: %v", rest, got)
		}
	}
}
