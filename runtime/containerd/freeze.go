package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// freezer freezes the processes of a container by its cgroup. What is frozen forks no
// more, and stays in the cgroup.
type freezer struct {
	dir string
	v1  bool // the cgroup is of version 1
}

// freezerOf finds a container's freezer by the cgroups of its first process, as
// /proc/PID/cgroup has them. A cgroup without the container's ID in its path may hold
// others' processes, and isn't taken.
func freezerOf(container, cgroups string) (freezer, error) {
	found := freezer{}
	for line := range strings.Lines(cgroups) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) < 3 || !strings.Contains(fields[2], container) {
			continue
		}
		switch fields[1] {
		case "freezer": // what the OCI runtime pauses by, where there is one
			return freezer{filepath.Join(cgroupRoot, "freezer", fields[2]), true}, nil
		case "":
			for _, root := range []string{cgroupRoot, filepath.Join(cgroupRoot, "unified")} {
				if _, err := os.Stat(filepath.Join(root, fields[2], "cgroup.freeze")); err == nil {
					found = freezer{filepath.Join(root, fields[2]), false}
				}
			}
		}
	}
	if found.dir == "" {
		return found, fmt.Errorf("%w: the container has no cgroup of its own to freeze", errUnseen)
	}
	return found, nil
}

// has reports whether a file of the cgroup contains a text.
func (f freezer) has(file, text string) (bool, error) {
	b, err := readLimited(filepath.Join(f.dir, file), 4<<10)
	return bytes.Contains(b, []byte(text)), err
}

// asked reports whether somebody has had the cgroup frozen.
func (f freezer) asked() (bool, error) {
	if f.v1 {
		return f.has("freezer.self_freezing", "1")
	}
	return f.has("cgroup.freeze", "1")
}

func (f freezer) frozen() (bool, error) {
	if f.v1 {
		return f.has("freezer.state", "FROZEN")
	}
	return f.has("cgroup.events", "frozen 1")
}

func (f freezer) set(freeze bool) error {
	file, text := "cgroup.freeze", map[bool]string{true: "1", false: "0"}[freeze]
	if f.v1 {
		file, text = "freezer.state", map[bool]string{true: "FROZEN", false: "THAWED"}[freeze]
	}
	err := os.WriteFile(filepath.Join(f.dir, file), []byte(text), 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) { // it has gone with its last process
		err = nil
	}
	return err
}

// freeze returns once all processes stand still; thaw lets them go on. It is nil for a
// container that is paused, which stays so.
func (f freezer) freeze(ctx context.Context) (thaw func(), err error) {
	if paused, err := f.asked(); paused || err != nil {
		return nil, err
	}
	thaw = func() { _ = f.set(false) }
	for tries := 1; ; tries++ {
		// Version 1 can stay half frozen when a process comes or ends meanwhile. A thaw
		// in between helps, as runc has found (its freeze in libcontainer/cgroups/fs).
		if tries%50 == 0 {
			thaw()
			time.Sleep(10 * time.Millisecond)
		}
		if err := f.set(true); err != nil {
			thaw()
			return nil, err
		}
		frozen, err := f.frozen()
		if frozen && err == nil {
			return thaw, nil
		}
		if err != nil || ctx.Err() != nil {
			thaw()
			return nil, errors.Join(errSurvived, err)
		}
		time.Sleep(time.Millisecond)
	}
}
