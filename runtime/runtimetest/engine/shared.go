package engine

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"
	"time"
)

// Shared is an engine for all tests of a package that need none of their own. It starts when
// the first test asks for it. The fields are mandatory.
type Shared[E io.Closer] struct {
	Kind    string // as for Check
	Start   func(context.Context, Options) (E, error)
	Options Options

	once   sync.Once
	engine E
	err    error
	close  func() error // nil before the start
}

// Get returns the engine. If none can be had, it ends the test as Require does.
func (s *Shared[E]) Get(t testing.TB) E {
	t.Helper()
	Require(t, s.Kind)
	s.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if s.engine, s.err = s.Start(ctx, s.Options); s.err == nil {
			s.close = s.engine.Close
		}
	})
	if s.err != nil {
		Lacking(t, s.Kind, s.err)
	}
	return s.engine
}

// Main is for TestMain. It runs the tests, closes the engine and ends the process.
func (s *Shared[E]) Main(m *testing.M) {
	code := m.Run()
	if s.close != nil {
		if err := s.close(); err != nil {
			_, _ = fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// Own starts an engine for one test, and closes it after the test. If none can be had, it
// ends the test as Require does.
func Own[E io.Closer](t testing.TB, kind string, start func(context.Context, Options) (E, error), opts Options) E {
	t.Helper()
	Require(t, kind)
	e, err := start(t.Context(), opts)
	if err != nil {
		Lacking(t, kind, err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}
