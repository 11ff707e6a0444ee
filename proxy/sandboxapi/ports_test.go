package sandboxapi_test

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

const portPath = "/api/v1/sandboxes/k/ports/8000"

// notedConn tells of its end.
type notedConn struct {
	net.Conn
	ended func()
}

func (c *notedConn) Close() error {
	c.ended()
	return c.Conn.Close()
}

// serve has a handler listen at a port of all sandboxes.
func (h *house) serve(port int, handler http.Handler) {
	l := pipes.Listen()
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	h.fake.Listen(port, func(c net.Conn) {
		ended := make(chan struct{})
		if l.Hand(&notedConn{c, sync.OnceFunc(func() { close(ended) })}) {
			<-ended
		}
		_ = c.Close()
	})
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(l) })
	h.t.Cleanup(func() {
		h.fake.Listen(port, nil)
		_ = srv.Close()
		wg.Wait()
	})
}

func TestPorts(t *testing.T) {
	h := newHouse(t, nil)
	h.want(502, "port_unreachable", "GET", portPath+"/", "")
	var got *http.Request
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = r
		w.Header().Set("X-Own", "yes")
		w.WriteHeader(http.StatusTeapot)
		_, _ = w.Write(b)
	}))
	for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
		body := map[bool]string{true: "some body"}[strings.HasPrefix(method, "P")]
		a := h.want(418, "", method, portPath+"/a%2Fb//c/...d/..e?q=1;r=%zz", body)
		if a.body != body || a.Header.Get("X-Own") != "yes" || got.Method != method || got.RequestURI != "/a%2Fb//c/...d/..e?q=1;r=%zz" || got.Host != "localhost:8000" {
			t.Errorf("%s: got %s %s of %s, %q, %v", method, got.Method, got.RequestURI, got.Host, a.body, a.Header)
		}
	}
	for _, tt := range []struct {
		status     int
		code, path string
		token      string
	}{
		{404, "no_route", portPath, master},
		{422, "validation", "/api/v1/sandboxes/k/ports/0/", master},
		{422, "validation", "/api/v1/sandboxes/k/ports/65536/", master},
		{422, "validation", "/api/v1/sandboxes/k/ports/080/", master},
		{422, "validation", "/api/v1/sandboxes/k/ports/http/", master},
		{422, "validation", "/api/v1/sandboxes/k%20/ports/8000x/", master},
		{400, "malformed", "/api/v1/sandboxes/k%2fports%2f8000/x", master},
		{400, "malformed", "/api/v1/sandboxes/k/ports%2f8000/x", master},
		{400, "malformed", "/api/v1/sandboxes/k/logs/%2f", master},
		{404, "not_found", "/api/v1/sandboxes/other/ports/8000/", master},
		{403, "forbidden", portPath + "/", reader},
		{401, "unauthorized", portPath + "/", "token-of-a-stranger"},
		{502, "port_unreachable", "/api/v1/sandboxes/k/ports/8001/", master},
	} {
		h.want(tt.status, tt.code, "GET", tt.path, "", withToken(tt.token))
	}
	signed := strings.TrimSuffix(h.signed("k", 8000, "1h").Path, "/")
	for _, tail := range []string{"/../x", "/a/..", "/.", "/./x", "/..%2f..%2fx", "/%2e%2e%2Fx", "/%2E/x", "/a/..%5cx"} {
		h.want(400, "malformed", "GET", portPath+tail, "")
		h.want(400, "malformed", "GET", signed+tail, "", withToken(""))
	}
	h.want(403, "origin_refused", "GET", portPath+"/", "", withHeader("Origin", "https://evil.example"))

	h.fake.Listen(8002, func(c net.Conn) { _, _ = io.WriteString(c, "SSH-2.0-x\r\n"); _ = c.Close() })
	h.want(502, "port_failed", "GET", "/api/v1/sandboxes/k/ports/8002/", "")
	h.fake.Listen(8003, func(c net.Conn) { _ = c.Close() })
	a := h.want(502, "port_failed", "GET", "/api/v1/sandboxes/k/ports/8003/", "")
	if a.Header.Get("X-Request-Id") == "" || a.Header.Get("X-Content-Type-Options") != "nosniff" || a.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("got %v", a.Header)
	}
	h.fake.Listen(8004, func(c net.Conn) {
		_, _ = http.ReadRequest(bufio.NewReader(c))
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nX: "+strings.Repeat("x", 1<<20))
		_ = c.Close()
	})
	h.want(502, "port_failed", "GET", "/api/v1/sandboxes/k/ports/8004/", "")
	if _, err := h.Pause(t.Context(), "red", "k"); err != nil {
		t.Fatal(err)
	}
	h.want(409, "wrong_state", "GET", portPath+"/", "")
}

// TestPortHeaders checks what passes between callers and ports, and what doesn't.
func TestPortHeaders(t *testing.T) {
	h := newHouse(t, nil)
	var got http.Header
	answer := http.Header{}
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header
		for name, values := range answer {
			w.Header()[name] = values
		}
		if r.URL.Path == "/hint" {
			w.Header().Set("Link", "</x>; rel=preload")
			w.WriteHeader(http.StatusEarlyHints)
		}
	}))
	a := h.want(200, "", "GET", portPath+"/", "", func(r *http.Request) {
		r.Header = http.Header{
			"X-Api-Token": {master}, "X-Own": {"1"}, "Connection": {"x-hop, close"}, "X-Hop": {"1"}, "Te": {"trailers"},
			"Proxy-Authorization": {"Basic x"}, "Keep-Alive": {"1"}, "Upgrade-Insecure-Requests": {"1"},
			"X-Forwarded-For": {"6.6.6.6"}, "X-Forwarded-Host": {"evil.example"}, "X-Forwarded-Proto": {"https"}, "X-Forwarded-User": {"root"},
			"X-Forwarded-Prefix": {"/evil"}, "X-Real-Ip": {"6.6.6.6"}, "Forwarded": {"for=6.6.6.6"}, "Cookie": {"own=1"},
			"Authorization": {"Basic own"}, "Origin": nil, "X-Request-Id": {"req-1"},
		}
	})
	for name, want := range map[string]string{
		"X-Api-Token": "", "X-Own": "1", "X-Hop": "", "Proxy-Authorization": "", "Keep-Alive": "", "Te": "trailers",
		"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": strings.TrimPrefix(h.url, "http://"), "X-Forwarded-Proto": "http", "X-Forwarded-User": "",
		"X-Forwarded-Prefix": portPath, "X-Real-Ip": "", "Forwarded": "", "Cookie": "own=1", "Authorization": "Basic own", "X-Request-Id": "req-1",
	} {
		if v := strings.Join(got.Values(name), "|"); v != want {
			t.Errorf("%s reached the port as %q, want %q", name, v, want)
		}
	}
	if a.Header.Get("X-Request-Id") != "req-1" {
		t.Errorf("got %v", a.Header)
	}
	h.want(200, "", "GET", portPath+"/", "", withToken(""), withHeader("Authorization", "Bearer "+master))
	if v := got.Values("Authorization"); len(v) != 0 {
		t.Errorf("a token reached the port: %q", v)
	}

	answer = http.Header{
		"Set-Cookie": {
			"a=1; Domain=example.com; Path=/; HttpOnly; SameSite=Strict", "b=2", "__Host-c=3; Path=/; Secure", "bad name=4", "d=5; Path=/api/v1; Max-Age=60",
		},
		"Service-Worker-Allowed": {"/"}, "Clear-Site-Data": {`"*"`}, "Strict-Transport-Security": {"max-age=1"}, "Alt-Svc": {"h3"},
		"X-Accel-Redirect": {"/secret"}, "X-Sendfile": {"/etc/shadow"}, "Nel": {"{}"}, "Report-To": {"{}"},
		"X-Content-Type-Options": {"own"}, "X-Request-Id": {"own"}, "Content-Security-Policy": {"sandbox allow-same-origin"},
		"Content-Type": {"text/html"}, "Refresh": {"1"},
	}
	a = h.want(200, "", "GET", portPath+"/", "")
	for _, name := range []string{"Service-Worker-Allowed", "Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc", "X-Accel-Redirect", "X-Sendfile", "Nel", "Report-To"} {
		if v := a.Header.Values(name); len(v) != 0 {
			t.Errorf("%s came through as %q", name, v)
		}
	}
	for name, want := range map[string][]string{
		"Set-Cookie": {
			"a=1; Path=" + portPath + "/; HttpOnly; SameSite=Strict", "b=2; Path=" + portPath + "/", "d=5; Path=" + portPath + "/; Max-Age=60",
		},
		"X-Content-Type-Options": {"nosniff"}, "Content-Type": {"text/html"}, "Cache-Control": {"no-store"},
		"Content-Security-Policy": {"sandbox allow-same-origin", "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"},
	} {
		if v := a.Header.Values(name); !slices.Equal(v, want) {
			t.Errorf("%s is %q, want %q", name, v, want)
		}
	}
	if v := a.Header.Values("X-Request-Id"); len(v) != 1 || v[0] == "own" {
		t.Errorf("X-Request-Id is %q", v)
	}
	answer = http.Header{"Cache-Control": {"max-age=60"}}
	a = h.want(200, "", "GET", portPath+"/hint", "")
	if v := a.Header.Values("Cache-Control"); !slices.Equal(v, []string{"no-store"}) || a.Header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("got %v", a.Header)
	}
	for from, to := range map[string]string{
		"/login?a=b#c":                 portPath + "/login?a=b#c",
		"/a%2Fb":                       portPath + "/a%2Fb",
		"relative":                     "relative",
		"http://localhost:8000/x":      portPath + "/x",
		"http://localhost:8000":        portPath + "/",
		h.url + "/x":                   portPath + "/x",
		portPath + "/x":                portPath + "/x",
		"https://example.com/x":        "https://example.com/x",
		"//example.com/x":              "//example.com/x",
		"http://localhost:8001/":       "http://localhost:8001/",
		"http://user@localhost:8000/x": portPath + "/x",
	} {
		answer = http.Header{"Location": {from}}
		if a := h.want(200, "", "GET", portPath+"/", ""); a.Header.Get("Location") != to {
			t.Errorf("%s became %s, want %s", from, a.Header.Get("Location"), to)
		}
	}
}

// TestPortWithoutTokens checks that a browser's cookies of other local programs, and what
// it logs in with elsewhere, don't go in.
func TestPortWithoutTokens(t *testing.T) {
	h := newHouse(t, nil, func(o *sandboxapi.Options) { o.Gate.Tokens = nil })
	h.want(201, "", "PUT", "/api/v1/sandboxes/k", "")
	var got, credentials []string
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, credentials = r.Header["Cookie"], r.Header["Authorization"]
		http.SetCookie(w, &http.Cookie{Name: "own", Value: "1"})
		w.Header().Set("WWW-Authenticate", `Basic realm="another's"`)
	}))
	a := h.want(200, "", "GET", portPath+"/", "", withHeader("Cookie", "session=somebody-elses; berm-port-own=1; berm-port-=x"))
	if !slices.Equal(got, []string{"own=1"}) {
		t.Errorf("the port got %q", got)
	}
	if c := a.Header.Values("Set-Cookie"); !slices.Equal(c, []string{"berm-port-own=1; Path=" + portPath + "/"}) {
		t.Errorf("got %q", c)
	}
	if v := a.Header.Values("WWW-Authenticate"); len(v) > 0 {
		t.Errorf("a browser is asked for %q", v)
	}
	h.want(200, "", "GET", portPath+"/", "", withHeader("Authorization", "Basic dTpw"))
	if len(credentials) > 0 {
		t.Errorf("what a browser has for another port reached this one: %q", credentials)
	}
	h.want(200, "", "GET", portPath+"/", "", withHeader("Authorization", "Bearer own"))
	if !slices.Equal(credentials, []string{"Bearer own"}) {
		t.Errorf("the port got %q", credentials)
	}
}

// TestPortCaching checks that no cache between callers can give one's answer to another.
func TestPortCaching(t *testing.T) {
	h := newHouse(t, nil)
	said := http.Header{}
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for name, values := range said {
			w.Header()[name] = values
		}
	}))
	path := h.signed("k", 8000, "1h").Path
	for value, want := range map[string]string{
		"": "no-store", ",": "no-store", "No-Store": "no-store", "no-store, max-age=60": "no-store",
		"public, max-age=60": "private, no-cache", "s-maxage=60": "private, no-cache", "immutable": "private, no-cache",
	} {
		said = http.Header{"Cache-Control": {value}, "Cdn-Cache-Control": {value}, "Surrogate-Control": {value}}
		for _, a := range []struct {
			answer
			want string
		}{
			{h.want(200, "", "GET", portPath+"/", ""), "no-store"},
			{h.want(200, "", "GET", path, "", withToken("")), want},
		} {
			if v := a.Header.Values("Cache-Control"); !slices.Equal(v, []string{a.want}) {
				t.Errorf("%q became %q, want %q", value, v, a.want)
			}
			if a.Header.Values("Cdn-Cache-Control") != nil || a.Header.Values("Surrogate-Control") != nil {
				t.Errorf("%q: got %v", value, a.Header)
			}
		}
	}
}

// TestEarlyAnswers has a port answer before it has read what it is sent, which an
// ordinary reverse proxy loses some answers to.
func TestEarlyAnswers(t *testing.T) {
	h := newHouse(t, nil)
	h.fake.Listen(8000, func(c net.Conn) {
		defer func() { _ = c.Close() }()
		if _, err := http.ReadRequest(bufio.NewReaderSize(c, 16)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 413 Payload Too Large\r\nContent-Length: 7\r\nConnection: close\r\n\r\ntoo big")
		}
	})
	body := bytes.Repeat([]byte("x"), 200<<10)
	kept := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	defer kept.CloseIdleConnections()
	var wg sync.WaitGroup
	var lost atomic.Int64
	work := make(chan struct{})
	for i := range 8 {
		client := []*http.Client{kept, h.client}[i%2] // who comes again, and who doesn't
		wg.Go(func() {
			for range work {
				resp, err := client.Do(h.request("POST", portPath+"/", bytes.NewReader(body)))
				if err != nil {
					t.Log(err)
					lost.Add(1)
					continue
				}
				b, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != 413 || string(b) != "too big" {
					t.Log(resp.StatusCode, string(b), err)
					lost.Add(1)
				}
			}
		})
	}
	const all = 250
	for range all {
		work <- struct{}{}
	}
	close(work)
	wg.Wait()
	if n := lost.Load(); n > 0 {
		t.Errorf("%d of %d answers were lost", n, all)
	}
}

// TestPortStreams checks that nothing waits for the rest, either way.
func TestPortStreams(t *testing.T) {
	h := newHouse(t, nil)
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		w.WriteHeader(200)
		_ = rc.Flush()
		buf := make([]byte, 16)
		for {
			n, err := r.Body.Read(buf)
			if n > 0 {
				_, _ = w.Write(buf[:n])
				_ = rc.Flush()
			}
			if err != nil {
				return
			}
		}
	}))
	out, in := io.Pipe()
	resp, err := h.client.Do(h.request("POST", portPath+"/", out))
	must(t, err)
	defer func() { _ = resp.Body.Close() }()
	buf := make([]byte, 5)
	for _, text := range []string{"hello", "world"} {
		if _, err := io.WriteString(in, text); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, buf); err != nil || string(buf) != text {
			t.Fatalf("got %q, %v", buf, err)
		}
	}
	_ = in.Close()
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("then came %q, %v", rest, err)
	}

	// A port that breaks off isn't taken for one that has said all.
	h.fake.Listen(8001, func(c net.Conn) {
		_, _ = http.ReadRequest(bufio.NewReader(c))
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\npart")
		_ = c.Close()
	})
	resp, err = h.client.Do(h.request("GET", "/api/v1/sandboxes/k/ports/8001/", nil))
	if err == nil {
		defer func() { _ = resp.Body.Close() }()
		_, err = io.ReadAll(resp.Body)
	}
	if err == nil {
		t.Error("a part was taken for the whole")
	}
}

// TestOrigins checks that a port's own pages can ask it, though the browser
// calls them strangers.
func TestOrigins(t *testing.T) {
	h := newHouse(t, nil)
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		_, _ = io.WriteString(w, r.Header.Get("Origin"))
	}))
	path := h.signed("k", 8000, "1h").Path
	a := h.want(200, "", "GET", path, "", withToken(""), withHeader("Origin", "null"))
	if a.body != "http://localhost:8000" || a.Header.Get("Access-Control-Allow-Origin") != "null" || a.Header.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("got %s, %v", a.body, a.Header)
	}
	a = h.want(200, "", "GET", path, "", withToken(""), withHeader("Origin", h.url))
	if a.body != "http://localhost:8000" {
		t.Errorf("got %s", a.body)
	}
	a = h.want(200, "", "GET", path, "", withToken(""), withHeader("Origin", "https://evil.example"))
	if a.body != "https://evil.example" {
		t.Errorf("got %s", a.body)
	}
	a = h.want(204, "", "OPTIONS", path, "", withToken(""), withHeader("Origin", "null"), withHeader("Access-Control-Request-Method", "PUT"),
		withHeader("Access-Control-Request-Headers", "content-type"))
	if a.Header.Get("Access-Control-Allow-Origin") != "null" || !strings.Contains(a.Header.Get("Access-Control-Allow-Methods"), "PUT") ||
		a.Header.Get("Access-Control-Allow-Headers") != "content-type" {
		t.Errorf("got %v", a.Header)
	}
}
