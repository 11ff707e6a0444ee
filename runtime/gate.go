package runtime

import (
	"context"
	"sync"
)

// Gates keep containers from being frozen while commands are being started in them:
// a process that joins a frozen cgroup never gets done, and engines hold the
// container's lock meanwhile, so that it can't even be removed. It is for backends.
// The zero value is ready for use, by many goroutines at once.
type Gates struct {
	mu sync.Mutex
	m  map[string]*gate // by container; those that nobody uses are left out
}

type gate struct {
	shut     chan struct{} // closed when the pause under way ends; nil when there is none
	commands map[*guest]struct{}
}

// guest is a command that was let in.
type guest struct {
	settled func(context.Context) error
	left    context.Context
}

// use answers the container's gate once it is open. It is called with the lock
// held, and lets go of it while it waits.
func (g *Gates) use(ctx context.Context, container string) (*gate, error) {
	for {
		if g.m == nil {
			g.m = map[string]*gate{}
		}
		t := g.m[container]
		if t == nil {
			t = &gate{commands: map[*guest]struct{}{}}
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

func (g *Gates) tidy(container string) {
	if t := g.m[container]; t != nil && t.shut == nil && len(t.commands) == 0 {
		delete(g.m, container)
	}
}

// Enter lets a command in, once no pause of its container is under way; it fails
// only when ctx ends first. Each command that got in has to leave, once. Settled
// returns when the engine is done with starting the command, or with an error when
// its context ends, which it also does when the command leaves.
func (g *Gates) Enter(ctx context.Context, container string, settled func(context.Context) error) (leave func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t, err := g.use(ctx, container)
	if err != nil {
		return nil, err
	}
	left, end := context.WithCancel(context.Background())
	c := &guest{settled: settled, left: left}
	t.commands[c] = struct{}{}
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		end()
		delete(t.commands, c)
		g.tidy(container)
	}, nil
}

// Close lets no command in until it is opened again, and returns when all that are
// in have been started or have left. It fails only when ctx ends first.
func (g *Gates) Close(ctx context.Context, container string) (open func(), err error) {
	g.mu.Lock()
	t, err := g.use(ctx, container)
	if err != nil {
		g.mu.Unlock()
		return nil, err
	}
	t.shut = make(chan struct{})
	commands := make([]*guest, 0, len(t.commands))
	for c := range t.commands {
		commands = append(commands, c)
	}
	g.mu.Unlock()
	open = func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		close(t.shut)
		t.shut = nil
		g.tidy(container)
	}
	for _, c := range commands {
		if err := c.wait(ctx); err != nil {
			open()
			return nil, err
		}
	}
	return open, nil
}

func (c *guest) wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.left, cancel)()
	err := c.settled(ctx)
	if c.left.Err() != nil {
		return nil
	}
	return err
}
