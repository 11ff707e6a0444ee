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

// minArchive is the minimum of archiveLimit without a quota, in bytes.
const minArchive = 1 << 30

// ReadTar writes a tar archive of a chat's directory: regular files, directories and symbolic
// links. The error is a *TooLargeError, usually before it writes anything, if the tree is too
// wide or too deep, or the sum of the files' sizes is too large. A sparse file counts with its
// full size. The sum may be the quota or the directory's use of the disk, whichever is larger.
// Without a quota, it may be 1 GiB or four times that use.
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

// archiveLimit returns how many bytes of files an archive of a directory may have. Far more can
// only be the zeros of sparse files. The size of other chats doesn't matter.
func (s *Service) archiveLimit(ctx context.Context, dir *os.Root) (int64, error) {
	used, err := hostdir.Allocated(ctx, dir)
	if err != nil && !errors.Is(err, hostdir.ErrUnbounded) { // with ErrUnbounded, used is a part of the use
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

// WriteTar unpacks all of a tar archive over a chat's directory, or nothing. It merges
// directories. The quota needs room for the archive's files beside the files that they replace.
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

// addUnpacked adds the unpacked files at the top to the stage's files.
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

// checkArchived refuses a path in an archive whose name or kind isn't allowed at the top of a
// chat's directory.
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
