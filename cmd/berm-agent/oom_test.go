package main

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// starve gives the sandbox a control group with little memory, as its own.
func (s *sandbox) starve() {
	s.t.Helper()
	root, limit := "/sys/fs/cgroup", "memory.max"
	if _, err := os.Stat(root + "/memory/memory.limit_in_bytes"); err == nil {
		root, limit = root+"/memory", "memory.limit_in_bytes"
	}
	group := filepath.Join(root, "berm-agent-test-"+strconv.Itoa(os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		await(s.t, "the control group's end", func() bool { return os.Remove(group) == nil })
	})
	if err := os.WriteFile(filepath.Join(group, limit), []byte(strconv.Itoa(48<<20)), 0); err != nil {
		s.t.Fatal(err)
	}
	s.group, s.seen = group, root
}

func TestOOM(t *testing.T) {
	engine.Require(t, "containerd") // root, for a control group
	s := prepareSandbox(t)
	s.starve()
	s.boot(0)
	k := s.accept()
	hog := "x=1; while :; do x=$x$x; done"
	for name, tt := range map[string]struct {
		script string
		want   bool
	}{
		"hog":        {hog, true},
		"hog below":  {"sh -c '" + hog + "'; exit $?", true},
		"well":       {"exit 137", false},
		"own signal": {"kill -KILL $$", false},
	} {
		a := k.run("x", tt.script)
		if a.info.ExitCode != 137 || a.info.OOMKilled != tt.want {
			t.Errorf("%s: %+v", name, a.info)
		}
	}
	k.start(&wire.Start{ID: "y", Command: []string{"sleep", "1000"}})
	time.Sleep(10 * time.Millisecond)
	k.run("x", hog) // while y runs, which is killed for another reason
	if a := k.do(&wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: "y", Signal: int(unix.SIGKILL)}}); a.failure != nil {
		t.Fatal(a.failure)
	}
	if info := k.await("y"); info.ExitCode != 137 || info.OOMKilled {
		t.Errorf("%+v", info)
	}
}
