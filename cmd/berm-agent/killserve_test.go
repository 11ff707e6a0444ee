package main

import (
	"fmt"
	"os/exec"
	"strconv"
	"testing"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// enter is a command in the sandbox, as an engine's exec is.
func (s *sandbox) enter(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"-t", strconv.Itoa(s.pid), "-p", "-m", agent}, args...)...)
}

// A serve that is stopped is killed with all that is below it, and what one has left that
// was killed is, too, and nothing else.
func TestKillServe(t *testing.T) {
	for name, signal := range map[string]string{"stopped": "STOP", "killed": "KILL"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSandbox(t, 0)
			k := s.accept()
			k.start(&wire.Start{ID: "before", Command: []string{"sleep", "4713"}})
			served := serve(t, s.enter("serve"))
			served.start(&wire.Start{ID: "x", Command: []string{"sh", "-c", "setsid sleep 4714 & (setsid sleep 4715 &); exec sleep 4716"}})
			await(t, "its tree", func() bool {
				a := k.beside().run("ps", "ps -eo args | grep -c '^sleep 471[456]'")
				return a.stdout.String() == "3\n"
			})
			pid, begun := fmt.Sprint(served.hello.PID), fmt.Sprint(served.hello.Begun)
			k.beside().run("signal", "kill -"+signal+" "+pid)
			if out, err := s.enter("kill", pid, begun).CombinedOutput(); err != nil {
				t.Errorf("%v, %s", err, out)
			}
			a := k.beside().run("after", "ps -eo stat,args | grep -v '^Z' | cut -c6- | grep -e '^sleep 471' -e ' serve$'")
			if a.stdout.String() != "sleep 4713\n" {
				t.Errorf("left: %q", &a.stdout)
			}
		})
	}
	for _, args := range [][]string{nil, {"1", "1"}, {"x", "1"}, {"2", "-1"}, {"2"}} {
		if runKill(args) != exitUsage {
			t.Errorf("%q is taken", args)
		}
	}
}
