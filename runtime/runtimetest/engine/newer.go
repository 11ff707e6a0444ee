package engine

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
)

// NewerDir returns the directory in which newer.sh puts what it builds.
func NewerDir() string {
	return cmp.Or(os.Getenv("BERM_ENGINES"), os.Getenv("HOME")+"/.cache/berm-engines")
}

// RequireNewer skips a test unless newer.sh has built the programs with these names. It fails
// the test instead if BERM_REQUIRE lists "newer".
func RequireNewer(t testing.TB, names []string) {
	t.Helper()
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(NewerDir(), name, "bin")); err != nil {
			Lacking(t, "newer", fmt.Errorf("newer.sh hasn't built %s: %w", name, errdefs.ErrFailedPrecondition))
		}
	}
}

// NewerPath returns a PATH that begins with the programs of newer.sh with these names, then
// has the distribution's.
func NewerPath(names []string) string {
	path := "/usr/sbin:/usr/bin:/sbin:/bin:" + os.Getenv("PATH")
	for _, name := range slices.Backward(names) {
		path = filepath.Join(NewerDir(), name, "bin") + ":" + path
	}
	return path
}
