package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// events maps inotify's masks to types of wire.FileEvent. The other types are "ready" and "overflow".
var events = []struct {
	mask uint32
	kind string
}{
	{unix.IN_CREATE | unix.IN_MOVED_TO, "create"}, {unix.IN_MODIFY, "modify"}, {unix.IN_DELETE | unix.IN_DELETE_SELF, "remove"},
	{unix.IN_MOVED_FROM | unix.IN_MOVE_SELF, "rename"}, {unix.IN_ATTRIB, "attrib"},
}

const (
	maxWatches = 8192 // directories
	watched    = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
)

// watch sends changes until the upload, which has no content, ends. The root must be OwnRoot.
func (j *job) watch() error {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return &fs.PathError{Op: "watch", Path: j.name, Err: err}
	}
	w := &watching{job: j, fd: fd, file: os.NewFile(uintptr(fd), "inotify"), paths: make(map[int32]string)}
	defer func() { _ = w.file.Close() }()
	if w.root, err = w.addWatch(j.name, 0); err != nil {
		return err
	}
	w.paths[int32(w.root)] = j.name
	if err := j.Ready(); err != nil {
		return err
	}
	if j.Recursive {
		if err := w.add(j.name, false); err != nil {
			return err
		}
	}
	w.begun = true
	if err := w.send("ready", "", false); err != nil {
		return err
	}
	if w.full {
		if err := w.send("overflow", "", false); err != nil {
			return err
		}
	}
	ended := make(chan error, 1)
	j.deaf = true
	go func() {
		j.Lock()
		defer j.Unlock()
		_, err := j.Read(make([]byte, 1))
		ended <- err
		_ = w.file.SetReadDeadline(time.Unix(1, 0)) // wakes the loop below
	}()
	err = w.loop()
	select {
	case end := <-ended:
		switch {
		case errors.Is(end, io.EOF):
			return nil
		case end == nil:
			return Invalid("a watch takes no content")
		}
		return end
	default:
		return err
	}
}

// watching is a watch under way.
type watching struct {
	*job
	fd    int
	file  *os.File
	root  int
	paths map[int32]string // of directories, by watch descriptor
	begun bool             // the first watches are set, and the peer gets events
	full  bool             // a directory isn't watched; reported once begun
}

func (w *watching) send(kind, path string, dir bool) error {
	return w.Item(&wire.FileEvent{Type: kind, Path: []byte(path), Dir: dir})
}

// loop sends changes until its read is interrupted.
func (w *watching) loop() error {
	buf := make([]byte, 16<<10)
	for {
		n, err := w.read(buf)
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

// read reads events. It waits without the lock.
func (w *watching) read(buf []byte) (n int, err error) {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var failed error
	w.Unlock()
	defer w.Lock()
	err = raw.Read(func(fd uintptr) bool {
		w.Lock()
		defer w.Unlock()
		n, failed = unix.Read(int(fd), buf)
		return !errors.Is(failed, unix.EAGAIN)
	})
	return n, errors.Join(err, failed)
}

func (w *watching) event(wd int32, mask uint32, name string) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return w.send("overflow", "", false)
	}
	path, ok := w.paths[wd]
	if !ok {
		return nil // from a directory that was moved away
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(w.paths, wd)
		return nil
	}
	dir := mask&unix.IN_ISDIR != 0
	if name == "" {
		if int(wd) != w.root {
			return nil // the parent's watch reports it
		}
		dir = true
	} else {
		path = join(path, name)
	}
	for _, is := range events {
		if mask&is.mask != 0 {
			return w.tell(is.kind, path, dir, name != "")
		}
	}
	return nil
}

// tell sends a change. For a directory below the root, it then updates the watches.
func (w *watching) tell(kind, path string, dir, below bool) error {
	if err := w.send(kind, path, dir); err != nil || !dir || !below || !w.Recursive {
		return err
	}
	switch kind {
	case "rename":
		w.forget(path)
	case "create":
		w.forget(path) // a directory that had the name before
		return w.add(path, true)
	}
	return nil
}

// forget ends the watches of a directory that was renamed or removed, and of those below it.
func (w *watching) forget(dir string) {
	for wd, path := range w.paths {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			delete(w.paths, wd)
			_, _ = unix.InotifyRmWatch(w.fd, uint32(wd)) // it may be gone
		}
	}
}

// add watches a directory and those below it. If tell is set, it reports their files as created, as
// they may have come before the watch.
func (w *watching) add(dir string, tell bool) error {
	if err := w.watchDir(dir); err != nil {
		return err
	}
	root, err := w.open(dir, dirFlags|unix.O_NOFOLLOW)
	if err != nil {
		return nil // gone or unreadable: nothing to report
	}
	defer root.close()
	var sent error // the peer's
	below := &walk{job: w.job, visit: func(e *entry) error {
		isDir := is(&e.st, unix.S_IFDIR)
		if tell {
			sent = w.send("create", e.path, isDir)
		}
		switch {
		case sent == nil && isDir && w.full && !tell:
			return fs.SkipAll
		case sent == nil && isDir:
			sent = w.watchDir(e.path)
		}
		return sent
	}}
	if err = below.below(root, 1); sent == nil && err != nil && !errors.Is(err, fs.SkipAll) {
		sent = w.overflow()
	}
	return sent
}

// watchDir watches a directory. It sends one overflow if there are too many.
func (w *watching) watchDir(dir string) error {
	if len(w.paths) >= maxWatches {
		return w.overflow()
	}
	wd, err := w.addWatch(dir, unix.IN_DONT_FOLLOW)
	if err == nil {
		if wd != w.root {
			w.paths[int32(wd)] = dir
		}
		return nil
	}
	if missing(err) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, fs.ErrPermission) {
		return nil // gone, replaced, or not accessible to this user
	}
	return w.overflow()
}

func (w *watching) addWatch(dir string, flags uint32) (wd int, err error) {
	err = again(dir, func() (err error) { wd, err = unix.InotifyAddWatch(w.fd, dir, watched|flags); return err })
	return wd, err
}

func (w *watching) overflow() error {
	if w.full {
		return nil
	}
	w.full = true
	if !w.begun {
		return nil
	}
	return w.send("overflow", "", false)
}
