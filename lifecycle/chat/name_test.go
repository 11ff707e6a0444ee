package chat

import (
	"archive/tar"
	"errors"
	"strings"
	"testing"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

func isInvalid(err error) bool {
	var e *lifecycle.InvalidError
	return errors.As(err, &e)
}

func TestCheckName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a", "ä ö.txt", ".hidden", "...", "-rf", "History.md", "history.md2", strings.Repeat("x", 255), "\u2028"} {
		if err := checkName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"", ".", "..", "a/b", `a\b`, "a\x00b", "a\nb", "\x7f", "\u0085", "\xff", strings.Repeat("x", 256), "history.md"} {
		if err := checkName(name); !isInvalid(err) {
			t.Errorf("%q: %v, want an InvalidError", name, err)
		}
	}
}

func TestCheckArchived(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		path string
		kind byte
		ok   bool
	}{
		{"history.md", tar.TypeReg, true},
		{"d/history.md", tar.TypeDir, true},
		{`d/a\b`, tar.TypeReg, true},
		{`a\b`, tar.TypeSymlink, true},
		{"history.md", tar.TypeSymlink, false},
		{"history.md", tar.TypeDir, false},
		{"history.md/x", tar.TypeReg, false},
		{`a\b`, tar.TypeReg, false},
		{"\xff", tar.TypeReg, false},
		{"a\nb", tar.TypeReg, false},
	} {
		var refused *hostdir.ArchiveError
		if err := checkArchived(strings.Split(tt.path, "/"), tt.kind); errors.As(err, &refused) == tt.ok {
			t.Errorf("%q of type %q: %v", tt.path, tt.kind, err)
		}
	}
}

func TestTypeOf(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		record   Record
		identity uint64
		want     string
	}{
		{Record{ContentType: "a/b", Identity: 1, OldType: "c/d", OldIdentity: 2}, 1, "a/b"},
		{Record{ContentType: "a/b", Identity: 1, OldType: "c/d", OldIdentity: 2}, 2, "c/d"},
		{Record{ContentType: "a/b", Identity: 1, OldType: "c/d", OldIdentity: 2}, 3, ""},
		{Record{ContentType: "a/b"}, 3, "a/b"}, // of an earlier version, or a backup
	} {
		if got := tt.record.typeOf(tt.identity); got != tt.want {
			t.Errorf("%+v of file %d: %q", tt.record, tt.identity, got)
		}
	}
}
