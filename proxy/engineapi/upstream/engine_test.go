package upstream

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// TestEngineRelease has an engine come back as another release.
func TestEngineRelease(t *testing.T) {
	var asked atomic.Int64
	serve := func(release string) *httptest.Server {
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			asked.Add(1)
			_, _ = fmt.Fprintf(w, `{"Version":%q}`, release)
		}))
	}
	old := serve("29.5.1")
	var address atomic.Value
	address.Store(old.Listener.Addr().String())
	e := New(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address.Load().(string))
	})
	defer e.Transport.CloseIdleConnections()
	for range 3 {
		if got, err := e.Release(t.Context()); err != nil || got != "29.5.1" {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if asked.Load() != 1 {
		t.Errorf("it was asked %d times", asked.Load())
	}
	older := serve("20.10.24")
	defer older.Close()
	address.Store(older.Listener.Addr().String())
	old.Close()
	for got := ""; got != "20.10.24"; got, _ = e.Release(t.Context()) { // until the connection's end is seen
		if t.Context().Err() != nil {
			t.Fatal("the engine is still the old one")
		}
	}
}

func TestOwnSeccomp(t *testing.T) {
	for options, want := range map[string]bool{
		"name=apparmor name=seccomp,profile=default": true, "name=seccomp,profile=builtin": true, "name=seccomp,profile=unconfined": true, "seccomp": true, "name=seccomp": true,
		"name=seccomp,profile=/etc/docker/seccomp.json": false, "name=apparmor": false, "": false,
	} {
		if got := ownSeccomp(strings.Fields(options)); got != want {
			t.Errorf("%q: %v", options, got)
		}
	}
}
