package files

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// pack makes an archive.
func pack(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		body := h.Uname // where these tests put a file's content
		h.Uname = ""
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(body))
		}
		switch {
		case h.Typeflag == tar.TypeXGlobalHeader || h.Mode != 0:
		case h.Typeflag == tar.TypeDir:
			h.Mode = 0o755
		default:
			h.Mode = 0o644
		}
		must(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := io.WriteString(w, body)
			must(t, err)
		}
	}
	must(t, w.Close())
	return b.Bytes()
}

// unpacked lists what is in an archive, with sizes.
func unpacked(t *testing.T, archive []byte) (names []string) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		must(t, err)
		_, err = io.Copy(io.Discard, r)
		must(t, err)
		names = append(names, fmt.Sprintf("%s %d", h.Name, h.Size))
	}
}

func TestPack(t *testing.T) {
	dir, into := t.TempDir(), t.TempDir()
	long := strings.Repeat("n", 200)
	plant(t, dir, map[string]string{
		"t/a": "content", "t/s/empty": "", "t/link": "->../a", "t/pipe": "|", "t/bad\xff": "x", "t/" + long + "/" + long: "x", "t/none/": "",
		"t/big": strings.Repeat("big ", 100_000),
	})
	must(t, os.Link(dir+"/t/a", dir+"/t/z"), os.Chmod(dir+"/t/a", 0o640), os.Chtimes(dir+"/t/a", oldTime, oldTime))
	c := operate(t, wire.OpTarRead, file4(dir+"/t"), "").succeeds(t)
	equal(t, unpacked(t, c.data.Bytes()), []string{
		"t/ 0", "t/a 7", "t/bad\xff 1", "t/big 400000", "t/link 0", "t/" + long + "/ 0", "t/" + long + "/" + long + " 1", "t/none/ 0", "t/s/ 0", "t/s/empty 0", "t/z 0",
	})
	for path, want := range map[string]string{dir + "/t/a": "a 7", dir + "/t/link": "link 0", dir + "/t/none//": "none/ 0"} {
		equal(t, unpacked(t, operate(t, wire.OpTarRead, file4(path), "").succeeds(t).data.Bytes()), []string{want})
	}
	operate(t, wire.OpTarRead, file4(dir+"/t/pipe"), "").fails(t, wire.ClassInvalid, "a pipe")

	// What is packed can be unpacked, into the same.
	operate(t, wire.OpTarWrit, file4(into), c.data.String()).succeeds(t)
	must(t, os.Remove(dir+"/t/pipe"))
	for _, name := range []string{"a", "z"} { // the archive has seconds
		must(t, os.Chtimes(dir+"/t/"+name, oldTime.Truncate(time.Second), oldTime.Truncate(time.Second)))
	}
	if got := changes(state(t, dir), state(t, into)); got != "" {
		t.Errorf("unpacked: %s", got)
	}
	one, err := os.Stat(into + "/t/a")
	must(t, err)
	if two, err := os.Stat(into + "/t/z"); err != nil || !os.SameFile(one, two) || !one.ModTime().Equal(oldTime.Truncate(time.Second)) {
		t.Errorf("%v, %v, %v", one, two, err)
	}
}

func TestWriteTar(t *testing.T) {
	old := oldTime.Truncate(time.Second)
	for name, tt := range map[string]struct {
		entries []tar.Header
		raw     []byte // in place of entries
		want    []string
		class   wire.Class
		says    string
		late    []string // is there, though it failed
	}{
		"files": {
			entries: []tar.Header{{Name: "a", Uname: "x"}, {Name: "new/deep/b", Uname: "y"}, {Name: "./new/./c"}, {Name: "bad\xff"}},
			want:    []string{"a", "bad\xff", "new", "new/c", "new/deep", "new/deep/b"},
		},
		"directories": {
			entries: []tar.Header{{Name: "./", Typeflag: tar.TypeDir}, {Name: "ro/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: old}, {Name: "ro/in", Uname: "x"}, {Name: "d/", Typeflag: tar.TypeDir}},
			want:    []string{"ro", "ro/in"},
		},
		"links": {
			entries: []tar.Header{{Name: "a", Uname: "x"}, {Name: "h", Typeflag: tar.TypeLink, Linkname: "./a"}, {Name: "s", Typeflag: tar.TypeSymlink, Linkname: "../../anywhere"},
				{Name: "h2", Typeflag: tar.TypeLink, Linkname: "f"}, {Name: "h2", Typeflag: tar.TypeLink, Linkname: "f"}},
			want: []string{"a", "h", "h2", "s"},
		},
		"replacing":           {entries: []tar.Header{{Name: "f", Uname: "new"}, {Name: "out", Uname: "new"}, {Name: "link", Typeflag: tar.TypeSymlink, Linkname: "x"}}},
		"nothing":             {raw: []byte{}},
		"no archive":          {raw: []byte("what is that"), class: wire.ClassInvalid, says: "broken"},
		"half a file":         {raw: pack(t, tar.Header{Name: "a", Uname: strings.Repeat("x", 5000)})[:2000], class: wire.ClassInvalid, says: "broken"},
		"garbage after it":    {raw: append(pack(t, tar.Header{Name: "a"}), bytes.Repeat([]byte("x"), 300_000)...), want: []string{"a"}},
		"above":               {entries: []tar.Header{{Name: "../a"}}, class: wire.ClassInvalid, says: "out of the directory"},
		"above, hidden":       {entries: []tar.Header{{Name: "d/../../a"}}, class: wire.ClassInvalid, says: "out of the directory"},
		"above, harmless":     {entries: []tar.Header{{Name: "d/../a"}}, class: wire.ClassInvalid, says: "out of the directory"},
		"absolute":            {entries: []tar.Header{{Name: "/tmp/a"}}, class: wire.ClassInvalid, says: "relative"},
		"through a link":      {entries: []tar.Header{{Name: "out/a"}}, class: wire.ClassInvalid, says: "link"},
		"through a near link": {entries: []tar.Header{{Name: "near/a"}}, class: wire.ClassInvalid, says: "link"},
		"through its own link": {
			entries: []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/"}, {Name: "l/tmp/a"}}, class: wire.ClassInvalid, says: "link", late: []string{"l"},
		},
		"a directory on a link":   {entries: []tar.Header{{Name: "out", Typeflag: tar.TypeDir}}, class: wire.ClassExists, says: "link"},
		"below a file":            {entries: []tar.Header{{Name: "f/a"}}, class: wire.ClassInvalid},
		"a file on a directory":   {entries: []tar.Header{{Name: "d"}}, class: wire.ClassInvalid},
		"a link on a directory":   {entries: []tar.Header{{Name: "d", Typeflag: tar.TypeSymlink, Linkname: "/"}}, class: wire.ClassInvalid},
		"hard link above":         {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "../x"}}, class: wire.ClassInvalid, says: "out of the directory"},
		"hard link, absolute":     {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}}, class: wire.ClassInvalid, says: "relative"},
		"hard link through one":   {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "out/precious"}}, class: wire.ClassInvalid, says: "link"},
		"hard link to a link":     {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "link"}}, class: wire.ClassInvalid, says: "a symbolic link"},
		"hard link to a pipe":     {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "pipe"}}, class: wire.ClassInvalid, says: "a pipe"},
		"hard link to nothing":    {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "new/none"}}, class: wire.ClassNotFound},
		"hard link to all":        {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "./"}}, class: wire.ClassInvalid},
		"a device":                {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 5}}, class: wire.ClassInvalid, says: "only regular files"},
		"a pipe":                  {entries: []tar.Header{{Name: "a", Typeflag: tar.TypeFifo}}, class: wire.ClassInvalid, says: "only regular files"},
		"onto a pipe":             {entries: []tar.Header{{Name: "pipe", Uname: "x"}}},
		"too long a name":         {entries: []tar.Header{{Name: strings.Repeat("n/", 2048) + "nn"}}, class: wire.ClassInvalid, says: "4096"},
		"too long a part":         {entries: []tar.Header{{Name: strings.Repeat("n", 256)}}, class: wire.ClassInvalid},
		"what was good is there":  {entries: []tar.Header{{Name: "a"}, {Name: "../b"}}, class: wire.ClassInvalid, late: []string{"a"}},
		"a comment for all files": {entries: []tar.Header{{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}, {Name: "a"}}, want: []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir, elsewhere := t.TempDir(), t.TempDir()
			plant(t, elsewhere, map[string]string{"precious": "x"})
			plant(t, dir, map[string]string{"f": "old", "d/x": "x", "out": "->" + elsewhere, "near": "->d", "link": "->f", "pipe": "|"})
			before := in(t, dir)
			archive := tt.raw
			if archive == nil {
				archive = pack(t, tt.entries...)
			}
			c := operate(t, wire.OpTarWrit, &wire.File{Path: []byte(dir)}, string(archive))
			want := append(before, tt.want...)
			if tt.class != "" {
				c.fails(t, tt.class, tt.says)
				want = append(before, tt.late...)
			} else {
				c.succeeds(t)
			}
			slices.Sort(want)
			got := in(t, dir)
			slices.Sort(got)
			equal(t, got, want)
			equal(t, in(t, elsewhere), []string{"precious"})
			if got := content(t, elsewhere+"/precious"); got != "x" {
				t.Errorf("%q elsewhere", got)
			}
			switch name {
			case "directories":
				if info, err := os.Stat(dir + "/ro"); err != nil || info.Mode().Perm() != 0o555 || !info.ModTime().Equal(old) {
					t.Errorf("%v, %v", info, err)
				}
			case "replacing":
				if content(t, dir+"/f") != "new" || content(t, dir+"/out") != "new" {
					t.Error("it isn't replaced")
				}
			}
		})
	}
	dir := t.TempDir()
	plant(t, dir, map[string]string{"f": ""})
	operate(t, wire.OpTarWrit, &wire.File{Path: []byte(dir + "/f")}, "").fails(t, wire.ClassInvalid)
	operate(t, wire.OpTarWrit, &wire.File{Path: []byte(dir)}, string(pack(t, tar.Header{Name: "s", Mode: 0o6755}))).succeeds(t)
	if info, err := os.Stat(dir + "/s"); err != nil || info.Mode() != 0o755 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestWriteTarSparse(t *testing.T) {
	dir := t.TempDir()
	// A file of a terabyte in 512 bytes, as GNU's tar has it.
	h := pack(t, tar.Header{Name: "a", Format: tar.FormatGNU})[:512]
	h[156] = tar.TypeGNUSparse
	copy(h[386:], "00000000000\x0000000000000\x00")
	copy(h[483:], "\x80\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00")
	setSum(h)
	operate(t, wire.OpTarWrit, &wire.File{Path: []byte(dir)}, string(h)+strings.Repeat("\x00", 1024)).fails(t, wire.ClassInvalid)
	equal(t, in(t, dir), nil)
}

// While an archive is unpacked, its directory is swapped with a link out of it, over
// and over.
func TestWriteTarThroughASwappedLink(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	plant(t, dir, map[string]string{"d/": ""})
	must(t, os.Symlink(elsewhere, dir+"/l"))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, dir+"/d", unix.AT_FDCWD, dir+"/l", unix.RENAME_EXCHANGE)
			}
		}
	}()
	refused := 0
	for i := range 300 {
		entries := []tar.Header{{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}}
		for j := range 10 {
			entries = append(entries, tar.Header{Name: fmt.Sprintf("d/s%d/f%d", i%3, j), Uname: "x"},
				tar.Header{Name: fmt.Sprintf("d/h%d", j), Typeflag: tar.TypeLink, Linkname: fmt.Sprintf("d/s%d/f%d", i%3, j)})
		}
		if c := operate(t, wire.OpTarWrit, &wire.File{Path: []byte(dir)}, string(pack(t, entries...))); c.failure != nil {
			refused++
		}
	}
	close(stop)
	<-stopped
	if left := in(t, elsewhere); len(left) > 0 {
		t.Errorf("outside there is %q", left)
	}
	if refused == 0 {
		t.Log("no swap was met")
	}
}

// Nothing comes to be outside the directory, and nothing there changes.
func FuzzUnpack(f *testing.F) {
	f.Add(pack(f, tar.Header{Name: "a", Uname: "x"}, tar.Header{Name: "d/b", Uname: "y"}))
	f.Add(pack(f, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, tar.Header{Name: "l/precious", Uname: "y"}))
	f.Add(pack(f, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../precious"}, tar.Header{Name: "l", Uname: "y"}))
	f.Add(pack(f, tar.Header{Name: "../precious", Uname: "y"}, tar.Header{Name: "/tmp/x", Uname: "y"}))
	f.Add(pack(f, tar.Header{Name: "out/a", Uname: "y"}, tar.Header{Name: "out", Typeflag: tar.TypeDir}))
	f.Add(pack(f, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "out/../precious"}, tar.Header{Name: "h", Uname: "y"}))
	f.Add(pack(f, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "file"}, tar.Header{Name: "h", Uname: "y"}))
	f.Fuzz(func(t *testing.T, archive []byte) {
		if len(archive) > 1<<20 {
			return
		}
		archive = mend(archive)
		above := t.TempDir()
		plant(t, above, map[string]string{"precious": "x", "into/file": "->../precious", "into/out": "->..", "into/d/": ""})
		c := &caller{upload: bytes.NewReader(archive)}
		if err := c.do(0, wire.OpTarWrit, file4(above+"/into")); err != nil && c.failure.Class == wire.ClassInternal {
			t.Errorf("%v", err)
		}
		entries, err := os.ReadDir(above)
		if err != nil || len(entries) != 2 {
			t.Fatalf("%v, %v", entries, err)
		}
		info, err := os.Lstat(above + "/precious")
		if err != nil || content(t, above+"/precious") != "x" || info.Mode() != 0o644 {
			t.Fatalf("%v, %v", info, err)
		}
		err = filepath.WalkDir(above+"/into", func(name string, d os.DirEntry, err error) error {
			if strings.Contains(d.Name(), tempPrefix) && !bytes.Contains(archive, []byte(tempPrefix)) {
				t.Errorf("%s is left", name)
			}
			if !d.IsDir() && !d.Type().IsRegular() && d.Type() != os.ModeSymlink {
				t.Errorf("%s is %v", name, d.Type())
			}
			if info, err := d.Info(); err == nil && info.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
				t.Errorf("%s has %v", name, info.Mode())
			}
			if errors.Is(err, os.ErrPermission) {
				return nil
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// mend makes the sums of an archive's headers right, without which none is looked at.
func mend(archive []byte) []byte {
	archive = bytes.Clone(archive)
	for at := 0; at+512 <= len(archive); {
		h := archive[at : at+512]
		if h[0] == 0 {
			break
		}
		setSum(h)
		size, err := strconv.ParseUint(strings.Trim(string(h[124:136]), " \x00"), 8, 20)
		if err != nil {
			break
		}
		at += 512 + int(size+511)/512*512
	}
	return archive
}

func setSum(h []byte) {
	sum := 0
	copy(h[148:156], "        ")
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
}
