package client_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	red  = "token-of-the-red-tenant"
	blue = "token-of-the-blue-tenant"
)

// quota is of each workspace, in bytes.
const quota = openapitest.QuotaBytes

// startBerm runs the whole server, but for its engine, which is a fake.
func startBerm(opts runtimetest.FakeOptions) (fake *runtimetest.Fake, url string, stop func()) {
	dir, err := os.MkdirTemp("", "berm-client-")
	if err != nil {
		panic(err)
	}
	if opts.Exec == nil {
		opts.Exec = inChat(filepath.Join(dir, "chats"))
	}
	opts.Files = filepath.Join(dir, "files")
	fake = runtimetest.NewFake(opts)
	s := openapitest.Serve(fake, dir, "{version: 1, images: {allow: ['registry.local/*']}}", `tokens:
- {name: red, tenant: red, token: `+red+`, max_sandboxes: 7}
- {name: blue, tenant: blue, token: `+blue+`}
`)
	return fake, s.URL, func() {
		s.End()
		_ = os.RemoveAll(dir)
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
	must(t, err)
	return c
}

var (
	must       = check.Must // ends a test if a step of its own fails
	eventually = check.Eventually
)
