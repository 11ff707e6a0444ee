package main

import (
	"os"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// broken is a policy that is refused.
const broken = "version: 1\nprofiles: {c: {extends: nothing}}\n"

func write(t *testing.T, path, content string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(content), 0o600))
}

func wantEmptyDir(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left in %s: %v, %v", dir, entries, err)
	}
}

var must = check.Must // ends a test if a step of its own fails
