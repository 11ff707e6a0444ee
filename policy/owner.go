package policy

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Owner is a user and a group of the host.
type Owner struct{ UID, GID int }

// ParseOwner reads uid:gid in numbers.
func ParseOwner(s string) (Owner, error) {
	user, group, _ := strings.Cut(s, ":")
	uid, err := strconv.ParseUint(user, 10, 31)
	gid, gidErr := strconv.ParseUint(group, 10, 31)
	if err != nil || gidErr != nil {
		return Owner{}, fmt.Errorf("is %q, must be two numbers with a colon (uid:gid)", s)
	}
	return Owner{int(uid), int(gid)}, nil
}

// Give makes the owner that of an open file, directory or link. A nil owner leaves it as it is. An
// *OwnerError says that this process may not.
func (o *Owner) Give(f *os.File) error {
	if o == nil {
		return nil
	}
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if st := fi.Sys().(*syscall.Stat_t); int64(st.Uid) == int64(o.UID) && int64(st.Gid) == int64(o.GID) {
		return nil
	}
	const emptyPath = 0x1000 // AT_EMPTY_PATH: the file itself, also if it is only open by O_PATH
	if err = syscall.Fchownat(int(f.Fd()), "", o.UID, o.GID, emptyPath); errors.Is(err, syscall.EPERM) {
		return &OwnerError{*o}
	}
	return os.NewSyscallError("fchownat", err)
}

// OwnerError says that this process may not give what it makes to the owner.
type OwnerError struct{ Owner Owner }

// Error says what would help.
func (e *OwnerError) Error() string {
	return fmt.Sprintf("Berm may not give what it makes to %d:%d, the policy's mounts.owner: run it as root, or with CAP_CHOWN and CAP_DAC_OVERRIDE, or leave mounts.owner out", e.Owner.UID, e.Owner.GID)
}
