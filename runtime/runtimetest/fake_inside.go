package runtimetest

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	"path"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func (f *Fake) readTar(ctx context.Context, id, name string, w io.Writer) error {
	type entry struct {
		name string
		file *fakeFile
	}
	var out []entry
	err := f.files(ctx, runtime.FileTarRead, id, func(_ *fakeContainer, root *fakeFile) error {
		at, err := root.there(name, true)
		if err != nil {
			return err
		}
		base := path.Base(path.Clean(name))
		out = append(out, entry{base, at.file})
		at.file.walk(base, math.MaxInt, func(full string, file *fakeFile) { out = append(out, entry{full, file}) })
		return nil
	})
	if err != nil {
		return err
	}
	archive := tar.NewWriter(w)
	for _, e := range out {
		h := &tar.Header{Name: strings.TrimPrefix(e.name, "/"), Mode: int64(e.file.mode.Perm()), ModTime: e.file.time}
		switch {
		case e.file.mode.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		case e.file.target != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, e.file.target
		default:
			h.Typeflag, h.Size = tar.TypeReg, int64(len(e.file.data))
		}
		if err := archive.WriteHeader(h); err != nil {
			return err
		}
		if _, err := archive.Write(e.file.data); err != nil {
			return err
		}
	}
	return archive.Close()
}

// writeTar takes directories, regular files and symbolic links.
func (f *Fake) writeTar(ctx context.Context, id, name string, r io.Reader) error {
	into := func(do func(*fakeContainer, *fakeFile) error) error {
		return f.files(ctx, runtime.FileTarWrite, id, func(c *fakeContainer, root *fakeFile) error {
			at, err := root.there(name, true)
			if err == nil && !at.file.mode.IsDir() {
				err = runtime.Invalid("%s is no directory", name)
			}
			if err == nil {
				err = do(c, at.file)
			}
			return err
		})
	}
	if err := into(func(*fakeContainer, *fakeFile) error { return nil }); err != nil {
		return err
	}
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
			return runtime.Invalid("the archive: %w", err)
		}
		if err != nil {
			return err
		}
		if !fs.ValidPath(path.Clean(h.Name)) {
			return runtime.Invalid("%q in the archive leads out of the directory", h.Name)
		}
		file := &fakeFile{mode: fs.FileMode(h.Mode) & fs.ModePerm, time: h.ModTime, target: h.Linkname} //nolint:gosec // bits of it
		switch h.Typeflag {
		case tar.TypeDir:
			file = newDir(file.mode)
		case tar.TypeSymlink:
			file.mode |= fs.ModeSymlink
		case tar.TypeReg:
			if file.data, err = io.ReadAll(archive); err != nil {
				return err
			}
		default:
			return runtime.Invalid("%q in the archive is of a kind that isn't taken", h.Name)
		}
		// The directory is the root of all that is found, so that no link leads out of it.
		err = into(func(c *fakeContainer, dir *fakeFile) error { return c.unpack(dir, name, "/"+path.Clean(h.Name), file) })
		if err != nil {
			return err
		}
	}
}

func (c *fakeContainer) unpack(root *fakeFile, dir, name string, file *fakeFile) error {
	if err := root.mkdir(path.Dir(name), 0o755); err != nil {
		return err
	}
	at, err := root.find(name, false)
	switch {
	case err != nil:
		return err
	case at.file == root, at.file != nil && at.file.mode.IsDir() && file.mode.IsDir():
		return nil
	case len(at.file.all()) > 0:
		return fmt.Errorf("%s isn't empty: %w", name, errdefs.ErrFailedPrecondition)
	}
	at.put(file)
	c.tell("create", path.Join(dir, at.path), file.mode.IsDir())
	return nil
}

func (f *fakeFile) all() map[string]*fakeFile {
	if f == nil {
		return nil
	}
	return f.files
}

// fakeFileWatcher is a FileWatch under way. It belongs to f.mu.
type fakeFileWatcher struct {
	dir       string // as the caller named it
	path      string // without links
	recursive bool
	queue     []runtime.FileEvent
	wake      chan struct{} // has room for one
}

// tell tells those who watch of a change; f.mu is held.
func (c *fakeContainer) tell(kind, name string, dir bool) {
	for w := range c.watchers {
		if name == w.path || !runtime.Below(name, w.path) || !w.recursive && path.Dir(name) != w.path {
			continue
		}
		w.queue = append(w.queue, runtime.FileEvent{Type: kind, Path: path.Join(w.dir, strings.TrimPrefix(name, w.path)), Dir: dir})
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

func (f *Fake) watchFiles(ctx context.Context, id string, op runtime.FileOp, handle func(runtime.FileEvent) error) error {
	name := op.Path
	w := &fakeFileWatcher{dir: path.Clean(name), recursive: op.Recursive, wake: make(chan struct{}, 1)}
	var c *fakeContainer
	var down, gone <-chan struct{}
	err := f.files(ctx, op.Verb, id, func(found *fakeContainer, root *fakeFile) error {
		at, err := root.there(name, true)
		if err != nil {
			return err
		}
		if !at.file.mode.IsDir() {
			return runtime.Invalid("%s is no directory", name)
		}
		w.path = at.path
		c, down, gone = found, f.down, found.over()
		if c.watchers == nil {
			c.watchers = map[*fakeFileWatcher]struct{}{}
		}
		c.watchers[w] = struct{}{}
		return nil
	})
	if c != nil {
		defer func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			delete(c.watchers, w)
		}()
	}
	if err != nil {
		return err
	}
	if err := handle(runtime.FileEvent{Type: runtime.FileReady}); err != nil {
		return err
	}
	for {
		select {
		case <-w.wake:
		case <-down:
			return fmt.Errorf("watch %s: %w", name, errDown)
		case <-gone:
			return fmt.Errorf("watch %s: %w", name, errDied)
		case <-ctx.Done():
			return nil
		}
		f.mu.Lock()
		events := w.queue
		w.queue = nil
		f.mu.Unlock()
		for _, e := range events {
			if ctx.Err() != nil {
				return nil
			}
			if err := handle(e); err != nil {
				return err
			}
		}
	}
}

// over is closed when the container's main process ends; f.mu is held, and it runs.
func (c *fakeContainer) over() <-chan struct{} {
	if c.ended == nil {
		c.ended = make(chan struct{})
	}
	return c.ended
}

// Listen has all containers listen at a port: each connection that Dial makes is handed
// to serve, in a goroutine of its own, with a CloseWrite method like the other end's. Nil
// stops.
func (f *Fake) Listen(port int, serve func(net.Conn)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if serve == nil {
		delete(f.ports, port)
		return
	}
	f.ports[port] = serve
}

// Dial implements runtime.Insider. Nobody listens but for Listen.
func (f *Fake) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, runtime.Invalid("port %d", port)
	}
	c, err := f.inside(ctx, "dial", id)
	if err != nil {
		return nil, err
	}
	serve := f.ports[port]
	if serve == nil {
		f.mu.Unlock()
		return nil, fmt.Errorf("nobody listens at port %d of %s: %w", port, id, errdefs.ErrFailedPrecondition)
	}
	ours, theirs := connPair()
	if c.conns == nil {
		c.conns = map[*pairConn]struct{}{}
	}
	c.conns[theirs] = struct{}{}
	f.mu.Unlock()
	go func() {
		serve(theirs)
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(c.conns, theirs)
	}()
	if err := f.after("dial", id); err != nil {
		_ = ours.Close()
		return nil, err
	}
	return ours, nil
}

// pairConn is one end of a connection each direction of which can be closed by itself.
type pairConn struct {
	net.Conn          // what it reads from
	out      net.Conn // what it writes to
}

func connPair() (a, b *pairConn) {
	toA, fromB := net.Pipe()
	toB, fromA := net.Pipe()
	return &pairConn{toA, fromA}, &pairConn{toB, fromB}
}

func (c *pairConn) Write(b []byte) (int, error) { return c.out.Write(b) }
func (c *pairConn) CloseWrite() error           { return c.out.Close() }
func (c *pairConn) Close() error                { return errors.Join(c.Conn.Close(), c.out.Close()) }

func (c *pairConn) SetWriteDeadline(t time.Time) error { return c.out.SetWriteDeadline(t) }
func (c *pairConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.out.SetWriteDeadline(t))
}

// cutOff ends what goes on inside a container with it; f.mu is held.
func (c *fakeContainer) cutOff() {
	c.endProcesses()
	for conn := range c.conns {
		_ = conn.Close()
	}
	if c.ended != nil {
		close(c.ended)
		c.ended = nil
	}
}
