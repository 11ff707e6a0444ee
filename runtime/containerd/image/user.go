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
	// maxAccountFile bounds /etc/passwd and /etc/group. A larger file counts as empty.
	maxAccountFile = 4 << 20
	// readTimeout bounds reading files of an image, which goes on when its callers leave.
	// viewLease is how long the engine keeps the view of the image if this process ends
	// meanwhile.
	readTimeout = time.Minute
	viewLease   = 5 * time.Minute

	// cleanupTimeout bounds the removal of such a view.
	cleanupTimeout = 10 * time.Second
)

// Account is the user and the groups of a process.
type Account struct {
	UID, GID uint32
	Groups   []uint32 // the primary one first
}

// accountFiles has the content of /etc/passwd and /etc/group. It is empty for a missing file.
type accountFiles struct{ passwd, group []byte }

// resolve resolves a user as Docker does; an empty name is user 0.
func (f *accountFiles) resolve(name string) (Account, error) {
	u, err := user.GetExecUser(name, nil, bytes.NewReader(f.passwd), bytes.NewReader(f.group))
	if err != nil {
		return Account{}, runtime.Invalid("user %q: %w", name, err)
	}
	// The primary group must be among them. Otherwise a process could drop it, and get around
	// modes that deny access to that group.
	groups := append([]int{u.Gid}, u.Sgids...)
	for _, id := range append(groups, u.Uid) {
		// The files may have any number, and 1<<32 would become root.
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

// isNumeric reports whether a user is "uid:gid", which needs no files.
func isNumeric(name string) bool {
	uid, gid, _ := strings.Cut(name, ":")
	_, uidErr := strconv.ParseUint(uid, 10, 32)
	_, gidErr := strconv.ParseUint(gid, 10, 32)
	return uidErr == nil && gidErr == nil
}

// Account resolves a user ("", "uid", "uid:gid", "name", "name:group") in an image. Empty is
// the image's own user, or root if it has none. A name that the image doesn't have is
// InvalidArgument. The caller classes other errors.
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

// ProcessAccount resolves a user ("uid", "uid:gid", "name", "name:group") in the root file
// system of a process of this host. No file of a sandbox can hang it, or lead it out of the
// root. The caller makes sure that the pid is still that of the right process. An unknown name
// is InvalidArgument, and a process that is gone is FailedPrecondition.
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

// readRoot reads /etc/passwd and /etc/group below a directory.
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
