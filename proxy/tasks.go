package proxy

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Tasks are the goroutines of one request. A panic in one of them ends that request and
// nothing else: Wait repeats it in the request's own goroutine, where Gate.Wrap handles it.
type Tasks struct {
	// Abort is called by a goroutine that has panicked. It must make the other goroutines
	// end. Mandatory.
	Abort func()

	wg  sync.WaitGroup
	bad atomic.Pointer[taskPanic]
}

// taskPanic is the value with which Wait panics: the panic of one of the goroutines.
type taskPanic struct {
	value any
	stack []byte
}

// Go runs f in a goroutine.
func (t *Tasks) Go(f func()) {
	t.wg.Go(func() {
		defer func() {
			if v := recover(); v != nil {
				t.bad.CompareAndSwap(nil, &taskPanic{v, debug.Stack()})
				t.Abort()
			}
		}()
		f()
	})
}

// Wait waits until all goroutines have ended. If one of them panicked, Wait panics.
func (t *Tasks) Wait() {
	t.wg.Wait()
	if p := t.bad.Load(); p != nil {
		panic(p)
	}
}
