package sandboxapi

import (
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
	maxFound     = 10_000
	maxFoundSize = 16 << 20 // bytes of one answer that isn't in lines
)

// routeFiles has the handlers of files calls.
func (a *api) routeFiles(handle func(method, path string, scope proxy.Scope, h proxy.Handler)) {
	const files = one + "/files"
	handle("GET", files, proxy.ScopeSandboxesRead, a.readFile)
	handle("HEAD", files, proxy.ScopeSandboxesRead, a.readFile)
	handle("PUT", files, proxy.ScopeSandboxesExec, a.writeFile)
	handle("DELETE", files, proxy.ScopeSandboxesExec, a.removeFile)
	handle("GET", files+"/stat", proxy.ScopeSandboxesRead, a.statFile)
	handle("GET", files+"/list", proxy.ScopeSandboxesRead, a.listFiles)
	handle("GET", files+"/glob", proxy.ScopeSandboxesRead, a.globFiles)
	handle("GET", files+"/search", proxy.ScopeSandboxesRead, a.searchFiles)
	handle("GET", files+"/watch", proxy.ScopeSandboxesRead, a.watchFiles)
	handle("GET", files+"/tar", proxy.ScopeSandboxesRead, a.readTar)
	handle("PUT", files+"/tar", proxy.ScopeSandboxesExec, a.writeTar)
	handle("POST", files+"/mkdir", proxy.ScopeSandboxesExec, a.mkdir)
	handle("POST", files+"/move", proxy.ScopeSandboxesExec, a.moveFile((*lifecycle.FileAccess).Move))
	handle("POST", files+"/copy", proxy.ScopeSandboxesExec, a.moveFile((*lifecycle.FileAccess).Copy))
}

// pathQueries are the parameters that every files call with a query has.
var pathQueries = []string{"path", "path_base64"}

// files finds the sandbox that the request is about.
func (a *api) files(r *http.Request, queries ...string) (*lifecycle.FileAccess, error) {
	tenant, key, err := a.key(r, queries...)
	if err != nil {
		return nil, err
	}
	files, err := a.manager.Files(r.Context(), tenant, key)
	if err != nil {
		return nil, err
	}
	proxy.ExchangeOf(r.Context()).SessionID = files.SessionID()
	return files, nil
}

// filesAt also gives the path of the query.
func (a *api) filesAt(r *http.Request, queries ...string) (*lifecycle.FileAccess, string, error) {
	q := r.URL.Query()
	if err := knownQuery(r, append(queries, pathQueries...)...); err != nil {
		return nil, "", err
	}
	var raw []byte
	if q.Has("path_base64") {
		var err error
		if raw, err = base64Query(q.Get("path_base64")); err != nil {
			return nil, "", &lifecycle.InvalidError{Field: "path_base64", Message: "must be base64"}
		}
	}
	name, err := pathOf("path", q.Get("path"), raw)
	if err != nil {
		return nil, "", err
	}
	files, err := a.files(r, append(queries, pathQueries...)...)
	return files, name, err
}

// filesBelow also tells whether all that is below the path is meant.
func (a *api) filesBelow(r *http.Request) (files *lifecycle.FileAccess, name string, recursive bool, err error) {
	if files, name, err = a.filesAt(r, "recursive"); err == nil {
		recursive, err = boolQuery(r.URL.Query(), "recursive")
	}
	return files, name, recursive, err
}

// base64Query takes both alphabets, with or without padding; a plus that wasn't
// escaped is a space in a query.
func base64Query(s string) ([]byte, error) {
	s = strings.NewReplacer("-", "+", "_", "/", " ", "+").Replace(strings.TrimRight(s, "="))
	return base64.RawStdEncoding.DecodeString(s)
}

// pathOf chooses between the two forms of a path.
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

func limitQuery(q url.Values, otherwise int) (int, error) {
	if !q.Has("limit") {
		return otherwise, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 || n > maxFound {
		return 0, &lifecycle.InvalidError{Field: "limit", Message: "must be a whole number from 1 to " + strconv.Itoa(maxFound)}
	}
	return n, nil
}

func (a *api) statFile(w http.ResponseWriter, r *http.Request) error {
	files, name, err := a.filesAt(r)
	if err != nil {
		return err
	}
	info, err := files.Stat(r.Context(), name)
	if err != nil {
		return err
	}
	return proxy.WriteJSON(w, http.StatusOK, jsonType, fileInfo(info))
}

// errEnough ends a call whose answer is complete.
var errEnough = errors.New("there is enough")

func (a *api) listFiles(w http.ResponseWriter, r *http.Request) error {
	files, name, err := a.filesAt(r, "depth", "limit")
	if err != nil {
		return err
	}
	q := r.URL.Query()
	depth := 1
	if q.Has("depth") {
		if depth, err = strconv.Atoi(q.Get("depth")); err != nil {
			return &lifecycle.InvalidError{Field: "depth", Message: "must be a whole number"}
		}
	}
	if wantsNDJSON(r) {
		limit, err := limitQuery(q, 0)
		if err != nil {
			return err
		}
		l := newLineWriter(w)
		err = files.List(r.Context(), name, depth, func(info runtime.FileInfo) error {
			if limit > 0 && l.n == limit {
				return errEnough
			}
			return l.write(fileInfo(info))
		})
		return l.end(err)
	}
	limit, err := limitQuery(q, defaultFound)
	if err != nil {
		return err
	}
	out := newFindings(limit)
	err = files.List(r.Context(), name, depth, func(info runtime.FileInfo) error { return out.add(fileInfo(info)) })
	return out.answer(w, "files", err)
}

// findings are the items of one answer, up to a number of them and of bytes.
type findings struct {
	limit, size int
	items       []json.RawMessage
	truncated   bool
}

func newFindings(limit int) *findings { return &findings{limit: limit, items: []json.RawMessage{}} }

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

func (f *findings) answer(w http.ResponseWriter, name string, err error) error {
	if err != nil && !errors.Is(err, errEnough) {
		return err
	}
	return proxy.WriteJSON(w, http.StatusOK, jsonType, map[string]any{name: f.items, "truncated": f.truncated})
}

func (a *api) globFiles(w http.ResponseWriter, r *http.Request) error {
	files, name, err := a.filesAt(r, "pattern", "limit")
	if err != nil {
		return err
	}
	q := r.URL.Query()
	limit, err := limitQuery(q, defaultFound)
	if err != nil {
		return err
	}
	if wantsNDJSON(r) {
		l := newLineWriter(w)
		return l.end(files.Glob(r.Context(), name, q.Get("pattern"), limit, func(info runtime.FileInfo) error {
			return l.write(fileInfo(info))
		}))
	}
	out := newFindings(limit)
	err = files.Glob(r.Context(), name, q.Get("pattern"), limit, func(info runtime.FileInfo) error { return out.add(fileInfo(info)) })
	out.truncated = out.truncated || len(out.items) == limit // more isn't asked for
	return out.answer(w, "files", err)
}

func (a *api) searchFiles(w http.ResponseWriter, r *http.Request) error {
	files, name, err := a.filesAt(r, "pattern", "literal", "ignore_case", "include", "limit")
	if err != nil {
		return err
	}
	q := r.URL.Query()
	s := runtime.FileSearch{Path: name, Pattern: q.Get("pattern"), Include: q.Get("include")}
	var errs [3]error
	s.Literal, errs[0] = boolQuery(q, "literal")
	s.IgnoreCase, errs[1] = boolQuery(q, "ignore_case")
	s.Limit, errs[2] = limitQuery(q, defaultFound)
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if wantsNDJSON(r) {
		l := newLineWriter(w)
		return l.end(files.Search(r.Context(), s, func(m runtime.FileMatch) error { return l.write(fileMatch(m)) }))
	}
	out := newFindings(s.Limit)
	err = files.Search(r.Context(), s, func(m runtime.FileMatch) error { return out.add(fileMatch(m)) })
	out.truncated = out.truncated || len(out.items) == s.Limit
	return out.answer(w, "matches", err)
}

func (a *api) mkdir(w http.ResponseWriter, r *http.Request) error {
	tenant, key, err := a.key(r)
	if err != nil {
		return err
	}
	if err := a.exists(r, tenant, key); err != nil {
		return err
	}
	var body apitype.MkdirRequest
	if err := proxy.DecodeBody(w, r, proxy.MaxBody, false, &body); err != nil {
		return err
	}
	name, err := pathOf("path", body.Path, body.PathBase64)
	if err != nil {
		return err
	}
	mode, err := modeOf(body.Mode)
	if err != nil {
		return err
	}
	if body.Mode == "" {
		mode = 0o755
	}
	files, err := a.files(r)
	if err != nil {
		return err
	}
	if err := files.Mkdir(r.Context(), name, mode, body.Parents); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// moveFile moves or copies.
func (a *api) moveFile(do moveFunc) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		tenant, key, err := a.key(r)
		if err != nil {
			return err
		}
		if err := a.exists(r, tenant, key); err != nil {
			return err
		}
		var body apitype.MoveRequest
		if err := proxy.DecodeBody(w, r, proxy.MaxBody, false, &body); err != nil {
			return err
		}
		from, err := pathOf("from", body.From, body.FromBase64)
		if err != nil {
			return err
		}
		to, err := pathOf("to", body.To, body.ToBase64)
		if err != nil {
			return err
		}
		files, err := a.files(r)
		if err != nil {
			return err
		}
		if err := do(files, r.Context(), from, to, body.Replace); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
}

func (a *api) removeFile(w http.ResponseWriter, r *http.Request) error {
	files, name, recursive, err := a.filesBelow(r)
	if err != nil {
		return err
	}
	if err := files.Remove(r.Context(), name, recursive); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// writeFile takes a file's content as it comes.
func (a *api) writeFile(w http.ResponseWriter, r *http.Request) error {
	body := newUpload(w, r)
	defer body.done()
	f, err := fileWrite(r)
	if err != nil {
		return err
	}
	files, name, err := a.filesAt(r, "mode", "mkdir", "append")
	if err != nil {
		return err
	}
	f.Path = name
	info, err := files.Write(r.Context(), f, body)
	if f.NoClash && errdefs.IsAlreadyExists(err) {
		return &proxy.Fault{Status: http.StatusPreconditionFailed, Code: "precondition_failed", Title: "Precondition failed",
			Detail: "If-None-Match: * was asked for, and the file is there", Cause: err}
	}
	if err != nil {
		return err
	}
	return proxy.WriteJSON(w, http.StatusOK, jsonType, fileInfo(info))
}

// fileWrite reads how a file is to be written. What can't be done is refused, rather
// than done in another way.
func fileWrite(r *http.Request) (f runtime.FileWrite, err error) {
	q := r.URL.Query()
	if f.Mode, err = modeOf(q.Get("mode")); err != nil {
		return f, err
	}
	if f.Mkdir, err = boolQuery(q, "mkdir"); err != nil {
		return f, err
	}
	if f.Append, err = boolQuery(q, "append"); err != nil {
		return f, err
	}
	f.NoClash, err = wholeBody(r)
	return f, err
}

// wholeBody tells whether what the body is for mustn't be there. Other conditions, a part
// and what would have to be decoded are refused.
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

// plainBody refuses what would have to be decoded.
func plainBody(r *http.Request) error {
	if e := r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return &proxy.Fault{Status: http.StatusUnsupportedMediaType, Code: "unsupported_media_type", Title: "Unsupported media type",
			Detail: "the body must come without a Content-Encoding"}
	}
	return nil
}

func (a *api) writeTar(w http.ResponseWriter, r *http.Request) error {
	body := newUpload(w, r)
	defer body.done()
	if err := plainBody(r); err != nil {
		return err
	}
	files, name, err := a.filesAt(r)
	if err != nil {
		return err
	}
	if err := files.WriteTar(r.Context(), name, body); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
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

// textOf gives what JSON can carry of a name, and the bytes if that isn't all.
func textOf(name string) (string, []byte) {
	if utf8.ValidString(name) {
		return name, nil
	}
	return strings.ToValidUTF8(name, "\ufffd"), []byte(name)
}
