package runtime

import (
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// FileVerb names an operation on files.
type FileVerb string

// The operations. FileIO says which input and answers each of them has.
const (
	FileStat FileVerb = "stat" // follows a link to its target
	FileRead FileVerb = "read" // a regular file: Offset, Length
	// FileWrite replaces a file, whole or not at all: it writes a new file beside it, and
	// renames that. Or it appends to the file; a failed append isn't undone. Mode, Parents,
	// Append, NoClash.
	FileWrite FileVerb = "write"
	// FileList lists the files in a directory, sorted by name, and in the directories below it down to
	// Depth.
	FileList  FileVerb = "list"
	FileMkdir FileVerb = "mkdir" // Mode, Parents
	// FileMove and FileCopy replace a file at To only with Replace, and never a directory that isn't
	// empty. FileCopy takes whole trees.
	FileMove   FileVerb = "move"
	FileCopy   FileVerb = "copy"
	FileRemove FileVerb = "remove" // a directory that isn't empty only with Recursive
	// FileGlob finds paths below a directory by Pattern, in which ** stands for any
	// number of directories; at most Limit.
	FileGlob FileVerb = "glob"
	// FileSearch finds lines in regular files below a path: Pattern, Literal,
	// IgnoreCase, Include, Limit.
	FileSearch FileVerb = "search"
	// FileTarRead packs a file or tree, under its base name. FileTarWrite unpacks into
	// a directory. It never writes outside, whatever links the archive or the directory
	// has. After an error, what it has unpacked stays.
	FileTarRead  FileVerb = "tar_read"
	FileTarWrite FileVerb = "tar_write"
	// FileWatch sends changes below a directory until ctx ends, which is no error.
	FileWatch FileVerb = "watch" // Recursive
)

// FileOp is an operation on files. Fields that its verb doesn't name are ignored.
type FileOp struct {
	Verb FileVerb
	Path string // absolute in the container, resolved there
	To   string // of FileMove and FileCopy, like Path

	Offset int64
	Length int64 // -1 is to the end

	Mode    fs.FileMode // permissions of a new file or directory; 0 is 0644 or 0755
	Parents bool        // makes missing parents; FileMkdir then accepts an existing Path
	Append  bool
	NoClash bool // AlreadyExists if the file exists

	Replace   bool
	Recursive bool

	Depth      int // 1 is the directory alone
	Limit      int // of FileSearch, 0 is 1,000
	Pattern    string
	Literal    bool // Pattern is a text rather than a regular expression of Go's
	IgnoreCase bool
	Include    string // of base names, as path.Match has it; empty is all
}

// FileIO holds the input of an operation, and the receivers of its answers. An error of one of them
// ends the operation.
type FileIO struct {
	In  io.Reader // FileWrite, FileTarWrite
	Out io.Writer // FileRead, FileTarRead

	// Info gets each file of FileList and FileGlob, the one of FileStat, the one of
	// FileWrite when it is written, and that of FileRead before its first byte. Only
	// lists need one.
	Info  func(FileInfo) error
	Match func(FileMatch) error // FileSearch
	// Event gets the changes of FileWatch. The first is a FileReady: the watch sees all changes after
	// it.
	Event func(FileEvent) error
}

// Bounds of a FileOp.
const (
	MaxPath    = 4096 // bytes
	MaxFound   = 10_000
	maxPattern = 4096 // bytes
	maxDepth   = 100

	usualFound = 1000
)

// FileOpError is the error of an invalid FileOp. Its class is InvalidArgument.
type FileOpError struct {
	Field   string
	Message string
}

func (e *FileOpError) Error() string { return e.Field + ": " + e.Message }

// Unwrap returns the class.
func (e *FileOpError) Unwrap() error { return errdefs.ErrInvalidArgument }

// Adds reports whether the operation adds to the files.
func (op *FileOp) Adds() bool {
	switch op.Verb {
	case FileWrite, FileMkdir, FileCopy, FileTarWrite:
		return true
	}
	return false
}

// Check returns a *FileOpError unless the operation can be done. It sets the usual Limit
// of a FileSearch that has none.
func (op *FileOp) Check() error {
	wrong := func(field, format string, args ...any) error {
		return &FileOpError{Field: field, Message: fmt.Sprintf(format, args...)}
	}
	switch op.Verb {
	case FileStat, FileRemove, FileTarRead, FileTarWrite, FileWatch:
	case FileRead:
		if op.Offset < 0 || op.Length < -1 {
			return wrong("range", "must not be negative")
		}
	case FileWrite, FileMkdir:
		if op.Mode&^fs.ModePerm != 0 {
			return wrong("mode", "must be permissions, from 0000 to 0777")
		}
		if op.Verb == FileWrite && op.Append && op.NoClash {
			return wrong("append", "can't go together with a file that mustn't be there")
		}
	case FileList:
		if op.Depth < 1 || op.Depth > maxDepth {
			return wrong("depth", "must be from 1 to %d", maxDepth)
		}
	case FileMove, FileCopy:
		if !validPath(op.To) {
			return wrong("to", "must be absolute, at most %d bytes, without NUL", MaxPath)
		}
	case FileGlob:
		if !validPattern(op.Pattern) || op.Pattern == "" || strings.ContainsRune(op.Pattern, 0) {
			return wrong("pattern", "must be a pattern of *, ?, [a-z] and **, at most %d bytes", maxPattern)
		}
		if op.Limit < 1 || op.Limit > MaxFound {
			return wrong("limit", "must be from 1 to %d", MaxFound)
		}
	case FileSearch:
		if op.Pattern == "" || len(op.Pattern) > maxPattern {
			return wrong("pattern", "must have 1 to %d bytes", maxPattern)
		}
		if _, err := regexp.Compile(op.Pattern); err != nil && !op.Literal {
			return wrong("pattern", "must be in the syntax of Go's regexp, unless literal")
		}
		if !validPattern(op.Include) {
			return wrong("include", "must be a pattern of *, ? and [a-z], at most %d bytes", maxPattern)
		}
		if op.Limit == 0 {
			op.Limit = usualFound
		}
		if op.Limit < 1 || op.Limit > MaxFound {
			return wrong("limit", "must be from 1 to %d", MaxFound)
		}
	default:
		return wrong("verb", "%q is unknown", op.Verb)
	}
	if !validPath(op.Path) {
		return wrong("path", "must be absolute, at most %d bytes, without NUL", MaxPath)
	}
	return nil
}

func validPath(name string) bool {
	return strings.HasPrefix(name, "/") && len(name) <= MaxPath && !strings.ContainsRune(name, 0)
}

func validPattern(pattern string) bool {
	_, err := path.Match(pattern, "")
	return err == nil && len(pattern) <= maxPattern
}

// FileInfo describes a file.
type FileInfo struct {
	Path    string // absolute; bytes as the container has them
	Size    int64
	Mode    fs.FileMode // type and permissions
	ModTime time.Time
	UID     int
	GID     int
	Target  string // of a symbolic link, in lists only
}

// FileMatch is a line that a search found.
type FileMatch struct {
	Path string
	Line int    // from 1
	Text string // of the line, at most 4 KiB
}

// FileReady is the type of the first FileEvent. It has no path.
const FileReady = "ready"

// FileEvent is a change of a file.
type FileEvent struct {
	Type string // FileReady, "create", "modify", "remove", "rename", "attrib", or "overflow": some were lost
	Path string
	Dir  bool
}
