package proxy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bermhq/berm/lifecycle"
)

// MaxBody is how large a body may be in bytes unless a route says otherwise.
const MaxBody = 1 << 20

const (
	maxDepth    = 16       // of objects and arrays within each other
	maxValues   = 1 << 15  // in one body
	fewValues   = 128      // that every body may have without a further lease
	valueCost   = 128      // bytes of memory, beside those of its text
	maxName     = 128      // bytes of a field's name in an error
	maxMessage  = 4 << 10  // bytes that are kept and logged of an error
	bodyStart   = 64 << 10 // bytes of a body of unknown length that are leased first
	bodyIdle    = 10 * time.Second
	bodyTimeout = time.Minute     // for a whole body to arrive
	sendTimeout = 2 * time.Minute // for a whole answer to leave
)

// BodyLinger is for what is left of the body of a request that was answered already.
const BodyLinger = 5 * time.Second

// LastRequest tells whether the server will close the connection without a look at what
// is left of the body. To a caller that is still sending, that loses the answer. One that
// waits to be told to send isn't.
func LastRequest(r *http.Request) bool { return r.Close && r.Header.Get("Expect") == "" }

// boundBody gives the rest of a request's body time to arrive, whoever reads it: the
// server does so when no handler did. A handler may set another deadline.
func boundBody(w http.ResponseWriter, r *http.Request, within time.Duration) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(within)) // an in-process writer has none
	}
}

// maxDrain bounds what is read of a refused body, in bytes.
const maxDrain = 256 << 20

// drain sends the answer and reads on for a moment. A caller that is still sending loses an
// answer after which the connection is closed: some look for it only once they have sent all.
func drain(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 || r.Body == nil || r.Header.Get("Expect") != "" {
		return
	}
	_ = http.NewResponseController(w).Flush() // an in-process writer can't
	_, _ = io.CopyN(io.Discard, r.Body, maxDrain)
}

// DecodeBody reads a JSON body of at most limit bytes into v, as DecodeJSON does.
// No body at all leaves v as it is when that is allowed. The memory that the body takes is
// leased until the request ends, or until whoever called Exchange.KeepBody releases it.
func DecodeBody(w http.ResponseWriter, r *http.Request, limit int64, optional bool, v any) error {
	return decodeBody(w, r, limit, optional, v, DecodeJSON)
}

func decodeBody(w http.ResponseWriter, r *http.Request, limit int64, optional bool, v any, decode func([]byte, any) error) error {
	body, err := readJSON(w, r, limit, optional)
	if err != nil || body == nil {
		return err
	}
	ex, size := ExchangeOf(r.Context()), int64(len(body))
	count, _ := shape(body)
	size += valueCost * max(fewValues, min(count, maxValues))
	if err := ex.body.Resize(r.Context(), size+int64(len(body))); err != nil {
		return err
	}
	if err := decode(body, v); err != nil {
		return err
	}
	return ex.body.Resize(r.Context(), size)
}

// readJSON reads a body that says that it is JSON; nil is none at all.
func readJSON(w http.ResponseWriter, r *http.Request, limit int64, optional bool) ([]byte, error) {
	if r.ContentLength > limit { // the caller may still send, and would lose an answer before that
		boundBody(w, r, BodyLinger)
		_, err := io.CopyN(io.Discard, r.Body, limit)
		return nil, errors.Join(&http.MaxBytesError{Limit: limit}, err)
	}
	body, err := readBody(w, r, limit)
	if err != nil {
		return nil, err
	}
	if len(body) == 0 && optional {
		return nil, nil
	}
	mt, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if cs, ok := params["charset"]; err != nil || mt != "application/json" || ok && !strings.EqualFold(cs, "utf-8") {
		return nil, UnsupportedMedia("the body must be application/json")
	}
	return body, nil
}

// readBody reads a body to its end, within the time that one may take. It leases twice its
// size: for the text, and for what is decoded from it. A body of unknown length that is more
// than small leases as much as it may have, as several that grow could wait for each other.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	ex, room := ExchangeOf(r.Context()), r.ContentLength
	if room < 0 {
		room = min(bodyStart, limit)
	}
	ex.body = ex.bodies.lease(ex.Caller.Tenant, room)
	if err := ex.body.Resize(r.Context(), 2*room+valueCost*fewValues); err != nil {
		return nil, err
	}
	from, conn := http.MaxBytesReader(w, r.Body, limit), http.NewResponseController(w)
	body, until := make([]byte, 0, room+1), time.Now().Add(bodyTimeout) // one more byte shows the end
	for {
		deadline := time.Now().Add(bodyIdle)
		if until.Before(deadline) {
			deadline = until
		}
		_ = conn.SetReadDeadline(deadline) // an in-process writer has none
		n, err := from.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		var tooLarge *http.MaxBytesError
		switch {
		case errors.Is(err, io.EOF):
			_ = conn.SetReadDeadline(time.Time{})
			return body, nil
		case errors.As(err, &tooLarge):
			return nil, err
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, Unreadable("the body stopped, or came too slowly", err)
		case err != nil:
			return nil, Malformed("the body could not be read to its end")
		}
		if len(body) == cap(body) {
			if room <= bodyStart {
				first := ex.body
				ex.body = ex.bodies.lease(ex.Caller.Tenant, limit)
				err := ex.body.Resize(r.Context(), 2*limit+valueCost*fewValues)
				if first.Release(); err != nil {
					return nil, err
				}
			}
			room = min(2*room, limit)
			body = append(make([]byte, 0, room+1), body...)
		}
	}
}

// DecodeNulls is DecodeBody for an API whose clients write null for what they leave out:
// it stands for the zero value, as the whole body only if v is a pointer to a pointer. It skips
// top-level fields with the ignored names that v hasn't.
func DecodeNulls(w http.ResponseWriter, r *http.Request, limit int64, v any, ignored ...string) error {
	return decodeBody(w, r, limit, false, v, func(data []byte, v any) error {
		return decodeJSON(data, v, decoder{nulls: true, ignored: ignored})
	})
}

// DecodeJSONNulls is to DecodeNulls what DecodeJSON is to DecodeBody.
func DecodeJSONNulls(data []byte, v any) error {
	return decodeJSON(data, v, decoder{nulls: true})
}

// DecodeJSON reads one JSON value into v, a non-nil pointer to a struct. It is stricter than
// encoding/json: names must match exactly, unknown and repeated ones are refused, as are
// trailing data, invalid UTF-8 and deep nesting. Null is for pointers, maps and slices only,
// and for no element of a slice of pointers. An embedded struct's fields are its own.
// Malformed JSON is a Fault of 400, a value of the wrong kind a *lifecycle.InvalidError.
func DecodeJSON(data []byte, v any) error { return decodeJSON(data, v, decoder{}) }

func decodeJSON(data []byte, v any, d decoder) error {
	if !utf8.Valid(data) {
		return Malformed("the body is not UTF-8")
	}
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		return Malformed("the body begins with a byte order mark")
	}
	if err := checkSyntax(data); err != nil {
		return err
	}
	whole, into := bytes.TrimSpace(data), reflect.ValueOf(v).Elem()
	if into.Kind() == reflect.Pointer {
		return d.value(into, whole, "")
	}
	return d.plain(into, whole, "")
}

// checkSyntax makes sure that it is one JSON value, not nested too deeply, nor of too many.
func checkSyntax(data []byte) error {
	switch values, depth := shape(data); {
	case depth > maxDepth:
		return Malformed(fmt.Sprintf("the body is nested more than %d levels deep", maxDepth))
	case values > maxValues:
		return Malformed(fmt.Sprintf("the body has more than %d values", maxValues))
	case !json.Valid(data):
		return Malformed("the body is not one valid JSON value")
	}
	return nil
}

// shape counts the values of JSON, at most one too many, and tells how deeply they are nested.
func shape(data []byte) (values int64, depth int) {
	at, inString := 0, false
	values = 1
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			at++
			depth = max(depth, at)
			values++
		case c == '}' || c == ']':
			at--
		case c == ',' || c == ':':
			values++
		}
	}
	return values, depth
}

// decoder reads valid JSON, guided by the type that is wanted. It works on the text itself:
// only leaves are copied.
type decoder struct {
	nulls   bool     // null is the zero value of everything
	ignored []string // names at the top that no field needs to have
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

func (d decoder) value(v reflect.Value, raw []byte, path string) error {
	t, null := v.Type(), string(raw) == "null"
	switch {
	case t.Kind() == reflect.Pointer && null:
		return nil
	case t.Kind() == reflect.Pointer:
		p := reflect.New(t.Elem())
		if err := d.plain(p.Elem(), raw, path); err != nil {
			return err
		}
		v.Set(p)
		return nil
	case null && (d.nulls || t.Kind() == reflect.Map && !isLeaf(t) || t.Kind() == reflect.Slice && !isLeaf(t)):
		return nil
	}
	return d.plain(v, raw, path)
}

func (d decoder) plain(v reflect.Value, raw []byte, path string) error {
	t := v.Type()
	if isLeaf(t) {
		return setLeaf(v, raw, path)
	}
	switch t.Kind() {
	case reflect.Struct:
		return d.object(raw, path, func(name, at string, raw []byte) error {
			f, ok := fieldNamed(v, name)
			if !ok && path == "" && slices.Contains(d.ignored, name) {
				return nil
			}
			if !ok {
				return Malformed(fmt.Sprintf("unknown field %q", at))
			}
			return d.value(f, raw, at)
		})
	case reflect.Map:
		v.Set(reflect.MakeMap(t))
		return d.object(raw, path, func(name, at string, raw []byte) error {
			e := reflect.New(t.Elem()).Elem()
			if err := d.value(e, raw, at); err != nil {
				return err
			}
			v.SetMapIndex(reflect.ValueOf(name).Convert(t.Key()), e)
			return nil
		})
	}
	if raw[0] != '[' {
		return &lifecycle.InvalidError{Field: path, Message: "must be an array"}
	}
	v.Set(reflect.MakeSlice(t, 0, 0))
	for rest := next(raw[1:]); rest[0] != ']'; rest = next(rest) {
		raw, rest = cutValue(rest)
		e, at := reflect.New(t.Elem()).Elem(), path+"["+strconv.Itoa(v.Len())+"]"
		if err := d.value(e, raw, at); err != nil {
			return err
		}
		if e.Kind() == reflect.Pointer && e.IsNil() {
			return &lifecycle.InvalidError{Field: at, Message: "must not be null"}
		}
		v.Set(reflect.Append(v, e))
	}
	return nil
}

// next skips what is between two values.
func next(data []byte) []byte { return bytes.TrimLeft(data, " \t\r\n,:") }

// cutValue splits valid JSON that begins with a value after that value.
func cutValue(data []byte) (value, rest []byte) {
	depth := 0
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			for i++; i < len(data) && data[i] != '"'; i++ {
				if data[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
			continue
		case '}', ']':
			depth--
		default: // of a number or a word, or between values
			if depth > 0 || i+1 < len(data) && !bytes.ContainsRune([]byte(" \t\r\n,:]}"), rune(data[i+1])) {
				continue
			}
		}
		if depth == 0 && i < len(data) {
			return data[:i+1], data[i+1:]
		}
	}
	return data, nil
}

// CutField splits the text of a JSON object around the value of a field, as it is in what
// engines answer. The value is nil if there is no such field.
func CutField(object []byte, name string) (before, value, after []byte) {
	rest, _ := bytes.CutPrefix(object, []byte("{"))
	for rest = next(rest); len(rest) > 0 && rest[0] == '"'; rest = next(rest) {
		var key []byte
		key, rest = cutValue(rest)
		if value, rest = cutValue(next(rest)); string(key) == `"`+name+`"` {
			return object[:len(object)-len(rest)-len(value)], value, rest
		}
	}
	return object, nil, nil
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

// object reads an object's fields.
func (d decoder) object(raw []byte, path string, field func(name, at string, raw []byte) error) error {
	if raw[0] != '{' {
		return &lifecycle.InvalidError{Field: path, Message: "must be an object"}
	}
	seen := map[string]bool{}
	for rest := next(raw[1:]); rest[0] != '}'; rest = next(rest) {
		raw, rest = cutValue(rest)
		var name string
		if err := json.Unmarshal(raw, &name); err != nil {
			return err
		}
		at := cut(name, maxName)
		if path != "" {
			at = path + "." + at
		}
		if seen[name] {
			return Malformed(fmt.Sprintf("field %q is there twice", at))
		}
		seen[name] = true
		raw, rest = cutValue(next(rest))
		if err := field(name, at, raw); err != nil {
			return err
		}
	}
	return nil
}

// cut shortens a text that a caller may have made as long as it likes.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

func setLeaf(v reflect.Value, raw json.RawMessage, path string) error {
	if u, ok := v.Addr().Interface().(json.Unmarshaler); ok {
		err := u.UnmarshalJSON(raw)
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			err = errors.New("can't be of type " + wrong.Value)
		}
		if err != nil {
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
	case reflect.Int, reflect.Int64, reflect.Uint16, reflect.Uint32, reflect.Uint64:
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
		if cmp.Or(tag, field.Name) == name && tag != "-" && field.IsExported() && !field.Anonymous {
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
	w.Header().Set("Content-Length", strconv.Itoa(len(b)+1))
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
	return nil
}
