package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// idleMemory is how much memory of its own a sandbox' init has at most when it is idle, before
// it has worked and after, in KiB. It is 1,000 before, and as a rule 2,200 to 2,400 after.
const idleMemory = 3072

// What work takes is given back after it.
func TestMemoryIsGivenBack(t *testing.T) {
	t.Parallel()
	s := newSandbox(t, 0)
	k := s.accept()
	k.same = k.first // as Berm uses it
	k.patience(2 * time.Minute)
	await(t, "little memory at the start", func() bool { return anonymous(t, s.pid) <= idleMemory })
	t.Logf("at the start: %d KiB", anonymous(t, s.pid))
	for round := range 2 {
		for i := range 150 {
			k.run(fmt.Sprint(i), "true")
			k.ask(wire.OpForget, fmt.Sprint(i))
		}
		for i := range 4 {
			k.run(fmt.Sprint("much", i), "head -c 8388608 /dev/zero")
			k.ask(wire.OpForget, fmt.Sprint("much", i))
		}
		busy := anonymous(t, s.pid)
		await(t, "memory to be given back", func() bool { return anonymous(t, s.pid) <= idleMemory })
		t.Logf("round %d: %d KiB, and then %d", round, busy, anonymous(t, s.pid))
	}
}
