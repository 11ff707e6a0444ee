package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func ptr[T any](v T) *T { return &v }

// wantCode checks an error's code.
func wantCode(t *testing.T, err error, code string) client.Error {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("got %v, want %s", err, code)
	}
	return *e
}

func TestSandboxLife(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	req := apitype.SandboxRequest{
		MemoryMB: ptr[int64](64), Env: map[string]string{"GREETING": "hello"}, Metadata: map[string]string{"team": "tools"},
		TTL: ptr(apitype.Duration(10 * time.Minute)), IdleTTL: ptr(apitype.Duration(time.Minute)),
	}
	made, err := b.Create(ctx, "k", req)
	must(t, err)
	if made.Result != "created" || made.Status != "running" || made.ContainerID == "" || made.Spec.MemoryMB != 64 || made.IdleExpiresAt == nil {
		t.Errorf("got %+v", made)
	}
	again, err := b.Create(ctx, "k", req)
	if err != nil || again.Result != "reused" || again.SessionID != made.SessionID {
		t.Errorf("got %+v, %v", again, err)
	}
	req.MemoryMB = ptr[int64](128)
	_, err = b.Create(ctx, "k", req)
	e := wantCode(t, err, "sandbox_conflict")
	if e.Status != 409 || len(e.Problem.Differences) != 1 || e.Problem.Differences[0].Field != "memory_mb" {
		t.Errorf("got %+v", e.Problem)
	}
	_, err = b.Create(ctx, "other", apitype.SandboxRequest{HostPath: ptr("/etc")})
	if e := wantCode(t, err, "policy_denied"); len(e.Problem.Reasons) == 0 || e.Problem.Reasons[0].Field != "host_path" {
		t.Errorf("got %+v", e.Problem)
	}
	_, err = b.Create(ctx, "other", apitype.SandboxRequest{MemoryMB: ptr[int64](-1)})
	wantCode(t, err, "validation")
	_, err = b.Create(ctx, "not a key", apitype.SandboxRequest{})
	wantCode(t, err, "validation")

	res, err := b.Exec(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"cat"}, Stdin: ptr("hello"), Timeout: apitype.SecondsOf(999)})
	if err != nil || !res.OK || res.Stdout != "hello" || len(res.Overridden) != 1 || time.Duration(res.Timeout) != 2*time.Minute {
		t.Errorf("got %+v, %v", res, err)
	}
	res, err = b.Exec(ctx, "new", apitype.ExecRequest{Command: apitype.Command{"printf", "x"}, Raw: true, Sandbox: &apitype.SandboxRequest{}})
	if err != nil || !res.Created || string(res.StdoutBase64) != "x" {
		t.Errorf("got %+v, %v", res, err)
	}
	_, err = b.Exec(ctx, "nothing", apitype.ExecRequest{Command: apitype.Command{"true"}})
	wantCode(t, err, "not_found")

	paused, err := b.Pause(ctx, "k")
	if err != nil || paused.Status != "paused" {
		t.Errorf("got %+v, %v", paused, err)
	}
	_, err = b.Exec(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"true"}})
	wantCode(t, err, "wrong_state")
	resumed, err := b.Resume(ctx, "k")
	if err != nil || resumed.Status != "running" {
		t.Errorf("got %+v, %v", resumed, err)
	}
	renewed, err := b.Renew(ctx, "k", time.Hour)
	if err != nil || time.Until(renewed.ExpiresAt) < 59*time.Minute {
		t.Errorf("got %+v, %v", renewed, err)
	}
	if _, err := b.Renew(ctx, "k", 0); err != nil {
		t.Error(err)
	}
	stats, err := b.Stats(ctx, "k")
	if err != nil || stats.Time.IsZero() {
		t.Errorf("got %+v, %v", stats, err)
	}
	status, err := b.Status(ctx)
	if err != nil || status.ActiveSandboxes != 2 || !status.Backend.Available || status.Backend.Name != "fake" || status.MaxSandboxes != 7 {
		t.Errorf("got %+v, %v", status, err)
	}
	recent, err := b.Errors(ctx)
	if err != nil || len(recent) != status.RecentErrors || recent[0].Type != "wrong_state" || recent[0].RequestID == "" {
		t.Errorf("got %+v, %v", recent, err)
	}

	stranger := b.as(t, blue, 0)
	_, err = stranger.Get(ctx, "k")
	wantCode(t, err, "not_found")
	if del, err := stranger.Delete(ctx, "k"); err != nil || del.Result != "not_found" || del.SessionID != nil {
		t.Errorf("a stranger's delete: %+v, %v", del, err)
	}
	if recent, err := stranger.Errors(ctx); err != nil || len(recent) != 1 {
		t.Errorf("a stranger sees %+v, %v", recent, err)
	}

	if del, err := b.Delete(ctx, "k"); err != nil || del.Result != "deleted" || *del.SessionID != made.SessionID {
		t.Errorf("got %+v, %v", del, err)
	}
	if del, err := b.Delete(ctx, "k"); err != nil || del.Result != "not_found" {
		t.Errorf("got %+v, %v", del, err)
	}
}

func TestListPages(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	var all, odd []string
	for i := range 7 {
		key := fmt.Sprintf("key-%d", i)
		all = append(all, key)
		md := map[string]string{"parity": "even"}
		if i%2 == 1 {
			md["parity"] = "odd"
			odd = append(odd, key)
		}
		if _, err := b.Create(ctx, key, apitype.SandboxRequest{Metadata: md}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := b.as(t, red, -1).Create(ctx, "one-too-many", apitype.SandboxRequest{})
	if e := wantCode(t, err, "capacity"); e.RetryAfter == 0 {
		t.Error("there is no Retry-After")
	}
	for name, tt := range map[string]struct {
		opts client.ListOptions
		want []string
	}{
		"all":      {client.ListOptions{}, all},
		"by twos":  {client.ListOptions{PageSize: 2}, all},
		"by seven": {client.ListOptions{PageSize: 7}, all},
		"metadata": {client.ListOptions{PageSize: 1, Metadata: map[string]string{"parity": "odd"}}, odd},
		"status":   {client.ListOptions{Status: "paused"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			seq := b.List(ctx, tt.opts)
			for range 2 {
				var got []string
				for sb, err := range seq {
					must(t, err)
					got = append(got, sb.Key)
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
	for sb, err := range b.List(ctx, client.ListOptions{PageSize: 2}) {
		if sb.Key != all[0] || err != nil {
			t.Errorf("got %s, %v", sb.Key, err)
		}
		break
	}
	for _, err := range b.List(ctx, client.ListOptions{PageSize: 101}) {
		wantCode(t, err, "validation")
	}
}

func TestLogs(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	_, err := b.Logs(t.Context(), "k", client.LogOptions{})
	wantCode(t, err, "not_found")
	if _, err := b.Create(t.Context(), "k", apitype.SandboxRequest{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r, err := b.Logs(ctx, "k", client.LogOptions{Follow: true, Tail: 1, Since: time.Now(), Timestamps: true, Stream: "stdout"})
	must(t, err)
	cancel()
	if _, err := io.ReadAll(r); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	_ = r.Close()
}

func TestCreateWaitsForTheImage(t *testing.T) {
	const ref = "registry.local/slow:1"
	began, finish := make(chan struct{}), make(chan struct{})
	b := newBerm(t, runtimetest.FakeOptions{
		Registry: map[string]runtime.Image{ref: {}},
		Pull: func(_ context.Context, _ string, progress func(runtime.PullProgress)) error {
			progress(runtime.PullProgress{Status: "pulling", CurrentBytes: 1, TotalBytes: 2})
			close(began)
			<-finish
			return nil
		},
	})
	req := apitype.SandboxRequest{Image: ptr(ref)}
	sb, err := b.CreateNoWait(t.Context(), "k", req)
	must(t, err)
	<-began
	if sb.Status != "starting" || sb.Pull == nil || sb.Result != "" {
		t.Errorf("got %+v", sb)
	}
	if sb, err := b.Get(t.Context(), "k"); err != nil || sb.Pull == nil || sb.Pull.TotalBytes != 2 {
		t.Errorf("got %+v, %v", sb, err)
	}
	short, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("no patience")
	cancel(cause)
	if _, err := b.Create(short, "k", req); err == nil {
		t.Error("it didn't wait")
	}
	close(finish)
	sb, err = b.Create(t.Context(), "k", req)
	if err != nil || sb.Status != "running" || sb.ContainerID == "" {
		t.Errorf("got %+v, %v", sb, err)
	}
}

func TestEngineDown(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	impatient := b.as(t, red, -1)
	b.fake.SetDown(true)
	eventually(t, "not ready", func() bool { return b.Ready(t.Context()) != nil })
	wantCode(t, b.Ready(t.Context()), "backend_unavailable")
	_, err := impatient.Create(t.Context(), "k", apitype.SandboxRequest{})
	if e := wantCode(t, err, "backend_unavailable"); e.Status != 503 || e.RetryAfter == 0 {
		t.Errorf("got %+v", e)
	}
	if status, err := b.Status(t.Context()); err != nil || status.Backend.Available || status.Backend.Reason == "" {
		t.Errorf("got %+v, %v", status, err)
	}
	b.fake.SetDown(false)
	if _, err := b.Create(t.Context(), "k", apitype.SandboxRequest{}); err != nil {
		t.Errorf("once it is back: %v", err)
	}
}

// transport answers what the test says.
type transport func(*http.Request) *http.Response

func (f transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	return f(r), nil
}

func answer(status int, retryAfter, body string) *http.Response {
	h := http.Header{"Content-Type": {"application/json"}}
	if status >= 400 {
		h.Set("Content-Type", "application/problem+json")
	}
	if retryAfter != "" {
		h.Set("Retry-After", retryAfter)
	}
	return &http.Response{StatusCode: status, Header: h, Body: io.NopCloser(strings.NewReader(body))}
}

// answered makes a client whose requests are answered by a function.
func answered(t *testing.T, retries int, f transport) *client.Client {
	t.Helper()
	c, err := client.New(client.Options{BaseURL: "http://localhost", HTTPClient: &http.Client{Transport: f}, Retries: retries})
	must(t, err)
	return c
}

func TestRetries(t *testing.T) {
	type said struct {
		status           int
		retryAfter, body string
	}
	const problem = `{"code":"backend_unavailable","detail":"away"}`
	get := func(ctx context.Context, c *client.Client) error { _, err := c.Get(ctx, "k"); return err }
	exec := func(ctx context.Context, c *client.Client) error {
		_, err := c.Exec(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"a"}})
		return err
	}
	for name, tt := range map[string]struct {
		call    func(context.Context, *client.Client) error
		retries int
		answers []said // the last one is repeated
		calls   int
		code    string
	}{
		"none needed":         {get, 0, []said{{200, "", "{}"}}, 1, ""},
		"away, then back":     {get, 0, []said{{503, "2", problem}, {429, "1", problem}, {200, "", "{}"}}, 3, ""},
		"away for long":       {get, 0, []said{{503, "2", problem}}, 5, "backend_unavailable"},
		"two retries":         {get, 2, []said{{503, "2", problem}}, 3, "backend_unavailable"},
		"no retries":          {get, -1, []said{{503, "2", problem}}, 1, "backend_unavailable"},
		"not asked for":       {get, 0, []said{{503, "", problem}}, 1, "backend_unavailable"},
		"asked for by others": {get, 0, []said{{500, "2", problem}}, 1, "backend_unavailable"},
		"exec may have run":   {exec, 0, []said{{503, "2", problem}}, 1, "backend_unavailable"},
		"exec had no room":    {exec, 0, []said{{429, "2", `{"code":"capacity"}`}, {200, "", "{}"}}, 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				calls := 0
				c := answered(t, tt.retries, func(r *http.Request) *http.Response {
					if r.Body != nil {
						if b, _ := io.ReadAll(r.Body); r.Method == "POST" && !bytes.Contains(b, []byte(`"command"`)) {
							t.Errorf("call %d has the body %q", calls+1, b)
						}
					}
					a := tt.answers[min(calls, len(tt.answers)-1)]
					calls++
					return answer(a.status, a.retryAfter, a.body)
				})
				err := tt.call(t.Context(), c)
				if tt.code != "" {
					wantCode(t, err, tt.code)
				} else if err != nil {
					t.Error(err)
				}
				if calls != tt.calls {
					t.Errorf("%d calls, want %d", calls, tt.calls)
				}
			})
		})
	}
	t.Run("the context ends", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			c := answered(t, 0, func(*http.Request) *http.Response { return answer(503, "30", problem) })
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			start := time.Now()
			err := get(ctx, c)
			if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 10*time.Second {
				t.Errorf("got %v after %v", err, time.Since(start))
			}
			wantCode(t, err, "backend_unavailable") // why it waited
		})
	})
}

func TestToken(t *testing.T) {
	var seen []string
	hc := &http.Client{Transport: transport(func(r *http.Request) *http.Response {
		seen = append(seen, r.URL.Host+" "+r.Header.Get("Authorization"))
		a := answer(307, "", "")
		a.Header.Set("Location", "http://evil.example/")
		return a
	})}
	c, err := client.New(client.Options{BaseURL: "http://localhost/", Token: red, HTTPClient: hc})
	must(t, err)
	_, err = c.Get(t.Context(), "k")
	var e *client.Error
	if !errors.As(err, &e) || e.Status != 307 || e.Code != "" || strings.Contains(err.Error(), red) {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff([]string{"localhost Bearer " + red}, seen); diff != "" {
		t.Error(diff)
	}
}

func TestNew(t *testing.T) {
	for base, ok := range map[string]bool{
		"http://localhost:1": true, "https://berm.example/": true, "unix:///run/berm.sock": true,
		"": false, "localhost:80": false, "unix://run/berm.sock": false, "unix:": false, "ftp://x": false, "http://": false, "http://%zz": false,
	} {
		if _, err := client.New(client.Options{BaseURL: base}); (err == nil) != ok {
			t.Errorf("%q: %v", base, err)
		}
	}
	if _, err := client.New(client.Options{BaseURL: "unix:///s", HTTPClient: &http.Client{}}); err == nil {
		t.Error("an HTTP client for a unix socket was taken")
	}
}

// The server ends a wait after an hour; the caller's goes on.
func TestWaitProcessGoesOn(t *testing.T) {
	for timeout, want := range map[time.Duration]string{0: "exited", 90 * time.Minute: "running"} {
		synctest.Test(t, func(t *testing.T) {
			var asked []string
			c := answered(t, 0, func(r *http.Request) *http.Response {
				asked = append(asked, r.URL.Query().Get("timeout"))
				wait, state := time.Hour, "running"
				if d, err := time.ParseDuration(asked[len(asked)-1]); err == nil {
					wait = min(wait, d)
				}
				if len(asked) == 3 {
					state = "exited"
				}
				time.Sleep(wait)
				return answer(200, "", `{"process_id":"p","state":"`+state+`"}`)
			})
			p, err := c.WaitProcess(t.Context(), "k", "p", timeout)
			if err != nil || p.State != want {
				t.Errorf("for %s: %+v, %v after %q", timeout, p, err, asked)
			}
			if timeout != 0 {
				if diff := cmp.Diff([]string{"1h30m0s", "30m0s"}, asked); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
}
