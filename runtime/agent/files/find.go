package files

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// maxEntries bounds how many files an answer lists, and how many names a walk holds.
const maxEntries = 1_000_000

func (j *job) list() error {
	entries := 0
	return j.walkDir(func(e *entry) error {
		if entries++; entries > maxEntries {
			return failed(wire.ClassExhausted, j.name, "there are more than %d files", maxEntries)
		}
		if err := j.Item(e.info()); err != nil {
			return err
		}
		if e.depth >= j.Depth {
			return fs.SkipDir
		}
		return nil
	})
}

// walkDir begins the operation, and visits everything below its directory.
func (j *job) walkDir(visit func(*entry) error) error {
	dir, err := j.open(j.name, dirFlags)
	if err != nil {
		return err
	}
	defer dir.close()
	if err := j.Ready(); err != nil {
		return err
	}
	w := &walk{job: j, visit: visit}
	return w.below(dir, 1)
}

// walk visits everything below a directory, sorted by name, and a directory before its
// content. It follows no links. It leaves out files that are gone by then and paths that are
// too long, and doesn't enter file systems that the kernel generates, such as /proc.
type walk struct {
	*job
	// visit gets each file; fs.SkipDir keeps out of a directory, fs.SkipAll ends the walk.
	visit func(*entry) error
	// leave gets each directory when the walk has been through it. It may be nil.
	leave func(*entry) error
	// strict makes unreadable files and long paths an error, rather than leave them out.
	strict bool
	held   int // names in memory
}

// below visits everything below a directory.
func (w *walk) below(dir *file, depth int) error {
	names, err := dir.names(maxEntries - w.held)
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
		e := dir.at(name)
		e.depth = depth
		err := error(&fs.PathError{Op: "access", Path: e.path, Err: unix.ENAMETOOLONG})
		if len(e.path) <= maxPath {
			err = e.stat()
		}
		if err != nil {
			err = w.omit(err)
		} else {
			err = w.tree(e)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// tree visits an entry, and what is below it.
func (w *walk) tree(e *entry) error {
	err := w.visit(e)
	if errors.Is(err, fs.SkipDir) {
		return nil
	}
	if err != nil || !is(&e.st, unix.S_IFDIR) {
		return err
	}
	dir, err := e.open(dirFlags, 0)
	switch {
	case errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP): // replaced meanwhile
		err = nil
	case err != nil:
		err = w.omit(err)
	default:
		defer dir.close()
		if e.depth == 0 || e.st.Dev == e.dir.st.Dev || !dir.virtual() {
			err = w.below(dir, e.depth+1)
		}
	}
	if err == nil && w.leave != nil {
		err = w.leave(e)
	}
	return err
}

// omit returns nil for an error that doesn't end the walk.
func (w *walk) omit(err error) error {
	if missing(err) || !w.strict && (errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENAMETOOLONG)) {
		return nil
	}
	return err
}

func (j *job) glob() error {
	pattern, err := parseGlob(j.Pattern)
	if err != nil {
		return err
	}
	left := j.Limit
	states := []places{pattern.start()} // of the directories that lead to the entry
	err = j.walkDir(func(e *entry) error {
		here := pattern.next(states[e.depth-1], e.name)
		if pattern.matched(here) {
			if err := j.Item(e.info()); err != nil {
				return err
			}
			if left--; left == 0 {
				return fs.SkipAll
			}
		}
		if !pattern.goesOn(here) {
			return fs.SkipDir
		}
		states = append(states[:e.depth], here)
		return nil
	})
	if errors.Is(err, fs.SkipAll) {
		err = nil
	}
	return err
}

// glob is a pattern of paths: elements as path.Match has them, or ** for any number of
// directories.
type glob []string

// places is a set of bits: bit i is set if a path has matched the pattern's first i elements. So
// matching one more element of the path takes time linear in the pattern's elements.
type places uint64

const (
	anyDirs     = "**"
	maxElements = 63
)

func parseGlob(text string) (glob, error) {
	switch {
	case strings.Trim(text, "/") == "":
		return nil, Invalid("the pattern is empty")
	case text[0] == '/':
		return nil, Invalid("the pattern %s is absolute: it is of paths below the directory", Quote(text))
	}
	var g glob
	for element := range strings.SplitSeq(text, "/") {
		if element == "" || element == "." || element == anyDirs && len(g) > 0 && g[len(g)-1] == anyDirs {
			continue
		}
		if element == ".." {
			return nil, Invalid("the pattern %s leads out of the directory", Quote(text))
		}
		if _, err := path.Match(element, ""); err != nil {
			return nil, Invalid("the pattern %s: %s", Quote(text), err)
		}
		g = append(g, element)
	}
	if len(g) > 0 && g[len(g)-1] == anyDirs { // everything below the directory, but not the directory itself
		g = append(g, "*")
	}
	if len(g) == 0 || len(g) > maxElements {
		return nil, Invalid("the pattern %s has %d elements: from 1 to %d are allowed", Quote(text), len(g), maxElements)
	}
	return g, nil
}

func (g glob) start() places { return g.reach(0, 0) }

// reach adds place i. If element i is **, which also matches no directory, it adds the place after it.
func (g glob) reach(p places, i int) places {
	p |= 1 << i
	if i < len(g) && g[i] == anyDirs {
		p |= 1 << (i + 1) // parseGlob leaves no two in a row
	}
	return p
}

// next returns the places after one more element of a path.
func (g glob) next(p places, name string) (after places) {
	for i, element := range g {
		if p&(1<<i) == 0 {
			continue
		}
		if element == anyDirs {
			after = g.reach(after, i)
		} else if ok, _ := path.Match(element, name); ok { // parseGlob has checked it
			after = g.reach(after, i+1)
		}
	}
	return after
}

func (g glob) matched(p places) bool { return p&(1<<len(g)) != 0 }

func (g glob) goesOn(p places) bool { return p&(1<<len(g)-1) != 0 }

const (
	maxLine    = 1 << 20 // bytes of a line that are searched
	maxText    = 4 << 10 // bytes of a line that are sent
	binaryHead = 8 << 10 // bytes in which a text file has no NUL
)

func (j *job) search() error {
	match, err := j.matcher()
	if err != nil {
		return err
	}
	root, err := j.open(j.name, dirFlags)
	isDir := err == nil
	if errors.Is(err, unix.ENOTDIR) {
		root, err = j.openRegular(j.name)
	}
	if err != nil {
		return err
	}
	defer root.close()
	if root.virtual() {
		return failed(wire.ClassInvalid, j.name, "the kernel makes up what is there as it is read: it can't be searched")
	}
	if err := j.Ready(); err != nil {
		return err
	}
	s := &search{job: j, match: match, left: j.Limit, lines: bufio.NewReaderSize(nil, wire.MaxData)}
	if isDir {
		err = (&walk{job: j, visit: s.visit}).below(root, 1)
	} else if s.wanted(path.Base(j.name)) {
		err = s.file(root)
	}
	if errors.Is(err, fs.SkipAll) {
		err = nil
	}
	return err
}

// matcher returns a function that reports whether a line matches, in time linear in its
// length.
func (j *job) matcher() (func([]byte) bool, error) {
	text := j.Pattern
	if j.Literal && !j.IgnoreCase {
		return func(line []byte) bool { return bytes.Contains(line, []byte(text)) }, nil
	}
	if j.Literal {
		text = regexp.QuoteMeta(text)
	}
	// Compile the pattern on its own first, as it could close the group below.
	re, err := regexp.Compile(text)
	if err == nil && j.IgnoreCase {
		re, err = regexp.Compile("(?i:" + text + ")")
	}
	if err != nil {
		return nil, Invalid("the pattern %s: %s", Quote(j.Pattern), err)
	}
	return re.Match, nil
}

// search is a search under way.
type search struct {
	*job
	match func([]byte) bool
	left  int // matches
	lines *bufio.Reader
	long  []byte // a line that the reader's buffer is too small for
	gone  error  // set if the peer has hung up
}

func (s *search) wanted(name string) bool {
	ok, _ := path.Match(s.Include, name) // it was tried
	return ok || s.Include == ""
}

func (s *search) visit(e *entry) error {
	if !is(&e.st, unix.S_IFREG) || !s.wanted(e.name) {
		return nil
	}
	f, err := e.openRegular()
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return err
	}
	if err != nil {
		return nil // gone, replaced, or not readable by this user
	}
	defer f.close()
	return s.file(f)
}

// file searches a file, up to the size that it had when it was opened.
func (s *search) file(f *file) error {
	s.lines.Reset(io.LimitReader(f, f.st.Size))
	if head, _ := s.lines.Peek(binaryHead); bytes.IndexByte(head, 0) >= 0 {
		return nil
	}
	for number := 1; ; number++ {
		line, err := s.line()
		if err != nil {
			return s.gone // nil at the end, or where the file can't be read any further
		}
		if !s.match(line) {
			continue
		}
		if err := s.Item(&wire.FileMatch{Path: []byte(f.path), Line: number, Text: wire.Cut(line, maxText)}); err != nil {
			return err
		}
		if s.left--; s.left == 0 {
			return fs.SkipAll
		}
	}
}

// line reads a line without its end, cut to maxLine bytes. After the last line, the error is
// io.EOF.
func (s *search) line() ([]byte, error) {
	s.long = s.long[:0]
	for {
		if s.gone = s.beat(); s.gone != nil {
			return nil, s.gone
		}
		part, more, err := s.lines.ReadLine()
		if err != nil && len(s.long) == 0 {
			return nil, err
		}
		if err == nil && !more && len(s.long) == 0 {
			return part, nil
		}
		s.long = append(s.long, part[:min(len(part), maxLine-len(s.long))]...)
		if !more {
			return s.long, nil
		}
	}
}
