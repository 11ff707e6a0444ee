package main

import (
	"errors"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// maxEntries is how many files one answer tells of, and how many names are held.
const maxEntries = 1_000_000

func listDir(c *conn, f *wire.File) (any, error) {
	if f.Depth < 0 {
		return nil, invalid("the depth %d is negative", f.Depth)
	}
	entries := 0
	return nil, walkDir(c, f, func(e *entry) error {
		if entries++; entries > maxEntries {
			return failed(wire.ClassExhausted, trim(string(f.Path)), "there are more than %d files", maxEntries)
		}
		if err := c.item(e.info()); err != nil {
			return err
		}
		if e.depth >= f.Depth {
			return fs.SkipDir
		}
		return nil
	})
}

// walkDir answers Ready and walks through what is below the operation's directory.
func walkDir(c *conn, f *wire.File, visit func(*entry) error) error {
	name := trim(string(f.Path))
	root, err := openAt(unix.AT_FDCWD, name, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer root.close()
	if err := c.ready(); err != nil {
		return err
	}
	w := &walk{pulse: pulse{c: c}, visit: visit}
	return w.below(root, name)
}

// walk goes through what is below a directory, sorted by name, a directory before what
// is in it. It follows no links, and leaves alone what is gone when it comes to it,
// directories that the kernel makes up (/proc), and names too long to be asked for.
type walk struct {
	pulse
	// visit is told of each; fs.SkipDir keeps out of a directory.
	visit func(*entry) error
	// strict makes an error of what can't be read; else it is left out.
	strict bool
	held   int // names
}

// entry is a file in a walk.
type entry struct {
	dir   fileDesc // that it is in
	name  string
	path  string
	depth int // 1 is the first directory's own
	st    unix.Stat_t
}

func (e *entry) info() *wire.FileInfo {
	info := infoOf(e.path, &e.st)
	if is(&e.st, unix.S_IFLNK) {
		target, _ := readLink(int(e.dir), e.name, e.path) // it may be gone
		info.Target = []byte(target)
	}
	return info
}

// below walks. The error is visit's, or of what could not be read.
func (w *walk) below(dir fileDesc, path string) error {
	st, err := dir.stat(path)
	if err != nil {
		return err
	}
	return w.into(dir, path, st.Dev, 1)
}

func (w *walk) into(dir fileDesc, path string, device uint64, depth int) error {
	names, err := readNames(dir, path, maxEntries-w.held)
	if missing(err) && depth > 1 { // removed since it was opened
		return nil
	}
	if err != nil {
		return err
	}
	w.held += len(names)
	defer func() { w.held -= len(names) }()
	slices.Sort(names)
	for _, name := range names {
		if err := w.beat(); err != nil {
			return err
		}
		e := &entry{dir: dir, name: name, path: join(path, name), depth: depth}
		if err := w.one(e, device); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) one(e *entry, device uint64) error {
	if len(e.path) > maxPath {
		return w.omit(at(e.path, unix.ENAMETOOLONG))
	}
	var err error
	if e.st, err = statAt(int(e.dir), e.name, e.path, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return w.omit(err)
	}
	err = w.visit(e)
	if errors.Is(err, fs.SkipDir) {
		return nil
	}
	if err != nil || !is(&e.st, unix.S_IFDIR) {
		return err
	}
	dir, err := openAt(int(e.dir), e.name, e.path, dirFlags, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // another by now
	}
	if err != nil {
		return w.omit(err)
	}
	defer dir.close()
	if e.st.Dev != device && dir.virtual() {
		return nil
	}
	return w.into(dir, e.path, e.st.Dev, e.depth+1)
}

// omit is nil for an error that doesn't end the walk.
func (w *walk) omit(err error) error {
	if missing(err) || !w.strict && (errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENAMETOOLONG)) {
		return nil
	}
	return err
}

// readNames reads a directory's names. If there are more than most, these come with the
// error.
func readNames(dir fileDesc, full string, most int) ([]string, error) {
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	var names []string
	for {
		n := 0
		err := again(func() (err error) { n, err = unix.ReadDirent(int(dir), buf[:]); return err })
		if err != nil || n <= 0 {
			return names, at(full, err)
		}
		for rest := buf[:n]; len(rest) > 0; {
			var used int
			used, _, names = unix.ParseDirent(rest, -1, names)
			rest = rest[used:]
		}
		if len(names) > most {
			return names[:most], failed(wire.ClassExhausted, full, "it has too many files for one operation, which holds %d names", maxEntries)
		}
	}
}
