package runtimetest

import (
	"context"
	"fmt"
	"io"
	"io/fs"
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
func (f *Fake) files(ctx context.Context, op, id string, do func(*fakeContainer, *fakeFile) error) error {
	c, err := f.inside(ctx, op, id)
	if err != nil {
		return err
	}
	if c.tree == nil {
		c.tree = newTree(c.spec)
	}
	err = do(c, c.tree)
	f.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s in %s: %w", op, id, err)
	}
	return f.after(op, id)
}

// Stat implements runtime.Files. Nothing is forbidden in a Fake, and mounts are empty
// directories of its own.
func (f *Fake) Stat(ctx context.Context, id, name string) (info runtime.FileInfo, err error) {
	err = f.files(ctx, "file_stat", id, func(c *fakeContainer, root *fakeFile) error {
		at, err := root.there(name, true)
		if err == nil {
			info = at.file.info(path.Clean(name), c.spec)
			info.Target = ""
		}
		return err
	})
	return info, err
}

// ReadFile implements runtime.Files.
func (f *Fake) ReadFile(ctx context.Context, id, name string, offset, length int64, open func(runtime.FileInfo) error, w io.Writer) error {
	var info runtime.FileInfo
	var data []byte
	err := f.files(ctx, "file_read", id, func(c *fakeContainer, root *fakeFile) error {
		if offset < 0 || length < -1 {
			return runtime.Invalid("from %d, %d bytes", offset, length)
		}
		at, err := root.there(name, true)
		switch {
		case err != nil:
			return err
		case !at.file.mode.IsRegular():
			return runtime.Invalid("%s is no regular file", name)
		case offset > int64(len(at.file.data)):
			return fmt.Errorf("%s has %d bytes: %w", name, len(at.file.data), errdefs.ErrOutOfRange)
		}
		info, data = at.file.info(path.Clean(name), c.spec), at.file.data[offset:]
		if length >= 0 {
			data = data[:min(length, int64(len(data)))]
		}
		return nil
	})
	if err == nil && open != nil {
		err = open(info)
	}
	if err == nil && len(data) > 0 {
		_, err = w.Write(data)
	}
	return err
}

// WriteFile implements runtime.Files.
func (f *Fake) WriteFile(ctx context.Context, id string, w runtime.FileWrite, r io.Reader) (info runtime.FileInfo, err error) {
	check := func(root *fakeFile) (fakePlace, error) {
		dir := path.Dir(path.Clean(w.Path))
		if w.Mkdir {
			if err := root.mkdir(dir, 0o755); err != nil {
				return fakePlace{}, err
			}
		}
		at, err := root.find(w.Path, true)
		switch {
		case err != nil:
			return at, err
		case strings.HasSuffix(w.Path, "/") || at.file != nil && !at.file.mode.IsRegular():
			return at, runtime.Invalid("%s is no regular file", w.Path)
		case at.file != nil && w.NoClash:
			return at, fmt.Errorf("%s: %w", w.Path, errdefs.ErrAlreadyExists)
		}
		return at, nil
	}
	// It is known to be in the way before anything is read.
	err = f.files(ctx, "file_write", id, func(_ *fakeContainer, root *fakeFile) error {
		_, err := check(root)
		return err
	})
	if err != nil {
		return info, err
	}
	data, err := io.ReadAll(r)
	if err != nil && !w.Append {
		return info, err
	}
	if ctx.Err() != nil {
		return info, ctxError(ctx)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c, gone := f.find(id)
	if gone != nil || c.info.State != runtime.StateRunning {
		return info, errDied
	}
	at, wrong := check(c.tree)
	if wrong != nil {
		return info, wrong
	}
	file := &fakeFile{mode: w.Mode & fs.ModePerm, time: time.Now(), data: data}
	kind := "create"
	if file.mode == 0 {
		file.mode = 0o644
	}
	if at.file != nil {
		kind, file.mode = "modify", at.file.mode
		if w.Append {
			file.data = slices.Concat(at.file.data, data)
		}
	}
	at.put(file)
	c.tell(kind, at.path, false)
	return file.info(path.Clean(w.Path), c.spec), err
}

// ListDir implements runtime.Files.
func (f *Fake) ListDir(ctx context.Context, id, name string, depth int, visit func(runtime.FileInfo) error) error {
	return f.found(ctx, "file_list", id, name, depth, math.MaxInt, nil, visit)
}

// Glob implements runtime.Files.
func (f *Fake) Glob(ctx context.Context, id, name, pattern string, limit int, visit func(runtime.FileInfo) error) error {
	elements := strings.Split(pattern, "/")
	for _, e := range elements {
		if _, err := path.Match(e, ""); err != nil {
			return runtime.Invalid("pattern %q: %w", pattern, err)
		}
	}
	match := func(below string) bool { return matchGlob(elements, strings.Split(below, "/")) }
	return f.found(ctx, "file_glob", id, name, math.MaxInt, limit, match, visit)
}

// found tells of the files below a directory that match.
func (f *Fake) found(ctx context.Context, op, id, name string, depth, limit int, match func(string) bool, visit func(runtime.FileInfo) error) error {
	var out []runtime.FileInfo
	err := f.files(ctx, op, id, func(c *fakeContainer, root *fakeFile) error {
		at, err := root.there(name, true)
		if err != nil {
			return err
		}
		if !at.file.mode.IsDir() || depth < 0 || limit < 0 {
			return runtime.Invalid("%s is no directory, or a number is negative", name)
		}
		clean := path.Clean(name)
		at.file.walk(clean, depth, func(full string, file *fakeFile) {
			if len(out) < limit && (match == nil || match(strings.TrimPrefix(strings.TrimPrefix(full, clean), "/"))) {
				out = append(out, file.info(full, c.spec))
			}
		})
		return nil
	})
	for _, info := range out {
		if err == nil {
			err = visit(info)
		}
	}
	return err
}

// Mkdir implements runtime.Files.
func (f *Fake) Mkdir(ctx context.Context, id, name string, mode fs.FileMode, parents bool) error {
	return f.files(ctx, "file_mkdir", id, func(c *fakeContainer, root *fakeFile) error {
		clean := path.Clean(name)
		if mode == 0 {
			mode = 0o755
		}
		if parents {
			if err := root.mkdir(path.Dir(clean), 0o755); err != nil {
				return err
			}
		}
		at, err := root.find(name, true)
		switch {
		case err != nil:
			return err
		case at.file != nil && at.file.mode.IsDir() && parents:
			return nil
		case at.file != nil:
			return fmt.Errorf("%s: %w", name, errdefs.ErrAlreadyExists)
		}
		at.put(newDir(mode & fs.ModePerm))
		c.tell("create", at.path, true)
		return nil
	})
}

// Move implements runtime.Files.
func (f *Fake) Move(ctx context.Context, id, from, to string, replace bool) error {
	return f.relocate(ctx, "file_move", id, from, to, replace, true)
}

// Copy implements runtime.Files.
func (f *Fake) Copy(ctx context.Context, id, from, to string, replace bool) error {
	return f.relocate(ctx, "file_copy", id, from, to, replace, false)
}

func (f *Fake) relocate(ctx context.Context, op, id, from, to string, replace, move bool) error {
	return f.files(ctx, op, id, func(c *fakeContainer, root *fakeFile) error {
		source, err := root.there(from, false)
		if err != nil {
			return err
		}
		target, err := root.find(to, false)
		switch {
		case err != nil:
			return err
		case source.dir == nil || target.dir == nil || source.file.mode.IsDir() && runtime.Below(target.path, source.path):
			return runtime.Invalid("%s can't be put at %s", from, to)
		case target.file != nil && !replace:
			return fmt.Errorf("%s: %w", to, errdefs.ErrAlreadyExists)
		case target.file != nil && target.file.mode.IsDir() != source.file.mode.IsDir():
			return runtime.Invalid("%s is of another kind than %s", to, from)
		case target.file != nil && len(target.file.files) > 0:
			return fmt.Errorf("%s isn't empty: %w", to, errdefs.ErrFailedPrecondition)
		}
		target.put(source.file.clone())
		if move {
			delete(source.dir.files, source.name)
			c.tell("rename", source.path, source.file.mode.IsDir())
		}
		c.tell("create", target.path, source.file.mode.IsDir())
		return nil
	})
}

// RemoveFile implements runtime.Files.
func (f *Fake) RemoveFile(ctx context.Context, id, name string, recursive bool) error {
	return f.files(ctx, "file_remove", id, func(c *fakeContainer, root *fakeFile) error {
		at, err := root.there(name, false)
		switch {
		case err != nil:
			return err
		case at.dir == nil:
			return runtime.Invalid("the root can't be removed")
		case len(at.file.files) > 0 && !recursive:
			return fmt.Errorf("%s isn't empty: %w", name, errdefs.ErrFailedPrecondition)
		}
		delete(at.dir.files, at.name)
		c.tell("remove", at.path, at.file.mode.IsDir())
		return nil
	})
}

// Search implements runtime.Files.
func (f *Fake) Search(ctx context.Context, id string, s runtime.FileSearch, visit func(runtime.FileMatch) error) error {
	var out []runtime.FileMatch
	err := f.files(ctx, "file_search", id, func(_ *fakeContainer, root *fakeFile) error {
		expr := s.Pattern
		if s.Literal {
			expr = regexp.QuoteMeta(expr)
		}
		if s.IgnoreCase {
			expr = "(?i)" + expr
		}
		re, err := regexp.Compile(expr)
		if _, bad := path.Match(s.Include, ""); err != nil || bad != nil || s.Limit < 0 || s.Limit > 10_000 {
			return runtime.Invalid("pattern %q in %q, limit %d", s.Pattern, s.Include, s.Limit)
		}
		at, err := root.there(s.Path, true)
		if err != nil {
			return err
		}
		limit := s.Limit
		if limit == 0 {
			limit = 1000
		}
		look := func(full string, file *fakeFile) {
			if ok, _ := path.Match(s.Include, path.Base(full)); !file.mode.IsRegular() || s.Include != "" && !ok {
				return
			}
			for i, line := range strings.Split(strings.TrimSuffix(string(file.data), "\n"), "\n") {
				if len(out) < limit && re.MatchString(line) {
					out = append(out, runtime.FileMatch{Path: full, Line: i + 1, Text: line[:min(len(line), 4<<10)]})
				}
			}
		}
		look(path.Clean(s.Path), at.file)
		at.file.walk(path.Clean(s.Path), math.MaxInt, look)
		return nil
	})
	for _, m := range out {
		if err == nil {
			err = visit(m)
		}
	}
	return err
}
