package proxy

import (
	"bytes"
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

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	jsonv1 "github.com/go-json-experiment/json/v1"

	"github.com/bermhq/berm/lifecycle"
)

// MaxBody is the maximum size of a body in bytes, unless a route has its own.
const MaxBody = 1 << 20

const (
	maxDepth    = 16       // of objects and arrays within each other
	maxValues   = 1 << 15  // in one body
	fewValues   = 128      // values for which readBody leases memory before they are counted
	valueCost   = 128      // bytes of memory that a value takes beside its text
	maxName     = 128      // bytes of a field's name in an error
	maxMessage  = 4 << 10  // bytes of an error that are kept and logged
	bodyStart   = 64 << 10 // bytes of a body of unknown length that are leased first
	bodyIdle    = 10 * time.Second
	bodyTimeout = time.Minute     // for a whole body to arrive
	sendTimeout = 2 * time.Minute // for a whole answer to leave
)

// BodyLinger is how long the rest of a body may take to arrive once its request was answered.
const BodyLinger = 5 * time.Second

// LastRequest reports whether the server will close the connection after the answer without
// reading the rest of the body. A caller that is still sending then loses the answer. A
// caller with an Expect header waits before it sends, so it doesn't count.
func LastRequest(r *http.Request) bool { return r.Close && r.Header.Get("Expect") == "" }

// boundBody sets a deadline for the rest of a request's body. It also holds for net/http,
// which reads a body that no handler has read. A handler may set another deadline.
func boundBody(w http.ResponseWriter, r *http.Request, within time.Duration) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(within)) // an in-process writer has none
	}
}

// maxDrain bounds what is read of a refused body, in bytes.
const maxDrain = 256 << 20

// drain sends the answer and reads the rest of the body until its deadline. Some callers look
// for an answer only once they have sent everything. If the connection closed before, they
// would lose the answer.
func drain(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 || r.Body == nil || r.Header.Get("Expect") != "" {
		return
	}
	_ = http.NewResponseController(w).Flush() // an in-process writer can't
	_, _ = io.CopyN(io.Discard, r.Body, maxDrain)
}

// DecodeBody reads a JSON body of at most limit bytes into v, as DecodeJSON does. If the body
// is optional, an empty one leaves v as it is. DecodeBody leases the memory that the body
// takes until the request ends. Exchange.KeepBody hands that lease over.
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

// readJSON reads a body whose Content-Type is JSON. It returns nil for an optional body that
// is empty.
func readJSON(w http.ResponseWriter, r *http.Request, limit int64, optional bool) ([]byte, error) {
	if r.ContentLength > limit { // a caller that is still sending would lose an answer
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

// readBody reads a body to its end, within bodyTimeout. It leases twice the body's size: for
// the text, and for the decoded value. A body of unknown length first leases bodyStart. If it
// is larger, it leases the whole limit at once: bodies that grew step by step could wait for
// each other for ever.
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

// DecodeNulls is DecodeBody for an API whose clients send null for fields that they leave out.
// Null decodes as the zero value. The whole body may be null only if v is a pointer to a
// pointer. DecodeNulls skips unknown top-level fields whose names are ignored.
func DecodeNulls(w http.ResponseWriter, r *http.Request, limit int64, v any, ignored ...string) error {
	return decodeBody(w, r, limit, false, v, func(data []byte, v any) error {
		return decodeJSON(data, v, withNulls, ignored...)
	})
}

// DecodeJSONNulls is DecodeJSON, but null decodes as the zero value, as in DecodeNulls.
func DecodeJSONNulls(data []byte, v any) error { return decodeJSON(data, v, withNulls) }

// DecodeJSON reads one JSON value into v, a non-nil pointer to a zero value. Names must match
// exactly. It refuses unknown and repeated names, trailing data, invalid UTF-8, deep nesting
// and too many values. Null is allowed for pointers, maps and slices only, except that the
// elements of a slice of pointers can't be null. For malformed JSON it returns a *Fault with
// status 400, and for a value of the wrong kind a *lifecycle.InvalidError.
func DecodeJSON(data []byte, v any) error { return decodeJSON(data, v, withoutNulls) }

var withoutNulls, withNulls = strict(false), strict(true)

// strict returns the options of a strict decoder. With nulls, null decodes as the zero value
// of every type.
func strict(nulls bool) jsonv2.Options {
	check := jsonv2.UnmarshalFromFunc(func(d *jsontext.Decoder, v any) error {
		if d.PeekKind() != jsontext.KindNull {
			return errors.ErrUnsupported // the decoder goes on as usual
		}
		t := reflect.TypeOf(v).Elem()
		switch {
		case t.Kind() == reflect.Pointer:
			if within, _ := d.StackIndex(d.StackDepth()); within == jsontext.KindBeginArray {
				return errNull
			}
			return d.SkipValue()
		case d.StackDepth() == 0:
			return errNull
		case nulls:
			return d.SkipValue()
		case decodesItself(t), t.Kind() == reflect.Map, t.Kind() == reflect.Slice && t.Elem().Kind() != reflect.Uint8:
			return errors.ErrUnsupported
		}
		return errNull
	})
	return jsonv2.JoinOptions(jsonv2.RejectUnknownMembers(true), jsonv2.WithUnmarshalers(check), jsonv1.FormatDurationAsNano(true))
}

var errNull = errors.New("must not be null")

// decodesItself reports whether a type has an UnmarshalJSON method.
func decodesItself(t reflect.Type) bool {
	return reflect.PointerTo(t).Implements(reflect.TypeFor[jsonv2.Unmarshaler]())
}

func decodeJSON(data []byte, v any, opts jsonv2.Options, ignored ...string) error {
	switch values, depth := shape(data); {
	case depth > maxDepth:
		return Malformed(fmt.Sprintf("the body is nested more than %d levels deep", maxDepth))
	case values > maxValues:
		return Malformed(fmt.Sprintf("the body has more than %d values", maxValues))
	}
	err := jsonv2.Unmarshal(data, v, opts)
	var syntax *jsontext.SyntacticError
	var meaning *jsonv2.SemanticError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &syntax) && errors.Is(err, jsontext.ErrDuplicateName):
		return Malformed(fmt.Sprintf("field %q is there twice", fieldAt(syntax.JSONPointer)))
	case syntax != nil:
		return Malformed(fmt.Sprintf("the body is not one valid JSON value: %v, after byte %d", syntax.Err, syntax.ByteOffset))
	case !errors.As(err, &meaning):
		return err
	case errors.Is(err, jsonv2.ErrUnknownName):
		if name := meaning.JSONPointer.LastToken(); meaning.JSONPointer.Parent() == "" && slices.Contains(ignored, name) {
			return decodeWithout(data, v, opts, name, ignored)
		}
		return Malformed(fmt.Sprintf("unknown field %q", fieldAt(meaning.JSONPointer)))
	}
	return &lifecycle.InvalidError{Field: fieldAt(meaning.JSONPointer), Message: mismatch(meaning)}
}

// decodeWithout decodes an object without one of its fields.
func decodeWithout(data []byte, v any, opts jsonv2.Options, name string, ignored []string) error {
	var fields map[string]jsontext.Value
	if err := jsonv2.Unmarshal(data, &fields); err != nil {
		return err
	}
	delete(fields, name)
	data, err := jsonv2.Marshal(fields)
	if err != nil {
		return err
	}
	return decodeJSON(data, v, opts, ignored...)
}

// fieldAt writes a JSON pointer as "mounts[0].mode". It shortens long names, as they may be
// the caller's.
func fieldAt(p jsontext.Pointer) string {
	var b strings.Builder
	for name := range p.Tokens() {
		if _, err := strconv.ParseUint(name, 10, 31); err == nil {
			b.WriteString("[" + name + "]")
			continue
		}
		if b.Len() > 0 {
			b.WriteByte('.')
		}
		b.WriteString(cut(name, maxName))
	}
	return b.String()
}

// mismatch returns what a value of the wrong kind should have been.
func mismatch(e *jsonv2.SemanticError) string {
	t := e.GoType
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](e.Err); ok {
		return "can't be of type " + wrong.Value
	}
	if e.Err != nil && (t.Kind() == reflect.Pointer || decodesItself(t)) {
		return e.Err.Error()
	}
	switch t.Kind() {
	case reflect.String:
		return "must be a string"
	case reflect.Bool:
		return "must be true or false"
	case reflect.Int, reflect.Int64, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "must be a whole number"
	case reflect.Float64:
		return "must be a number"
	case reflect.Struct, reflect.Map:
		return "must be an object"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return "must be a string in base64"
		}
		return "must be an array"
	}
	return "must be " + t.Kind().String()
}

// shape counts the values of JSON, with the names of members, and how deeply they are nested.
// It counts an empty object or array as two values.
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

// CutField splits the text of a JSON object around the value of its field name. The value is
// nil if there is no such field, or if the JSON before it is malformed. CutField doesn't
// refuse repeated names, as it is meant for engines' answers.
func CutField(object []byte, name string) (before, value, after []byte) {
	d := jsontext.NewDecoder(bytes.NewBuffer(object), jsontext.AllowDuplicateNames(true))
	if t, err := d.ReadToken(); err != nil || t.Kind() != jsontext.KindBeginObject {
		return object, nil, nil
	}
	for d.PeekKind() == jsontext.KindString {
		key, err := d.ReadToken()
		if err != nil {
			break
		}
		found := key.String() == name
		if value, err = d.ReadValue(); err != nil {
			break
		}
		if end := int(d.InputOffset()); found {
			start := end - len(value)
			return object[:start], object[start:end], object[end:]
		}
	}
	return object, nil, nil
}

// cut shortens s to at most the given number of bytes, and marks that with an ellipsis.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// WriteJSON answers with v as JSON. It fails only if v can't be encoded, not if the caller
// is gone.
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
