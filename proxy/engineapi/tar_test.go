package engineapi

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"

	"github.com/bermhq/berm/proxy"
)

// written is an archive of entries. A file's content is its Size bytes.
func written(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		must(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			check.Value(w.Write(bytes.Repeat([]byte("x"), int(h.Size))))(t)
		}
	}
	must(t, w.Close())
	return b.Bytes()
}

// refiltered reads an archive through a tarFilter.
func refiltered(body io.Reader, closed bool) ([]byte, error) {
	f, err := newTarFilter(body, closed)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(f)
}

// sparse is an archive of 2 KiB of a file of a TiB, in the old form of GNU tar.
func sparse(t testing.TB) []byte {
	t.Helper()
	b := written(t, tar.Header{Name: "sparse", Typeflag: tar.TypeReg, Mode: 0o644})
	copy(b[156:], "S")
	copy(b[257:], "ustar  \x00")
	copy(b[483:], "00000000000\x00")
	return checksummed(b)
}

// checksummed corrects the checksum of an archive's first header.
func checksummed(b []byte) []byte {
	copy(b[148:], "        ")
	sum := 0
	for _, c := range b[:tarBlock] {
		sum += int(c)
	}
	const octal = "01234567"
	for i := range 6 {
		b[153-i] = octal[sum>>(3*i)&7]
	}
	b[154], b[155] = 0, ' '
	return b
}

func TestArchiveEntries(t *testing.T) {
	file := tar.Header{Name: "first", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}
	dir := tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}
	link := tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}
	reg := func(name string, mode int64) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: 1}
	}
	xattr := func(name string) tar.Header {
		return tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, PAXRecords: map[string]string{tarXattr + name: "x"}}
	}
	many := make([]tar.Header, 300)
	for i := range many {
		many[i] = tar.Header{Name: strings.Repeat("long", 60) + string(rune('a'+i)), Typeflag: tar.TypeReg, Mode: 0o600, Size: 1000}
	}
	for name, tt := range map[string]struct {
		entries []tar.Header
		closed  bool
		rule    string // empty is allowed
	}{
		"tree":                     {entries: []tar.Header{{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, dir, reg("d/f", 0o755), link, {Name: "d/h", Typeflag: tar.TypeLink, Linkname: "d/f"}}},
		"tree in a read-only root": {entries: []tar.Header{dir, reg("d/f", 0o755), link}, closed: true},
		"long names":               {entries: many},
		"name like bzip2":          {entries: []tar.Header{reg("BZhello", 0o644)}},
		"name that isn't text":     {entries: []tar.Header{{Name: "\xff\xfe", Typeflag: tar.TypeReg, Mode: 0o644, Format: tar.FormatGNU}}},
		"absolute":                 {entries: []tar.Header{{Name: "/", Typeflag: tar.TypeDir, Mode: 0o755}, reg("/etc//passwd", 0o644)}},
		"without parents":          {entries: []tar.Header{reg("a/b/c", 0o644)}},
		"sticky directory":         {entries: []tar.Header{{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}}},
		"setgid directory":         {entries: []tar.Header{{Name: "shared/", Typeflag: tar.TypeDir, Mode: 0o2775}}},
		"global header":            {entries: []tar.Header{{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "git"}}, file}},
		"attribute of users":       {entries: []tar.Header{xattr("user.comment")}},
		"unlike directory before":  {entries: []tar.Header{link, {Name: "l/", Typeflag: tar.TypeDir, Mode: 0o755}, reg("l/f", 0o644)}},

		"setuid file":            {entries: []tar.Header{file, reg("su", 0o4755)}, rule: "archive.setuid"},
		"setgid file":            {entries: []tar.Header{file, reg("su", 0o2755)}, rule: "archive.setuid"},
		"both":                   {entries: []tar.Header{reg("su", 0o6711)}, rule: "archive.setuid"},
		"block device":           {entries: []tar.Header{file, {Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8}}, rule: "archive.device"},
		"character device":       {entries: []tar.Header{file, dir, {Name: "d/mem", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1}}, rule: "archive.device"},
		"named pipe":             {entries: []tar.Header{file, {Name: "pipe", Typeflag: tar.TypeFifo}}, rule: "archive.device"},
		"another type":           {entries: []tar.Header{file, {Name: "cont", Typeflag: tar.TypeCont}}, rule: "archive.entry"},
		"capability":             {entries: []tar.Header{file, xattr("security.capability")}, rule: "archive.xattr"},
		"overlay":                {entries: []tar.Header{file, xattr("trusted.overlay.opaque")}, rule: "archive.xattr"},
		"overlay of users":       {entries: []tar.Header{file, xattr("user.overlay.redirect")}, rule: "archive.xattr"},
		"access list":            {entries: []tar.Header{file, xattr("system.posix_acl_access")}, rule: "archive.xattr"},
		"absolute dots":          {entries: []tar.Header{file, reg("/../x", 0o644)}, rule: "archive.name"},
		"absolute below a link":  {entries: []tar.Header{link, reg("//l/passwd", 0o644)}, rule: "archive.parent"},
		"absolute, closed":       {entries: []tar.Header{reg("/there/passwd", 0o644)}, closed: true, rule: "archive.parent"},
		"dots":                   {entries: []tar.Header{file, reg("d/../../x", 0o644)}, rule: "archive.name"},
		"layer's names":          {entries: []tar.Header{file, reg(".wh..wh.plnk/1", 0o644)}, rule: "archive.name"},
		"root that is a link":    {entries: []tar.Header{{Name: ".", Typeflag: tar.TypeSymlink, Linkname: "/etc"}}, rule: "archive.name"},
		"hard link outside":      {entries: []tar.Header{file, {Name: "h", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}}, rule: "archive.link"},
		"hard link upwards":      {entries: []tar.Header{file, {Name: "h", Typeflag: tar.TypeLink, Linkname: "../first"}}, rule: "archive.link"},
		"hard link elsewhere":    {entries: []tar.Header{file, {Name: "h", Typeflag: tar.TypeLink, Linkname: "etc/shadow"}}, rule: "archive.link"},
		"hard link to a link":    {entries: []tar.Header{link, {Name: "h", Typeflag: tar.TypeLink, Linkname: "l"}}, rule: "archive.link"},
		"below a link":           {entries: []tar.Header{link, reg("l/passwd", 0o644)}, rule: "archive.parent"},
		"far below a link":       {entries: []tar.Header{dir, {Name: "d/l", Typeflag: tar.TypeSymlink, Linkname: "/"}, reg("d/./l//etc/passwd", 0o644)}, rule: "archive.parent"},
		"below a replaced one":   {entries: []tar.Header{dir, {Name: "d", Typeflag: tar.TypeSymlink, Linkname: "/"}, reg("d/f", 0o644)}, rule: "archive.parent"},
		"unknown parent, closed": {entries: []tar.Header{reg("there/passwd", 0o644)}, closed: true, rule: "archive.parent"},
	} {
		got, err := refiltered(bytes.NewReader(written(t, tt.entries...)), tt.closed)
		var d *policy.DeniedError
		if tt.rule != "" {
			if !errors.As(err, &d) || d.Reasons[0].Rule != tt.rule || d.Reasons[0].Allowed == "" {
				t.Errorf("%s: %v, want it denied by %s", name, err, tt.rule)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		harmless(t, got)
		want := slices.DeleteFunc(tt.entries, func(h tar.Header) bool { return h.Typeflag == tar.TypeXGlobalHeader })
		for tr := tar.NewReader(bytes.NewReader(got)); ; want = want[1:] {
			h, err := tr.Next()
			if err != nil {
				break
			}
			if path.Join("/", h.Name) != path.Join("/", want[0].Name) || h.Size != want[0].Size || h.Mode != want[0].Mode&^0o6000 {
				t.Errorf("%s: %+v, want %+v", name, h, want[0])
			}
		}
		if len(want) != 0 {
			t.Errorf("%s: %d entries are lost", name, len(want))
		}
	}
	if _, err := refiltered(bytes.NewReader(sparse(t)), false); !errors.As(err, new(*policy.DeniedError)) {
		t.Errorf("sparse: %v", err)
	}
	whole := written(t, file, reg("second", 0o644))
	if _, err := refiltered(bytes.NewReader(whole[:len(whole)-1536-100]), false); err == nil {
		t.Error("an archive that is cut off came through")
	}
}

// harmless fails unless an archive is nothing but what judge lets through.
func harmless(t *testing.T, archive []byte) {
	t.Helper()
	for _, magic := range compressed {
		if bytes.HasPrefix(archive, magic) {
			t.Errorf("it begins as a compressed archive: %q", archive[:16])
		}
	}
	links := map[string]bool{}
	for tr := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("what was written can't be read: %v", err)
		}
		name := path.Clean(h.Name)
		if path.IsAbs(h.Name) || slices.Contains(strings.Split(name, "/"), "..") {
			t.Errorf("name %q", h.Name)
		}
		if !strings.ContainsRune("0125", rune(h.Typeflag)) || h.Mode&^0o1777 != 0 || h.Uid < 0 || h.Gid < 0 {
			t.Errorf("%q has type %q, mode %o and owner %d:%d", h.Name, h.Typeflag, h.Mode, h.Uid, h.Gid)
		}
		for record := range h.PAXRecords {
			if strings.HasPrefix(record, tarXattr) && !strings.HasPrefix(record, tarXattr+"user.") || strings.HasPrefix(record, "GNU.") {
				t.Errorf("%q has %q", h.Name, record)
			}
		}
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if links[dir] {
				t.Errorf("%q lies below a link", h.Name)
			}
		}
		links[name] = h.Typeflag == tar.TypeSymlink
	}
}

// FuzzArchive looks for an archive that Berm writes and wouldn't itself take again.
func FuzzArchive(f *testing.F) {
	f.Add(written(f, tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o2755}, tar.Header{Name: "d/f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 700},
		tar.Header{Name: "d/l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "d/f"}), false)
	f.Add(written(f, tar.Header{Name: strings.Repeat("long", 100), Typeflag: tar.TypeReg, Mode: 0o4755, PAXRecords: map[string]string{tarXattr + "user.a": "b"}}), true)
	f.Add(sparse(f), false)
	f.Fuzz(func(t *testing.T, body []byte, closed bool) {
		if len(body) >= tarBlock { // or hardly any would get past the checksum
			body = checksummed(slices.Clone(body))
		}
		got, err := refiltered(io.LimitReader(bytes.NewReader(body), 1<<20), closed)
		if err != nil {
			return
		}
		harmless(t, got)
		again, err := refiltered(bytes.NewReader(got), closed)
		if err != nil || !bytes.Equal(again, got) {
			t.Errorf("it isn't taken as it was written: %v", err)
		}
	})
}

// capability is CAP_SYS_ADMIN, permitted and effective, as a file's extended attribute.
const capability = "\x01\x00\x00\x02\x00\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// TestArchiveUpload has a real engine unpack what Berm writes, and nothing of what Berm
// refuses, all of which the engine itself would unpack.
func TestArchiveUpload(t *testing.T) {
	d, direct := engineDoor(t, "")
	id := d.made(direct, "mine", "", container.Config{})
	c := d.client("mine")
	put := func(entries ...tar.Header) error {
		return c.CopyToContainer(t.Context(), id, "/tmp", bytes.NewReader(written(t, entries...)), container.CopyToContainerOptions{})
	}
	big := tar.Header{Name: "big/file", Typeflag: tar.TypeReg, Mode: 0o640, Size: 3 << 20, Uid: 1000}
	must(t, put(tar.Header{Name: "big/", Typeflag: tar.TypeDir, Mode: 0o2755}, big, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "big/file", Mode: 0o640},
		tar.Header{Name: "BZhl", Typeflag: tar.TypeSymlink, Linkname: "/etc"}))
	for name, want := range map[string]fs.FileMode{"big": fs.ModeDir | 0o755, "big/file": 0o640, "h": 0o640, "BZhl": fs.ModeSymlink | 0o777} {
		if stat, err := direct.ContainerStatPath(t.Context(), id, "/tmp/"+name); err != nil || stat.Mode != want {
			t.Errorf("%s: %+v, %v", name, stat, err)
		}
	}
	other := d.made(direct, "mine", "", container.Config{}) // into which the engine itself unpacks
	there := tar.Header{Name: "there", Typeflag: tar.TypeReg}
	must(t, errors.Join(put(there), direct.CopyToContainer(t.Context(), other, "/tmp", bytes.NewReader(written(t, there)), container.CopyToContainerOptions{})))
	for name, tt := range map[string]struct {
		refused []tar.Header // the last is
		rule    string
		made    string // by the engine, had it been asked
	}{
		"device":     {[]tar.Header{{Name: "device", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}, "archive.device", "/tmp/device"},
		"disk":       {[]tar.Header{{Name: "disk", Typeflag: tar.TypeBlock, Devmajor: 8}}, "archive.device", "/tmp/disk"},
		"pipe":       {[]tar.Header{{Name: "pipe", Typeflag: tar.TypeFifo}}, "archive.device", "/tmp/pipe"},
		"setuid":     {[]tar.Header{{Name: "su", Typeflag: tar.TypeReg, Mode: 0o4755}}, "archive.setuid", "/tmp/su"},
		"capability": {[]tar.Header{{Name: "cap", Typeflag: tar.TypeReg, Mode: 0o755, PAXRecords: map[string]string{tarXattr + "security.capability": capability}}}, "archive.xattr", "/tmp/cap"},
		"hard link":  {[]tar.Header{{Name: "hard", Typeflag: tar.TypeLink, Linkname: "there"}}, "archive.link", "/tmp/hard"},
		"below a link": {[]tar.Header{
			{Name: "way", Typeflag: tar.TypeSymlink, Linkname: "/var"}, {Name: "way/below", Typeflag: tar.TypeReg, Mode: 0o644},
		}, "archive.parent", "/var/below"},
	} {
		entries := append([]tar.Header{{Name: "before", Typeflag: tar.TypeReg, Size: 100, Mode: 0o644}}, tt.refused...)
		deniedBy(t, put(entries...), tt.rule)
		if _, err := direct.ContainerStatPath(t.Context(), id, tt.made); err == nil {
			t.Errorf("%s was unpacked", name)
		}
		if log := readFile(t, d.audit); !bytes.Contains(log, []byte(`"rule":"`+tt.rule+`"`)) {
			t.Errorf("the audit log has no refusal by %s", tt.rule)
		}
		if err := direct.CopyToContainer(t.Context(), other, "/tmp", bytes.NewReader(written(t, entries...)), container.CopyToContainerOptions{}); err != nil {
			t.Errorf("%s: the engine itself refuses it: %v", name, err)
		} else if _, err := direct.ContainerStatPath(t.Context(), other, tt.made); err != nil && isOldEngine(t, direct) {
			t.Errorf("%s: the engine itself makes nothing of it: %v", name, err)
		}
	}
}

// TestArchiveReadOnlyRoot has a link in a volume lead an archive's entry into a root that is
// read-only, which the engine itself would follow.
func TestArchiveReadOnlyRoot(t *testing.T) {
	d, direct := engineDoor(t, "")
	c := d.client("mine")
	made := check.Value(c.ContainerCreate(t.Context(), sleeper, &container.HostConfig{
		ReadonlyRootfs: true, Mounts: []mount.Mount{{Type: mount.TypeVolume, Target: "/v"}},
	}, nil, nil, ""))(t)
	put := func(c *client.Client, entries ...tar.Header) error {
		return c.CopyToContainer(t.Context(), made.ID, "/v", bytes.NewReader(written(t, entries...)), container.CopyToContainerOptions{})
	}
	must(t, put(c, tar.Header{Name: "there", Typeflag: tar.TypeSymlink, Linkname: "/etc"}))
	evil := tar.Header{Name: "there/evil", Typeflag: tar.TypeReg, Mode: 0o644}
	deniedBy(t, put(c, evil), "archive.parent")
	if _, err := direct.ContainerStatPath(t.Context(), made.ID, "/etc/evil"); err == nil {
		t.Error("it was written into the root")
	}
	if err := put(direct, evil); err != nil {
		t.Errorf("the engine itself refuses it: %v", err)
	} else if _, err := direct.ContainerStatPath(t.Context(), made.ID, "/etc/evil"); err != nil && isOldEngine(t, direct) {
		t.Errorf("the engine itself writes nothing: %v", err)
	}
}

// TestArchivesStayPlain names files so that what Berm writes would begin as a compressed
// archive, of which the engine would unpack what nothing has judged.
func TestArchivesStayPlain(t *testing.T) {
	note := map[string]string{tarXattr + "user.comment": "x"} // for which a header comes first that begins with the directory
	for name, second := range map[string]tar.Header{
		"bzip2":                   {Name: "BZh91AY&SY"},
		"skippable zstd":          {Name: "P*M\x18P\x02"},
		"bzip2 before attributes": {Name: "BZh91/x", PAXRecords: note},
		"bzip2 before a name":     {Name: "BZh91/\u00fc"},
		"zstd before attributes":  {Name: "P*M\x18/x", PAXRecords: note},
	} {
		t.Run(name, func(t *testing.T) {
			second.Typeflag, second.Mode = tar.TypeReg, 0o644
			in := written(t, tar.Header{Name: "Dockerfile", Typeflag: tar.TypeReg, Mode: 0o644}, second)
			var out bytes.Buffer
			err := rewrite(&out, bytes.NewReader(in), "Dockerfile", func(text []byte) ([]byte, error) { return text, nil })
			if f := proxy.FaultOf(err); f.Status != http.StatusBadRequest || out.Len() > 0 {
				t.Errorf("a build's: %v, the engine would get %.16q", err, out.Bytes())
			}
			got, err := refiltered(bytes.NewReader(written(t, second)), false)
			if _, notPlain := plainTar(bytes.NewReader(got)); err == nil && notPlain != nil {
				t.Errorf("the engine would get %.16q", got)
			}
		})
	}
}
