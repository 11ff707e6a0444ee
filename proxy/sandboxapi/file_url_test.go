package sandboxapi_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

func TestFileURLs(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	start := time.Now()
	a := d.want(201, "", "POST", chatPath+"/file-urls", `{"name":"ü b","method":"GET","ttl":"10m"}`)
	var u apitype.FileURL
	a.decode(t, &u)
	if u.URL != d.url+u.Path || u.Method != "GET" || u.ExpiresAt.Before(start.Add(10*time.Minute)) || u.ExpiresAt.After(time.Now().Add(10*time.Minute+time.Second)) {
		t.Errorf("got %+v", u)
	}
	get := u.Path
	a = d.want(200, "", "GET", get, "", withToken(""), withHeader("Origin", "https://anywhere.example"))
	if !slices.Equal(s.asked, []string{"red", "chat-7"}) || a.body != s.content {
		t.Errorf("it asked for %q", s.asked)
	}
	if got := a.Header.Get("Content-Disposition"); got != "attachment; filename*=utf-8''%C3%BC%20b" {
		t.Errorf("Content-Disposition is %q", got)
	}
	s.made = true
	put := d.signFile(`{"name":"up","method":"PUT","content_type":"text/csv","max_bytes":4}`)
	d.want(201, "", "PUT", put, "1234", withToken(""), withHeader("Content-Type", "Text/CSV"), withHeader("Origin", "null"))
	d.want(201, "", "PUT", put, "123", withToken(""), withHeader("Content-Type", "text/csv"), chunked, withHeader("If-None-Match", "*"))
	want := []chat.PutFile{{Name: "up", ContentType: "Text/CSV", Size: -1}, {Name: "up", ContentType: "text/csv", Size: -1, NoClash: true}}
	if !slices.Equal(s.puts, want) || !slices.Equal(s.bodies, []string{"1234", "123"}) {
		t.Errorf("got %+v, %q", s.puts, s.bodies)
	}
	// Only what was signed.
	d.want(413, "too_large", "PUT", put, "12345", withToken(""), withHeader("Content-Type", "text/csv"))
	d.want(413, "too_large", "PUT", put, "12345", withToken(""), withHeader("Content-Type", "text/csv"), chunked)
	for _, kind := range []string{"", "text/html", "text/csv; header=present"} {
		d.want(415, "unsupported_media_type", "PUT", put, "1", withToken(""), withHeader("Content-Type", kind))
	}
	d.want(403, "url_invalid", "PUT", get, "1", withToken(""), withHeader("Content-Type", "text/csv"))
	d.want(403, "url_invalid", "GET", put, "", withToken(""))
	if a := d.want(403, "", "HEAD", put, "", withToken("")); a.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("a page isn't told why: %v", a.Header)
	}
	if len(s.puts) != 2 {
		t.Errorf("got %+v", s.puts)
	}
	for method, path := range map[string]string{"GET, HEAD": get, "PUT": put} {
		a := d.want(204, "", "OPTIONS", path, "", withToken(""), withHeader("Origin", "https://anywhere.example"),
			withHeader("Access-Control-Request-Method", "PUT"), withHeader("Access-Control-Request-Headers", "content-type"))
		if a.Header.Get("Access-Control-Allow-Methods") != method || !strings.Contains(a.Header.Get("Access-Control-Allow-Headers"), "Content-Type") {
			t.Errorf("got %v", a.Header)
		}
	}
	// A chat made anew isn't reached, also if it comes at the last moment.
	puts := len(s.puts)
	s.swap = func() { s.created = s.created.Add(time.Nanosecond) }
	d.want(410, "url_expired", "PUT", put, "1", withToken(""), withHeader("Content-Type", "text/csv"))
	s.swap = nil
	d.want(410, "url_expired", "PUT", put, "1", withToken(""), withHeader("Content-Type", "text/csv"))
	d.want(410, "url_expired", "GET", get, "", withToken(""))
	if len(s.puts) != puts {
		t.Errorf("got %+v", s.puts)
	}
}

func TestForgedFileURLs(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	text, sum, forge := forger(t, strings.TrimPrefix(d.signFile(`{"name":"report.pdf","method":"GET"}`), "/f/"))
	s.asked = nil
	for name, signature := range map[string]string{
		"another file": forge("n", "x") + "." + sum, "another tenant": forge("t", "blue") + "." + sum, "another chat": forge("c", "x") + "." + sum,
		"another method": forge("p", true) + "." + sum, "later": forge("e", time.Now().Add(48*time.Hour).Unix()) + "." + sum, "no limit": forge("b", 0) + "." + sum,
		"another life": forge("m", 0) + "." + sum, "half": text + "." + sum[:20], "no sum": text, "empty sum": text + ".", "nothing": ".", "more": text + "." + sum + ".x", "padding": text + "." + sum + "=",
	} {
		for _, method := range []string{"GET", "PUT", "OPTIONS"} {
			if a := d.send(method, "/f/"+signature, "", withToken("")); a.StatusCode != 403 || a.problem(t).Code != "url_invalid" || strings.Contains(a.body, "report") {
				t.Errorf("%s: got %d %s", name, a.StatusCode, a.body)
			}
		}
	}
	if s.asked != nil {
		t.Errorf("it asked for %q", s.asked)
	}
	d.want(404, "no_route", "GET", "/f/"+text+"."+sum+"/", "", withToken(""))
	d.want(400, "malformed", "GET", "/f/a%2fb", "", withToken(""))
	other, _ := newLibrary(t)
	other.want(403, "url_invalid", "GET", "/f/"+text+"."+sum, "", withToken(""))
}

// TestSignaturesArePurposeful checks that what is signed for one kind of address isn't good
// for the other.
func TestSignaturesArePurposeful(t *testing.T) {
	t.Parallel()
	h := newHouse(t, nil, func(o *sandboxapi.Options) {
		s := newShelf(t)
		o.Workspaces, o.Chats = desk{s}, s
	})
	port := strings.Trim(strings.TrimPrefix(h.signed("k", 8000, "1h").Path, "/p/"), "/")
	h.want(403, "url_invalid", "GET", "/f/"+port, "", withToken(""))
	var u apitype.FileURL
	h.want(201, "", "POST", chatPath+"/file-urls", `{"name":"x","method":"GET"}`, withHeader("Content-Type", "application/json")).decode(t, &u)
	h.want(200, "", "GET", u.Path, "", withToken(""))
	h.want(403, "url_invalid", "GET", "/p/"+strings.TrimPrefix(u.Path, "/f/")+"/", "", withToken(""))
}

func TestFileURLRequests(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	const path = chatPath + "/file-urls"
	for _, tt := range []struct {
		status     int
		code, body string
		change     []func(*http.Request)
	}{
		{201, "", `{"name":"x","method":"GET"}`, []func(*http.Request){withToken(browser)}},
		{403, "forbidden", `{"name":"x","method":"PUT"}`, []func(*http.Request){withToken(browser)}},
		{201, "", `{"name":"x","method":"PUT","ttl":"168h","content_type":"a/b","max_bytes":1}`, nil},
		{201, "", `{"name":"x","method":"PUT","ttl":null,"content_type":null,"max_bytes":null}`, nil},
		{422, "validation", `{"name":"x"}`, nil},
		{422, "validation", `{"name":"x","method":"get"}`, nil},
		{422, "validation", `{"name":"x","method":"DELETE"}`, nil},
		{422, "validation", `{"name":"x","method":"GET","max_bytes":1}`, nil},
		{422, "validation", `{"name":"x","method":"GET","content_type":"a/b"}`, nil},
		{422, "validation", `{"name":"x","method":"PUT","max_bytes":0}`, nil},
		{422, "validation", `{"name":"x","method":"PUT","max_bytes":-1}`, nil},
		{422, "validation", `{"name":"x","method":"PUT","content_type":"a"}`, nil},
		{422, "validation", `{"name":"x","method":"GET","ttl":"169h"}`, nil},
		{422, "validation", `{"name":"x","method":"GET","ttl":0}`, nil},
		{400, "malformed", `{"name":"x","method":"GET","path":"y"}`, nil},
	} {
		d.want(tt.status, tt.code, "POST", path, tt.body, tt.change...)
	}
	s.named = noFile.err
	d.want(201, "", "POST", path, `{"name":"x","method":"PUT"}`) // it may come
	s.named = engine[2].err
	d.want(422, "validation", "POST", path, `{"name":"..","method":"PUT"}`)
	if !slices.Equal(s.asked, []string{"red", "chat-7", ".."}) {
		t.Errorf("it asked for %s", fmt.Sprint(s.asked))
	}
}
