package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// confine gives the sandbox a control group with a limit of a controller, as its own.
func (s *sandbox) confine(controller, limit string, most int) {
	s.t.Helper()
	s.seen = "/sys/fs/cgroup"
	if _, err := os.Stat(s.seen + "/" + controller); err == nil {
		s.seen += "/" + controller
	}
	s.group = filepath.Join(s.seen, "berm-agent-test-"+filepath.Base(s.dir))
	must(s.t, os.Mkdir(s.group, 0o755))
	s.t.Cleanup(func() {
		await(s.t, "the control group's end", func() bool { return os.Remove(s.group) == nil })
	})
	must(s.t, os.WriteFile(filepath.Join(s.group, limit), []byte(strconv.Itoa(most)), 0))
}

func (s *sandbox) crowded() int {
	s.t.Helper()
	b, err := os.ReadFile(filepath.Join(s.group, "pids.current"))
	must(s.t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	must(s.t, err)
	return n
}

// threads is how many the agent has. There being room, it makes those that it lacks.
func (s *sandbox) threads() int {
	s.t.Helper()
	return status(s.t, s.pid, "Threads")
}

// disperse ends the processes in the control group whose command line is such.
func (s *sandbox) disperse(line string) {
	s.t.Helper()
	b, err := os.ReadFile(filepath.Join(s.group, "cgroup.procs"))
	must(s.t, err)
	for _, word := range strings.Fields(string(b)) {
		its, _ := os.ReadFile("/proc/" + word + "/cmdline") // it may be gone
		if pid, err := strconv.Atoi(word); err == nil && string(bytes.ReplaceAll(its, []byte{0}, []byte{' '})) == line {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// tries does an operation, whatever comes of it, and gives the class of its failure.
func (k *talk) tries(req *wire.Request) (wire.Class, error) {
	if err := k.open(); err != nil {
		return "", err
	}
	if err := k.w.SendJSON(wire.KindRequest, req); err != nil {
		return "", err
	}
	for {
		kind, payload, err := k.r.Next()
		switch {
		case err != nil:
			return "", err
		case kind == wire.KindReady:
			if err := k.w.Send(wire.KindGo, nil); err != nil {
				return "", err
			}
			if req.Op == wire.OpDial {
				_ = k.w.Send(wire.KindEnd, nil) // what is wrong, the next read says
			}
		case kind == wire.KindResult:
			return "", nil
		case kind == wire.KindFailure:
			var failure wire.Failure
			err := wire.Decode(payload, &failure)
			return failure.Class, err
		}
	}
}

// deafPort is a port that takes no connection in.
func deafPort(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	must(t, unix.Listen(fd, 0))
	name, err := unix.Getsockname(fd)
	must(t, err)
	port := name.(*unix.SockaddrInet4).Port
	for {
		c, err := net.DialTimeout("tcp4", fmt.Sprintf("127.0.0.1:%d", port), 300*time.Millisecond)
		if err != nil {
			return port
		}
		t.Cleanup(func() { _ = c.Close() })
	}
}

// A sandbox that is full of processes is served on, as far as can be, and lives.
func TestFull(t *testing.T) {
	engine.Require(t, "containerd") // root, for a control group
	for name, tt := range map[string]struct {
		most int
		fill bool
	}{"by commands": {40, true}, "hardly": {30, false}, "at the least": {20, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := prepareSandbox(t)
			s.confine("pids", "pids.max", tt.most)
			s.boot(0)
			k := s.accept()
			k.patience(2 * time.Minute)
			idle := s.crowded()
			t.Logf("%d tasks before the first command", idle)
			if idle > 15 { // with the command of its own
				t.Errorf("%d tasks when nothing is done", idle)
			}
			if tt.fill {
				k.run("fill", "while sleep 2000 & do :; done >/dev/null 2>&1")
				if n := s.crowded(); n < tt.most-3 {
					t.Fatalf("%d tasks of %d", n, tt.most)
				}
			}
			port := deafPort(t)
			tree := []byte("/etc")
			threads := s.threads()
			if threads <= spareThreads() {
				t.Errorf("%d threads, none to spare", threads)
			}
			var all sync.WaitGroup
			until := time.Now().Add(4 * time.Second)
			for i := range 32 {
				k := s.accept()
				k.patience(2 * time.Minute)
				all.Go(func() {
					for n := 0; time.Now().Before(until); n++ {
						req := []*wire.Request{
							command(wire.Start{ID: fmt.Sprintf("x%d-%d", i, n), Command: []string{"true"}}),
							{Op: wire.OpSearch, File: &wire.File{Path: tree, Pattern: "zebra"}},
							{Op: wire.OpRead, File: &wire.File{Path: []byte("/bin/sh"), Length: -1}},
							{Op: wire.OpDial, Port: port},
							{Op: wire.OpTarRead, File: &wire.File{Path: []byte("/etc")}},
						}[(i+n)%5]
						class, err := k.tries(req)
						if err != nil || class != "" && req.Op != wire.OpDial && class != wire.ClassExhausted {
							t.Errorf("%s: %s, %v", req.Op, class, err)
							return
						}
					}
				})
			}
			all.Wait()
			if n := s.threads(); n != threads {
				t.Errorf("%d threads at the start, %d now: more were needed than were made", threads, n)
			}
			await(t, "the commands' end", func() bool {
				s.disperse("sleep 2000 ")
				return s.crowded() <= idle
			})
			if a := k.run("after", "echo well"); a.stdout.String() != "well\n" {
				t.Errorf("%+v", a)
			}
		})
	}
}
