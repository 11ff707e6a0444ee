package sandboxapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/stream"
	"github.com/bermhq/berm/runtime"
)

// readFile sends a file's content, or a part of it.
func readFile(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
	d := &download{Response: stream.NewResponse(w), r: r, name: op.Path, length: -1}
	part, ranged := rangeOf(r)
	if !ranged && r.Method != http.MethodHead {
		op.Length = -1
		return d.end(files.File(r.Context(), op, runtime.FileIO{Out: d, Info: d.open}))
	}
	info, err := statFile(r.Context(), files, op.Path)
	if err != nil {
		return err
	}
	if r.Method == http.MethodHead {
		if !info.Mode.IsRegular() {
			return &lifecycle.InvalidError{Field: "path", Message: "is no regular file"}
		}
		return d.end(d.open(info))
	}
	var inside bool
	if d.offset, d.length, inside = part.of(info.Size); !inside && info.Mode.IsRegular() {
		return noRange(w, info.Size)
	}
	d.part, op.Offset, op.Length = true, d.offset, d.length
	return d.end(files.File(r.Context(), op, runtime.FileIO{Out: d, Info: d.open}))
}

// download is the answer to the read of a file.
type download struct {
	*stream.Response
	r              *http.Request
	name           string
	part           bool
	offset, length int64 // of the part
	left           int64 // bytes still to be sent; less than 0: not known
}

var errNotModified = errors.New("the caller has it already")

// open sets the answer's header, which goes out with the first bytes. Until then, an error
// can still be answered.
func (d *download) open(info runtime.FileInfo) error {
	h := d.Header()
	etag := fmt.Sprintf(`W/"%x-%x"`, info.ModTime.UnixNano(), info.Size)
	h.Set("ETag", etag)
	h.Set("Last-Modified", info.ModTime.UTC().Format(http.TimeFormat))
	if noneMatch(d.r, etag) {
		return errNotModified
	}
	d.Status = http.StatusOK
	switch {
	case d.part && info.Size < d.offset+d.length:
		return d.shorter()
	case d.part:
		d.Status, d.left = http.StatusPartialContent, d.length
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", d.offset, d.offset+d.length-1, info.Size))
	case info.Size == 0:
		d.left = -1 // files in /proc have size 0 too, and still have content
	default:
		d.left = info.Size
	}
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", attachment(path.Base(d.name)))
	h.Set("Accept-Ranges", "bytes")
	if d.left >= 0 {
		h.Set("Content-Length", strconv.FormatInt(d.left, 10))
	}
	return nil
}

func (d *download) shorter() error {
	return &lifecycle.FileError{Path: d.name, Class: errdefs.ErrFailedPrecondition, Message: "it has just become shorter; try again"}
}

// Write sends no more bytes than the Content-Length. It fails with errEnough at that point, as
// the file has grown.
func (d *download) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	grown := d.left >= 0 && int64(len(b)) > d.left
	if grown {
		b = b[:d.left]
	}
	n, err := d.Response.Write(b)
	if d.left >= 0 {
		d.left -= int64(n)
	}
	if err == nil && grown {
		err = errEnough
	}
	return n, err
}

// end returns an error that can still be answered, and removes the file's headers. Once the
// answer has begun, an error breaks it off, so that the caller doesn't take a part for the
// whole.
func (d *download) end(err error) error {
	switch {
	case errors.Is(err, errNotModified):
		d.Status, err = http.StatusNotModified, nil
	case errors.Is(err, errEnough):
		err = nil
	case err == nil && d.Status == 0:
		err = errors.New("the sandbox didn't say what the file is")
	case err == nil && d.left > 0 && d.r.Method != http.MethodHead:
		err = d.shorter()
	}
	if err != nil && !d.Begun() {
		for _, name := range []string{
			"ETag", "Last-Modified", "Content-Type", "Content-Disposition", "Accept-Ranges", "Content-Length", "Content-Range",
		} {
			d.Header().Del(name)
		}
	}
	return d.End(err)
}

// noneMatch reports whether If-None-Match names the ETag, so that the answer is 304.
func noneMatch(r *http.Request, etag string) bool {
	for _, v := range r.Header.Values("If-None-Match") {
		for tag := range strings.SplitSeq(v, ",") {
			if tag = strings.TrimSpace(tag); tag == "*" || strings.TrimPrefix(tag, "W/") == strings.TrimPrefix(etag, "W/") {
				return true
			}
		}
	}
	return false
}

// attachment returns a Content-Disposition with which a browser saves a sandbox's file instead
// of showing it.
func attachment(name string) string {
	if v := mime.FormatMediaType("attachment", map[string]string{"filename": strings.ToValidUTF8(name, "\ufffd")}); v != "" {
		return v
	}
	return "attachment"
}

// byteRange is one range of bytes, from first to last inclusive. A last below 0 is the file's
// end. If end is set, the range is the file's last bytes, of which there are last.
type byteRange struct {
	first, last int64
	end         bool
}

// rangeOf reads the Range header. It ignores what a server may ignore: several ranges, other
// units, and a range with If-Range, which a weak ETag never matches.
func rangeOf(r *http.Request) (byteRange, bool) {
	values := r.Header.Values("Range")
	if len(values) != 1 || r.Header.Get("If-Range") != "" {
		return byteRange{}, false
	}
	spec, ok := strings.CutPrefix(values[0], "bytes=")
	from, to, dash := strings.Cut(spec, "-")
	if !ok || !dash || strings.ContainsAny(spec, ", +") {
		return byteRange{}, false
	}
	out := byteRange{last: -1}
	var err error
	if from == "" {
		n, err := strconv.ParseInt(to, 10, 64)
		return byteRange{last: n, end: true}, err == nil && n >= 0
	}
	if out.first, err = strconv.ParseInt(from, 10, 64); err != nil {
		return out, false
	}
	if to != "" {
		if out.last, err = strconv.ParseInt(to, 10, 64); err != nil || out.last < out.first {
			return out, false
		}
	}
	return out, true
}

// of returns the range's offset and length in a file of a size; false if it lies outside.
func (b byteRange) of(size int64) (offset, length int64, ok bool) {
	switch {
	case b.end:
		n := min(b.last, size)
		return size - n, n, n > 0
	case b.first >= size:
		return 0, 0, false
	case b.last < 0 || b.last >= size:
		return b.first, size - b.first, true
	}
	return b.first, b.last - b.first + 1, true
}

// noRange refuses a range that lies outside of a file.
func noRange(w http.ResponseWriter, size int64) error {
	w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", size))
	return &proxy.Fault{Status: http.StatusRequestedRangeNotSatisfiable, Code: "range", Title: "No such range",
		Detail: fmt.Sprintf("the file has %d bytes", size)}
}

// readTar sends a file or a tree as an archive.
func readTar(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
	name := path.Base(op.Path)
	if name == "/" {
		name = "root"
	}
	t := tarball(w, name)
	return endTar(t, files.File(r.Context(), op, runtime.FileIO{Out: t}))
}

// tarball returns an answer that a browser saves as an archive named after name.
func tarball(w http.ResponseWriter, name string) *stream.Response {
	return stream.NewResponse(w, "Content-Type", "application/x-tar", "Content-Disposition", attachment(name+".tar"))
}

func endTar(t *stream.Response, err error) error {
	if err == nil && !t.Begun() {
		err = errors.New("there came no archive")
	}
	return t.End(err)
}

// lineWriter answers lines of JSON, at most limit unless that is 0.
type lineWriter struct {
	*stream.Response
	buf   *bufio.Writer
	n     int
	limit int
}

func newLineWriter(w http.ResponseWriter, limit int) *lineWriter {
	s := stream.NewResponse(w, "Content-Type", stream.NDJSON)
	return &lineWriter{Response: s, buf: bufio.NewWriterSize(s, 32<<10), limit: limit}
}

func (l *lineWriter) add(v any) error {
	if l.limit > 0 && l.n == l.limit {
		return errEnough
	}
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	l.n++
	_, err = l.buf.Write(append(b, '\n'))
	return err
}

func (l *lineWriter) end(err error) error {
	_ = l.buf.Flush() // a caller that is gone is no error
	if errors.Is(err, errEnough) {
		err = nil
	}
	return l.End(err)
}

// watchFiles sends changes as they happen.
func (a *api) watchFiles(w http.ResponseWriter, r *http.Request, files *lifecycle.Access, op runtime.FileOp) error {
	if err := skipBody(w, r); err != nil {
		return err
	}
	ctx, stop := proxy.UntilDrain(r.Context())
	defer stop()
	s := stream.NewEvents(w, stream.SSE)
	defer s.Until(ctx)()
	ctx, quit := context.WithCancel(ctx)
	defer quit()
	beat := proxy.Tasks{Abort: quit}
	defer beat.Wait()
	beatCtx, quiet := context.WithCancel(ctx)
	defer quiet()
	err := files.File(ctx, op, runtime.FileIO{Event: func(e runtime.FileEvent) error {
		if e.Type == runtime.FileReady {
			beat.Go(func() { s.BeatUntil(beatCtx, a.Heartbeat) })
		}
		out := apitype.FileEvent{Type: e.Type, Dir: e.Dir}
		out.Path, out.PathBase64 = textOf(e.Path)
		return s.SendEvent("", out.Type, out)
	}})
	if s.Begun() && proxy.GoingDown(ctx) {
		_ = s.SendEvent("", apitype.EventGoingDown, apitype.FileEvent{Type: apitype.EventGoingDown})
	}
	if err == nil { // breaks the answer off, so that the caller notices that the watch has ended
		err = proxy.ErrGoingDown
	}
	return s.End(proxy.Explained(ctx, err))
}
