package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	stormTTL     = 8 * time.Second
	stormWorkers = 6
	stormKeys    = 3 // of each worker
)

// promise is what the server has answered about one key.
type promise struct {
	known   bool   // the last call was answered
	session string // empty: there is no sandbox
	expires time.Time
	dying   bool // a delete of the session was cut off, and the engine may still be at it
}

// holds tells whether the server is still bound by the promise of a sandbox.
func (p *promise) holds() bool {
	return p.known && p.session != "" && time.Until(p.expires) > time.Second
}

// storm calls a server at random, and remembers what it was answered.
type storm struct {
	t        *testing.T
	e        *testEngine
	client   *client.Client
	checker  *openapitest.Checker // of every call and answer
	dir      string               // host directory that some of the sandboxes mount
	promises [stormWorkers][stormKeys]promise
	restarts bool // the engine is killed too, so that containers may die
}

func stormKey(worker, n int) string { return fmt.Sprintf("storm-%d-%d", worker, n) }

// blow runs all workers until ctx ends, and each to the end of the call that it is
// at: what a call that was given up comes to is nobody's promise.
func (s *storm) blow(ctx context.Context) {
	var wg sync.WaitGroup
	for worker := range stormWorkers {
		wg.Go(func() {
			for ctx.Err() == nil {
				s.once(s.t.Context(), worker, rand.IntN(stormKeys))
			}
		})
	}
	wg.Wait()
}

func (s *storm) request(n int) apitype.SandboxRequest {
	ttl := apitype.Duration(stormTTL)
	req := apitype.SandboxRequest{TTL: &ttl}
	switch n {
	case 0:
		req.HostPath = &s.dir
	case 1:
		on := "on"
		req.Network = &on
	}
	return req
}

// once makes one call and holds its answer against what was answered before.
func (s *storm) once(ctx context.Context, worker, n int) {
	key, p := stormKey(worker, n), &s.promises[worker][n]
	held, before := p.holds(), *p
	p.known = false
	var err error
	switch dice := rand.IntN(10); {
	case dice < 5:
		var sb *apitype.Sandbox
		if sb, err = s.client.Create(ctx, key, s.request(n)); err == nil {
			mayDie := s.restarts || before.dying
			if held && sb.SessionID != before.session && !(mayDie && sb.Recreated) {
				s.t.Errorf("%s: session %s was answered, then %s (%s)", key, before.session, sb.SessionID, sb.Result)
			}
			*p = promise{known: true, session: sb.SessionID, expires: sb.ExpiresAt, dying: before.dying && sb.SessionID == before.session}
		}
	case dice < 8:
		var res *apitype.ExecResult
		res, err = s.client.Exec(ctx, key, apitype.ExecRequest{Command: apitype.Command{"echo", key}})
		switch {
		case err == nil:
			*p = before
			if res.Recreated {
				p.known = false
			}
			if res.Status == "completed" && res.ExitCode != nil && *res.ExitCode == 0 && res.Stdout != key+"\n" {
				s.t.Errorf("%s: a command's output is lost: %+v", key, res)
			}
		case refusal(err).Status == 404:
			if held {
				s.t.Errorf("%s: session %s is gone", key, before.session)
			}
			*p = promise{known: true}
		}
	default:
		p.dying = true
		if _, err = s.client.Delete(ctx, key); err == nil {
			*p = promise{known: true}
		}
	}
}

// check asks after every key once the server is up again.
func (s *storm) check(ctx context.Context) {
	for worker := range stormWorkers {
		for n := range stormKeys {
			key, p := stormKey(worker, n), &s.promises[worker][n]
			held := p.holds()
			sb, err := s.client.Get(ctx, key)
			switch {
			case err == nil:
				if held && sb.SessionID != p.session {
					s.t.Errorf("%s: session %s was answered, %s is there", key, p.session, sb.SessionID)
				}
				// One that has expired is listed until the sweep, and no command runs in it.
				if p.known && p.session == "" && sb.Status != "expired" {
					s.t.Errorf("%s: was answered deleted, session %s is there", key, sb.SessionID)
				}
				// One that is being made again is still to come, and may fail to.
				*p = promise{known: sb.Status != "starting" && sb.Status != "expired", session: sb.SessionID, expires: sb.ExpiresAt, dying: p.dying}
			case refusal(err).Status == 404:
				if held {
					s.t.Errorf("%s: session %s was answered and is lost", key, p.session)
				}
				*p = promise{known: true}
			default:
				s.t.Errorf("%s: %v", key, err)
			}
		}
	}
}

// newStorm starts a server that mounts below dir, and a storm that calls it.
func newStorm(t *testing.T, e *testEngine) (*storm, *server) {
	t.Helper()
	server := newServer(t, e, e.dir(t), testImage)
	shared := makeDir(t, server.dir, "shared")
	server.policy(t, "mounts: {allowed_roots: ["+shared+"]}\n")
	s := &storm{t: t, e: e, checker: openapitest.New(t), dir: shared}
	s.start(server)
	return s, server
}

// start starts the server, for the first time or again.
func (s *storm) start(server *server) {
	s.t.Helper()
	server.start(s.t)
	s.client = server.client(s.t, s.checker.Transport(nil))
}

// settle lets every sandbox run out, and looks for what is left.
func (s *storm) settle(server *server) {
	s.t.Helper()
	until(s.t, "no sandbox is left", func() bool {
		for _, err := range s.client.List(s.t.Context(), client.ListOptions{}) {
			must(s.t, err)
			return false
		}
		return true
	})
	until(s.t, "no container is left that no record knows", func() bool { return containersOf(s.t, s.e, server) == 0 })
	server.stop()
}

// The server is killed at random instants of a storm of creates, commands and
// deletes. What it had answered must hold after each restart, and once a TTL has
// passed, nothing may be left.
func TestKillingTheServer(t *testing.T) {
	onEachEngine(t, func(t *testing.T, kind string) { testKillingTheServer(t, kind, 3) })
}

// TestSoakKillingTheServer kills more often.
func TestSoakKillingTheServer(t *testing.T) {
	onEachEngine(t, func(t *testing.T, kind string) { testKillingTheServer(t, kind, 50) })
}

func testKillingTheServer(t *testing.T, kind string, kills int) {
	t.Parallel() // much of its time it waits
	e := commonEngine(t, kind)
	s, server := newStorm(t, e)
	for range kills {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { s.blow(ctx); close(done) }()
		time.Sleep(rand.N(1500 * time.Millisecond))
		server.Kill()
		cancel()
		<-done
		s.start(server)
		s.check(t.Context())
	}
	s.settle(server)
	wantNothing(t, e, server)
}

// The same with the engine killed and started again.
func TestSoakKillingTheEngine(t *testing.T) { onEachEngine(t, testSoakKillingTheEngine) }

func testSoakKillingTheEngine(t *testing.T, kind string) {
	t.Parallel() // much of its time it waits
	// A dockerd that was killed in mid-start of a container takes its time over it.
	e := startEngine(t, kind, engine.Options{StartTimeout: 2 * time.Minute})
	s, server := newStorm(t, e)
	s.restarts = kind == "docker" // which ends them all; containerd's live on
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { s.blow(ctx); close(done) }()
		time.Sleep(time.Second + rand.N(time.Second))
		e.Kill()
		time.Sleep(rand.N(500 * time.Millisecond)) // calls meet an engine that is away
		must(t, e.Start(t.Context()))
		time.Sleep(rand.N(500 * time.Millisecond)) // and one that has just come back
		cancel()
		<-done
		until(t, "the server has found its engine again", func() bool { return s.client.Ready(t.Context()) == nil })
		s.check(t.Context())
	}
	s.settle(server)
	wantNothing(t, e, server)
}
