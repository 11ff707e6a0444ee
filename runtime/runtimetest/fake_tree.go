package runtimetest

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// fakeFile is a file in the tree of a container. It belongs to f.mu.
type fakeFile struct {
	mode   fs.FileMode
	time   time.Time
	data   []byte // never changed in place
	target string // of a symbolic link
	files  map[string]*fakeFile
}

func newDir(mode fs.FileMode) *fakeFile {
	return &fakeFile{mode: fs.ModeDir | mode, time: time.Now(), files: map[string]*fakeFile{}}
}

// newTree is what a container has at first: /etc, /home, /root, /tmp, and the
// directories that its spec names.
func newTree(spec runtime.Spec) *fakeFile {
	root := newDir(0o755)
	dirs := []string{"/etc", "/home", "/root", "/tmp", spec.WorkingDir}
	for _, m := range spec.Mounts {
		dirs = append(dirs, m.Target)
	}
	for _, t := range spec.Tmpfs {
		dirs = append(dirs, t.Target)
	}
	for _, dir := range dirs {
		at := root
		for name := range strings.SplitSeq(strings.Trim(path.Clean("/"+dir), "/"), "/") {
			if name == "" {
				continue
			}
			if at.files[name] == nil {
				at.files[name] = newDir(0o755)
			}
			at = at.files[name]
		}
	}
	root.files["tmp"].mode = fs.ModeDir | fs.ModeSticky | 0o777
	return root
}

// fakePlace is where a path leads: a name in a directory, and what is there, if anything.
type fakePlace struct {
	dir  *fakeFile // nil for the root
	name string
	path string // without links on the way
	file *fakeFile
}

const maxLinks = 40

// find follows a path. The error is about a directory on the way.
func (f *fakeFile) find(name string, follow bool) (fakePlace, error) {
	if !path.IsAbs(name) || len(name) > 4096 || strings.ContainsRune(name, 0) {
		return fakePlace{}, runtime.Invalid("%.100q is no absolute path", name)
	}
	above := []fakePlace{{path: "/", file: f}}
	todo := strings.Split(name, "/")
	for links := 0; len(todo) > 0; {
		step := todo[0]
		todo = todo[1:]
		at := above[len(above)-1]
		switch {
		case at.file == nil:
			return fakePlace{}, fmt.Errorf("%s: %w", at.path, errdefs.ErrNotFound)
		case !at.file.mode.IsDir():
			return fakePlace{}, runtime.Invalid("%s is no directory", at.path)
		case step == "" || step == ".":
			continue
		case step == "..":
			above = above[:max(1, len(above)-1)]
			continue
		}
		next := fakePlace{dir: at.file, name: step, path: path.Join(at.path, step), file: at.file.files[step]}
		if next.file != nil && next.file.mode&fs.ModeSymlink != 0 && (follow || len(todo) > 0) {
			if links++; links > maxLinks {
				return fakePlace{}, runtime.Invalid("%s: too many links", name)
			}
			if path.IsAbs(next.file.target) {
				above = above[:1]
			}
			todo = append(strings.Split(next.file.target, "/"), todo...)
			continue
		}
		above = append(above, next)
	}
	return above[len(above)-1], nil
}

// there is find for what has to be there.
func (f *fakeFile) there(name string, follow bool) (fakePlace, error) {
	at, err := f.find(name, follow)
	if err == nil && at.file == nil {
		err = fmt.Errorf("%s: %w", name, errdefs.ErrNotFound)
	}
	return at, err
}

// mkdir makes a directory with those above it, and finds one that is there.
func (f *fakeFile) mkdir(name string, mode fs.FileMode) error {
	for i := 1; i <= len(name); i++ {
		if i < len(name) && name[i] != '/' {
			continue
		}
		at, err := f.find(name[:i], true)
		switch {
		case err != nil:
			return err
		case at.file == nil:
			at.put(newDir(mode))
		case !at.file.mode.IsDir():
			return runtime.Invalid("%s is no directory", name[:i])
		}
	}
	return nil
}

func (p fakePlace) put(f *fakeFile) {
	p.dir.files[p.name] = f
	p.dir.time = f.time
}

// info is what a file is, to who asked for it by a name.
func (f *fakeFile) info(name string, spec runtime.Spec) runtime.FileInfo {
	out := runtime.FileInfo{Path: name, Size: int64(len(f.data)), Mode: f.mode, ModTime: f.time, Target: f.target}
	uid, gid, _ := strings.Cut(spec.User, ":")
	out.UID, _ = strconv.Atoi(uid) // a name is root here
	out.GID, _ = strconv.Atoi(gid)
	if f.target != "" {
		out.Size = int64(len(f.target))
	}
	return out
}

// walk goes through what is below a directory, sorted by name, a directory before what
// is in it.
func (f *fakeFile) walk(name string, depth int, visit func(string, *fakeFile)) {
	for _, base := range slices.Sorted(maps.Keys(f.files)) {
		file := f.files[base]
		visit(path.Join(name, base), file)
		if file.mode.IsDir() && depth > 1 {
			file.walk(path.Join(name, base), depth-1, visit)
		}
	}
}

// clone copies a tree.
func (f *fakeFile) clone() *fakeFile {
	out := *f
	out.files = nil
	if f.files != nil {
		out.files = map[string]*fakeFile{}
		for name, file := range f.files {
			out.files[name] = file.clone()
		}
	}
	return &out
}

// matchGlob matches a path's elements with a pattern's, of which ** is any number.
func matchGlob(pattern, name []string) bool {
	if len(pattern) == 0 {
		return len(name) == 0
	}
	if pattern[0] == "**" {
		for i := range len(name) + 1 {
			if matchGlob(pattern[1:], name[i:]) {
				return true
			}
		}
		return false
	}
	if len(name) == 0 {
		return false
	}
	ok, err := path.Match(pattern[0], name[0])
	return ok && err == nil && matchGlob(pattern[1:], name[1:])
}
