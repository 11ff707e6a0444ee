package config

import (
	"fmt"
	"reflect"
	"strings"
)

// field is one setting: a key that has a value, not a section.
type field struct {
	key    string // "http.listen"
	doc    string
	secret string // "true": the value is one; "values": a map whose values may be; else empty
	value  reflect.Value
}

// env is the environment variable that overrides the field.
func (f field) env() string {
	return "BERM_" + strings.ToUpper(strings.ReplaceAll(f.key, ".", "_"))
}

// fields lists the settings of c in the order of their declaration; setting their
// values changes c.
func fields(c *Config) []field {
	var list []field
	root := reflect.ValueOf(c).Elem()
	for i := range root.NumField() {
		t := root.Type().Field(i)
		name := t.Tag.Get("yaml")
		switch {
		case name == "":
		case t.Type.Kind() == reflect.Struct:
			for j := range t.Type.NumField() {
				list = append(list, newField(name+".", t.Type.Field(j), root.Field(i).Field(j)))
			}
		default:
			list = append(list, newField("", t, root.Field(i)))
		}
	}
	return list
}

func newField(prefix string, t reflect.StructField, v reflect.Value) field {
	return field{key: prefix + t.Tag.Get("yaml"), doc: t.Tag.Get("doc"), secret: t.Tag.Get("secret"), value: v}
}

// Reference is the table of all keys, in Markdown.
func Reference() string {
	var b strings.Builder
	b.WriteString("| key | environment | default | meaning |\n| --- | --- | --- | --- |\n")
	for _, f := range fields(Default()) {
		key := "`" + f.key + "`"
		if f.secret == "true" {
			key = "(not in the file)"
		}
		value := ""
		if list, ok := f.value.Interface().([]string); ok && len(list) > 0 {
			value = "`[" + strings.Join(list, ", ") + "]`"
		} else if text := fmt.Sprint(f.value); f.value.Kind() != reflect.Map && !ok && text != "" {
			value = "`" + text + "`"
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s |\n", key, f.env(), value, f.doc)
	}
	return b.String()
}
