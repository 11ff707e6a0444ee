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
	l.sections["metrics"] = true // for its removed key
	l.file(data)
	l.environ(opts.Environ)
	l.flags(opts.Flags)
	l.errs = append(l.errs, c.validate()...)
	if len(l.errs) > 0 {
		return nil, errors.Join(l.errs...)
	}
	return c, nil
}

// removed maps keys of earlier versions to what to do about them.
var removed = map[string]string{
	"metrics.enabled":      "remove it; /metrics is always served, to tokens with the scope status:read",
	"sandbox.max_queued":   "remove it; 64 commands may wait for their turn in a sandbox",
	"sandbox.port_timeout": "remove it; a port has a minute to answer",
	"tracing.enabled":      "remove it; tracing.sample_ratio: 0 sends no traces",
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
		case removed[key] != "":
			l.errorf("line %d: %s: no longer a key: %s", name.Line, key, removed[key])
		case !known:
			l.errorf("line %d: %s: unknown key", name.Line, key)
		case f.secret == "true":
			l.errorf("line %d: %s: a secret doesn't belong into the file; set %s, or name a file", name.Line, key, f.env())
		default:
			flaws := set(key, f.value, value)
			for _, flaw := range flaws {
				if flaw.line == value.Line {
					flaw.line = name.Line
				}
				l.errorf("line %d: %s: %w", flaw.line, flaw.key, flaw.err)
			}
			if len(flaws) == 0 {
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
	for key := range removed {
		f := field{key: key}
		byEnv[f.env()] = f
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if f, ok := byEnv[name]; ok {
			if todo := removed[f.key]; todo != "" {
				l.errorf("%s: no longer a key: %s", name, todo)
			} else {
				l.override(f, value, name)
			}
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

// override sets a field from text: strings as they are, lists of texts comma-separated,
// everything else, and lists in brackets, as YAML.
func (l *loader) override(f field, text, source string) {
	node := yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
	bare := strings.TrimSpace(text)
	_, mappings := listOf(f.value.Type())
	switch kind := f.value.Kind(); {
	case kind == reflect.String:
	case kind == reflect.Slice && !strings.HasPrefix(bare, "[") && (!mappings || bare == ""):
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
	flaws := set(f.key, f.value, &node)
	for _, flaw := range flaws {
		l.errorf("%s (from %s): %w", flaw.key, source, flaw.err)
	}
	if len(flaws) == 0 {
		l.config.source[f.key] = source
	}
}

// flaw is what is wrong with a value, and where in it.
type flaw struct {
	key  string
	line int
	err  error
}

// set decodes a node into the value of a key. Errors don't quote what may be a secret.
func set(key string, value reflect.Value, n *yaml.Node) []flaw {
	if _, ok := listOf(value.Type()); ok {
		return setList(key, value, n)
	}
	err := plain(n)
	if err == nil {
		err = setPlain(value, n)
	}
	if err != nil {
		return []flaw{{key, n.Line, err}}
	}
	return nil
}

// setList decodes a list of mappings, each of which has the keys of a struct.
func setList(key string, value reflect.Value, n *yaml.Node) (flaws []flaw) {
	if n.Kind != yaml.SequenceNode || n.Anchor != "" {
		return []flaw{{key, n.Line, errors.New("want a list of mappings")}}
	}
	list := reflect.MakeSlice(value.Type(), len(n.Content), len(n.Content))
	for i, item := range n.Content {
		flaws = append(flaws, setStruct(fmt.Sprintf("%s[%d]", key, i), list.Index(i), item)...)
	}
	if len(flaws) == 0 {
		value.Set(list)
	}
	return flaws
}

func setStruct(key string, value reflect.Value, n *yaml.Node) (flaws []flaw) {
	if n.Kind != yaml.MappingNode || n.Anchor != "" {
		return []flaw{{key, n.Line, errors.New("want a mapping of keys")}}
	}
	known := map[string]reflect.Value{}
	for i := range value.NumField() {
		known[value.Type().Field(i).Tag.Get("yaml")] = value.Field(i)
	}
	seen := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		name, sub := n.Content[i], key+"."+n.Content[i].Value
		switch v, ok := known[name.Value]; {
		case seen[name.Value]:
			flaws = append(flaws, flaw{sub, name.Line, errors.New("given twice")})
		case !ok:
			flaws = append(flaws, flaw{sub, name.Line, errors.New("unknown key")})
		default:
			flaws = append(flaws, set(sub, v, n.Content[i+1])...)
		}
		seen[name.Value] = true
	}
	return flaws
}

func setPlain(value reflect.Value, n *yaml.Node) error {
	fresh := reflect.New(value.Type())
	want, shape := "text", yaml.ScalarNode
	switch value.Interface().(type) {
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
	case []uint32:
		want, shape = "a list of whole numbers", yaml.SequenceNode
		if slices.ContainsFunc(n.Content, func(n *yaml.Node) bool { return n.ShortTag() != "!!int" }) {
			shape = 0 // 0.5 is no 0
		}
	case map[string]string:
		want, shape = "a mapping of names to texts, each name once", yaml.MappingNode
	}
	if n.Kind != shape || n.Decode(fresh.Interface()) != nil {
		return fmt.Errorf("want %s", want)
	}
	value.Set(fresh.Elem())
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
