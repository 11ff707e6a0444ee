package serve

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/atomicfile"
)

// A backup is a tar of two members: manifest.json, and the database as of one moment.
const (
	BackupFormat = 2
	manifestName = "manifest.json"
	maxManifest  = 64 << 10 // bytes
)

// Manifest says what a backup is of, and how its other members are known to be whole.
type Manifest struct {
	Format   int       `json:"format"`
	Berm     string    `json:"berm"`               // the version that made it
	Schema   int       `json:"schema"`             // of the database
	Instance string    `json:"instance"`           // the id on what that instance made
	SealKey  string    `json:"seal_key,omitempty"` // of the labels' seals; empty in format 1
	Created  time.Time `json:"created"`
	Members  []member  `json:"members"` // in their order
}

type member struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
}

func (m Manifest) String() string {
	return fmt.Sprintf("a backup of %s, by berm %s, of instance %s", m.Created.Format(time.RFC3339), m.Berm, m.Instance)
}

// writeBackup writes the database at path, which nobody changes meanwhile, as a backup
// that m tells of.
func WriteBackup(ctx context.Context, w io.Writer, m Manifest, path string) error {
	db, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }() // it was only read
	sum := sha256.New()
	size, err := io.Copy(sum, untilDone{ctx, db})
	if err == nil {
		_, err = db.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	m.Members = []member{{Name: StateStore, Size: size, SHA256: hex.EncodeToString(sum.Sum(nil))}}
	head, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	header := func(name string, size int64) error {
		return t.WriteHeader(&tar.Header{Name: name, Size: size, Mode: 0o600, ModTime: m.Created.Truncate(time.Second)})
	}
	if err := header(manifestName, int64(len(head))); err != nil {
		return err
	}
	if _, err := t.Write(head); err != nil {
		return err
	}
	if err := header(StateStore, size); err != nil {
		return err
	}
	if _, err := io.Copy(t, untilDone{ctx, db}); err != nil {
		return err
	}
	return t.Close()
}

// readBackup reads a backup, checks it, and leaves its database in the directory dir.
func ReadBackup(ctx context.Context, r io.Reader, dir string) (m Manifest, report store.Report, err error) {
	if m, err = extractBackup(ctx, r, dir); err != nil {
		return m, report, fmt.Errorf("read the backup: %w", err)
	}
	if report, err = store.Check(ctx, filepath.Join(dir, StateStore), dir); err != nil {
		return m, report, err
	}
	if report.Schema != m.Schema {
		return m, report, fmt.Errorf("the backup's manifest says schema %d, and its database has %d", m.Schema, report.Schema)
	}
	return m, report, nil
}

func extractBackup(ctx context.Context, r io.Reader, dir string) (m Manifest, err error) {
	r, stop := interruptible(ctx, r)
	defer stop()
	t := tar.NewReader(r)
	if _, err := nextMember(t, manifestName); err != nil {
		return m, err
	}
	head, err := io.ReadAll(io.LimitReader(t, maxManifest+1))
	if err != nil {
		return m, err
	}
	if m, err = parseManifest(head); err != nil {
		return m, fmt.Errorf("%s: %w", manifestName, err)
	}
	want := m.Members[0]
	size, err := nextMember(t, StateStore)
	if err != nil {
		return m, err
	}
	if size != want.Size {
		return m, fmt.Errorf("%s has %d bytes, want %d", StateStore, size, want.Size)
	}
	f, err := os.OpenFile(filepath.Join(dir, StateStore), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return m, err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, sum), t)
	if err = errors.Join(err, f.Close()); err != nil {
		return m, fmt.Errorf("%s: %w", StateStore, err)
	}
	if hex.EncodeToString(sum.Sum(nil)) != want.SHA256 {
		return m, fmt.Errorf("%s isn't what was backed up: its SHA-256 is another", StateStore)
	}
	if _, err = t.Next(); errors.Is(err, io.EOF) {
		_, err = io.Copy(onlyZeros{}, r) // with which a tar may be filled up
	} else if err == nil {
		err = errMore
	}
	return m, err
}

var errMore = errors.New("there is more in it than there should be")

// onlyZeros refuses everything else.
type onlyZeros struct{}

func (onlyZeros) Write(p []byte) (int, error) {
	if len(bytes.Trim(p, "\x00")) > 0 {
		return 0, errMore
	}
	return len(p), nil
}

// nextMember goes on to a member, and answers its size.
func nextMember(t *tar.Reader, name string) (int64, error) {
	h, err := t.Next()
	switch {
	case errors.Is(err, io.EOF):
		return 0, fmt.Errorf("%s is missing", name)
	case err != nil:
		return 0, fmt.Errorf("%s: %w", name, err)
	case h.Name != name || h.Typeflag != tar.TypeReg:
		return 0, fmt.Errorf("there is %q where %s should be", h.Name, name)
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") { // of such, a short tar fills a disk
			return 0, fmt.Errorf("%s has holes", name)
		}
	}
	return h.Size, nil
}

func parseManifest(data []byte) (m Manifest, err error) {
	if len(data) > maxManifest {
		return m, fmt.Errorf("it has more than %d bytes", maxManifest)
	}
	var first struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(data, &first); err != nil {
		return m, err
	}
	if first.Format > BackupFormat {
		return m, fmt.Errorf("its format is %d, and this berm knows %d: use the newer berm", first.Format, BackupFormat)
	}
	if err := proxy.DecodeJSON(data, &m); err != nil {
		return m, err
	}
	_, keyErr := parseSealKey(m.SealKey)
	if m.Format < 1 || (m.SealKey == "") != (m.Format == 1) || m.Format > 1 && keyErr != nil || m.Instance == "" || m.Created.IsZero() || len(m.Members) != 1 || m.Members[0].Name != StateStore ||
		strings.ContainsFunc(m.Instance+m.Berm, unicode.IsControl) {
		return m, errors.New("it is not one of a backup")
	}
	return m, nil
}

// interruptible is a reader that ends with the context, also while it waits for input. A
// read of that from which nothing comes is left behind then, for the process' end.
func interruptible(ctx context.Context, r io.Reader) (_ io.Reader, stop func()) {
	out, in := io.Pipe()
	go func() {
		_, err := io.Copy(in, r)
		_ = in.CloseWithError(err) // never fails
	}()
	forget := context.AfterFunc(ctx, func() { _ = in.CloseWithError(context.Cause(ctx)) })
	return out, func() {
		forget()
		_ = out.Close() // nobody writes any more
	}
}

// untilDone reads until the context is done.
type untilDone struct {
	ctx context.Context
	r   io.Reader
}

func (u untilDone) Read(p []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.r.Read(p)
}

// putBackup writes a file for its owner only. Without replace, a file that exists is an
// error.
func PutBackup(name string, replace bool, write func(io.Writer) error) error {
	if err := MayPut(name, replace); err != nil {
		return err
	}
	return atomicfile.Write(name, 0o600, func(w io.Writer) error {
		return cmp.Or(write(w), MayPut(name, replace)) // it took its time
	})
}

func MayPut(name string, replace bool) error {
	info, err := os.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is there, and is no file", name)
	case !replace:
		return fmt.Errorf("%s is there; --force replaces it", name)
	}
	return nil
}
