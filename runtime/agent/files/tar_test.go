package files

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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

// entries makes headers: NAME/ of a directory, NAME->TARGET of a symbolic link, NAME=>TARGET
// of a hard link, else NAME or NAME=CONTENT.
func entries(text string) (all []tar.Header) {
	for _, one := range strings.Fields(text) {
		h := tar.Header{Name: one, ModTime: time.Unix(1, 0)}
		if name, target, ok := strings.Cut(one, "->"); ok {
			h.Name, h.Linkname, h.Typeflag = name, target, tar.TypeSymlink
		} else if name, target, ok := strings.Cut(one, "=>"); ok {
			h.Name, h.Linkname, h.Typeflag = name, target, tar.TypeLink
		} else if strings.HasSuffix(one, "/") {
			h.Typeflag = tar.TypeDir
		} else {
			h.Name, h.Uname, _ = strings.Cut(one, "=")
		}
		all = append(all, h)
	}
	return all
}

// TestUnpack has archives for a directory with links out of it, which are all the same.
func TestUnpack(t *testing.T) {
	sparse := pack(t, tar.Header{Name: "a", Format: tar.FormatGNU})[:512] // a terabyte, as GNU's tar has it
	sparse[156] = tar.TypeGNUSparse
	copy(sparse[386:], "00000000000\x0000000000000\x00")
	copy(sparse[483:], "\x80\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00")
	setSum(sparse)
	for archive, want := range map[string]string{ // the changes; after "; " the failure's class and words
		"a=x new/deep/b=y ./new/./c bad\xff":       "a: 644 x, bad\xff: 644 , new: 755/, new/c: 644 , new/deep: 755/, new/deep/b: 644 y",
		"./ d/ ro/ ro/in=x":                        "ro: 755/, ro/in: 644 x",
		"a=x h=>./a s->../../anywhere h2=>f h2=>f": "a: 644 x, h: 644 x, h2: 644 old, s: ->../../anywhere",
		"f=new out=new link->x pipe":               "f: 644 new, link: ->x, out: 644 new, pipe: 644 ",
		"../a":                                     "; invalid, out of the directory",
		"d/../../a":                                "; invalid, out of the directory",
		"d/../a":                                   "; invalid, out of the directory",
		"/tmp/a":                                   "; invalid, relative",
		"out/a":                                    "; invalid, link",
		"near/a":                                   "; invalid, link",
		"l->/ l/tmp/a":                             "l: ->/; invalid, link",
		"a ../b":                                   "a: 644 ; invalid",
		"out/":                                     "; exists, link",
		"f/a":                                      "; invalid",
		"d":                                        "; invalid",
		"d->/":                                     "; invalid",
		"a=>../x":                                  "; invalid, out of the directory",
		"a=>/etc/passwd":                           "; invalid, relative",
		"a=>out/precious":                          "; invalid, link",
		"a=>link":                                  "; invalid, a symbolic link",
		"a=>pipe":                                  "; invalid, a pipe",
		"a=>new/none":                              "; not_found",
		"a=>./":                                    "; invalid",
		strings.Repeat("n/", 2048) + "nn":          "; invalid, 4096",
		strings.Repeat("n", 256):                   "; invalid",
		// Not made of entries:
		"":             "",
		"what is that": "; invalid, broken",
		string(pack(t, tar.Header{Name: "a", Uname: strings.Repeat("x", 5000)})[:2000]):                                                                           "; invalid, broken",
		string(pack(t, tar.Header{Name: "a"})) + strings.Repeat("x", 300_000):                                                                                     "a: 644 ",
		string(sparse) + strings.Repeat("\x00", 1024):                                                                                                             "; invalid",
		string(pack(t, tar.Header{Name: "a", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 5})):                                                                  "; invalid, only regular files",
		string(pack(t, tar.Header{Name: "a", Typeflag: tar.TypeFifo})):                                                                                            "; invalid, only regular files",
		string(pack(t, tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}, tar.Header{Name: "a"})):                        "a: 644 ",
		string(pack(t, tar.Header{Name: "s", Mode: 0o6755}, tar.Header{Name: "ro/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: oldTime.Truncate(time.Second)})): "ro: 555/ old s, s: 755 ",
	} {
		name := archive[:min(len(archive), 30)]
		if !strings.Contains(archive, "what") && !strings.Contains(archive, "\x00") && archive != "" {
			archive = string(pack(t, entries(archive)...))
		}
		dir, elsewhere := t.TempDir(), t.TempDir()
		plant(t, elsewhere, map[string]string{"precious": "x"})
		plant(t, dir, map[string]string{"f": "old", "d/x": "x", "out": "->" + elsewhere, "near": "->d", "link": "->f", "pipe": "|"})
		before := state(t, dir)
		c := operate(t, wire.OpTarWrit, file4(dir), archive)
		got := changes(before, state(t, dir))
		want, failure, fails := strings.Cut(want, "; ")
		if class, words, _ := strings.Cut(failure, ", "); fails {
			c.fails(t, wire.Class(class), words)
		} else {
			c.succeeds(t)
		}
		if got != want || t.Failed() {
			t.Fatalf("%q: %q, want %q", name, got, want)
		}
		if left := state(t, elsewhere); len(left) != 1 || left["precious"] != "644 x" {
			t.Fatalf("%q: elsewhere there is %q", name, left)
		}
	}
	dir := t.TempDir()
	plant(t, dir, map[string]string{"f": ""})
	operate(t, wire.OpTarWrit, file4(dir+"/f"), "").fails(t, wire.ClassInvalid)
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
		must(t, err)
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
