package chat

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

func newRecord(name string) Record {
	return Record{ID: uuid.NewString(), Name: name, CreatedAt: time.Now().UTC()}
}

// typeOf returns the content type of the file with an identity.
func (r Record) typeOf(identity uint64) string {
	switch identity {
	case r.OldIdentity:
		return r.OldType
	case r.Identity:
		return r.ContentType
	}
	if r.Identity == 0 {
		return r.ContentType
	}
	return ""
}

// with joins a record with its file's size and time.
func (c Chat) with(r Record, fi fs.FileInfo, identity uint64) File {
	return File{
		ID: r.ID, Tenant: c.Tenant, ChatID: c.ID, Name: r.Name, ContentType: r.typeOf(identity),
		Size: fi.Size(), CreatedAt: r.CreatedAt, ModifiedAt: fi.ModTime().UTC(),
	}
}

// records returns the records of names, which are sorted.
func (s *Service) records(ctx context.Context, c Chat, names []string) (map[string]Record, error) {
	if len(names) == 0 {
		return nil, nil
	}
	known := make(map[string]Record, len(names))
	err := s.opts.Store.EachRecord(ctx, c.Tenant, c.ID, names[0], names[len(names)-1], func(r Record) {
		if _, ok := slices.BinarySearch(names, r.Name); ok {
			known[r.Name] = r
		}
	})
	return known, storeError(err)
}

// files joins the files of names, which are sorted, with their records. It leaves out files
// that are gone, and those without a record because the chat has too many.
func (s *Service) files(ctx context.Context, c Chat, dir *os.Root, names []string) ([]File, error) {
	known, err := s.records(ctx, c, names)
	if err != nil {
		return nil, err
	}
	if len(known) < len(names) {
		if known, err = s.enroll(ctx, c, names); err != nil {
			return nil, err
		}
	}
	var files []File
	err = hostdir.With(dir, func(d *os.File) error {
		for _, name := range names {
			r, ok := known[name]
			fi, err := dir.Lstat(name)
			if !ok || err != nil || !fi.Mode().IsRegular() {
				continue
			}
			if identity, err := hostdir.Identity(d, name); err == nil {
				files = append(files, c.with(r, fi, identity))
			}
		}
		return nil
	})
	return files, err
}

// file joins an open file with its record.
func (s *Service) file(ctx context.Context, c Chat, f *os.File, fi fs.FileInfo) (File, error) {
	identity, err := hostdir.Identity(f, "")
	if err != nil {
		return File{}, err
	}
	names := []string{fi.Name()}
	known, err := s.records(ctx, c, names)
	if err == nil && len(known) == 0 {
		known, err = s.enroll(ctx, c, names)
	}
	if err != nil {
		return File{}, err
	}
	r, ok := known[fi.Name()]
	if !ok {
		return File{}, &FileNotFoundError{Name: fi.Name()}
	}
	return c.with(r, fi, identity), nil
}

// enroll makes records for files that sandboxes wrote, up to the chat's limit. It returns the
// records of names.
func (s *Service) enroll(ctx context.Context, c Chat, names []string) (map[string]Record, error) {
	dir, leave, err := s.enter(ctx, c)
	if err != nil {
		return nil, err
	}
	defer leave()
	known, err := s.records(ctx, c, names)
	if err != nil {
		return nil, err
	}
	var fresh []Record
	for _, name := range names {
		if _, ok := known[name]; ok {
			continue
		}
		if _, err := hostdir.LstatRegular(dir, name); err == nil {
			fresh = append(fresh, newRecord(name))
		}
	}
	if len(fresh) == 0 {
		return known, nil
	}
	left, err := s.recordsLeft(ctx, c, dir, len(fresh))
	if err != nil {
		return nil, err
	}
	fresh = fresh[:min(left, len(fresh))]
	if err := s.opts.Store.PutRecords(ctx, c.Tenant, c.ID, fresh); err != nil {
		return nil, storeError(err)
	}
	s.metrics.repaired("adopted", len(fresh))
	for _, r := range fresh {
		known[r.Name] = r
	}
	return known, nil
}

// recordsLeft returns how many more records a chat can have. If that is less than want, it
// first drops records without a file. The caller holds the chat's lock.
func (s *Service) recordsLeft(ctx context.Context, c Chat, dir *os.Root, want int) (int, error) {
	n, err := s.opts.Store.CountRecords(ctx, c.Tenant, c.ID)
	if err != nil {
		return 0, storeError(err)
	}
	if s.most-n < want {
		dropped, err := s.prune(ctx, c, dir, "", "")
		if err != nil {
			return 0, err
		}
		n -= dropped
	}
	return max(s.most-n, 0), nil
}

// prune drops the records without a file in a range of names, as of EachRecord. It returns how
// many it dropped. The caller holds the chat's lock.
func (s *Service) prune(ctx context.Context, c Chat, dir *os.Root, from, to string) (int, error) {
	var records []Record // at most as many as a chat may have
	if err := s.opts.Store.EachRecord(ctx, c.Tenant, c.ID, from, to, func(r Record) { records = append(records, r) }); err != nil {
		return 0, storeError(err)
	}
	var ids []string
	for _, r := range records {
		// A file that was replaced by another kind is no attachment any more.
		fi, err := dir.Lstat(r.Name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !fi.Mode().IsRegular() {
			ids = append(ids, r.ID)
		}
	}
	return len(ids), storeError(s.opts.Store.DeleteRecords(ctx, c.Tenant, ids))
}

// page is a part of the attachments in a directory, by name.
type page struct {
	names  []string
	more   bool // there are names after these
	beyond bool // the directory has more than could be read
}

// readPage returns the first names after a given one, at most limit. It keeps few more names
// in memory. It reads at most most attachments and twice as many entries, however many there
// are.
func readPage(ctx context.Context, dir *os.Root, after string, limit, most int) (p page, err error) {
	top, err := hostdir.Top(dir)
	if err != nil {
		return page{}, err
	}
	defer top.Close()
	// ReadDir of a directory that os.Root opened stats every entry. Opened like this, it takes
	// the entries' kinds from the directory, if the file system has them there.
	fd, err := unix.Openat(int(top.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return page{}, err
	}
	d := os.NewFile(uintptr(fd), fmt.Sprintf("/proc/self/fd/%d", fd))
	defer d.Close()
	cut := func() {
		slices.Sort(p.names)
		p.names = slices.Compact(p.names) // a directory that changes may show one twice
		if p.more = p.more || len(p.names) > limit; len(p.names) > limit {
			clear(p.names[limit:])
			p.names = p.names[:limit]
		}
	}
	entries, files := 0, 0
	for {
		if ctx.Err() != nil {
			return page{}, context.Cause(ctx)
		}
		list, err := d.ReadDir(batch)
		for _, e := range list {
			name := e.Name()
			entries++
			attachment := e.Type().IsRegular() && checkName(name) == nil
			if attachment {
				files++
			}
			if entries > 2*most || files > most {
				p.beyond = true
				break
			}
			if attachment && name > after {
				p.names = append(p.names, name)
			}
		}
		if len(p.names) > 2*limit+batch {
			cut()
		}
		switch {
		case p.beyond, errors.Is(err, io.EOF):
			cut()
			return p, nil
		case err != nil:
			return page{}, err
		}
	}
}

// batch is how many entries of a directory are read at a time.
const batch = 256

// checkName returns a *lifecycle.InvalidError for a name that no attachment can have.
func checkName(name string) error {
	var message string
	switch {
	case name == "" || name == "." || name == "..":
		message = "must be a file's name, and not empty, . or .."
	case len(name) > MaxName:
		message = fmt.Sprintf("must be at most %d bytes long", MaxName)
	case !utf8.ValidString(name):
		message = "must be valid UTF-8"
	case strings.ContainsAny(name, `/\`):
		message = `must not hold / or \`
	case strings.ContainsFunc(name, unicode.IsControl):
		message = "must not hold control characters"
	case name == HistoryName:
		message = fmt.Sprintf("must not be %s, which is the chat's history", HistoryName)
	default:
		return nil
	}
	return &lifecycle.InvalidError{Field: "name", Message: message}
}
