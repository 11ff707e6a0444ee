package config

import (
	"fmt"
	"io"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

const redacted = "[redacted]"

// Print writes the settings in force as a commented YAML file, with where each
// came from. A secret that is set is shown as [redacted]; one that isn't is named in a
// comment, with its environment variable.
func (c *Config) Print(w io.Writer) error {
	root := &yaml.Node{Kind: yaml.MappingNode}
	sections := map[string]*yaml.Node{}
	above := "" // comments on what isn't in the file
	for _, f := range fields(c) {
		into, name := root, f.key
		if section, rest, ok := strings.Cut(f.key, "."); ok {
			name = rest
			if sections[section] == nil {
				sections[section] = &yaml.Node{Kind: yaml.MappingNode}
				root.Content = append(root.Content, scalar(section), sections[section])
			}
			into = sections[section]
		}
		value, err := printed(f)
		if err != nil {
			return fmt.Errorf("print %s: %w", f.key, err)
		}
		if value == nil {
			above += f.env() + ", never in this file: " + f.doc + "\n"
			continue
		}
		key := scalar(name)
		key.HeadComment, above = above+f.doc, ""
		if list, ok := listOf(f.value.Type()); ok {
			for _, e := range elements(name, list) {
				key.HeadComment += "\n" + e.key + ": " + e.doc
			}
		}
		source := c.source[f.key]
		if source == "" {
			source = "default"
		}
		if value.Style != yaml.FlowStyle && len(value.Content) > 0 {
			key.HeadComment += "\n" + source
		} else {
			value.LineComment = source
		}
		into.Content = append(into.Content, key, value)
	}
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		return fmt.Errorf("print the configuration: %w", err)
	}
	return enc.Close()
}

// printed is the node of a field's value; nil for a secret that isn't set.
func printed(f field) (*yaml.Node, error) {
	var node yaml.Node
	switch {
	case f.secret == "true" && f.value.IsZero():
		return nil, nil
	case f.secret == "true":
		return scalar(redacted), nil
	case f.secret == "values" && f.value.Len() > 0:
		shown := map[string]string{}
		for _, name := range f.value.MapKeys() {
			shown[name.String()] = redacted
		}
		return &node, node.Encode(shown)
	case f.value.Kind() == reflect.Map:
		return &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}, nil
	}
	err := node.Encode(f.value.Interface())
	if node.Kind == yaml.SequenceNode && (len(node.Content) == 0 || node.Content[0].Kind == yaml.ScalarNode) {
		node.Style = yaml.FlowStyle
	}
	return &node, err
}

func scalar(text string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(text)
	return n
}
