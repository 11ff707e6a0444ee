package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	long := strings.Repeat("0123456789", 30_000)
	plant(t, dir, map[string]string{
		"f": "0123456789", "empty": "", "long": long, "link": "->f", "pipe": "|", "d/": "", "dangling": "->no", "loop": "->loop", "b\xff": "x",
		"to pipe": "->pipe", "to zero": "->/dev/zero",
	})
	l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		err = unix.Bind(l, &unix.SockaddrUnix{Name: dir + "/socket"})
		defer func() { _ = unix.Close(l) }()
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		path           string
		offset, length int64
		want           string
		class          wire.Class
		says           string
	}{
		"whole":              {path: "f", length: -1, want: "0123456789"},
		"nothing of it":      {path: "f", want: ""},
		"a part":             {path: "f", offset: 3, length: 4, want: "3456"},
		"the end":            {path: "f", offset: 8, length: 100, want: "89"},
		"at the end":         {path: "f", offset: 10, length: -1, want: ""},
		"beyond the end":     {path: "f", offset: 11, length: -1, class: wire.ClassOutOfRange, says: "10"},
		"far beyond":         {path: "f", offset: 1 << 62, length: 1 << 62, class: wire.ClassOutOfRange},
		"negative offset":    {path: "f", offset: -1, length: -1, class: wire.ClassInvalid},
		"negative length":    {path: "f", length: -2, class: wire.ClassInvalid},
		"empty":              {path: "empty", length: -1, want: ""},
		"many frames":        {path: "long", length: -1, want: long},
		"many frames' end":   {path: "long", offset: 70_001, length: 200_000, want: long[70_001:270_001]},
		"link":               {path: "link", length: -1, want: "0123456789"},
		"bad UTF-8":          {path: "b\xff", length: -1, want: "x"},
		"pipe":               {path: "pipe", length: -1, class: wire.ClassInvalid, says: "a pipe"},
		"link to a pipe":     {path: "to pipe", length: -1, class: wire.ClassInvalid, says: "a pipe"},
		"device":             {path: "to zero", length: 10, class: wire.ClassInvalid, says: "a device"},
		"socket":             {path: "socket", length: -1, class: wire.ClassInvalid, says: "a socket"},
		"directory":          {path: "d", length: -1, class: wire.ClassInvalid, says: "a directory"},
		"dangling":           {path: "dangling", length: -1, class: wire.ClassNotFound},
		"loop":               {path: "loop", length: -1, class: wire.ClassInvalid, says: "symbolic links"},
		"slash":              {path: "f/", length: -1, class: wire.ClassInvalid},
		"made up, in part":   {path: "/proc/self/environ", length: 0, want: ""},
		"made up, from afar": {path: "/proc/version", offset: 6, length: 7, want: "version"},
	} {
		t.Run(name, func(t *testing.T) {
			path := dir + "/" + tt.path
			if tt.path[0] == '/' {
				path = tt.path
			}
			a := operate(t, wire.OpRead, &wire.File{Path: []byte(path), Offset: tt.offset, Length: tt.length}, nil)
			if tt.class != "" {
				a.fails(t, tt.class, tt.says)
				if a.ready {
					t.Error("it was said only after Ready")
				}
				return
			}
			if a.succeeds(t); string(a.data) != tt.want {
				t.Errorf("%d bytes, want %d", len(a.data), len(tt.want))
			}
			if len(a.items) != 1 || string(decode[wire.FileInfo](t, a.items[0]).Path) != path {
				t.Errorf("items: %q", a.items)
			}
		})
	}
	t.Run("made up", func(t *testing.T) {
		a := operate(t, wire.OpRead, &wire.File{Path: []byte("/proc/self/status"), Length: -1}, nil).succeeds(t)
		if !bytes.HasPrefix(a.data, []byte("Name:")) {
			t.Errorf("%q", a.data)
		}
	})
	t.Run("one that waits", func(t *testing.T) { // the kernel's log has no end
		mustRoot(t)
		f := &wire.File{Path: []byte("/proc/kmsg"), Length: -1}
		if a := operate(t, wire.OpRead, f, nil); a.failure != nil && a.failure.Class != wire.ClassPermission {
			t.Errorf("%v", a.failure)
		}
	})
	t.Run("not this user's", func(t *testing.T) {
		mustRoot(t)
		if err := os.WriteFile(dir+"/secret", nil, 0o600); err != nil {
			t.Fatal(err)
		}
		open(t, dir)
		operateAs(t, 1234, wire.OpRead, &wire.File{Path: []byte(dir + "/secret")}, nil).fails(t, wire.ClassPermission, "secret")
	})
}

// open lets other users into a test's directories.
func open(t *testing.T, dir string) {
	t.Helper()
	for ; dir != os.TempDir() && dir != "/"; dir = dir[:strings.LastIndexByte(dir, '/')] {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// A file may grow or shrink while it is read; it has an end.
func TestReadOfAChangingFile(t *testing.T) {
	dir := t.TempDir()
	const size = 8 << 20
	for name, tt := range map[string]struct{ to, least int64 }{"grows": {2 * size, size}, "shrinks": {1000, 0}} {
		t.Run(name, func(t *testing.T) {
			path := dir + "/" + name
			if err := os.WriteFile(path, make([]byte, size), 0o644); err != nil {
				t.Fatal(err)
			}
			s := begin(t, &wire.Request{Op: wire.OpRead, File: &wire.File{Path: []byte(path), Length: -1}}, 0)
			a := &reply{}
			for len(a.data) == 0 {
				s.next(a)
			}
			if err := os.Truncate(path, tt.to); err != nil {
				t.Fatal(err)
			}
			for s.next(a) {
			}
			a.succeeds(t)
			if got := int64(len(a.data)); got < tt.least || got > size {
				t.Errorf("%d bytes", got)
			}
		})
	}
}

// Memory doesn't grow with the file.
func TestReadKeepsNothing(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/sparse", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(dir+"/sparse", 64<<20); err != nil {
		t.Fatal(err)
	}
	result := testing.Benchmark(func(b *testing.B) {
		for range b.N {
			s := begin(t, &wire.Request{Op: wire.OpRead, File: &wire.File{Path: []byte(dir + "/sparse"), Length: -1}}, 0)
			for {
				kind, _, err := s.r.Next()
				if err != nil {
					t.Fatal(err)
				}
				if kind == wire.KindReady && s.w.Send(wire.KindGo) != nil {
					t.Fatal("no Go")
				}
				if kind == wire.KindResult {
					break
				}
			}
		}
	})
	if got := result.AllocedBytesPerOp(); got > 16<<20 { // of both sides, garbage included
		t.Errorf("%d bytes for a file of 64 MiB", got)
	}
}
