package config

import (
	"reflect"
	"strings"
)

// field is one setting: a key that has a value, not a section.
type field struct {
	key    string // "http.listen"
	doc    string
	secret string // "true": the value is one; "values": a map whose values may be; else empty
	path   bool   // the value is an absolute path of this machine's, or empty
	value  reflect.Value
}

// env returns the name of the environment variable that overrides the field.
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
			list = append(list, members(name+".", root.Field(i))...)
		default:
			list = append(list, newField("", t, root.Field(i)))
		}
	}
	return list
}

// members lists the settings of a section, or of an element of a list.
func members(prefix string, section reflect.Value) (list []field) {
	for i := range section.NumField() {
		list = append(list, newField(prefix, section.Type().Field(i), section.Field(i)))
	}
	return list
}

func newField(prefix string, t reflect.StructField, v reflect.Value) field {
	return field{key: prefix + t.Tag.Get("yaml"), doc: t.Tag.Get("doc"), secret: t.Tag.Get("secret"), path: t.Tag.Get("path") != "", value: v}
}

// Paths returns the paths that the configuration names on this machine.
func (c *Config) Paths() (paths []string) {
	all := fields(c)
	for _, l := range c.EngineAPI.Listeners {
		all = append(all, members("", reflect.ValueOf(l))...)
	}
	for _, f := range all {
		if f.path && !f.value.IsZero() {
			paths = append(paths, f.value.String())
		}
	}
	return paths
}

// Changed lists the keys whose values differ, in the order of their declaration.
func Changed(a, b *Config) (keys []string) {
	other := fields(b)
	for i, f := range fields(a) {
		if !reflect.DeepEqual(f.value.Interface(), other[i].value.Interface()) {
			keys = append(keys, f.key)
		}
	}
	return keys
}

// listOf is the type of a list's elements, if they are mappings of keys.
func listOf(t reflect.Type) (reflect.Type, bool) {
	if t.Kind() != reflect.Slice || t.Elem().Kind() != reflect.Struct {
		return nil, false
	}
	return t.Elem(), true
}

// elements lists the keys of a list's mappings. The keys of a list within follow their own key.
// The fields have no value.
func elements(key string, t reflect.Type) (list []field) {
	for i := range t.NumField() {
		f := newField(key+"[].", t.Field(i), reflect.Value{})
		list = append(list, f)
		if sub, ok := listOf(t.Field(i).Type); ok {
			list = append(list, elements(f.key, sub)...)
		}
	}
	return list
}
