package sandboxapi_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// signed has a signed URL made.
func (h *house) signed(key string, port int, ttl string) apitype.PortURL {
	h.t.Helper()
	a := h.want(201, "", "POST", "/api/v1/sandboxes/"+key+"/urls", fmt.Sprintf(`{"port":%d,"ttl":%q}`, port, ttl), withHeader("Content-Type", "application/json"))
	var u apitype.PortURL
	a.decode(h.t, &u)
	return u
}

// logged is a log in memory.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestSignedURLs(t *testing.T) {
	log := &logged{}
	h := newHouse(t, nil, func(o *sandboxapi.Options) {
		o.Gate.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	var got *http.Request
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r
		http.SetCookie(w, &http.Cookie{Name: "own", Value: "1", Path: "/"})
		w.Header().Set("Referrer-Policy", "unsafe-url")
		if r.URL.Path == "/go" {
			http.Redirect(w, r, "/there", http.StatusFound)
		}
	}))
	start := time.Now()
	u := h.signed("k", 8000, "10m")
	if u.URL != h.url+u.Path || u.ExpiresAt.Before(start.Add(10*time.Minute)) || u.ExpiresAt.After(time.Now().Add(10*time.Minute+time.Second)) {
		t.Errorf("got %+v", u)
	}
	a := h.want(200, "", "GET", u.Path+"a%2fb?q=1", "", withToken(""), func(r *http.Request) {
		r.Header["Cookie"] = []string{"session=somebody-elses; berm-port-own=1; berm-port-=x"}
		r.Header.Set("Referer", h.url+u.Path)
		r.Header.Set("Authorization", "Bearer the-ports-own")
		r.Header.Set("Origin", "https://anywhere.example")
	})
	if got.RequestURI != "/a%2fb?q=1" || got.Header.Get("Cookie") != "own=1" || got.Header.Get("Referer") != "" || got.Header.Get("Authorization") != "Bearer the-ports-own" {
		t.Errorf("the port got %s, %v", got.RequestURI, got.Header)
	}
	if c := a.Header.Values("Set-Cookie"); !slices.Equal(c, []string{"berm-port-own=1; Path=" + u.Path}) || a.Header.Get("Referrer-Policy") != "no-referrer" {
		t.Errorf("got %v", a.Header)
	}
	a = h.want(302, "", "GET", u.Path+"go", "", withToken(""))
	if loc := a.Header.Get("Location"); loc != u.Path+"there" {
		t.Errorf("sent to %s", loc)
	}
	// Berm's own tokens don't go in, even where they aren't asked for.
	h.want(200, "", "GET", u.Path, "", withHeader("Authorization", "Bearer "+master))
	if got.Header.Get("X-Api-Token") != "" || got.Header.Get("Authorization") != "" {
		t.Errorf("the port got %v", got.Header)
	}
	h.want(421, "host_refused", "GET", u.Path, "", withHost("evil.example"))

	text, sum, forge := forger(t, strings.Trim(strings.TrimPrefix(u.Path, "/p/"), "/"))
	flip := func(s string, i int) string {
		b := []byte(s)
		b[i] = map[bool]byte{true: 'B', false: 'A'}[b[i] == 'A']
		return string(b)
	}
	for name, signature := range map[string]string{
		"another port": forge("p", 8001) + "." + sum, "another tenant": forge("t", "blue") + "." + sum, "another key": forge("k", "other") + "." + sum,
		"another session": forge("s", sessionID) + "." + sum, "later": forge("e", time.Now().Add(time.Hour).Unix()) + "." + sum,
		"text": flip(text, 3) + "." + sum, "sum": text + "." + flip(sum, 0), "end of sum": text + "." + flip(sum, len(sum)-1), "half": text + "." + sum[:20],
		"no sum": text, "empty sum": text + ".", "nothing": ".", "more": text + "." + sum + ".x", "padding": text + "." + sum + "=",
	} {
		a := h.want(403, "url_invalid", "GET", "/p/"+signature+"/", "", withToken(""))
		if strings.Contains(strings.ReplaceAll(a.body, a.Header.Get("X-Request-Id"), ""), "8000") {
			t.Errorf("%s: it tells %s", name, a.body)
		}
	}
	h.want(404, "no_route", "GET", strings.TrimSuffix(u.Path, "/"), "", withToken(""))
	h.want(400, "malformed", "GET", "/p/a%2fb/", "", withToken(""))

	// Neither another server's, nor after its time, nor for another sandbox.
	other := newHouse(t, nil)
	other.want(403, "url_invalid", "GET", u.Path, "", withToken(""))
	short := h.signed("k", 8000, "1s")
	eventually(t, "it expires", func() bool { return time.Now().After(short.ExpiresAt) })
	h.want(410, "url_expired", "GET", short.Path, "", withToken(""))
	if _, err := h.Pause(t.Context(), "red", "k"); err != nil {
		t.Fatal(err)
	}
	h.want(409, "wrong_state", "GET", u.Path, "", withToken(""))
	if _, err := h.Delete(t.Context(), "red", "k"); err != nil {
		t.Fatal(err)
	}
	h.want(410, "url_expired", "GET", u.Path, "", withToken(""))
	h.create("k", policy.Request{})
	h.want(410, "url_expired", "GET", u.Path, "", withToken(""))

	if s := log.String(); !strings.Contains(s, "/p/{signature}") || strings.Contains(s, text) || strings.Contains(s, sum) {
		t.Error("the log has a signature, or nothing of signed URLs")
	}
	if !strings.Contains(log.String(), "level=INFO msg=http_request") {
		t.Error("uses of signed URLs aren't in the log")
	}
}

// TestSignedURLCredentials checks that a browser isn't asked for credentials that it would
// show to every sandbox, and that none go in.
func TestSignedURLCredentials(t *testing.T) {
	h := newHouse(t, nil)
	var got []string
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header["Authorization"]
		for _, name := range []string{"WWW-Authenticate", "Authentication-Info", "Proxy-Authenticate", "Proxy-Authentication-Info"} {
			w.Header().Set(name, `Basic realm="x"`)
		}
		w.WriteHeader(http.StatusUnauthorized)
	}))
	path := h.signed("k", 8000, "1h").Path
	for value, passes := range map[string]bool{
		"Basic dTpw": false, "basic dTpw": false, "Basic": false, "Digest username=u": false, "Negotiate x": false, "NTLM x": false,
		"Bearer own": true, "Token own": true,
	} {
		a := h.want(401, "", "GET", path, "", withToken(""), withHeader("Authorization", value))
		if passes != (len(got) == 1 && got[0] == value) || !passes && len(got) > 0 {
			t.Errorf("%s reached the port as %q", value, got)
		}
		for name := range a.Header {
			if strings.Contains(name, "Authenticat") {
				t.Errorf("%s came through", name)
			}
		}
	}
	if a := h.want(401, "", "GET", portPath+"/", ""); a.Header.Get("WWW-Authenticate") == "" {
		t.Error("who has a token isn't told what the port wants")
	}
}

// TestSignedURLsEnd checks that nothing outlives the URL that let it in.
func TestSignedURLsEnd(t *testing.T) {
	t.Parallel()
	var c counted
	h := newHouse(t, func(f *runtimetest.Fake) runtime.AgentRuntime { c.Fake = f; return &c })
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/silent" {
			<-r.Context().Done()
			return
		}
		rc := http.NewResponseController(w)
		if r.Header.Get("Upgrade") == "" {
			_ = rc.Flush()
			<-r.Context().Done()
			return
		}
		conn, rw, err := rc.Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: own\r\n\r\n")
		_, _ = io.Copy(io.Discard, rw)
	}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for name, tt := range map[string]struct {
		path, upgrade string
		status        int
	}{
		"answer":   {"", "", 200},
		"upgraded": {"", "own", 101},
		"silent":   {"silent", "", 410},
	} {
		t.Run(name, func(t *testing.T) {
			before := c.all.Load()
			status := 0
			for ttl := 1; status != tt.status || c.all.Load() == before; ttl *= 2 { // until it is used in time
				r := h.request("GET", h.signed("k", 8000, fmt.Sprint(ttl, "s")).Path+tt.path, nil, withToken("")).WithContext(ctx)
				if tt.upgrade != "" {
					r.Header.Set("Connection", "Upgrade")
					r.Header.Set("Upgrade", tt.upgrade)
				}
				resp, err := h.client.Do(r)
				must(t, err)
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				status = resp.StatusCode
			}
			if ctx.Err() != nil {
				t.Fatal("it goes on")
			}
			eventually(t, "no connection is left", func() bool { return c.open.Load() == 0 })
		})
	}
}

func TestSignedURLRequests(t *testing.T) {
	h := newHouse(t, nil)
	const path = "/api/v1/sandboxes/k/urls"
	jsonBody := withHeader("Content-Type", "application/json")
	for _, tt := range []struct {
		status     int
		code, body string
	}{
		{201, "", `{"port":1}`},
		{201, "", `{"port":65535,"ttl":"168h"}`},
		{422, "validation", `{}`},
		{422, "validation", `{"port":65536}`},
		{422, "validation", `{"port":"80"}`},
		{422, "validation", `{"port":80,"ttl":"169h"}`},
		{422, "validation", `{"port":80,"ttl":0}`},
		{400, "malformed", `{"port":80,"host":"x"}`},
	} {
		h.want(tt.status, tt.code, "POST", path, tt.body, jsonBody)
	}
	h.want(404, "not_found", "POST", "/api/v1/sandboxes/other/urls", `{"port":1}`, jsonBody)
	h.want(403, "forbidden", "POST", path, `{"port":1}`, jsonBody, withToken(reader))
	h.want(401, "unauthorized", "POST", path, `{"port":1}`, jsonBody, withToken(""))
	h.want(502, "port_unreachable", "GET", h.signed("k", 1, "1h").Path, "", withToken(""))
}

// TestSigningKey checks that what one process signs is good for the next.
func TestSigningKey(t *testing.T) {
	key := bytes.Repeat([]byte("k"), 32)
	with := func(o *sandboxapi.Options) { o.SigningKey = key }
	a, b := newHouse(t, nil, with), newHouse(t, nil, with)
	// Only the session is another there.
	b.want(410, "url_expired", "GET", a.signed("k", 8000, "1h").Path, "", withToken(""))
	opts := sandboxapi.Options{Manager: a, Policy: func() *policy.Policy { return nil }, SigningKey: key[1:]}
	if _, err := sandboxapi.New(opts); err == nil {
		t.Error("a short key was taken")
	}
}

// forger takes a signature apart. Forge gives its text with another value.
func forger(t *testing.T, signature string) (text, sum string, forge func(field string, value any) string) {
	t.Helper()
	text, sum, _ = strings.Cut(signature, ".")
	claims, err := base64.RawURLEncoding.DecodeString(text)
	must(t, err)
	return text, sum, func(field string, value any) string {
		var c map[string]any
		must(t, json.Unmarshal(claims, &c))
		c[field] = value
		b, err := json.Marshal(c)
		must(t, err)
		return base64.RawURLEncoding.EncodeToString(b)
	}
}
