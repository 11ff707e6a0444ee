package main

import (
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
)

// limitMemory keeps this process small: a sandbox's limits count it, with its threads.
// What is allocated goes into output and answers, and is let go of soon.
func limitMemory() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(50)
}

// quiet is how long nothing has been done when memory is given back.
const quiet = time.Second

// worthFreeing is how much has been allocated, in bytes, before memory is given back, unless a
// connection has ended, whose stack and buffers are worth as much.
const worthFreeing = 128 << 10

// tidier gives the memory that isn't used any more back to the kernel, once it is quiet.
type tidier struct {
	armed, active, parted atomic.Bool
	freed                 atomic.Uint64 // how much had ever been allocated the last time, in bytes
}

// part says that a connection has ended.
func (t *tidier) part() {
	t.parted.Store(true)
	t.note()
}

// note says that something was done.
func (t *tidier) note() {
	t.active.Store(true)
	if t.armed.CompareAndSwap(false, true) {
		time.AfterFunc(quiet, t.check)
	}
}

func (t *tidier) check() {
	if t.active.Swap(false) {
		time.AfterFunc(quiet, t.check)
		return
	}
	t.armed.Store(false)
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if !t.parted.Swap(false) && m.TotalAlloc-t.freed.Load() < worthFreeing {
		return
	}
	runtime.GC() // what is in a pool survives one
	debug.FreeOSMemory()
	t.freed.Store(m.TotalAlloc)
}
