package engineapi

import (
	"encoding/json"
	"errors"
	"fmt"
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
)

// baseImages names the images that a Dockerfile takes anything from. What engines of
// different versions read differently, what is only known when it is built, and what has
// the engine connect anywhere is an error.
func baseImages(dockerfile []byte) ([]string, error) {
	lines, err := instructions(dockerfile)
	if err != nil {
		return nil, err
	}
	d := &dockerfileReader{}
	for _, line := range lines {
		if err := d.instruction(line, false); err != nil {
			return nil, err
		}
	}
	if d.stages == 0 {
		return nil, errors.New("it has no FROM")
	}
	return d.images, nil
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

type dockerfileReader struct {
	images []string
	names  []string // of stages, in lower case
	stages int
}

func (d *dockerfileReader) instruction(line string, trigger bool) error {
	word, rest, _ := cutSpace(line)
	switch strings.ToUpper(word) {
	case "FROM":
		if trigger {
			return errors.New("FROM is not for ONBUILD")
		}
		return d.from(rest)
	case "COPY":
		return d.copyFrom(rest)
	case "ADD":
		return add(rest)
	case "RUN":
		if strings.HasPrefix(rest, "-") || strings.Contains(rest, "<<") {
			return errors.New("RUN with options, or with a here-document, is refused")
		}
	case "ONBUILD":
		if trigger {
			return errors.New("ONBUILD is not for ONBUILD")
		}
		return d.instruction(rest, true)
	case "LABEL":
		if strings.Contains(strings.ToLower(rest), labelPrefix) {
			return fmt.Errorf("labels that begin with %s are Berm's own", labelPrefix)
		}
	case "ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR":
	default:
		return fmt.Errorf("the instruction %q is not known", shorten(word))
	}
	return nil
}

// from reads "[--platform=…] image [AS name]".
func (d *dockerfileReader) from(rest string) error {
	words := strings.Fields(rest)
	if len(words) > 0 && strings.HasPrefix(words[0], "-") {
		if !buildPlatform.MatchString(words[0]) {
			return fmt.Errorf("the option %q of FROM is refused", shorten(words[0]))
		}
		words = words[1:]
	}
	switch {
	case len(words) != 1 && (len(words) != 3 || !strings.EqualFold(words[1], "as")):
		return errors.New("FROM is not followed by an image")
	case strings.Contains(words[0], "$"):
		return fmt.Errorf("FROM %s is refused: name the image itself, as a variable could be any", shorten(words[0]))
	case !baseImage.MatchString(words[0]):
		return fmt.Errorf("FROM %s names no image", shorten(words[0]))
	}
	if !slices.Contains(d.names, strings.ToLower(words[0])) && words[0] != "scratch" {
		d.images = append(d.images, words[0])
	}
	d.stages++
	if len(words) == 3 {
		if !baseImage.MatchString(words[2]) {
			return fmt.Errorf("the stage %s has no name", shorten(words[2]))
		}
		d.names = append(d.names, strings.ToLower(words[2]))
	}
	return nil
}

// copyFrom finds the image that COPY --from takes from.
func (d *dockerfileReader) copyFrom(rest string) error {
	if strings.Contains(rest, "<<") {
		return errors.New("COPY of a here-document is refused")
	}
	for _, word := range strings.Fields(rest) {
		if !strings.HasPrefix(strings.TrimLeft(word, `"'\`), "-") {
			return nil // options come first
		}
		if !copyFlag.MatchString(word) {
			return fmt.Errorf("the option %q of COPY is refused", shorten(word))
		}
		name, ok := strings.CutPrefix(word, "--from=")
		if !ok || stageIndex.MatchString(name) || slices.Contains(d.names, strings.ToLower(name)) {
			continue
		}
		if !baseImage.MatchString(name) {
			return fmt.Errorf("COPY --from=%s names no image", shorten(name))
		}
		d.images = append(d.images, name)
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
