package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// File does one operation. The sandbox resolves paths and links, and may give false answers.
//
// Errors: *InvalidError, *FileError, *QuotaError if op adds to the files, *StateError,
// *CapacityError, *UnsupportedError, *UnavailableError, and unchanged those of fio's members.
func (a *Access) File(ctx context.Context, op runtime.FileOp, fio runtime.FileIO) error {
	if wrong, ok := errors.AsType[*runtime.FileOpError](op.Check()); ok {
		return &InvalidError{Field: wrong.Field, Message: wrong.Message}
	}
	_, leave, err := a.registry.acquire(a.rec, useFiles)
	if err != nil {
		return err
	}
	defer leave()
	var k kept
	k.keep(&fio)
	err = a.registry.engine.call(ctx, "file_"+string(op.Verb), func(ctx context.Context) error {
		if op.Adds() {
			done, err := a.makeRoom(ctx, &k, &fio)
			if err != nil {
				return err
			}
			defer done()
		}
		return a.registry.opts.Runtime.File(ctx, a.sb.ContainerID, op, fio)
	})
	switch own := k.first(); {
	case err == nil:
		return nil
	case own != nil:
		return own
	case ctx.Err() != nil:
		return fmt.Errorf("files of sandbox %s: %w", a.sb.Key, context.Cause(ctx))
	}
	if op.To != "" && errdefs.IsAlreadyExists(err) { // the error is about To
		return a.fileFailed(ctx, op.To, err)
	}
	return a.fileFailed(ctx, op.Path, err)
}

// makeRoom fails while the workspace is over its quota. It limits the input of fio to the room
// that is left. The caller calls done when the operation has ended.
func (a *Access) makeRoom(ctx context.Context, k *kept, fio *runtime.FileIO) (done func(), err error) {
	quotas, own := a.registry.quotas, subject(a.sb)
	chat := Subject{Tenant: own.Tenant, Key: own.Key, SessionID: own.SessionID} // without the sandbox's own quota
	used, err := quotas.Used(ctx, own)
	if err == nil {
		err = quotas.Left(ctx, chat, false)
	}
	if err != nil {
		return nil, k.note(err)
	}
	if fio.In != nil {
		fio.In = &inflow{r: fio.In, k: k, used: used, quota: own.QuotaBytes, left: func() error { return quotas.Left(ctx, chat, true) }, due: leftEvery}
	}
	return func() { _ = quotas.Left(context.WithoutCancel(ctx), chat, true) }, nil // the next operation sees what this one wrote
}

// fileFailed translates an error of the runtime for callers. It doesn't pass on the error's text,
// which the sandbox or the engine may have written.
func (a *Access) fileFailed(ctx context.Context, name string, err error) error {
	switch {
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
	}
	switch other := a.registry.explain(ctx, a.rec, a.sb, "files", "it died before this was done; try again", err); {
	case other != nil:
		return other
	case errors.Is(err, runtime.ErrInterrupted):
		return &UnavailableError{Err: fmt.Errorf("files of sandbox %s: %w", a.sb.Key, err)}
	case errdefs.IsNotFound(err):
		return &FileError{Path: name, Class: errdefs.ErrNotFound, Message: "there is no such file"}
	}
	return &FileError{Path: name, Class: errdefs.ErrFailedPrecondition, Message: "the sandbox can't do this with what is there: it may be of another kind, or not empty"}
}

// FileError says why a call can't use a file.
type FileError struct {
	Path    string // bytes as the caller gave them
	Class   error  // errdefs.ErrNotFound, ErrAlreadyExists, ErrPermissionDenied, ErrFailedPrecondition or ErrResourceExhausted
	Message string
}

// Error returns the path and the reason.
func (e *FileError) Error() string { return fmt.Sprintf("%q: %s", e.Path, e.Message) }

// Unwrap returns the class.
func (e *FileError) Unwrap() error { return e.Class }

// kept holds the first error of the caller's side of a call.
type kept struct{ err atomic.Pointer[error] }

func (k *kept) note(err error) error {
	if err != nil {
		k.err.CompareAndSwap(nil, &err)
	}
	return err
}

func (k *kept) first() error {
	if err := k.err.Load(); err != nil {
		return *err
	}
	return nil
}

// keep makes k note the errors of all fio's members but In. inflow notes those of In.
func (k *kept) keep(fio *runtime.FileIO) {
	fio.Info, fio.Match, fio.Event = keeping(k, fio.Info), keeping(k, fio.Match), keeping(k, fio.Event)
	if fio.Out != nil {
		fio.Out = &outflow{fio.Out, k}
	}
}

// keeping returns f, but notes its errors. It returns nil for a nil f.
func keeping[T any](k *kept, f func(T) error) func(T) error {
	if f == nil {
		return nil
	}
	return func(v T) error { return k.note(f(v)) }
}

// outflow passes data to the caller, and notes errors of the caller's writer.
type outflow struct {
	w io.Writer
	k *kept
}

func (o *outflow) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	return n, o.k.note(err)
}

// inflow passes data from the caller, as long as the quotas have room for it.
type inflow struct {
	r           io.Reader
	k           *kept
	used, quota int64        // of the sandbox's own quota; 0 without one
	left        func() error // Quotas.Left of the chat
	due         int64        // bytes until the next call of left
}

// leftEvery is how many bytes are written between two measurements of a chat's workspace. The
// workspace may exceed its quota by that much.
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
	if err != nil && !errors.Is(err, io.EOF) { // io.ErrUnexpectedEOF counts as an error
		return n, i.k.note(err)
	}
	return n, err
}
