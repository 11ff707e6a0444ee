package engine

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// watchVar makes a program that links this package a watchdog. See watch.
const watchVar = "BERM_ENGINE_WATCH"

// init runs before a test binary parses flags, so every one of them can be a watchdog.
func init() { //nolint:gochecknoinits // nothing else runs in every test binary
	if os.Getenv(watchVar) == "" {
		return
	}
	if err := watch(os.Stdin); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// watchdog is the process that removes the directories of this process's engines when
// this process dies, however it dies. It starts with the first engine.
var watchdog struct {
	mu    sync.Mutex
	names io.Writer // nil before the start
	pid   int
}

// watchOver tells the watchdog of a directory, before anything is started in it.
func watchOver(dir string) error {
	watchdog.mu.Lock()
	defer watchdog.mu.Unlock()
	if watchdog.names == nil {
		if err := startWatchdog(); err != nil {
			return fmt.Errorf("start the watchdog: %w", err)
		}
	}
	_, err := fmt.Fprintln(watchdog.names, dir)
	return err
}

func startWatchdog() error {
	names, ours, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = names.Close() }()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = "berm-engine-watchdog"
	cmd.Env = []string{watchVar + "=yes", "PATH=" + os.Getenv("PATH")}
	cmd.Dir = "/"
	cmd.Stdin = names
	// What ends a terminal's or a test's process group must not end the watchdog.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, ours.Close())
	}
	watchdog.names, watchdog.pid = ours, cmd.Process.Pid
	return nil
}

// tempDir is the directory for temporary files, whatever TMPDIR says later.
var tempDir = os.TempDir()

// temporary is the place for a test's other files, nil before the first engine.
var temporary struct {
	mu    sync.Mutex
	place *place
}

// WatchTemporary has the watchdog remove the files of t.TempDir, too, if the test is
// killed. The first engine calls it.
func WatchTemporary() error {
	temporary.mu.Lock()
	defer temporary.mu.Unlock()
	if !testing.Testing() || temporary.place != nil {
		return nil
	}
	parent, err := filepath.EvalSymlinks(tempDir)
	if err != nil {
		return err
	}
	unlock, err := lockDir(parent)
	if err != nil {
		return err
	}
	defer unlock()
	if temporary.place, err = makePlace(parent, tempPrefix+strings.ToLower(rand.Text()[:4])); err != nil {
		return err
	}
	return os.Setenv("TMPDIR", temporary.place.dir)
}

// watch reads directories, a line each, until the writer is gone, and then removes them
// and what runs in them. If the writer is a test and its go command dies, watch kills it.
func watch(names io.Reader) error {
	pid := os.Getppid()
	owner, err := unix.PidfdOpen(pid, 0)
	if parent := goCommand(pid); err == nil && parent >= 0 {
		go func() {
			waitFor(parent)
			_ = unix.PidfdSendSignal(owner, unix.SIGKILL, nil, 0) // else it would run on for nobody
		}()
	}
	var dirs []string
	for lines := bufio.NewScanner(names); lines.Scan(); {
		dirs = append(dirs, lines.Text())
	}
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, removeOrphan(dir))
	}
	return errors.Join(errs...)
}

// goCommand opens the go command that runs a test process; -1 if none does.
func goCommand(pid int) int {
	var parent int
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return -1
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	if _, err := fmt.Sscanf(after, "%1s %d", new(string), &parent); err != nil {
		return -1
	}
	fd, err := unix.PidfdOpen(parent, 0)
	if err != nil {
		return -1
	}
	if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", parent)); err != nil || strings.TrimSpace(string(comm)) != "go" {
		_ = unix.Close(fd)
		return -1
	}
	return fd
}

// waitFor returns when the process of a pidfd has ended.
func waitFor(pidfd int) {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, -1) //nolint:gosec // descriptors are small
		if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// removeOrphan clears the place at dir, unless its owner closed it or another engine's
// start clears it.
func removeOrphan(dir string) error {
	unlock, err := lockDir(filepath.Dir(dir))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	p := &place{dir: dir, name: filepath.Base(dir)}
	// The pipe may close a moment before the lock.
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		taken, err := p.claim()
		if err != nil {
			return err
		}
		if !taken {
			return p.clear()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s has an owner", dir)
		}
	}
}
