package main

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"path"
	"regexp"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	searchLimit     = 1000
	maxSearchLimit  = 10_000
	maxSearchBytes  = 16 << 10 // of a pattern
	maxLine         = 1 << 20  // up to here it is looked at
	maxText         = 4 << 10  // of a line that is sent
	binaryHead      = 8 << 10  // a file with a NUL here isn't text
	searchReadBytes = wire.MaxData
)

func searchFiles(c *conn, f *wire.File) (any, error) {
	s := &search{include: f.Include}
	var err error
	if s.match, err = matcher(f); err != nil {
		return nil, err
	}
	if _, err := path.Match(f.Include, ""); err != nil {
		return nil, invalid("the pattern %s: %s", quote(f.Include), err)
	}
	if s.left, err = bound(f.Limit, searchLimit, maxSearchLimit); err != nil {
		return nil, err
	}
	name := trim(string(f.Path))
	st, err := statAt(unix.AT_FDCWD, name, name, 0)
	if err != nil {
		return nil, err
	}
	var root fileDesc
	if is(&st, unix.S_IFDIR) {
		root, err = openAt(unix.AT_FDCWD, name, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	} else {
		root, st, err = openRegular(unix.AT_FDCWD, name, name, 0)
	}
	if err != nil {
		return nil, err
	}
	defer root.close()
	if root.virtual() {
		return nil, failed(wire.ClassInvalid, name, "the kernel makes up what is there as it is read: it can't be searched")
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	s.walk = walk{pulse: pulse{c: c}, visit: s.visit}
	s.lines = bufio.NewReaderSize(nil, searchReadBytes)
	if is(&st, unix.S_IFDIR) {
		err = s.below(root, name)
	} else if s.wanted(path.Base(name)) {
		err = s.file(root, name, st.Size)
	}
	if errors.Is(err, fs.SkipAll) {
		err = nil
	}
	return nil, err
}

// matcher is whether a line is one of those that are looked for. It takes time in
// proportion to the line.
func matcher(f *wire.File) (func([]byte) bool, error) {
	text := f.Pattern
	if len(text) > maxSearchBytes {
		return nil, invalid("the pattern has %d bytes, at most %d", len(text), maxSearchBytes)
	}
	if f.Literal && !f.IgnoreCase {
		return func(line []byte) bool { return bytes.Contains(line, []byte(text)) }, nil
	}
	if f.Literal {
		text = regexp.QuoteMeta(text)
	}
	// On its own: brackets in it could end others around it.
	re, err := regexp.Compile(text)
	if err == nil && f.IgnoreCase {
		re, err = regexp.Compile("(?i:" + text + ")")
	}
	if err != nil {
		return nil, invalid("the pattern %s: %s", quote(f.Pattern), err)
	}
	return re.Match, nil
}

// search is a search under way.
type search struct {
	walk
	match   func([]byte) bool
	include string
	left    int // matches
	lines   *bufio.Reader
	long    []byte // a line that the reader's buffer is too small for
}

func (s *search) wanted(name string) bool {
	if s.include == "" {
		return true
	}
	ok, _ := path.Match(s.include, name) // it was tried
	return ok
}

func (s *search) visit(e *entry) error {
	if !is(&e.st, unix.S_IFREG) || !s.wanted(e.name) {
		return nil
	}
	fd, st, err := openRegular(int(e.dir), e.name, e.path, unix.O_NOFOLLOW)
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return err
	}
	if err != nil {
		return nil // gone, another by now, or not this user's to read
	}
	defer fd.close()
	return s.file(fd, e.path, st.Size)
}

// file looks through a file, up to where it ended at first.
func (s *search) file(fd fileDesc, name string, size int64) error {
	s.lines.Reset(io.LimitReader(fd, size))
	if head, _ := s.lines.Peek(binaryHead); bytes.IndexByte(head, 0) >= 0 {
		return nil
	}
	for number := 1; ; number++ {
		line, err := s.line()
		if errors.Is(err, errGone) {
			return err
		}
		if err != nil {
			return nil // the end, or a file that can't be read any further
		}
		if !s.match(line) {
			continue
		}
		if err := s.c.item(&wire.FileMatch{Path: []byte(name), Line: number, Text: cut(line)}); err != nil {
			return err
		}
		if s.left--; s.left == 0 {
			return fs.SkipAll
		}
	}
}

// line reads a line, without its end, and of one that is too long only the beginning.
// The error is io.EOF when there is none.
func (s *search) line() ([]byte, error) {
	if err := s.beat(); err != nil {
		return nil, err
	}
	line, err := s.lines.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		s.long = s.long[:0]
		for errors.Is(err, bufio.ErrBufferFull) {
			if err := s.beat(); err != nil {
				return nil, err
			}
			s.long = append(s.long, line[:min(len(line), maxLine-len(s.long))]...)
			line, err = s.lines.ReadSlice('\n')
		}
		s.long = append(s.long, line[:min(len(line), maxLine-len(s.long))]...)
		line = s.long
	}
	if err != nil && len(line) == 0 {
		return nil, err
	}
	line = bytes.TrimSuffix(line, []byte("\n"))
	return bytes.TrimSuffix(line, []byte("\r")), nil
}

// cut is the beginning of a line, with no half of a character at its end.
func cut(line []byte) []byte {
	if len(line) <= maxText {
		return line
	}
	end := maxText
	for end > maxText-utf8.UTFMax && !utf8.RuneStart(line[end]) {
		end--
	}
	return line[:end]
}
