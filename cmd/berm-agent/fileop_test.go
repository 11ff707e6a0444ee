package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// session is an operation as Berm sees it.
type session struct {
	t    *testing.T
	r    *wire.Reader
	w    *wire.Writer
	file *yamux.Stream
	its  *yamux.Stream // the agent's side
	// ended gets what the handler came back with.
	ended chan error
	input bool // what the handler has left, once it has ended
}

// begin starts an operation, to be done by a user.
func begin(t *testing.T, req *wire.Request, uid int) *session {
	t.Helper()
	s := newSession(t)
	s.start(req, uid)
	return s
}

func newSession(t *testing.T) *session {
	t.Helper()
	here, there := net.Pipe()
	berm, err := yamux.Client(here, wire.Mux(time.Minute, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	agent, err := yamux.Server(there, wire.Mux(time.Minute, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = berm.Close(), agent.Close() })
	mine, err := berm.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	its, err := agent.AcceptStream()
	if err != nil {
		t.Fatal(err)
	}
	if err := mine.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return &session{t: t, r: wire.NewReader(mine), w: wire.NewWriter(mine), file: mine, its: its, ended: make(chan error, 1)}
}

// start starts an operation, as the agent does.
func (s *session) start(req *wire.Request, uid int) {
	s.t.Helper()
	h, its := fileHandler(req.Op), s.its
	if h == nil {
		s.t.Fatalf("there is no %s", req.Op)
	}
	go func() {
		defer func() { _ = its.Close() }()
		if uid != 0 {
			// The thread ends with the goroutine, and nothing else runs on it.
			runtime.LockOSThread()
			for _, id := range []struct{ call, id uintptr }{{unix.SYS_SETGROUPS, 0}, {unix.SYS_SETRESGID, uintptr(uid)}, {unix.SYS_SETRESUID, uintptr(uid)}} {
				args := [3]uintptr{id.id, id.id, id.id}
				if id.call == unix.SYS_SETGROUPS {
					args = [3]uintptr{}
				}
				if _, _, e := unix.RawSyscall(id.call, args[0], args[1], args[2]); e != 0 {
					s.ended <- e
					return
				}
			}
		}
		c := &conn{r: wire.NewReader(its), w: wire.NewWriter(its), c: its}
		result, err := h(c, req)
		s.input = c.input
		switch {
		case errors.Is(err, errGone):
		case err != nil:
			_ = c.w.SendJSON(wire.KindFailure, failureOf(err))
		case result == nil:
			_ = c.w.Send(wire.KindResult, []byte("{}"))
		default:
			_ = c.w.SendJSON(wire.KindResult, result)
		}
		s.ended <- err
	}()
}

// reply is all that an operation sent.
type reply struct {
	ready   bool
	items   [][]byte
	data    []byte
	end     bool
	result  []byte
	failure *wire.Failure
}

// next reads a frame into the answer; false at the end.
func (s *session) next(a *reply) bool {
	s.t.Helper()
	kind, payload, err := s.r.Next()
	if err != nil {
		s.t.Fatalf("the operation broke off: %v", err)
	}
	switch kind {
	case wire.KindReady:
		a.ready = true
		if err := s.w.Send(wire.KindGo); err != nil {
			s.t.Fatal(err)
		}
	case wire.KindItem:
		a.items = append(a.items, bytes.Clone(payload))
	case wire.KindData:
		a.data = append(a.data, payload...)
	case wire.KindEnd:
		a.end = true
	case wire.KindResult:
		a.result = bytes.Clone(payload)
		return false
	case wire.KindFailure:
		a.failure = new(wire.Failure)
		if err := wire.Decode(payload, a.failure); err != nil {
			s.t.Fatal(err)
		}
		return false
	default:
		s.t.Fatalf("a frame of kind %d", kind)
	}
	return true
}

// wait waits for the handler's end.
func (s *session) wait() error {
	s.t.Helper()
	select {
	case err := <-s.ended:
		return err
	case <-time.After(20 * time.Second):
		s.t.Fatal("the operation doesn't end")
		return nil
	}
}

// operate does a whole operation. Upload, unless nil, is its Data.
func operate(t *testing.T, op wire.Op, f *wire.File, upload []byte) *reply {
	t.Helper()
	return operateAs(t, 0, op, f, upload)
}

func operateAs(t *testing.T, uid int, op wire.Op, f *wire.File, upload []byte) *reply {
	t.Helper()
	s := begin(t, &wire.Request{Op: op, File: f}, uid)
	a := &reply{}
	more := s.next(a)
	if more && a.ready && upload != nil {
		go func() {
			for part := range slices.Chunk(upload, 50_000) {
				_ = s.w.Send(wire.KindData, part) // it may have failed
			}
			_ = s.w.Send(wire.KindEnd)
		}()
	}
	for more {
		more = s.next(a)
	}
	if err := s.wait(); err == nil && s.input {
		t.Error("the operation ended well, but not its input")
	}
	return a
}

// fails checks that an operation failed in a certain way.
func (a *reply) fails(t *testing.T, class wire.Class, words ...string) {
	t.Helper()
	if a.failure == nil {
		t.Errorf("it was done: %s", a.result)
		return
	}
	if a.failure.Class != class {
		t.Errorf("%s: %s; want %s", a.failure.Class, a.failure.Message, class)
	}
	for _, w := range words {
		if !strings.Contains(a.failure.Message, w) {
			t.Errorf("%q doesn't say %q", a.failure.Message, w)
		}
	}
}

func (a *reply) succeeds(t *testing.T) *reply {
	t.Helper()
	if a.failure != nil {
		t.Errorf("%s: %s", a.failure.Class, a.failure.Message)
	}
	return a
}

func decode[T any](t *testing.T, b []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%q: %v", b, err)
	}
	return v
}

// names are the items' paths below a directory, sizes and types left out.
func (a *reply) names(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	for _, item := range a.items {
		name := string(decode[wire.FileInfo](t, item).Path)
		rest, ok := strings.CutPrefix(name, strings.TrimSuffix(dir, "/")+"/")
		if !ok {
			t.Errorf("%q isn't below %q", name, dir)
		}
		names = append(names, rest)
	}
	return names
}

// mustRoot ends a test that needs root, as the tests of engines do.
func mustRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("BERM_REQUIRE") != "" {
			t.Fatal("this test has to be run by root")
		}
		t.Skip("this test has to be run by root")
	}
}

// smallDisk mounts a file system of a size.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	mustRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// plant makes files by what they are: a name that ends in / is a directory, "->" a link
// to what follows, "|" a pipe, anything else content.
func plant(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, what := range files {
		full := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(full), 0o755)
		link, isLink := strings.CutPrefix(what, "->")
		switch {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(full, 0o755)
		case isLink:
			err = os.Symlink(link, full)
		case what == "|":
			err = unix.Mkfifo(full, 0o644)
		default:
			err = os.WriteFile(full, []byte(what), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func content(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

// in lists all that is below a directory.
func in(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(name string, _ os.DirEntry, err error) error {
		if name != dir {
			names = append(names, strings.TrimPrefix(name, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return names
}

func equal(t *testing.T, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%.2000s, want %.2000s", fmt.Sprintf("%q", got), fmt.Sprintf("%q", want))
	}
}

func at4096(dir string) string {
	for len(dir) < 4096-1 {
		dir += "/" + strings.Repeat("x", min(200, 4096-1-len(dir)))
	}
	return dir + "y"
}

func TestPaths(t *testing.T) {
	ops := []wire.Op{
		wire.OpStat, wire.OpRead, wire.OpWrite, wire.OpDir, wire.OpMkdir, wire.OpMove, wire.OpCopy, wire.OpRemove, wire.OpGlob,
		wire.OpSearch, wire.OpTarRead, wire.OpTarWrit, wire.OpWatch,
	}
	dir := t.TempDir()
	for _, op := range ops {
		for name, path := range map[string]string{
			"relative": "etc/passwd", "empty": "", "NUL": dir + "/a\x00b", "too long": at4096(dir) + "z", "as long as can be": at4096(dir),
		} {
			t.Run(string(op)+" "+name, func(t *testing.T) {
				a := operate(t, op, &wire.File{Path: []byte(path), To: []byte(path), Pattern: "x"}, nil)
				a.fails(t, wire.ClassInvalid)
				if a.ready {
					t.Error("it was said only after Ready")
				}
			})
		}
		t.Run(string(op)+" without a file", func(t *testing.T) { operate(t, op, nil, nil).fails(t, wire.ClassInvalid) })
		if op == wire.OpWrite || op == wire.OpMkdir {
			continue
		}
		t.Run(string(op)+" missing", func(t *testing.T) {
			a := operate(t, op, &wire.File{Path: []byte(dir + "/no\xff"), To: []byte(dir + "/x"), Pattern: "x"}, nil)
			a.fails(t, wire.ClassNotFound, `no\xff`)
		})
	}
	if fileHandler(wire.OpPing) != nil || fileHandler("what") != nil {
		t.Error("an operation of others has a handler")
	}
	equal(t, in(t, dir), nil)
}

func TestStat(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"bad\xff": "12345", "link": "->bad\xff", "dangling": "->no", "pipe": "|", "loop": "->loop", "d/": ""})
	for name, want := range map[string]wire.FileInfo{
		"bad\xff": {Mode: unix.S_IFREG | 0o644, Size: 5},
		"link":    {Mode: unix.S_IFREG | 0o644, Size: 5},
		"pipe":    {Mode: unix.S_IFIFO | 0o644},
		"d":       {Mode: unix.S_IFDIR | 0o755, Size: -1},
	} {
		a := operate(t, wire.OpStat, &wire.File{Path: []byte(dir + "/" + name)}, nil).succeeds(t)
		got := decode[wire.FileInfo](t, a.result)
		if string(got.Path) != dir+"/"+name || got.Mode != want.Mode || want.Size >= 0 && got.Size != want.Size || got.UID != os.Getuid() ||
			time.Since(time.Unix(0, got.ModTime)).Abs() > time.Hour {
			t.Errorf("%s: %+v", name, got)
		}
	}
	operate(t, wire.OpStat, &wire.File{Path: []byte(dir + "/dangling")}, nil).fails(t, wire.ClassNotFound)
	operate(t, wire.OpStat, &wire.File{Path: []byte(dir + "/loop")}, nil).fails(t, wire.ClassInvalid)
	operate(t, wire.OpStat, &wire.File{Path: []byte(dir + "/link/x")}, nil).fails(t, wire.ClassInvalid)
}

func TestMkdir(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"file": "x", "d/": "", "link": "->d", "dangling": "->no"})
	for name, tt := range map[string]struct {
		path    string
		mode    uint32
		parents bool
		class   wire.Class
		want    os.FileMode
	}{
		"new":                {path: "new", want: 0o755},
		"mode":               {path: "open", mode: 0o777, want: 0o777},
		"slash":              {path: "slash/", mode: 0o700, want: 0o700},
		"setuid":             {path: "bits", mode: 0o6750, want: 0o750},
		"there":              {path: "d", class: wire.ClassExists},
		"there is fine":      {path: "link", parents: true, want: 0o755},
		"no parent":          {path: "a/b/c", class: wire.ClassNotFound},
		"parents":            {path: "e/b/c", mode: 0o711, parents: true, want: 0o711},
		"file there":         {path: "file", parents: true, class: wire.ClassExists},
		"below a file":       {path: "file/x", parents: true, class: wire.ClassInvalid},
		"dangling link":      {path: "dangling", parents: true, class: wire.ClassExists},
		"below a dangling":   {path: "dangling/x", parents: true, class: wire.ClassInvalid},
		"name too long":      {path: strings.Repeat("n", 256), class: wire.ClassInvalid},
		"bad UTF-8":          {path: "\xff\xfe", want: 0o755},
		"parents too long":   {path: "f/" + strings.Repeat("n", 256), parents: true, class: wire.ClassInvalid},
		"nowhere in /proc":   {path: "/proc/x", class: wire.ClassNotFound},
		"the root":           {path: "/", class: wire.ClassExists},
		"the root, parents":  {path: "/", parents: true, want: 0},
		"through a new link": {path: "link/z/z", parents: true, want: 0o755},
	} {
		t.Run(name, func(t *testing.T) {
			full := dir + "/" + tt.path
			if strings.HasPrefix(tt.path, "/") {
				full = tt.path
			}
			a := operate(t, wire.OpMkdir, &wire.File{Path: []byte(full), Mode: tt.mode, Parents: tt.parents}, nil)
			if tt.class != "" {
				a.fails(t, tt.class)
				return
			}
			a.succeeds(t)
			if info, err := os.Stat(full); err != nil || !info.IsDir() || tt.want != 0 && info.Mode()&^os.ModeDir != tt.want {
				t.Errorf("%v, %v", info, err)
			}
		})
	}
}

// Berm may hang up at any time.
func TestHangUp(t *testing.T) {
	dir := t.TempDir()
	big := strings.Repeat("x", 20<<20)
	plant(t, dir, map[string]string{"big": big})
	for i := range 3000 {
		plant(t, dir, map[string]string{"many/" + string(rune('a'+i%26)) + strings.Repeat("z", i/26): "x"})
	}
	for _, req := range []*wire.Request{
		{Op: wire.OpRead, File: &wire.File{Path: []byte(dir + "/big"), Length: -1}},
		{Op: wire.OpTarRead, File: &wire.File{Path: []byte(dir)}},
		{Op: wire.OpDir, File: &wire.File{Path: []byte(dir), Depth: 100}},
		{Op: wire.OpWrite, File: &wire.File{Path: []byte(dir + "/new")}},
		{Op: wire.OpTarWrit, File: &wire.File{Path: []byte(dir)}},
		{Op: wire.OpWatch, File: &wire.File{Path: []byte(dir), Recursive: true}},
	} {
		t.Run(string(req.Op), func(t *testing.T) {
			s := begin(t, req, 0)
			if s.next(&reply{}); s.file.Close() != nil {
				t.Fatal("it can't be closed")
			}
			if err := s.wait(); !errors.Is(err, errGone) {
				t.Errorf("%v", err)
			}
		})
	}
	// These say little or nothing meanwhile: they look.
	for _, req := range []*wire.Request{
		{Op: wire.OpGlob, File: &wire.File{Path: []byte(dir), Pattern: "**/nothing"}},
		{Op: wire.OpSearch, File: &wire.File{Path: []byte(dir + "/many"), Pattern: "nothing"}},
		{Op: wire.OpCopy, File: &wire.File{Path: []byte(dir + "/many"), To: []byte(dir + "/copy")}},
		{Op: wire.OpRemove, File: &wire.File{Path: []byte(dir + "/many"), Recursive: true}},
	} {
		t.Run(string(req.Op), func(t *testing.T) {
			s := newSession(t)
			if err := s.w.Send(wire.KindGo); err != nil { // it waits there
				t.Fatal(err)
			}
			if err := s.file.Close(); err != nil {
				t.Fatal(err)
			}
			s.start(req, 0)
			if err := s.wait(); !errors.Is(err, errGone) {
				t.Errorf("%v", err)
			}
		})
	}
	t.Run("before Go", func(t *testing.T) {
		s := begin(t, &wire.Request{Op: wire.OpRemove, File: &wire.File{Path: []byte(dir + "/big")}}, 0)
		if _, err := s.r.Expect(wire.KindReady); err != nil {
			t.Fatal(err)
		}
		if err := s.file.Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.wait(); !errors.Is(err, errGone) {
			t.Errorf("%v", err)
		}
		if content(t, dir+"/big") != big {
			t.Error("it was done all the same")
		}
	})
	for _, name := range in(t, dir) {
		if strings.Contains(name, tempPrefix) || name == "copy" || name == "new" {
			t.Errorf("%s is left", name)
		}
	}
}

func TestFileDesc(t *testing.T) {
	if _, err := fileDesc(-1).Read(make([]byte, 1)); !errors.Is(err, syscall.EBADF) {
		t.Errorf("%v", err)
	}
	if n, err := fileDesc(-1).Read(nil); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := io.WriteString(fileDesc(-1), "x"); !errors.Is(err, syscall.EBADF) {
		t.Errorf("%v", err)
	}
}
