package runtimetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

type fakeContainer struct {
	info    runtime.Container
	spec    runtime.Spec
	network *fakeNetwork
	execs   map[*context.CancelCauseFunc]bool // of commands
	main    []command                         // what is left of the main process
	timer   *time.Timer                       // runs it on
	due     bool                              // it fired while the container was paused
	log     []logLine
	logSize int
	printed int           // lines in all
	changed chan struct{} // closed and replaced when log or state change; nil while nobody waits

	processes []*fakeProcess
	pids      int                  // processes that were started
	events    map[*fakeEvents]bool // that follow them
	root      string               // directory of its files; empty until one is asked for
	watchers  map[*fakeFileWatcher]struct{}
	seen      map[string]fs.FileInfo // its files, while there are watchers
	conns     map[*pairConn]struct{}
	ended     chan struct{} // closed when it has; nil while nobody waits
}

// Create implements runtime.Runtime.
func (f *Fake) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	return call(ctx, f, "create", spec.Name, func() (runtime.Container, error) {
		c, err := f.create(spec)
		if err != nil {
			return runtime.Container{}, fmt.Errorf("create %s: %w", spec.Name, err)
		}
		info := c.info
		f.runMain(c)
		return info, nil
	})
}

// capabilities are all that Linux knows.
const capabilities = `CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_KILL
CAP_SETGID CAP_SETUID CAP_SETPCAP CAP_LINUX_IMMUTABLE CAP_NET_BIND_SERVICE CAP_NET_BROADCAST
CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_IPC_OWNER CAP_SYS_MODULE CAP_SYS_RAWIO CAP_SYS_CHROOT
CAP_SYS_PTRACE CAP_SYS_PACCT CAP_SYS_ADMIN CAP_SYS_BOOT CAP_SYS_NICE CAP_SYS_RESOURCE CAP_SYS_TIME
CAP_SYS_TTY_CONFIG CAP_MKNOD CAP_LEASE CAP_AUDIT_WRITE CAP_AUDIT_CONTROL CAP_SETFCAP
CAP_MAC_OVERRIDE CAP_MAC_ADMIN CAP_SYSLOG CAP_WAKE_ALARM CAP_BLOCK_SUSPEND CAP_AUDIT_READ
CAP_PERFMON CAP_BPF CAP_CHECKPOINT_RESTORE`

func checkSpec(spec runtime.Spec) error {
	if err := runtime.CheckSpec(spec); err != nil {
		return err
	}
	if spec.Name == "" || strings.ContainsAny(spec.Name, "/ ") {
		return fmt.Errorf("name %q: %w", spec.Name, errdefs.ErrInvalidArgument)
	}
	for _, m := range spec.Mounts {
		if _, err := os.Stat(m.Source); err != nil {
			return fmt.Errorf("mount: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	for _, c := range spec.CapAdd {
		if !slices.Contains(strings.Fields(capabilities), c) {
			return fmt.Errorf("capability %q: %w", c, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// create makes the container; f.mu is held.
func (f *Fake) create(spec runtime.Spec) (*fakeContainer, error) {
	if err := checkSpec(spec); err != nil {
		return nil, err
	}
	if f.names[spec.Name] != nil {
		return nil, fmt.Errorf("the name is taken: %w", errdefs.ErrAlreadyExists)
	}
	img, err := findImage(f.images, spec.Image)
	if err != nil {
		return nil, err
	}
	c := &fakeContainer{spec: spec}
	c.spec.Env = slices.Clone(spec.Env)
	image := slices.DeleteFunc(slices.Clone(img.Env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(spec.Unset, name)
	})
	now := time.Now()
	c.info = runtime.Container{
		ID: newID(), Name: spec.Name, Image: img.ID, State: runtime.StateRunning,
		Labels: maps.Clone(img.Labels), Env: runtime.MergeEnv(image, spec.Env),
		CreatedAt: now, StartedAt: now,
	}
	if c.info.Labels == nil {
		c.info.Labels = map[string]string{}
	}
	maps.Copy(c.info.Labels, spec.Labels)
	if spec.Network != "" {
		n := f.networks[spec.Network]
		if n == nil {
			return nil, fmt.Errorf("network %s: %w", spec.Network, errdefs.ErrNotFound)
		}
		c.network, c.info.IP = n, n.take()
	}
	if c.spec.User == "" {
		c.spec.User = img.User
	}
	argv := spec.Command
	if argv == nil {
		argv = img.Command
	}
	c.main = parseMain(argv)
	f.pids++
	c.info.Pid = f.pids
	f.containers[c.info.ID] = c
	f.names[spec.Name] = c
	f.emit(runtime.Event{Type: runtime.EventStart, ContainerID: c.info.ID, Labels: c.info.Labels, Time: now})
	return c, nil
}

// runMain runs a main process up to its next sleep, or its end; f.mu is held.
func (f *Fake) runMain(c *fakeContainer) {
	var code int
	for c.info.State == runtime.StateRunning {
		if len(c.main) == 0 {
			f.end(c, code, false)
			return
		}
		cmd := c.main[0]
		c.main = c.main[1:]
		if cmd.argv[0] == "sleep" {
			d, forever := cmd.duration()
			if !forever {
				c.timer = time.AfterFunc(d, func() { f.wake(c) })
			}
			return // a timer that end comes before finds the state changed
		}
		var stdout, stderr bytes.Buffer
		var exits bool
		code, exits = cmd.simple(c, c.info.Env, runtime.Exec{Stdout: &stdout, Stderr: &stderr})
		c.print(&stdout, false)
		c.print(&stderr, true)
		if exits {
			c.main = nil
		}
	}
}

func (f *Fake) wake(c *fakeContainer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.info.State == runtime.StatePaused {
		c.due = true
		return
	}
	f.runMain(c)
}

// end records that a main process has ended, if it hasn't yet; f.mu is held.
func (f *Fake) end(c *fakeContainer, code int, oom bool) {
	if c.info.State != runtime.StateRunning && c.info.State != runtime.StatePaused {
		return
	}
	now := time.Now()
	if oom {
		f.emit(runtime.Event{Type: runtime.EventOOM, ContainerID: c.info.ID, Labels: c.info.Labels, Time: now})
	}
	c.info.State, c.info.ExitCode, c.info.OOMKilled, c.info.FinishedAt = runtime.StateExited, code, oom, now
	if c.network != nil {
		c.network.users--
	}
	c.info.IP, c.info.Pid = "", 0
	if c.timer != nil {
		c.timer.Stop()
	}
	for e := range c.execs {
		(*e)(errDied)
	}
	c.cutOff()
	c.notify()
	f.emit(runtime.Event{
		Type: runtime.EventExit, ContainerID: c.info.ID, Labels: c.info.Labels, ExitCode: code, Time: now,
	})
}

// Inspect implements runtime.Runtime.
func (f *Fake) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	return call(ctx, f, "inspect", id, func() (runtime.Container, error) {
		c, err := f.find(id)
		if err != nil {
			return runtime.Container{}, err
		}
		return c.info, nil
	})
}

// List implements runtime.Runtime.
func (f *Fake) List(ctx context.Context, labels map[string]string) ([]runtime.Container, error) {
	return call(ctx, f, "list", "", func() (cs []runtime.Container, _ error) {
		for _, c := range f.containers {
			if runtime.HasLabels(c.info.Labels, labels) {
				cs = append(cs, runtime.Container{
					ID: c.info.ID, Name: c.info.Name, Image: c.info.Image, State: c.info.State,
					Labels: c.info.Labels, CreatedAt: c.info.CreatedAt,
				})
			}
		}
		return cs, nil
	})
}

// Remove implements runtime.Runtime.
func (f *Fake) Remove(ctx context.Context, id string) error {
	return f.do(ctx, "remove", id, func() error {
		c := f.containers[id]
		if c == nil {
			return nil
		}
		f.end(c, 128+9, false)
		if c.root != "" {
			_ = os.RemoveAll(c.root) // the test's end removes it, too
		}
		delete(f.containers, id)
		delete(f.names, c.info.Name)
		c.info.State = runtime.StateUnknown
		f.emit(runtime.Event{Type: runtime.EventRemoved, ContainerID: id, Labels: c.info.Labels, Time: time.Now()})
		return nil
	})
}

// Pause implements runtime.Runtime.
func (f *Fake) Pause(ctx context.Context, id string) error {
	return f.setState(ctx, "pause", id, runtime.StateRunning, runtime.StatePaused, runtime.EventPaused)
}

// Resume implements runtime.Runtime.
func (f *Fake) Resume(ctx context.Context, id string) error {
	return f.setState(ctx, "resume", id, runtime.StatePaused, runtime.StateRunning, runtime.EventResumed)
}

func (f *Fake) setState(ctx context.Context, op, id string, from, to runtime.State, typ runtime.EventType) error {
	return f.do(ctx, op, id, func() error {
		c, err := f.find(id)
		switch {
		case err != nil:
			return err
		case c.info.State == from:
			c.info.State = to
			f.emit(runtime.Event{Type: typ, ContainerID: id, Labels: c.info.Labels, Time: time.Now()})
			if to == runtime.StateRunning && c.due {
				c.due = false
				f.runMain(c)
			}
		case c.info.State != to:
			return fmt.Errorf("%s %s, which is %s: %w", op, id, c.info.State, errdefs.ErrFailedPrecondition)
		}
		return nil
	})
}

func (f *Fake) find(id string) (*fakeContainer, error) {
	if c := f.containers[id]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
}

func newID() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
