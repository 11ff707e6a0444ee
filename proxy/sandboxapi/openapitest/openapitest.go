// Package openapitest checks requests and answers against the API's OpenAPI document. It is
// for tests.
package openapitest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/bermhq/berm/proxy/sandboxapi"
)

const (
	docURL  = "https://berm.invalid/openapi.json"
	anyType = "*/*" // of a body that is bytes to the API
)

// Checker compares requests and answers with the document. It is safe for many goroutines,
// until its test ends.
type Checker struct {
	*document
	t testing.TB

	mu   sync.Mutex
	seen map[string]bool
}

// document is the API's document, with a cache of compiled schemas.
type document struct {
	doc any

	compiling sync.Mutex
	compiler  *jsonschema.Compiler
	schemas   map[string]*jsonschema.Schema
}

// read reads the document once for all tests of a process.
var read = sync.OnceValues(func() (*document, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(sandboxapi.Document()))
	d := &document{doc: doc, compiler: jsonschema.NewCompiler(), schemas: map[string]*jsonschema.Schema{}}
	d.compiler.DefaultDraft(jsonschema.Draft2020)
	d.compiler.AssertFormat()
	return d, errors.Join(err, d.compiler.AddResource(docURL, doc))
})

// New returns a Checker that fails t for each mismatch.
func New(t testing.TB) *Checker {
	t.Helper()
	d, err := read()
	if err != nil {
		t.Fatalf("read the OpenAPI document: %v", err)
	}
	return &Checker{document: d, t: t, seen: map[string]bool{}}
}

// Transport returns a transport that checks what next sends and receives. Nil is
// http.DefaultTransport. A test may send a request that the document doesn't allow, but the
// server must answer it with an error.
func (c *Checker) Transport(next http.RoundTripper) http.RoundTripper {
	if next == nil {
		next = http.DefaultTransport
	}
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		var body []byte
		if r.Body != nil {
			var err error
			if body, err = io.ReadAll(r.Body); err != nil {
				return nil, err
			}
			_ = r.Body.Close()
			r = r.Clone(r.Context())
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		resp, err := next.RoundTrip(r)
		if err == nil {
			c.check(r, body, resp)
		}
		return resp, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Unseen lists the documented answers that no exchange has had yet, as "GET /path 200".
func (c *Checker) Unseen() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for path, item := range child(c.doc, "paths").(map[string]any) {
		for method, op := range item.(map[string]any) {
			if method == "parameters" {
				continue
			}
			for status := range child(op, "responses").(map[string]any) {
				if what := strings.ToUpper(method) + " " + path + " " + status; !c.seen[what] {
					out = append(out, what)
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

// CheckExamples validates the document's own examples.
func (c *Checker) CheckExamples() { c.examples(c.doc, nil) }

func (c *Checker) examples(node any, at []string) {
	switch n := node.(type) {
	case map[string]any:
		if ex, ok := n["example"]; ok && n["schema"] != nil {
			if err := c.validate(ex, append(slices.Clone(at), "schema")...); err != nil {
				c.t.Errorf("example of %s: %v", strings.Join(at, " "), err)
			}
		}
		for k, v := range n {
			c.examples(v, append(slices.Clone(at), k))
		}
	case []any:
		for i, v := range n {
			c.examples(v, append(slices.Clone(at), strconv.Itoa(i)))
		}
	}
}

// check checks one exchange. The caller can still read the body of resp.
func (c *Checker) check(r *http.Request, body []byte, resp *http.Response) {
	what := fmt.Sprintf("%s %s: %d", r.Method, r.URL.RequestURI(), resp.StatusCode)
	if resp.Header.Get("X-Request-Id") == "" {
		c.t.Errorf("%s: without X-Request-Id", what)
	}
	path, vars, ok := c.match(r.URL)
	if !ok {
		c.refused(what, resp, http.StatusNotFound)
		return
	}
	at := []string{"paths", path, strings.ToLower(r.Method)}
	op := child(c.doc, at...)
	if op == nil {
		c.refused(what, resp, http.StatusMethodNotAllowed)
		return
	}
	if resp.StatusCode/100 == 2 {
		if err := c.request(at, vars, r, body); err != nil {
			c.t.Errorf("%s: accepted a request that isn't documented: %v", what, err)
		}
	}

	status := strconv.Itoa(resp.StatusCode)
	at, node := c.resolve(append(at, "responses", status)...)
	if node == nil {
		c.t.Errorf("%s: this status isn't documented", what)
		return
	}
	c.mu.Lock()
	c.seen[r.Method+" "+path+" "+status] = true
	c.mu.Unlock()
	if headers, ok := child(node, "headers").(map[string]any); ok {
		for name, h := range headers {
			c.header(what, append(slices.Clone(at), "headers", name), h, resp.Header.Values(name))
		}
	}
	c.body(what, at, resp, r.Method == http.MethodHead)
}

// refused checks that the answer to an undocumented operation is an error.
func (c *Checker) refused(what string, resp *http.Response, want int) {
	guards := []int{want, http.StatusBadRequest, http.StatusForbidden, http.StatusMisdirectedRequest}
	if !slices.Contains(guards, resp.StatusCode) {
		c.t.Errorf("%s: this isn't documented, want %d", what, want)
		return
	}
	schema := "Problem"
	if mt, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); mt == "application/json" {
		schema = "LegacyError"
	}
	c.valid(what, drain(resp), "components", "schemas", schema)
}

// request returns how a request differs from the document, or nil.
func (c *Checker) request(at []string, vars map[string]string, r *http.Request, body []byte) error {
	query := map[string]any{}
	for name, v := range r.URL.Query() {
		if len(v) > 1 {
			return fmt.Errorf("query parameter %s is repeated", name)
		}
		query[name] = v[0]
	}
	for _, list := range [][]string{append(slices.Clone(at[:2]), "parameters"), append(slices.Clone(at), "parameters")} {
		params, _ := child(c.doc, list...).([]any)
		for i, p := range params {
			if err := c.parameter(append(slices.Clone(list), strconv.Itoa(i)), p, vars, query); err != nil {
				return err
			}
		}
	}
	if len(query) > 0 {
		return fmt.Errorf("query parameters %v are not documented", query)
	}
	content := child(c.doc, append(slices.Clone(at), "requestBody", "content")...)
	if child(content, anyType) != nil {
		return nil
	}
	if len(body) == 0 {
		if req, _ := child(c.doc, append(slices.Clone(at), "requestBody", "required")...).(bool); req {
			return fmt.Errorf("the body is missing")
		}
		return nil
	}
	mt, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return fmt.Errorf("content type: %w", err)
	}
	if child(content, mt) == nil {
		if content == nil && strings.TrimSpace(string(body)) == "{}" {
			return nil
		}
		return fmt.Errorf("a body of %s isn't documented", mt)
	}
	if !strings.HasSuffix(mt, "json") {
		return nil
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return err
	}
	return c.validate(v, append(slices.Clone(at), "requestBody", "content", mt, "schema")...)
}

// parameter checks one parameter, and removes it from query.
func (c *Checker) parameter(at []string, p any, vars map[string]string, query map[string]any) error {
	name, _ := child(p, "name").(string)
	at = append(at, "schema")
	if in, _ := child(p, "in").(string); in == "path" {
		return c.validate(vars[name], at...)
	}
	if t, _ := child(p, "schema", "type").(string); t == "object" {
		rest := map[string]any{}
		for k, v := range query {
			if strings.HasPrefix(k, name+".") {
				rest[k] = v
				delete(query, k)
			}
		}
		return c.validate(rest, at...)
	}
	raw, ok := query[name].(string)
	if !ok {
		return nil
	}
	delete(query, name)
	var v any = raw
	switch t, _ := child(p, "schema", "type").(string); t {
	case "integer", "boolean":
		var err error
		if v, err = jsonschema.UnmarshalJSON(strings.NewReader(raw)); err != nil {
			return fmt.Errorf("query parameter %s: %w", name, err)
		}
	}
	return c.validate(v, at...)
}

func (c *Checker) header(what string, at []string, h any, values []string) {
	required, _ := child(h, "required").(bool)
	switch {
	case len(values) == 0 && required:
		c.t.Errorf("%s: header %s is missing", what, at[len(at)-1])
	case len(values) == 1:
		var v any = values[0]
		if child(h, "schema", "type") == "integer" {
			v, _ = jsonschema.UnmarshalJSON(strings.NewReader(values[0]))
		}
		if err := c.validate(v, append(at, "schema")...); err != nil {
			c.t.Errorf("%s: header %s: %v", what, at[len(at)-1], err)
		}
	case len(values) > 1:
		c.t.Errorf("%s: header %s is there twice", what, at[len(at)-1])
	}
}

// body checks an answer's body. It checks a stream line by line, as the caller reads it. For
// HEAD it checks the Content-Type only.
func (c *Checker) body(what string, at []string, resp *http.Response, head bool) {
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return // the connection no longer carries HTTP
	}
	if child(c.doc, append(slices.Clone(at), "content")...) == nil {
		if b := drain(resp); len(b) > 0 || resp.Header.Get("Content-Type") != "" {
			c.t.Errorf("%s: a body isn't documented: %s", what, b)
		}
		return
	}
	if child(c.doc, append(slices.Clone(at), "content", anyType)...) != nil {
		return
	}
	mt, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil || child(c.doc, append(slices.Clone(at), "content", mt)...) == nil {
		c.t.Errorf("%s: content type %q isn't documented", what, resp.Header.Get("Content-Type"))
		return
	}
	schema := append(slices.Clone(at), "content", mt, "schema")
	switch {
	case head:
	case strings.HasSuffix(mt, "json") && !strings.HasSuffix(mt, "ndjson"):
		c.valid(what, drain(resp), schema...)
	case strings.HasSuffix(mt, "ndjson"):
		resp.Body = &lines{ReadCloser: resp.Body, line: func(b []byte) { c.valid(what, b, schema...) }}
	case mt == "text/event-stream":
		resp.Body = &lines{ReadCloser: resp.Body, line: func(b []byte) {
			if data, ok := bytes.CutPrefix(b, []byte("data: ")); ok {
				c.valid(what, data, schema...)
			}
		}}
	}
}

// lines calls a function for every line that is read.
type lines struct {
	io.ReadCloser
	part []byte
	line func([]byte)
}

func (l *lines) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	l.part = append(l.part, p[:n]...)
	for {
		i := bytes.IndexByte(l.part, '\n')
		if i < 0 {
			return n, err
		}
		l.line(l.part[:i])
		l.part = l.part[i+1:]
	}
}

func (c *Checker) valid(what string, body []byte, schema ...string) {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err == nil {
		err = c.validate(v, schema...)
	}
	if err != nil {
		c.t.Errorf("%s: %v\n%s", what, err, body)
	}
}

// validate compares a value with the schema at a place of the document.
func (d *document) validate(v any, at ...string) error {
	escaped := make([]string, len(at))
	for i, s := range at {
		escaped[i] = url.PathEscape(strings.NewReplacer("~", "~0", "/", "~1").Replace(s))
	}
	loc := docURL + "#/" + strings.Join(escaped, "/")
	d.compiling.Lock()
	s, ok := d.schemas[loc]
	if !ok {
		var err error
		if s, err = d.compiler.Compile(loc); err != nil {
			d.compiling.Unlock()
			return fmt.Errorf("compile %s: %w", loc, err)
		}
		d.schemas[loc] = s
	}
	d.compiling.Unlock()
	return s.Validate(v)
}

// match finds the path template that a URL matches, and the values of its variables.
func (c *Checker) match(u *url.URL) (template string, vars map[string]string, ok bool) {
	got := strings.Split(u.EscapedPath(), "/")
next:
	for template := range child(c.doc, "paths").(map[string]any) {
		want := strings.Split(template, "/")
		if len(want) != len(got) {
			continue
		}
		vars := map[string]string{}
		for i := range want {
			seg, err := url.PathUnescape(got[i])
			switch {
			case err != nil, strings.Contains(seg, "/"):
				continue next
			case strings.HasPrefix(want[i], "{"):
				vars[strings.Trim(want[i], "{}")] = seg
			case want[i] != seg:
				continue next
			}
		}
		return template, vars, true
	}
	return "", nil, false
}

// resolve returns the node at a path in the document. It follows a $ref there.
func (c *Checker) resolve(at ...string) ([]string, any) {
	node := child(c.doc, at...)
	if ref, ok := child(node, "$ref").(string); ok {
		at = strings.Split(strings.TrimPrefix(ref, "#/"), "/")
		node = child(c.doc, at...)
	}
	return at, node
}

// child returns the node at a path below node, or nil.
func child(node any, path ...string) any {
	for _, p := range path {
		switch n := node.(type) {
		case map[string]any:
			node = n[p]
		case []any:
			i, err := strconv.Atoi(p)
			if err != nil || i < 0 || i >= len(n) {
				return nil
			}
			node = n[i]
		default:
			return nil
		}
	}
	return node
}

// drain reads a body to its end, and makes it readable again.
func drain(resp *http.Response) []byte {
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	resp.Body = io.NopCloser(io.MultiReader(bytes.NewReader(b), errReader{err}))
	return b
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	return 0, io.EOF
}
