package main

import (
	"testing"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// What is to be read once isn't kept after that, but for how it ended.
func TestOnce(t *testing.T) {
	for name, once := range map[string]bool{"once": true, "kept": false} {
		t.Run(name, func(t *testing.T) {
			s := newSandbox(t, 0)
			k := s.accept()
			k.start(&wire.Start{ID: "x", Command: []string{"echo", "hello"}, Hold: true, Once: once})
			a := k.do(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "x", From: -1}})
			if a.failure != nil || a.stdout.String() != "hello\n" {
				t.Fatalf("%q, %v", &a.stdout, a.failure)
			}
			info := k.ask(wire.OpProcess, "x").info
			if info.Running || info.ExitCode != 0 || info.NextSeq != 6 || (info.FirstSeq == 6) != once {
				t.Errorf("%+v", info)
			}
			a = k.do(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "x", From: 0}})
			if (a.class() == wire.ClassOutOfRange) != once {
				t.Errorf("%q, %v", &a.stdout, a.failure)
			}
		})
	}
}
