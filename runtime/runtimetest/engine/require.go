package engine

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// Check tells whether this machine and this user can have a private engine of a
// kind ("docker", "containerd"), as far as can be told without starting one. The
// error is FailedPrecondition and says what is missing.
func Check(kind string) error {
	programs := map[string][]string{
		"docker":     {"dockerd", "containerd", "runc", "iptables", "ip"},
		"containerd": {"containerd", "runc", "iptables", "ip"},
	}[kind]
	if programs == nil {
		return fmt.Errorf("no engine is called %q: %w", kind, errdefs.ErrInvalidArgument)
	}
	for _, name := range programs {
		if _, err := find(name); err != nil {
			return err
		}
	}
	if _, err := findBusybox(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("a private engine needs root: %w", errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Require ends a test that needs an engine of a kind when none can be had: it is
// skipped, or fails if the variable BERM_REQUIRE, a list with commas, names the kind.
func Require(t testing.TB, kind string) {
	t.Helper()
	if err := Check(kind); err != nil {
		Lacking(t, kind, err)
	}
}

// Lacking ends a test like Require, for a reason found out otherwise, such as the
// error of StartDocker.
func Lacking(t testing.TB, kind string, err error) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("BERM_REQUIRE"), ","), kind) {
		t.Fatalf("no %s engine, and BERM_REQUIRE demands one: %v", kind, err)
	}
	t.Skipf("no %s engine: %v", kind, err)
}
