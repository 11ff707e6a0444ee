package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/moby/buildkit/util/suggest"
	"go.yaml.in/yaml/v3"
)

// Document is the result of Decode. Its messages quote keys, and never a value.
type Document struct {
	Problems []Problem      // in the order of the text
	Lines    map[string]int // of every key that is there, by its path
	Nulls    []string       // paths of keys without a value, which count as left out; mappings aren't among them

	sound    map[string]bool       // values without a problem, by their paths
	mappings map[string]*yaml.Node // by their paths
}

// Decode fills out, a pointer, from one YAML document, strictly. It goes on after a
// problem. An empty document leaves out as it was. The library's own strict mode knows
// neither the path of a key nor anything but its own types' names in its messages.
func Decode(data []byte, out any) *Document {
	d := newDocument()
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	if err := dec.Decode(&doc); err != nil {
		switch {
		case errors.Is(err, io.EOF):
		case strings.Contains(err.Error(), "unknown anchor"): // the parser's message quotes the value
			d.problem("", "aliases are not supported, and one names no anchor")
		default:
			d.problem("", "%s", strings.TrimPrefix(err.Error(), "yaml: "))
		}
		return d
	}
	if err := dec.Decode(&next); !errors.Is(err, io.EOF) {
		d.problem("", "there is more than one YAML document")
	}
	d.value(doc.Content[0], reflect.ValueOf(out).Elem(), "")
	return d
}

func newDocument() *Document {
	return &Document{Lines: map[string]int{}, sound: map[string]bool{}, mappings: map[string]*yaml.Node{}}
}

// decodeOver fills out, a pointer, from the mapping at path once more. Keys that the mapping
// leaves out keep their values. It notes no problems: Decode has noted them.
func (d *Document) decodeOver(path string, out any) {
	if n := d.mappings[path]; n != nil {
		newDocument().value(n, reflect.ValueOf(out).Elem(), "")
	}
}

// problem notes a problem with the key at path. Its line is that of the key, or of the nearest key
// above it that is in the file.
func (d *Document) problem(path, format string, args ...any) {
	line := 0
	for p := path; p != "" && line == 0; p = p[:max(strings.LastIndexAny(p, ".["), 0)] {
		line = d.Lines[p]
	}
	d.Problems = append(d.Problems, Problem{Line: line, Path: path, Message: fmt.Sprintf(format, args...)})
}

func (d *Document) value(n *yaml.Node, v reflect.Value, path string) {
	if path != "" && d.Lines[path] == 0 { // unless its key is known already
		d.Lines[path] = n.Line
	}
	if n.Kind == yaml.AliasNode {
		d.problem(path, "aliases are not supported")
		return
	}
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		if v.Kind() != reflect.Struct && v.Kind() != reflect.Map { // whose keys may all be commented out
			d.Nulls = append(d.Nulls, path)
		}
		return
	}
	if v.Kind() == reflect.Pointer {
		e, before := reflect.New(v.Type().Elem()), len(d.Problems)
		// A bad value counts as left out, so that nobody complains about it again.
		if d.value(n, e.Elem(), path); len(d.Problems) == before {
			v.Set(e)
		}
		return
	}
	before := len(d.Problems)
	defer func() { d.sound[path] = len(d.Problems) == before }()
	switch v.Kind() {
	case reflect.Struct, reflect.Map:
		d.mapping(n, v, path)
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			d.problem(path, "must be a list")
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, c := range n.Content {
			d.value(c, v.Index(i), fmt.Sprintf("%s[%d]", path, i))
		}
	default:
		d.scalar(n, v, path)
	}
}

func (d *Document) mapping(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.MappingNode {
		d.problem(path, "must be a mapping")
		return
	}
	d.mappings[path] = n
	if v.Kind() == reflect.Map {
		v.Set(reflect.MakeMap(v.Type()))
	}
	seen := map[string]int{}
	for i := 0; i < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			d.problem(path, "line %d has a key that is not a plain word", key.Line)
			continue
		}
		sub := join(path, key.Value)
		if first := seen[key.Value]; first != 0 {
			d.Lines[sub] = key.Line
			d.problem(sub, "is there twice, first on line %d", first)
			continue
		}
		seen[key.Value] = key.Line
		d.Lines[sub] = key.Line
		if v.Kind() == reflect.Map {
			e := reflect.New(v.Type().Elem()).Elem()
			d.value(val, e, sub)
			v.SetMapIndex(reflect.ValueOf(key.Value), e)
			continue
		}
		known := fields(v.Type())
		f, ok := known[key.Value]
		if !ok {
			d.problem(sub, "is not a known key (%sknown here: %s)", nearest(key.Value, sortedKeys(known)), strings.Join(sortedKeys(known), ", "))
			continue
		}
		d.value(val, v.FieldByIndex(f), sub)
	}
}

// nearest asks whether the known name that is nearest to an unknown one was meant. It returns
// nothing if none is near.
func nearest(name string, known []string) string {
	match, ok := suggest.Search(name, known, true)
	if !ok {
		return ""
	}
	return fmt.Sprintf("did you mean %q? ", match)
}

func (d *Document) scalar(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.ScalarNode {
		d.problem(path, "must be a single value")
		return
	}
	tag := n.ShortTag()
	switch {
	case v.Type() == reflect.TypeFor[time.Duration]():
		t, err := time.ParseDuration(n.Value)
		if err != nil {
			d.problem(path, "must be a duration such as 30s, 15m or 24h")
			return
		}
		v.SetInt(int64(t))
	case v.Kind() == reflect.String:
		if tag == "!!binary" || strings.HasPrefix(tag, "!") && !strings.HasPrefix(tag, "!!") {
			d.problem(path, "must be a plain string")
			return
		}
		v.SetString(n.Value)
	case v.Kind() == reflect.Bool:
		if tag != "!!bool" || n.Decode(v.Addr().Interface()) != nil {
			d.problem(path, "must be true or false")
		}
	case v.CanInt(), v.CanUint():
		if tag != "!!int" || n.Decode(v.Addr().Interface()) != nil {
			d.problem(path, "must be a whole number")
		}
	case v.Kind() == reflect.Float64:
		if tag != "!!int" && tag != "!!float" || n.Decode(v.Addr().Interface()) != nil {
			d.problem(path, "must be a number")
		}
	}
}

// fields returns the indexes of a struct's fields by their YAML names. Those of an embedded
// struct are among them.
func fields(t reflect.Type) map[string][]int {
	indexes := map[string][]int{}
	for _, f := range reflect.VisibleFields(t) {
		if name, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); name != "" && name != "-" {
			indexes[name] = f.Index
		}
	}
	return indexes
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
