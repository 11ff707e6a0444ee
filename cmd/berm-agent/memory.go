package main

import (
	"runtime"
	"runtime/debug"
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

// freeMemory returns unused memory to the kernel.
func freeMemory() {
	runtime.GC() // what is in a sync.Pool survives one
	debug.FreeOSMemory()
}
