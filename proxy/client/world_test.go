package client_test

import (
	"context"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hold"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime/runtimetest"
)

const (
	red  = "token-of-the-red-tenant"
	blue = "token-of-the-blue-tenant"
)

// memStore is a store in memory.
type memStore struct {
	mu      sync.Mutex
	records map[string]lifecycle.Record
}

func (s *memStore) Records(context.Context) ([]lifecycle.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.records)), nil
}

func (s *memStore) Put(_ context.Context, r lifecycle.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records[r.SessionID] = r
	return nil
}

func (s *memStore) Touch(context.Context, map[string]time.Time) error { return nil }

func (s *memStore) Delete(_ context.Context, ids ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		delete(s.records, id)
	}
	return nil
}

func (s *memStore) Fresh() bool                { return true }
func (s *memStore) Ping(context.Context) error { return nil }

// startBerm runs the whole server, but for its engine, which is a fake.
func startBerm(opts runtimetest.FakeOptions) (fake *runtimetest.Fake, url string, stop func()) {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	fake = runtimetest.NewFake(opts)
	pol, err := policy.Parse([]byte("{version: 1, images: {allow: ['registry.local/*']}}"), policy.Options{DefaultImage: runtimetest.DefaultImage})
	must(err)
	tokens, err := proxy.ParseTokens([]byte(`tokens:
- {name: red, tenant: red, token: ` + red + `, max_sandboxes: 7}
- {name: blue, tenant: blue, token: ` + blue + `}
`))
	must(err)
	current := func() *policy.Policy { return pol }
	m, err := lifecycle.New(lifecycle.Options{
		Runtime: fake, Policy: current, Store: &memStore{records: map[string]lifecycle.Record{}}, Holder: hold.Verifier{}, Owner: "owner",
	})
	must(err)
	h, err := sandboxapi.New(sandboxapi.Options{Manager: m, Policy: current, Tokens: tokens, Version: "1.2.3"})
	must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		must(m.Run(ctx))
	}()
	srv := httptest.NewServer(h)
	return fake, srv.URL, func() {
		srv.Close()
		cancel()
		<-done
	}
}

// berm is a server and a client of the red tenant's, whose exchanges are all
// checked against the OpenAPI document.
type berm struct {
	*client.Client
	fake *runtimetest.Fake
	url  string
	http *http.Client
}

func newBerm(t *testing.T, opts runtimetest.FakeOptions) *berm {
	t.Helper()
	fake, url, stop := startBerm(opts)
	t.Cleanup(stop)
	b := &berm{fake: fake, url: url, http: &http.Client{Transport: openapitest.New(t).Transport(nil)}}
	b.Client = b.as(t, red, 0)
	eventually(t, "ready", func() bool { return b.Ready(t.Context()) == nil })
	return b
}

// as gives a client with another token.
func (b *berm) as(t *testing.T, token string, retries int) *client.Client {
	t.Helper()
	c, err := client.New(client.Options{BaseURL: b.url, Token: token, HTTPClient: b.http, Retries: retries})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// eventually waits for what another goroutine is about to do.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 5_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("it never came to: %s", what)
}
