package client_test

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// parts are files to be put together.
func parts(files ...client.NewChatFile) iter.Seq2[client.NewChatFile, error] {
	return func(yield func(client.NewChatFile, error) bool) {
		for _, f := range files {
			if !yield(f, nil) {
				return
			}
		}
	}
}

// names lists a chat's files.
func names(t *testing.T, b *berm, pageSize int) []string {
	t.Helper()
	var out []string
	for f, err := range b.ChatFiles(t.Context(), "k", pageSize) {
		must(t, err)
		out = append(out, f.Name)
	}
	return out
}

func TestChatFiles(t *testing.T) {
	t.Parallel()
	b, _ := newChat(t)
	ctx := t.Context()
	const content = "0123456789\nneedle"
	// An empty one, one of an odd name, and one whose length isn't said.
	empty, err := b.PutChatFile(ctx, "k", "empty", strings.NewReader(""), client.PutChatFileOptions{})
	if err != nil || empty.SizeBytes != 0 || empty.ContentType != nil || empty.FileID == "" || empty.ChatID != "k" {
		t.Fatalf("got %+v, %v", empty, err)
	}
	for _, name := range []string{"a.txt", `%2e "+ &;é?#`} {
		f, err := b.PutChatFile(ctx, "k", name, io.MultiReader(strings.NewReader(content)), client.PutChatFileOptions{
			ContentType: "text/plain; charset=utf-8", NoClash: true, Size: int64(len(content)),
		})
		if err != nil || f.Name != name || f.SizeBytes != 17 || *f.ContentType != "text/plain; charset=utf-8" {
			t.Fatalf("%q: %+v, %v", name, f, err)
		}
		_, err = b.PutChatFile(ctx, "k", name, strings.NewReader("x"), client.PutChatFileOptions{NoClash: true})
		wantCode(t, err, "precondition_failed")
		for _, part := range []struct {
			offset, length int64
			want           string
		}{{0, 0, content}, {11, 0, "needle"}, {2, 3, "234"}} {
			r, err := b.ReadChatFile(ctx, "k", name, part.offset, part.length)
			if got := all(t, r, err); got != part.want {
				t.Errorf("%q from %d: %q", name, part.offset, got)
			}
			r, err = b.ReadChatFileID(ctx, f.FileID, part.offset, part.length)
			if got := all(t, r, err); got != part.want {
				t.Errorf("%q by its ID from %d: %q", name, part.offset, got)
			}
		}
		_, err = b.ReadChatFile(ctx, "k", name, 100, 0)
		wantCode(t, err, "range")
		for _, get := range []func() (*apitype.ChatFile, error){
			func() (*apitype.ChatFile, error) { return b.ChatFile(ctx, f.FileID) },
			func() (*apitype.ChatFile, error) { return b.ChatFileNamed(ctx, "k", name) },
		} {
			if got, err := get(); err != nil || !cmp.Equal(f, got) {
				t.Errorf("got %+v, %v, want %+v", got, err, f)
			}
		}
	}
	if f, err := b.PutChatFile(ctx, "k", "short", io.MultiReader(strings.NewReader("x")), client.PutChatFileOptions{Size: 2}); err == nil {
		t.Errorf("fewer bytes than were announced made %+v", f)
	}
	replaced, err := b.PutChatFile(ctx, "k", "a.txt", strings.NewReader("new"), client.PutChatFileOptions{})
	if err != nil || replaced.SizeBytes != 3 || replaced.ContentType != nil {
		t.Errorf("got %+v, %v", replaced, err)
	}
	for _, size := range []int{0, 1, 3} {
		if diff := cmp.Diff([]string{`%2e "+ &;é?#`, "a.txt", "empty"}, names(t, b, size)); diff != "" {
			t.Errorf("by %d: %s", size, diff)
		}
	}

	_, err = b.ChatFileNamed(ctx, "k", "none")
	if e := wantCode(t, err, "chat_file_not_found"); e.Status != 404 || e.Problem.RequestID == "" {
		t.Errorf("got %+v", e)
	}
	_, err = b.ChatFileNamed(ctx, "none", "a.txt")
	wantCode(t, err, "chat_not_found")
	_, err = b.ReadChatFile(ctx, "k", "none", 0, 0)
	wantCode(t, err, "chat_file_not_found")
	_, err = b.PutChatFile(ctx, "k", "history.md", strings.NewReader("x"), client.PutChatFileOptions{})
	wantCode(t, err, "validation")
	_, err = b.as(t, blue, 0).ChatFile(ctx, empty.FileID)
	wantCode(t, err, "chat_file_not_found")
	for _, err := range b.as(t, blue, 0).ChatFiles(ctx, "k", 0) {
		wantCode(t, err, "chat_not_found")
	}

	if err := errors.Join(b.DeleteChatFile(ctx, "k", "a.txt"), b.DeleteChatFileID(ctx, empty.FileID)); err != nil {
		t.Error(err)
	}
	wantCode(t, b.DeleteChatFile(ctx, "k", "a.txt"), "chat_file_not_found")
	if n, err := b.DeleteChatFiles(ctx, "k"); err != nil || n != 1 {
		t.Errorf("got %d, %v", n, err)
	}
	if got := names(t, b, 0); got != nil {
		t.Errorf("there still is %q", got)
	}
}

func TestPutChatFiles(t *testing.T) {
	t.Parallel()
	b, _ := newChat(t)
	ctx := t.Context()
	// What isn't documented: openapitest reads all of a body before it is sent.
	c, err := client.New(client.Options{BaseURL: b.url, Token: red})
	must(t, err)
	for name, cl := range map[string]*client.Client{"checked": b.Client, "streamed": c} {
		files, err := cl.PutChatFiles(ctx, "k", parts(
			client.NewChatFile{Name: "plain", Content: strings.NewReader("1")},
			client.NewChatFile{Name: `odd "é`, ContentType: "image/png", Content: io.MultiReader(strings.NewReader("22"))},
		))
		if err != nil || len(files) != 2 || files[0].ContentType != nil || files[1].Name != `odd "é` || *files[1].ContentType != "image/png" || files[1].SizeBytes != 2 {
			t.Errorf("%s: %+v, %v", name, files, err)
		}
	}
	want := names(t, b, 0)

	// None, if one of them fails.
	broken := errors.New("broken")
	for name, tt := range map[string]struct {
		files iter.Seq2[client.NewChatFile, error]
		err   error  // this,
		code  string // or an answer
	}{
		"sequence": {func(yield func(client.NewChatFile, error) bool) {
			_ = yield(client.NewChatFile{Name: "x", Content: strings.NewReader("x")}, nil) && yield(client.NewChatFile{}, broken)
		}, broken, ""},
		"reader":  {parts(client.NewChatFile{Name: "x", Content: io.MultiReader(strings.NewReader("x"), brokenReader{broken})}), broken, ""},
		"nothing": {parts(), nil, "validation"},
		"twice": {parts(client.NewChatFile{Name: "x", Content: strings.NewReader("x")}, client.NewChatFile{Name: "x", Content: strings.NewReader("x")}),
			nil, "validation"},
		"name": {parts(client.NewChatFile{Name: "x", Content: strings.NewReader("x")}, client.NewChatFile{Name: "a/b", Content: strings.NewReader("x")}),
			nil, "validation"},
	} {
		_, err := c.PutChatFiles(ctx, "k", tt.files)
		if tt.err != nil && err != tt.err { //nolint:errorlint // it comes as it is
			t.Errorf("%s: %v", name, err)
		}
		if tt.code != "" {
			wantCode(t, err, tt.code)
		}
	}
	if diff := cmp.Diff(want, names(t, b, 0)); diff != "" {
		t.Error(diff)
	}
	_, err = c.PutChatFiles(ctx, "none", parts(client.NewChatFile{Name: "x", Content: strings.NewReader(strings.Repeat("x", 1<<20))}))
	wantCode(t, err, "chat_not_found")
}

type brokenReader struct{ err error }

func (r brokenReader) Read([]byte) (int, error) { return 0, r.err }

func TestSignFileURL(t *testing.T) {
	t.Parallel()
	b, _ := newChat(t)
	ctx := t.Context()
	put, err := b.SignFileURL(ctx, "k", apitype.FileURLRequest{Name: "a é.txt", Method: "PUT", MaxBytes: ptr[int64](4), TTL: ptr(apitype.Duration(time.Minute))})
	if err != nil || put.URL != b.url+put.Path || put.Method != "PUT" || time.Until(put.ExpiresAt) > 62*time.Second {
		t.Fatalf("got %+v, %v", put, err)
	}
	for body, status := range map[string]int{"12345": http.StatusRequestEntityTooLarge, "1234": http.StatusCreated} {
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, put.URL, strings.NewReader(body))
		must(t, err)
		resp, err := b.http.Do(req)
		must(t, err)
		if _ = resp.Body.Close(); resp.StatusCode != status {
			t.Errorf("%d bytes: %s", len(body), resp.Status)
		}
	}
	_, err = b.SignFileURL(ctx, "none", apitype.FileURLRequest{Name: "x", Method: "GET"})
	wantCode(t, err, "chat_not_found")
}

// The server ends its list after so many that no test makes them.
func TestMoreChatFiles(t *testing.T) {
	t.Parallel()
	pages := map[string]string{
		"":  `{"files":[{"name":"a"}],"next_cursor":"2","truncated":true}`,
		"2": `{"files":[{"name":"b"}],"truncated":true}`,
	}
	c := answered(t, 0, func(r *http.Request) *http.Response { return answer(200, "", pages[r.URL.Query().Get("cursor")]) })
	var got []string
	for f, err := range c.ChatFiles(t.Context(), "k", 0) {
		got = append(got, fmt.Sprintf("%s %v", f.Name, err))
	}
	if diff := cmp.Diff([]string{"a <nil>", "b <nil>", " " + client.ErrMoreFiles.Error()}, got); diff != "" {
		t.Error(diff)
	}
}
