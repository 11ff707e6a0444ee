package sandboxapi_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// noStore is a store that keeps nothing.
type noStore struct{ quota.Store }

func (noStore) Records(context.Context) ([]lifecycle.Sandbox, error) { return nil, nil }
func (noStore) Put(context.Context, lifecycle.Sandbox) error         { return nil }
func (noStore) Touch(context.Context, map[string]time.Time) error    { return nil }
func (noStore) Delete(context.Context, ...string) error              { return nil }
func (noStore) Fresh() bool                                          { return true }
func (noStore) TookOver(context.Context) error                       { return nil }
func (noStore) Ping(context.Context) error                           { return nil }
func (noStore) Projects(context.Context) ([]quota.Project, error)    { return nil, nil }

// house is the API on a real manager, whose engine is in memory, with a sandbox "k".
type house struct {
	*lifecycle.Service
	caller  // follows no redirects
	fake    *runtimetest.Fake
	handler http.Handler
	session string
}

const reader = "token-of-a-mere-reader"

// newHouse takes what the manager is to have in the engine's stead; nil is the engine.
func newHouse(t *testing.T, wrap func(*runtimetest.Fake) runtime.AgentRuntime, change ...func(*sandboxapi.Options)) *house {
	t.Helper()
	h := &house{caller: caller{t: t}, fake: runtimetest.NewFake(runtimetest.FakeOptions{Files: t.TempDir()})}
	root := t.TempDir()
	pol, err := policy.Parse(fmt.Appendf(nil, "{version: 1, mounts: {allowed_roots: [%q]}}", root), policy.Options{DefaultImage: runtimetest.DefaultImage})
	must(t, err)
	tokens, err := proxy.ParseTokens([]byte(`tokens:
- {name: master, tenant: red, token: ` + master + `}
- {name: powerless, tenant: red, token: ` + powerless + `, scopes: [status:read]}
- {name: reader, tenant: red, token: ` + reader + `, scopes: [sandboxes:read]}
`))
	must(t, err)
	var engine runtime.AgentRuntime = h.fake
	if wrap != nil {
		engine = wrap(h.fake)
	}
	current := func() *policy.Policy { return pol }
	quotas, err := quota.New(t.Context(), quota.Options{Store: noStore{}, Off: true})
	must(t, err)
	h.Service, err = lifecycle.New(lifecycle.Options{Runtime: engine, Policy: current, Store: noStore{}, Quotas: quotas, Holder: mountpintest.Holder{}, Owner: "owner"})
	must(t, err)
	opts := sandboxapi.Options{Manager: h.Service, Policy: current, Gate: proxy.GateOptions{Tokens: tokens}, Heartbeat: 20 * time.Millisecond}
	for _, f := range change {
		f(&opts)
	}
	handler, err := sandboxapi.New(opts)
	must(t, err)
	h.handler = handler
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	srv := httptest.NewServer(handler)
	t.Cleanup(func() {
		srv.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	h.url = srv.URL
	h.client = &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	eventually(t, "it is ready", func() bool { return h.Ready(ctx) == nil })
	work := filepath.Join(root, "k")
	must(t, os.Mkdir(work, 0o755))
	h.session = h.create("k", policy.Request{HostPath: &work})
	return h
}

func (h *house) create(key string, req policy.Request) (session string) {
	h.t.Helper()
	res, err := h.Create(context.Background(), lifecycle.CreateRequest{Tenant: "red", Key: key, Request: req})
	must(h.t, err)
	return res.Sandbox.SessionID
}

const filesPath = "/api/v1/sandboxes/k/files"

// at is the path of a files call.
func at(call, name string, query ...string) string {
	q := url.Values{"path": {name}}
	for i := 0; i+1 < len(query); i += 2 {
		q.Set(query[i], query[i+1])
	}
	return filesPath + call + "?" + q.Encode()
}

func (h *house) put(name, content string) {
	h.t.Helper()
	h.want(200, "", "PUT", at("", name, "mkdir", "true"), content)
}
