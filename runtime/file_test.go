package runtime

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestFileOpCheck(t *testing.T) {
	long := "/" + strings.Repeat("x", MaxPath)
	for _, tt := range []struct {
		op    FileOp
		field string // that is wrong; empty if none is
	}{
		{FileOp{Verb: FileStat, Path: "/x"}, ""},
		{FileOp{Verb: FileStat, Path: long[:MaxPath]}, ""},
		{FileOp{Verb: FileStat, Path: long}, "path"},
		{FileOp{Verb: FileStat}, "path"},
		{FileOp{Verb: FileStat, Path: "x"}, "path"},
		{FileOp{Verb: FileStat, Path: "/a\x00"}, "path"},
		{FileOp{Path: "/x"}, "verb"},
		{FileOp{Verb: "chmod", Path: "/x"}, "verb"},
		{FileOp{Verb: FileRead, Path: "/x", Length: -1}, ""},
		{FileOp{Verb: FileRead, Path: "/x", Length: -2}, "range"},
		{FileOp{Verb: FileRead, Path: "/x", Offset: -1}, "range"},
		{FileOp{Verb: FileWrite, Path: "/x", Mode: 0o777}, ""},
		{FileOp{Verb: FileWrite, Path: "/x", Mode: 0o4755}, "mode"},
		{FileOp{Verb: FileMkdir, Path: "/x", Mode: fs.ModeSticky | 0o777}, "mode"},
		{FileOp{Verb: FileWrite, Path: "/x", Append: true, NoClash: true}, "append"},
		{FileOp{Verb: FileMkdir, Path: "/x", Append: true, NoClash: true}, ""},
		{FileOp{Verb: FileMove, Path: "/x", To: "/y"}, ""},
		{FileOp{Verb: FileMove, Path: "/x", To: "y"}, "to"},
		{FileOp{Verb: FileCopy, Path: "/x"}, "to"},
		{FileOp{Verb: FileList, Path: "/x", Depth: 100}, ""},
		{FileOp{Verb: FileList, Path: "/x"}, "depth"},
		{FileOp{Verb: FileList, Path: "/x", Depth: 101}, "depth"},
		{FileOp{Verb: FileGlob, Path: "/x", Pattern: "**/[a-z]?", Limit: MaxFound}, ""},
		{FileOp{Verb: FileGlob, Path: "/x", Limit: 1}, "pattern"},
		{FileOp{Verb: FileGlob, Path: "/x", Pattern: "[", Limit: 1}, "pattern"},
		{FileOp{Verb: FileGlob, Path: "/x", Pattern: "\x00", Limit: 1}, "pattern"},
		{FileOp{Verb: FileGlob, Path: "/x", Pattern: "*"}, "limit"},
		{FileOp{Verb: FileGlob, Path: "/x", Pattern: "*", Limit: MaxFound + 1}, "limit"},
		{FileOp{Verb: FileSearch, Path: "/x", Pattern: "a(b"}, "pattern"},
		{FileOp{Verb: FileSearch, Path: "/x", Pattern: "a(b", Literal: true}, ""},
		{FileOp{Verb: FileSearch, Path: "/x", Pattern: strings.Repeat("x", 4097)}, "pattern"},
		{FileOp{Verb: FileSearch, Path: "/x", Pattern: "x", Include: "["}, "include"},
		{FileOp{Verb: FileSearch, Path: "/x", Pattern: "x", Limit: -1}, "limit"},
	} {
		err := tt.op.Check()
		var wrong *FileOpError
		switch {
		case tt.field == "" && err != nil:
			t.Errorf("%+v: %v", tt.op, err)
		case tt.field != "" && (!errors.As(err, &wrong) || wrong.Field != tt.field || !errdefs.IsInvalidArgument(err)):
			t.Errorf("%+v: got %v, want a complaint about %s", tt.op, err, tt.field)
		}
	}
	op := FileOp{Verb: FileSearch, Path: "/x", Pattern: "x"}
	if err := op.Check(); err != nil || op.Limit != usualFound {
		t.Errorf("%+v, %v", op, err)
	}
}
