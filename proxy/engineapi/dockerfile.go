package engineapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxDockerfile bounds a Dockerfile, in bytes.
const maxDockerfile = 1 << 20

var (
	directive     = regexp.MustCompile(`^#[ \t]*[A-Za-z0-9]+[ \t]*=`)
	continued     = regexp.MustCompile(`\\[ \t]*$`)
	baseImage     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/:@-]*$`)
	buildPlatform = regexp.MustCompile(`^--platform=[A-Za-z0-9/_]+$`)
	copyFlag      = regexp.MustCompile(`^--(from|chown|chmod|link|parents|exclude)(=[A-Za-z0-9._/:@*-]*)?$`)
	stageIndex    = regexp.MustCompile(`^[0-9]{1,3}$`)
	stageName     = regexp.MustCompile(`^[a-z][a-z0-9._-]*$`)
)

// dockerfile is what a Dockerfile says, line by line.
type dockerfile struct {
	lines  []dockerfileLine
	images []string // that it takes anything from, each once

	names []string // of the stages that are whole by then, in lower case
	name  string   // of the one that isn't, if it has any
}

// dockerfileLine is an instruction on one line. An image that it names stands between
// the two parts of it.
type dockerfileLine struct {
	before, image, after string
	from                 bool
}

// readDockerfile takes a Dockerfile apart. What engines of different versions read
// differently, what is only known when it is built, and what has the engine connect
// anywhere is an error.
func readDockerfile(text []byte) (*dockerfile, error) {
	lines, err := instructions(text)
	if err != nil {
		return nil, err
	}
	d := &dockerfile{}
	stages := 0
	for _, line := range lines {
		read, err := d.instruction(line)
		if err != nil {
			return nil, err
		}
		if read.from {
			stages++
		}
		if read.image != "" && !slices.Contains(d.images, read.image) {
			d.images = append(d.images, read.image)
		}
		d.lines = append(d.lines, read)
	}
	if stages == 0 {
		return nil, errors.New("it has no FROM")
	}
	return d, nil
}

// encode writes a Dockerfile that says the same, with IDs in the images' stead, and
// labels on whatever any stage makes. So nobody else's image of the same instructions is
// taken for one of these, as the engine's cache would.
func (d *dockerfile) encode(ids, labels map[string]string) []byte {
	stamp := "LABEL"
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		stamp += " " + name + "=" + dockerfileQuote(labels[name])
	}
	var b bytes.Buffer
	for _, line := range d.lines {
		b.WriteString(line.before + cmp.Or(ids[line.image], line.image) + line.after + "\n")
		if line.from {
			b.WriteString(stamp + "\n")
		}
	}
	return b.Bytes()
}

// instructions joins continued lines, and leaves out comments.
func instructions(dockerfile []byte) ([]string, error) {
	if len(dockerfile) > maxDockerfile || !utf8.Valid(dockerfile) || strings.ContainsRune(string(dockerfile), 0) {
		return nil, fmt.Errorf("it is not a text of at most %d bytes", maxDockerfile)
	}
	text := strings.TrimPrefix(string(dockerfile), "\ufeff")
	var out []string
	open, begun := "", false
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimSuffix(line, "\r")
		if strings.ContainsAny(line, "\r\v\f\u0085\u2028\u2029") {
			return nil, errors.New("it has line breaks of another kind")
		}
		trimmed := strings.TrimSpace(line)
		if strings.HasPrefix(trimmed, "#") {
			if !begun && directive.MatchString(trimmed) {
				return nil, fmt.Errorf("the parser directive %q is refused", shorten(trimmed))
			}
			continue
		}
		if trimmed == "" {
			continue // also within a continued line
		}
		begun = true
		if strings.HasSuffix(strings.TrimRight(line, " \t"), `\\`) {
			return nil, errors.New("a line ends with two backslashes, which not every engine reads alike")
		}
		if continued.MatchString(line) {
			open += continued.ReplaceAllString(line, "")
			continue
		}
		out, open = append(out, strings.TrimSpace(open+line)), ""
	}
	if open != "" {
		out = append(out, strings.TrimSpace(open))
	}
	return out, nil
}

func (d *dockerfile) instruction(line string) (dockerfileLine, error) {
	out := dockerfileLine{before: line}
	word, rest, _ := cutSpace(line)
	switch strings.ToUpper(word) {
	case "FROM":
		return d.from(rest)
	case "COPY":
		return d.copyFrom(line, rest)
	case "ONBUILD":
		return out, onBuild(rest)
	}
	return out, plain(word, rest)
}

// plain checks an instruction that names no image.
func plain(word, rest string) error {
	switch strings.ToUpper(word) {
	case "ADD":
		return add(rest)
	case "RUN":
		if strings.HasPrefix(rest, "-") || strings.Contains(rest, "<<") {
			return errors.New("RUN with options, or with a here-document, is refused")
		}
	case "LABEL":
		return label(rest)
	case "ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR":
	default:
		return fmt.Errorf("the instruction %q is not known", shorten(word))
	}
	return nil
}

// onBuild checks an instruction that images carry for the builds that are made of them:
// there any name could be another image's.
func onBuild(line string) error {
	word, rest, _ := cutSpace(strings.TrimSpace(line))
	if strings.EqualFold(word, "COPY") {
		if read, err := (&dockerfile{}).copyFrom(line, rest); err != nil || read.image != "" {
			return errors.New("ONBUILD COPY is for files of the build's context only")
		}
		return nil
	}
	return plain(word, rest) // which knows neither FROM nor ONBUILD
}

// from reads "[--platform=…] image [AS name]".
func (d *dockerfile) from(rest string) (dockerfileLine, error) {
	out := dockerfileLine{before: "FROM ", from: true}
	words := strings.Fields(rest)
	if len(words) > 0 && strings.HasPrefix(words[0], "-") {
		if !buildPlatform.MatchString(words[0]) {
			return out, fmt.Errorf("the option %q of FROM is refused", shorten(words[0]))
		}
		out.before += words[0] + " "
		words = words[1:]
	}
	switch {
	case len(words) != 1 && (len(words) != 3 || !strings.EqualFold(words[1], "as")):
		return out, errors.New("FROM is not followed by an image")
	case strings.Contains(words[0], "$"):
		return out, fmt.Errorf("FROM %s is refused: name the image itself, as a variable could be any", shorten(words[0]))
	case !baseImage.MatchString(words[0]):
		return out, fmt.Errorf("FROM %s names no image", shorten(words[0]))
	}
	if d.name != "" {
		d.names, d.name = append(d.names, d.name), ""
	}
	if slices.Contains(d.names, strings.ToLower(words[0])) || words[0] == "scratch" {
		out.before += words[0]
	} else {
		out.image = words[0]
	}
	if len(words) == 3 {
		if d.name = strings.ToLower(words[2]); !stageName.MatchString(d.name) {
			return out, fmt.Errorf("%s is no name for a stage", shorten(words[2]))
		}
		out.after = " AS " + words[2]
	}
	return out, nil
}

// copyFrom finds the image that COPY --from takes from. The name of the stage that it is
// in is none of a stage's for the engine.
func (d *dockerfile) copyFrom(line, rest string) (dockerfileLine, error) {
	out := dockerfileLine{before: line}
	if strings.Contains(rest, "<<") {
		return out, errors.New("COPY of a here-document is refused")
	}
	const option = "--from="
	seen := false
	for _, word := range strings.Fields(rest) {
		if !strings.HasPrefix(strings.TrimLeft(word, `"'\`), "-") {
			break // options come first
		}
		if !copyFlag.MatchString(word) {
			return out, fmt.Errorf("the option %q of COPY is refused", shorten(word))
		}
		name, ok := strings.CutPrefix(word, option)
		if !ok {
			continue
		}
		if seen {
			return out, errors.New("COPY has the option --from twice")
		}
		if seen = true; stageIndex.MatchString(name) || slices.Contains(d.names, strings.ToLower(name)) {
			continue
		}
		if !baseImage.MatchString(name) {
			return out, fmt.Errorf("COPY --from=%s names no image", shorten(name))
		}
		before, after, _ := strings.Cut(line, option)
		out = dockerfileLine{before: before + option, image: name, after: strings.TrimPrefix(after, name)}
	}
	return out, nil
}

// label refuses names that are Berm's own, or that are only known when it is built.
func label(rest string) error {
	for i, word := range strings.Fields(rest) {
		name, _, pair := strings.Cut(word, "=")
		if !pair && i > 0 {
			continue // a value goes on
		}
		if strings.Contains(name, "$") {
			return errors.New("LABEL with a variable in a name is refused")
		}
		name = strings.NewReplacer(`"`, "", `'`, "", `\`, "").Replace(name)
		if strings.HasPrefix(strings.ToLower(name), labelPrefix) {
			return fmt.Errorf("labels that begin with %s are Berm's own", labelPrefix)
		}
	}
	return nil
}

// add refuses whatever could be an address, as the engine would connect there.
func add(rest string) error {
	refused := errors.New("ADD is for files of the build's context only, without variables, quotes and escapes")
	for strings.HasPrefix(rest, "-") {
		var option string
		if option, rest, _ = cutSpace(rest); !copyFlag.MatchString(option) || strings.HasPrefix(option, "--from") {
			return fmt.Errorf("the option %q of ADD is refused", shorten(option))
		}
	}
	if strings.ContainsAny(rest, "$\\'`@") || strings.Contains(rest, "://") || strings.Contains(rest, "<<") {
		return refused
	}
	if strings.Contains(rest, `"`) {
		var list []string
		if json.Unmarshal([]byte(rest), &list) != nil {
			return refused // an engine would take it for words, and the quotes away
		}
	}
	return nil
}

// cutSpace cuts a line at its first white space.
func cutSpace(line string) (before, after string, found bool) {
	i := strings.IndexAny(line, " \t")
	if i < 0 {
		return line, "", false
	}
	return line[:i], strings.TrimSpace(line[i:]), true
}
