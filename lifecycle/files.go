package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"strings"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// Bounds of files calls.
const (
	maxPath    = 4096 // bytes
	maxPattern = 4096 // bytes
	maxDepth   = 100  // of directories in a list
	maxFound   = 10_000
)

// FileAccess is the way to the files of one sandbox, as the user of the sandbox sees
// them. It is safe for many goroutines. Each call keeps the sandbox from idling out
// while it lasts.
//
// Paths are absolute in the sandbox, at most 4,096 bytes, and resolved there; what a
// link leads to is up to the sandbox. What its methods answer was said by the sandbox.
//
// Errors: *InvalidError, *FileError, *QuotaError (of what adds to the files),
// *StateError, *CapacityError, *UnsupportedError, *UnavailableError, and those of the
// caller's own readers, writers and functions as they are.
type FileAccess struct {
	m    *Registry
	rec  *record
	sb   Sandbox
	into runtime.Files
}

// Files finds the sandbox whose files are to be used; *NotFoundError if there is
// none. One that has stopped is made again as for a command, but whatever its quota, so
// that files can be removed to be below it again.
func (r *Registry) Files(ctx context.Context, tenant, key string) (*FileAccess, error) {
	id, err := r.open(tenant, key)
	if err != nil {
		return nil, err
	}
	into, ok := r.opts.Runtime.(runtime.Files)
	if !ok {
		return nil, &UnsupportedError{Key: id.key}
	}
	rec, _, err := r.awake(ctx, id)
	if err != nil {
		return nil, err
	}
	return &FileAccess{m: r, rec: rec, sb: r.snapshot(rec), into: into}, nil
}

// SessionID is the sandbox's; a later call of Files may find another.
func (a *FileAccess) SessionID() string { return a.sb.SessionID }

// Stat tells what a file is, of a link what its target is.
func (a *FileAccess) Stat(ctx context.Context, name string) (info runtime.FileInfo, err error) {
	err = a.do(ctx, "file_stat", name, func(ctx context.Context, _ *kept) error {
		info, err = a.into.Stat(ctx, a.sb.ContainerID, name)
		return err
	})
	return info, err
}

// Read copies a regular file, from an offset on; length -1 is to its end. Open, when
// not nil, is called first with what the file is; its error ends the call.
func (a *FileAccess) Read(ctx context.Context, name string, offset, length int64, open func(runtime.FileInfo) error, w io.Writer) error {
	if offset < 0 || length < -1 {
		return &InvalidError{Field: "range", Message: "must not be negative"}
	}
	return a.do(ctx, "file_read", name, func(ctx context.Context, k *kept) error {
		return a.into.ReadFile(ctx, a.sb.ContainerID, name, offset, length, keeping(k, open), k.writer(w))
	})
}

// Write writes a file, whole or not at all, or appends to it. If r fails, so does the
// call, and the file is as it was, or with Append as long as it got.
func (a *FileAccess) Write(ctx context.Context, f runtime.FileWrite, r io.Reader) (info runtime.FileInfo, err error) {
	if err := checkMode(f.Mode); err != nil {
		return info, err
	}
	if f.Append && f.NoClash {
		return info, &InvalidError{Field: "append", Message: "can't go together with a file that mustn't be there"}
	}
	err = a.add(ctx, "file_write", f.Path, r, func(ctx context.Context, r io.Reader) error {
		info, err = a.into.WriteFile(ctx, a.sb.ContainerID, f, r)
		return err
	})
	return info, err
}

// List gives what is in a directory and, with a depth over 1, in those below it. An
// error of f ends it.
func (a *FileAccess) List(ctx context.Context, name string, depth int, f func(runtime.FileInfo) error) error {
	if depth < 1 || depth > maxDepth {
		return &InvalidError{Field: "depth", Message: fmt.Sprintf("must be from 1 to %d", maxDepth)}
	}
	return a.do(ctx, "file_list", name, func(ctx context.Context, k *kept) error {
		return a.into.ListDir(ctx, a.sb.ContainerID, name, depth, keeping(k, f))
	})
}

// Mkdir makes a directory; with parents also those above it, and then it may be there.
func (a *FileAccess) Mkdir(ctx context.Context, name string, mode fs.FileMode, parents bool) error {
	if err := checkMode(mode); err != nil {
		return err
	}
	return a.add(ctx, "file_mkdir", name, nil, func(ctx context.Context, _ io.Reader) error {
		return a.into.Mkdir(ctx, a.sb.ContainerID, name, mode, parents)
	})
}

// Move renames. With replace, what is at to makes way, but for a directory that isn't
// empty.
func (a *FileAccess) Move(ctx context.Context, from, to string, replace bool) error {
	if err := checkPath("to", to); err != nil {
		return err
	}
	return aboutTo(to, a.do(ctx, "file_move", from, func(ctx context.Context, _ *kept) error {
		return a.into.Move(ctx, a.sb.ContainerID, from, to, replace)
	}))
}

// aboutTo has an error name the file that is in the way.
func aboutTo(to string, err error) error {
	var file *FileError
	if errors.As(err, &file) && errdefs.IsAlreadyExists(file) {
		file.Path = to
	}
	return err
}

// Copy copies a file or a whole tree, replacing as Move does.
func (a *FileAccess) Copy(ctx context.Context, from, to string, replace bool) error {
	if err := checkPath("to", to); err != nil {
		return err
	}
	return aboutTo(to, a.add(ctx, "file_copy", from, nil, func(ctx context.Context, _ io.Reader) error {
		return a.into.Copy(ctx, a.sb.ContainerID, from, to, replace)
	}))
}

// Remove removes a file or a directory; one that isn't empty only if recursive.
func (a *FileAccess) Remove(ctx context.Context, name string, recursive bool) error {
	return a.do(ctx, "file_remove", name, func(ctx context.Context, _ *kept) error {
		return a.into.RemoveFile(ctx, a.sb.ContainerID, name, recursive)
	})
}

// Glob gives the paths below a directory that match a pattern, at most limit (1 to
// 10,000) of them. In the pattern, ** stands for any number of directories, and the
// rest is as path.Match has it.
func (a *FileAccess) Glob(ctx context.Context, name, pattern string, limit int, f func(runtime.FileInfo) error) error {
	switch _, err := path.Match(pattern, ""); {
	case pattern == "" || len(pattern) > maxPattern || strings.ContainsRune(pattern, 0) || err != nil:
		return &InvalidError{Field: "pattern", Message: "must be a pattern of *, ?, [a-z] and **, at most 4096 bytes"}
	case limit < 1 || limit > maxFound:
		return &InvalidError{Field: "limit", Message: fmt.Sprintf("must be from 1 to %d", maxFound)}
	}
	return a.do(ctx, "file_glob", name, func(ctx context.Context, k *kept) error {
		return a.into.Glob(ctx, a.sb.ContainerID, name, pattern, limit, keeping(k, f))
	})
}

// Search gives the lines below a path that match a pattern.
func (a *FileAccess) Search(ctx context.Context, s runtime.FileSearch, f func(runtime.FileMatch) error) error {
	if s.Pattern == "" || len(s.Pattern) > maxPattern {
		return &InvalidError{Field: "pattern", Message: "must have 1 to 4096 bytes"}
	}
	if !s.Literal {
		if _, err := regexp.Compile(s.Pattern); err != nil {
			return &InvalidError{Field: "pattern", Message: "must be in the syntax of Go's regexp, unless literal"}
		}
	}
	if _, err := path.Match(s.Include, ""); err != nil || len(s.Include) > maxPattern {
		return &InvalidError{Field: "include", Message: "must be a pattern of *, ? and [a-z], at most 4096 bytes"}
	}
	if s.Limit < 0 || s.Limit > maxFound {
		return &InvalidError{Field: "limit", Message: fmt.Sprintf("must be from 1 to %d", maxFound)}
	}
	return a.do(ctx, "file_search", s.Path, func(ctx context.Context, k *kept) error {
		return a.into.Search(ctx, a.sb.ContainerID, s, keeping(k, f))
	})
}

// ReadTar packs a file or a tree, under its base name.
func (a *FileAccess) ReadTar(ctx context.Context, name string, w io.Writer) error {
	return a.do(ctx, "file_tar_read", name, func(ctx context.Context, k *kept) error {
		return a.into.ReadTar(ctx, a.sb.ContainerID, name, k.writer(w))
	})
}

// WriteTar unpacks into a directory. If it fails, what was unpacked by then stays.
func (a *FileAccess) WriteTar(ctx context.Context, name string, r io.Reader) error {
	return a.add(ctx, "file_tar_write", name, r, func(ctx context.Context, r io.Reader) error {
		return a.into.WriteTar(ctx, a.sb.ContainerID, name, r)
	})
}

// Watch tells of changes below a directory until ctx ends, which is no error. Ready,
// when not nil, is called once when changes from then on are sure to be seen.
func (a *FileAccess) Watch(ctx context.Context, name string, recursive bool, ready func(), f func(runtime.FileEvent) error) error {
	return a.do(ctx, "file_watch", name, func(ctx context.Context, k *kept) error {
		return a.into.WatchFiles(ctx, a.sb.ContainerID, name, recursive, ready, keeping(k, f))
	})
}

// add does what adds to the files: not while the workspace is over its quota, and r,
// when not nil, may bring no more bytes than there is room for.
func (a *FileAccess) add(ctx context.Context, op, name string, r io.Reader, f func(context.Context, io.Reader) error) error {
	return a.do(ctx, op, name, func(ctx context.Context, k *kept) error {
		used, quota, err := a.m.quotas.workspaceUse(ctx, a.sb)
		if err == nil {
			err = a.m.quotas.chatLeft(ctx, a.sb, false)
		}
		if err != nil {
			return k.note(err)
		}
		// However it ends, what comes next is to know how much there is now.
		defer func() { _ = a.m.quotas.chatLeft(context.WithoutCancel(ctx), a.sb, true) }()
		if r != nil {
			r = &inflow{r: r, k: k, used: used, quota: quota, left: func() error { return a.m.quotas.chatLeft(ctx, a.sb, true) }, due: leftEvery}
		}
		return f(ctx, r)
	})
}

// do does one call, and says what its error means to callers.
func (a *FileAccess) do(ctx context.Context, op, name string, f func(context.Context, *kept) error) error {
	if err := checkPath("path", name); err != nil {
		return err
	}
	access, err := a.m.acquire(a.rec, useFiles)
	if err != nil {
		return err
	}
	defer access.Close()
	var k kept
	err = a.m.engine.call(ctx, op, func(ctx context.Context) error { return f(ctx, &k) })
	switch own := k.first(); {
	case err == nil:
		return nil
	case own != nil:
		return own
	case ctx.Err() != nil:
		return fmt.Errorf("files of sandbox %s: %w", a.sb.Key, context.Cause(ctx))
	}
	return a.failed(ctx, name, err)
}

// failed says what an error of the runtime's means. Its own words may be the
// sandbox's, or the engine's, and aren't passed on.
func (a *FileAccess) failed(ctx context.Context, name string, err error) error {
	switch {
	case errdefs.IsNotImplemented(err):
		return &UnsupportedError{Key: a.sb.Key, Err: err}
	case errdefs.IsUnavailable(err):
		return &UnavailableError{Err: fmt.Errorf("files of sandbox %s: %w", a.sb.Key, err)}
	case errdefs.IsInvalidArgument(err):
		return &InvalidError{Field: "path", Message: fmt.Sprintf("%q isn't of the kind that this call needs, or what came with it can't be used", name)}
	case errdefs.IsOutOfRange(err):
		return &FileError{Path: name, Class: errdefs.ErrFailedPrecondition, Message: "it is shorter than that"}
	case errdefs.IsAlreadyExists(err):
		return &FileError{Path: name, Class: errdefs.ErrAlreadyExists, Message: "it is there already"}
	case errdefs.IsPermissionDenied(err):
		return &FileError{Path: name, Class: errdefs.ErrPermissionDenied, Message: "the sandbox's user may not do this"}
	case errdefs.IsResourceExhausted(err):
		return &FileError{Path: name, Class: errdefs.ErrResourceExhausted, Message: "the sandbox has no room for it"}
	case !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) && !errdefs.IsInternal(err):
		return fmt.Errorf("files of sandbox %s: %w", a.sb.Key, err)
	}
	// The file, or the container?
	switch dead := a.m.checkAlive(ctx, a.rec, a.sb, "it died before this was done; try again"); {
	case dead != nil:
		return dead
	case errors.Is(err, runtime.ErrInterrupted):
		return &UnavailableError{Err: fmt.Errorf("files of sandbox %s: %w", a.sb.Key, err)}
	case errdefs.IsNotFound(err):
		return &FileError{Path: name, Class: errdefs.ErrNotFound, Message: "there is no such file"}
	}
	return &FileError{Path: name, Class: errdefs.ErrFailedPrecondition, Message: "the sandbox can't do this with what is there: it may be of another kind, or not empty"}
}

// FileError says what keeps a call from using a file.
type FileError struct {
	Path    string // bytes as the caller gave them
	Class   error  // errdefs.ErrNotFound, ErrAlreadyExists, ErrPermissionDenied, ErrFailedPrecondition or ErrResourceExhausted
	Message string
}

// Error gives the path and what is the matter with it.
func (e *FileError) Error() string { return fmt.Sprintf("%q: %s", e.Path, e.Message) }

// Unwrap gives the class.
func (e *FileError) Unwrap() error { return e.Class }

func checkPath(field, name string) error {
	if !strings.HasPrefix(name, "/") || len(name) > maxPath || strings.ContainsRune(name, 0) {
		return &InvalidError{Field: field, Message: fmt.Sprintf("must be absolute, at most %d bytes, without NUL", maxPath)}
	}
	return nil
}

func checkMode(mode fs.FileMode) error {
	if mode&^fs.ModePerm != 0 {
		return &InvalidError{Field: "mode", Message: "must be permissions, from 0000 to 0777"}
	}
	return nil
}

// kept is the first error that came from the caller's side of a call.
type kept struct {
	mu  sync.Mutex
	err error
}

func (k *kept) note(err error) error {
	if err != nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.err == nil {
			k.err = err
		}
	}
	return err
}

func (k *kept) first() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// keeping notes the errors of f, which may be nil.
func keeping[T any](k *kept, f func(T) error) func(T) error {
	if f == nil {
		return nil
	}
	return func(v T) error { return k.note(f(v)) }
}

type outflow struct {
	k *kept
	w io.Writer
}

func (k *kept) writer(w io.Writer) io.Writer { return outflow{k, w} }

func (o outflow) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	return n, o.k.note(err)
}

// inflow is what a caller sends, as far as there is room for it.
type inflow struct {
	r           io.Reader
	k           *kept
	used, quota int64        // no quota is 0
	left        func() error // chatLeft
	due         int64        // bytes until it is asked
}

// leftEvery is how many bytes, with which a chat's workspace may come to be over its
// quota, are written between two measurements.
const leftEvery = 16 << 20

func (i *inflow) Read(b []byte) (int, error) {
	n, err := i.r.Read(b)
	i.used += int64(n)
	if i.quota > 0 && i.used > i.quota {
		return 0, i.k.note(&QuotaError{UsedBytes: i.used, QuotaBytes: i.quota})
	}
	if i.due -= int64(n); i.due <= 0 {
		i.due = leftEvery
		if lerr := i.left(); lerr != nil {
			return 0, i.k.note(lerr)
		}
	}
	if err != nil && !errors.Is(err, io.EOF) { // io.ErrUnexpectedEOF is none
		return n, i.k.note(err)
	}
	return n, err
}
