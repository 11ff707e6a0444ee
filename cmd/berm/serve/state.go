package serve

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/atomicfile"
)

// state is the state directory, locked while the process runs. The kernel frees the lock
// when the process ends.
type state struct {
	dir      string
	lock     *os.File
	restored bool   // openState has finished a restore that was cut off
	replaced string // directory with the files that it replaced; empty if there were none
}

// errLocked is the error of a lock that another process holds.
var errLocked = errors.New("another process has it locked")

// openState makes the directory if it is missing, takes its lock, and finishes a restore
// that was cut off.
func openState(dir string) (*state, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	lock, err := lockFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE)
	if errors.Is(err, errLocked) {
		return nil, fmt.Errorf("another berm uses the state directory %s; stop it, or choose another with --state-dir", dir)
	}
	if err != nil {
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	s := &state{dir: dir, lock: lock}
	if err := s.withdraw(); err != nil { // a killed server has left its addresses
		return nil, errors.Join(fmt.Errorf("clean the state directory: %w", err), unlockFile(lock))
	}
	if s.restored, err = restorePending(dir); s.restored {
		s.replaced, err = finishRestore(dir, os.Rename)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("finish a restore that was cut off: %w", err), unlockFile(lock))
	}
	return s, nil
}

// finished describes the restore that openState has finished. It returns "" without one.
func (s *state) finished() string {
	switch {
	case !s.restored:
		return ""
	case s.replaced == "":
		return "a restore that was cut off has been finished"
	default:
		return "a restore that was cut off has been finished, and what was there is kept in " + s.replaced
	}
}

// lockFile opens a file or a directory, and locks it. It fails if another process has
// locked it.
func lockFile(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = errLocked
		}
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// ownState refuses a state directory that another user's server has used. That server couldn't
// use files that this process makes there. The owner of the directory itself proves nothing, as
// the directory may come from a container's image.
func ownState(dir string) error {
	for _, name := range []string{StateStore, "lock"} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if uid := int(info.Sys().(*syscall.Stat_t).Uid); uid != os.Geteuid() {
			return fmt.Errorf("%s belongs to the user with the id %d, as the server does: run this as that user", filepath.Join(dir, name), uid)
		}
	}
	return nil
}

// unlockFile unlocks and closes a file. Closing alone isn't enough: a child process that is just
// being started holds the lock until it executes its program.
func unlockFile(f *os.File) error {
	return errors.Join(syscall.Flock(int(f.Fd()), syscall.LOCK_UN), f.Close())
}

// Close unlocks the state directory.
func (s *state) Close() error { return unlockFile(s.lock) }

// owner returns the instance ID: the configured one, or else the one in the state directory. It
// makes one if there is none.
func (s *state) owner(configured string) (string, error) {
	id, err := Instance(s.dir, configured)
	if id != "" || err != nil {
		return id, err
	}
	id = uuid.NewString()
	return id, s.put(StateInstance, id)
}

// sealKey returns the key of the labels' seals from the state directory. It makes one if there is
// none.
func (s *state) sealKey() ([]byte, error) {
	key, err := SealKey(s.dir)
	if key != nil || err != nil {
		return key, err
	}
	key = make([]byte, lifecycle.SealKeyBytes)
	_, _ = rand.Read(key) // it never fails
	return key, s.put(StateSealKey, hex.EncodeToString(key))
}

// SealKey returns the seal key of a state directory, or nil if there is none.
func SealKey(dir string) ([]byte, error) {
	text, there, err := readState(dir, StateSealKey, "seal key")
	if !there {
		return nil, err
	}
	key, err := parseSealKey(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; restore it: without it, Berm doesn't know what it has made", filepath.Join(dir, StateSealKey), err)
	}
	return key, nil
}

// readState reads a file of a state directory, if it is there.
func readState(dir, name, what string) (text string, there bool, err error) {
	data, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("read the %s: %w", what, err)
	}
	return strings.TrimSpace(string(data)), true, nil
}

func parseSealKey(text string) ([]byte, error) {
	key, err := hex.DecodeString(strings.TrimSpace(text))
	if err != nil || len(key) != lifecycle.SealKeyBytes {
		return nil, fmt.Errorf("not a seal key of %d hexadecimal digits", 2*lifecycle.SealKeyBytes)
	}
	return key, nil
}

// Instance returns the instance ID: the configured one, or else the one in the state directory dir.
// It returns "" if there is none.
func Instance(dir, configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	text, there, err := readState(dir, StateInstance, "instance id")
	if !there {
		return "", err
	}
	id, err := uuid.Parse(text)
	if err != nil {
		// A new id would orphan every sandbox that carries the old one.
		return "", fmt.Errorf("%s holds no instance id; restore it, or set engine.instance: %w", filepath.Join(dir, StateInstance), err)
	}
	return id.String(), nil
}

// Files in which a running server writes the addresses of its sandbox API and of its first
// listener of the Docker Engine API. The configuration may not have them: the kernel may choose
// the port, and systemd may pass the whole socket.
const (
	StateAddress       = "address"
	stateEngineAddress = "engine-address"
)

// put writes a file of the state directory, which readState reads.
func (s *state) put(name, text string) error {
	if err := atomicfile.WriteString(filepath.Join(s.dir, name), 0o600, text+"\n"); err != nil {
		return fmt.Errorf("write state_dir: %w", err)
	}
	return nil
}

// withdraw removes the files with the server's addresses.
func (s *state) withdraw() error {
	var errs []error
	for _, name := range []string{StateAddress, stateEngineAddress} {
		if err := os.Remove(filepath.Join(s.dir, name)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
