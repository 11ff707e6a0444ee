package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bermhq/berm/lifecycle"
)

// MaxBody is how large a body may be in bytes unless a route says otherwise.
const MaxBody = 1 << 20

const (
	maxDepth    = 16              // of objects and arrays within each other
	bodyTimeout = time.Minute     // for a whole body to arrive
	sendTimeout = 2 * time.Minute // for a whole answer to leave
)

// BoundBody gives a request's body a minute to arrive, whoever reads it: the server
// itself does when no handler did. DecodeBody lifts the bound again.
func BoundBody(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout)) // an in-process writer has none
	}
}

// DecodeBody reads a JSON body of at most limit bytes into v, as DecodeJSON does.
// No body at all leaves v as it is when that is allowed.
func DecodeBody(w http.ResponseWriter, r *http.Request, limit int64, optional bool, v any) error {
	body, err := readJSON(w, r, limit, optional)
	if err != nil || body == nil {
		return err
	}
	return DecodeJSON(body, v)
}

// readJSON reads a body that says that it is JSON; nil is none at all.
func readJSON(w http.ResponseWriter, r *http.Request, limit int64, optional bool) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return nil, err
		}
		return nil, malformed("the body could not be read to its end")
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	if len(body) == 0 && optional {
		return nil, nil
	}
	mt, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if cs, ok := params["charset"]; err != nil || mt != "application/json" || ok && !strings.EqualFold(cs, "utf-8") {
		return nil, &Fault{Status: http.StatusUnsupportedMediaType, Code: "unsupported_media_type", Title: "Unsupported media type",
			Detail: "the body must be application/json"}
	}
	return body, nil
}

// DecodeNulls is DecodeBody for an API whose clients write null for what they leave out:
// at every place but the whole body it stands for the zero value.
func DecodeNulls(w http.ResponseWriter, r *http.Request, limit int64, v any) error {
	body, err := readJSON(w, r, limit, false)
	if err != nil {
		return err
	}
	return DecodeJSONNulls(body, v)
}

// DecodeJSONNulls is to DecodeNulls what DecodeJSON is to DecodeBody.
func DecodeJSONNulls(data []byte, v any) error { return decodeJSON(data, v, true) }

// DecodeJSON reads one JSON value into v, a non-nil pointer to a struct, and is
// stricter than encoding/json: names must match exactly, unknown and repeated ones
// are refused, as are trailing data, invalid UTF-8 and deep nesting; null is for
// pointers, maps and slices only. An embedded struct's fields are its own. Malformed JSON is a Fault of 400, a value of the wrong kind a
// *lifecycle.InvalidError.
func DecodeJSON(data []byte, v any) error { return decodeJSON(data, v, false) }

func decodeJSON(data []byte, v any, nulls bool) error {
	if !utf8.Valid(data) {
		return malformed("the body is not UTF-8")
	}
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		return malformed("the body begins with a byte order mark")
	}
	if err := checkSyntax(data); err != nil {
		return err
	}
	d := decoder{json.NewDecoder(bytes.NewReader(data)), nulls}
	if nulls {
		return d.plain(reflect.ValueOf(v).Elem(), "")
	}
	return d.value(reflect.ValueOf(v).Elem(), "")
}

// checkSyntax makes sure that it is one JSON value, not nested too deeply.
func checkSyntax(data []byte) error {
	depth, inString := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return malformed(fmt.Sprintf("the body is nested more than %d levels deep", maxDepth))
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	if !json.Valid(data) {
		return malformed("the body is not one valid JSON value")
	}
	return nil
}

func malformed(detail string) *Fault {
	return &Fault{Status: http.StatusBadRequest, Code: "malformed", Title: "Malformed request", Detail: detail}
}

// decoder reads valid JSON token by token, guided by the type that is wanted.
type decoder struct {
	*json.Decoder
	nulls bool // null is the zero value of everything
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

func (d decoder) value(v reflect.Value, path string) error {
	t := v.Type()
	switch {
	case t.Kind() == reflect.Pointer:
		p := reflect.New(t.Elem())
		null, err := d.orNull(p.Elem(), path)
		if err == nil && !null {
			v.Set(p)
		}
		return err
	case d.nulls, t.Kind() == reflect.Map && !reflect.PointerTo(t).Implements(unmarshaler),
		t.Kind() == reflect.Slice && t.Elem().Kind() != reflect.Uint8 && !reflect.PointerTo(t).Implements(unmarshaler):
		_, err := d.orNull(v, path)
		return err
	}
	return d.plain(v, path)
}

// orNull reads a value or null.
func (d decoder) orNull(v reflect.Value, path string) (null bool, err error) {
	var raw json.RawMessage
	if err := d.Decode(&raw); err != nil {
		return false, malformed("the body is not one valid JSON value")
	}
	if string(raw) == "null" {
		return true, nil
	}
	if isLeaf(v.Type()) {
		return false, setLeaf(v, raw, path)
	}
	return false, decoder{json.NewDecoder(bytes.NewReader(raw)), d.nulls}.plain(v, path)
}

func (d decoder) plain(v reflect.Value, path string) error {
	t := v.Type()
	if isLeaf(t) {
		return d.leaf(v, path)
	}
	switch t.Kind() {
	case reflect.Struct:
		if err := d.open('{', path, "an object"); err != nil {
			return err
		}
		return d.object(path, func(name, at string) error {
			f, ok := fieldNamed(v, name)
			if !ok {
				return malformed(fmt.Sprintf("unknown field %q", at))
			}
			return d.value(f, at)
		})
	case reflect.Map:
		if err := d.open('{', path, "an object"); err != nil {
			return err
		}
		v.Set(reflect.MakeMap(t))
		return d.object(path, func(name, at string) error {
			e := reflect.New(t.Elem()).Elem()
			if err := d.value(e, at); err != nil {
				return err
			}
			v.SetMapIndex(reflect.ValueOf(name), e)
			return nil
		})
	}
	if err := d.open('[', path, "an array"); err != nil {
		return err
	}
	v.Set(reflect.MakeSlice(t, 0, 0))
	for i := 0; d.More(); i++ {
		e := reflect.New(t.Elem()).Elem()
		if err := d.value(e, path+"["+strconv.Itoa(i)+"]"); err != nil {
			return err
		}
		v.Set(reflect.Append(v, e))
	}
	_, err := d.Token()
	return err
}

// isLeaf tells whether a value of the type has no further fields.
func isLeaf(t reflect.Type) bool {
	if reflect.PointerTo(t).Implements(unmarshaler) {
		return true
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return false
	case reflect.Slice:
		return t.Elem().Kind() == reflect.Uint8
	}
	return true
}

func (d decoder) open(want json.Delim, path, what string) error {
	tok, err := d.Token()
	if err != nil {
		return malformed("the body is not one valid JSON value")
	}
	if tok != want {
		return &lifecycle.InvalidError{Field: path, Message: "must be " + what}
	}
	return nil
}

// object reads an object's fields and its end.
func (d decoder) object(path string, field func(name, at string) error) error {
	seen := map[string]bool{}
	for d.More() {
		tok, err := d.Token()
		if err != nil {
			return err
		}
		name, _ := tok.(string)
		at := cut(name)
		if path != "" {
			at = path + "." + at
		}
		if seen[name] {
			return malformed(fmt.Sprintf("field %q is there twice", at))
		}
		seen[name] = true
		if err := field(name, at); err != nil {
			return err
		}
	}
	_, err := d.Token()
	return err
}

// cut makes a field's name one that can be told, and written down.
func cut(name string) string {
	const most = 128
	if len(name) <= most {
		return name
	}
	return strings.ToValidUTF8(name[:most], "") + "…"
}

// leaf reads a value that has no further fields.
func (d decoder) leaf(v reflect.Value, path string) error {
	var raw json.RawMessage
	if err := d.Decode(&raw); err != nil {
		return malformed("the body is not one valid JSON value")
	}
	return setLeaf(v, raw, path)
}

func setLeaf(v reflect.Value, raw json.RawMessage, path string) error {
	if u, ok := v.Addr().Interface().(json.Unmarshaler); ok {
		if err := u.UnmarshalJSON(raw); err != nil {
			return &lifecycle.InvalidError{Field: path, Message: err.Error()}
		}
		return nil
	}
	ok := string(raw) != "null"
	if v.Kind() == reflect.Slice {
		ok = ok && raw[0] == '"'
	}
	if !ok || json.Unmarshal(raw, v.Addr().Interface()) != nil {
		return &lifecycle.InvalidError{Field: path, Message: "must be " + kindName(v.Type())}
	}
	return nil
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "a string in base64"
	}
	return t.Kind().String()
}

func fieldNamed(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		field := v.Type().Field(i)
		if field.Anonymous && field.Type.Kind() == reflect.Struct {
			if f, ok := fieldNamed(v.Field(i), name); ok {
				return f, true
			}
		}
		tag, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if tag == name && tag != "" && tag != "-" {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// WriteJSON answers v. A caller that is gone by then is no error.
func WriteJSON(w http.ResponseWriter, status int, contentType string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(sendTimeout)) // an in-process writer has none
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
	return nil
}
