package chat

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle/hostdir"
)

// step is a point in a change of a chat.
type step string

// The steps, in their order: a process may die at any of them.
const (
	stepStaged    step = "staged"
	stepReserved  step = "reserved"
	stepRecorded  step = "recorded"
	stepMerged    step = "merged"
	stepDeleting  step = "deleting"   // of a chat that is deleted
	stepMovedAway step = "moved_away" // likewise
	stepUnlinked  step = "unlinked"   // of a file that is deleted

	stepDiscarding step = "discarding" // of a deleted chat's files
)

func (s *Service) at(p step) error {
	if s.step == nil {
		return nil
	}
	return s.step(p)
}

// commit moves the staged files into the chat's directory, and returns those with records.
// Made says that the first one replaced nothing. Prepare, if it isn't nil, is called with the
// chat's lock held, and may stage more.
//
// commit writes the records before it moves their files. A record names the file that its
// content type is for, and also keeps the type of the replaced file. So Berm may die at any
// moment: each file is the old one or the new one, and has its own content type.
func (st *stage) commit(ctx context.Context, prepare func(dir *os.Root) error) (files []File, made bool, err error) {
	s := st.s
	// Do slow work before acquiring the lock.
	if prepare == nil {
		if err := st.enlist(ctx); err != nil {
			return nil, false, err
		}
	}
	if err := st.room.Refresh(ctx); err != nil {
		return nil, false, err
	}
	dir, leave, err := s.enter(ctx, st.chat)
	if err != nil {
		return nil, false, err
	}
	defer leave()
	if prepare != nil {
		if err := prepare(dir); err != nil {
			return nil, false, err
		}
		if err := st.enlist(ctx); err != nil {
			return nil, false, err
		}
	}
	replaced, made, err := st.replacing(dir)
	if err != nil {
		return nil, false, err
	}
	if err := hostdir.CheckMerge(st.dir, dir); err != nil {
		return nil, false, err
	}
	records, err := st.records(ctx, dir)
	if err != nil {
		return nil, false, err
	}
	if err := s.at(stepStaged); err != nil {
		return nil, false, err
	}
	n, exact := st.counted()
	if err := st.room.Commit(ctx, n, replaced); err != nil {
		return nil, false, err
	}
	asCommitted := false
	defer func() { st.room.Done(asCommitted) }()
	ctx = context.WithoutCancel(ctx) // finish even if the caller leaves
	if err := s.at(stepReserved); err != nil {
		return nil, false, err
	}
	if err := s.opts.Store.PutRecords(ctx, st.chat.Tenant, st.chat.ID, records); err != nil {
		return nil, false, storeError(err)
	}
	if err := s.at(stepRecorded); err != nil {
		return nil, false, err
	}
	if err := hostdir.Merge(st.dir, dir); err != nil {
		return nil, false, err
	}
	if err := s.at(stepMerged); err != nil {
		return nil, false, err
	}
	asCommitted = exact
	return st.made(records), made, nil
}

// replacing returns how many bytes of the chat's directory the staged files replace. Made says
// that the first one replaces nothing.
func (st *stage) replacing(dir *os.Root) (replaced int64, made bool, err error) {
	made = true
	for i, f := range st.files {
		fi, err := dir.Lstat(f.Name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return 0, false, err
		case f.NoClash:
			return 0, false, &FileError{Name: f.Name, Class: errdefs.ErrAlreadyExists, Message: "is there already"}
		case fi.Mode().IsRegular():
			replaced += counted(fi)
			st.inexact = st.inexact || linked(fi)
		case fi.IsDir():
			return 0, false, hostdir.WrongKind(f.Name, hostdir.InWayOfFile)
		}
		made = made && i > 0
	}
	return replaced, made, nil
}

// records returns the records of the staged attachments. A name that has a record keeps its
// ID. The error is a *FileError if the chat would have too many records.
func (st *stage) records(ctx context.Context, dir *os.Root) ([]Record, error) {
	var names []string
	for _, f := range st.files {
		if f.record {
			names = append(names, f.Name)
		}
	}
	slices.Sort(names)
	known, err := st.s.records(ctx, st.chat, names)
	if err != nil {
		return nil, err
	}
	if fresh := len(names) - len(known); fresh > 0 {
		left, err := st.s.recordsLeft(ctx, st.chat, dir, fresh)
		if err != nil {
			return nil, err
		}
		if left < fresh {
			return nil, &FileError{Name: names[len(names)-1], Class: errdefs.ErrResourceExhausted,
				Message: fmt.Sprintf("would be one of more than %d files of a chat, which is the most: delete some first", st.s.most)}
		}
	}
	var records []Record
	err = hostdir.With(st.dir, func(staged *os.File) error {
		return hostdir.With(dir, func(chat *os.File) error {
			for _, f := range st.files {
				if !f.record {
					continue
				}
				r, ok := known[f.Name]
				if !ok {
					r = newRecord(f.Name)
				} else if was, err := hostdir.Identity(chat, f.Name); err == nil {
					r.OldType, r.OldIdentity = r.typeOf(was), was
				}
				r.ContentType = f.ContentType
				if r.Identity, err = hostdir.Identity(staged, f.Name); err != nil {
					return err
				}
				records = append(records, r)
			}
			return nil
		})
	})
	return records, err
}

// made joins the records of staged attachments with their files, as they were when staged.
func (st *stage) made(records []Record) (files []File) {
	for _, f := range st.files {
		if f.record {
			r := records[len(files)]
			files = append(files, st.chat.with(r, f.info, r.Identity))
		}
	}
	return files
}

// counted returns how many bytes the staged files add to the chat. Exact says that only files
// at the top are staged, and that they replace only such files, without other links.
func (st *stage) counted() (n int64, exact bool) {
	if st.inexact {
		return st.bytes, false
	}
	for _, f := range st.files {
		n += counted(f.info)
	}
	return n, true
}
