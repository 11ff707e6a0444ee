package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// maxFileBytes bounds the file; a real one is a few kilobytes.
const maxFileBytes = 1 << 20

// Options say where the settings come from. The zero value gives the defaults.
type Options struct {
	File    string            // path of the YAML file; empty is none
	Environ []string          // "NAME=value", as os.Environ gives it
	Flags   map[string]string // by key ("http.listen"), in the form that the environment has
}

// Load reads the file, the environment and the flags, each over the one before,
// and checks the outcome. The error joins everything that is wrong.
func Load(opts Options) (*Config, error) {
	var data []byte
	if opts.File != "" {
		var err error
		if data, err = readFile(opts.File); err != nil {
			return nil, fmt.Errorf("read the configuration: %w", err)
		}
	}
	return parse(data, opts)
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxFileBytes)
	}
	return data, nil
}

func parse(data []byte, opts Options) (*Config, error) {
	c := Default()
	c.source = map[string]string{}
	l := loader{config: c, fields: map[string]field{}, sections: map[string]bool{}}
	for _, f := range fields(c) {
		l.fields[f.key] = f
		if section, _, ok := strings.Cut(f.key, "."); ok {
			l.sections[section] = true
		}
	}
	l.file(data)
	l.environ(opts.Environ)
	l.flags(opts.Flags)
	l.errs = append(l.errs, c.validate()...)
	if len(l.errs) > 0 {
		return nil, errors.Join(l.errs...)
	}
	return c, nil
}

type loader struct {
	config   *Config
	fields   map[string]field
	sections map[string]bool
	errs     []error
}

func (l *loader) errorf(format string, args ...any) {
	l.errs = append(l.errs, fmt.Errorf(format, args...))
}

// file takes the settings of a YAML document.
func (l *loader) file(data []byte) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return
	} else if err != nil {
		l.errorf("configuration file: %w", err)
		return
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		l.errorf("configuration file: more than one document")
	}
	l.mapping("", doc.Content[0])
}

func (l *loader) mapping(prefix string, n *yaml.Node) {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return // a section whose keys are all commented out
	}
	if n.Kind != yaml.MappingNode {
		l.errorf("line %d: %s: want a mapping of keys", n.Line, strings.TrimSuffix(prefix, "."))
		return
	}
	seen := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		key := prefix + name.Value
		f, known := l.fields[key]
		switch {
		case seen[key]:
			l.errorf("line %d: %s: given twice", name.Line, key)
		case prefix == "" && l.sections[key]:
			l.mapping(key+".", value)
		case !known:
			l.errorf("line %d: %s: unknown key", name.Line, key)
		case f.secret == "true":
			l.errorf("line %d: %s: a secret doesn't belong into the file; set %s, or name a file", name.Line, key, f.env())
		default:
			if err := set(f, value); err != nil {
				l.errorf("line %d: %s: %w", name.Line, key, err)
			} else {
				l.config.source[key] = "file"
			}
		}
		seen[key] = true
	}
}

// environ takes the settings of environment variables. One that begins like a
// section of ours but names no key is a mistake; other BERM_ variables belong to
// others.
func (l *loader) environ(environ []string) {
	byEnv := map[string]field{}
	for _, f := range l.fields {
		byEnv[f.env()] = f
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if f, ok := byEnv[name]; ok {
			l.override(f, value, name)
			continue
		}
		rest, ours := strings.CutPrefix(name, "BERM_")
		section, _, sub := strings.Cut(rest, "_")
		if ours && sub && l.sections[strings.ToLower(section)] {
			l.errorf("%s: unknown key", name)
		}
	}
}

func (l *loader) flags(flags map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(flags)) {
		f, ok := l.fields[key]
		if !ok {
			l.errorf("%s: unknown key", key)
			continue
		}
		l.override(f, flags[key], "flag")
	}
}

// override sets a field from text: strings as they are, lists comma-separated,
// everything else, and lists in brackets, as YAML.
func (l *loader) override(f field, text, source string) {
	node := yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
	switch kind := f.value.Kind(); {
	case kind == reflect.String:
	case kind == reflect.Slice && !strings.HasPrefix(strings.TrimSpace(text), "["):
		node = yaml.Node{Kind: yaml.SequenceNode}
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part != "" {
				node.Content = append(node.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: part})
			}
		}
	default:
		var doc yaml.Node
		if err := yaml.Unmarshal([]byte(text), &doc); err != nil || len(doc.Content) != 1 {
			// The parser's message would quote the value.
			l.errorf("%s (from %s): not a value of this key", f.key, source)
			return
		}
		node = *doc.Content[0]
	}
	if err := set(f, &node); err != nil {
		l.errorf("%s (from %s): %w", f.key, source, err)
		return
	}
	l.config.source[f.key] = source
}

// set decodes a node into a field. Errors don't quote what may be a secret.
func set(f field, n *yaml.Node) error {
	if err := plain(n); err != nil {
		return err
	}
	fresh := reflect.New(f.value.Type())
	want, shape := "text", yaml.ScalarNode
	switch f.value.Interface().(type) {
	case bool:
		want = "true or false"
	case int, int64:
		want = "a whole number"
	case float64:
		want = "a number"
	case time.Duration:
		want = "a duration such as 30s, 15m or 1h30m"
	case []string:
		want, shape = "a list of texts", yaml.SequenceNode
	case map[string]string:
		want, shape = "a mapping of names to texts, each name once", yaml.MappingNode
	}
	if n.Kind != shape || n.Decode(fresh.Interface()) != nil {
		return fmt.Errorf("want %s", want)
	}
	f.value.Set(fresh.Elem())
	return nil
}

// plain refuses what YAML can but a configuration needn't.
func plain(n *yaml.Node) error {
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		return errors.New("anchors and aliases are not supported")
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		return errors.New("has no value")
	}
	for _, child := range n.Content {
		if err := plain(child); err != nil {
			return err
		}
	}
	return nil
}
