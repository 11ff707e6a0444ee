package docker

import (
	"context"
	"sync"
	"time"
)

// gates keep containers from being frozen while commands are being started in
// them: a process that joins a frozen cgroup never gets done, and older engines
// hold the container's lock meanwhile, so that it can't even be removed.
type gates struct {
	mu sync.Mutex
	m  map[string]*gate // by container; those that nobody uses are left out
}

type gate struct {
	shut     chan struct{} // closed when the pause under way ends; nil when there is none
	commands map[*execution]struct{}
}

// use answers the container's gate once it is open. It is called with the lock
// held, and lets go of it while it waits.
func (g *gates) use(ctx context.Context, container string) (*gate, error) {
	for {
		if g.m == nil {
			g.m = map[string]*gate{}
		}
		t := g.m[container]
		if t == nil {
			t = &gate{commands: map[*execution]struct{}{}}
			g.m[container] = t
		}
		if t.shut == nil {
			return t, nil
		}
		shut := t.shut
		g.mu.Unlock()
		select {
		case <-shut:
		case <-ctx.Done():
		}
		g.mu.Lock()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func (g *gates) tidy(container string) {
	if t := g.m[container]; t != nil && t.shut == nil && len(t.commands) == 0 {
		delete(g.m, container)
	}
}

// enter lets a command in, once no pause of its container is under way. Each
// command that got in has to leave.
func (g *gates) enter(ctx context.Context, x *execution) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	t, err := g.use(ctx, x.container)
	if err == nil {
		t.commands[x] = struct{}{}
	}
	return err
}

func (g *gates) leave(x *execution) {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(x.left)
	delete(g.m[x.container].commands, x)
	g.tidy(x.container)
}

// close lets no command in until it is opened again, and returns when all that
// are in have been started or have left.
func (g *gates) close(ctx context.Context, container string) (open func(), err error) {
	g.mu.Lock()
	t, err := g.use(ctx, container)
	if err != nil {
		g.mu.Unlock()
		return nil, err
	}
	t.shut = make(chan struct{})
	commands := make([]*execution, 0, len(t.commands))
	for x := range t.commands {
		commands = append(commands, x)
	}
	g.mu.Unlock()
	open = func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		close(t.shut)
		t.shut = nil
		g.tidy(container)
	}
	for _, x := range commands {
		if err := x.settled(ctx); err != nil {
			open()
			return nil, err
		}
	}
	return open, nil
}

// settled returns when the engine is done with starting the command.
func (x *execution) settled(ctx context.Context) error {
	select {
	case <-x.asked:
	case <-x.left:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	for delay := time.Millisecond; ; delay = min(2*delay, exitTick) {
		if st, err := x.inspect(ctx); err == nil && (st.Pid != 0 || st.over()) {
			return nil
		}
		select {
		case <-x.left:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(delay):
		}
	}
}
