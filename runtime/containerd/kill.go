package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// killTimeout is for the whole of it, the proof included.
const killTimeout = 5 * time.Second

var (
	errHidden   = errors.New("some may have hidden where they come from")
	errSurvived = errors.New("some survived")
	errUnseen   = errors.New("they can't be seen from the host")
)

// habitat is where a container's processes live.
type habitat struct {
	init    process // the container's first
	ns      *pidNamespace
	freezer freezer
}

// openHabitat looks at a container by its first process. The engine's word for that
// may be old by the time it is used, so that what has the number now is checked. The
// error is fs.ErrNotExist when it has ended, or is ending, which the engine may not know yet.
func openHabitat(container string, pid int) (*habitat, error) {
	first, err := readProcess(pid)
	if err != nil {
		return nil, err
	}
	ns, err := openPidNamespace(pid)
	if err != nil {
		return nil, err
	}
	h := &habitat{init: first, ns: ns}
	cgroups, err := readLimited(fmt.Sprintf("/proc/%d/cgroup", pid), 64<<10)
	switch now, nowErr := readProcess(pid); {
	case err != nil:
	case nowErr != nil:
		err = nowErr
	case !now.same(first), now.over(), now.ends():
		err = fs.ErrNotExist
	case !strings.Contains(string(cgroups), container):
		err = errUnseen // the engine's runtime has put a machine around it, say
	case ns.has(unix.Getpid()):
		err = errUnseen
	default:
		h.freezer, err = freezerOf(container, string(cgroups))
	}
	if err != nil {
		h.close()
		return nil, err
	}
	return h, nil
}

func (h *habitat) close() { h.ns.close() }

// dead tells whether the container has ended, or is ending: with its first process,
// the kernel kills all others.
func (h *habitat) dead() bool {
	now, err := readProcess(h.init.pid)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	return !now.same(h.init) || now.over() || now.ends()
}

// hunt is for the processes of one command: its first, those that carry its marker
// in their environment, and the children of all of them.
//
// It has the rights of the host, so that a signal goes only to what is in the
// container for sure, and to that very process: see signal.
type hunt struct {
	*habitat
	name, value string // of the marker
	root        process
	since       uint64 // when the command was begun, in ticks
	hits        map[int]process
	// alone keeps others from starting something in the container, and from pausing it,
	// until open is called. The OCI runtime refuses commands in a frozen container.
	alone func(context.Context) (open func(), err error)
	froze atomic.Bool // the container is frozen for this hunt
}

// kill ends them all. Nil means that they are gone.
func (h *hunt) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	done := make(chan error, 1)
	// What is read of a process is its own memory, and reading that may hang.
	go func() { done <- h.killAll(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		select {
		case err := <-done:
			return err
		case <-time.After(killTimeout / 10):
			if h.froze.Load() { // or what ends the container now would wait for it
				_ = h.freezer.set(false)
			}
			return errSurvived
		}
	}
}

func (h *hunt) killAll(ctx context.Context) error {
	h.hits = map[int]process{}
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		if h.dead() {
			return nil
		}
		if ctx.Err() != nil {
			return errSurvived
		}
		switch found, err := h.strike(ctx); {
		case err != nil && h.dead():
			return nil
		case err != nil || !found:
			return err
		}
		time.Sleep(delay)
	}
}

// strike freezes the container, sends SIGKILL to each process of the command, and thaws
// it: nothing forks, ends or changes hands between the look and the kill. It reports
// whether it found any. If not, an error says that some may be hidden.
func (h *hunt) strike(ctx context.Context) (found bool, err error) {
	if h.alone != nil {
		open, err := h.alone(ctx)
		if err != nil {
			return false, errSurvived
		}
		defer open()
	}
	thaw, err := h.freezer.freeze(ctx)
	if err != nil {
		return false, err
	}
	if thaw != nil {
		h.froze.Store(true)
		defer func() {
			thaw()
			h.froze.Store(false)
		}()
	}
	all, err := h.look()
	if err != nil {
		return false, err
	}
	prey := map[int]process{}
	for again := true; again; { // a child may be listed before its parent
		again = false
		for pid, p := range all {
			if _, ok := prey[pid]; !ok && !p.over() && h.isPrey(p, all) {
				prey[pid], h.hits[pid] = p, p
				again = true
			}
		}
	}
	for _, p := range prey {
		if err := h.signal(p, unix.SIGKILL); err != nil {
			return false, err
		}
	}
	if len(prey) == 0 {
		err = h.hidden(all)
	}
	return len(prey) > 0, err
}

// look finds the container's processes, its first left out. One in a namespace that
// was made inside is told by its parents.
func (h *hunt) look() (map[int]process, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	if p, ok := all[h.init.pid]; ok && p.same(h.init) && !p.over() && !h.ns.has(p.pid) && !h.dead() {
		return nil, errUnseen
	}
	delete(all, h.init.pid)
	out := map[int]process{}
	for pid, p := range all {
		if h.ns.has(pid) {
			out[pid] = p
		}
	}
	for again := true; again; {
		again = false
		for pid, p := range all {
			if _, ok := out[pid]; ok {
				continue
			}
			if _, ok := out[p.parent]; ok || p.parent == h.init.pid {
				p.nested = true
				out[pid], again = p, true
			}
		}
	}
	return out, nil
}

// any tells whether any of them may be left.
func (h *hunt) any() bool {
	found := make(chan bool, 1)
	go func() { // as in kill
		all, err := h.look()
		for _, p := range all {
			if !p.over() && h.isPrey(p, all) {
				found <- true
				return
			}
		}
		found <- err != nil || h.hidden(all) != nil
	}()
	select {
	case any := <-found:
		return any
	case <-time.After(killTimeout / 10):
		return true
	}
}

func (h *hunt) isPrey(p process, all map[int]process) bool {
	if hit, ok := h.hits[p.pid]; ok && hit.same(p) {
		return true
	}
	if h.root.pid != 0 && p.same(h.root) {
		return true
	}
	if hit, ok := h.hits[p.parent]; ok && all[p.parent].same(hit) {
		return true
	}
	mine, _ := p.marker(h.name, h.value)
	return mine
}

// signal sends a signal to a process that look has found. The handle is opened before
// the process is looked at again: so what it stands for is what was looked at, or is
// gone, whoever has the number then.
func (h *hunt) signal(p process, sig unix.Signal) error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("take hold of a process: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	now, err := readProcess(p.pid)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if still := p.nested && now.parent == p.parent || h.ns.has(p.pid); !still || !now.same(p) {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal a process: %w", err)
	}
	return nil
}

// hidden is an error when there may be processes of the command left that can't be
// told from others: orphans that began after it did, and have no marker at all. The
// oldest child of init is none of them: it is the container's main process.
func (h *hunt) hidden(all map[int]process) error {
	oldest := ^uint64(0)
	for _, p := range all {
		if p.parent == h.init.pid {
			oldest = min(oldest, p.start)
		}
	}
	for _, p := range all {
		if p.parent != h.init.pid || p.start <= oldest || p.start < h.since || p.over() {
			continue
		}
		if _, some := p.marker(h.name, h.value); some {
			continue
		}
		// It may have ended while its environment was read.
		if now, err := readProcess(p.pid); err == nil && now.same(p) && !now.over() {
			return errHidden
		}
	}
	return nil
}
