package sandboxapi_test

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// house is the API on a real server, whose engine is in memory, with a sandbox "k".
type house struct {
	*openapitest.Server
	caller  // follows no redirects
	fake    *runtimetest.Fake
	session string
}

const reader = "token-of-a-mere-reader"

// newHouse takes what the server is to have in the engine's stead; nil is the engine.
func newHouse(t *testing.T, wrap func(*runtimetest.Fake) runtime.AgentRuntime, change ...func(*sandboxapi.Options)) *house {
	t.Helper()
	h := &house{caller: caller{t: t}, fake: runtimetest.NewFake(runtimetest.FakeOptions{Files: t.TempDir()})}
	var engine runtime.AgentRuntime = h.fake
	if wrap != nil {
		engine = wrap(h.fake)
	}
	root := t.TempDir()
	change = append([]func(*sandboxapi.Options){func(o *sandboxapi.Options) { o.Heartbeat = 20 * time.Millisecond }}, change...)
	h.Server = openapitest.Serve(engine, t.TempDir(), fmt.Sprintf("{version: 1, mounts: {allowed_roots: [%q]}}", root), `tokens:
- {name: master, tenant: red, token: `+master+`}
- {name: powerless, tenant: red, token: `+powerless+`, scopes: [status:read]}
- {name: reader, tenant: red, token: `+reader+`, scopes: [sandboxes:read]}
`, change...)
	t.Cleanup(h.End)
	h.url = h.URL
	h.client = &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	eventually(t, "it is ready", func() bool { return h.Ready(t.Context()) == nil })
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
