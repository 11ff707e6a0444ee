package sandboxapi

import (
	"bytes"
	"crypto/sha256"
	_ "embed" // the document, and its page's template and script
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"sync"
)

//go:embed openapi.json
var document []byte

//go:embed docs.html.tmpl
var docsTemplate string

//go:embed docs.js
var docsScript string

// Document is the OpenAPI document that describes the API.
func Document() []byte { return slices.Clone(document) }

// object is an object of the document.
type object = map[string]any

// docsPage renders the document as an HTML page, at the first request.
var docsPage = sync.OnceValues(func() ([]byte, error) {
	var d object
	if err := json.Unmarshal(document, &d); err != nil {
		return nil, fmt.Errorf("read the OpenAPI document: %w", err)
	}
	ops := operations(d)
	t, err := template.New("docs").Funcs(template.FuncMap{
		"type":   typeName,
		"ref":    refName,
		"pretty": func(v any) (string, error) { b, err := json.MarshalIndent(v, "", "  "); return string(b), err },
		"script": func() template.JS { return template.JS(docsScript) }, //nolint:gosec // Berm's own
		"require": func(s object, name string) bool {
			required, _ := s["required"].([]any)
			return slices.Contains(required, any(name))
		},
		"of": func(tag string) []object {
			return slices.DeleteFunc(slices.Clone(ops), func(o object) bool { return !slices.Contains(o["tags"].([]any), any(tag)) })
		},
		"response": func(r object) object {
			if name := refName(r); name != "" {
				return d["components"].(object)["responses"].(object)[name].(object)
			}
			return r
		},
	}).Parse(docsTemplate)
	if err != nil {
		return nil, fmt.Errorf("read the page's template: %w", err)
	}
	var b bytes.Buffer
	if err := t.Execute(&b, d); err != nil {
		return nil, fmt.Errorf("render the OpenAPI document: %w", err)
	}
	return b.Bytes(), nil
})

// operations returns all operations, sorted by path and method. It adds both to each operation.
func operations(d object) []object {
	var out []object
	for path, item := range d["paths"].(object) {
		item := item.(object)
		shared, _ := item["parameters"].([]any)
		for method, v := range item {
			if o, ok := v.(object); ok {
				own, _ := o["parameters"].([]any)
				o["path"], o["method"], o["parameters"] = path, strings.ToUpper(method), slices.Concat(shared, own)
				out = append(out, o)
			}
		}
	}
	place := func(o object) string { return fmt.Sprint(o["path"], " ", o["method"]) }
	slices.SortFunc(out, func(a, b object) int { return strings.Compare(place(a), place(b)) })
	return out
}

// typeName describes a schema in a few words.
func typeName(s object) string {
	if name := refName(s); name != "" {
		return name
	}
	if all, ok := s["oneOf"].([]any); ok {
		names := make([]string, len(all))
		for i, one := range all {
			names[i] = typeName(one.(object))
		}
		return strings.Join(names, " or ")
	}
	if words, ok := s["enum"].([]any); ok {
		return strings.Trim(fmt.Sprintf("%q", words), "[]")
	}
	name := "any"
	switch t := s["type"].(type) {
	case string:
		name = t
	case []any:
		name = strings.Trim(strings.ReplaceAll(fmt.Sprint(t), " ", " or "), "[]")
	}
	if items, ok := s["items"].(object); ok {
		name += " of " + typeName(items)
	}
	if format, ok := s["format"]; ok {
		name += fmt.Sprintf(" (%s)", format)
	}
	if _, ok := s["additionalProperties"].(object); ok { // else it is false
		name += " of strings"
	}
	return name
}

// refName returns the name of the schema that an object's $ref points to, or "" without one.
func refName(o object) string {
	ref, _ := o["$ref"].(string)
	return ref[strings.LastIndexByte(ref, '/')+1:]
}

// docsPolicy returns the page's Content-Security-Policy, which allows its own script only.
func docsPolicy() string {
	sum := sha256.Sum256([]byte(docsScript))
	return "default-src 'none'; script-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
}
