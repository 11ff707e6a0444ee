package client

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net/http"
	"net/url"
	"unicode/utf8"

	"github.com/bermhq/berm/proxy/apitype"
)

const octets = "application/octet-stream"

// fileQuery returns a query that names a file, in base64 if the name isn't text.
func fileQuery(name string) url.Values {
	if utf8.ValidString(name) {
		return url.Values{"path": {name}}
	}
	return url.Values{"path_base64": {base64.RawURLEncoding.EncodeToString([]byte(name))}}
}

// split returns a name as text, or as raw bytes if it isn't text.
func split(name string) (text string, raw []byte) {
	if utf8.ValidString(name) {
		return name, nil
	}
	return "", []byte(name)
}

// StatFile describes a file in a sandbox. It follows links. Names are absolute and may have any
// bytes but NUL, here and in all calls.
func (c *Client) StatFile(ctx context.Context, key, name string) (*apitype.FileInfo, error) {
	return get[apitype.FileInfo](ctx, c, at("sandboxes", key, "files", "stat"), fileQuery(name))
}

// ReadFile opens a file at an offset. A length of 0 reads to its end. The caller closes the
// reader. The content is complete only if reading ends with io.EOF.
func (c *Client) ReadFile(ctx context.Context, key, name string, offset, length int64) (io.ReadCloser, error) {
	return c.open(ctx, at("sandboxes", key, "files"), fileQuery(name), offset, length)
}

// open opens an answer at an offset. A length of 0 reads to its end. The reader has a method
// Size() int64, which returns the bytes to come, or 0 if the server doesn't say.
func (c *Client) open(ctx context.Context, path string, q url.Values, offset, length int64) (io.ReadCloser, error) {
	h := http.Header{}
	switch {
	case length > 0:
		h.Set("Range", fmt.Sprintf("bytes=%d-%d", offset, offset+length-1))
	case offset > 0:
		h.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	rep, err := c.do(ctx, call{method: http.MethodGet, path: path, query: q, header: h, stream: true})
	if err != nil {
		return nil, err
	}
	return sized{rep.Body, max(rep.ContentLength, 0)}, nil
}

// sized is a body with its size.
type sized struct {
	io.ReadCloser
	size int64
}

// Size returns the bytes of the body, or 0 if they aren't known.
func (s sized) Size() int64 { return s.size }

func tarHeader() http.Header { return http.Header{"Content-Type": {"application/x-tar"}} }

// WriteOptions say how to write a file.
type WriteOptions struct {
	Mode    fs.FileMode // permissions of a new file; 0 is 0644
	Mkdir   bool        // create missing parent directories
	Append  bool
	NoClash bool // fail with the code precondition_failed if the file exists
}

// WriteFile replaces a file by all of r, or leaves it as it was. With Append, it appends r. The
// call is never repeated.
func (c *Client) WriteFile(ctx context.Context, key, name string, r io.Reader, opts WriteOptions) (*apitype.FileInfo, error) {
	q, h := fileQuery(name), http.Header{"Content-Type": {octets}}
	set(q, "mode", octal(opts.Mode))
	set(q, "mkdir", opts.Mkdir)
	set(q, "append", opts.Append)
	if opts.NoClash {
		h.Set("If-None-Match", "*")
	}
	return out[apitype.FileInfo](ctx, c, call{method: http.MethodPut, path: at("sandboxes", key, "files"), query: q, header: h, upload: r})
}

// octal formats permissions for the API. It returns "" for 0.
func octal(mode fs.FileMode) string {
	if mode == 0 {
		return ""
	}
	return fmt.Sprintf("%04o", uint32(mode))
}

// ListFiles yields the files of a directory and of its subdirectories down to a depth, sorted.
// A depth of 0 is 1, the directory alone. The sequence ends after the first error.
func (c *Client) ListFiles(ctx context.Context, key, dir string, depth int) iter.Seq2[apitype.FileInfo, error] {
	q := fileQuery(dir)
	set(q, "depth", depth)
	return func(yield func(apitype.FileInfo, error) bool) {
		list := call{method: http.MethodGet, path: at("sandboxes", key, "files", "list"), query: q, header: http.Header{"Accept": {ndjson}}}
		err := lines(ctx, c, list, "", 0, func(info apitype.FileInfo) (bool, error) { return yield(info, nil), nil })
		if err != nil && !errors.Is(err, io.EOF) {
			yield(apitype.FileInfo{}, err)
		}
	}
}

// Mkdir creates a directory. With parents, it creates missing parents, and doesn't fail if the
// directory exists. A mode of 0 is 0755.
func (c *Client) Mkdir(ctx context.Context, key, name string, mode fs.FileMode, parents bool) error {
	req := apitype.MkdirRequest{Parents: parents, Mode: octal(mode)}
	req.Path, req.PathBase64 = split(name)
	return c.done(ctx, call{method: http.MethodPost, path: at("sandboxes", key, "files", "mkdir"), body: req, again: unlessFull})
}

// MoveFile moves a file or a directory. With replace, it replaces the file or the empty
// directory at to.
func (c *Client) MoveFile(ctx context.Context, key, from, to string, replace bool) error {
	return c.moveFile(ctx, key, "move", from, to, replace)
}

// CopyFile copies a file or a whole tree. Replace is as in MoveFile.
func (c *Client) CopyFile(ctx context.Context, key, from, to string, replace bool) error {
	return c.moveFile(ctx, key, "copy", from, to, replace)
}

func (c *Client) moveFile(ctx context.Context, key, how, from, to string, replace bool) error {
	req := apitype.MoveRequest{Replace: replace}
	req.From, req.FromBase64 = split(from)
	req.To, req.ToBase64 = split(to)
	return c.done(ctx, call{method: http.MethodPost, path: at("sandboxes", key, "files", how), body: req, again: unlessFull})
}

// RemoveFile removes a file or a directory. A directory that isn't empty needs recursive.
func (c *Client) RemoveFile(ctx context.Context, key, name string, recursive bool) error {
	q := fileQuery(name)
	set(q, "recursive", recursive)
	return c.done(ctx, call{method: http.MethodDelete, path: at("sandboxes", key, "files"), query: q, again: unlessFull})
}

// GlobFiles finds at most limit paths below a directory that match a pattern. In the pattern,
// ** stands for any number of directories. A limit of 0 is 1,000.
func (c *Client) GlobFiles(ctx context.Context, key, dir, pattern string, limit int) (*apitype.FileList, error) {
	q := fileQuery(dir)
	q.Set("pattern", pattern)
	set(q, "limit", limit)
	return get[apitype.FileList](ctx, c, at("sandboxes", key, "files", "glob"), q)
}

// SearchOptions are the options of SearchFiles.
type SearchOptions struct {
	Pattern    string // in the syntax of Go's regexp, unless Literal
	Literal    bool
	IgnoreCase bool
	Include    string // pattern of base names; empty is all
	Limit      int    // matches; 0 is 1,000
}

// SearchFiles finds lines in the regular files below a path.
func (c *Client) SearchFiles(ctx context.Context, key, name string, opts SearchOptions) (*apitype.FileMatches, error) {
	q := fileQuery(name)
	q.Set("pattern", opts.Pattern)
	set(q, "literal", opts.Literal)
	set(q, "ignore_case", opts.IgnoreCase)
	set(q, "include", opts.Include)
	set(q, "limit", opts.Limit)
	return get[apitype.FileMatches](ctx, c, at("sandboxes", key, "files", "search"), q)
}

// ReadTar opens a tar archive of a file or a tree, which is in it under its base name. The
// caller closes the reader.
func (c *Client) ReadTar(ctx context.Context, key, name string) (io.ReadCloser, error) {
	return c.open(ctx, at("sandboxes", key, "files", "tar"), fileQuery(name), 0, 0)
}

// WriteTar unpacks a tar archive into a directory. If it fails, files that are unpacked
// already stay. It is never repeated.
func (c *Client) WriteTar(ctx context.Context, key, dir string, r io.Reader) error {
	return c.done(ctx, call{method: http.MethodPut, path: at("sandboxes", key, "files", "tar"), query: fileQuery(dir), header: tarHeader(), upload: r})
}

// WatchFiles yields changes below a directory. The first event is "ready": later changes are
// seen. The sequence ends when the caller breaks the loop or ctx ends, or after the first
// error. It isn't resumed, since changes in between would be lost.
func (c *Client) WatchFiles(ctx context.Context, key, dir string, recursive bool) iter.Seq2[apitype.FileEvent, error] {
	q := fileQuery(dir)
	set(q, "recursive", recursive)
	return func(yield func(apitype.FileEvent, error) bool) {
		watch := call{method: http.MethodGet, path: at("sandboxes", key, "files", "watch"), query: q}
		err := lines(ctx, c, watch, "data: ", maxSilence, func(e apitype.FileEvent) (bool, error) {
			if e.Type == apitype.EventGoingDown {
				return false, errGoingDown
			}
			return yield(e, nil), nil
		})
		_, refused := errors.AsType[*Error](err)
		switch {
		case err == nil, ctx.Err() != nil && !refused:
			return
		case errors.Is(err, io.EOF):
			err = errBroken
		}
		yield(apitype.FileEvent{}, err)
	}
}
