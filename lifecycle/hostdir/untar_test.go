package hostdir

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"
)

// packed is an archive of entries; of files the content is their name, if they say no size.
func packed(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		content := ""
		if h.Typeflag == tar.TypeReg {
			if content = h.Name; h.Size > 0 {
				content = strings.Repeat("x", int(h.Size))
			}
			h.Size = int64(len(content))
		}
		must(t, w.WriteHeader(&h))
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	must(t, w.Close())
	return b.Bytes()
}

func reg(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
func dir(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
func link(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}
}

// plain are options that let a tree grow, as this process's user's.
var plain = UntarOptions{
	Give: func(*os.File) error { return nil }, Grow: func(_, _ int64) error { return nil }, Check: refuseNamed,
}

func TestUnpack(t *testing.T) {
	t.Parallel()
	into, root := grown(t)
	uid, gid := os.Getuid(), os.Getgid()
	if uid == 0 {
		uid, gid = 1234, 4321
	}
	o := plain
	o.Give = func(f *os.File) error {
		return unix.Fchownat(int(f.Fd()), "", uid, gid, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	}
	var totals []int64
	o.Grow = func(total, _ int64) error { totals = append(totals, total); return nil }
	suid := reg("./d/suid")
	suid.Mode, suid.Uid = 0o7711, 99
	world := tar.Header{Typeflag: tar.TypeDir, Name: "d/world/", Mode: 0o7777}
	data := packed(t, dir("./"), reg("a"), suid, world, reg("d//e/./f"), link("l", "../../../etc"), link("d/e/l", "f"), reg("history.md"),
		tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "from git"}},
		reg("a"), link("a", "x"), reg("a"), dir("d"), reg("d/\xff"), reg("d/history.md"), dir("d/e/"))
	must(t, Untar(t.Context(), iotest.OneByteReader(bytes.NewReader(data)), root, o))
	want := map[string]string{"a": "a", "d": "", "d/suid": "./d/suid", "d/world": "", "d/e": "", "d/e/f": "d//e/./f", "l": "->../../../etc",
		"d/e/l": "->f", "history.md": "history.md", "d/\xff": "d/\xff", "d/history.md": "d/history.md"}
	if got := tree(t, into); !maps.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	for name, mode := range map[string]fs.FileMode{"a": 0o644, "d/suid": 0o755, "d": fs.ModeDir | 0o755, "d/world": fs.ModeDir | 0o755} {
		if fi, err := os.Lstat(filepath.Join(into, name)); err != nil || fi.Mode() != mode {
			t.Errorf("%s: %v, %v", name, fi.Mode(), err)
		}
	}
	for _, name := range []string{"a", "d", "d/e/l"} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(into, name), &st); err != nil || int(st.Uid) != uid || int(st.Gid) != gid {
			t.Errorf("%s: %d:%d, %v", name, st.Uid, st.Gid, err)
		}
	}
	var sizes int64
	for _, what := range want {
		sizes += int64(len(strings.TrimPrefix(what, "->")))
	}
	if last := totals[len(totals)-1]; last != sizes || totals[0] != 1 {
		t.Errorf("it grew to %v, want %d in the end", totals, sizes)
	}
}

func refuseNamed(elements []string, _ byte) error {
	if elements[0] == "refused" {
		return refuse("refused")
	}
	return nil
}

func TestUnpackRefuses(t *testing.T) {
	t.Parallel()
	whole := packed(t, reg("d/a"), tar.Header{Typeflag: tar.TypeReg, Name: "large", Size: 5000})
	sparse := tar.Header{Typeflag: tar.TypeReg, Name: "s", PAXRecords: map[string]string{"SCHILY.sparse": "x"}}
	old := packed(t, reg("sparse"))
	old[156] = 'S' // its type, which makes it one of GNU's
	copy(old[257:], "ustar  \x00")
	checksum(old)
	for name, data := range map[string][]byte{
		"absolute":           packed(t, reg("/etc/x")),
		"parent":             packed(t, reg("../x")),
		"parent inside":      packed(t, reg("a/../x")),
		"parent directory":   packed(t, dir("a/../../x/")),
		"only parent":        packed(t, dir("../")),
		"device":             packed(t, tar.Header{Typeflag: tar.TypeChar, Name: "x"}),
		"block device":       packed(t, tar.Header{Typeflag: tar.TypeBlock, Name: "x"}),
		"fifo":               packed(t, tar.Header{Typeflag: tar.TypeFifo, Name: "x"}),
		"hard link":          packed(t, reg("a"), tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "a"}),
		"contiguous":         packed(t, tar.Header{Typeflag: tar.TypeCont, Name: "x"}),
		"unknown type":       packed(t, tar.Header{Typeflag: 'Z', Name: "x"}),
		"old sparse":         old,
		"sparse":             bytes.ReplaceAll(packed(t, sparse), []byte("SCHILY.sparse=x"), []byte("GNU.sparse.ab=x")),
		"through a link":     packed(t, link("l", "."), reg("l/x")),
		"directory on link":  packed(t, link("l", "."), dir("l")),
		"directory on file":  packed(t, reg("a"), dir("a")),
		"file on directory":  packed(t, dir("a"), reg("a")),
		"link on directory":  packed(t, reg("d/b"), link("d", "b")),
		"file at the top":    packed(t, tar.Header{Typeflag: tar.TypeSymlink, Name: ".", Linkname: "x"}),
		"file with slash":    packed(t, link("a/", "x")),
		"empty link":         packed(t, link("a", "")),
		"long link":          packed(t, link("a", strings.Repeat("x", 4096))),
		"long element":       packed(t, reg("d/"+strings.Repeat("x", 256))),
		"deep":               packed(t, reg(strings.Repeat("d/", maxDepth)+"x")),
		"deep directory":     packed(t, dir(strings.Repeat("d/", maxDepth+1))),
		"refused by Check":   packed(t, reg("refused/x")),
		"not an archive":     bytes.Repeat([]byte("x"), 4096),
		"empty":              nil,
		"cut in the end":     whole[:len(whole)-513],
		"cut before the end": whole[:len(whole)-1024],
		"cut in a file":      whole[:len(whole)-3000],
		"cut before a file":  whole[:1024],
		"cut in a header":    whole[:1100],
	} {
		into, root := grown(t)
		err := Untar(t.Context(), bytes.NewReader(data), root, plain)
		if !isRefused(err) {
			t.Errorf("%s: %v, want an InvalidError", name, err)
		} else if len(err.Error()) > 500 {
			t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
		}
		for path := range tree(t, into) {
			if !strings.HasPrefix(path, "d") && path != "a" && path != "l" && path != "large" {
				t.Errorf("%s: made %q", name, path)
			}
		}
	}
	_, root := grown(t)
	if err := Untar(t.Context(), bytes.NewReader(packed(t, dir(strings.Repeat("d/", maxDepth)), reg(strings.Repeat("d/", maxDepth-1)+"x"))), root, plain); err != nil {
		t.Errorf("as deep as may be: %v", err)
	}
}

// checksum puts the sum of a header's bytes into it.
func checksum(header []byte) {
	copy(header[148:156], "        ")
	sum := 0
	for _, b := range header[:512] {
		sum += int(b)
	}
	copy(header[148:], fmt.Sprintf("%06o\x00 ", sum))
}

// A header may promise more bytes than there are, and more than there is room for.
func TestUnpackPromises(t *testing.T) {
	t.Parallel()
	data := packed(t, reg("a"))
	copy(data[124:136], "77777777777\x00")
	checksum(data)
	_, root := grown(t)
	if err := Untar(t.Context(), bytes.NewReader(data), root, plain); !isRefused(err) {
		t.Errorf("%v, want an InvalidError", err)
	}
	full := errors.New("full")
	into, root := grown(t)
	o := plain
	o.Grow = func(total, _ int64) error {
		if total == 1<<33-1 {
			return full
		}
		return nil
	}
	if err := Untar(t.Context(), bytes.NewReader(data), root, o); !errors.Is(err, full) || len(tree(t, into)) > 0 {
		t.Errorf("%v, and made %q", err, tree(t, into))
	}
}

func TestUnpackReaderFails(t *testing.T) {
	t.Parallel()
	broken := errors.New("gone")
	data := packed(t, reg("a"), tar.Header{Typeflag: tar.TypeReg, Name: "large", Size: 5000})
	for _, after := range []int{0, 100, 512, 600, 1024, 1600, 3000, len(data) - 1024, len(data) - 100} {
		for _, cause := range []error{broken, io.ErrUnexpectedEOF} {
			_, root := grown(t)
			r := io.MultiReader(bytes.NewReader(data[:after]), iotest.ErrReader(cause))
			if err := Untar(t.Context(), r, root, plain); !errors.Is(err, cause) || isRefused(err) {
				t.Errorf("after %d bytes: %v, want the reader's", after, err)
			}
		}
	}
}

// endless says the same over and over.
type endless struct {
	block []byte
	at    int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.block[e.at:])
	e.at = (e.at + n) % len(e.block)
	return n, nil
}

func TestUnpackBounds(t *testing.T) {
	t.Parallel()
	_, root := quick(t)
	tall := packed(t, dir("a"))[:512]
	if err := Untar(t.Context(), &endless{block: tall}, root, plain); !isRefused(err) || !strings.Contains(err.Error(), "100000") {
		t.Errorf("entries without end: %v", err)
	}
	// Headers that tell of a file that never comes.
	pax := tar.Header{Typeflag: tar.TypeReg, Name: "a", PAXRecords: map[string]string{"comment": strings.Repeat("x", 100_000)}}
	long := packed(t, pax)
	if err := Untar(t.Context(), &endless{block: long[:len(long)-2048]}, root, plain); !isRefused(err) {
		t.Errorf("headers without end: %v", err)
	}
	// Directories that nobody names count as well.
	u := &unpacker{UntarOptions: plain, top: open(t, root), entries: MaxEntries - 10}
	if err := u.into(strings.Split(strings.Repeat("d/", 10)+"d", "/"), nil); !isRefused(err) {
		t.Errorf("directories without end: %v", err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(packed(f, dir("./"), reg("a"), reg("d/b"), link("l", "../canary"), reg("history.md"), dir("d/e/"), link("d/b", "/etc")))
	f.Add(packed(f, link("l", "../.."), reg("l/x")))
	f.Add(packed(f, reg("../x"), reg("/x"), tar.Header{Typeflag: tar.TypeChar, Name: "x"}))
	f.Add(packed(f, reg("a"), tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "a"}, tar.Header{Typeflag: tar.TypeFifo, Name: "p"}))
	f.Add(packed(f, reg(strings.Repeat("long/", 40)+"x"), link("l", strings.Repeat("y/", 100)), tar.Header{Typeflag: tar.TypeReg, Name: "pax",
		Format: tar.FormatPAX, Mode: 0o7777, PAXRecords: map[string]string{"comment": "c"}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		parent := t.TempDir()
		plant(t, parent, "canary", "into/")
		into := filepath.Join(parent, "into")
		o := plain
		const most = 1 << 20
		var total int64
		full := errors.New("full")
		o.Grow = func(n, _ int64) error {
			if n > most {
				return full
			}
			total = n
			return nil
		}
		err := Untar(t.Context(), bytes.NewReader(data), rootOf(t, into), o)
		if err != nil && !isRefused(err) && !errors.Is(err, full) {
			t.Fatal(err)
		}
		if beside, err := os.ReadDir(parent); err != nil || len(beside) != 2 {
			t.Fatalf("beside it: %v, %v", beside, err)
		}
		if content, err := os.ReadFile(filepath.Join(parent, "canary")); err != nil || string(content) != "canary" {
			t.Fatalf("%q, %v", content, err)
		}
		var sizes int64
		e := filepath.WalkDir(into, func(path string, d fs.DirEntry, err error) error {
			if err != nil || path == into {
				return err
			}
			fi, err := d.Info()
			if err != nil {
				return err
			}
			switch mode := fi.Mode(); {
			case mode.IsDir() && mode == fs.ModeDir|0o755:
				return nil
			case mode.IsRegular() && (mode == 0o644 || mode == 0o755) || err != nil && mode == 0o600, mode.Type() == fs.ModeSymlink:
			default:
				t.Errorf("%q is %v", path, mode)
			}
			sizes += fi.Size()
			return nil
		})
		if e != nil {
			t.Fatal(e)
		}
		if sizes > total || err == nil && sizes != total {
			t.Errorf("%d bytes were made, %d were told of", sizes, total)
		}
	})
}
