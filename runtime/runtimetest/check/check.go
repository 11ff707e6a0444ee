// Package check ends tests whose steps fail.
package check

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

// Must ends the test if one of the errors isn't nil.
func Must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// Value returns what a call returned. It ends the test if that has an error.
func Value[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		Must(t, err)
		return v
	}
}

// Write writes a file that only its owner can read. It ends the test if it can't.
func Write(t testing.TB, path, content string) {
	t.Helper()
	Must(t, os.WriteFile(path, []byte(content), 0o600))
}

// EmptyDir fails the test if something is in a directory, or if there is none.
func EmptyDir(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left in %s: %v, %v", dir, entries, err)
	}
}

// Eventually waits for what another goroutine is about to do. It ends the test after 10,000
// looks, a millisecond apart.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 10_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("it never came to: %s", what)
}

// Step is a run of a program with what it should come to.
type Step struct {
	Args   string // split at blanks, but for a last part in single quotes
	Stdin  string
	Code   int      // the exit code
	Stdout []string // each in the output
	Stderr []string // each in the errors; none means that nothing is said
}

// Run runs the program that a function runs.
func (s Step) Run(t *testing.T, program func(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int)) {
	t.Helper()
	line, quoted, ok := strings.Cut(s.Args, " '")
	args := strings.Fields(line)
	if ok {
		args = append(args, strings.TrimSuffix(quoted, "'"))
	}
	stdout, stderr, code := program(t, s.Stdin, args...)
	if code != s.Code {
		t.Errorf("%s: exit code %d, want %d", s.Args, code, s.Code)
	}
	for _, want := range s.Stdout {
		if !strings.Contains(stdout, want) {
			t.Errorf("%s: the output lacks %q:\n%s", s.Args, want, stdout)
		}
	}
	for _, want := range s.Stderr {
		if !strings.Contains(stderr, want) {
			t.Errorf("%s: the errors lack %q:\n%s", s.Args, want, stderr)
		}
	}
	if len(s.Stderr) == 0 && stderr != "" {
		t.Errorf("%s: unexpected errors:\n%s", s.Args, stderr)
	}
}
