package openapitest

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// QuotaBytes is the quota of each workspace of Serve, in bytes.
const QuotaBytes = 1 << 20

// Server is a whole server that runs in this process.
type Server struct {
	*lifecycle.Service
	Handler http.Handler
	URL     string
	End     func()
}

// Serve starts a server on an engine. The server writes below dir, and its chats to the
// directory chats there. Pol and tokens are YAML. Each of changes may change the options. Serve
// panics if anything fails.
func Serve(rt runtime.AgentRuntime, dir, pol, tokens string, changes ...func(*sandboxapi.Options)) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	p, err := policy.Parse([]byte(pol), policy.Options{DefaultImage: runtimetest.DefaultImage})
	must(err)
	inForce := func() *policy.Policy { return p }
	known, err := proxy.ParseTokens([]byte(tokens))
	must(err)
	db, err := store.Open(ctx, store.Options{Path: filepath.Join(dir, "berm.db")})
	must(err)
	root := filepath.Join(dir, "chats")
	must(os.Mkdir(root, 0o755))
	quotas, err := quota.New(ctx, quota.Options{Store: db, Root: root, QuotaBytes: QuotaBytes, Off: true})
	must(err)
	manager, err := lifecycle.New(lifecycle.Options{
		Runtime: rt, Policy: inForce, Store: db, Quotas: quotas, Holder: mountpintest.Holder{}, Owner: "owner",
		Settings: lifecycle.Settings{Command: []string{"sleep", "infinity"}, ChatsRoot: root, ChatMountPath: "/chat"},
	})
	must(err)
	chats, err := chat.New(ctx, chat.Options{Root: root, Store: db, Quotas: quotas, Sandboxes: manager})
	must(err)
	opts := sandboxapi.Options{
		Manager: manager, Workspaces: quotas, Chats: chats, Policy: inForce, Gate: proxy.GateOptions{Tokens: known}, Version: "1.2.3",
	}
	for _, change := range changes {
		change(&opts)
	}
	handler, err := sandboxapi.New(opts)
	must(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		must(manager.Run(ctx))
	}()
	server := httptest.NewServer(handler)
	return &Server{manager, handler, server.URL, func() {
		server.Close()
		cancel()
		<-done
		must(chats.Close(context.Background()))
		must(db.Close())
	}}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
