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
		return decodeJSON(data, v, withNulls, ignored...)
	})
}

// DecodeJSONNulls is to DecodeNulls what DecodeJSON is to DecodeBody.
func DecodeJSONNulls(data []byte, v any) error { return decodeJSON(data, v, withNulls) }

// DecodeJSON reads one JSON value into v, a non-nil pointer to a zero value. Names must match
// exactly, unknown and repeated ones are refused, as are trailing data, invalid UTF-8 and deep
// nesting. Null is for pointers, maps and slices only, and for no element of a slice of pointers.
// Malformed JSON is a Fault of 400, a value of the wrong kind a *lifecycle.InvalidError.
func DecodeJSON(data []byte, v any) error { return decodeJSON(data, v, withoutNulls) }

var withoutNulls, withNulls = strict(false), strict(true)

// strict are the options of a decoder for which null is the zero value of everything, or not.
func strict(nulls bool) jsonv2.Options {
	check := jsonv2.UnmarshalFromFunc(func(d *jsontext.Decoder, v any) error {
		if d.PeekKind() != jsontext.KindNull {
			return errors.ErrUnsupported // has it decoded as without this function
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

// decodesItself tells whether a type has a decoder of its own.
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

// fieldAt writes a place in JSON as "mounts[0].mode", with names that a caller may have made
// as long as it likes.
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

// mismatch says what a value should have been.
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

// CutField splits the text of a JSON object around the value of a field, as it is in what
// engines answer. The value is nil if there is no such field.
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

// cut shortens a text that a caller may have made as long as it likes.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
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
