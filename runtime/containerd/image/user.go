package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/user"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

const (
	// maxAccountFile bounds what is read of a file of accounts. A larger one counts
	// as empty.
	maxAccountFile = 4 << 20
	// readTimeout bounds the reading of an image's files of accounts, which goes on when its
	// callers leave. viewLease is how long the engine keeps the view of the image if this
	// process ends meanwhile.
	readTimeout = time.Minute
	viewLease   = 5 * time.Minute

	// cleanupTimeout bounds the removal of such a view.
	cleanupTimeout = 10 * time.Second
)

// Account is who a process is.
type Account struct {
	UID, GID uint32
	Groups   []uint32 // the primary one first
}

// accountFiles are what /etc/passwd and /etc/group hold; nothing where there is none.
type accountFiles struct{ passwd, group []byte }

// resolve finds a user as Docker does; empty is 0.
func (f *accountFiles) resolve(name string) (Account, error) {
	u, err := user.GetExecUser(name, nil, bytes.NewReader(f.passwd), bytes.NewReader(f.group))
	if err != nil {
		return Account{}, runtime.Invalid("user %q: %w", name, err)
	}
	// The primary group is among them, or a process could drop it, and with it what
	// a file's mode denies to that group.
	groups := append([]int{u.Gid}, u.Sgids...)
	for _, id := range append(groups, u.Uid) {
		// What the files say wasn't checked, and 1<<32 would be root.
		if id < 0 || id > math.MaxInt32 {
			return Account{}, runtime.Invalid("user %q: the id %d can't be used", name, id)
		}
	}
	out := Account{UID: uint32(u.Uid), GID: uint32(u.Gid)} //nolint:gosec // checked above
	for _, gid := range groups {
		if g := uint32(gid); !slices.Contains(out.Groups, g) { //nolint:gosec // the same
			out.Groups = append(out.Groups, g)
		}
	}
	return out, nil
}

// isNumeric reports whether a user is "uid:gid", for which no files are needed.
func isNumeric(name string) bool {
	uid, gid, _ := strings.Cut(name, ":")
	_, uidErr := strconv.ParseUint(uid, 10, 32)
	_, gidErr := strconv.ParseUint(gid, 10, 32)
	return uidErr == nil && gidErr == nil
}

// Account resolves a user ("", "uid", "uid:gid", "name", "name:group") in an
// image; empty is the image's own, and root where it has none. A name that the image
// doesn't know is InvalidArgument. It is part of a call, which classes other errors.
func (s *Store) Account(ctx context.Context, img *Image, name string) (Account, error) {
	if name == "" {
		name = img.Config.User
	}
	if isNumeric(name) || img.ChainID == "" {
		return new(accountFiles).resolve(name)
	}
	files, ok := s.accounts.Get(img.ChainID)
	if !ok {
		var err error
		files, err = runtime.Together(ctx, &s.flights, "accounts "+img.ChainID, readTimeout, func(ctx context.Context) (files *accountFiles, err error) {
			err = s.viewImage(ctx, img.ChainID, func(root string) (err error) {
				files, err = readRoot(root)
				return err
			})
			return files, err
		})
		if err != nil {
			return Account{}, fmt.Errorf("read the image's accounts: %w", err)
		}
		s.accounts.Put(img.ChainID, files, int64(len(files.passwd)+len(files.group)))
	}
	return files.resolve(name)
}

// ProcessAccount resolves a user ("uid", "uid:gid", names too) in the root file
// system of a process of this host. What a sandbox may have put there neither hangs
// the call nor leads it out. The caller makes sure that the pid is still the one that
// it means. A name that isn't known is InvalidArgument, a process that is gone
// FailedPrecondition.
func ProcessAccount(pid uint32, name string) (Account, error) {
	if isNumeric(name) {
		return new(accountFiles).resolve(name)
	}
	files, err := readRoot(fmt.Sprintf("/proc/%d/root", pid))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return Account{}, runtime.Precondition("process %d is gone", pid)
	}
	if err != nil {
		return Account{}, err
	}
	return files.resolve(name)
}

// readRoot reads the files of accounts below a directory.
func readRoot(path string) (*accountFiles, error) {
	root, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open root file system %s: %w", path, err)
	}
	defer func() { _ = unix.Close(root) }()
	files := new(accountFiles)
	if files.passwd, err = readBelow(root, "etc/passwd"); err == nil {
		files.group, err = readBelow(root, "etc/group")
	}
	return files, err
}
