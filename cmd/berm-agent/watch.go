package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// The types of wire.FileEvent.
const (
	eventReady    = "ready"
	eventCreate   = "create"
	eventModify   = "modify"
	eventRemove   = "remove"
	eventRename   = "rename"
	eventAttrib   = "attrib"
	eventOverflow = "overflow"
)

const (
	maxWatches = 8192 // directories
	watched    = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
)

func watchFiles(c *conn, f *wire.File) (any, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, at(string(f.Path), err)
	}
	file, err := newSocket(os.NewFile(uintptr(fd), "inotify"))
	if err != nil {
		return nil, err
	}
	w := &watching{c: c, fd: fd, file: file, recursive: f.Recursive, paths: make(map[int32]string)}
	defer func() { _ = w.file.Close() }()
	root := trim(string(f.Path))
	if err = again(func() (err error) { w.root, err = unix.InotifyAddWatch(fd, root, watched); return err }); err != nil {
		return nil, at(root, err)
	}
	w.paths[int32(w.root)] = root
	up, err := c.upload() // no Data, but an End
	if err != nil {
		return nil, err
	}
	if f.Recursive {
		if err := w.add(root, false); err != nil {
			return nil, err
		}
	}
	w.ready = true
	if err := w.send(eventReady, "", false); err != nil {
		return nil, err
	}
	if w.full {
		if err := w.send(eventOverflow, "", false); err != nil {
			return nil, err
		}
	}
	ended := make(chan bool, 1)
	go func() {
		kind, _, err := c.r.Next()
		ended <- err == nil && kind == wire.KindEnd
		_ = w.file.SetReadDeadline(time.Unix(1, 0)) // wakes the loop below
	}()
	err = w.loop()
	select {
	case well := <-ended:
		if !well {
			return nil, errGone
		}
		up.c.input = false
		return nil, nil
	default:
		return nil, c.last(err)
	}
}

// watching is a watch under way.
type watching struct {
	c         *conn
	fd        int
	file      *socket
	recursive bool
	root      int
	paths     map[int32]string // of the directories, by their watch
	ready     bool             // that was told
	full      bool             // a directory isn't watched; that was told, once ready
}

func (w *watching) send(kind, path string, dir bool) error {
	return w.c.item(&wire.FileEvent{Type: kind, Path: []byte(path), Dir: dir})
}

// loop tells of changes until the read of them is interrupted.
func (w *watching) loop() error {
	buf := make([]byte, 16<<10)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			return err
		}
		for rest := buf[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			wd := int32(binary.NativeEndian.Uint32(rest))
			mask := binary.NativeEndian.Uint32(rest[4:])
			end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(rest[12:]))
			name, _, _ := bytes.Cut(rest[unix.SizeofInotifyEvent:end], []byte{0})
			rest = rest[end:]
			if err := w.event(wd, mask, string(name)); err != nil {
				return err
			}
		}
	}
}

func (w *watching) event(wd int32, mask uint32, name string) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return w.send(eventOverflow, "", false)
	}
	path, ok := w.paths[wd]
	if !ok {
		return nil // of a directory that was moved away
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(w.paths, wd)
		return nil
	}
	dir := mask&unix.IN_ISDIR != 0
	if name == "" {
		if int(wd) != w.root {
			return nil // the directory above tells of it
		}
		dir = true
	} else {
		path = join(path, name)
	}
	kind := kindOfEvent(mask)
	if kind == "" {
		return nil
	}
	if err := w.send(kind, path, dir); err != nil {
		return err
	}
	if !dir || !w.recursive || name == "" {
		return nil
	}
	switch kind {
	case eventRename:
		w.forget(path)
	case eventCreate:
		w.forget(path) // what had the name before
		return w.add(path, true)
	}
	return nil
}

func kindOfEvent(mask uint32) string {
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		return eventCreate
	case mask&unix.IN_MODIFY != 0:
		return eventModify
	case mask&(unix.IN_DELETE|unix.IN_DELETE_SELF) != 0:
		return eventRemove
	case mask&(unix.IN_MOVED_FROM|unix.IN_MOVE_SELF) != 0:
		return eventRename
	case mask&unix.IN_ATTRIB != 0:
		return eventAttrib
	}
	return ""
}

// forget ends the watches of a directory that has another name now, or none.
func (w *watching) forget(dir string) {
	for wd, path := range w.paths {
		if path == dir || len(path) > len(dir) && path[:len(dir)] == dir && path[len(dir)] == '/' {
			delete(w.paths, wd)
			_, _ = unix.InotifyRmWatch(w.fd, uint32(wd)) // it may be gone
		}
	}
}

// add watches a directory and those below it. If told so, it tells of what is in them:
// it may have come before the watch.
func (w *watching) add(dir string, tell bool) error {
	if err := w.watch(dir); err != nil {
		return err
	}
	fd, err := openAt(unix.AT_FDCWD, dir, dir, dirFlags, 0)
	if err != nil {
		return nil // gone, or not to be read: there is nothing to tell
	}
	defer fd.close()
	below := &walk{pulse: pulse{c: w.c}, visit: func(e *entry) error {
		isDir := is(&e.st, unix.S_IFDIR)
		if tell {
			if err := w.send(eventCreate, e.path, isDir); err != nil {
				return err
			}
		}
		if isDir {
			if w.full && !tell {
				return fs.SkipAll
			}
			return w.watch(e.path)
		}
		return nil
	}}
	err = below.below(fd, dir)
	if errors.Is(err, errGone) {
		return errGone
	}
	if err != nil && !errors.Is(err, fs.SkipAll) {
		return w.overflow()
	}
	return nil
}

// watch adds a directory, and says once if there are too many.
func (w *watching) watch(dir string) error {
	if len(w.paths) >= maxWatches {
		return w.overflow()
	}
	var wd int
	err := again(func() (err error) { wd, err = unix.InotifyAddWatch(w.fd, dir, watched|unix.IN_DONT_FOLLOW); return err })
	if err == nil {
		if wd != w.root {
			w.paths[int32(wd)] = dir
		}
		return nil
	}
	if missing(err) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, fs.ErrPermission) {
		return nil // gone, another by now, or not this user's to see
	}
	return w.overflow()
}

func (w *watching) overflow() error {
	if w.full {
		return nil
	}
	w.full = true
	if !w.ready {
		return nil
	}
	return w.send(eventOverflow, "", false)
}
