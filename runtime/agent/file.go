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

// Bounds of answers.
const (
	maxFiles = 1 << 20 // files of one list
	maxLine  = 4 << 10
)

// fileOps maps verbs to the operations of the protocol.
var fileOps = map[runtime.FileVerb]wire.Op{
	runtime.FileStat: wire.OpStat, runtime.FileRead: wire.OpRead, runtime.FileWrite: wire.OpWrite, runtime.FileList: wire.OpDir,
	runtime.FileMkdir: wire.OpMkdir, runtime.FileMove: wire.OpMove, runtime.FileCopy: wire.OpCopy, runtime.FileRemove: wire.OpRemove,
	runtime.FileGlob: wire.OpGlob, runtime.FileSearch: wire.OpSearch, runtime.FileWatch: wire.OpWatch,
	runtime.FileTarRead: wire.OpTarRead, runtime.FileTarWrite: wire.OpTarWrit,
}

// File does an operation on the files of a container.
func (r *Runtime) File(ctx context.Context, id string, op runtime.FileOp, fio runtime.FileIO) error {
	err := op.Check()
	if err == nil {
		var x *call
		if x, err = r.open(ctx, id, fileRequest(op)); err == nil {
			err = x.file(op, fio)
		}
	}
	switch {
	case err == nil:
		return nil
	case op.Verb == runtime.FileWatch && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)):
		return nil
	}
	return fmt.Errorf("%s %.200q in container %s: %w", op.Verb, op.Path, id, err)
}

func fileRequest(op runtime.FileOp) *wire.Request {
	return &wire.Request{Op: fileOps[op.Verb], File: &wire.File{
		Path: []byte(op.Path), To: []byte(op.To), Offset: op.Offset, Length: op.Length,
		Mode: uint32(op.Mode.Perm()), Parents: op.Parents, Append: op.Append, NoClash: op.NoClash,
		Replace: op.Replace, Recursive: op.Recursive, Depth: op.Depth, Limit: op.Limit,
		Pattern: op.Pattern, Literal: op.Literal, IgnoreCase: op.IgnoreCase, Include: op.Include,
	}}
}

// answer holds the answers that an operation allows, and delivers them.
type answer struct {
	items  int                // at most
	item   func([]byte) error // delivers one
	result bool               // the Result is an item, too
	data   int64              // bytes at most
	head   bool               // an Item comes before all else
}

// answerTo returns the answers that an operation allows. They deliver everything but data.
func answerTo(op runtime.FileOp, fio runtime.FileIO) answer {
	info := deliver(parseFile, fio.Info)
	switch op.Verb {
	case runtime.FileStat, runtime.FileWrite:
		return answer{result: true, item: info}
	case runtime.FileRead:
		most := op.Length
		if most < 0 {
			most = math.MaxInt64
		}
		return answer{head: true, items: 1, item: info, data: most}
	case runtime.FileTarRead:
		return answer{data: math.MaxInt64}
	case runtime.FileList:
		return answer{items: maxFiles, item: info}
	case runtime.FileGlob:
		return answer{items: op.Limit, item: info}
	case runtime.FileSearch:
		return answer{items: op.Limit, item: deliver(parseMatch, fio.Match)}
	case runtime.FileWatch:
		ready := false
		return answer{items: math.MaxInt, item: deliver(parseEvent, func(e runtime.FileEvent) error {
			if e.Type == runtime.FileReady && ready {
				return nil
			}
			ready = ready || e.Type == runtime.FileReady
			return fio.Event(e)
		})}
	}
	return answer{}
}

// deliver returns a function that parses an item, and calls to with it, unless to is nil.
func deliver[T any](parse func([]byte) (T, error), to func(T) error) func([]byte) error {
	return func(payload []byte) error {
		v, err := parse(payload)
		if err != nil || to == nil {
			return err
		}
		return to(v)
	}
}

// file does the input and output of an operation that has begun.
func (x *call) file(op runtime.FileOp, fio runtime.FileIO) error {
	a := answerTo(op, fio)
	if op.Verb != runtime.FileWrite && op.Verb != runtime.FileTarWrite {
		return x.receive(a, fio.Out)
	}
	payload, err := x.upload(fio.In)
	if err != nil {
		return err
	}
	return x.last(a, payload)
}

// receive delivers all answers until the Result. An error of a receiver ends the operation.
func (x *call) receive(a answer, out io.Writer) error {
	for n := 0; ; {
		kind, payload, err := x.next()
		due := n == 0 && a.head
		switch {
		case err != nil:
			return err
		case kind == wire.KindResult && !due:
			return x.last(a, payload)
		case kind == wire.KindItem && n < a.items:
			n++
			err = a.item(payload)
		case kind == wire.KindData && !due && len(payload) > 0 && int64(len(payload)) <= a.data:
			a.data -= int64(len(payload))
			if _, err = out.Write(payload); err != nil {
				err = fmt.Errorf("deliver: %w", err)
			}
		default:
			return x.unexpected(fmt.Sprintf("a frame of kind %d with %d bytes, after %d items", kind, len(payload), n))
		}
		if err != nil {
			return x.end(err)
		}
	}
}

// last delivers the Result.
func (x *call) last(a answer, payload []byte) error {
	if a.result {
		return x.end(a.item(payload))
	}
	return x.end(nil)
}

// end ends a call with the error of a receiver. Without one, the Result was read.
func (x *call) end(err error) error {
	switch {
	case errors.Is(err, wire.ErrProtocol):
		return x.unexpected(err.Error())
	case err != nil:
		x.drop()
	default:
		x.done(false)
	}
	return err
}

// validPath reports whether a container may name a file like this.
func validPath(p []byte) bool {
	return len(p) > 0 && p[0] == '/' && len(p) <= runtime.MaxPath && bytes.IndexByte(p, 0) < 0
}

// parseFile decodes a FileInfo.
func parseFile(payload []byte) (runtime.FileInfo, error) {
	var f wire.FileInfo
	if err := wire.Decode(payload, &f); err != nil {
		return runtime.FileInfo{}, err
	}
	if !validPath(f.Path) || f.Size < 0 || f.UID < 0 || f.UID > math.MaxUint32 || f.GID < 0 || f.GID > math.MaxUint32 || len(f.Target) > runtime.MaxPath {
		return runtime.FileInfo{}, fmt.Errorf("%w: what a file is", wire.ErrProtocol)
	}
	return runtime.FileInfo{
		Path: string(f.Path), Size: min(f.Size, wire.MaxNumber), Mode: fileMode(f.Mode), ModTime: time.Unix(0, f.ModTime).UTC(),
		UID: f.UID, GID: f.GID, Target: string(f.Target),
	}, nil
}

// fileTypes maps the types in st_mode.
var fileTypes = map[uint32]fs.FileMode{
	unix.S_IFREG: 0, unix.S_IFDIR: fs.ModeDir, unix.S_IFLNK: fs.ModeSymlink, unix.S_IFIFO: fs.ModeNamedPipe, unix.S_IFSOCK: fs.ModeSocket,
	unix.S_IFCHR: fs.ModeDevice | fs.ModeCharDevice, unix.S_IFBLK: fs.ModeDevice,
}

// fileMode converts st_mode to Go's mode.
func fileMode(m uint32) fs.FileMode {
	kind, ok := fileTypes[m&unix.S_IFMT]
	if !ok {
		kind = fs.ModeIrregular
	}
	out := fs.FileMode(m&0o777) | kind
	for bit, mode := range map[uint32]fs.FileMode{unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky} {
		if m&bit != 0 {
			out |= mode
		}
	}
	return out
}

// upload sends the reader's content, and waits for the Result. A Failure may come earlier. Only
// the calling goroutine reads from the reader.
func (x *call) upload(from io.Reader) ([]byte, error) {
	type end struct {
		payload []byte
		err     error
	}
	answers := make(chan end, 1)
	go func() {
		var a end
		a.err = x.b.r.guard(func() (err error) { a.payload, err = x.expect(wire.KindResult); return err })
		if a.err != nil {
			x.drop() // nobody takes the rest
		}
		answers <- a
	}()
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	for len(answers) == 0 {
		n, err := from.Read(buf[:])
		if n > 0 {
			if err := x.w.Send(wire.KindData, buf[:n]); err != nil {
				break
			}
		}
		if errors.Is(err, io.EOF) {
			_ = x.w.Send(wire.KindEnd, nil) // the Result tells whether it has arrived
			break
		}
		if err != nil {
			x.drop()
			return nil, fmt.Errorf("read what is to be written: %w", err)
		}
	}
	a := <-answers
	return a.payload, a.err
}

// parseMatch decodes a line that a search found.
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

// eventTypes are the types of a FileEvent.
var eventTypes = map[string]bool{
	runtime.FileReady: true, "create": true, "modify": true, "remove": true, "rename": true, "attrib": true, "overflow": true,
}

// parseEvent decodes a change. A change of a file must have a path.
func parseEvent(payload []byte) (runtime.FileEvent, error) {
	var e wire.FileEvent
	if err := wire.Decode(payload, &e); err != nil {
		return runtime.FileEvent{}, err
	}
	pathless := len(e.Path) == 0 && (e.Type == runtime.FileReady || e.Type == "overflow")
	if !eventTypes[e.Type] || !validPath(e.Path) && !pathless {
		return runtime.FileEvent{}, fmt.Errorf("%w: a change of a file", wire.ErrProtocol)
	}
	return runtime.FileEvent{Type: e.Type, Path: string(e.Path), Dir: e.Dir}, nil
}
