package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// ownMemory is what a process has for itself, but for what is its program's file, in KiB.
func ownMemory(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	_, after, _ := strings.Cut(string(b), "\nRssAnon:")
	n, err := strconv.Atoi(strings.Fields(after)[0])
	must(t, err)
	return n
}

// idleMemory is how much memory of its own a sandbox' init has at most when it is idle, before
// it has worked and after, in KiB. It is 1,000 before, and as a rule 2,200 to 2,400 after.
const idleMemory = 3072

// What work takes is given back after it.
func TestMemoryIsGivenBack(t *testing.T) {
	t.Parallel() // it waits for most of its time
	s := newSandbox(t, 0)
	k := s.accept()
	k.patience(2 * time.Minute)
	await(t, "little memory at the start", func() bool { return ownMemory(t, s.pid) <= idleMemory })
	t.Logf("at the start: %d KiB", ownMemory(t, s.pid))
	for round := range 2 {
		for i := range 150 {
			k.run(fmt.Sprint(i), "true")
			k.ask(wire.OpForget, fmt.Sprint(i))
		}
		for i := range 4 {
			k.run(fmt.Sprint("much", i), "head -c 8388608 /dev/zero")
			k.ask(wire.OpForget, fmt.Sprint("much", i))
		}
		busy := ownMemory(t, s.pid)
		await(t, "memory to be given back", func() bool { return ownMemory(t, s.pid) <= idleMemory })
		t.Logf("round %d: %d KiB, and then %d", round, busy, ownMemory(t, s.pid))
	}
}
