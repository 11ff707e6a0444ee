package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
)

// fakeEngine returns as an engine would, as far as a test says.
type fakeEngine struct {
	*httptest.Server
	mu      sync.Mutex
	version string
	server  string
	routes  map[string]http.HandlerFunc // by "METHOD /path", the version left out
	calls   []string                    // of what is neither ping nor info
}

func newFakeEngine(t *testing.T) *fakeEngine {
	f := &fakeEngine{version: "1.41", server: "Docker/20.10", routes: map[string]http.HandlerFunc{}}
	f.Server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.CloseClientConnections()
		f.Close()
	})
	return f
}

func (f *fakeEngine) on(route string, h http.HandlerFunc) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.routes[route] = h
}

func (f *fakeEngine) seen() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls)
}

func (f *fakeEngine) host() string { return "tcp://" + f.Listener.Addr().String() }

func (f *fakeEngine) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	path := req.URL.Path
	if rest, ok := strings.CutPrefix(path, "/v"); ok {
		_, rest, _ = strings.Cut(rest, "/")
		path = "/" + rest
	}
	route := req.Method + " " + path
	f.mu.Lock()
	h := f.routes[route]
	w.Header().Set("Api-Version", f.version)
	w.Header().Set("Server", f.server)
	if path != "/_ping" && path != "/info" {
		f.calls = append(f.calls, route)
	}
	f.mu.Unlock()
	switch {
	case h != nil:
		h(w, req)
	case path == "/_ping":
	case path == "/info":
		_, _ = io.WriteString(w, `{"Architecture":"x86_64","NCPU":2}`)
	default:
		refuse(http.StatusNotFound)(w, req)
	}
}

func answer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

func refuse(status int) http.HandlerFunc { return answer(status, `{"message":"so it is"}`) }

// hang reads the request and never answers.
func hang(_ http.ResponseWriter, req *http.Request) {
	_, _ = io.Copy(io.Discard, req.Body)
	<-req.Context().Done()
}

// hangUp closes the connection instead of answering.
func hangUp(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

func (f *fakeEngine) runtime(t *testing.T, timeout time.Duration) *Runtime {
	t.Helper()
	return newRuntimeWith(t, Options{Host: f.host(), CallTimeout: timeout})
}

// TestStartAsks checks that a program starts in "/", whatever the container's directory
// is: an OCI runtime would follow a link to one of its own descriptors.
func TestStartAsks(t *testing.T) {
	f := newFakeEngine(t)
	var got container.ExecOptions
	f.on("POST /containers/c/exec", func(w http.ResponseWriter, req *http.Request) {
		_ = json.NewDecoder(req.Body).Decode(&got)
		refuse(http.StatusBadRequest)(w, req)
	})
	_, err := f.runtime(t, time.Minute).Start(t.Context(), "c", runtime.Program{Command: []string{"/x", "y"}, User: "1:2"})
	if !errdefs.IsInvalidArgument(err) {
		t.Fatal(err)
	}
	want := container.ExecOptions{User: "1:2", WorkingDir: "/", Cmd: []string{"/x", "y"}, AttachStdin: true, AttachStdout: true, AttachStderr: true}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestErrorClasses(t *testing.T) {
	cases := []struct {
		name string
		h    http.HandlerFunc
		is   func(error) bool
	}{
		{"400", refuse(400), errdefs.IsInvalidArgument},
		{"403", refuse(403), errdefs.IsFailedPrecondition},
		{"404", refuse(404), errdefs.IsNotFound},
		{"409", refuse(409), errdefs.IsFailedPrecondition},
		{"500", refuse(500), errdefs.IsInternal},
		{"502", refuse(502), errdefs.IsUnavailable},
		{"503", refuse(503), errdefs.IsUnavailable},
		{"504", refuse(504), errdefs.IsUnavailable},
		{"closed", hangUp, errdefs.IsUnavailable},
		{"cut", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"Id":`)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, errdefs.IsUnavailable},
		{"hung", hang, errdefs.IsUnavailable},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			f := newFakeEngine(t)
			f.on("GET /containers/x/json", tc.h)
			_, err := f.runtime(t, 200*time.Millisecond).Inspect(t.Context(), "x")
			if !tc.is(err) {
				t.Errorf("error %v", err)
			}
			if errdefs.IsConflict(err) || errdefs.IsDeadlineExceeded(err) || errdefs.IsCanceled(err) {
				t.Errorf("error %v is of another class as well", err)
			}
		})
	}
}

// TestRemoveAgain has a removal of somebody else's fail before Remove waits for it.
func TestRemoveAgain(t *testing.T) {
	f := newFakeEngine(t)
	f.on("POST /containers/c/wait", hang)
	f.on("DELETE /containers/c", func(w http.ResponseWriter, req *http.Request) {
		f.on("DELETE /containers/c", answer(http.StatusNoContent, ""))
		refuse(http.StatusConflict)(w, req)
	})
	must(t, f.runtime(t, time.Minute).Remove(t.Context(), "c"))
}

func TestCallerEnds(t *testing.T) {
	for _, route := range []string{"HEAD /_ping", "GET /info", "GET /containers/x/json"} {
		t.Run(route, func(t *testing.T) {
			f := newFakeEngine(t)
			f.on(route, hang)
			r := f.runtime(t, 2*time.Second)
			cause := errors.New("enough")
			ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, cause)
			defer cancel()
			if _, err := r.Inspect(ctx, "x"); !errdefs.IsDeadlineExceeded(err) || !errors.Is(err, cause) || errdefs.IsUnavailable(err) {
				t.Errorf("deadline: %v", err)
			}
			canceled, stop := context.WithCancelCause(t.Context())
			time.AfterFunc(50*time.Millisecond, func() { stop(cause) })
			if _, err := r.Inspect(canceled, "x"); !errdefs.IsCanceled(err) || !errors.Is(err, cause) || errdefs.IsUnavailable(err) {
				t.Errorf("cancel: %v", err)
			}
		})
	}
}

// TestHungConnect: callers that wait for the same hung engine don't wait in line.
func TestHungConnect(t *testing.T) {
	f := newFakeEngine(t)
	f.on("HEAD /_ping", hang)
	f.on("GET /_ping", hang)
	r := f.runtime(t, 300*time.Millisecond)
	start := time.Now()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := r.Info(t.Context()); !errdefs.IsUnavailable(err) {
				t.Errorf("error %v", err)
			}
		})
	}
	wg.Wait()
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
}

func TestEngineComesLater(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	_ = l.Close()
	f := &fakeEngine{version: "1.41", routes: map[string]http.HandlerFunc{}}
	r := newRuntime(t, "tcp://"+l.Addr().String())
	if _, err := r.Info(t.Context()); !errdefs.IsUnavailable(err) {
		t.Fatalf("error %v", err)
	}
	f.Server = httptest.NewUnstartedServer(f)
	if f.Listener, err = net.Listen("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	f.Start()
	defer f.Close()
	if info, err := r.Info(t.Context()); err != nil || info.CPUs != 2 || info.Architecture != "amd64" || info.APIVersion != "1.41" {
		t.Errorf("%+v, %v", info, err)
	}
}

func TestEngineReplaced(t *testing.T) {
	f := newFakeEngine(t)
	r := f.runtime(t, time.Minute)
	f.on("GET /containers/json", answer(200, "[]"))
	if _, err := r.List(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.version, f.server = "1.44", "Docker/99"
	f.mu.Unlock()
	f.on("GET /containers/json", func(w http.ResponseWriter, req *http.Request) {
		if !strings.HasPrefix(req.URL.Path, "/v1.44/") {
			refuse(400)(w, req)
			return
		}
		answer(200, "[]")(w, req)
	})
	if _, err := r.List(t.Context(), nil); !errdefs.IsUnavailable(err) {
		t.Errorf("the first call after the upgrade: %v", err)
	}
	if _, err := r.List(t.Context(), nil); err != nil {
		t.Errorf("the second: %v", err)
	}
}

func TestEngineTooOld(t *testing.T) {
	f := newFakeEngine(t)
	f.version = "1.40"
	if _, err := f.runtime(t, time.Minute).Info(t.Context()); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "1.41") {
		t.Errorf("error %v", err)
	}
}

func TestNew(t *testing.T) {
	for _, host := range []string{"ssh://host", "nonsense", "unix://", "npipe://x"} {
		if _, err := New(Options{Host: host}); err == nil {
			t.Errorf("host %q was taken", host)
		}
	}
	if _, err := New(Options{CallTimeout: -1}); err == nil {
		t.Error("a negative timeout was taken")
	}
}

// TestCreateUndone: whatever goes wrong, what was made is removed, and nothing else.
func TestCreateUndone(t *testing.T) {
	const (
		image  = "GET /images/i/json"
		create = "POST /containers/create"
		start  = "POST /containers/made/start"
		look   = "GET /containers/made/json"
		list   = "GET /containers/json"
		del    = "DELETE /containers/made"
	)
	made := answer(201, `{"Id":"made"}`)
	cases := []struct {
		name   string
		routes map[string]http.HandlerFunc
		cancel string // the call during which the caller gives up
		is     func(error) bool
		calls  []string
	}{
		{"refused", map[string]http.HandlerFunc{create: refuse(400)}, "", errdefs.IsInvalidArgument, []string{create}},
		{"no image", map[string]http.HandlerFunc{create: refuse(404)}, "", errdefs.IsNotFound, []string{create}},
		{"name taken", map[string]http.HandlerFunc{create: refuse(409)}, "", errdefs.IsAlreadyExists, []string{create}},
		{"create cut", map[string]http.HandlerFunc{create: hangUp}, "", errdefs.IsUnavailable, []string{create, list, del}},
		{"create hung", map[string]http.HandlerFunc{create: hang}, "", errdefs.IsUnavailable, []string{create, list, del}},
		{"start refused", map[string]http.HandlerFunc{start: refuse(400)}, "", errdefs.IsInvalidArgument, []string{create, start, del}},
		{"start cut", map[string]http.HandlerFunc{start: hangUp}, "", errdefs.IsUnavailable, []string{create, start, del}},
		{"start hung", map[string]http.HandlerFunc{start: hang}, "", errdefs.IsUnavailable, []string{create, start, del}},
		{"inspect cut", map[string]http.HandlerFunc{look: hangUp}, "", errdefs.IsUnavailable, []string{create, start, look, del}},
		{"create canceled", nil, create, errdefs.IsCanceled, []string{create, del}},
		{"start canceled", nil, start, errdefs.IsCanceled, []string{create, start, del}},
		{"inspect canceled", nil, look, errdefs.IsCanceled, []string{create, start, look, del}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			f := newFakeEngine(t)
			var nonce atomic.Value
			nonce.Store("none")
			routes := map[string]http.HandlerFunc{image: answer(200, `{"Id":"i","Config":{}}`), create: made, start: answer(204, ""), look: answer(200, `{"State":{},"Config":{},"NetworkSettings":{}}`), del: answer(204, ""),
				list: func(w http.ResponseWriter, req *http.Request) {
					if filter := req.URL.Query().Get("filters"); !strings.Contains(filter, nonce.Load().(string)) {
						t.Errorf("looked for %s, not for %q", filter, nonce.Load())
					}
					answer(200, `[{"Id":"made"}]`)(w, req)
				}}
			for route, h := range tc.routes {
				routes[route] = h
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			for route, h := range routes {
				f.on(route, func(w http.ResponseWriter, req *http.Request) {
					if route == create {
						var body struct{ Labels map[string]string }
						if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
							t.Error(err)
						}
						nonce.Store(body.Labels[createLabel])
					}
					if route == tc.cancel {
						cancel()
						if route != create { // whose answer is waited for
							<-req.Context().Done()
							return
						}
					}
					h(w, req)
				})
			}
			_, err := f.runtime(t, 300*time.Millisecond).Create(ctx, runtime.Spec{Name: "n", Image: "i", Command: []string{"c"}})
			if !tc.is(err) {
				t.Errorf("error %v", err)
			}
			// The transport asks again by itself where that can do no harm.
			if d := cmp.Diff(append([]string{image}, tc.calls...), slices.Compact(f.seen())); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestStartCut has the engine go away at each stage of a start.
func TestStartCut(t *testing.T) {
	const create, start = "POST /containers/c/exec", "POST /exec/e/start"
	const exited = `{"Id":"c","State":{"Status":"exited"},"Config":{},"NetworkSettings":{}}`
	upgrade := func(w http.ResponseWriter, _ *http.Request) {
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = fmt.Fprint(buf, "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
		_ = buf.Flush()
		_ = conn.Close()
	}
	cases := []struct {
		name   string
		routes map[string]http.HandlerFunc
		is     func(error) bool
	}{
		{"create refused", map[string]http.HandlerFunc{create: refuse(409)}, errdefs.IsFailedPrecondition},
		{"create cut", map[string]http.HandlerFunc{create: hangUp}, errdefs.IsUnavailable},
		{"start refused", map[string]http.HandlerFunc{start: refuse(409)}, errdefs.IsFailedPrecondition},
		{"ended before the start", map[string]http.HandlerFunc{start: refuse(500), "GET /containers/c/json": answer(200, exited)}, errdefs.IsFailedPrecondition},
		{"start cut", map[string]http.HandlerFunc{start: hangUp}, errdefs.IsUnavailable},
		{"start hung", map[string]http.HandlerFunc{start: hang}, errdefs.IsUnavailable},
		{"inspect cut", map[string]http.HandlerFunc{"GET /exec/e/json": hangUp}, errdefs.IsUnavailable},
		{"gone", map[string]http.HandlerFunc{"GET /exec/e/json": refuse(404)}, errdefs.IsNotFound},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			f := newFakeEngine(t)
			f.on(create, answer(201, `{"Id":"e"}`))
			f.on(start, upgrade)
			for route, h := range tc.routes {
				f.on(route, h)
			}
			if _, err := f.runtime(t, 300*time.Millisecond).Start(t.Context(), "c", runtime.Program{Command: []string{"/x"}}); !tc.is(err) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestWatchHung(t *testing.T) {
	f := newFakeEngine(t)
	f.on("GET /events", hang)
	err := f.runtime(t, 200*time.Millisecond).Watch(t.Context(), nil, func() { t.Error("ready") }, func(runtime.Event) {})
	if !errdefs.IsUnavailable(err) {
		t.Errorf("error %v", err)
	}
}

// TestPauseAgain checks that a pause is tried again when runc couldn't freeze the processes.
func TestPauseAgain(t *testing.T) {
	f := newFakeEngine(t)
	var calls atomic.Int32
	f.on("POST /containers/c/pause", func(w http.ResponseWriter, req *http.Request) {
		if calls.Add(1) == 1 {
			answer(http.StatusInternalServerError, `{"message":"OCI runtime pause failed: unable to freeze: unknown"}`)(w, req)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	if err := f.runtime(t, time.Minute).Pause(t.Context(), "c"); err != nil || calls.Load() != 2 {
		t.Errorf("%d calls, %v", calls.Load(), err)
	}
}
