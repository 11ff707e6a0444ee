// Package check ends tests whose steps fail.
package check

import (
	"errors"
	"testing"
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
