package client_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	quotas "github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/lifecycle/workspace"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

const (
	red  = "token-of-the-red-tenant"
	blue = "token-of-the-blue-tenant"
)

// quota is of each workspace, in bytes.
const quota = 1 << 20

// startBerm runs the whole server, but for its engine, which is a fake.
func startBerm(opts runtimetest.FakeOptions) (fake *runtimetest.Fake, url string, stop func()) {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	pol, err := policy.Parse([]byte("{version: 1, images: {allow: ['registry.local/*']}}"), policy.Options{DefaultImage: runtimetest.DefaultImage})
	must(err)
	tokens, err := proxy.ParseTokens([]byte(`tokens:
- {name: red, tenant: red, token: ` + red + `, max_sandboxes: 7}
- {name: blue, tenant: blue, token: ` + blue + `}
`))
	must(err)
	current := func() *policy.Policy { return pol }
	dir, err := os.MkdirTemp("", "berm-client-")
	must(err)
	db, err := store.Open(context.Background(), store.Options{Path: filepath.Join(dir, "berm.db")})
	must(err)
	root := filepath.Join(dir, "chats")
	must(os.Mkdir(root, 0o755))
	held, err := quotas.New(context.Background(), quotas.Options{Store: db, Root: root, QuotaBytes: quota, Off: true})
	must(err)
	workspaces, err := workspace.New(db, held)
	must(err)
	if opts.Exec == nil {
		opts.Exec = inChat(root)
	}
	opts.Files = filepath.Join(dir, "files")
	fake = runtimetest.NewFake(opts)
	m, err := lifecycle.New(lifecycle.Options{
		Runtime: fake, Policy: current, Store: db, Quotas: held, Holder: mountpintest.Holder{}, Owner: "owner",
		Settings: lifecycle.Settings{ChatsRoot: root, ChatMountPath: chatMount},
	})
	must(err)
	chats, err := chat.New(context.Background(), chat.Options{Root: root, Store: db, Workspaces: workspaces, Quotas: held, Sandboxes: m})
	must(err)
	h, err := sandboxapi.New(sandboxapi.Options{Manager: m, Workspaces: workspaces, Chats: chats, Policy: current, Tokens: tokens, Version: "1.2.3"})
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
		must(chats.Close(context.Background()))
		must(db.Close())
		must(os.RemoveAll(dir))
	}
}

// chatMount is where a sandbox has its chat's directory.
const chatMount = "/chat"

// inChat stands in for the engine's mounts: the shell commands that name the chat's
// directory are run on this machine, in that.
func inChat(root string) func(context.Context, runtime.Container, runtime.Exec) (runtime.ExecResult, error) {
	return func(ctx context.Context, c runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
		if len(e.Command) != 3 || !strings.Contains(e.Command[2], chatMount) {
			return runtime.ExecResult{}, errors.ErrUnsupported
		}
		dir := filepath.Join(root, ".tenants", c.Labels[lifecycle.LabelTenant], c.Labels[lifecycle.LabelKey])
		cmd := exec.CommandContext(ctx, "sh", "-c", strings.ReplaceAll(e.Command[2], chatMount, dir))
		cmd.Stdout, cmd.Stderr = e.Stdout, e.Stderr
		err := cmd.Run()
		return runtime.ExecResult{ExitCode: cmd.ProcessState.ExitCode()}, err
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
