package chat

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

// step is a point that a change of a chat has come to.
type step string

// The steps, in their order: a process may die at any of them.
const (
	stepStaged    step = "staged"
	stepReserved  step = "reserved"
	stepIntended  step = "intended"
	stepMerged    step = "merged"
	stepFinished  step = "finished"
	stepDeleting  step = "deleting"   // of a chat that is deleted
	stepMovedAway step = "moved_away" // likewise
	stepUnlinked  step = "unlinked"   // of a file that is deleted

	stepDiscarding step = "discarding" // what a deleted chat held
)

// deletion begins the ID of a change that takes a whole chat away, to the staging directory
// of that name.
const deletion = "deleted-"

func (s *Service) at(p step) error {
	if s.step == nil {
		return nil
	}
	return s.step(p)
}

// commit has what is staged take its place, all or none, and answers the files that have
// records; made tells that there was nothing of the name of the first one. Prepare, if it
// isn't nil, is called under the chat's lock, and may stage more.
func (st *stage) commit(ctx context.Context, prepare func(dir *os.Root) error) (files []File, made bool, err error) {
	s := st.s
	// What takes long comes before the lock.
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
	replaced, made, err := st.makeWay(dir)
	if err != nil {
		return nil, false, err
	}
	if err := hostdir.CheckMerge(st.dir, dir); err != nil {
		return nil, false, err
	}
	change := Change{ID: st.id, Tenant: st.chat.Tenant, ChatID: st.chat.ID}
	if change.Files, err = st.records(ctx); err != nil {
		return nil, false, err
	}
	if err := st.sync(); err != nil {
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
	ctx = context.WithoutCancel(ctx) // from here on it is all or nothing
	if err := s.at(stepReserved); err != nil {
		return nil, false, err
	}
	if err := s.opts.Store.PutChange(ctx, change); err != nil {
		_ = s.opts.Store.FinishChange(ctx, change, nil) // should it have been put nevertheless
		return nil, false, storeError(err)
	}
	st.kept = true
	if over, err := s.finish(ctx, change, dir); err != nil {
		if !over {
			s.pend(ctx, change, err)
		}
		return nil, false, err
	}
	asCommitted = exact
	return change.Files, made, nil
}

// makeWay looks at what is in the places of staged files, and answers how many bytes go with
// it.
func (st *stage) makeWay(dir *os.Root) (replaced int64, made bool, err error) {
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
		case fi.IsDir():
			return 0, false, hostdir.WrongKind(f.Name, hostdir.InWayOfFile)
		}
		made = made && i > 0
	}
	return replaced, made, nil
}

// records answers those of the staged attachments, which keep the identity of their names.
// A *FileError if the chat would have more than it may.
func (st *stage) records(ctx context.Context) ([]File, error) {
	var names []string
	for _, f := range st.files {
		if f.record {
			names = append(names, f.Name)
		}
	}
	known, err := st.s.known(ctx, st.chat, names)
	if err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	var files []File
	room := -1 // not known
	for _, f := range st.files {
		if !f.record {
			continue
		}
		file, ok := known[f.Name]
		if !ok {
			if room < 0 {
				if room, err = st.s.recordsLeft(ctx, st.chat); err != nil {
					return nil, err
				}
			}
			if room == 0 {
				return nil, &FileError{Name: f.Name, Class: errdefs.ErrResourceExhausted,
					Message: fmt.Sprintf("would be one of more than %d files of a chat, which is the most: delete some first", st.s.most)}
			}
			room--
			file = newFile(st.chat, f.Name, now)
		}
		file.ContentType = f.ContentType
		files = append(files, file.with(f.info))
	}
	return files, nil
}

// sync makes the staging directory's entries durable.
func (st *stage) sync() error {
	staging, err := st.s.openStaging()
	if err != nil {
		return err
	}
	defer staging.Close()
	return errors.Join(hostdir.With(st.dir, (*os.File).Sync), hostdir.With(staging, (*os.File).Sync))
}

// counted is what the staged files add to the chat; exact tells whether there is nothing else
// staged, and nothing that makes way but what is at the top.
func (st *stage) counted() (n int64, exact bool) {
	if st.trees {
		return st.bytes, false
	}
	for _, f := range st.files {
		n += counted(f.info)
	}
	return n, true
}

// finish carries out a durable change, as far as that hasn't been done. The chat's lock
// must be held. An error doesn't end it unless over says so: something of another kind has
// taken the place of a file meanwhile, and stays, or nothing at all could be moved.
func (s *Service) finish(ctx context.Context, change Change, dir *os.Root) (over bool, err error) {
	staging, err := s.openStaging()
	if err != nil {
		return false, err
	}
	defer staging.Close()
	from, err := staging.OpenRoot(change.ID)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	here := func(string) bool { return false }
	var failed error
	if err == nil {
		defer from.Close()
		if err := s.at(stepIntended); err != nil {
			return false, err
		}
		if failed = hostdir.Merge(from, dir); failed != nil && !isClash(failed) && !untouched(from, change) {
			return false, failed
		}
		here = func(name string) bool {
			_, err := from.Lstat(name)
			return !errors.Is(err, fs.ErrNotExist)
		}
	} // else it was finished, and the machine died before it was forgotten
	if err := s.at(stepMerged); err != nil {
		return false, err
	}
	var files []File
	for _, f := range change.Files {
		fi, err := dir.Lstat(f.Name)
		if err == nil && fi.Mode().IsRegular() && !here(f.Name) {
			files = append(files, f.with(fi))
		}
	}
	if err := s.opts.Store.FinishChange(ctx, change, files); err != nil && !errdefs.IsNotFound(err) {
		return false, storeError(err)
	}
	if err := s.at(stepFinished); err != nil {
		return false, err
	}
	s.unstage(ctx, change.ID)
	return true, failed
}

// untouched tells whether nothing of a change has been moved. Of one with directories it
// can't be told.
func untouched(from *os.Root, change Change) bool {
	d, err := hostdir.Top(from)
	if err != nil {
		return false
	}
	defer d.Close()
	files := 0
	err = hostdir.Each(d, func(name string) error {
		_, err := hostdir.LstatRegular(from, name)
		files++
		return err
	})
	return err == nil && files >= max(1, len(change.Files))
}

// pend keeps a change that couldn't be finished, so that it is before the chat changes again.
func (s *Service) pend(ctx context.Context, change Change, err error) {
	s.log.ErrorContext(ctx, "chat_change_pending", "tenant", change.Tenant, "chat_id", change.ChatID, "change", change.ID, "error", err)
	s.mu.Lock()
	defer s.mu.Unlock()
	k := key{change.Tenant, change.ChatID}
	s.staged[change.ID] = true
	s.pending[k] = append(s.pending[k], change)
}

// finishPending finishes what couldn't be before, and answers what can't be now. The chat's
// lock must be held.
func (s *Service) finishPending(ctx context.Context, c Chat) *unfinished {
	s.mu.Lock()
	changes := s.pending[c.key()]
	s.mu.Unlock()
	if len(changes) == 0 {
		return nil
	}
	left := func(changes []Change, err error) *unfinished {
		u := &unfinished{err: err, names: map[string]bool{}}
		for _, change := range changes {
			for _, f := range change.Files {
				u.names[f.Name] = true
			}
		}
		return u
	}
	ctx = context.WithoutCancel(ctx)
	dir, err := s.layout(ctx, c, false)
	if err != nil {
		return left(changes, err)
	}
	defer dir.Close()
	for i, change := range changes {
		over, err := s.finish(ctx, change, dir)
		if !over {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.pending[c.key()] = changes[i:]
			return left(changes[i:], err)
		}
		s.log.InfoContext(ctx, "chat_change_finished", append(c.attrs(), "change", change.ID, "error", err)...)
	}
	s.mu.Lock()
	delete(s.pending, c.key())
	s.mu.Unlock()
	s.opts.Quotas.Touched(c.Tenant, c.ID) // usage was told of none of it
	return nil
}

// finishDeletion deletes a chat whose directory an earlier process has moved away, and
// leaves one alone that has its directory still, or again.
func (s *Service) finishDeletion(ctx context.Context, change Change) error {
	_, err := lifecycle.ChatDir(s.root, change.Tenant, change.ChatID)
	if !errors.Is(err, fs.ErrNotExist) {
		return storeError(s.opts.Store.FinishChange(ctx, change, nil))
	}
	s.ended.Finished++
	return storeError(s.opts.Store.DeleteChat(ctx, change.Tenant, change.ChatID))
}

// rollForward finishes the changes that an earlier process didn't.
func (s *Service) rollForward(ctx context.Context) error {
	changes, err := s.opts.Store.Changes(ctx)
	if err != nil {
		return storeError(err)
	}
	for _, change := range changes {
		k := key{change.Tenant, change.ChatID}
		if strings.HasPrefix(change.ID, deletion) {
			if err := s.finishDeletion(ctx, change); err != nil {
				return err
			}
			continue
		}
		s.staged[change.ID] = true
		s.pending[k] = append(s.pending[k], change)
	}
	for k, pending := range s.pending {
		c, err := s.chat(ctx, k.tenant, k.chatID)
		if isNoChat(err) { // the changes went with it
			for _, change := range pending {
				delete(s.staged, change.ID)
			}
			delete(s.pending, k)
			continue
		}
		if err != nil {
			return err
		}
		_, leave, err := s.enter(ctx, c)
		if err != nil {
			// Others aren't kept waiting for it, and it is tried again before the chat changes.
			s.log.ErrorContext(ctx, "chat_change_pending", append(c.attrs(), "error", err)...)
			continue
		}
		leave()
		s.ended.Finished += len(pending)
	}
	return nil
}
