package sandboxapi_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// noStore is a store that keeps nothing.
type noStore struct{}

func (noStore) Records(context.Context) ([]lifecycle.Record, error) { return nil, nil }
func (noStore) Put(context.Context, lifecycle.Record) error         { return nil }
func (noStore) Touch(context.Context, map[string]time.Time) error   { return nil }
func (noStore) Delete(context.Context, ...string) error             { return nil }
func (noStore) Fresh() bool                                         { return true }
func (noStore) TookOver(context.Context) error                      { return nil }
func (noStore) Ping(context.Context) error                          { return nil }

// house is the API on a real manager, whose engine is in memory, with a sandbox "k".
type house struct {
	*lifecycle.Manager
	t       *testing.T
	fake    *runtimetest.Fake
	url     string // of the server
	handler http.Handler
	session string
	client  *http.Client // follows no redirects
}

const reader = "token-of-a-mere-reader"

// newHouse takes what the manager is to have in the engine's stead; nil is the engine.
func newHouse(t *testing.T, wrap func(*runtimetest.Fake) runtime.Runtime, change ...func(*sandboxapi.Options)) *house {
	t.Helper()
	h := &house{t: t, fake: runtimetest.NewFake(runtimetest.FakeOptions{})}
	root := t.TempDir()
	pol, err := policy.Parse(fmt.Appendf(nil, "{version: 1, mounts: {allowed_roots: [%q]}}", root), policy.Options{DefaultImage: runtimetest.DefaultImage})
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := proxy.ParseTokens([]byte(`tokens:
- {name: master, tenant: red, token: ` + master + `}
- {name: powerless, tenant: red, token: ` + powerless + `, scopes: [status:read]}
- {name: reader, tenant: red, token: ` + reader + `, scopes: [sandboxes:read]}
`))
	if err != nil {
		t.Fatal(err)
	}
	var engine runtime.Runtime = h.fake
	if wrap != nil {
		engine = wrap(h.fake)
	}
	current := func() *policy.Policy { return pol }
	h.Manager, err = lifecycle.New(lifecycle.Options{Runtime: engine, Policy: current, Store: noStore{}, Holder: mountpintest.Holder{}, Owner: "owner"})
	if err != nil {
		t.Fatal(err)
	}
	opts := sandboxapi.Options{Manager: h.Manager, Policy: current, Tokens: tokens, Heartbeat: 20 * time.Millisecond}
	for _, f := range change {
		f(&opts)
	}
	handler, err := sandboxapi.New(opts)
	if err != nil {
		t.Fatal(err)
	}
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
	soon(t, "it is ready", func() bool { return h.Ready(ctx) == nil })
	work := filepath.Join(root, "k")
	if err := os.Mkdir(work, 0o755); err != nil {
		t.Fatal(err)
	}
	h.session = h.create("k", policy.Request{HostPath: &work})
	return h
}

func (h *house) create(key string, req policy.Request) (session string) {
	h.t.Helper()
	res, err := h.Create(context.Background(), lifecycle.CreateRequest{Tenant: "red", Key: key, Request: req})
	if err != nil {
		h.t.Fatal(err)
	}
	return res.Sandbox.SessionID
}

// soon waits for what another goroutine is about to do.
func soon(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 10_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("it never came to: %s", what)
}

func (h *house) request(method, path string, body io.Reader, change ...func(*http.Request)) *http.Request {
	h.t.Helper()
	r, err := http.NewRequest(method, h.url+path, body)
	if err != nil {
		h.t.Fatal(err)
	}
	r.Header.Set("X-API-Token", master)
	for _, f := range change {
		f(r)
	}
	return r
}

// send sends a request of the master's, and wants a status and, unless it is empty, a
// problem's code.
func (h *house) send(status int, code, method, path, body string, change ...func(*http.Request)) answer {
	h.t.Helper()
	resp, err := h.client.Do(h.request(method, path, strings.NewReader(body), change...))
	if err != nil {
		h.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatalf("%s %s: %v", method, path, err)
	}
	var p apitype.Problem
	if code != "" {
		_ = json.Unmarshal(b, &p)
	}
	if resp.StatusCode != status || p.Code != code {
		h.t.Errorf("%s %s: got %d, want %d %s\n%s", method, path, resp.StatusCode, status, code, b)
	}
	return answer{resp, string(b)}
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
	h.send(200, "", "PUT", at("", name, "mkdir", "true"), content)
}

func TestReadAndWriteFiles(t *testing.T) {
	h := newHouse(t, nil)
	a := h.send(200, "", "PUT", at("", "/workspace/a/b.txt", "mkdir", "true", "mode", "0600"), "0123456789")
	var info apitype.FileInfo
	a.decode(t, &info)
	if info.Path != "/workspace/a/b.txt" || info.Type != "file" || info.Size != 10 || info.Mode != "0600" || info.ModifiedAt.IsZero() {
		t.Errorf("got %+v", info)
	}
	a = h.send(200, "", "GET", at("", "/workspace/a/b.txt"), "")
	if a.body != "0123456789" || a.ContentLength != 10 {
		t.Errorf("got %q of %d bytes", a.body, a.ContentLength)
	}
	for name, want := range map[string]string{
		"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff", "Accept-Ranges": "bytes",
		"Content-Disposition": `attachment; filename=b.txt`,
	} {
		if got := a.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	etag := a.Header.Get("ETag")
	if !strings.HasPrefix(etag, `W/"`) {
		t.Errorf("ETag is %q", etag)
	}
	h.send(304, "", "GET", at("", "/workspace/a/b.txt"), "", withHeader("If-None-Match", `"x", `+etag))
	h.send(304, "", "HEAD", at("", "/workspace/a/b.txt"), "", withHeader("If-None-Match", etag))
	a = h.send(200, "", "HEAD", at("", "/workspace/a/b.txt"), "")
	if a.ContentLength != 10 || a.Header.Get("ETag") != etag {
		t.Errorf("got %v", a.Header)
	}
	h.send(422, "", "HEAD", at("", "/workspace/a"), "")
	h.send(404, "", "HEAD", at("", "/workspace/none"), "")

	h.send(412, "precondition_failed", "PUT", at("", "/workspace/a/b.txt"), "x", withHeader("If-None-Match", "*"))
	h.send(200, "", "PUT", at("", "/workspace/a/new"), "x", withHeader("If-None-Match", "*"))
	h.send(200, "", "PUT", at("", "/workspace/a/b.txt", "append", "true"), "abc")
	if a = h.send(200, "", "GET", at("", "/workspace/a/b.txt"), ""); a.body != "0123456789abc" || a.Header.Get("ETag") == etag {
		t.Errorf("got %q, %v", a.body, a.Header)
	}
	h.put("/workspace/empty", "")
	if a = h.send(200, "", "GET", at("", "/workspace/empty"), ""); a.body != "" {
		t.Errorf("got %q", a.body)
	}

	h.send(404, "file_not_found", "GET", at("", "/workspace/none"), "")
	h.send(404, "file_not_found", "PUT", at("", "/workspace/none/x"), "x")
	h.send(404, "not_found", "GET", strings.Replace(at("", "/x"), "/k/", "/other/", 1), "")
	h.send(422, "validation", "GET", at("", "/workspace/a"), "")
	h.send(422, "validation", "GET", at("", "relative"), "")
	h.send(422, "validation", "GET", filesPath, "")
	h.send(422, "validation", "GET", at("", "/a\x00b"), "")
	h.send(422, "validation", "GET", at("", "/"+strings.Repeat("a", 4096)), "")
	h.send(422, "validation", "GET", at("", "/a", "path_base64", "L2E="), "")
	h.send(422, "validation", "GET", filesPath+"?path_base64=%2A", "")
	h.send(400, "malformed", "GET", at("", "/a", "colour", "red"), "")
	h.send(422, "validation", "PUT", at("", "/x", "mode", "1777"), "x")
	h.send(422, "validation", "PUT", at("", "/x", "mode", "9"), "x")
	h.send(422, "validation", "PUT", at("", "/x"), "x", withHeader("If-None-Match", `"e"`))
	h.send(422, "validation", "PUT", at("", "/x"), "x", withHeader("If-Match", `"e"`))
	h.send(422, "validation", "PUT", at("", "/x"), "x", withHeader("Content-Range", "bytes 0-0/1"))
	h.send(422, "validation", "PUT", at("", "/x", "append", "true"), "x", withHeader("If-None-Match", "*"))
	h.send(415, "unsupported_media_type", "PUT", at("", "/x"), "x", withHeader("Content-Encoding", "gzip"))
	h.send(404, "file_not_found", "GET", at("", "/x"), "")

	for _, op := range [][2]string{{"GET", ""}, {"HEAD", ""}, {"GET", "/stat"}, {"GET", "/list"}, {"GET", "/tar"}} {
		h.send(200, "", op[0], at(op[1], map[bool]string{true: "/workspace", false: "/workspace/a/b.txt"}[op[1] == "/list"]), "", withToken(reader))
	}
	for _, op := range [][2]string{{"PUT", ""}, {"DELETE", ""}, {"PUT", "/tar"}} {
		h.send(403, "forbidden", op[0], at(op[1], "/workspace/a/b.txt"), "x", withToken(reader))
	}
	for _, call := range []string{"/mkdir", "/move", "/copy"} {
		h.send(403, "forbidden", "POST", filesPath+call, "{}", withToken(reader))
	}
	h.send(403, "forbidden", "GET", at("", "/workspace/a/b.txt"), "", withToken(powerless))
	h.send(401, "unauthorized", "GET", at("", "/workspace/a/b.txt"), "", withToken(""))
}

func TestRanges(t *testing.T) {
	h := newHouse(t, nil)
	h.put("/f", "0123456789")
	h.put("/empty", "")
	for _, tt := range []struct {
		header, name string
		status       int
		body, place  string
	}{
		{"bytes=0-0", "/f", 206, "0", "bytes 0-0/10"},
		{"bytes=2-5", "/f", 206, "2345", "bytes 2-5/10"},
		{"bytes=7-", "/f", 206, "789", "bytes 7-9/10"},
		{"bytes=7-100", "/f", 206, "789", "bytes 7-9/10"},
		{"bytes=-3", "/f", 206, "789", "bytes 7-9/10"},
		{"bytes=-30", "/f", 206, "0123456789", "bytes 0-9/10"},
		{"bytes=10-", "/f", 416, "", "bytes */10"},
		{"bytes=-0", "/f", 416, "", "bytes */10"},
		{"bytes=9223372036854775807-", "/f", 416, "", "bytes */10"},
		{"bytes=0-", "/empty", 416, "", "bytes */0"},
		{"bytes=5-2", "/f", 200, "0123456789", ""},
		{"bytes=1-2,4-5", "/f", 200, "0123456789", ""},
		{"bytes=99999999999999999999-", "/f", 200, "0123456789", ""},
		{"lines=1-2", "/f", 200, "0123456789", ""},
		{"bytes=x", "/f", 200, "0123456789", ""},
		{"bytes=-", "/f", 200, "0123456789", ""},
		{"bytes=+1-2", "/f", 200, "0123456789", ""},
		{"bytes=--1", "/f", 200, "0123456789", ""},
	} {
		a := h.send(tt.status, map[bool]string{true: "range"}[tt.status == 416], "GET", at("", tt.name), "", withHeader("Range", tt.header))
		if got := a.Header.Get("Content-Range"); got != tt.place || tt.status != 416 && (a.body != tt.body || a.ContentLength != int64(len(tt.body))) {
			t.Errorf("%s: got %q, %q of %d bytes", tt.header, got, a.body, a.ContentLength)
		}
	}
	a := h.send(200, "", "GET", at("", "/f"), "", withHeader("Range", "bytes=1-2"), withHeader("If-Range", `W/"x"`))
	if a.body != "0123456789" {
		t.Errorf("got %q", a.body)
	}
	h.send(404, "file_not_found", "GET", at("", "/none"), "", withHeader("Range", "bytes=0-1"))
	h.send(422, "validation", "GET", at("", "/"), "", withHeader("Range", "bytes=0-1"))
}

func TestTreeOfFiles(t *testing.T) {
	h := newHouse(t, nil)
	jsonBody := withHeader("Content-Type", "application/json")
	h.send(204, "", "POST", filesPath+"/mkdir", `{"path":"/d/e","parents":true,"mode":"0700"}`, jsonBody)
	h.send(404, "file_not_found", "POST", filesPath+"/mkdir", `{"path":"/x/y"}`, jsonBody)
	h.send(409, "file_exists", "POST", filesPath+"/mkdir", `{"path":"/d"}`, jsonBody)
	h.send(422, "validation", "POST", filesPath+"/mkdir", `{"path":"/y","mode":"rwx"}`, jsonBody)
	h.send(422, "validation", "POST", filesPath+"/mkdir", `{}`, jsonBody)
	h.send(400, "malformed", "POST", filesPath+"/mkdir", `{"path":"/y","colour":"red"}`, jsonBody)
	h.put("/d/e/one.go", "package one // TODO\nx\nTODO again\n")
	h.put("/d/two.txt", "todo")
	var info apitype.FileInfo
	h.send(200, "", "GET", at("/stat", "/d"), "").decode(t, &info)
	if info.Type != "directory" || info.Path != "/d" {
		t.Errorf("got %+v", info)
	}

	paths := func(a answer) []string {
		var list apitype.FileList
		a.decode(t, &list)
		out := []string{fmt.Sprint(list.Truncated)}
		for _, f := range list.Files {
			out = append(out, f.Path)
		}
		return out
	}
	for _, tt := range []struct {
		path string
		want []string
	}{
		{at("/list", "/d"), []string{"false", "/d/e", "/d/two.txt"}},
		{at("/list", "/d", "depth", "2"), []string{"false", "/d/e", "/d/e/one.go", "/d/two.txt"}},
		{at("/list", "/d", "depth", "2", "limit", "2"), []string{"true", "/d/e", "/d/e/one.go"}},
		{at("/list", "/d", "limit", "2"), []string{"false", "/d/e", "/d/two.txt"}},
		{at("/glob", "/d", "pattern", "**/*.go"), []string{"false", "/d/e/one.go"}},
		{at("/glob", "/d", "pattern", "**", "limit", "1"), []string{"true", "/d/e"}},
		{at("/glob", "/d", "pattern", "nothing"), []string{"false"}},
	} {
		got := paths(h.send(200, "", "GET", tt.path, ""))
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.path, diff)
		}
	}
	for _, bad := range []string{
		at("/list", "/d", "depth", "0"), at("/list", "/d", "depth", "101"), at("/list", "/d", "depth", "x"), at("/list", "/d", "limit", "0"),
		at("/list", "/d", "limit", "10001"), at("/glob", "/d"), at("/glob", "/d", "pattern", "[a"), at("/search", "/d"),
		at("/search", "/d", "pattern", "("), at("/search", "/d", "pattern", "x", "literal", "yes"), at("/search", "/d", "pattern", "x", "include", "[a"),
	} {
		h.send(422, "validation", "GET", bad, "")
	}
	h.send(404, "file_not_found", "GET", at("/list", "/none"), "")
	h.send(404, "file_not_found", "GET", at("/list", "/none"), "", withHeader("Accept", "application/x-ndjson"))

	var found apitype.FileMatches
	h.send(200, "", "GET", at("/search", "/d", "pattern", "todo", "ignore_case", "true", "include", "*.go"), "").decode(t, &found)
	want := apitype.FileMatches{Matches: []apitype.FileMatch{
		{Path: "/d/e/one.go", Line: 1, Text: "package one // TODO"}, {Path: "/d/e/one.go", Line: 3, Text: "TODO again"},
	}}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Error(diff)
	}
	a := h.send(200, "", "GET", at("/list", "/d", "depth", "9"), "", withHeader("Accept", "application/x-ndjson"))
	if lines := strings.Count(a.body, "\n"); lines != 3 || a.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("got %d lines of %s", lines, a.Header.Get("Content-Type"))
	}
	a = h.send(200, "", "GET", at("/glob", "/d", "pattern", "nothing"), "", withHeader("Accept", "application/x-ndjson"))
	if a.body != "" || a.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("got %q of %s", a.body, a.Header.Get("Content-Type"))
	}

	h.send(204, "", "POST", filesPath+"/move", `{"from":"/d/two.txt","to":"/d/three.txt"}`, jsonBody)
	h.send(404, "file_not_found", "GET", at("", "/d/two.txt"), "")
	h.send(204, "", "POST", filesPath+"/copy", `{"from":"/d/e","to":"/copy"}`, jsonBody)
	if a := h.send(200, "", "GET", at("", "/copy/one.go"), ""); !strings.HasPrefix(a.body, "package one") {
		t.Errorf("got %q", a.body)
	}
	a = h.send(409, "file_exists", "POST", filesPath+"/copy", `{"from":"/d/three.txt","to":"/copy/one.go"}`, jsonBody)
	if p := a.problem(t); !strings.Contains(p.Detail, `"/copy/one.go"`) {
		t.Errorf("it is about %q", p.Detail)
	}
	h.send(204, "", "POST", filesPath+"/copy", `{"from":"/d/three.txt","to":"/copy/one.go","replace":true}`, jsonBody)
	h.send(409, "file_wrong_kind", "DELETE", at("", "/copy"), "")
	h.send(204, "", "DELETE", at("", "/copy", "recursive", "true"), "")
	h.send(404, "file_not_found", "DELETE", at("", "/copy"), "")
}

func TestNamesThatAreNotText(t *testing.T) {
	h := newHouse(t, nil)
	name := "/d/caf\xe9\n\"\u202e"
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding} {
		h.send(200, "", "PUT", filesPath+"?mkdir=true&path_base64="+enc.EncodeToString([]byte(name)), "x") // with its plus signs bare
	}
	var list apitype.FileList
	h.send(200, "", "GET", at("/list", "/d"), "").decode(t, &list)
	if len(list.Files) != 1 || string(list.Files[0].PathBase64) != name || list.Files[0].Path != "/d/caf\ufffd\n\"\u202e" {
		t.Fatalf("got %+v", list)
	}
	a := h.send(200, "", "GET", filesPath+"?path_base64="+url.QueryEscape(base64.StdEncoding.EncodeToString(list.Files[0].PathBase64)), "")
	if cd := a.Header.Get("Content-Disposition"); a.body != "x" || !strings.HasPrefix(cd, "attachment; filename*=utf-8''caf%EF%BF%BD%0A%22") {
		t.Errorf("got %q, %q", a.body, cd)
	}
	body, err := json.Marshal(apitype.MoveRequest{FromBase64: []byte(name), ToBase64: []byte("/d/\xff")})
	if err != nil {
		t.Fatal(err)
	}
	h.send(204, "", "POST", filesPath+"/move", string(body), withHeader("Content-Type", "application/json"))
	var info apitype.FileInfo
	h.send(200, "", "GET", filesPath+"/stat?path_base64=L2Qv_w==", "").decode(t, &info)
	if string(info.PathBase64) != "/d/\xff" {
		t.Errorf("got %+v", info)
	}
}

func TestTar(t *testing.T) {
	h := newHouse(t, nil)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	big := make([]byte, 3<<20)
	_, _ = rand.Read(big)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "in/big", Mode: 0o644, Size: int64(len(big))}), second(w.Write(big)), w.Close()); err != nil {
		t.Fatal(err)
	}
	h.send(204, "", "PUT", at("/tar", "/workspace"), b.String())
	h.send(422, "validation", "PUT", at("/tar", "/workspace"), "this is no archive"+strings.Repeat("x", 1024))
	h.send(404, "file_not_found", "PUT", at("/tar", "/none"), b.String())
	a := h.send(200, "", "GET", at("/tar", "/workspace/in"), "")
	if a.Header.Get("Content-Type") != "application/x-tar" || a.Header.Get("Content-Disposition") != "attachment; filename=in.tar" {
		t.Errorf("got %v", a.Header)
	}
	r := tar.NewReader(strings.NewReader(a.body))
	seen := map[string]bool{}
	for {
		e, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if seen[e.Name] = true; e.Name == "in/big" && (err != nil || !bytes.Equal(got, big)) {
			t.Errorf("%d bytes came back, %v", len(got), err)
		}
	}
	if !seen["in/big"] {
		t.Errorf("got %v", seen)
	}
	h.send(404, "file_not_found", "GET", at("/tar", "/none"), "")
}

func second[T any](_ T, err error) error { return err }

// odd is an engine whose files are as a test says, and whose functions are changed with
// set only: a broken answer's handler may still be at it.
type odd struct {
	*runtimetest.Fake
	mu    sync.Mutex
	read  func(open func(runtime.FileInfo) error, w io.Writer) error
	tar   func(w io.Writer) error
	list  func(f func(runtime.FileInfo) error) error
	write func(r io.Reader) (int64, error)
}

func (o *odd) set(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f()
}

// as gives a function of the moment.
func as[F any](o *odd, f *F) F {
	o.mu.Lock()
	defer o.mu.Unlock()
	return *f
}

func (o *odd) File(ctx context.Context, id string, op runtime.FileOp, fio runtime.FileIO) error {
	switch op.Verb {
	case runtime.FileRead:
		return as(o, &o.read)(fio.Info, fio.Out)
	case runtime.FileTarRead:
		return as(o, &o.tar)(fio.Out)
	case runtime.FileList:
		return as(o, &o.list)(fio.Info)
	case runtime.FileWrite:
		n, err := as(o, &o.write)(fio.In)
		if err != nil {
			return err
		}
		return fio.Info(runtime.FileInfo{Path: op.Path, Size: n})
	}
	return o.Fake.File(ctx, id, op, fio)
}

// TestBrokenAnswers checks that no part is taken for the whole.
func TestBrokenAnswers(t *testing.T) {
	o := &odd{}
	h := newHouse(t, func(f *runtimetest.Fake) runtime.Runtime { o.Fake = f; return o })
	boo := errors.New("boo")
	say := func(size int64, text string, err error) func(func(runtime.FileInfo) error, io.Writer) error {
		return func(open func(runtime.FileInfo) error, w io.Writer) error {
			if err := open(runtime.FileInfo{Path: "/f", Size: size, Mode: 0o644, ModTime: time.Now()}); err != nil {
				return err
			}
			if _, err := io.WriteString(w, text); err != nil {
				return err
			}
			return err
		}
	}
	get := func(path string, change ...func(*http.Request)) (status int, body string, err error) {
		resp, err := h.client.Do(h.request("GET", path, nil, change...))
		if err != nil {
			return 0, "", err
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b), err
	}
	for _, tt := range []struct {
		name   string
		read   func(func(runtime.FileInfo) error, io.Writer) error
		body   string
		broken bool
	}{
		{"whole", say(10, "0123456789", nil), "0123456789", false},
		{"grown", say(10, "0123456789abc", nil), "0123456789", false},
		{"shrunk", say(10, "0123", nil), "0123", true},
		{"failed", say(10, "0123", boo), "0123", true},
		{"of /proc", say(0, "0123", nil), "0123", false},
		{"of /proc, failed", say(0, "0123", boo), "0123", true},
	} {
		o.set(func() { o.read = tt.read })
		status, body, err := get(at("", "/f"))
		// A connection that is broken off at once may not even show the header.
		if (err != nil) != tt.broken || !tt.broken && (status != 200 || body != tt.body) {
			t.Errorf("%s: got %d, %q, %v", tt.name, status, body, err)
		}
	}
	o.set(func() { o.read = func(func(runtime.FileInfo) error, io.Writer) error { return boo } })
	h.send(500, "internal", "GET", at("", "/f"), "")
	o.set(func() { o.read = func(func(runtime.FileInfo) error, io.Writer) error { return nil } })
	h.send(500, "internal", "GET", at("", "/f"), "")

	// As long as nothing was sent, an error is answered like any other.
	h.put2(o, "/r", "0123456789")
	for _, tt := range []struct {
		name, code string
		status     int
		read       func(func(runtime.FileInfo) error, io.Writer) error
	}{
		{"failed at once", "internal", 500, say(10, "", boo)},
		{"of /proc, failed at once", "internal", 500, say(0, "", boo)},
		{"shrunk to nothing", "file_wrong_kind", 409, say(10, "", nil)},
	} {
		o.set(func() { o.read = tt.read })
		for _, header := range []string{"", "bytes=2-8"} {
			if tt.name == "of /proc, failed at once" && header != "" {
				continue // it has no range
			}
			a := h.send(tt.status, tt.code, "GET", at("", "/workspace/r"), "", withHeader("Range", header))
			if ct := a.Header.Get("Content-Type"); ct != "application/problem+json" || a.ContentLength != int64(len(a.body)) {
				t.Errorf("%s, %s: %s of %d bytes", tt.name, header, ct, a.ContentLength)
			}
			for _, name := range []string{"ETag", "Last-Modified", "Content-Disposition", "Content-Range", "Accept-Ranges"} {
				if v := a.Header.Get(name); v != "" {
					t.Errorf("%s, %s: %s is %q", tt.name, header, name, v)
				}
			}
		}
	}
	o.set(func() { o.read = say(0, "", nil) })
	if a := h.send(200, "", "GET", at("", "/workspace/r"), ""); a.body != "" || a.Header.Get("ETag") == "" {
		t.Errorf("an empty file: %q, %v", a.body, a.Header)
	}
	o.set(func() { o.read = say(4, "0", nil) }) // shorter by the time it is read
	h.send(409, "file_wrong_kind", "GET", at("", "/workspace/r"), "", withHeader("Range", "bytes=2-8"))

	o.set(func() { o.tar = func(w io.Writer) error { _, _ = w.Write([]byte("part")); return boo } })
	if _, _, err := get(at("/tar", "/d")); err == nil {
		t.Error("half an archive was taken for the whole")
	}
	o.set(func() {
		o.list = func(f func(runtime.FileInfo) error) error { _ = f(runtime.FileInfo{Path: "/f"}); return boo }
	})
	if _, _, err := get(at("/list", "/d"), withHeader("Accept", "application/x-ndjson")); err == nil {
		t.Error("half a list was taken for the whole")
	}
	h.send(500, "internal", "GET", at("/list", "/d"), "")
	// However long the names are, an answer isn't.
	o.set(func() {
		o.list = func(f func(runtime.FileInfo) error) error {
			for {
				if err := f(runtime.FileInfo{Path: "/" + strings.Repeat("\x01", 4000)}); err != nil {
					return err
				}
			}
		}
	})
	a := h.send(200, "", "GET", at("/list", "/d", "limit", "10000"), "")
	if len(a.body) > 17<<20 || !strings.HasSuffix(a.body, `"truncated":true}`+"\n") {
		t.Errorf("got %d bytes, …%s", len(a.body), a.body[max(0, len(a.body)-20):])
	}

	// What a caller breaks off isn't written.
	var got error
	done := make(chan struct{})
	o.set(func() {
		o.write = func(r io.Reader) (int64, error) {
			defer close(done)
			var n int64
			n, got = io.Copy(io.Discard, r)
			return n, got
		}
	})
	r := h.request("PUT", at("", "/f"), io.MultiReader(strings.NewReader("some"), iotest.ErrReader(boo)))
	if resp, err := h.client.Do(r); err == nil {
		_ = resp.Body.Close()
		t.Error("half a request was sent")
	}
	<-done
	if got == nil {
		t.Error("half a file was taken for the whole")
	}
}

// put2 writes into the engine beneath an odd one.
func (h *house) put2(o *odd, name, content string) {
	h.t.Helper()
	sb, err := h.Get(context.Background(), "red", "k")
	if err == nil {
		op := runtime.FileOp{Verb: runtime.FileWrite, Path: "/workspace" + name}
		err = o.Fake.File(context.Background(), sb.ContainerID, op, runtime.FileIO{In: strings.NewReader(content)})
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// TestLongUpload writes more than a body could otherwise have.
func TestLongUpload(t *testing.T) {
	const size = 64 << 20
	o := &odd{}
	h := newHouse(t, func(f *runtimetest.Fake) runtime.Runtime { o.Fake = f; return o })
	o.set(func() { o.write = func(r io.Reader) (int64, error) { return io.Copy(io.Discard, r) } })
	resp, err := h.client.Do(h.request("PUT", at("", "/f"), io.LimitReader(zeros{}, size)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var info apitype.FileInfo
	if err := json.NewDecoder(resp.Body).Decode(&info); err != nil || info.Size != size {
		t.Errorf("got %+v, %v", info, err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestWatchDrains(t *testing.T) {
	h := newHouse(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h.url = "http://" + l.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- proxy.Serve(ctx, l, h.handler, proxy.ServeOptions{}) }()
	resp, err := h.client.Do(h.request("GET", at("/watch", "/workspace"), nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	cancel()
	if got, err := io.ReadAll(resp.Body); err == nil || !strings.HasSuffix(string(got), "event: going_down\ndata: {\"type\":\"going_down\"}\n\n") {
		t.Errorf("its end is %v after %q", err, got)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestWatchDrainsUnread(t *testing.T) {
	drainUnread(t, newHouse(t, nil).handler, at("/watch", "/workspace"))
}

func TestWatchFiles(t *testing.T) {
	h := newHouse(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	h.send(404, "file_not_found", "GET", at("/watch", "/none"), "")
	resp, err := h.client.Do(h.request("GET", at("/watch", "/workspace", "recursive", "true"), nil).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Errorf("got %s", ct)
	}
	lines := bufio.NewScanner(resp.Body)
	next := func() string { // the next but blank lines
		for lines.Scan() {
			if s := lines.Text(); s != "" {
				return s
			}
		}
		t.Fatalf("it ended: %v", lines.Err())
		return ""
	}
	if got := []string{next(), next()}; !cmp.Equal(got, []string{"event: ready", `data: {"type":"ready"}`}) {
		t.Errorf("got %q", got)
	}
	for next() != ": heartbeat" {
	}
	h.put("/workspace/new/\xff", "x")
	for seen := false; !seen; {
		data, ok := strings.CutPrefix(next(), "data: ")
		if !ok {
			continue
		}
		var e apitype.FileEvent
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Fatal(err)
		}
		seen = e.Type == "create" && string(e.PathBase64) == "/workspace/new/\xff"
	}
	// Its end isn't taken for the end of all changes.
	if _, err := h.Delete(ctx, "red", "k"); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
	}
	if lines.Err() == nil {
		t.Error("it ended as if there were nothing more to tell")
	}
}
