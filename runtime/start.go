package runtime

import (
	"context"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Starter is the ability to start a program in a running container, with a byte stream
// for its standard input and output.
type Starter interface {
	// Start starts a program. Its working directory is "/", its environment the
	// container's own.
	//
	// NotFound when the container doesn't exist, or has no such executable program.
	// FailedPrecondition when the container isn't running. ErrNoRoom when it can't start
	// another process. When Start returns an error, the program never started, or its
	// standard input has ended, and so it must end.
	Start(ctx context.Context, id string, p Program) (Stdio, error)
}

// Program is a program that an engine starts in a running container. It must end when its
// standard input does, as an engine doesn't kill it.
type Program struct {
	Command []string // mandatory: the absolute path of the program, and its arguments
	User    string   // "uid[:gid]"; empty is the container's own
}

// Stdio is the byte stream of a started program: Read reads its standard output, Write
// writes to its standard input. Read returns io.EOF once every process that has the output
// open has ended. It returns another error once the container or the engine has ended.
type Stdio interface {
	io.ReadWriteCloser
	// Close ends the program's input and output. It doesn't wait for the program. The
	// caller must always call it.
	Close() error
	// Wait waits for the program's end, and returns its exit code and the first 4 KiB of
	// its standard error. The code is 128+n after signal n. When the container ended first,
	// Wait returns code 137, or FailedPrecondition and ErrInterrupted. Another goroutine
	// must read the output meanwhile.
	Wait(ctx context.Context) (code int, stderr string, err error)
}

// CheckProgram returns an InvalidArgument for a program that is invalid for every engine.
// It is for backends.
func CheckProgram(p Program) error {
	switch {
	case len(p.Command) == 0 || !path.IsAbs(p.Command[0]):
		return Invalid("the program's path is missing or not absolute")
	case slices.ContainsFunc(p.Command, func(s string) bool { return strings.ContainsRune(s, 0) }):
		return Invalid("the command has a zero byte")
	}
	return nil
}

// BlamesProgram reports whether an OCI runtime refused a command because its program is
// missing, or can't be executed. It searches the error's text, as nothing else tells. It is
// for backends.
func BlamesProgram(said, program string) bool {
	named := slices.ContainsFunc([]string{strconv.Quote(program), "`" + program + "`", "exec " + program + ":"}, func(name string) bool {
		return strings.Contains(said, name)
	})
	said = strings.ToLower(said)
	if strings.Contains(said, "open executable: ") { // crun's words, which don't name it
		return true
	}
	return named && slices.ContainsFunc([]string{
		"not found", "no such file or directory", "permission denied", "format error", "is a directory", "not a directory",
		"argument list too long", "text file busy", "too many levels of symbolic links", "file name too long",
	}, func(why string) bool { return strings.Contains(said, why) })
}

// Head is for backends. It keeps the first 4 KiB of what is written to it, and drops the
// rest. It may be used by many goroutines at once.
type Head struct {
	mu   sync.Mutex
	kept []byte
}

const maxHead = 4 << 10

// Write never fails.
func (h *Head) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.kept = append(h.kept, p[:min(len(p), maxHead-len(h.kept))]...)
	return len(p), nil
}

// String returns the kept text.
func (h *Head) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return string(h.kept)
}
