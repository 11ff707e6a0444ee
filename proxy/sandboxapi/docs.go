package sandboxapi

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed" // the document, and its page's template and script
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strings"
)

//go:embed openapi.json
var document []byte

//go:embed docs.html.tmpl
var docsTemplate string

//go:embed docs.js
var docsScript string

// Document is the OpenAPI document that describes the API.
func Document() []byte { return slices.Clone(document) }

// openAPIDoc is as much of the document as the page shows.
type openAPIDoc struct {
	Info struct{ Title, Version, Description string }
	Tags []struct{ Name, Description string }
	// Path items hold operations, and one list of parameters.
	Paths      map[string]map[string]json.RawMessage
	Components struct {
		Responses map[string]*response
		Schemas   map[string]*schema
	}
}

type operation struct {
	Method, Path string `json:"-"`
	OperationID  string
	Tags         []string
	Summary      string
	Description  string
	Parameters   []parameter
	RequestBody  *struct{ Content map[string]media }
	Responses    map[string]*response
}

type parameter struct {
	Name, In, Description string
	Required              bool
	Schema                *schema
}

type response struct {
	Ref         string `json:"$ref"`
	Description string
	Content     map[string]media
}

type media struct {
	Schema  *schema
	Example json.RawMessage
}

type schema struct {
	Ref         string `json:"$ref"`
	Type        any
	Format      string
	Pattern     string
	Description string
	Enum        []any
	Items       *schema
	OneOf       []*schema
	Required    []string
	Properties  map[string]*schema
	// A schema or false; only the former is shown.
	AdditionalProperties json.RawMessage
}

// renderDocs makes a page of the document.
func renderDocs(doc []byte) ([]byte, error) {
	var d openAPIDoc
	if err := json.Unmarshal(doc, &d); err != nil {
		return nil, fmt.Errorf("read the OpenAPI document: %w", err)
	}
	ops, err := d.operations()
	if err != nil {
		return nil, err
	}
	t, err := template.New("docs").Funcs(template.FuncMap{
		"type":    typeName,
		"pretty":  pretty,
		"ref":     refName,
		"script":  func() template.JS { return template.JS(docsScript) }, //nolint:gosec // our own
		"require": func(s *schema, name string) bool { return slices.Contains(s.Required, name) },
		"of": func(tag string) []operation {
			return slices.DeleteFunc(slices.Clone(ops), func(o operation) bool { return !slices.Contains(o.Tags, tag) })
		},
		"response": func(r *response) *response {
			if r.Ref != "" {
				return d.Components.Responses[refName(r.Ref)]
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
}

// operations gives all operations by path and method.
func (d openAPIDoc) operations() ([]operation, error) {
	var out []operation
	for path, item := range d.Paths {
		var shared []parameter
		if raw, ok := item["parameters"]; ok {
			if err := json.Unmarshal(raw, &shared); err != nil {
				return nil, fmt.Errorf("read the parameters of %s: %w", path, err)
			}
		}
		for method, raw := range item {
			if method == "parameters" {
				continue
			}
			o := operation{Method: strings.ToUpper(method), Path: path}
			if err := json.Unmarshal(raw, &o); err != nil {
				return nil, fmt.Errorf("read %s %s: %w", method, path, err)
			}
			o.Parameters = append(slices.Clone(shared), o.Parameters...)
			out = append(out, o)
		}
	}
	slices.SortFunc(out, func(a, b operation) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
	})
	return out, nil
}

// typeName describes a schema in a few words.
func typeName(s *schema) string {
	switch {
	case s == nil:
		return "any"
	case s.Ref != "":
		return refName(s.Ref)
	case len(s.OneOf) > 0:
		names := make([]string, len(s.OneOf))
		for i, o := range s.OneOf {
			names[i] = typeName(o)
		}
		return strings.Join(names, " or ")
	case len(s.Enum) > 0:
		return strings.Trim(fmt.Sprintf("%q", s.Enum), "[]")
	}
	name := "any"
	switch t := s.Type.(type) {
	case string:
		name = t
	case []any:
		name = strings.Trim(strings.ReplaceAll(fmt.Sprint(t), " ", " or "), "[]")
	}
	if s.Items != nil {
		name += " of " + typeName(s.Items)
	}
	if s.Format != "" {
		name += " (" + s.Format + ")"
	}
	if len(s.AdditionalProperties) > 0 && s.AdditionalProperties[0] == '{' {
		name += " of strings"
	}
	return name
}

// docsPolicy is the page's Content-Security-Policy: its own script runs, and no other.
func docsPolicy() string {
	sum := sha256.Sum256([]byte(docsScript))
	return "default-src 'none'; script-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
}

func refName(ref string) string { return ref[strings.LastIndexByte(ref, '/')+1:] }

func pretty(raw json.RawMessage) (string, error) {
	var b bytes.Buffer
	err := json.Indent(&b, raw, "", "  ")
	return b.String(), err
}

// Schemas gives the names of the document's schemas, sorted.
func (d openAPIDoc) Schemas() []string { return slices.Sorted(maps.Keys(d.Components.Schemas)) }
