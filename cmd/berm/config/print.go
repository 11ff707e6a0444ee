package config

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"go.yaml.in/yaml/v3"
)

const redacted = "[redacted]"

// Print writes the settings in force as a commented YAML file, with where each
// came from. A secret that is set is shown as [redacted]; one that isn't is named in a
// comment, with its environment variable.
func (c *Config) Print(w io.Writer) error {
	var root yaml.Node
	_ = root.Encode(c) // no setting is of a type that YAML lacks
	settings := map[string]field{}
	for _, f := range fields(c) {
		settings[f.key] = f
	}
	c.annotate(&root, "", settings)
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(&root); err != nil {
		return fmt.Errorf("print the configuration: %w", err)
	}
	return enc.Close()
}

// annotate puts comments on the keys of a section, and hides its secrets.
func (c *Config) annotate(section *yaml.Node, prefix string, settings map[string]field) {
	var content []*yaml.Node
	above := "" // comments on what isn't in the file
	for pair := range slices.Chunk(section.Content, 2) {
		key, value := pair[0], pair[1]
		f, ok := settings[prefix+key.Value]
		switch {
		case !ok:
			c.annotate(value, key.Value+".", settings)
		case f.secret == "true" && f.value.IsZero():
			above += f.env() + ", never in this file: " + f.doc + "\n"
			continue
		default:
			key.HeadComment, above = above+f.doc, ""
			c.describe(f, key, value)
		}
		content = append(content, key, value)
	}
	section.Content = content
}

// describe shows a setting.
func (c *Config) describe(f field, key, value *yaml.Node) {
	if list, ok := listOf(f.value.Type()); ok {
		for _, e := range elements(key.Value, list) {
			key.HeadComment += "\n" + e.key + ": " + e.doc
		}
	}
	switch f.secret {
	case "true":
		value.SetString(redacted)
	case "values":
		for pair := range slices.Chunk(value.Content, 2) {
			pair[1].SetString(redacted)
		}
	}
	source := cmp.Or(c.source[f.key], "default")
	if len(value.Content) > 0 && (value.Kind == yaml.MappingNode || value.Content[0].Kind == yaml.MappingNode) {
		key.HeadComment += "\n" + source
		return
	}
	value.LineComment = source
	value.Style |= yaml.FlowStyle
}
