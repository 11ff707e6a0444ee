package sandboxapi_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

func TestChatFileContent(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	for _, path := range []string{filePath, fileIDPath + "/content", d.signFile(`{"name":"report.pdf","method":"GET"}`)} {
		for _, method := range []string{"GET", "HEAD"} {
			a := d.want(200, "", method, path, "")
			for name, want := range map[string]string{
				"Content-Type": "text/html; charset=x", "Content-Length": "10", "ETag": `W/"1"`, "Last-Modified": "Fri, 02 Jan 2026 15:04:05 GMT",
				"Content-Disposition": "attachment; filename=report.pdf", "Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff",
				"Accept-Ranges": "bytes", "Berm-File-Id": fileID, "Cache-Control": "no-store",
			} {
				if got := a.Header.Get(name); got != want {
					t.Errorf("%s %s: %s is %q, want %q", method, path, name, got, want)
				}
			}
			if method == "GET" && a.body != s.content {
				t.Errorf("%s: got %q", path, a.body)
			}
		}
		a := d.want(304, "", "GET", path, "", withHeader("If-None-Match", `"x", "1"`), withHeader("Range", "bytes=1-2"))
		if a.Header.Get("ETag") == "" || a.Header.Get("Content-Type") != "" || a.Header.Get("Content-Disposition") != "" {
			t.Errorf("%s: got %v", path, a.Header)
		}
	}
	a := d.want(200, "", "GET", chatPath+"/files/%C3%BC%20%22%3B.txt", "")
	if got := a.Header.Get("Content-Disposition"); got != "attachment; filename*=utf-8''%C3%BC%20%22%3B.txt" {
		t.Errorf("Content-Disposition is %q", got)
	}
}

// TestChatFileChanges checks that what a sandbox does to a file while it is sent never has
// a part pass for the whole.
func TestChatFileChanges(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	s.content, s.size = "0123456789", 7 // it grew
	for header, want := range map[string]string{"": "0123456", "bytes=5-": "56", "bytes=-3": "456"} {
		if a := d.send("GET", filePath, "", withHeader("Range", header)); a.body != want || a.ContentLength != int64(len(want)) {
			t.Errorf("%s: got %q of %d bytes", header, a.body, a.ContentLength)
		}
	}
	s.size = 3 << 20 // it shrank
	for _, header := range []string{"", "bytes=5-", "bytes=2000000-"} {
		if !d.brokenOff(filePath, withHeader("Range", header)) {
			t.Errorf("%s: a part looks whole", header)
		}
	}
}

// kernel is an answer that could be copied by the kernel.
type kernel struct {
	*httptest.ResponseRecorder
	files     int
	others    []string
	deadlines []time.Time
}

func (k *kernel) ReadFrom(r io.Reader) (int64, error) {
	k.others = append(k.others, fmt.Sprintf("%T", r))
	if l, ok := r.(*io.LimitedReader); ok {
		if _, ok := l.R.(*os.File); ok {
			k.files++
		}
	}
	return io.Copy(k.ResponseRecorder, r)
}

func (k *kernel) SetWriteDeadline(t time.Time) error {
	k.deadlines = append(k.deadlines, t)
	return nil
}

// TestChatFileCopying checks that the kernel gets the file itself, and what it copies has
// one deadline after the other.
func TestChatFileCopying(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	s.content = strings.Repeat("0123456789abcdef", 5<<16) // 5 MiB
	for header, want := range map[string]int{"": 5, "bytes=1-2": 1, "bytes=4-2097156": 3} {
		k := &kernel{ResponseRecorder: httptest.NewRecorder()}
		r := httptest.NewRequest("GET", "http://localhost"+filePath, nil)
		r.Header.Set("X-API-Token", master)
		r.Header.Set("Range", header)
		d.handler.ServeHTTP(k, r)
		if k.files != want || len(k.others) != want {
			t.Errorf("%s: it got %v", header, k.others)
		}
		if !slices.IsSortedFunc(k.deadlines, time.Time.Compare) || len(k.deadlines) != want || time.Until(k.deadlines[0]) < 30*time.Second {
			t.Errorf("%s: the deadlines are %v", header, k.deadlines)
		}
	}
}

func TestWriteChatFile(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	s.made = true
	a := d.want(201, "", "PUT", filePath, "content", withHeader("Content-Type", "text/csv; header=present"), withHeader("If-None-Match", "*"))
	var f apitype.ChatFile
	a.decode(t, &f)
	kind := "text/html; charset=x"
	if f.FileID != fileID || f.ChatID != "chat-7" || f.Name != "report.pdf" || *f.ContentType != kind || f.SizeBytes != 10 || a.Header.Get("ETag") != `W/"1"` {
		t.Errorf("got %s, %v", a.body, a.Header)
	}
	want := chat.PutFile{Name: "report.pdf", ContentType: "text/csv; header=present", Size: 7, NoClash: true}
	if !slices.Equal(s.puts, []chat.PutFile{want}) || s.bodies[0] != "content" {
		t.Errorf("got %+v, %q", s.puts, s.bodies)
	}
	s.puts = nil
	d.want(201, "", "PUT", chatPath+"/files/%C3%BC%20%3F%23%25.txt", "x", chunked, func(r *http.Request) { r.Header.Del("Content-Type") })
	if want := (chat.PutFile{Name: "ü ?#%.txt", Size: -1}); !slices.Equal(s.puts, []chat.PutFile{want}) {
		t.Errorf("got %+v", s.puts)
	}
	// The service sees names as they are meant, and judges them.
	for escaped, name := range map[string]string{
		"..": "..", ".": ".", "%2E%2E": "..", "%00": "\x00", "%FF": "\xff", "%5C": `\`, "history.md": "history.md", "a%0Ab": "a\nb", "+": "+", "%E2%80%AE": "\u202e",
	} {
		s.puts = nil
		d.send("PUT", chatPath+"/files/"+escaped, "x")
		if len(s.puts) != 1 || s.puts[0].Name != name {
			t.Errorf("%s: got %+v", escaped, s.puts)
		}
	}
	for _, escaped := range []string{"a%2Fb", "a%2fb", "..%2F..%2Fetc"} {
		d.want(400, "malformed", "PUT", chatPath+"/files/"+escaped, "x")
	}
	long := "text/plain; x=" + strings.Repeat("y", 241)
	for value, ok := range map[string]bool{
		long: true, long + "y": false, "text/plain": true, "TEXT/Plain ;charset=UTF-8": true, `a/b; c="d e"`: true,
		"text": false, "/": false, "text/plain; x": false, "text/plain; x=1; x=2": false, "text/plain; x=\"\xff\"": false, "text/ü": false, "text/plain, a/b": false, ";": false,
	} {
		status, code := 201, ""
		if !ok {
			status, code = 422, "validation"
		}
		d.want(status, code, "PUT", filePath, "x", withHeader("Content-Type", value))
	}
	d.want(422, "validation", "PUT", filePath, "x", func(r *http.Request) { r.Header["Content-Type"] = []string{"a/b", "a/b"} })
	for _, header := range []string{"If-Match", "If-Unmodified-Since", "Content-Range"} {
		d.want(422, "validation", "PUT", filePath, "x", withHeader(header, "*"))
	}
	d.want(422, "validation", "PUT", filePath, "x", withHeader("If-None-Match", `"e"`))
}

// TestOvertakenFile checks that what is there by now isn't taken for what was meant.
func TestOvertakenFile(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	for name, overtake := range map[string]func(*chat.File){
		"written once more": func(f *chat.File) { f.ModifiedAt = f.ModifiedAt.Add(1) },
		"another":           func(f *chat.File) { f.ID = sessionID },
	} {
		d := d.rebuilt(withShelf(t, s), func(o *sandboxapi.Options) { o.Chats = &overtaken{s, overtake} })
		if a := d.want(200, "", "PUT", filePath, "x"); a.Header.Get("ETag") != "" {
			t.Errorf("%s: got %v", name, a.Header)
		}
		if name == "another" {
			d.want(404, "chat_file_not_found", "GET", fileIDPath+"/content", "")
		}
	}
}

// overtaken is a shelf on which every file has changed by the time that it is opened.
type overtaken struct {
	*shelf
	change func(*chat.File)
}

func (o *overtaken) Content(ctx context.Context, tenant, chatID, name string) (*chat.Content, error) {
	c, err := o.shelf.Content(ctx, tenant, chatID, name)
	o.change(&c.Info)
	return c, err
}

// TestChatUploadIsCutOff checks that a body which ends too early is never taken for a file.
func TestChatUploadIsCutOff(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	upload, kind := form(t, "a", "content of a", "b", "content of b")
	upload = strings.TrimSuffix(upload, "--\r\n") // with its last boundary it could be answered before it is cut off
	for _, op := range []struct{ method, path, body, kind string }{
		{"PUT", filePath, "content", "text/plain"}, {"PUT", chatPath + "/history", "content", ""}, {"POST", chatPath + "/history", "content", ""},
		{"PUT", chatPath + "/tar", "content", ""}, {"POST", chatPath + "/files", upload, kind}, {"PUT", d.signFile(`{"name":"x","method":"PUT"}`), "content", ""},
	} {
		for _, length := range []int64{int64(len(op.body)) + 1, -1} {
			body := io.MultiReader(strings.NewReader(op.body), iotest.ErrReader(errors.New("cut off")))
			r := d.request(op.method, op.path, body, withHeader("Content-Type", op.kind))
			r.ContentLength = length
			resp, err := http.DefaultClient.Do(r)
			if err == nil {
				_ = resp.Body.Close()
				t.Errorf("%s: got %d", op.path, resp.StatusCode)
			}
		}
	}
	d.stop() // waits for the handlers
	for i, f := range s.puts {
		if f.Name != "a" && f.Name != "b" { // which came whole; that both are dropped is the chat's to do
			t.Errorf("it got %+v, %q", f, s.bodies[i])
		}
	}
}

func TestUploadChatFiles(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	body, kind := form(t, "a b.txt", "A", `ü"\.txt`, "", "../c", "C")
	var out apitype.UploadedFiles
	d.want(201, "", "POST", chatPath+"/files", body, withHeader("Content-Type", kind)).decode(t, &out)
	want := []chat.PutFile{
		{Name: "a b.txt", ContentType: "text/plain", Size: -1}, {Name: `ü"\.txt`, ContentType: "text/plain", Size: -1}, {Name: "../c", ContentType: "text/plain", Size: -1},
	}
	if !slices.Equal(s.puts, want) || !slices.Equal(s.bodies, []string{"A", "", "C"}) || len(out.Files) != 3 || out.Files[2].Name != "../c" {
		t.Errorf("got %+v, %q, %+v", s.puts, s.bodies, out)
	}

	const start, file = "--b\r\n", "Content-Disposition: form-data; name=f; filename=a\r\n"
	many := func(n int) string {
		var b bytes.Buffer
		for i := range n {
			fmt.Fprintf(&b, "--b\r\nContent-Disposition: form-data; filename=%d\r\n\r\nx\r\n", i)
		}
		return b.String() + "--b--\r\n"
	}
	for name, tt := range map[string]struct {
		body   string
		status int
		code   string
	}{
		"no line end":         {start + file + "\r\nx\r\n--b--", 201, ""},
		"preamble":            {"hello\r\n" + start + file + "\r\nx\r\n--b--\r\n", 201, ""},
		"epilogue":            {start + file + "\r\nx\r\n--b--\r\nbye\r\n--b\r\n", 201, ""},
		"bare line ends":      {"--b\nContent-Disposition: form-data; filename=a\n\nx\n--b--\n", 201, ""},
		"nameless boundary":   {start + file + "\r\n--b\r\n--b--\r\n", 400, "malformed"},
		"encoded name":        {start + "Content-Disposition: form-data; filename*=utf-8''%C3%BC\r\n\r\nx\r\n--b--", 201, ""},
		"many":                {many(1000), 201, ""},
		"too many":            {many(1001), 422, "validation"},
		"plain encoding":      {start + file + "Content-Transfer-Encoding: Binary\r\n\r\nx\r\n--b--", 201, ""},
		"encoding":            {start + file + "Content-Transfer-Encoding: base64\r\n\r\neA==\r\n--b--", 415, "unsupported_media_type"},
		"quoted-printable":    {start + file + "Content-Transfer-Encoding: quoted-printable\r\n\r\n=41\r\n--b--", 415, "unsupported_media_type"},
		"no filename":         {start + "Content-Disposition: form-data; name=f\r\n\r\nx\r\n--b--", 422, "validation"},
		"no disposition":      {start + "Content-Type: text/plain\r\n\r\nx\r\n--b--", 422, "validation"},
		"other disposition":   {start + "Content-Disposition: attachment; filename=a\r\n\r\nx\r\n--b--", 422, "validation"},
		"two filenames":       {start + "Content-Disposition: form-data; filename=a; filename=b\r\n\r\nx\r\n--b--", 422, "validation"},
		"bad type":            {start + file + "Content-Type: text\r\n\r\nx\r\n--b--", 422, "validation"},
		"control type":        {start + file + "Content-Type: text/plain; a=\"\x01\"\r\n\r\nx\r\n--b--", 400, "malformed"},
		"no file":             {"--b--\r\n", 422, "validation"},
		"nothing":             {"x", 400, "malformed"},
		"other boundary":      {strings.ReplaceAll(many(1), "--b", "--c"), 400, "malformed"},
		"cut in a header":     {start + file + "\r\nx\r\n" + start + "Content-Dis", 400, "malformed"},
		"cut before a header": {start + file + "\r\nx\r\n" + start, 422, "validation"},
		"cut after a header":  {start + file, 400, "malformed"},
		"cut in a file":       {start + file + "\r\nx", 400, "malformed"},
		"cut after a file":    {start + file + "\r\nx\r\n", 400, "malformed"},
		"cut in a boundary":   {start + file + "\r\nx\r\n--b", 400, "malformed"},
		"almost the last":     {start + file + "\r\nx\r\n--b-", 400, "malformed"},
		"bad header":          {start + "no header\r\n\r\nx\r\n--b--", 400, "malformed"},
		"long header":         {start + "X: " + strings.Repeat("x", 70<<10) + "\r\n" + file + "\r\nx\r\n--b--", 400, "malformed"},
		"many headers":        {start + strings.Repeat("X: y\r\n", 20_000) + file + "\r\nx\r\n--b--", 400, "malformed"},
		"long preamble":       {strings.Repeat("x\r\n", 30<<10) + start + file + "\r\nx\r\n--b--", 400, "malformed"},
	} {
		a := d.send("POST", chatPath+"/files", tt.body, withHeader("Content-Type", "multipart/form-data; boundary=b"))
		if code := a.Header.Get("Content-Type"); a.StatusCode != tt.status || tt.code != "" && (code != "application/problem+json" || a.problem(t).Code != tt.code) {
			t.Errorf("%s: got %d %s", name, a.StatusCode, a.body)
		}
	}
	for _, kind := range []string{"", "text/plain", "multipart/mixed; boundary=b", "multipart/form-data", "multipart/form-data; boundary=" + strings.Repeat("b", 71), `multipart/form-data; boundary=""`} {
		d.want(415, "unsupported_media_type", "POST", chatPath+"/files", many(1), withHeader("Content-Type", kind))
	}
}

// TestRefusedChatUpload checks that who is refused is told before all has been sent.
func TestRefusedChatUpload(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	put := d.signFile(`{"name":"x","method":"PUT"}`)
	s.err = noRoom.err
	for _, op := range []string{"PUT " + filePath, "POST " + chatPath + "/files", "PUT " + chatPath + "/history", "PUT " + chatPath + "/tar", "PUT " + put} {
		c, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
		must(t, err)
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		_, err = io.WriteString(c, op+" HTTP/1.1\r\nHost: localhost\r\nX-API-Token: "+master+"\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 1073741824\r\n\r\nabc")
		must(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%s: %v", op, err)
		}
		if resp.StatusCode != 507 {
			t.Errorf("%s: got %d", op, resp.StatusCode)
		}
		_ = resp.Body.Close()
		_ = c.Close()
	}
}
