package engineapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/bermhq/berm/runtime"
)

const (
	maxDockerfile   = 64 << 10 // bytes; the parser's time grows with the square
	maxInstructions = 2048
	maxVariables    = 64      // with <<, for which the parser expands them in cubic time
	maxExpansion    = 1 << 10 // bytes of a word with variables, and of a variable's value
)

var (
	baseImage  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/:@-]*$`)
	buildFlag  = regexp.MustCompile(`^--[a-z-]+(=[A-Za-z0-9._/:@*-]*)?$`)
	buildArg   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	labelName  = regexp.MustCompile("^(\"[^\"'`$\\\\]+\"|[^\"'`$\\\\]+)$")
	stageIndex = regexp.MustCompile(`^[0-9]{1,3}$`)
)

// unexpanded are the instructions whose arguments the engine takes as they are.
var unexpanded = []string{"RUN", "CMD", "ENTRYPOINT", "SHELL", "HEALTHCHECK", "ONBUILD"}

// dockerfile is a Dockerfile that is judged, except for the images that it uses.
type dockerfile struct {
	args map[string]string // build arguments of the request
	urls []string          // prefixes of what ADD may fetch

	nodes  []*parser.Node // instructions, upper case, FROM with its variables expanded
	images []string       // that it uses, each once
	uses   []imageUse
	escape rune
	env    []string // ARG before the first FROM, as NAME=value
	stages int
	names  []string // of the complete stages, lower case
	name   string   // of the current stage; empty if it has none
}

// imageUse is a place where an image is named.
type imageUse struct {
	image string
	set   func(id string)
}

// readDockerfile parses a Dockerfile. It fails if the file needs BuildKit, if versions of the engine read
// it differently, or if ADD names an address that begins with none of urls.
func readDockerfile(text []byte, args map[string]string, urls []string) (*dockerfile, error) {
	d, err := parseDockerfile(text)
	if err != nil {
		return nil, err
	}
	d.args, d.urls = args, urls
	for _, n := range d.nodes {
		if err := d.instruction(n); err != nil {
			return nil, fmt.Errorf("line %d: %w", n.StartLine, err)
		}
		if d.stages == 0 && n.Value != "ARG" { // the engine refuses it too, once it has the files
			return nil, fmt.Errorf("line %d: %s before the first FROM, where only ARG may be", n.StartLine, n.Value)
		}
	}
	if d.stages == 0 {
		return nil, errors.New("no FROM")
	}
	return d, nil
}

// parseDockerfile parses a Dockerfile, unless that would keep the parser busy for long.
func parseDockerfile(text []byte) (*dockerfile, error) {
	switch {
	case len(text) > maxDockerfile || !utf8.Valid(text):
		return nil, fmt.Errorf("larger than %d bytes or not UTF-8", maxDockerfile)
	case bytes.Contains(text, []byte("<<")) && bytes.Count(text, []byte("${")) > maxVariables:
		return nil, fmt.Errorf("more than %d variables beside <<", maxVariables)
	}
	parsed, err := parser.Parse(bytes.NewReader(text))
	if err != nil {
		return nil, errors.New(body.Shorten(err.Error()))
	}
	if len(parsed.AST.Children) > maxInstructions {
		return nil, fmt.Errorf("more than %d instructions", maxInstructions)
	}
	return &dockerfile{escape: parsed.EscapeToken, nodes: parsed.AST.Children}, nil
}

// checkTrigger judges an ONBUILD instruction of a base image, which the engine reads as it
// is. It must be one line that all engines read alike.
func checkTrigger(text string, urls []string) error {
	d, err := parseDockerfile([]byte(text))
	if err != nil {
		return err
	}
	if len(d.nodes) != 1 {
		return errors.New("more than one instruction")
	}
	n := d.nodes[0]
	d.urls = urls
	if err := d.onBuild(n); err != nil {
		return err
	}
	if _, err := instructionLine(n); err != nil {
		return err
	}
	return checkLine(text)
}

// commitInstructions change no more than an image's configuration.
var commitInstructions = []string{"CMD", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}

// readChanges judges the changes of a commit, which the engine reads as a Dockerfile, and
// writes them anew, one instruction each.
func readChanges(changes []string) ([]string, error) {
	text := strings.Join(changes, "\n")
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	d, err := parseDockerfile([]byte(text))
	if err != nil {
		return nil, err
	}
	d.stages = 1
	for _, n := range d.nodes {
		if !slices.Contains(commitInstructions, strings.ToUpper(n.Value)) {
			return nil, fmt.Errorf("%q changes more than an image's configuration", body.Shorten(n.Value))
		}
		if err := d.instruction(n); err != nil {
			return nil, err
		}
	}
	out, err := d.encode(nil, nil)
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), err
}

// encode writes the Dockerfile with one instruction a line, image IDs instead of names,
// and labels for each stage. Labels keep the engine's build cache apart for each tenant.
// It fails unless the result parses to the same tree.
func (d *dockerfile) encode(ids, labels map[string]string) ([]byte, error) {
	for _, use := range d.uses {
		use.set(cmp.Or(ids[use.image], use.image))
	}
	text := "LABEL"
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		text += " " + name + "=" + dockerfileQuote(labels[name])
	}
	stamp, err := parser.Parse(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	want := &parser.Node{}
	for _, n := range d.nodes {
		line, err := instructionLine(n)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n.StartLine, err)
		}
		b.WriteString(line + "\n")
		want.Children = append(want.Children, n)
		if n.Value == "FROM" && len(labels) > 0 {
			b.WriteString(text + "\n")
			want.Children = append(want.Children, stamp.AST.Children...)
		}
	}
	got, err := parser.Parse(bytes.NewReader(b.Bytes()))
	if err != nil || !sameTree(want, got.AST) {
		return nil, errors.New("engines may read it differently")
	}
	return b.Bytes(), nil
}

// sameTree reports whether two nodes, and those that follow, say the same.
func sameTree(a, b *parser.Node) bool {
	for ; a != nil && b != nil; a, b = a.Next, b.Next {
		if a.Value != b.Value || a.Attributes["json"] != b.Attributes["json"] || len(a.Heredocs)+len(b.Heredocs) > 0 ||
			!slices.Equal(a.Flags, b.Flags) || !slices.EqualFunc(a.Children, b.Children, sameTree) {
			return false
		}
	}
	return a == nil && b == nil
}

// instructionLine writes an instruction. It fails if parsers differ about the line.
func instructionLine(n *parser.Node) (string, error) {
	words, next := append([]string{n.Value}, n.Flags...), n.Next
	if n.Value == "HEALTHCHECK" && next != nil {
		words, next = append(words, next.Value), next.Next
	}
	switch {
	case n.Value == "ONBUILD":
		line, err := instructionLine(next.Children[0])
		return "ONBUILD " + line, err
	case n.Attributes["json"]:
		list := []string{}
		for ; next != nil; next = next.Next {
			list = append(list, next.Value)
		}
		text, err := json.Marshal(list)
		if err != nil {
			return "", err
		}
		words = append(words, string(text))
	case n.Value == "ENV" || n.Value == "LABEL": // name, value, separator
		for ; next != nil; next = next.Next.Next.Next {
			words = append(words, next.Value+cmp.Or(next.Next.Next.Value, " ")+next.Next.Value)
		}
	default:
		var args []string
		for ; next != nil; next = next.Next {
			args = append(args, next.Value)
		}
		text := strings.TrimLeftFunc(strings.Join(args, " "), unicode.IsSpace)
		var list []any
		if strings.HasPrefix(text, "[") && json.NewDecoder(strings.NewReader(text)).Decode(&list) == nil {
			return "", fmt.Errorf("%s has text after a JSON array, which old engines ignore", n.Value)
		}
		words = append(words, args...)
	}
	line := strings.Join(words, " ")
	return line, checkLine(line)
}

// checkLine fails if not all engines take a line for the same instruction.
func checkLine(line string) error {
	switch {
	case !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool {
		return r != ' ' && r != '\t' && (unicode.IsSpace(r) || unicode.IsControl(r)) || r == '\ufeff'
	}):
		return fmt.Errorf("%q has control characters or Unicode spaces", body.Shorten(line))
	case strings.HasSuffix(strings.TrimRight(line, " \t"), `\`):
		return fmt.Errorf("%q ends with a backslash", body.Shorten(line))
	case strings.Contains(line, "<<"):
		return fmt.Errorf("%q has <<: here-documents need BuildKit", body.Shorten(line))
	}
	return nil
}

// instruction judges an instruction, and expands the variables of FROM.
func (d *dockerfile) instruction(n *parser.Node) error {
	n.PrevComment = nil
	n.Value = strings.ToUpper(strings.ToLower(n.Value)) // so that only ASCII is left of a keyword
	command, err := instructions.ParseInstruction(n)
	if err != nil {
		return errors.New(body.Shorten(err.Error()))
	}
	for _, flag := range n.Flags {
		if !buildFlag.MatchString(flag) || n.Value == "RUN" {
			return fmt.Errorf("the option %q of %s is refused", body.Shorten(flag), n.Value)
		}
	}
	if expands := !slices.Contains(unexpanded, n.Value); expands && d.escape != parser.DefaultEscapeToken && strings.ContainsAny(n.Original, "\\`") {
		return fmt.Errorf("%s with a backslash or backtick is refused after # escape", n.Value)
	}
	switch c := command.(type) {
	case *instructions.Stage:
		return d.from(n, c)
	case *instructions.CopyCommand:
		return d.copyFrom(n)
	case *instructions.AddCommand:
		return d.add(c.SourcePaths)
	case *instructions.LabelCommand:
		return label(c.Labels)
	case *instructions.WorkdirCommand:
		if runtime.KernelPath(path.Clean("/" + c.Path)) {
			return fmt.Errorf("WORKDIR %s is in a file system of the kernel", body.Shorten(c.Path))
		}
	case *instructions.ArgCommand:
		return d.arg(c.Args)
	case *instructions.OnbuildCommand:
		return d.onBuild(n.Next.Children[0])
	}
	return nil
}

// onBuild judges an instruction for builds of other Dockerfiles. It can't use images,
// since a name may be another image by then.
func (d *dockerfile) onBuild(n *parser.Node) error {
	sub := &dockerfile{urls: d.urls, escape: d.escape, stages: 1}
	if err := sub.instruction(n); err != nil {
		return err
	}
	if len(sub.images) > 0 || n.Value == "FROM" || n.Value == "ONBUILD" {
		return fmt.Errorf("ONBUILD %s can't use an image or a trigger", n.Value)
	}
	return nil
}

// use records that an image is used.
func (d *dockerfile) use(image string, set func(id string)) {
	d.uses = append(d.uses, imageUse{image, set})
	if !slices.Contains(d.images, image) {
		d.images = append(d.images, image)
	}
}

// expand replaces variables as the engine does in FROM.
func (d *dockerfile) expand(word string) (string, error) {
	if len(word) > maxExpansion {
		return "", fmt.Errorf("%q is longer than %d bytes", body.Shorten(word), maxExpansion)
	}
	word, _, err := shell.NewLex(d.escape).ProcessWord(word, shell.EnvsFromSlice(d.env))
	if err == nil && len(word) > maxExpansion {
		err = fmt.Errorf("%q is longer than %d bytes", body.Shorten(word), maxExpansion)
	}
	return word, err
}

// arg records the arguments that FROM may use. The engine expands later ones itself: they can't be part
// of an image's name, a label's name or an address.
func (d *dockerfile) arg(args []instructions.KeyValuePairOptional) error {
	for _, a := range args {
		value, given := d.args[a.Key]
		switch {
		case d.stages > 0 || !given && a.Value == nil:
			continue
		case !buildArg.MatchString(a.Key):
			return fmt.Errorf("ARG %s is no name", body.Shorten(a.Key))
		case !given:
			var err error
			if value, err = d.expand(*a.Value); err != nil {
				return err
			}
		case len(value) > maxExpansion:
			return fmt.Errorf("build argument %s is longer than %d bytes", a.Key, maxExpansion)
		}
		d.env = append(d.env, a.Key+"="+value)
	}
	return nil
}

func (d *dockerfile) from(n *parser.Node, s *instructions.Stage) error {
	base, err := d.expand(s.BaseName)
	if err != nil {
		return err
	}
	if !baseImage.MatchString(base) {
		return fmt.Errorf("FROM %s names no image", body.Shorten(base))
	}
	if s.Platform != "" && !body.Platform.MatchString(s.Platform) {
		return fmt.Errorf("%q is no platform", body.Shorten(s.Platform))
	}
	n.Next = &parser.Node{Value: base}
	if s.Name != "" {
		n.Next.Next = &parser.Node{Value: "AS", Next: &parser.Node{Value: s.Name}}
	}
	if d.name != "" {
		d.names = append(d.names, d.name)
	}
	d.name = s.Name
	d.stages++
	if base != "scratch" && !slices.Contains(d.names, strings.ToLower(base)) {
		d.use(base, func(id string) { n.Next.Value = id })
	}
	return nil
}

// copyFrom finds the image of COPY --from. Like the engine, it takes the current stage's name for an
// image's.
func (d *dockerfile) copyFrom(n *parser.Node) error {
	for i, flag := range n.Flags {
		name, ok := strings.CutPrefix(flag, "--from=")
		if !ok || stageIndex.MatchString(name) || slices.Contains(d.names, strings.ToLower(name)) {
			continue
		}
		if !baseImage.MatchString(name) {
			return fmt.Errorf("COPY --from=%s names no image", body.Shorten(name))
		}
		d.use(name, func(id string) { n.Flags[i] = "--from=" + id })
	}
	return nil
}

// label refuses names that are reserved, or that only the engine's expansion makes known.
func label(labels instructions.KeyValuePairs) error {
	for _, l := range labels {
		if !labelName.MatchString(l.Key) {
			return fmt.Errorf("LABEL with quotes, escapes or variables in the name %q is refused", body.Shorten(l.Key))
		}
		if strings.HasPrefix(strings.ToLower(strings.Trim(l.Key, `"`)), labelPrefix) {
			return fmt.Errorf("labels that begin with %s are reserved", labelPrefix)
		}
	}
	return nil
}

// add refuses sources that the engine would fetch, unless the policy allows the address.
func (d *dockerfile) add(sources []string) error {
	for _, s := range sources {
		if strings.ContainsAny(s, "$\\\"'`@") {
			return fmt.Errorf("ADD %s: variables, quotes, escapes and @ are refused", body.Shorten(s))
		}
		if !strings.Contains(s, "://") {
			continue
		}
		u, err := url.Parse(s)
		if err != nil || !slices.ContainsFunc(d.urls, func(p string) bool { return strings.HasPrefix(s, p) }) || strings.Contains(u.Path, "..") {
			return fmt.Errorf("ADD %s: the address is not one of engine_api.build_add_url", body.Shorten(s))
		}
	}
	return nil
}
