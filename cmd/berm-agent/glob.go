package main

import (
	"errors"
	"io/fs"
	"path"
	"strings"

	"github.com/bermhq/berm/runtime/agent/wire"
)

const globLimit = 10_000

func globFiles(c *conn, f *wire.File) (any, error) {
	pattern, err := parseGlob(f.Pattern)
	if err != nil {
		return nil, err
	}
	limit, err := bound(f.Limit, globLimit, maxEntries)
	if err != nil {
		return nil, err
	}
	found := 0
	states := []places{pattern.start()} // of the directories that lead to the entry
	err = walkDir(c, f, func(e *entry) error {
		here := pattern.next(states[e.depth-1], e.name)
		if pattern.matched(here) {
			if err := c.item(e.info()); err != nil {
				return err
			}
			if found++; found == limit {
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
	return nil, err
}

// bound is a limit, or its value when there is none.
func bound(limit, without, most int) (int, error) {
	switch {
	case limit < 0 || limit > most:
		return 0, invalid("the limit %d is out of range: 1 to %d, or 0 for %d", limit, most, without)
	case limit == 0:
		return without, nil
	}
	return limit, nil
}

// glob is a pattern of paths: elements as path.Match has them, or ** for any number of
// directories.
type glob []string

// places are the elements up to which a path has matched, a bit for each. What takes a
// path element takes time in proportion to the elements, whatever the pattern.
type places uint64

const (
	anyDirs      = "**"
	maxElements  = 63
	maxGlobBytes = 4096
)

func parseGlob(text string) (glob, error) {
	switch {
	case strings.Trim(text, "/") == "":
		return nil, invalid("the pattern is empty")
	case text[0] == '/':
		return nil, invalid("the pattern %s is absolute: it is of paths below the directory", quote(text))
	case len(text) > maxGlobBytes:
		return nil, invalid("the pattern has %d bytes, at most %d", len(text), maxGlobBytes)
	}
	var g glob
	for element := range strings.SplitSeq(text, "/") {
		if element == "" || element == "." || element == anyDirs && len(g) > 0 && g[len(g)-1] == anyDirs {
			continue
		}
		if element == ".." {
			return nil, invalid("the pattern %s leads out of the directory", quote(text))
		}
		if _, err := path.Match(element, ""); err != nil {
			return nil, invalid("the pattern %s: %s", quote(text), err)
		}
		g = append(g, element)
	}
	if len(g) > 0 && g[len(g)-1] == anyDirs { // all that is in the directory, but not itself
		g = append(g, "*")
	}
	if len(g) == 0 || len(g) > maxElements {
		return nil, invalid("the pattern %s has %d elements: from 1 to %d are allowed", quote(text), len(g), maxElements)
	}
	return g, nil
}

func (g glob) start() places { return g.reach(0, 0) }

// reach adds a place, and those after it that need nothing.
func (g glob) reach(p places, i int) places {
	p |= 1 << i
	if i < len(g) && g[i] == anyDirs {
		p |= 1 << (i + 1) // no two follow each other
	}
	return p
}

// next are the places after one more element of a path.
func (g glob) next(p places, name string) (after places) {
	for i, element := range g {
		if p&(1<<i) == 0 {
			continue
		}
		if element == anyDirs {
			after = g.reach(after, i)
		} else if ok, _ := path.Match(element, name); ok { // parseGlob has tried it
			after = g.reach(after, i+1)
		}
	}
	return after
}

func (g glob) matched(p places) bool { return p&(1<<len(g)) != 0 }

func (g glob) goesOn(p places) bool { return p&(1<<len(g)-1) != 0 }
