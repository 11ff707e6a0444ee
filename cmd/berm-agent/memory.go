package main

import (
	"runtime"
	"runtime/debug"
	"time"
)

// limitMemory keeps this process small: its memory and threads count toward the sandbox's limits. What
// it allocates, mostly buffers for output and answers, is garbage soon.
func limitMemory() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(50)
}

// quiet is how long this process is idle before it runs freeMemory.
const quiet = time.Second

// freeMemory returns unused memory to the kernel.
func freeMemory() {
	runtime.GC() // a sync.Pool keeps its content through one collection
	debug.FreeOSMemory()
}
