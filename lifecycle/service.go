package lifecycle

import "github.com/bermhq/berm/runtime"

// Service bundles the parts of the lifecycle, and has their methods. It is safe for many
// goroutines. Calls that need the engine fail with errdefs' Unavailable until Run has reconciled,
// and while the engine can't be used.
type Service struct {
	*Registry
	*processes
	*reconciler
	*collector
}

// New checks the options and returns a Service. It makes no calls; Run does.
func New(opts Options) (*Service, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	r := newRegistry(&opts)
	return &Service{
		Registry:   r,
		processes:  newProcesses(r),
		reconciler: &reconciler{registry: r, engine: r.engine},
		collector:  &collector{registry: r, engine: r.engine},
	}, nil
}

// Unreachable explains an error of a connection to the engine. It is an *UnavailableError.
func (s *Service) Unreachable(err error) error {
	e := s.Registry.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.unavailableLocked(runtime.Unavailable(err))
}
