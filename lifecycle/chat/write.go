package chat

import (
	"context"
	"errors"
	"io"
)

// PutFile describes a file to write.
type PutFile struct {
	Name        string
	ContentType string // empty: not known
	Size        int64  // bytes; -1: not known. Other content is a *lifecycle.InvalidError
	NoClash     bool   // fail in errdefs' AlreadyExists class if the file exists
}

// Put writes a whole file, or nothing. Made says that there was no file of the name.
func (s *Service) Put(ctx context.Context, tenant, chatID string, f PutFile, r io.Reader) (file File, made bool, err error) {
	defer func() { s.metrics.count("write", err) }()
	if err := checkName(f.Name); err != nil {
		return File{}, false, err
	}
	files, made, err := s.put(ctx, tenant, chatID, func() (PutFile, io.Reader, error) {
		next := r
		if r = nil; next == nil {
			return PutFile{}, nil, io.EOF
		}
		return f, next, nil
	})
	if err != nil {
		return File{}, false, err
	}
	return files[0], made, nil
}

// PutAll writes all of several files, or none. Next returns the next file, or io.EOF.
func (s *Service) PutAll(ctx context.Context, tenant, chatID string, next func() (PutFile, io.Reader, error)) (files []File, err error) {
	defer func() { s.metrics.count("write", err) }()
	files, _, err = s.put(ctx, tenant, chatID, next)
	return files, err
}

func (s *Service) put(ctx context.Context, tenant, chatID string, next func() (PutFile, io.Reader, error)) (files []File, made bool, err error) {
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return nil, false, err
	}
	var st *stage
	for {
		f, r, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = checkName(f.Name)
		}
		if err != nil {
			return nil, false, err
		}
		replaced, err := s.early(ctx, c, f)
		if err != nil {
			return nil, false, err
		}
		if st == nil {
			if st, err = s.stage(ctx, c, max(f.Size, 0), replaced); err != nil {
				return nil, false, err
			}
			defer st.end(ctx)
		} else {
			st.room.Replaces(replaced)
		}
		fi, err := st.write(ctx, f.Name, f.Size, 0, r)
		if err != nil {
			return nil, false, err
		}
		st.files = append(st.files, staged{PutFile: f, record: true, info: fi})
	}
	if st == nil {
		return nil, false, nil
	}
	return st.commit(ctx, nil)
}

// early returns how many bytes a file replaces. It refuses a file that can't be written, before
// the caller sends the content. commit checks this again.
func (s *Service) early(ctx context.Context, c Chat, f PutFile) (replaced int64, err error) {
	dir, err := s.open(ctx, c)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	st := stage{files: []staged{{PutFile: f}}}
	replaced, _, err = st.replacing(dir)
	return replaced, err
}
