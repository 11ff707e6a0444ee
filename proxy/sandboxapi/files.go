package sandboxapi

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

const (
	defaultFound = 1000
	maxFoundSize = 16 << 20 // bytes of one answer that isn't in lines
)

// fileHandler serves an operation that the query describes.
type fileHandler = func(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error

// routeFiles adds the handlers of file operations.
func (a *api) routeFiles(handle routing) {
	const files = one + "/files"
	for _, call := range []struct {
		method, path string
		verb         runtime.FileVerb
		h            fileHandler
	}{
		{"GET", "", runtime.FileRead, readFile},
		{"HEAD", "", runtime.FileRead, readFile},
		{"PUT", "", runtime.FileWrite, writeFile},
		{"DELETE", "", runtime.FileRemove, changeFile},
		{"GET", "/stat", runtime.FileStat, answerStat},
		{"GET", "/list", runtime.FileList, findFiles("files")},
		{"GET", "/glob", runtime.FileGlob, findFiles("files")},
		{"GET", "/search", runtime.FileSearch, findFiles("matches")},
		{"GET", "/watch", runtime.FileWatch, a.watchFiles},
		{"GET", "/tar", runtime.FileTarRead, readTar},
		{"PUT", "/tar", runtime.FileTarWrite, writeTar},
	} {
		scope := proxy.ScopeSandboxesRead
		if call.method == "PUT" || call.method == "DELETE" {
			scope = proxy.ScopeSandboxesExec
		}
		handle(call.method, files+call.path, scope, a.fileCall(call.verb, call.h), append([]string{"path", "path_base64"}, fileQueries[call.verb]...)...)
	}
	handle("POST", files+"/mkdir", proxy.ScopeSandboxesExec, changeFiles(a, decodeMkdir))
	handle("POST", files+"/move", proxy.ScopeSandboxesExec, changeFiles(a, decodeMove(runtime.FileMove)))
	handle("POST", files+"/copy", proxy.ScopeSandboxesExec, changeFiles(a, decodeMove(runtime.FileCopy)))
}

// files returns access to the files of the sandbox that the path names.
func (a *api) files(r *http.Request) (*lifecycle.Access, error) {
	tenant, key := target(r)
	files, err := a.Manager.Files(r.Context(), tenant, key)
	if err != nil {
		return nil, err
	}
	proxy.ExchangeOf(r.Context()).SessionID = files.SessionID()
	return files, nil
}

// fileQueries are the parameters of an operation besides its path.
var fileQueries = map[runtime.FileVerb][]string{
	runtime.FileList: {"depth", "limit"}, runtime.FileGlob: {"pattern", "limit"},
	runtime.FileSearch: {"pattern", "literal", "ignore_case", "include", "limit"},
	runtime.FileWrite:  {"mode", "mkdir", "append"},
	runtime.FileRemove: {"recursive"}, runtime.FileWatch: {"recursive"},
}

// fileCall returns a handler that decodes the operation from the query, finds the sandbox, and
// calls h.
func (a *api) fileCall(verb runtime.FileVerb, h fileHandler) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		op := runtime.FileOp{Verb: verb}
		if err := decodeFileQuery(r.URL.Query(), &op); err != nil {
			return err
		}
		files, err := a.files(r)
		if err != nil {
			return err
		}
		return h(w, r, files, op)
	}
}

func decodeFileQuery(q url.Values, op *runtime.FileOp) (err error) {
	var raw []byte
	if q.Has("path_base64") {
		if raw, err = base64Query(q.Get("path_base64")); err != nil {
			return &lifecycle.InvalidError{Field: "path_base64", Message: "must be base64"}
		}
	}
	if op.Path, err = pathOf("path", q.Get("path"), raw); err != nil {
		return err
	}
	op.Pattern, op.Include, op.Depth = q.Get("pattern"), q.Get("include"), 1
	if q.Has("depth") {
		if op.Depth, err = strconv.Atoi(q.Get("depth")); err != nil {
			return &lifecycle.InvalidError{Field: "depth", Message: "must be a whole number"}
		}
	}
	if op.Limit, err = limitQuery(q); err != nil {
		return err
	}
	if op.Mode, err = modeOf(q.Get("mode")); err != nil {
		return err
	}
	for name, field := range map[string]*bool{
		"recursive": &op.Recursive, "literal": &op.Literal, "ignore_case": &op.IgnoreCase, "mkdir": &op.Parents, "append": &op.Append,
	} {
		if *field, err = boolQuery(q, name); err != nil {
			return err
		}
	}
	return nil
}

// base64Query decodes base64 of either alphabet, with or without padding. It takes a space for
// a plus that the caller didn't escape.
func base64Query(s string) ([]byte, error) {
	s = strings.NewReplacer("-", "+", "_", "/", " ", "+").Replace(strings.TrimRight(s, "="))
	return base64.RawStdEncoding.DecodeString(s)
}

// pathOf returns the path given as text or as raw bytes, and fails unless exactly one is given.
func pathOf(field, text string, raw []byte) (string, error) {
	switch {
	case text != "" && len(raw) > 0:
		return "", &lifecycle.InvalidError{Field: field + "_base64", Message: "can't go together with " + field}
	case len(raw) > 0:
		return string(raw), nil
	case text == "":
		return "", &lifecycle.InvalidError{Field: field, Message: "is mandatory"}
	}
	return text, nil
}

func modeOf(s string) (fs.FileMode, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 {
		return 0, &lifecycle.InvalidError{Field: "mode", Message: "must be permissions in octal, from 0000 to 0777"}
	}
	return fs.FileMode(n), nil
}

// limitQuery returns the limit of a list, 0 without one.
func limitQuery(q url.Values) (int, error) {
	if !q.Has("limit") {
		return 0, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 || n > runtime.MaxFound {
		return 0, &lifecycle.InvalidError{Field: "limit", Message: "must be a whole number from 1 to " + strconv.Itoa(runtime.MaxFound)}
	}
	return n, nil
}

func answerStat(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
	info, err := statFile(r.Context(), files, op.Path)
	return reply(w, http.StatusOK, fileInfo(info), err)
}

func statFile(ctx context.Context, files *lifecycle.Access, name string) (info runtime.FileInfo, err error) {
	err = files.File(ctx, runtime.FileOp{Verb: runtime.FileStat, Path: name}, runtime.FileIO{Info: keep(&info)})
	return info, err
}

// keep returns a function that stores its argument in v.
func keep[T any](v *T) func(T) error { return func(got T) error { *v = got; return nil } }

// errEnough stops an operation once the answer is full.
var errEnough = errors.New("there is enough")

// findFiles answers the results of an operation as one object whose field name has the list, or
// as lines of JSON.
func findFiles(name string) fileHandler {
	return func(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
		lines := wantsNDJSON(r)
		if op.Limit == 0 && (op.Verb != runtime.FileList || !lines) {
			op.Limit = defaultFound
		}
		var out interface {
			add(v any) error
			end(err error) error
		} = &findings{w: w, name: name, limit: op.Limit, bounded: op.Verb != runtime.FileList, items: []json.RawMessage{}}
		if lines {
			out = newLineWriter(w, op.Limit)
		}
		return out.end(files.File(r.Context(), op, runtime.FileIO{
			Info:  func(info runtime.FileInfo) error { return out.add(fileInfo(info)) },
			Match: func(m runtime.FileMatch) error { return out.add(fileMatch(m)) },
		}))
	}
}

// findings collects the items of one answer, up to limit and maxFoundSize.
type findings struct {
	w           http.ResponseWriter
	name        string
	limit, size int
	bounded     bool // the operation itself stops at the limit
	items       []json.RawMessage
	truncated   bool
}

func (f *findings) add(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(f.items) == f.limit || f.size+len(b) > maxFoundSize {
		f.truncated = true
		return errEnough
	}
	f.size += len(b)
	f.items = append(f.items, b)
	return nil
}

func (f *findings) end(err error) error {
	if err != nil && !errors.Is(err, errEnough) {
		return err
	}
	truncated := f.truncated || f.bounded && len(f.items) == f.limit
	return proxy.WriteJSON(f.w, http.StatusOK, jsonType, map[string]any{f.name: f.items, "truncated": truncated})
}

// changeFiles returns a handler that runs the operation which decode reads from the body.
func changeFiles[T any](a *api, decode func(body T) (runtime.FileOp, error)) proxy.Handler {
	return a.existing(withBody(false, func(w http.ResponseWriter, r *http.Request, body T) error {
		op, err := decode(body)
		if err != nil {
			return err
		}
		files, err := a.files(r)
		if err != nil {
			return err
		}
		return changeFile(w, r, files, op)
	}))
}

// changeFile runs an operation that has no result.
func changeFile(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
	return noContent(w, files.File(r.Context(), op, runtime.FileIO{}))
}

func decodeMkdir(body apitype.MkdirRequest) (op runtime.FileOp, err error) {
	op.Verb, op.Parents = runtime.FileMkdir, body.Parents
	if op.Path, err = pathOf("path", body.Path, body.PathBase64); err != nil {
		return op, err
	}
	op.Mode, err = modeOf(cmp.Or(body.Mode, "0755"))
	return op, err
}

func decodeMove(verb runtime.FileVerb) func(apitype.MoveRequest) (runtime.FileOp, error) {
	return func(body apitype.MoveRequest) (op runtime.FileOp, err error) {
		op.Verb, op.Replace = verb, body.Replace
		if op.Path, err = pathOf("from", body.From, body.FromBase64); err != nil {
			return op, err
		}
		op.To, err = pathOf("to", body.To, body.ToBase64)
		return op, err
	}
}

// writeFile streams the request's body into a file.
func writeFile(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
	body := newUpload(w, r)
	defer body.done()
	noClash, err := wholeBody(r)
	if err != nil {
		return err
	}
	op.NoClash = noClash
	var info runtime.FileInfo
	err = files.File(r.Context(), op, runtime.FileIO{In: body, Info: keep(&info)})
	if noClash && errdefs.IsAlreadyExists(err) {
		return &proxy.Fault{Status: http.StatusPreconditionFailed, Code: "precondition_failed", Title: "Precondition failed",
			Detail: "If-None-Match: * was asked for, and the file is there", Cause: err}
	}
	return reply(w, http.StatusOK, fileInfo(info), err)
}

// wholeBody checks the header of an upload of a whole file. NoClash means that the file must
// not exist yet. It refuses other conditions, partial content and encodings.
func wholeBody(r *http.Request) (noClash bool, err error) {
	switch v := r.Header.Values("If-None-Match"); {
	case len(v) == 1 && v[0] == "*":
		noClash = true
	case len(v) > 0:
		return false, &lifecycle.InvalidError{Field: "If-None-Match", Message: "can only be * here"}
	}
	for _, name := range []string{"If-Match", "If-Unmodified-Since", "Content-Range"} {
		if r.Header.Get(name) != "" {
			return false, &lifecycle.InvalidError{Field: name, Message: "isn't supported; send the whole file, with If-None-Match: * if it mustn't be there"}
		}
	}
	return noClash, plainBody(r)
}

// plainBody refuses a body with a Content-Encoding.
func plainBody(r *http.Request) error {
	if e := r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return proxy.UnsupportedMedia("the body must come without a Content-Encoding")
	}
	return nil
}

func writeTar(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
	body := newUpload(w, r)
	defer body.done()
	if err := plainBody(r); err != nil {
		return err
	}
	return noContent(w, files.File(r.Context(), op, runtime.FileIO{In: body}))
}

func fileInfo(info runtime.FileInfo) apitype.FileInfo {
	out := apitype.FileInfo{
		Type: fileType(info.Mode), Size: info.Size, Mode: "0" + strconv.FormatUint(uint64(info.Mode.Perm()), 8),
		ModifiedAt: info.ModTime.UTC(), UID: info.UID, GID: info.GID,
	}
	out.Path, out.PathBase64 = textOf(info.Path)
	out.Target, out.TargetBase64 = textOf(info.Target)
	return out
}

func fileType(m fs.FileMode) string {
	switch {
	case m.IsRegular():
		return "file"
	case m.IsDir():
		return "directory"
	case m&fs.ModeSymlink != 0:
		return "symlink"
	case m&fs.ModeNamedPipe != 0:
		return "fifo"
	case m&fs.ModeSocket != 0:
		return "socket"
	}
	return "device"
}

func fileMatch(m runtime.FileMatch) apitype.FileMatch {
	out := apitype.FileMatch{Line: m.Line, Text: strings.ToValidUTF8(m.Text, "\ufffd")}
	out.Path, out.PathBase64 = textOf(m.Path)
	return out
}

// textOf returns a name as valid UTF-8, and its bytes if they differ.
func textOf(name string) (string, []byte) {
	if utf8.ValidString(name) {
		return name, nil
	}
	return strings.ToValidUTF8(name, "\ufffd"), []byte(name)
}
