package runtimetest

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/files"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// makeRoot makes the directory of a container's files: /etc, /home, /root, /tmp, and the
// directories that its spec names; f.mu is held.
func (f *Fake) makeRoot(c *fakeContainer) error {
	if c.root != "" {
		return nil
	}
	if f.opts.Files == "" {
		return errors.New("the Fake has no directory for files")
	}
	root := filepath.Join(f.opts.Files, c.info.ID)
	dirs := []string{"/etc", "/home", "/root", "/tmp", c.spec.WorkingDir}
	for _, m := range c.spec.Mounts {
		dirs = append(dirs, m.Target)
	}
	for _, t := range c.spec.Tmpfs {
		dirs = append(dirs, t.Target)
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(filepath.Join(root, path.Clean("/"+dir)), 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(root, "tmp"), fs.ModeSticky|0o777); err != nil {
		return err
	}
	c.root = root
	return nil
}

// File implements runtime.Insider. Mounts are empty directories of the container's own, and
// what this process may do isn't forbidden.
func (f *Fake) File(ctx context.Context, id string, op runtime.FileOp, fio runtime.FileIO) error {
	if err := op.Check(); err != nil {
		return err
	}
	name := "file_" + string(op.Verb)
	if _, err := f.begin(ctx, name, id); err != nil {
		return err
	}
	f.mu.Lock()
	c, err := f.running(name, id)
	if err == nil {
		err = f.makeRoot(c)
	}
	f.mu.Unlock()
	if err == nil && op.Verb == runtime.FileWatch {
		return f.watchFiles(ctx, c, op, fio.Event)
	}
	if err == nil {
		err = f.doFile(ctx, c, op, fio)
	}
	if err != nil {
		return fmt.Errorf("%s in %s: %w", name, id, err)
	}
	return f.after(name, id)
}

// doFile does an operation as the agent does.
func (f *Fake) doFile(ctx context.Context, c *fakeContainer, op runtime.FileOp, fio runtime.FileIO) error {
	verb := wire.Op(strings.ReplaceAll(string(op.Verb), "_", "-"))
	if op.Verb == runtime.FileList {
		verb = wire.OpDir
	}
	root, err := os.Open(c.root)
	if err != nil {
		return errDied
	}
	defer func() { _ = root.Close() }()
	p := &filePeer{ctx: ctx, fake: f, c: c, FileIO: fio}
	result, err := files.Do(int(root.Fd()), p, verb, &wire.File{
		Path: []byte(op.Path), To: []byte(op.To), Offset: op.Offset, Length: op.Length,
		Mode: uint32(op.Mode.Perm()), Parents: op.Parents, Append: op.Append, NoClash: op.NoClash,
		Replace: op.Replace, Recursive: op.Recursive, Depth: op.Depth, Limit: op.Limit,
		Pattern: op.Pattern, Literal: op.Literal, IgnoreCase: op.IgnoreCase, Include: op.Include,
	})
	f.mu.Lock()
	c.tellChanges(op.Verb)
	f.mu.Unlock()
	switch {
	case p.err != nil:
		return p.err
	case err != nil:
		return files.Failure(err)
	case result != nil:
		return p.Item(result)
	}
	return nil
}

// filePeer is the caller to an operation. An operation doesn't wait for others.
type filePeer struct {
	runtime.FileIO
	ctx  context.Context // of the one call
	fake *Fake
	c    *fakeContainer
	err  error // the first that the operation got
}

func (p *filePeer) Lock()   {}
func (p *filePeer) Unlock() {}

func (p *filePeer) keep(err error) error {
	if p.err == nil && err != nil && !errors.Is(err, io.EOF) {
		p.err = err
	}
	return err
}

func (p *filePeer) Ready() error { return p.Alive() }

// Alive returns an error if the caller or the container is gone.
func (p *filePeer) Alive() error {
	if p.ctx.Err() != nil {
		return p.keep(ctxError(p.ctx))
	}
	p.fake.mu.Lock()
	defer p.fake.mu.Unlock()
	if c, err := p.fake.find(p.c.info.ID); err != nil || c.info.State != runtime.StateRunning {
		return p.keep(errDied)
	}
	return nil
}

func (p *filePeer) Read(b []byte) (int, error) {
	n, err := p.In.Read(b)
	if gone := p.Alive(); gone != nil {
		return 0, gone
	}
	return n, p.keep(err)
}

func (p *filePeer) Write(b []byte) (int, error) {
	n, err := p.Out.Write(b)
	return n, p.keep(err)
}

// Item delivers a file or a line. A file is the container's user's; a name is root.
func (p *filePeer) Item(v any) error {
	switch v := v.(type) {
	case *wire.FileInfo:
		if p.Info == nil {
			return nil
		}
		uid, gid, _ := strings.Cut(p.c.spec.User, ":")
		info := runtime.FileInfo{
			Path: string(v.Path), Size: v.Size, Mode: (&tar.Header{Mode: int64(v.Mode)}).FileInfo().Mode(),
			ModTime: time.Unix(0, v.ModTime).UTC(), Target: string(v.Target),
		}
		info.UID, _ = strconv.Atoi(uid)
		info.GID, _ = strconv.Atoi(gid)
		return p.keep(p.Info(info))
	case *wire.FileMatch:
		return p.keep(p.Match(runtime.FileMatch{Path: string(v.Path), Line: v.Line, Text: string(v.Text)}))
	}
	return nil
}

// fakeFileWatcher is a FileWatch under way. It belongs to f.mu.
type fakeFileWatcher struct {
	dir       string
	recursive bool
	queue[runtime.FileEvent]
}

// look returns all files of a container.
func (c *fakeContainer) look() map[string]fs.FileInfo {
	seen := map[string]fs.FileInfo{}
	_ = filepath.WalkDir(c.root, func(name string, d fs.DirEntry, err error) error {
		if err == nil {
			if info, err := d.Info(); err == nil {
				seen[strings.TrimPrefix(name, c.root)] = info
			}
		}
		return nil // another operation may have removed it
	})
	return seen
}

// tellChanges tells those who watch of what has changed; f.mu is held.
func (c *fakeContainer) tellChanges(verb runtime.FileVerb) {
	if len(c.watchers) == 0 {
		return
	}
	before, after := c.seen, c.look()
	c.seen = after
	for _, name := range slices.Sorted(maps.Keys(before)) {
		switch was, is := before[name], after[name]; {
		case is == nil && verb == runtime.FileMove:
			c.tell("rename", name, was.IsDir())
		case is == nil:
			c.tell("remove", name, was.IsDir())
		case !is.IsDir() && (!os.SameFile(was, is) || was.Size() != is.Size()):
			c.tell("modify", name, false)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if before[name] == nil {
			c.tell("create", name, after[name].IsDir())
		}
	}
}

// tell tells those who watch of a change; f.mu is held.
func (c *fakeContainer) tell(kind, name string, dir bool) {
	for w := range c.watchers {
		if name != w.dir && runtime.Below(name, w.dir) && (w.recursive || path.Dir(name) == w.dir) {
			w.add(runtime.FileEvent{Type: kind, Path: name, Dir: dir})
		}
	}
}

func (f *Fake) watchFiles(ctx context.Context, c *fakeContainer, op runtime.FileOp, handle func(runtime.FileEvent) error) error {
	list := runtime.FileOp{Verb: runtime.FileList, Path: op.Path, Depth: 1}
	if err := f.doFile(ctx, c, list, runtime.FileIO{}); err != nil {
		return fmt.Errorf("watch %s: %w", op.Path, err)
	}
	w := &fakeFileWatcher{dir: path.Clean(op.Path), recursive: op.Recursive, queue: newQueue[runtime.FileEvent]()}
	f.mu.Lock()
	down, gone := f.down, c.over()
	if len(c.watchers) == 0 {
		c.watchers, c.seen = map[*fakeFileWatcher]struct{}{}, c.look()
	}
	c.watchers[w] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(c.watchers, w)
	}()
	if err := f.after("file_watch", c.info.ID); err != nil {
		return err
	}
	if err := handle(runtime.FileEvent{Type: runtime.FileReady}); err != nil {
		return err
	}
	for {
		select {
		case <-w.wake:
		case <-down:
			return fmt.Errorf("watch %s: %w", op.Path, errDown)
		case <-gone:
			return fmt.Errorf("watch %s: %w", op.Path, errDied)
		case <-ctx.Done():
			return nil
		}
		if err := w.hand(ctx, f, handle); err != nil {
			return err
		}
	}
}
