package runtimetest

import (
	"context"
	"crypto/rand"
	"io"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime"
)

// Sandbox makes a container for one test. A name and a command, which sleeps, are given to a
// spec without them.
func Sandbox(t testing.TB, r runtime.Runtime, spec runtime.Spec) runtime.Container {
	t.Helper()
	if spec.Name == "" {
		spec.Name = "berm-test-" + strings.ToLower(rand.Text())
	}
	if spec.Command == nil {
		spec.Command = []string{"sleep", "100000"}
	}
	c, err := r.Create(t.Context(), spec)
	must(t, err)
	t.Cleanup(func() {
		must(t, r.Remove(context.WithoutCancel(t.Context()), c.ID))
	})
	return c
}

// Output runs a program to its end, as a backend alone can.
func Output(ctx context.Context, backend runtime.Starter, id, user string, command ...string) (stdout, stderr string, code int, err error) {
	s, err := backend.Start(ctx, id, runtime.Program{Command: command, User: user})
	if err != nil {
		return "", "", 0, err
	}
	defer func() { _ = s.Close() }()
	out, err := io.ReadAll(s)
	if err != nil {
		return string(out), "", 0, err
	}
	code, stderr, err = s.Wait(ctx)
	return string(out), stderr, code, err
}

// Shell runs a script to its end. It ends the test if that can't be done.
func Shell(t testing.TB, backend runtime.Starter, id, script string) (stdout, stderr string, code int) {
	t.Helper()
	stdout, stderr, code, err := Output(t.Context(), backend, id, "", "/bin/sh", "-c", script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return stdout, stderr, code
}
