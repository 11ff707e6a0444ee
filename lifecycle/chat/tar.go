package chat

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

// minArchive is what an archive may always have in it where there is no quota, in bytes.
const minArchive = 1 << 30

// ReadTar writes an archive of all that a chat's directory holds: regular files,
// directories and symbolic links. It is a *TooLargeError, as a rule before anything is
// written, if there are more or deeper directories than can be archived, or if the sizes of
// the files, where a sparse one counts in full, are together more than both the quota and
// what is in the directory takes; without a quota, than both 1 GiB and four times that.
func (s *Service) ReadTar(ctx context.Context, tenant, chatID string, w io.Writer) (err error) {
	defer func() { s.metrics.count("archive", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return err
	}
	dir, err := s.open(ctx, c)
	if err != nil {
		return err
	}
	defer dir.Close()
	limit, err := s.archiveLimit(ctx, dir)
	if err != nil {
		return err
	}
	return hostdir.Tar(ctx, dir, until(ctx, w.Write), limit)
}

// archiveLimit is how many bytes an archive of a directory may have in it: far more can only
// be the zeros of sparse files. Other chats have no part in it.
func (s *Service) archiveLimit(ctx context.Context, dir *os.Root) (int64, error) {
	used, err := hostdir.Allocated(ctx, dir)
	if err != nil && !errors.Is(err, hostdir.ErrUnbounded) { // then it is what was found
		return 0, err
	}
	if quota := s.opts.Quotas.QuotaBytes(); quota > 0 {
		return max(quota, used), nil
	}
	return max(minArchive, 4*min(used, math.MaxInt64/4)), nil
}

// ioFunc is a reader or a writer.
type ioFunc func(p []byte) (int, error)

func (f ioFunc) Read(p []byte) (int, error)  { return f(p) }
func (f ioFunc) Write(p []byte) (int, error) { return f(p) }

// until returns f as it is until ctx is done. Then it fails.
func until(ctx context.Context, f ioFunc) ioFunc {
	return func(p []byte) (int, error) {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		return f(p)
	}
}

// WriteTar unpacks an archive over a chat's directory, all or nothing. Directories are
// merged. There has to be room for all that is in it beside what it takes the place of.
func (s *Service) WriteTar(ctx context.Context, tenant, chatID string, r io.Reader) (err error) {
	defer func() { s.metrics.count("unpack", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return err
	}
	st, err := s.stage(ctx, c, 0, 0)
	if err != nil {
		return err
	}
	defer st.end(ctx)
	err = hostdir.Untar(ctx, until(ctx, r.Read), st.dir, hostdir.UntarOptions{Give: st.owner.Give, Check: checkArchived, Grow: func(total, more int64) error {
		if err := st.grow(ctx, total); err != nil {
			return err
		}
		s.metrics.written.Add(float64(more))
		st.bytes = total
		return nil
	}})
	if bad, ok := errors.AsType[*hostdir.ArchiveError](err); ok {
		return &lifecycle.InvalidError{Message: bad.Message}
	}
	if err != nil {
		return st.writeError(ctx, "the archive", err)
	}
	if err := st.addUnpacked(ctx); err != nil {
		return err
	}
	_, _, err = st.commit(ctx, nil)
	return err
}

// addUnpacked notes the files at the top of what was unpacked.
func (st *stage) addUnpacked(ctx context.Context) error {
	st.inexact = true
	p, err := readPage(ctx, st.dir, "", hostdir.MaxEntries, hostdir.MaxEntries)
	if err != nil {
		return err
	}
	for _, name := range p.names {
		fi, err := hostdir.LstatRegular(st.dir, name)
		if err != nil {
			return err
		}
		st.files = append(st.files, staged{PutFile: PutFile{Name: name}, record: true, info: fi})
	}
	fi, err := hostdir.LstatRegular(st.dir, HistoryName)
	if err == nil {
		st.files = append(st.files, staged{PutFile: PutFile{Name: HistoryName}, info: fi})
	}
	return nil
}

// checkArchived refuses a path in an archive that would put something at the top of a chat
// that can't be there.
func checkArchived(elements []string, kind byte) error {
	var invalid *lifecycle.InvalidError
	switch {
	case elements[0] == HistoryName && (len(elements) > 1 || kind != tar.TypeReg):
		return &hostdir.ArchiveError{Message: fmt.Sprintf("%q in the archive must be a regular file", HistoryName)}
	case len(elements) == 1 && kind == tar.TypeReg && elements[0] != HistoryName && errors.As(checkName(elements[0]), &invalid):
		return &hostdir.ArchiveError{Message: fmt.Sprintf("%q in the archive can't be the name of a file: it %s", elements[0], invalid.Message)}
	}
	return nil
}
