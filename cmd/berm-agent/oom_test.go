package main

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

func TestOOM(t *testing.T) {
	t.Parallel()
	engine.Require(t, "containerd") // root, for a control group
	s := prepareSandbox(t)
	limit := "memory.max"
	if _, err := os.Stat("/sys/fs/cgroup/memory/memory.limit_in_bytes"); err == nil {
		limit = "memory.limit_in_bytes"
	}
	s.confine("memory", limit, 48<<20)
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
	k.sure(&wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: "y", Signal: int(unix.SIGKILL)}})
	if info := k.await("y"); info.ExitCode != 137 || info.OOMKilled {
		t.Errorf("%+v", info)
	}
}
