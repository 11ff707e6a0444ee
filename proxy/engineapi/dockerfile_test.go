package engineapi

import (
	"slices"
	"strings"
	"testing"

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
