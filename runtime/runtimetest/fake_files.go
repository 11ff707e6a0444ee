package runtimetest

import (
	"context"
	"fmt"
	"io"
	"math"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// files does something with the tree of a container, with f.mu held.
func (f *Fake) files(ctx context.Context, verb runtime.FileVerb, id string, do func(*fakeContainer, *fakeFile) error) error {
	name := "file_" + string(verb)
	c, err := f.inside(ctx, name, id)
	if err != nil {
		return err
	}
	if c.tree == nil {
		c.tree = newTree(c.spec)
	}
	err = do(c, c.tree)
	f.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s in %s: %w", name, id, err)
	}
	return f.after(name, id)
}

// File implements runtime.Files. Nothing is forbidden in a Fake, and mounts are empty
// directories of its own.
func (f *Fake) File(ctx context.Context, id string, op runtime.FileOp, fio runtime.FileIO) error {
	if err := op.Check(); err != nil {
		return err
	}
	switch op.Verb {
	case runtime.FileWrite:
		return f.writeFile(ctx, id, op, fio)
	case runtime.FileTarRead:
		return f.readTar(ctx, id, op.Path, fio.Out)
	case runtime.FileTarWrite:
		return f.writeTar(ctx, id, op.Path, fio.In)
	case runtime.FileWatch:
		return f.watchFiles(ctx, id, op, fio.Event)
	}
	var deliver func() error
	err := f.files(ctx, op.Verb, id, func(c *fakeContainer, root *fakeFile) (err error) {
		deliver, err = c.file(root, op, fio)
		return err
	})
	if err == nil && deliver != nil {
		err = deliver()
	}
	return err
}

// file does an operation, and returns what delivers its answer.
func (c *fakeContainer) file(root *fakeFile, op runtime.FileOp, fio runtime.FileIO) (deliver func() error, err error) {
	switch op.Verb {
	case runtime.FileStat:
		at, err := root.there(op.Path, true)
		if err != nil {
			return nil, err
		}
		info := at.file.info(path.Clean(op.Path), c.spec)
		info.Target = ""
		return func() error { return deliverInfo(fio, info) }, nil
	case runtime.FileRead:
		return c.readFile(root, op, fio)
	case runtime.FileList, runtime.FileGlob:
		found, err := c.find(root, op)
		return func() error { return each(found, fio.Info) }, err
	case runtime.FileSearch:
		found, err := search(root, op)
		return func() error { return each(found, fio.Match) }, err
	case runtime.FileMkdir:
		return nil, c.mkdir(root, op)
	case runtime.FileMove, runtime.FileCopy:
		return nil, c.relocate(root, op)
	case runtime.FileRemove:
		return nil, c.removeFile(root, op)
	}
	return nil, runtime.Invalid("the verb %q", op.Verb)
}

func each[T any](all []T, f func(T) error) error {
	for _, v := range all {
		if err := f(v); err != nil {
			return err
		}
	}
	return nil
}

func deliverInfo(fio runtime.FileIO, info runtime.FileInfo) error {
	if fio.Info == nil {
		return nil
	}
	return fio.Info(info)
}

func (c *fakeContainer) readFile(root *fakeFile, op runtime.FileOp, fio runtime.FileIO) (deliver func() error, err error) {
	at, err := root.there(op.Path, true)
	switch {
	case err != nil:
		return nil, err
	case !at.file.mode.IsRegular():
		return nil, runtime.Invalid("%s is no regular file", op.Path)
	case op.Offset > int64(len(at.file.data)):
		return nil, fmt.Errorf("%s has %d bytes: %w", op.Path, len(at.file.data), errdefs.ErrOutOfRange)
	}
	info, data := at.file.info(path.Clean(op.Path), c.spec), at.file.data[op.Offset:]
	if op.Length >= 0 {
		data = data[:min(op.Length, int64(len(data)))]
	}
	return func() error {
		err := deliverInfo(fio, info)
		if err == nil && len(data) > 0 {
			_, err = fio.Out.Write(data)
		}
		return err
	}, nil
}

func (f *Fake) writeFile(ctx context.Context, id string, op runtime.FileOp, fio runtime.FileIO) error {
	check := func(root *fakeFile) (fakePlace, error) {
		dir := path.Dir(path.Clean(op.Path))
		if op.Parents {
			if err := root.mkdir(dir, 0o755); err != nil {
				return fakePlace{}, err
			}
		}
		at, err := root.find(op.Path, true)
		switch {
		case err != nil:
			return at, err
		case strings.HasSuffix(op.Path, "/") || at.file != nil && !at.file.mode.IsRegular():
			return at, runtime.Invalid("%s is no regular file", op.Path)
		case at.file != nil && op.NoClash:
			return at, fmt.Errorf("%s: %w", op.Path, errdefs.ErrAlreadyExists)
		}
		return at, nil
	}
	// It is known to be in the way before anything is read.
	err := f.files(ctx, op.Verb, id, func(_ *fakeContainer, root *fakeFile) error {
		_, err := check(root)
		return err
	})
	if err != nil {
		return err
	}
	data, err := io.ReadAll(fio.In)
	if err != nil && !op.Append {
		return err
	}
	if ctx.Err() != nil {
		return ctxError(ctx)
	}
	f.mu.Lock()
	c, gone := f.find(id)
	if gone != nil || c.info.State != runtime.StateRunning {
		f.mu.Unlock()
		return errDied
	}
	at, wrong := check(c.tree)
	if wrong != nil {
		f.mu.Unlock()
		return wrong
	}
	file := &fakeFile{mode: op.Mode, time: time.Now(), data: data}
	kind := "create"
	if file.mode == 0 {
		file.mode = 0o644
	}
	if at.file != nil {
		kind, file.mode = "modify", at.file.mode
		if op.Append {
			file.data = slices.Concat(at.file.data, data)
		}
	}
	at.put(file)
	c.tell(kind, at.path, false)
	info := file.info(path.Clean(op.Path), c.spec)
	f.mu.Unlock()
	if err != nil {
		return err
	}
	return deliverInfo(fio, info)
}

// find gives the files below a directory that a FileList or FileGlob means.
func (c *fakeContainer) find(root *fakeFile, op runtime.FileOp) (out []runtime.FileInfo, err error) {
	depth, limit := op.Depth, math.MaxInt
	match := func(string) bool { return true }
	if op.Verb == runtime.FileGlob {
		depth, limit = math.MaxInt, op.Limit
		elements := strings.Split(op.Pattern, "/")
		match = func(below string) bool { return matchGlob(elements, strings.Split(below, "/")) }
	}
	at, err := root.there(op.Path, true)
	if err != nil {
		return nil, err
	}
	if !at.file.mode.IsDir() {
		return nil, runtime.Invalid("%s is no directory", op.Path)
	}
	clean := path.Clean(op.Path)
	at.file.walk(clean, depth, func(full string, file *fakeFile) {
		if len(out) < limit && match(strings.TrimPrefix(strings.TrimPrefix(full, clean), "/")) {
			out = append(out, file.info(full, c.spec))
		}
	})
	return out, nil
}

func (c *fakeContainer) mkdir(root *fakeFile, op runtime.FileOp) error {
	mode := op.Mode
	if mode == 0 {
		mode = 0o755
	}
	if op.Parents {
		if err := root.mkdir(path.Dir(path.Clean(op.Path)), 0o755); err != nil {
			return err
		}
	}
	at, err := root.find(op.Path, true)
	switch {
	case err != nil:
		return err
	case at.file != nil && at.file.mode.IsDir() && op.Parents:
		return nil
	case at.file != nil:
		return fmt.Errorf("%s: %w", op.Path, errdefs.ErrAlreadyExists)
	}
	at.put(newDir(mode))
	c.tell("create", at.path, true)
	return nil
}

func (c *fakeContainer) relocate(root *fakeFile, op runtime.FileOp) error {
	source, err := root.there(op.Path, false)
	if err != nil {
		return err
	}
	target, err := root.find(op.To, false)
	switch {
	case err != nil:
		return err
	case source.dir == nil || target.dir == nil || source.file.mode.IsDir() && runtime.Below(target.path, source.path):
		return runtime.Invalid("%s can't be put at %s", op.Path, op.To)
	case target.file != nil && !op.Replace:
		return fmt.Errorf("%s: %w", op.To, errdefs.ErrAlreadyExists)
	case target.file != nil && target.file.mode.IsDir() != source.file.mode.IsDir():
		return runtime.Invalid("%s is of another kind than %s", op.To, op.Path)
	case target.file != nil && len(target.file.files) > 0:
		return fmt.Errorf("%s isn't empty: %w", op.To, errdefs.ErrFailedPrecondition)
	}
	target.put(source.file.clone())
	if op.Verb == runtime.FileMove {
		delete(source.dir.files, source.name)
		c.tell("rename", source.path, source.file.mode.IsDir())
	}
	c.tell("create", target.path, source.file.mode.IsDir())
	return nil
}

func (c *fakeContainer) removeFile(root *fakeFile, op runtime.FileOp) error {
	at, err := root.there(op.Path, false)
	switch {
	case err != nil:
		return err
	case at.dir == nil:
		return runtime.Invalid("the root can't be removed")
	case len(at.file.files) > 0 && !op.Recursive:
		return fmt.Errorf("%s isn't empty: %w", op.Path, errdefs.ErrFailedPrecondition)
	}
	delete(at.dir.files, at.name)
	c.tell("remove", at.path, at.file.mode.IsDir())
	return nil
}

// search finds lines.
func search(root *fakeFile, op runtime.FileOp) (out []runtime.FileMatch, err error) {
	expr := op.Pattern
	if op.Literal {
		expr = regexp.QuoteMeta(expr)
	}
	if op.IgnoreCase {
		expr = "(?i)" + expr
	}
	re, err := regexp.Compile(expr)
	if err != nil {
		return nil, runtime.Invalid("pattern %q", op.Pattern)
	}
	at, err := root.there(op.Path, true)
	if err != nil {
		return nil, err
	}
	look := func(full string, file *fakeFile) {
		if ok, _ := path.Match(op.Include, path.Base(full)); !file.mode.IsRegular() || op.Include != "" && !ok {
			return
		}
		for i, line := range strings.Split(strings.TrimSuffix(string(file.data), "\n"), "\n") {
			if len(out) < op.Limit && re.MatchString(line) {
				out = append(out, runtime.FileMatch{Path: full, Line: i + 1, Text: line[:min(len(line), 4<<10)]})
			}
		}
	}
	look(path.Clean(op.Path), at.file)
	at.file.walk(path.Clean(op.Path), math.MaxInt, look)
	return out, nil
}
