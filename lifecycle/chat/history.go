package chat

import (
	"context"
	"io"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle/hostdir"
)

// additionName is the name of an addition to a history in the staging directory.
const additionName = "addition"

// History opens a chat's history. If a sandbox has removed it, History makes an empty one. If a
// sandbox has replaced it by another kind of file, the error is a *FileError.
func (s *Service) History(ctx context.Context, tenant, chatID string) (_ *Content, err error) {
	defer func() { s.metrics.count("read", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return nil, err
	}
	content, err := s.content(ctx, c, HistoryName)
	if !errdefs.IsNotFound(err) {
		return content, err
	}
	_, leave, err := s.enter(ctx, c)
	if err != nil {
		return nil, err
	}
	defer leave()
	return s.content(ctx, c, HistoryName)
}

// history is a chat's history, which has no record.
func (c Chat) history(fi fs.FileInfo) File {
	return c.with(Record{Name: HistoryName, CreatedAt: c.CreatedAt}, fi, 0)
}

// PutHistory replaces a chat's history. The error is a *TooLargeError over MaxHistory. Size is as
// in PutFile.
func (s *Service) PutHistory(ctx context.Context, tenant, chatID string, size int64, r io.Reader) (_ File, err error) {
	defer func() { s.metrics.count("write", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return File{}, err
	}
	replaced, err := s.early(ctx, c, PutFile{Name: HistoryName})
	if err != nil {
		return File{}, err
	}
	return s.writeHistory(ctx, c, HistoryName, size, replaced, r)
}

// AppendHistory adds all of r to a chat's history, or nothing. Size and errors are as in
// PutHistory. It copies the old history, so that a crash leaves no part of an addition. A sandbox
// that writes to the history at the same moment may lose its write.
func (s *Service) AppendHistory(ctx context.Context, tenant, chatID string, size int64, r io.Reader) (_ File, err error) {
	defer func() { s.metrics.count("append", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return File{}, err
	}
	return s.writeHistory(ctx, c, additionName, size, 0, r)
}

// writeHistory stages r, and commits it as the history. The name is HistoryName, or additionName
// if the history goes on with r.
func (s *Service) writeHistory(ctx context.Context, c Chat, name string, size, replaced int64, r io.Reader) (File, error) {
	if size > MaxHistory {
		return File{}, &TooLargeError{Limit: MaxHistory}
	}
	st, err := s.stage(ctx, c, max(size, 0), replaced)
	if err != nil {
		return File{}, err
	}
	defer st.end(ctx)
	fi, err := st.write(ctx, name, size, MaxHistory, r)
	if err != nil {
		return File{}, err
	}
	st.files = []staged{{PutFile: PutFile{Name: HistoryName}, info: fi}}
	var prepare func(*os.Root) error
	if name == additionName {
		prepare = func(dir *os.Root) error { return st.join(ctx, dir) }
	}
	if _, _, err := st.commit(ctx, prepare); err != nil {
		return File{}, err
	}
	return c.history(st.files[0].info), nil
}

// join stages a new history: the one in the chat's directory, and then the staged addition.
func (st *stage) join(ctx context.Context, dir *os.Root) error {
	addition, err := st.dir.Open(additionName)
	if err != nil {
		return err
	}
	defer addition.Close()
	parts := []io.Reader{addition}
	old, fi, err := hostdir.OpenRegular(dir, HistoryName)
	switch {
	case err == nil:
		defer old.Close()
		// Copy no more than its size, since a sandbox may be writing.
		parts = []io.Reader{io.LimitReader(old, fi.Size()), addition}
		st.room.Replaces(counted(fi))
	case !errdefs.IsNotFound(err):
		return err
	}
	st.bytes = 0 // the addition won't stay beside it
	if fi, err = st.write(ctx, HistoryName, -1, MaxHistory, io.MultiReader(parts...)); err != nil {
		return err
	}
	st.files[0].info = fi
	return st.dir.Remove(additionName)
}
