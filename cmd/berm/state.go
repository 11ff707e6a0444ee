package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/google/uuid"
)

// state is the directory that a server keeps its things in, locked for as long as
// it runs. The kernel frees the lock however the process ends.
type state struct {
	dir  string
	lock *os.File
}

// openState makes the directory if it is missing and takes its lock.
func openState(dir string) (*state, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the state directory's lock: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("another berm uses the state directory %s; stop it, or choose another with --state-dir", dir)
		}
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	s := &state{dir: dir, lock: lock}
	if err := s.withdraw(); err != nil && !errors.Is(err, os.ErrNotExist) { // of one that was killed
		return nil, errors.Join(fmt.Errorf("clean the state directory: %w", err), lock.Close())
	}
	return s, nil
}

// Close gives the lock back.
func (s *state) Close() error { return s.lock.Close() }

// owner is the instance's id: the configured one, else one that is made once and kept.
func (s *state) owner(configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	id, err := keptInstance(s.dir)
	if id != "" || err != nil {
		return id, err
	}
	id = uuid.NewString()
	if err := writeFile(filepath.Join(s.dir, "instance"), id+"\n"); err != nil {
		return "", fmt.Errorf("keep the instance id: %w", err)
	}
	return id, nil
}

// keptInstance is the instance's id that a state directory has; empty if it has none yet.
func keptInstance(dir string) (string, error) {
	path := filepath.Join(dir, "instance")
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the instance id: %w", err)
	}
	id, err := uuid.Parse(strings.TrimSpace(string(data)))
	if err != nil {
		// A new id would orphan every sandbox that carries the old one.
		return "", fmt.Errorf("%s holds no instance id; restore it, or set engine.instance: %w", path, err)
	}
	return id.String(), nil
}

// announce writes the address that the server listens on, for those that let the
// system choose a port.
func (s *state) announce(address string) error {
	if err := writeFile(filepath.Join(s.dir, "address"), address+"\n"); err != nil {
		return fmt.Errorf("announce the address: %w", err)
	}
	return nil
}

// withdraw is announce's opposite.
func (s *state) withdraw() error { return os.Remove(filepath.Join(s.dir, "address")) }

// writeFile replaces a file as a whole: a reader, or a crash, sees the old one or
// the new one.
func writeFile(path, content string) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
