package sandboxapi_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
)

// archive is the API on real workspaces and chats, with a chat "c" that is empty.
type archive struct {
	*house
	dir       string // of the chat
	workspace string
}

const archiveQuota = 1 << 20

func newArchive(t *testing.T) *archive {
	t.Helper()
	root := t.TempDir()
	a := &archive{dir: filepath.Join(root, ".tenants", "red", "c")}
	db, err := store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "db")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	a.house = newHouse(t, nil, func(o *sandboxapi.Options) {
		m := o.Manager.(*lifecycle.Service)
		held, err := quota.New(context.Background(), quota.Options{Store: db, Root: root, QuotaBytes: archiveQuota, Off: true})
		if err != nil {
			t.Fatal(err)
		}
		chats, err := chat.New(context.Background(), chat.Options{Root: root, Store: db, Quotas: held, Sandboxes: m})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = chats.Close(context.Background()) })
		o.Workspaces, o.Chats = held, chats
	})
	a.client.Transport = openapitest.New(t).Transport(a.client.Transport)
	var ws apitype.Workspace
	a.send(201, "", "PUT", "/api/v1/users/ada/workspace", "").decode(t, &ws)
	a.workspace = ws.WorkspaceID
	a.send(201, "", "PUT", "/api/v1/chats/c", a.owner(), asJSON)
	return a
}

var asJSON = withHeader("Content-Type", "application/json")

func (a *archive) owner() string { return `{"workspace_id":"` + a.workspace + `"}` }

// names are the chat's files as they are listed, by pages of a size.
func (a *archive) names(limit int) (names []string, pages int) {
	a.t.Helper()
	path := fmt.Sprintf("/api/v1/chats/c/files?limit=%d", limit)
	for next := ""; pages == 0 || next != ""; pages++ {
		var page apitype.ChatFileList
		a.send(200, "", "GET", path+next, "").decode(a.t, &page)
		for _, f := range page.Files {
			names = append(names, f.Name)
		}
		if next = ""; page.NextCursor != "" {
			next = "&cursor=" + page.NextCursor
		}
	}
	return names, pages
}

func (a *archive) used() int64 {
	a.t.Helper()
	var u apitype.WorkspaceUsage
	a.send(200, "", "GET", "/api/v1/workspaces/"+a.workspace+"/usage", "").decode(a.t, &u)
	return u.UsedBytes
}

func TestChatService(t *testing.T) {
	t.Parallel()
	a := newArchive(t)
	a.send(200, "", "PUT", "/api/v1/users/ada/workspace", "")
	a.send(200, "", "PUT", "/api/v1/chats/c", a.owner(), asJSON)
	var other apitype.Workspace
	a.send(201, "", "PUT", "/api/v1/users/bob/workspace", "").decode(t, &other)
	a.send(409, "chat_conflict", "PUT", "/api/v1/chats/c", `{"workspace_id":"`+other.WorkspaceID+`"}`, asJSON)
	a.send(404, "workspace_not_found", "PUT", "/api/v1/chats/d", `{"workspace_id":"`+sessionID+`"}`, asJSON)
	a.send(404, "workspace_not_found", "GET", "/api/v1/workspaces/"+sessionID, "")
	a.send(404, "chat_not_found", "GET", "/api/v1/chats/d", "")
	a.send(422, "validation", "PUT", "/api/v1/users//workspace", "")
	var chats apitype.ChatList
	a.send(200, "", "GET", "/api/v1/workspaces/"+a.workspace+"/chats", "").decode(t, &chats)
	if len(chats.Chats) != 1 || chats.Chats[0].ChatID != "c" || chats.NextCursor != "" {
		t.Errorf("got %+v", chats)
	}

	const files, one = "/api/v1/chats/c/files", "/api/v1/chats/c/files/a.csv"
	var f, again apitype.ChatFile
	got := a.send(201, "", "PUT", one, "0123456789", withHeader("Content-Type", "text/csv"))
	got.decode(t, &f)
	if b, err := os.ReadFile(filepath.Join(a.dir, "a.csv")); err != nil || string(b) != "0123456789" || f.SizeBytes != 10 || *f.ContentType != "text/csv" {
		t.Errorf("got %q, %v, %+v", b, err, f)
	}
	etag := got.Header.Get("ETag")
	a.send(304, "", "GET", one, "", withHeader("If-None-Match", etag))
	got = a.send(206, "", "GET", one, "", withHeader("Range", "bytes=2-4"))
	if got.body != "234" || got.Header.Get("Berm-File-Id") != f.FileID || got.Header.Get("ETag") != etag {
		t.Errorf("got %q, %v", got.body, got.Header)
	}
	a.send(412, "precondition_failed", "PUT", one, "x", withHeader("If-None-Match", "*"))
	a.send(422, "validation", "PUT", one, "x", func(r *http.Request) { r.ContentLength = -1 }, withHeader("If-None-Match", `"x"`))
	got = a.send(200, "", "PUT", one, "new")
	got.decode(t, &again)
	if again.FileID != f.FileID || again.ContentType != nil || !again.CreatedAt.Equal(f.CreatedAt) || got.Header.Get("ETag") == etag {
		t.Errorf("got %+v, %v", again, got.Header)
	}
	a.send(200, "", "GET", one, "", withHeader("If-None-Match", etag))
	if got := a.send(200, "", "GET", "/api/v1/files/"+f.FileID+"/content", ""); got.body != "new" || got.Header.Get("Content-Type") != "application/octet-stream" {
		t.Errorf("got %q, %v", got.body, got.Header)
	}
	a.send(200, "", "GET", "/api/v1/files/"+f.FileID, "").decode(t, &f)
	if diff := cmp.Diff(again, f); diff != "" {
		t.Error(diff)
	}
	for _, id := range []string{sessionID, "x", "..", "%FF", "%00"} {
		a.send(404, "chat_file_not_found", "GET", "/api/v1/files/"+id, "")
	}
	a.send(404, "chat_file_not_found", "GET", files+"/none", "")
	a.send(404, "chat_file_not_found", "DELETE", files+"/none", "")

	body, kind := form(t, "b", "B", "a.csv", "A")
	a.send(201, "", "POST", files, body, withHeader("Content-Type", kind))
	for name, files := range map[string][]string{
		"twice": {"d", "1", "d", "2"}, "history": {"d", "1", "history.md", "2"}, "path": {"d", "1", "../e", "2"}, "too much": {"d", "1", "e", strings.Repeat("x", archiveQuota)},
	} {
		body, kind := form(t, files...)
		status, code := 422, "validation"
		if name == "too much" {
			status, code = 507, "workspace_quota_exceeded"
		}
		a.send(status, code, "POST", "/api/v1/chats/c/files", body, withHeader("Content-Type", kind))
	}
	body, kind = form(t, "d", "1", "e", "2")
	a.send(400, "malformed", "POST", files, body[:len(body)-20], withHeader("Content-Type", kind))
	a.send(507, "workspace_quota_exceeded", "PUT", files+"/d", strings.Repeat("x", archiveQuota))
	a.send(507, "workspace_quota_exceeded", "PUT", files+"/d", strings.Repeat("x", archiveQuota), chunked)
	if names, _ := a.names(1); !slices.Equal(names, []string{"a.csv", "b"}) {
		t.Errorf("there are %q", names)
	}
	if used := a.used(); used != 2 {
		t.Errorf("%d bytes are used", used)
	}

	const history = "/api/v1/chats/c/history"
	a.send(200, "", "PUT", history, "# one\n")
	var h apitype.ChatHistory
	a.send(200, "", "POST", history, "two\n").decode(t, &h)
	if got := a.send(200, "", "GET", history, ""); got.body != "# one\ntwo\n" || h.SizeBytes != 10 {
		t.Errorf("got %q, %+v", got.body, h)
	}
	a.send(206, "", "GET", history, "", withHeader("Range", "bytes=-4"))
	packed := a.send(200, "", "GET", "/api/v1/chats/c/tar", "").body
	inside := map[string]string{}
	for tr := tar.NewReader(strings.NewReader(packed)); ; {
		hdr, err := tr.Next()
		if err != nil {
			if err != io.EOF {
				t.Error(err)
			}
			break
		}
		if b, err := io.ReadAll(tr); err == nil && hdr.Typeflag == tar.TypeReg {
			inside[strings.TrimPrefix(hdr.Name, "./")] = string(b)
		}
	}
	if want := map[string]string{"a.csv": "A", "b": "B", "history.md": "# one\ntwo\n"}; !maps.Equal(inside, want) {
		t.Errorf("the archive has %q", inside)
	}
	a.send(204, "", "DELETE", "/api/v1/files/"+f.FileID, "")
	a.send(204, "", "DELETE", files+"/b", "")
	a.send(204, "", "PUT", "/api/v1/chats/c/tar", packed, withHeader("Content-Type", "application/x-tar"))
	a.send(422, "validation", "PUT", "/api/v1/chats/c/tar", tarOf(t, "../e"), withHeader("Content-Type", "application/x-tar"))
	if names, _ := a.names(1000); !slices.Equal(names, []string{"a.csv", "b"}) {
		t.Errorf("there are %q", names)
	}
	var n apitype.DeletedFiles
	if a.send(200, "", "DELETE", files, "").decode(t, &n); n.Deleted != 2 {
		t.Errorf("%d were deleted", n.Deleted)
	}
	a.send(204, "", "DELETE", "/api/v1/chats/c", "")
	a.send(404, "chat_not_found", "DELETE", "/api/v1/chats/c", "")
	a.send(201, "", "PUT", "/api/v1/chats/k", a.owner(), asJSON)
	a.send(409, "chat_has_active_sandbox", "DELETE", "/api/v1/chats/k", "")
}

// tarOf is an archive with one empty file.
func tarOf(t testing.TB, name string) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	return b.String()
}

func TestChatFileNames(t *testing.T) {
	t.Parallel()
	a := newArchive(t)
	var want []string
	for _, name := range []string{
		"a", "a b", "ü", "日本語.txt", "%", "%2F", "?", "#", "&=+", `"`, "'", ";", "\u202e", "\u2028", "-", ".hidden", "...", "~", "*", "a:b", "<b>", "history.MD",
		strings.Repeat("ü", 127) + "x",
	} {
		want = append(want, name)
		path := "/api/v1/chats/c/files/" + url.PathEscape(name)
		a.send(201, "", "PUT", path, name)
		got := a.send(200, "", "GET", path, "")
		if got.body != name {
			t.Errorf("%q: got %q", name, got.body)
		}
		var list apitype.ChatFileList
		a.send(200, "", "GET", "/api/v1/chats/c/files?name="+url.QueryEscape(name), "").decode(t, &list)
		if len(list.Files) != 1 || list.Files[0].Name != name {
			t.Errorf("%q: got %+v", name, list)
		}
		var u apitype.FileURL
		a.send(201, "", "POST", "/api/v1/chats/c/file-urls", fmt.Sprintf(`{"name":%q,"method":"GET"}`, name), asJSON).decode(t, &u)
		if got := a.send(200, "", "GET", u.Path, "", withToken("")); got.body != name {
			t.Errorf("%q: got %q", name, got.body)
		}
	}
	slices.Sort(want)
	for _, limit := range []int{1, 5, len(want), 1000} {
		if names, _ := a.names(limit); !slices.Equal(names, want) {
			t.Errorf("by %d: got %q, want %q", limit, names, want)
		}
	}
	for _, escaped := range []string{".", "..", "%2E%2E", "%5C", "a%5Cb", "%00", "a%00b", "%0A", "%1B", "%7F", "%C2%85", "%FF", "%C3", "history.md", strings.Repeat("x", 256)} {
		for _, method := range []string{"GET", "PUT", "DELETE"} {
			a.send(422, "validation", method, "/api/v1/chats/c/files/"+escaped, "")
		}
		name, err := url.PathUnescape(escaped)
		if err != nil {
			t.Fatal(err)
		}
		a.send(422, "validation", "GET", "/api/v1/chats/c/files?name="+url.QueryEscape(name), "")
	}
	for _, name := range []string{"", "..", "a/b", "history.md"} {
		a.send(422, "validation", "POST", "/api/v1/chats/c/file-urls", fmt.Sprintf(`{"name":%q,"method":"PUT"}`, name), asJSON)
	}
	if names, _ := a.names(1000); !slices.Equal(names, want) {
		t.Errorf("there are %q", names)
	}
}

// TestChatDirectory checks what callers see of what a sandbox left there.
func TestChatDirectory(t *testing.T) {
	t.Parallel()
	a := newArchive(t)
	outside := filepath.Join(t.TempDir(), "secret")
	for name, make := range map[string]func(string) error{
		"dir":     func(p string) error { return os.Mkdir(p, 0o755) },
		"fifo":    func(p string) error { return syscall.Mkfifo(p, 0o644) },
		"link":    func(p string) error { return os.Symlink(outside, p) },
		"here":    func(p string) error { return os.Symlink("file", p) },
		"file":    func(p string) error { return os.WriteFile(p, []byte("made inside"), 0o600) },
		"bad\xff": func(p string) error { return os.WriteFile(p, nil, 0o600) },
	} {
		if err := make(filepath.Join(a.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(outside, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	var list apitype.ChatFileList
	a.send(200, "", "GET", "/api/v1/chats/c/files", "").decode(t, &list)
	if len(list.Files) != 1 || list.Files[0].Name != "file" || list.Files[0].ContentType != nil || list.Truncated {
		t.Errorf("got %+v", list)
	}
	if got := a.send(200, "", "GET", "/api/v1/chats/c/files/file", ""); got.body != "made inside" || got.Header.Get("Berm-File-Id") != list.Files[0].FileID {
		t.Errorf("got %q, %v", got.body, got.Header)
	}
	for _, name := range []string{"dir", "fifo", "link", "here"} {
		path := "/api/v1/chats/c/files/" + name
		a.send(409, "chat_file_wrong_kind", "GET", path, "")
		a.send(409, "", "HEAD", path, "")
		if got := a.send(200, "", "GET", "/api/v1/chats/c/files?name="+name, ""); !strings.Contains(got.body, `"files":[]`) {
			t.Errorf("%s: got %s", name, got.body)
		}
		if name == "dir" {
			a.send(409, "chat_file_wrong_kind", "PUT", path, "x")
		} else {
			a.send(200, "", "PUT", path, "x") // in its place, not through it
		}
	}
	if b, err := os.ReadFile(outside); string(b) != "secret" {
		t.Errorf("outside there is %q, %v", b, err)
	}
}

// TestChatFilePages checks that a long list comes whole, by pages.
func TestChatFilePages(t *testing.T) {
	t.Parallel()
	a := newArchive(t)
	const n = 10_000
	first := filepath.Join(a.dir, "f00000")
	if err := os.WriteFile(first, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := 1; i < n; i++ { // links are made sooner
		if err := os.Link(first, filepath.Join(a.dir, fmt.Sprintf("f%05d", i))); err != nil {
			t.Fatal(err)
		}
	}
	names, pages := a.names(1000)
	if len(names) != n || !slices.IsSorted(names) || len(slices.Compact(names)) != n || pages != n/1000 {
		t.Errorf("there are %d files on %d pages", len(names), pages)
	}
}

// TestFileURLsOfChats checks that a signed URL ends with its chat.
func TestFileURLsOfChats(t *testing.T) {
	t.Parallel()
	a := newArchive(t)
	sign := func(method string) string {
		var u apitype.FileURL
		a.send(201, "", "POST", "/api/v1/chats/c/file-urls", `{"name":"f","method":"`+method+`"}`, asJSON).decode(t, &u)
		return u.Path
	}
	get, put := sign("GET"), sign("PUT")
	a.send(404, "chat_file_not_found", "GET", get, "", withToken(""))
	a.send(201, "", "PUT", put, "hello", withToken(""), withHeader("Content-Type", "text/plain"))
	if got := a.send(200, "", "GET", get, "", withToken("")); got.body != "hello" || got.Header.Get("Content-Type") != "text/plain" {
		t.Errorf("got %q, %v", got.body, got.Header)
	}
	a.send(507, "workspace_quota_exceeded", "PUT", put, strings.Repeat("x", archiveQuota+1), withToken(""), chunked)
	a.send(204, "", "DELETE", "/api/v1/chats/c", "")
	a.send(410, "url_expired", "GET", get, "", withToken(""))
	a.send(201, "", "PUT", "/api/v1/chats/c", a.owner(), asJSON)
	a.send(201, "", "PUT", "/api/v1/chats/c/files/f", "another's")
	a.send(410, "url_expired", "GET", get, "", withToken(""))
	a.send(410, "url_expired", "PUT", put, "x", withToken(""))
	if got := a.send(200, "", "GET", "/api/v1/chats/c/files/f", ""); got.body != "another's" {
		t.Errorf("got %q", got.body)
	}
}
