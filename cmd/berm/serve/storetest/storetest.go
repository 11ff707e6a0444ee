// Package storetest makes and reads state directories for tests of backups.
package storetest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// Fill makes a state directory whose store has sandboxes of the given keys, as a killed
// server leaves it, and returns its instance's ID.
func Fill(t testing.TB, dir string, keys ...string) string {
	t.Helper()
	id, live := uuid.NewString(), filepath.Join(t.TempDir(), "live.db")
	s := check.Value(store.Open(t.Context(), store.Options{Path: live}))(t)
	defer func() { _ = s.Close() }()
	for _, key := range keys {
		check.Must(t, s.Put(t.Context(), lifecycle.Sandbox{SessionID: uuid.NewString(), Tenant: "a", Key: key}))
	}
	check.Must(t, os.MkdirAll(dir, 0o700))
	for name, content := range map[string]string{
		"lock": "", "instance": id + "\n", "seal.key": strings.Repeat("0a", lifecycle.SealKeyBytes) + "\n",
		"berm.db": Read(t, live), "berm.db-wal": Read(t, live+"-wal"),
	} {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return id
}

// Read returns what is in a file.
func Read(t testing.TB, path string) string {
	t.Helper()
	return string(check.Value(os.ReadFile(path))(t))
}

// Holds returns the instance of a state directory and its store's keys, with blanks between.
func Holds(t testing.TB, dir string) string {
	t.Helper()
	s := check.Value(store.Open(t.Context(), store.Options{Path: filepath.Join(dir, "berm.db")}))(t)
	defer func() { _ = s.Close() }()
	var keys []string
	for _, r := range check.Value(s.Records(t.Context()))(t) {
		keys = append(keys, r.Key)
	}
	slices.Sort(keys)
	return strings.Join(append([]string{strings.TrimSpace(Read(t, filepath.Join(dir, "instance")))}, keys...), " ")
}
