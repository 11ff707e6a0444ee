package engine

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	placePrefix = "berm-engine-"
	// tempPrefix is of places for a test's other files. It is short, as the paths of
	// sockets below a test's temporary directory are long as it is.
	tempPrefix = "bermt"

	// These are the same for every containerd.
	shimSocketDir = "/run/containerd/s"
	runcStateDir  = "/run/containerd/runc" // unless a container says otherwise
	fifoDir       = "/run/containerd/fifo" // of Go clients, ctr among them
)

// place is the directory of one engine, and with it the name by which all that it
// leaves elsewhere can be found. Its owner holds a lock for as long as it lives.
type place struct {
	dir   string
	name  string // of the directory, and of the cgroups
	owner *os.File
}

// newPlace removes what dead owners left, and makes a directory.
func newPlace(opts Options) (*place, error) {
	if err := WatchTemporary(); err != nil {
		return nil, err
	}
	parent, err := filepath.EvalSymlinks(opts.Dir)
	if err != nil {
		return nil, err
	}
	unlock, err := lockDir(parent)
	if err != nil {
		return nil, err
	}
	defer unlock()
	stale, err := claimStale(parent)
	if err != nil {
		return nil, err
	}
	for _, p := range stale {
		_, _ = fmt.Fprintf(opts.Log, "removing %s, whose owner is gone\n", p.dir)
		if err := p.clear(); err != nil {
			_, _ = fmt.Fprintf(opts.Log, "%v\n", err)
		}
	}
	return makePlace(parent, placePrefix+strings.ToLower(rand.Text()[:8]))
}

// makePlace makes a directory of this process's own. The lock on parent is held.
func makePlace(parent, name string) (*place, error) {
	p := &place{dir: filepath.Join(parent, name), name: name}
	if err := os.Mkdir(p.dir, 0o711); err != nil { // 0711: users in containers reach their mounts
		return nil, err
	}
	if taken, err := p.claim(); err != nil || taken {
		return nil, errors.Join(fmt.Errorf("can't lock %s", p.dir), err, os.RemoveAll(p.dir))
	}
	if err := watchOver(p.dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.dir), p.owner.Close())
	}
	return p, nil
}

func (p *place) path(name string) string { return filepath.Join(p.dir, name) }

// claim takes the owner's lock, unless it is taken.
func (p *place) claim() (taken bool, err error) {
	p.owner, err = os.OpenFile(p.path("owner"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return false, err
	}
	err = unix.Flock(int(p.owner.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return false, nil
	}
	_ = p.owner.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

func claimStale(parent string) ([]*place, error) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return nil, err
	}
	var stale []*place
	for _, e := range entries {
		p := &place{dir: filepath.Join(parent, e.Name()), name: e.Name()}
		_, err := os.Lstat(p.path("owner")) // others may have directories with so short a name
		temporary := strings.HasPrefix(e.Name(), tempPrefix) && err == nil
		if !e.IsDir() || !temporary && !strings.HasPrefix(e.Name(), placePrefix) {
			continue
		}
		if !ownedByRoot(p.dir) {
			continue // anyone can make directories in /tmp
		}
		if taken, err := p.claim(); err == nil && !taken {
			stale = append(stale, p)
		}
	}
	return stale, nil
}

func ownedByRoot(path string) bool {
	var stat unix.Stat_t
	return unix.Lstat(path, &stat) == nil && stat.Uid == 0
}

// remove clears the place; a second time it does nothing.
func (p *place) remove() error {
	unlock, err := lockDir(filepath.Dir(p.dir))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(p.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return p.clear()
}

// clear ends all processes of the engine, whatever state it is in, and removes what
// it left. The lock on the parent directory is held.
func (p *place) clear() error {
	shared := make(map[string]bool)
	deadline := time.Now().Add(time.Minute) // for a thousand containers
	for {
		p.noteShared(shared)
		p.killDaemons()
		p.noteShared(shared) // of what was being started
		cgroupsGone := p.removeCgroups()
		err := p.unmount()
		if err == nil && cgroupsGone {
			err = os.RemoveAll(p.dir)
		}
		if err == nil && cgroupsGone {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s can't be removed (cgroups gone: %t): %w", p.dir, cgroupsGone, err)
		}
		time.Sleep(10 * time.Millisecond) // processes that were killed take a moment to be gone
	}
	for path := range shared {
		_ = os.RemoveAll(path) // the shim may have done so
	}
	p.removeSharedDirs()
	return errors.Join(p.removeCNIResults(), p.owner.Close())
}

// noteShared adds the files outside of the place that belong to containers whose
// bundles are there: where their shims listen, and what runc knows of them, which
// stays when the shim is killed.
func (p *place) noteShared(paths map[string]bool) {
	bundles, _ := filepath.Glob(p.path("state/io.containerd.runtime.v2.task/*/*")) // the pattern is good
	for _, bundle := range bundles {
		namespace, id := filepath.Base(filepath.Dir(bundle)), filepath.Base(bundle)
		paths[filepath.Join(runcStateDir, namespace, id)] = true
		// So shims name their sockets. One that is being started hasn't written it down.
		name := sha256.Sum256([]byte(filepath.Join(p.path("containerd.sock"), namespace, id)))
		paths[filepath.Join(shimSocketDir, hex.EncodeToString(name[:]))] = true
		b, err := os.ReadFile(filepath.Join(bundle, "address"))
		if err != nil {
			continue
		}
		socket := strings.TrimPrefix(strings.TrimSpace(string(b)), "unix://")
		if filepath.Dir(socket) == shimSocketDir {
			paths[socket] = true
		}
	}
	for _, namespace := range []string{"berm", "moby"} { // of those whose bundles are gone
		sockets, _ := p.sockets(namespace) // without a log nothing has run
		for _, socket := range sockets {
			paths[socket] = true
		}
	}
}

// removeCNIResults removes what libcni noted about containers whose network
// namespaces or networks are files in this place.
func (p *place) removeCNIResults() error {
	notes, err := cniResults(p.dir)
	for _, note := range notes {
		if e := os.Remove(note); !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// removeSharedDirs removes directories that every engine's shims make, unless they
// are in use: other engines of ours may be about to use them, and so may the system's.
func (p *place) removeSharedDirs() {
	if _, err := os.Lstat("/run/containerd/containerd.sock"); err == nil {
		return
	}
	for _, parent := range []string{filepath.Dir(p.dir), tempDir} {
		others, err := filepath.Glob(filepath.Join(parent, placePrefix+"*"))
		if err != nil || len(others) > 0 {
			return
		}
	}
	namespaces, _ := filepath.Glob(runcStateDir + "/*") // the pattern is good
	for _, dir := range append(namespaces, runcStateDir, fifoDir, shimSocketDir, filepath.Dir(shimSocketDir)) {
		_ = os.Remove(dir) // fails if not empty
	}
}

// killDaemons kills daemons, shims, servers and their helpers by the paths in their
// arguments, and all whose program is a file in this place, such as the writers of logs.
func (p *place) killDaemons() {
	names := []string{"berm", "dockerd", "containerd", "containerd-shim", "containerd-shim-runc-v2", "runc", "crun", "berm-agent"}
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is good
	for _, f := range cmdlines {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it is gone
		}
		args := strings.Split(string(b), "\x00")
		ours := slices.Contains(names, filepath.Base(args[0])) &&
			slices.ContainsFunc(args[1:], func(arg string) bool { return strings.Contains(arg, p.dir+"/") })
		program, _ := os.Readlink(filepath.Join(filepath.Dir(f), "exe")) // empty if it is gone
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if (ours || strings.HasPrefix(program, p.dir+"/")) && err == nil && pid != os.Getpid() {
			_ = unix.Kill(pid, unix.SIGKILL) // fails if it is gone
		}
	}
}

// removeCgroups kills what runs in the engine's cgroups and removes them, in all
// hierarchies of version 1 and in version 2. It reports whether all are gone.
func (p *place) removeCgroups() bool {
	gone := true
	roots, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup/*", p.name)) // the pattern is good
	for _, root := range append(roots, filepath.Join("/sys/fs/cgroup", p.name)) {
		var dirs []string
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil // a part that is gone needs no walk
		})
		slices.Reverse(dirs)
		for _, dir := range dirs {
			killCgroup(dir)
			if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
				gone = false
			}
		}
	}
	return gone
}

func killCgroup(dir string) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return
	}
	for field := range strings.FieldsSeq(string(b)) {
		// A pid of 0 is in another pid namespace, and to kill it would kill us.
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			_ = unix.Kill(pid, unix.SIGKILL) // fails if it is gone
		}
	}
	// In version 1 a frozen process doesn't die. There is no such file elsewhere.
	if f, err := os.OpenFile(filepath.Join(dir, "freezer.state"), os.O_WRONLY, 0); err == nil {
		_, _ = io.WriteString(f, "THAWED")
		_ = f.Close()
	}
}

// unmount detaches every mount below the directory, the last one first.
func (p *place) unmount() error {
	points, err := mountsBelow(p.dir)
	if err != nil {
		return err
	}
	slices.Reverse(points)
	for _, point := range points {
		err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", point, err)
		}
	}
	return nil
}

// lockDir takes the lock that orders the making and removing of engines.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}
