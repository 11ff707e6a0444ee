package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Bounds of files.
const (
	maxPath    = 4096
	maxFiles   = 1 << 20 // that one list tells of
	maxMatches = 10_000
	usualFound = 1000
	maxLine    = 4 << 10
	maxPattern = 64 << 10
)

// checkPaths refuses what can't be a path.
func checkPaths(paths ...string) error {
	for _, p := range paths {
		if len(p) == 0 || p[0] != '/' || len(p) > maxPath || bytes.IndexByte([]byte(p), 0) >= 0 {
			return runtime.Invalid("%.200q is no path in a container: absolute, of up to %d bytes, none of them zero", p, maxPath)
		}
	}
	return nil
}

// validPath tells the same of one that came from there.
func validPath(p []byte) bool {
	return len(p) > 0 && p[0] == '/' && len(p) <= maxPath && bytes.IndexByte(p, 0) < 0
}

// parseFile reads what is said of a file.
func parseFile(payload []byte) (runtime.FileInfo, error) {
	var f wire.FileInfo
	if err := wire.Decode(payload, &f); err != nil {
		return runtime.FileInfo{}, err
	}
	if !validPath(f.Path) || f.Size < 0 || f.UID < 0 || f.UID > math.MaxUint32 || f.GID < 0 || f.GID > math.MaxUint32 || len(f.Target) > maxPath {
		return runtime.FileInfo{}, fmt.Errorf("%w: what a file is", wire.ErrProtocol)
	}
	return runtime.FileInfo{
		Path: string(f.Path), Size: min(f.Size, wire.MaxNumber), Mode: fileMode(f.Mode), ModTime: time.Unix(0, f.ModTime).UTC(),
		UID: f.UID, GID: f.GID, Target: string(f.Target),
	}, nil
}

// fileMode makes Go's of st_mode.
func fileMode(m uint32) fs.FileMode {
	out := fs.FileMode(m & 0o777)
	switch m & unix.S_IFMT {
	case unix.S_IFDIR:
		out |= fs.ModeDir
	case unix.S_IFLNK:
		out |= fs.ModeSymlink
	case unix.S_IFIFO:
		out |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		out |= fs.ModeSocket
	case unix.S_IFCHR:
		out |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		out |= fs.ModeDevice
	case unix.S_IFREG:
	default:
		out |= fs.ModeIrregular
	}
	for bit, mode := range map[uint32]fs.FileMode{unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky} {
		if m&bit != 0 {
			out |= mode
		}
	}
	return out
}

// unixMode is the other way round, for permissions.
func unixMode(m fs.FileMode) uint32 {
	out := uint32(m.Perm())
	for bit, mode := range map[uint32]fs.FileMode{unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky} {
		if m&mode != 0 {
			out |= bit
		}
	}
	return out
}

// file does an operation on files: it opens it, and says what failed.
func (r *Runtime) file(ctx context.Context, id string, req *wire.Request, paths []string, f func(*call) error) error {
	err := checkPaths(paths...)
	if err == nil {
		var x *call
		if x, err = r.open(ctx, id, req); err == nil {
			err = f(x)
		}
	}
	if err != nil {
		return fmt.Errorf("%s %q in container %s: %w", req.Op, paths[0], id, err)
	}
	return nil
}

func done(x *call) error { return x.result(nil) }

// Stat tells what a file is.
func (r *Runtime) Stat(ctx context.Context, id, path string) (runtime.FileInfo, error) {
	var out runtime.FileInfo
	req := &wire.Request{Op: wire.OpStat, File: &wire.File{Path: []byte(path)}}
	err := r.file(ctx, id, req, []string{path}, func(x *call) (err error) {
		out, err = x.fileResult()
		return err
	})
	return out, err
}

// fileResult waits for a Result that is a FileInfo.
func (x *call) fileResult() (runtime.FileInfo, error) {
	kind, payload, err := x.next()
	if err != nil {
		return runtime.FileInfo{}, err
	}
	if kind != wire.KindResult {
		return runtime.FileInfo{}, x.unexpected("something else than a result")
	}
	return x.lastFile(payload)
}

func (x *call) lastFile(payload []byte) (runtime.FileInfo, error) {
	out, err := parseFile(payload)
	if err != nil {
		return runtime.FileInfo{}, x.unexpected(err.Error())
	}
	x.done()
	return out, nil
}

// ReadFile reads a regular file.
func (r *Runtime) ReadFile(ctx context.Context, id, path string, offset, length int64, open func(runtime.FileInfo) error, w io.Writer) error {
	req := &wire.Request{Op: wire.OpRead, File: &wire.File{Path: []byte(path), Offset: offset, Length: length}}
	if offset < 0 || length < -1 {
		return fmt.Errorf("%s %q in container %s: %w", req.Op, path, id, runtime.Invalid("an offset of %d and a length of %d: neither may be negative, but -1 is a length to the end", offset, length))
	}
	return r.file(ctx, id, req, []string{path}, func(x *call) error {
		kind, payload, err := x.next()
		if err != nil {
			return err
		}
		if kind != wire.KindItem {
			return x.unexpected("something else than what the file is")
		}
		info, err := parseFile(payload)
		if err != nil {
			return x.unexpected(err.Error())
		}
		if open != nil {
			if err := open(info); err != nil {
				x.drop()
				return err
			}
		}
		if length < 0 {
			length = math.MaxInt64
		}
		return x.output(w, length)
	})
}

// output copies Data until the Result, at most so many bytes of it.
func (x *call) output(w io.Writer, most int64) error {
	for {
		kind, payload, err := x.next()
		switch {
		case err != nil:
			return err
		case kind == wire.KindResult:
			return x.conclude(payload, nil)
		case kind == wire.KindEnd:
			continue
		case kind != wire.KindData:
			return x.unexpected("something else than data")
		case int64(len(payload)) > most:
			return x.unexpected("more data than was asked for")
		}
		most -= int64(len(payload))
		if _, err := w.Write(payload); err != nil {
			x.drop()
			return fmt.Errorf("deliver: %w", err)
		}
	}
}

// WriteFile writes a file.
func (r *Runtime) WriteFile(ctx context.Context, id string, f runtime.FileWrite, from io.Reader) (runtime.FileInfo, error) {
	var out runtime.FileInfo
	req := &wire.Request{Op: wire.OpWrite, File: &wire.File{
		Path: []byte(f.Path), Mode: unixMode(f.Mode), Parents: f.Mkdir, Append: f.Append, NoClash: f.NoClash,
	}}
	err := r.file(ctx, id, req, []string{f.Path}, func(x *call) error {
		payload, err := x.upload(from)
		if err != nil {
			return err
		}
		out, err = x.lastFile(payload)
		return err
	})
	return out, err
}

// upload sends all that a reader has, and waits for the Result, which may come before: a
// Failure does. The reader is read by this goroutine alone.
func (x *call) upload(from io.Reader) ([]byte, error) {
	type answer struct {
		kind    wire.Kind
		payload []byte
		err     error
	}
	answers := make(chan answer, 1)
	go func() {
		var a answer
		a.err = x.b.r.guard(func() (err error) { a.kind, a.payload, err = x.r.Next(); return err })
		if a.err != nil || a.kind != wire.KindResult {
			_ = x.nc.SetWriteDeadline(past) // nobody takes the rest
		}
		answers <- a
	}()
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	var failure error // of the reader
	x.spoiled = true  // unless all is sent
	for len(answers) == 0 {
		n, err := from.Read(buf[:])
		if n > 0 {
			if _, err := x.input(buf[:n]); err != nil {
				break
			}
		}
		if errors.Is(err, io.EOF) {
			x.spoiled = x.w.Send(wire.KindEnd) != nil
			break
		}
		if err != nil {
			failure = fmt.Errorf("read what is to be written: %w", err)
			_ = x.nc.SetDeadline(past)
			break
		}
	}
	a := <-answers
	switch {
	case failure != nil:
		x.drop()
		return nil, failure
	case a.err != nil:
		err := x.broken(a.err)
		x.drop()
		return nil, err
	case a.kind == wire.KindFailure:
		f, err := parseFailure(a.payload)
		if err != nil {
			return nil, x.unexpected(err.Error())
		}
		x.drop()
		return nil, failed(f)
	case a.kind != wire.KindResult:
		return nil, x.unexpected("something else than a result")
	}
	return a.payload, nil
}

// ListDir tells of what is in a directory.
func (r *Runtime) ListDir(ctx context.Context, id, path string, depth int, f func(runtime.FileInfo) error) error {
	req := &wire.Request{Op: wire.OpDir, File: &wire.File{Path: []byte(path), Depth: max(depth, 1)}}
	return r.file(ctx, id, req, []string{path}, func(x *call) error { return x.files(maxFiles, f) })
}

// files hands on Items of FileInfo.
func (x *call) files(most int, f func(runtime.FileInfo) error) error {
	return x.items(most, func(payload []byte) error {
		info, err := parseFile(payload)
		if err != nil {
			return err
		}
		return f(info)
	})
}

// Mkdir makes a directory.
func (r *Runtime) Mkdir(ctx context.Context, id, path string, mode fs.FileMode, parents bool) error {
	req := &wire.Request{Op: wire.OpMkdir, File: &wire.File{Path: []byte(path), Mode: unixMode(mode), Parents: parents}}
	return r.file(ctx, id, req, []string{path}, done)
}

// Move moves a file or a tree.
func (r *Runtime) Move(ctx context.Context, id, from, to string, replace bool) error {
	req := &wire.Request{Op: wire.OpMove, File: &wire.File{Path: []byte(from), To: []byte(to), Replace: replace}}
	return r.file(ctx, id, req, []string{from, to}, done)
}

// Copy copies a file or a tree.
func (r *Runtime) Copy(ctx context.Context, id, from, to string, replace bool) error {
	req := &wire.Request{Op: wire.OpCopy, File: &wire.File{Path: []byte(from), To: []byte(to), Replace: replace}}
	return r.file(ctx, id, req, []string{from, to}, done)
}

// RemoveFile removes a file or a tree.
func (r *Runtime) RemoveFile(ctx context.Context, id, path string, recursive bool) error {
	req := &wire.Request{Op: wire.OpRemove, File: &wire.File{Path: []byte(path), Recursive: recursive}}
	return r.file(ctx, id, req, []string{path}, done)
}

// Glob finds paths by a pattern.
func (r *Runtime) Glob(ctx context.Context, id, path, pattern string, limit int, f func(runtime.FileInfo) error) error {
	req := &wire.Request{Op: wire.OpGlob, File: &wire.File{Path: []byte(path), Pattern: pattern, Limit: limit}}
	if limit < 1 || limit > maxFiles || len(pattern) > maxPath {
		return fmt.Errorf("%s %q in container %s: %w", req.Op, path, id, runtime.Invalid("a pattern of %d bytes and a limit of %d: up to %d and 1 to %d are taken", len(pattern), limit, maxPath, maxFiles))
	}
	return r.file(ctx, id, req, []string{path}, func(x *call) error { return x.files(limit, f) })
}

// Search finds lines in files.
func (r *Runtime) Search(ctx context.Context, id string, s runtime.FileSearch, f func(runtime.FileMatch) error) error {
	limit := s.Limit
	if limit == 0 {
		limit = usualFound
	}
	req := &wire.Request{Op: wire.OpSearch, File: &wire.File{
		Path: []byte(s.Path), Pattern: s.Pattern, Literal: s.Literal, IgnoreCase: s.IgnoreCase, Include: s.Include, Limit: limit,
	}}
	if limit < 1 || limit > maxMatches || len(s.Pattern) > maxPattern || len(s.Include) > maxPath {
		return fmt.Errorf("%s %q in container %s: %w", req.Op, s.Path, id, runtime.Invalid("a pattern of %d bytes and a limit of %d: up to %d and %d are taken", len(s.Pattern), s.Limit, maxPattern, maxMatches))
	}
	return r.file(ctx, id, req, []string{s.Path}, func(x *call) error {
		return x.items(limit, func(payload []byte) error {
			m, err := parseMatch(payload)
			if err != nil {
				return err
			}
			return f(m)
		})
	})
}

// parseMatch decodes a line that was found.
func parseMatch(payload []byte) (runtime.FileMatch, error) {
	var m wire.FileMatch
	if err := wire.Decode(payload, &m); err != nil {
		return runtime.FileMatch{}, err
	}
	if !validPath(m.Path) || m.Line < 1 || !bounded(int64(m.Line)) || len(m.Text) > maxLine {
		return runtime.FileMatch{}, fmt.Errorf("%w: a line that was found", wire.ErrProtocol)
	}
	return runtime.FileMatch{Path: string(m.Path), Line: m.Line, Text: string(m.Text)}, nil
}

// ReadTar packs a file or a tree.
func (r *Runtime) ReadTar(ctx context.Context, id, path string, w io.Writer) error {
	req := &wire.Request{Op: wire.OpTarRead, File: &wire.File{Path: []byte(path)}}
	return r.file(ctx, id, req, []string{path}, func(x *call) error { return x.output(w, math.MaxInt64) })
}

// WriteTar unpacks an archive into a directory.
func (r *Runtime) WriteTar(ctx context.Context, id, path string, from io.Reader) error {
	req := &wire.Request{Op: wire.OpTarWrit, File: &wire.File{Path: []byte(path)}}
	return r.file(ctx, id, req, []string{path}, func(x *call) error {
		payload, err := x.upload(from)
		if err != nil {
			return err
		}
		return x.conclude(payload, nil)
	})
}

// eventTypes are those of FileEvent.
var eventTypes = map[string]bool{"create": true, "modify": true, "remove": true, "rename": true, "attrib": true, "overflow": true}

// WatchFiles tells of changes below a directory until ctx ends.
func (r *Runtime) WatchFiles(ctx context.Context, id, path string, recursive bool, ready func(), f func(runtime.FileEvent) error) error {
	req := &wire.Request{Op: wire.OpWatch, File: &wire.File{Path: []byte(path), Recursive: recursive}}
	err := r.file(ctx, id, req, []string{path}, func(x *call) error {
		return x.items(math.MaxInt, func(payload []byte) error {
			var e wire.FileEvent
			if err := wire.Decode(payload, &e); err != nil {
				return err
			}
			if e.Type == "ready" {
				if ready != nil {
					ready()
					ready = nil
				}
				return nil
			}
			if !eventTypes[e.Type] || !validPath(e.Path) && (e.Type != "overflow" || len(e.Path) > 0) {
				return fmt.Errorf("%w: a change of a file", wire.ErrProtocol)
			}
			return f(runtime.FileEvent{Type: e.Type, Path: string(e.Path), Dir: e.Dir})
		})
	})
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return nil
	}
	return err
}
