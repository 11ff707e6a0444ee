package sandboxapi_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

type storageOp struct {
	method, path, body, kind string
	status                   int
	write                    bool // the scope that it takes
	outcomes                 []outcome
}

func storageOps(t testing.TB) []storageOp {
	const tarball = "application/x-tar"
	upload, uploadKind := form(t, "a", "b")
	return []storageOp{
		{"PUT", "/api/v1/users/ada/workspace", "", "", 200, true, nil},
		{"GET", "/api/v1/workspaces/" + workspaceID, "", "", 200, false, []outcome{noWorkspace}},
		{"GET", "/api/v1/workspaces/" + workspaceID + "/usage", "", "", 200, false, []outcome{noWorkspace, noRoom}},
		{"GET", "/api/v1/workspaces/" + workspaceID + "/chats", "", "", 200, false, []outcome{noWorkspace}},
		{"PUT", chatPath, `{"workspace_id":"` + workspaceID + `"}`, jsonType, 200, true, []outcome{noWorkspace, anothers, noRoom}},
		{"GET", chatPath, "", "", 200, false, []outcome{noChat}},
		{"DELETE", chatPath, "", "", 204, true, []outcome{noChat, activeSandbox}},
		{"GET", chatPath + "/history", "", "", 200, false, []outcome{noChat, otherKind}},
		{"HEAD", chatPath + "/history", "", "", 200, false, []outcome{noChat, otherKind}},
		{"PUT", chatPath + "/history", "x", "text/markdown", 200, true, []outcome{noChat, otherKind, tooLong, noRoom, noDisk}},
		{"POST", chatPath + "/history", "x", "text/markdown", 200, true, []outcome{noChat, otherKind, tooLong, noRoom, noDisk}},
		{"GET", chatPath + "/files", "", "", 200, false, []outcome{noChat}},
		{"POST", chatPath + "/files", upload, uploadKind, 201, true, []outcome{noChat, otherKind, noRoom}},
		{"DELETE", chatPath + "/files", "", "", 200, true, []outcome{noChat, otherKind}},
		{"GET", filePath, "", "", 200, false, []outcome{noChat, noFile, otherKind}},
		{"HEAD", filePath, "", "", 200, false, []outcome{noChat, noFile, otherKind}},
		{"PUT", filePath, "x", "text/plain", 200, true, []outcome{noChat, otherKind, fileThere, noRoom, noDisk}},
		{"DELETE", filePath, "", "", 204, true, []outcome{noChat, noFile, otherKind}},
		{"GET", fileIDPath, "", "", 200, false, []outcome{noFile, otherKind}},
		{"DELETE", fileIDPath, "", "", 204, true, []outcome{noFile, otherKind}},
		{"GET", fileIDPath + "/content", "", "", 200, false, []outcome{noFile, otherKind}},
		{"HEAD", fileIDPath + "/content", "", "", 200, false, []outcome{noFile, otherKind}},
		{"GET", chatPath + "/tar", "", "", 200, false, []outcome{noChat, otherKind}},
		{"PUT", chatPath + "/tar", "x", tarball, 204, true, []outcome{noChat, otherKind, noRoom}},
		{"POST", chatPath + "/file-urls", `{"name":"report.pdf","method":"GET"}`, jsonType, 201, false, []outcome{noChat, otherKind}},
	}
}

// storageAnswers goes through every status of the calls of workspaces, chats and files.
func storageAnswers(d *door) {
	s := newShelf(d.t)
	bare := d.rebuilt(withShelf(d.t, s), func(o *sandboxapi.Options) { o.Workspaces, o.Chats = nil, nil })
	d = d.rebuilt(withShelf(d.t, s))
	for _, op := range storageOps(d.t) {
		outcomes := slices.Concat(engine, op.outcomes)
		if op.kind == jsonType {
			outcomes = append(outcomes, capacity)
		}
		d.answers(operation{op.method, op.path, op.body, op.status, false, outcomes}, op.kind, powerless, func(err error) { s.err = err })
		want := func(d *door, status int, code string, change ...func(*http.Request)) {
			d.t.Helper()
			if op.method == "HEAD" {
				code = ""
			}
			d.want(status, code, op.method, op.path, op.body, append(change, withHeader("Content-Type", op.kind))...)
		}
		want(d, op.status, "", withToken(librarian))
		if op.write {
			want(d, 403, "forbidden", withToken(browser))
		} else {
			want(d, op.status, "", withToken(browser))
		}
		want(bare, 501, "not_supported")
		want(bare, 403, "forbidden", withToken(powerless))
		if op.kind != "" && op.kind != jsonType {
			want(d, 415, "unsupported_media_type", withHeader("Content-Encoding", "br"))
		}
	}
	s.made = true
	for _, op := range storageOps(d.t) {
		if op.method == "PUT" && op.status == 200 && !strings.HasSuffix(op.path, "/history") {
			d.want(201, "", op.method, op.path, op.body, withHeader("Content-Type", cmp.Or(op.kind, "text/plain")))
		}
	}
	for _, path := range []string{chatPath + "/history", filePath, fileIDPath + "/content"} {
		d.want(206, "", "GET", path, "", withHeader("Range", "bytes=1-2"))
		d.want(416, "range", "GET", path, "", withHeader("Range", "bytes=100-"))
		d.want(304, "", "GET", path, "", withHeader("If-None-Match", "*"))
		d.want(304, "", "HEAD", path, "", withHeader("If-None-Match", "*"))
	}
	signedFileAnswers(d, bare, s)
}

// signedFileAnswers goes through those of signed URLs of files.
func signedFileAnswers(d, bare *door, s *shelf) {
	get, put := d.signFile(`{"name":"report.pdf","method":"GET"}`), d.signFile(`{"name":"report.pdf","method":"PUT","max_bytes":3}`)
	for method, path := range map[string]string{"GET": get, "HEAD": get, "PUT": put, "OPTIONS": put} {
		want := func(d *door, status int, code, path string, change ...func(*http.Request)) {
			d.t.Helper()
			body := ""
			switch method {
			case "PUT":
				body = "x"
			case "HEAD":
				code = ""
			}
			d.want(status, code, method, path, body, append([]func(*http.Request){withToken("")}, change...)...)
		}
		ok := map[string]int{"PUT": 200, "OPTIONS": 204}[method]
		s.made = false
		want(d, cmp.Or(ok, 200), "", path)
		s.made = true
		if method == "PUT" {
			want(d, 201, "", path)
			d.want(413, "too_large", "PUT", path, "1234", withToken(""))
			want(d, 415, "unsupported_media_type", path, withHeader("Content-Encoding", "br"))
		}
		want(d, 421, "host_refused", path, withHost("evil.example"))
		want(d, 403, "url_invalid", path+"x")
		want(d, 400, "malformed", path+"?colour=red")
		want(bare, 501, "not_supported", path)
		s.created = s.created.Add(1)
		if method == "OPTIONS" { // nothing is looked up
			s.created = longAgo
			continue
		}
		want(d, 410, "url_expired", path)
		s.created = longAgo
		outcomes := []outcome{away, {errors.New("boo"), 500, "internal"}, otherKind, {noChat.err, 410, "url_expired"}}
		if method == "PUT" {
			outcomes = append(outcomes, noRoom, fileThere, engine[2])
		}
		for _, o := range outcomes {
			s.err = o.err
			want(d, o.status, o.code, path)
		}
		s.err = nil
	}
	// What is said of a file comes after the chat was found to be the same.
	gone := &failing{shelf: s, err: noFile.err}
	lost := d.rebuilt(withShelf(d.t, s), func(o *sandboxapi.Options) { o.Chats = gone })
	for _, method := range []string{"GET", "HEAD", "PUT"} {
		path := lost.signFile(`{"name":"report.pdf","method":"` + strings.Replace(method, "HEAD", "GET", 1) + `"}`)
		lost.want(404, map[string]string{"GET": "chat_file_not_found", "PUT": "chat_file_not_found"}[method], method, path, "", withToken(""))
	}
	d.want(206, "", "GET", get, "", withToken(""), withHeader("Range", "bytes=1-2"))
	d.want(416, "range", "GET", get, "", withToken(""), withHeader("Range", "bytes=100-"))
	d.want(304, "", "GET", get, "", withToken(""), withHeader("If-None-Match", "*"))
	d.want(304, "", "HEAD", get, "", withToken(""), withHeader("If-None-Match", "*"))
	short := d.signFile(`{"name":"report.pdf","method":"PUT","ttl":"1s"}`)
	eventually(d.t, "it expires", func() bool { return d.send("OPTIONS", short, "", withToken("")).StatusCode == 410 })
}

// failing is a shelf that finds chats, and no content.
type failing struct {
	*shelf
	err error
}

func (f *failing) Content(context.Context, string, string, string) (*chat.Content, error) {
	return nil, f.err
}

func (f *failing) Put(context.Context, string, string, chat.PutFile, io.Reader) (chat.File, bool, error) {
	return chat.File{}, false, f.err
}

// signFile gives the path of a signed URL.
func (c *caller) signFile(body string) string {
	c.t.Helper()
	a := c.want(201, "", "POST", chatPath+"/file-urls", body)
	var u apitype.FileURL
	a.decode(c.t, &u)
	return u.Path
}

func TestWorkspaces(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	s.made = true
	var ws apitype.Workspace
	d.want(201, "", "PUT", "/api/v1/users/a%20%C3%BC%3F/workspace", "").decode(t, &ws)
	if want := (apitype.Workspace{WorkspaceID: workspaceID, UserID: "a ü?", CreatedAt: longAgo}); ws != want {
		t.Errorf("got %+v", ws)
	}
	d.want(400, "malformed", "PUT", "/api/v1/users/a%2Fb/workspace", "")
	d.want(400, "malformed", "PUT", "/api/v1/users/ada/workspace", strings.Repeat("x", 1<<13))

	usage := "/api/v1/workspaces/" + workspaceID + "/usage"
	if a := d.want(200, "", "GET", usage, ""); strings.TrimSpace(a.body) != `{"workspace_id":"`+workspaceID+`","used_bytes":3,"quota_bytes":null,"enforcement":"none"}` {
		t.Errorf("got %s", a.body)
	}
	s.usage.QuotaBytes, s.usage.Enforcement = 7, "hard"
	if a := d.want(200, "", "GET", usage, ""); !strings.Contains(a.body, `"quota_bytes":7,"enforcement":"hard"`) {
		t.Errorf("got %s", a.body)
	}
}

// TestChatPages checks what pages of both lists are asked for, and how one leads to the next.
func TestChatPages(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	s.more, s.list = true, chat.FileList{Files: []chat.File{{ID: fileID, ChatID: "chat-7", Name: "ü \u2028.txt"}}, More: true, Beyond: true}
	for path, tt := range map[string]struct {
		most int
		last string
	}{
		"/api/v1/workspaces/" + workspaceID + "/chats": {100, "chat-7"},
		chatPath + "/files":                            {1000, "ü \u2028.txt"},
	} {
		a := d.want(200, "", "GET", path, "")
		var page struct {
			NextCursor string `json:"next_cursor"`
			Truncated  bool
		}
		a.decode(t, &page)
		if s.limit != tt.most || s.after != "" || page.NextCursor == "" || page.Truncated != (tt.most == 1000) {
			t.Errorf("%s: it asked for %d after %q, and answered %s", path, s.limit, s.after, a.body)
		}
		d.want(200, "", "GET", path+"?limit=7&cursor="+page.NextCursor, "")
		if s.limit != 7 || s.after != tt.last {
			t.Errorf("%s: it asked for %d after %q", path, s.limit, s.after)
		}
		for _, q := range []string{"limit=0", "limit=1001", "limit=x", "limit=", "cursor=", "cursor=x", "cursor=e30", "cursor=" + page.NextCursor + "A"} {
			d.want(422, "validation", "GET", path+"?"+q, "")
		}
		for _, q := range []string{"limit=1&limit=2", "limit=%zz", "limit=1;cursor=2", "cursor[]=x"} {
			d.want(400, "malformed", "GET", path+"?"+q, "")
		}
	}
	s.more, s.list = false, chat.FileList{}
	for path, want := range map[string]string{chatPath + "/files": `{"files":[],"truncated":false}`} {
		if a := d.want(200, "", "GET", path, ""); strings.TrimSpace(a.body) != want {
			t.Errorf("got %s", a.body)
		}
	}
	var one apitype.ChatFileList
	d.want(200, "", "GET", chatPath+"/files?name=a%2Fb", "").decode(t, &one)
	if len(one.Files) != 1 || one.Files[0].Name != "a/b" || one.NextCursor != "" {
		t.Errorf("got %+v", one)
	}
	for _, err := range []error{noFile.err, otherKind.err} {
		s.named = err
		if a := d.want(200, "", "GET", chatPath+"/files?name=x", ""); strings.TrimSpace(a.body) != `{"files":[],"truncated":false}` {
			t.Errorf("got %s", a.body)
		}
	}
	s.named = noChat.err
	d.want(404, "chat_not_found", "GET", chatPath+"/files?name=x", "")
}

func TestChats(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	id := "2F1C0C0E-7B0E-4C51-9A0B-3F6C5D1E8A77"
	var c apitype.Chat
	body := `{"workspace_id":"` + workspaceID + `"}`
	d.want(200, "", "PUT", "/api/v1/chats/"+id, body).decode(t, &c)
	if want := (apitype.Chat{ChatID: strings.ToLower(id), WorkspaceID: workspaceID, CreatedAt: longAgo}); c != want {
		t.Errorf("got %+v", c)
	}
	for _, bad := range []string{"..", "-a", "a%20b", "%00", "a%FFb", strings.Repeat("k", 129), "%E2%80%A8", ".staging"} {
		d.want(422, "validation", "PUT", "/api/v1/chats/"+bad, body)
		d.want(422, "validation", "GET", "/api/v1/chats/"+bad+"/files/x", "")
	}
	d.want(400, "malformed", "PUT", "/api/v1/chats/a%2fb", body)
	d.want(422, "validation", "PUT", chatPath, `{}`)
	d.want(422, "validation", "PUT", chatPath, `{"workspace_id":7}`)
	d.want(404, "no_route", "GET", "/api/v1/chats/", "")
	d.want(405, "method_not_allowed", "POST", chatPath, "")
	if a := d.want(200, "", "GET", chatPath+"/tar", ""); a.body != s.content || a.Header.Get("Content-Disposition") != "attachment; filename=chat-7.tar" {
		t.Errorf("got %q, %v", a.body, a.Header)
	}
	s.named = errors.New("boo") // in the midst of an archive
	if !d.brokenOff(chatPath + "/tar") {
		t.Error("an archive that was broken off looks whole")
	}
}

func TestHistory(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	const path = chatPath + "/history"
	a := d.want(200, "", "GET", path, "")
	for name, want := range map[string]string{
		"Content-Type": "text/markdown; charset=utf-8", "Content-Length": "10", "ETag": `W/"1"`, "Content-Security-Policy": "sandbox", "Berm-File-Id": "",
	} {
		if got := a.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	var h apitype.ChatHistory
	d.want(200, "", "PUT", path, "new").decode(t, &h)
	d.want(200, "", "POST", path, "and", withHeader("Content-Type", "x")) // whatever it is said to be
	d.want(200, "", "POST", path, "more", chunked)
	if want := (apitype.ChatHistory{SizeBytes: 10, ModifiedAt: longAgo}); h != want {
		t.Errorf("got %+v", h)
	}
	want := []chat.PutFile{{Name: "put", Size: 3}, {Name: "append", Size: 3}, {Name: "append", Size: -1}}
	if !slices.Equal(s.puts, want) || !slices.Equal(s.bodies, []string{"new", "and", "more"}) {
		t.Errorf("got %+v, %q", s.puts, s.bodies)
	}
	for _, header := range []string{"If-None-Match", "If-Match", "If-Unmodified-Since", "Content-Range"} {
		d.want(422, "validation", "PUT", path, "x", withHeader(header, "*"))
		d.want(422, "validation", "POST", path, "x", withHeader(header, "*"))
	}
}

// chunked hides how long a body is.
func chunked(r *http.Request) {
	r.Body, r.ContentLength = io.NopCloser(struct{ io.Reader }{r.Body}), -1
}

func logInto(l *logged) func(*sandboxapi.Options) {
	return func(o *sandboxapi.Options) {
		o.Gate.Logger = slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
}

// TestStorageLog checks that the log tells of the chat, and of no file's name.
func TestStorageLog(t *testing.T) {
	t.Parallel()
	log := &logged{}
	d, _ := newLibrary(t, logInto(log))
	path := d.signFile(`{"name":"report.pdf","method":"GET"}`)
	d.want(200, "", "GET", path, "", withToken(""))
	d.want(200, "", "GET", filePath, "")
	d.want(200, "", "GET", fileIDPath, "")
	got := log.String()
	for _, want := range []string{`route=/f/{signature}`, `route=/api/v1/chats/{chat_id}/files/{name}`, `route=/api/v1/files/{file_id}`, "key=chat-7", "level=INFO"} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is missing in %s", want, got)
		}
	}
	if n := strings.Count(got, "key=chat-7"); n != 4 {
		t.Errorf("%d of 4 lines tell of the chat", n)
	}
	for _, bad := range []string{"report.pdf", fileID, strings.TrimPrefix(path, "/f/")} {
		if strings.Contains(got, bad) {
			t.Errorf("the log has %s", bad)
		}
	}
}

// TestRoutes checks that no path of storage is taken for another, and that none is open to
// tokens of other scopes but those that are signed.
func TestRoutes(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	for _, tt := range []struct {
		method, path string
		status       int
		about        string
	}{
		{"GET", chatPath + "/files/files", 200, "red chat-7 files"},
		{"GET", chatPath + "/files/history", 200, "red chat-7 history"},
		{"GET", "/api/v1/chats/files/files/tar", 200, "red files tar"},
		{"GET", "/api/v1/chats/tar/history", 200, "red tar"},
		{"DELETE", "/api/v1/chats/file-urls", 204, "red file-urls"},
		{"DELETE", chatPath + "/files", 200, "red chat-7"},
		{"DELETE", chatPath + "/files/x", 204, "red chat-7 x"},
		{"GET", "/api/v1/files/content", 200, "red content"},
		{"GET", "/api/v1/workspaces/chats/usage", 200, "red chats"},
		{"GET", chatPath + "/files/", 404, ""},
		{"GET", chatPath + "/files/a/b", 404, ""},
		{"GET", "/api/v1/files", 404, ""},
		{"GET", "/f/", 404, ""},
		{"GET", "/f/x/y", 404, ""},
		{"GET", "/fx", 404, ""},
		{"PATCH", filePath, 405, ""},
		{"POST", "/f/x", 405, ""},
		{"GET", chatPath + "/file-urls", 405, ""},
	} {
		s.asked = nil
		resp, err := http.DefaultClient.Do(d.request(tt.method, tt.path, nil))
		must(t, err)
		_ = resp.Body.Close()
		if got := strings.Join(s.asked, " "); resp.StatusCode != tt.status || got != tt.about {
			t.Errorf("%s %s: got %d about %q", tt.method, tt.path, resp.StatusCode, got)
		}
	}
	var doc struct {
		Paths map[string]map[string]json.RawMessage
	}
	must(t, json.Unmarshal(sandboxapi.Document(), &doc))
	n := 0
	for path, item := range doc.Paths {
		if strings.Contains(path, "/chats") || strings.Contains(path, "/workspace") || strings.Contains(path, "{file_id}") {
			n += len(item) - 1
		}
	}
	if n != len(storageOps(t)) {
		t.Errorf("the document has %d calls of storage, and the tests know %d", n, len(storageOps(t)))
	}
}
