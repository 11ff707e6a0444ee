package chat

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle/hostdir"
)

// FileList is one page of a chat's files.
type FileList struct {
	Files  []File
	More   bool // there are more files, after the last one
	Beyond bool // the chat has more than MaxFiles, and not all are listed
}

// Files lists a chat's files, sorted by name, with names above after: at most limit, and no more
// than 10,000. The list includes files that a sandbox has written.
func (s *Service) Files(ctx context.Context, tenant, chatID, after string, limit int) (list FileList, err error) {
	defer func() { s.metrics.count("list", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return FileList{}, err
	}
	dir, err := s.open(ctx, c)
	if err != nil {
		return FileList{}, err
	}
	defer dir.Close()
	for {
		p, err := readPage(ctx, dir, after, bounded(limit), s.most)
		if err != nil {
			return FileList{}, err
		}
		list := FileList{More: p.more, Beyond: p.beyond}
		if list.Files, err = s.files(ctx, c, dir, p.names); err != nil {
			return FileList{}, err
		}
		if len(list.Files) > 0 || !p.more {
			return list, nil
		}
		after = p.names[len(p.names)-1] // all of them have gone meanwhile
	}
}

// File returns a file.
func (s *Service) File(ctx context.Context, tenant, fileID string) (File, error) {
	chatID, r, err := s.opts.Store.RecordOf(ctx, tenant, fileID)
	if errdefs.IsNotFound(err) {
		return File{}, &FileNotFoundError{Name: fileID}
	}
	if err != nil {
		return File{}, storeError(err)
	}
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return File{}, err
	}
	f, err := s.look(ctx, c, r.Name)
	if err == nil && f.ID != fileID { // another file has taken the name
		return File{}, &FileNotFoundError{Name: fileID}
	}
	return f, err
}

// FileNamed returns a file.
func (s *Service) FileNamed(ctx context.Context, tenant, chatID, name string) (File, error) {
	c, err := s.named(ctx, tenant, chatID, name)
	if err != nil {
		return File{}, err
	}
	return s.look(ctx, c, name)
}

// named checks a name, and returns the chat.
func (s *Service) named(ctx context.Context, tenant, chatID, name string) (Chat, error) {
	if err := checkName(name); err != nil {
		return Chat{}, err
	}
	return s.Get(ctx, tenant, chatID)
}

func (s *Service) look(ctx context.Context, c Chat, name string) (File, error) {
	dir, err := s.open(ctx, c)
	if err != nil {
		return File{}, err
	}
	defer dir.Close()
	if _, err := hostdir.LstatRegular(dir, name); err != nil {
		return File{}, err
	}
	files, err := s.files(ctx, c, dir, []string{name})
	if err != nil {
		return File{}, err
	}
	if len(files) == 0 {
		return File{}, &FileNotFoundError{Name: name}
	}
	return files[0], nil
}

// Content is an open file. The caller closes it. A sandbox may change the file meanwhile.
type Content struct {
	*os.File
	Info File   // of a history without an ID
	ETag string // weak, with its quotes
}

// Content opens a file.
func (s *Service) Content(ctx context.Context, tenant, chatID, name string) (_ *Content, err error) {
	defer func() { s.metrics.count("read", err) }()
	c, err := s.named(ctx, tenant, chatID, name)
	if err != nil {
		return nil, err
	}
	return s.content(ctx, c, name)
}

func (s *Service) content(ctx context.Context, c Chat, name string) (*Content, error) {
	dir, err := s.open(ctx, c)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	f, fi, err := hostdir.OpenRegular(dir, name)
	if err != nil {
		return nil, err
	}
	file := c.history(fi)
	if name != HistoryName {
		file, err = s.file(ctx, c, f, fi)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return &Content{File: f, Info: file, ETag: etag(fi)}, nil
}

// etag returns a file's ETag, which changes with every change of the file. It is weak, since two
// writes may be too close for the file system's clock.
func etag(fi fs.FileInfo) string {
	st := fi.Sys().(*syscall.Stat_t)
	return fmt.Sprintf(`W/"%x-%x-%x"`, st.Ctim.Nano(), st.Size, st.Ino)
}

// DeleteFile removes a file.
func (s *Service) DeleteFile(ctx context.Context, tenant, chatID, name string) error {
	return s.deleteFile(ctx, tenant, chatID, name, "")
}

// DeleteFileID removes a file by its ID. It keeps another file that has taken the name.
func (s *Service) DeleteFileID(ctx context.Context, tenant, fileID string) error {
	f, err := s.File(ctx, tenant, fileID)
	if err != nil {
		return err
	}
	return s.deleteFile(ctx, tenant, f.ChatID, f.Name, f.ID)
}

// deleteFile removes a file. If id isn't empty, the file must have that ID.
func (s *Service) deleteFile(ctx context.Context, tenant, chatID, name, id string) (err error) {
	defer func() { s.metrics.count("delete_file", err) }()
	c, err := s.named(ctx, tenant, chatID, name)
	if err != nil {
		return err
	}
	dir, leave, err := s.enter(ctx, c)
	if err != nil {
		return err
	}
	defer leave()
	if id != "" {
		known, err := s.records(ctx, c, []string{name})
		if err != nil {
			return err
		}
		if known[name].ID != id {
			return &FileNotFoundError{Name: id}
		}
	}
	_, gone := hostdir.LstatRegular(dir, name)
	if gone != nil && !errdefs.IsNotFound(gone) {
		return gone
	}
	ctx = context.WithoutCancel(ctx) // remove both the file and its record
	if gone == nil {
		n, err := s.remove(ctx, c, dir, []string{name})
		if err != nil {
			return err
		}
		if n == 0 {
			return hostdir.WrongKind(name, "is not a regular file")
		}
	}
	if _, err := s.prune(ctx, c, dir, name, name); err != nil {
		return err
	}
	return gone
}

// remove unlinks files with their records, and returns how many files existed.
func (s *Service) remove(ctx context.Context, c Chat, dir *os.Root, names []string) (int, error) {
	w, err := s.opts.Quotas.Workspace(ctx, c.Tenant, c.WorkspaceID)
	if err != nil {
		return 0, err
	}
	n, err := unlink(dir, names)
	if n > 0 {
		s.opts.Quotas.Freed(w, c.ID)
	}
	if err != nil {
		return n, err
	}
	return n, s.at(stepUnlinked)
}

// DeleteFiles removes all regular files of a chat but its history, and returns how many. Files
// that a sandbox writes meanwhile may stay.
func (s *Service) DeleteFiles(ctx context.Context, tenant, chatID string) (n int, err error) {
	defer func() { s.metrics.count("delete_file", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return 0, err
	}
	for range 10 * MaxFiles / maxPage { // bounded, since a sandbox may write new files without end
		p, deleted, err := s.deletePage(ctx, c)
		n += deleted
		if err != nil || len(p.names) == 0 || !p.more && !p.beyond {
			return n, err
		}
	}
	return n, nil
}

// deletePage removes one page of files.
func (s *Service) deletePage(ctx context.Context, c Chat) (p page, n int, err error) {
	dir, leave, err := s.enter(ctx, c)
	if err != nil {
		return page{}, 0, err
	}
	defer leave()
	p, err = readPage(ctx, dir, "", maxPage, s.most)
	if err != nil {
		return page{}, 0, err
	}
	ctx = context.WithoutCancel(ctx) // the records go with the files
	var names []string
	for _, name := range p.names {
		if _, err := hostdir.LstatRegular(dir, name); err == nil {
			names = append(names, name)
		}
	}
	if n, err = s.remove(ctx, c, dir, names); err != nil {
		return p, n, err
	}
	to := ""
	if p.more {
		to = p.names[len(p.names)-1]
	}
	_, err = s.prune(ctx, c, dir, "", to)
	return p, n, err
}
