package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestFacts has an engine come back as another one.
func TestFacts(t *testing.T) {
	var asked atomic.Int64
	serve := func(release, version, options string) *httptest.Server {
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			asked.Add(1)
			w.Header().Set("Api-Version", version)
			_, _ = fmt.Fprintf(w, `{"Version":%q,"NCPU":4,"Architecture":"x86_64","SecurityOptions":[%q]}`, release, options)
		}))
	}
	old := serve("29.5.1", "1.44", "name=seccomp,profile=/operator.json")
	var address atomic.Value
	address.Store(old.Listener.Addr().String())
	e := New("", func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address.Load().(string))
	})
	defer e.Transport.CloseIdleConnections()
	facts := func() string {
		release, err := e.Release(t.Context())
		most, maxErr := e.Max(t.Context())
		host, hostErr := e.HostInfo(t.Context(), 0)
		if err = errors.Join(err, maxErr, hostErr); err != nil {
			return err.Error()
		}
		return fmt.Sprint(release, " ", most, " ", host.Seccomp != "")
	}
	for range 3 {
		if got := facts(); got != "29.5.1 1.44 false" {
			t.Fatal(got)
		}
	}
	if asked.Load() != 3 {
		t.Errorf("it was asked %d times", asked.Load())
	}
	older := serve("20.10.24", "1.41", "name=seccomp,profile=default")
	defer older.Close()
	address.Store(older.Listener.Addr().String())
	old.Close()
	end := time.Now().Add(10 * time.Second) // for the connection's end to be seen
	for got := facts(); got != "20.10.24 1.41 true"; got = facts() {
		if time.Now().After(end) {
			t.Fatalf("the engine is still the old one: %s", got)
		}
	}
}

func TestWithoutProfile(t *testing.T) {
	e := New("", nil)
	e.host.known.Store(&knownFact[*Host]{value: &Host{shown: []byte(`,"seccomp={}"`)}})
	const options = `"HostConfig":{"A":"\\\"","SecurityOpt":["no-new-privileges"],"B":{}}`
	for inspected, want := range map[string]string{
		`{"Id":"x","HostConfig":{"A":"\\\"","SecurityOpt":["no-new-privileges","seccomp={}"],"B":{}},"C":1}`: `{"Id":"x",` + options + `,"C":1}`,
		`{` + options + `,"Config":{"Env":["A=1","seccomp={}"]}}`:                                            `{` + options + `,"Config":{"Env":["A=1","seccomp={}"]}}`,
		`{"HostConfig":{"Binds":["a","seccomp={}"],"SecurityOpt":[]}}`:                                       `{"HostConfig":{"Binds":["a","seccomp={}"],"SecurityOpt":[]}}`,
		`{"HostConfig":{"SecurityOpt":["a","seccomp={}"`:                                                     `{"HostConfig":{"SecurityOpt":["a","seccomp={}"`,
		`[,"seccomp={}"`: `[,"seccomp={}"`,
		`{"HostConfig":{"SecurityOpt":["a"],"seccomp={}"b\`: `{"HostConfig":{"SecurityOpt":["a"],"seccomp={}"b\`,
		`{"A":"b","seccomp={}","c`:                          `{"A":"b","seccomp={}","c`,
	} {
		if got := string(e.WithoutProfile([]byte(inspected))); got != want {
			t.Errorf("%s became %s", inspected, got)
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
