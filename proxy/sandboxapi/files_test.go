package sandboxapi_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

func TestReadAndWriteFiles(t *testing.T) {
	h := newHouse(t, nil)
	a := h.want(200, "", "PUT", at("", "/workspace/a/b.txt", "mkdir", "true", "mode", "0600"), "0123456789")
	var info apitype.FileInfo
	a.decode(t, &info)
	if info.Path != "/workspace/a/b.txt" || info.Type != "file" || info.Size != 10 || info.Mode != "0600" || info.ModifiedAt.IsZero() {
		t.Errorf("got %+v", info)
	}
	a = h.want(200, "", "GET", at("", "/workspace/a/b.txt"), "")
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
	h.want(304, "", "GET", at("", "/workspace/a/b.txt"), "", withHeader("If-None-Match", `"x", `+etag))
	h.want(304, "", "HEAD", at("", "/workspace/a/b.txt"), "", withHeader("If-None-Match", etag))
	a = h.want(200, "", "HEAD", at("", "/workspace/a/b.txt"), "")
	if a.ContentLength != 10 || a.Header.Get("ETag") != etag {
		t.Errorf("got %v", a.Header)
	}
	h.want(422, "", "HEAD", at("", "/workspace/a"), "")
	h.want(404, "", "HEAD", at("", "/workspace/none"), "")

	h.want(412, "precondition_failed", "PUT", at("", "/workspace/a/b.txt"), "x", withHeader("If-None-Match", "*"))
	h.want(200, "", "PUT", at("", "/workspace/a/new"), "x", withHeader("If-None-Match", "*"))
	h.want(200, "", "PUT", at("", "/workspace/a/b.txt", "append", "true"), "abc")
	if a = h.want(200, "", "GET", at("", "/workspace/a/b.txt"), ""); a.body != "0123456789abc" || a.Header.Get("ETag") == etag {
		t.Errorf("got %q, %v", a.body, a.Header)
	}
	h.put("/workspace/empty", "")
	if a = h.want(200, "", "GET", at("", "/workspace/empty"), ""); a.body != "" {
		t.Errorf("got %q", a.body)
	}

	h.want(404, "file_not_found", "GET", at("", "/workspace/none"), "")
	h.want(404, "file_not_found", "PUT", at("", "/workspace/none/x"), "x")
	h.want(404, "not_found", "GET", strings.Replace(at("", "/x"), "/k/", "/other/", 1), "")
	h.want(422, "validation", "GET", at("", "/workspace/a"), "")
	h.want(422, "validation", "GET", at("", "relative"), "")
	h.want(422, "validation", "GET", filesPath, "")
	h.want(422, "validation", "GET", at("", "/a\x00b"), "")
	h.want(422, "validation", "GET", at("", "/"+strings.Repeat("a", 4096)), "")
	h.want(422, "validation", "GET", at("", "/a", "path_base64", "L2E="), "")
	h.want(422, "validation", "GET", filesPath+"?path_base64=%2A", "")
	h.want(400, "malformed", "GET", at("", "/a", "colour", "red"), "")
	h.want(422, "validation", "PUT", at("", "/x", "mode", "1777"), "x")
	h.want(422, "validation", "PUT", at("", "/x", "mode", "9"), "x")
	h.want(422, "validation", "PUT", at("", "/x"), "x", withHeader("If-None-Match", `"e"`))
	h.want(422, "validation", "PUT", at("", "/x"), "x", withHeader("If-Match", `"e"`))
	h.want(422, "validation", "PUT", at("", "/x"), "x", withHeader("Content-Range", "bytes 0-0/1"))
	h.want(422, "validation", "PUT", at("", "/x", "append", "true"), "x", withHeader("If-None-Match", "*"))
	h.want(415, "unsupported_media_type", "PUT", at("", "/x"), "x", withHeader("Content-Encoding", "gzip"))
	h.want(404, "file_not_found", "GET", at("", "/x"), "")

	for _, op := range [][2]string{{"GET", ""}, {"HEAD", ""}, {"GET", "/stat"}, {"GET", "/list"}, {"GET", "/tar"}} {
		h.want(200, "", op[0], at(op[1], map[bool]string{true: "/workspace", false: "/workspace/a/b.txt"}[op[1] == "/list"]), "", withToken(reader))
	}
	for _, op := range [][2]string{{"PUT", ""}, {"DELETE", ""}, {"PUT", "/tar"}} {
		h.want(403, "forbidden", op[0], at(op[1], "/workspace/a/b.txt"), "x", withToken(reader))
	}
	for _, call := range []string{"/mkdir", "/move", "/copy"} {
		h.want(403, "forbidden", "POST", filesPath+call, "{}", withToken(reader))
	}
	h.want(403, "forbidden", "GET", at("", "/workspace/a/b.txt"), "", withToken(powerless))
	h.want(401, "unauthorized", "GET", at("", "/workspace/a/b.txt"), "", withToken(""))
}

// TestRanges asks for parts of a sandbox's file and of a chat's.
func TestRanges(t *testing.T) {
	h := newHouse(t, nil)
	h.put("/f", "0123456789")
	h.put("/empty", "")
	d, s := newLibrary(t)
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
		s.content = map[string]string{"/f": "0123456789"}[tt.name]
		for path, c := range map[string]caller{at("", tt.name): h.caller, filePath: d.caller} {
			a := c.want(tt.status, map[bool]string{true: "range"}[tt.status == 416], "GET", path, "", withHeader("Range", tt.header))
			if got := a.Header.Get("Content-Range"); got != tt.place || tt.status != 416 && (a.body != tt.body || a.ContentLength != int64(len(tt.body))) {
				t.Errorf("%s of %s: got %q, %q of %d bytes", tt.header, path, got, a.body, a.ContentLength)
			}
			if tt.status == 416 && (a.Header.Get("ETag") != "" || a.Header.Get("Content-Disposition") != "") {
				t.Errorf("%s of %s: an error has the file's header: %v", tt.header, path, a.Header)
			}
		}
	}
	s.content = "0123456789"
	for path, c := range map[string]caller{at("", "/f"): h.caller, filePath: d.caller} {
		if a := c.want(200, "", "GET", path, "", withHeader("Range", "bytes=1-2"), withHeader("If-Range", `W/"1"`)); a.body != s.content {
			t.Errorf("%s: got %q", path, a.body)
		}
	}
	h.want(404, "file_not_found", "GET", at("", "/none"), "", withHeader("Range", "bytes=0-1"))
	h.want(422, "validation", "GET", at("", "/"), "", withHeader("Range", "bytes=0-1"))
}

func TestTreeOfFiles(t *testing.T) {
	h := newHouse(t, nil)
	jsonBody := withHeader("Content-Type", "application/json")
	h.want(204, "", "POST", filesPath+"/mkdir", `{"path":"/d/e","parents":true,"mode":"0700"}`, jsonBody)
	h.want(404, "file_not_found", "POST", filesPath+"/mkdir", `{"path":"/x/y"}`, jsonBody)
	h.want(409, "file_exists", "POST", filesPath+"/mkdir", `{"path":"/d"}`, jsonBody)
	h.want(422, "validation", "POST", filesPath+"/mkdir", `{"path":"/y","mode":"rwx"}`, jsonBody)
	h.want(422, "validation", "POST", filesPath+"/mkdir", `{}`, jsonBody)
	h.want(400, "malformed", "POST", filesPath+"/mkdir", `{"path":"/y","colour":"red"}`, jsonBody)
	h.put("/d/e/one.go", "package one // TODO\nx\nTODO again\n")
	h.put("/d/two.txt", "todo")
	var info apitype.FileInfo
	h.want(200, "", "GET", at("/stat", "/d"), "").decode(t, &info)
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
		got := paths(h.want(200, "", "GET", tt.path, ""))
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.path, diff)
		}
	}
	for _, bad := range []string{
		at("/list", "/d", "depth", "0"), at("/list", "/d", "depth", "101"), at("/list", "/d", "depth", "x"), at("/list", "/d", "limit", "0"),
		at("/list", "/d", "limit", "10001"), at("/glob", "/d"), at("/glob", "/d", "pattern", "[a"), at("/search", "/d"),
		at("/search", "/d", "pattern", "("), at("/search", "/d", "pattern", "x", "literal", "yes"), at("/search", "/d", "pattern", "x", "include", "[a"),
	} {
		h.want(422, "validation", "GET", bad, "")
	}
	h.want(404, "file_not_found", "GET", at("/list", "/none"), "")
	h.want(404, "file_not_found", "GET", at("/list", "/none"), "", withHeader("Accept", "application/x-ndjson"))

	var found apitype.FileMatches
	h.want(200, "", "GET", at("/search", "/d", "pattern", "todo", "ignore_case", "true", "include", "*.go"), "").decode(t, &found)
	want := apitype.FileMatches{Matches: []apitype.FileMatch{
		{Path: "/d/e/one.go", Line: 1, Text: "package one // TODO"}, {Path: "/d/e/one.go", Line: 3, Text: "TODO again"},
	}}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Error(diff)
	}
	a := h.want(200, "", "GET", at("/list", "/d", "depth", "9"), "", withHeader("Accept", "application/x-ndjson"))
	if lines := strings.Count(a.body, "\n"); lines != 3 || a.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("got %d lines of %s", lines, a.Header.Get("Content-Type"))
	}
	a = h.want(200, "", "GET", at("/glob", "/d", "pattern", "nothing"), "", withHeader("Accept", "application/x-ndjson"))
	if a.body != "" || a.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("got %q of %s", a.body, a.Header.Get("Content-Type"))
	}

	a = h.want(200, "", "GET", at("/tar", "/d/e"), "")
	if a.Header.Get("Content-Type") != "application/x-tar" || a.Header.Get("Content-Disposition") != "attachment; filename=e.tar" {
		t.Errorf("got %v", a.Header)
	}
	h.want(204, "", "PUT", at("/tar", "/d"), a.body)
	h.want(404, "file_not_found", "PUT", at("/tar", "/none"), a.body)
	h.want(422, "validation", "PUT", at("/tar", "/d"), "this is no archive"+strings.Repeat("x", 1024))
	h.want(404, "file_not_found", "GET", at("/tar", "/none"), "")

	h.want(204, "", "POST", filesPath+"/move", `{"from":"/d/two.txt","to":"/d/three.txt"}`, jsonBody)
	h.want(404, "file_not_found", "GET", at("", "/d/two.txt"), "")
	h.want(204, "", "POST", filesPath+"/copy", `{"from":"/d/e","to":"/copy"}`, jsonBody)
	if a := h.want(200, "", "GET", at("", "/copy/one.go"), ""); !strings.HasPrefix(a.body, "package one") {
		t.Errorf("got %q", a.body)
	}
	a = h.want(409, "file_exists", "POST", filesPath+"/copy", `{"from":"/d/three.txt","to":"/copy/one.go"}`, jsonBody)
	if p := a.problem(t); !strings.Contains(p.Detail, `"/copy/one.go"`) {
		t.Errorf("it is about %q", p.Detail)
	}
	h.want(204, "", "POST", filesPath+"/copy", `{"from":"/d/three.txt","to":"/copy/one.go","replace":true}`, jsonBody)
	h.want(409, "file_wrong_kind", "DELETE", at("", "/copy"), "")
	h.want(204, "", "DELETE", at("", "/copy", "recursive", "true"), "")
	h.want(404, "file_not_found", "DELETE", at("", "/copy"), "")
}

func TestNamesThatAreNotText(t *testing.T) {
	h := newHouse(t, nil)
	name := "/d/caf\xe9\n\"\u202e"
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding} {
		h.want(200, "", "PUT", filesPath+"?mkdir=true&path_base64="+enc.EncodeToString([]byte(name)), "x") // with its plus signs bare
	}
	var list apitype.FileList
	h.want(200, "", "GET", at("/list", "/d"), "").decode(t, &list)
	if len(list.Files) != 1 || string(list.Files[0].PathBase64) != name || list.Files[0].Path != "/d/caf\ufffd\n\"\u202e" {
		t.Fatalf("got %+v", list)
	}
	a := h.want(200, "", "GET", filesPath+"?path_base64="+url.QueryEscape(base64.StdEncoding.EncodeToString(list.Files[0].PathBase64)), "")
	if cd := a.Header.Get("Content-Disposition"); a.body != "x" || !strings.HasPrefix(cd, "attachment; filename*=utf-8''caf%EF%BF%BD%0A%22") {
		t.Errorf("got %q, %q", a.body, cd)
	}
	body, err := json.Marshal(apitype.MoveRequest{FromBase64: []byte(name), ToBase64: []byte("/d/\xff")})
	must(t, err)
	h.want(204, "", "POST", filesPath+"/move", string(body), withHeader("Content-Type", "application/json"))
	var info apitype.FileInfo
	h.want(200, "", "GET", filesPath+"/stat?path_base64=L2Qv_w==", "").decode(t, &info)
	if string(info.PathBase64) != "/d/\xff" {
		t.Errorf("got %+v", info)
	}
}

func TestWatchDrains(t *testing.T) {
	h := newHouse(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	h.url = "http://" + l.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- proxy.Serve(ctx, l, h.Handler, proxy.ServeOptions{}) }()
	resp, err := h.client.Do(h.request("GET", at("/watch", "/workspace"), nil))
	must(t, err)
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
	drainUnread(t, newHouse(t, nil).Handler, at("/watch", "/workspace"))
}

func TestWatchFiles(t *testing.T) {
	h := newHouse(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	h.want(404, "file_not_found", "GET", at("/watch", "/none"), "")
	resp, err := h.client.Do(h.request("GET", at("/watch", "/workspace", "recursive", "true"), nil).WithContext(ctx))
	must(t, err)
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
		must(t, json.Unmarshal([]byte(data), &e))
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
