package lifecycle_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func (w *world) ports(key string) *lifecycle.Access {
	w.t.Helper()
	p, err := w.Ports(context.Background(), "a", key)
	must(w.t, err)
	return p
}

// echo answers what it hears, and ends when that does.
func echo(c net.Conn) {
	_, _ = io.Copy(c, c)
	_ = c.Close()
}

func TestDialPorts(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := t.Context()
	if _, err := w.Ports(ctx, "a", "k"); !errorIs[*lifecycle.NotFoundError](err) {
		t.Fatalf("without a sandbox: %v", err)
	}
	w.create(request("k"))
	p := w.ports("k")
	for _, port := range []int{-1, 0, 65536} {
		if _, err := p.Dial(ctx, port); !errorIs[*lifecycle.InvalidError](err) {
			t.Errorf("port %d: %v", port, err)
		}
	}
	var port *lifecycle.PortError
	if _, err := p.Dial(ctx, 80); !errors.As(err, &port) || port.Port != 80 {
		t.Errorf("nobody listens: %v", err)
	}
	w.fake.Listen(80, echo)
	c, err := p.Dial(ctx, 80)
	must(t, err)
	must(t, second(io.WriteString(c, "hello")))
	buf := make([]byte, 5)
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "hello" {
		t.Errorf("got %q, %v", buf, err)
	}
	must(t, c.CloseWrite())
	if rest, err := io.ReadAll(c); err != nil || len(rest) != 0 {
		t.Errorf("after its end came %q, %v", rest, err)
	}
	if err := errors.Join(c.Close(), c.Close()); err != nil {
		t.Error(err)
	}

	must(t, w.fake.Remove(ctx, w.fake.Containers()[0].ID))
	w.eventually("stopped", func() bool { return w.status("k") == lifecycle.StatusStopped })
	if found, err := w.Ports(ctx, "a", "k"); !errorIs[*lifecycle.StateError](err) || found.SessionID() != p.SessionID() {
		t.Errorf("stopped: %v", err)
	}
	if _, err := p.Dial(ctx, 80); !errorIs[*lifecycle.StateError](err) {
		t.Errorf("stopped: %v", err)
	}
}

func TestPortsAreCapped(t *testing.T) {
	w := newWorld(t, setup{})
	w.create(request("k"))
	w.fake.Listen(80, echo)
	p := w.ports("k")
	var open []net.Conn
	for range 256 {
		c, err := p.Dial(t.Context(), 80)
		must(t, err)
		open = append(open, c)
	}
	if _, err := p.Dial(t.Context(), 80); !errorIs[*lifecycle.CapacityError](err) {
		t.Errorf("one more: %v", err)
	}
	for range 2 { // once is enough
		_ = open[0].Close()
	}
	c, err := p.Dial(t.Context(), 80)
	if err != nil {
		t.Fatalf("in its place: %v", err)
	}
	if _, err := p.Dial(t.Context(), 80); !errorIs[*lifecycle.CapacityError](err) {
		t.Errorf("and another: %v", err)
	}
	for _, c := range append(open, c) {
		_ = c.Close()
	}
}

func TestPortsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var slow time.Duration
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Delay: func(op string) time.Duration {
			if op == "dial" {
				return slow
			}
			return 0
		}}})
		req := request("k")
		req.Request.IdleTTL = ptr(time.Minute)
		w.create(req)
		w.fake.Listen(80, echo)
		c, err := w.ports("k").Dial(t.Context(), 80)
		must(t, err)
		buf := make([]byte, 1)
		for range 4 { // each byte counts, in either direction
			time.Sleep(45 * time.Second)
			must(t, second(c.Write(buf)))
			must(t, second(io.ReadFull(c, buf)))
		}
		if got := w.status("k"); got != lifecycle.StatusRunning {
			t.Errorf("in use, it is %s", got)
		}
		slow = time.Hour
		start := time.Now()
		if _, err := w.ports("k").Dial(t.Context(), 80); !errorIs[*lifecycle.PortError](err) || time.Since(start) != 5*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		// A connection that carries nothing doesn't.
		time.Sleep(time.Minute)
		if got := w.status("k"); got != lifecycle.StatusExpired {
			t.Errorf("with nothing said for a minute, it is %s", got)
		}
		_ = c.Close()
	})
}
