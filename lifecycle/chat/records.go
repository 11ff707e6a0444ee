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

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

// fewNames is up to how many records are asked for one by one.
const fewNames = 32

func newFile(c Chat, name string, now time.Time) File {
	return File{ID: uuid.NewString(), Tenant: c.Tenant, ChatID: c.ID, Name: name, CreatedAt: now}
}

// with gives a record what its file says.
func (f File) with(fi fs.FileInfo) File {
	f.Size, f.ModifiedAt = fi.Size(), fi.ModTime().UTC()
	return f
}

// known answers the records of names.
func (s *Service) known(ctx context.Context, c Chat, names []string) (map[string]File, error) {
	files := make(map[string]File, len(names))
	if len(names) > fewNames {
		names = slices.Sorted(slices.Values(names))
		err := s.eachRecord(ctx, c, "", names[len(names)-1], func(f File) {
			if _, ok := slices.BinarySearch(names, f.Name); ok {
				files[f.Name] = f
			}
		})
		return files, err
	}
	for _, name := range names {
		f, err := s.opts.Store.FileNamed(ctx, c.Tenant, c.ID, name)
		switch {
		case err == nil:
			files[name] = f
		case !errdefs.IsNotFound(err):
			return nil, storeError(err)
		}
	}
	return files, nil
}

// eachRecord calls f with a chat's records after a name and up to another, or to the end if
// that is empty.
func (s *Service) eachRecord(ctx context.Context, c Chat, after, last string, f func(File)) error {
	const limit = 1000
	for {
		files, err := s.opts.Store.Files(ctx, c.Tenant, c.ID, after, limit)
		if err != nil {
			return storeError(err)
		}
		for _, file := range files {
			if after = file.Name; last != "" && after > last {
				return nil
			}
			f(file)
		}
		if len(files) < limit {
			return nil
		}
	}
}

// page is a part of the attachments in a directory, by name.
type page struct {
	names   []string
	more    bool
	unnamed int
	beyond  bool
}

// readPage answers the first names after a given one, at most limit. It holds few more than
// that, and looks at no more than most attachments, and twice as many entries, however many
// there are.
func readPage(ctx context.Context, dir *os.Root, after string, limit, most int) (p page, err error) {
	top, err := hostdir.Top(dir)
	if err != nil {
		return page{}, err
	}
	defer top.Close()
	// A directory that was opened by os.Root looks at each entry again when it is read; of
	// this one the entries' kinds are told by the directory itself, where it knows them.
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
			switch {
			case attachment && name > after:
				p.names = append(p.names, name)
			case !attachment && name != HistoryName:
				p.unnamed++
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

// batch is how many entries of a directory are held at a time.
const batch = 256

// checkName is a *lifecycle.InvalidError for a name that no attachment can have.
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

// drift is where a chat's records and its directory seem to differ.
type drift struct {
	missing []string // files without a record
	stale   []File   // records without a file
}

// compare answers the records of a page, and where they and the directory differ. After is
// what the page was read with.
func (s *Service) compare(ctx context.Context, c Chat, p page, after string) (map[string]File, drift, error) {
	last := "" // all that follow
	if p.more {
		last = p.names[len(p.names)-1]
	}
	var d drift
	records := make(map[string]File, len(p.names))
	err := s.eachRecord(ctx, c, after, last, func(f File) {
		if _, ok := slices.BinarySearch(p.names, f.Name); ok {
			records[f.Name] = f
		} else {
			d.stale = append(d.stale, f)
		}
	})
	if err != nil {
		return nil, drift{}, err
	}
	for _, name := range p.names {
		if _, ok := records[name]; !ok {
			d.missing = append(d.missing, name)
		}
	}
	return records, d, nil
}

// repair gives files that have no record one, and drops records whose file is gone. What it
// is told may have changed meanwhile: it looks again, under the chat's lock. What a change
// that can't be finished now has brought is left to that.
func (s *Service) repair(ctx context.Context, c Chat, d drift) (adopted []File, dropped int, err error) {
	dir, half, leave, err := s.enterHalf(ctx, c)
	if err != nil {
		return nil, 0, err
	}
	defer leave()
	var ids []string
	for _, f := range d.stale {
		// One that has another kind by now is no attachment any more.
		fi, err := dir.Lstat(f.Name)
		if half.has(f.Name) == nil && (errors.Is(err, fs.ErrNotExist) || err == nil && !fi.Mode().IsRegular()) {
			ids = append(ids, f.ID)
		}
	}
	if len(ids) > 0 {
		if err := s.opts.Store.DeleteFiles(ctx, c.Tenant, ids...); err != nil {
			return nil, 0, storeError(err)
		}
	}
	known, err := s.known(ctx, c, d.missing)
	if err != nil {
		return nil, len(ids), err
	}
	now := time.Now().UTC()
	var fresh []File
	for _, name := range d.missing {
		fi, err := dir.Lstat(name)
		if err != nil || !fi.Mode().IsRegular() {
			continue
		}
		if f, ok := known[name]; ok {
			adopted = append(adopted, f.with(fi))
			continue
		}
		if half.has(name) == nil {
			fresh = append(fresh, newFile(c, name, now).with(fi))
		}
	}
	if len(fresh) > 0 {
		left, err := s.recordsLeft(ctx, c)
		if err != nil {
			return nil, len(ids), err
		}
		fresh = fresh[:min(left, len(fresh))]
		if err := s.opts.Store.PutFiles(ctx, fresh...); err != nil {
			return nil, len(ids), storeError(err)
		}
	}
	s.metrics.repaired("adopted", len(fresh))
	s.metrics.repaired("dropped", len(ids))
	return append(adopted, fresh...), len(ids), nil
}

// recordsLeft is how many more files of a chat can have records.
func (s *Service) recordsLeft(ctx context.Context, c Chat) (int, error) {
	n, err := s.opts.Store.CountFiles(ctx, c.Tenant, c.ID)
	return max(s.most-n, 0), storeError(err)
}

// record answers the record of a file that is there, and makes it if a sandbox wrote the file.
func (s *Service) record(ctx context.Context, c Chat, name string) (File, error) {
	known, err := s.known(ctx, c, []string{name})
	if err != nil {
		return File{}, err
	}
	if f, ok := known[name]; ok {
		return f, nil
	}
	files, _, err := s.repair(ctx, c, drift{missing: []string{name}})
	if err != nil {
		return File{}, err
	}
	if len(files) == 0 {
		return File{}, &FileNotFoundError{Name: name}
	}
	return files[0], nil
}
