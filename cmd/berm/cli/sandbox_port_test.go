package cli

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/bermhq/berm/proxy/client"
)

func TestForwarder(t *testing.T) {
	const prefix = "/berm/api/v1/sandboxes/a%2Fb/ports/8000"
	var server *httptest.Server
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("the token is %q", r.Header.Get("Authorization"))
		}
		w.Header().Set("Location", strings.TrimPrefix(prefix, "/berm")+"/login?x=1")
		http.SetCookie(w, &http.Cookie{Name: "a", Value: "b", Path: strings.TrimPrefix(prefix, "/berm") + "/"})
		w.Header().Add("Content-Security-Policy", "default-src 'self'")
		w.Header().Add("Content-Security-Policy", "sandbox allow-scripts allow-forms")
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		_, err := r.Cookie("echo")
		if got := r.Header["Cookie"]; len(got) > 1 || len(got) == 1 && (got[0] != "echo=1" || err != nil) {
			t.Errorf("the port got %q", got)
		}
		own := r.Header.Get("Origin") == server.URL
		_, _ = fmt.Fprintf(w, "%s %s own=%t foreign=%t echo=%t", r.Method, r.RequestURI, own, r.Header.Get("Origin") == "http://foreign", err == nil)
	}))
	defer server.Close()
	c, err := client.New(client.Options{BaseURL: server.URL + "/berm", Token: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	fw := &forwarder{transport: c.Port("a/b", 8000).Transport, origin: originOf(server.URL + "/berm"), prefix: strings.TrimPrefix(prefix, "/berm")}
	local := httptest.NewServer(fw.handler())
	defer local.Close()
	other := &forwarder{origin: fw.origin, prefix: fw.prefix + "1"}
	req, err := http.NewRequest(http.MethodGet, local.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Cookie", fw.cookiePrefix()+"echo=1")
	resp, err := local.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || !strings.HasSuffix(string(body), "echo=true") {
		t.Errorf("its own cookie doesn't come back: %s, %v", body, err)
	}
	for name, tt := range map[string]struct {
		method, path, origin, host string
		status                     int
		want                       string
	}{
		"plain":           {"GET", "/", "", "", 200, "GET " + prefix + "/ own=false foreign=false"},
		"escaped":         {"GET", "/a%2Fb/c%20d?q=%2F&r", "", "", 200, "GET " + prefix + "/a%2Fb/c%20d?q=%2F&r own=false foreign=false"},
		"own origin":      {"POST", "/x", local.URL, "", 200, "POST " + prefix + "/x own=true foreign=false"},
		"foreign origin":  {"POST", "/x", "http://foreign", "", 200, "POST " + prefix + "/x own=false foreign=true"},
		"localhost":       {"GET", "/", "", "localhost:1", 200, "GET " + prefix + "/ own=false foreign=false"},
		"another name":    {"GET", "/", "", "evil.example", 421, "Host isn't a loopback address"},
		"dots":            {"GET", "/%2e%2e%2f%2e%2e%2fx", "", "", 400, "for a segment"},
		"another address": {"GET", "/", "", "192.0.2.1:80", 421, "Host isn't a loopback address"},
	} {
		t.Run(name, func(t *testing.T) {
			req, err := http.NewRequest(tt.method, local.URL+tt.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = tt.host
			req.Header.Set("Authorization", "Basic of-the-caller")
			req.Header.Set("Cookie", "session=of-another-program; berm-port-x=1; "+fw.cookiePrefix()+"=1; "+other.cookiePrefix()+"a=1")
			if tt.origin != "" {
				req.Header.Set("Origin", tt.origin)
			}
			resp, err := local.Client().Transport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err != nil || resp.StatusCode != tt.status || !strings.Contains(string(body), tt.want) {
				t.Errorf("%d %q, %v, want %d %q", resp.StatusCode, body, err, tt.status, tt.want)
			}
			if tt.status != http.StatusOK {
				return
			}
			h := resp.Header
			if got := h.Get("Location"); got != "/login?x=1" {
				t.Errorf("the location is %q", got)
			}
			if got := h.Get("Set-Cookie"); got != fw.cookiePrefix()+"a=b; Path=/" {
				t.Errorf("the cookie is %q", got)
			}
			if got := h.Values("WWW-Authenticate"); len(got) > 0 {
				t.Errorf("a login is asked for: %q", got)
			}
			if got := h.Values("Content-Security-Policy"); len(got) != 1 || got[0] != "default-src 'self'" {
				t.Errorf("the policies are %q", got)
			}
		})
	}
}
