package client_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// newChat is a server, and a chat "k" of the red tenant's.
func newChat(t *testing.T) (*berm, *apitype.Workspace) {
	t.Helper()
	b := newBerm(t, runtimetest.FakeOptions{})
	w, err := b.EnsureWorkspace(t.Context(), "user 7%")
	must(t, err)
	if c, err := b.EnsureChat(t.Context(), "k", w.WorkspaceID); err != nil || c.ChatID != "k" || c.WorkspaceID != w.WorkspaceID {
		t.Fatalf("got %+v, %v", c, err)
	}
	return b, w
}

// all reads an answer that was opened.
func all(t *testing.T, r io.ReadCloser, err error) string {
	t.Helper()
	must(t, err)
	got, err := io.ReadAll(r)
	must(t, errors.Join(err, r.Close()))
	return string(got)
}

func TestWorkspaces(t *testing.T) {
	t.Parallel()
	b, w := newChat(t)
	ctx := t.Context()
	for _, again := range []func() (*apitype.Workspace, error){
		func() (*apitype.Workspace, error) { return b.EnsureWorkspace(ctx, "user 7%") },
		func() (*apitype.Workspace, error) { return b.Workspace(ctx, w.WorkspaceID) },
	} {
		got, err := again()
		if diff := cmp.Diff(w, got); err != nil || diff != "" {
			t.Errorf("%v, %s", err, diff)
		}
	}
	if w.UserID != "user 7%" || w.CreatedAt.IsZero() {
		t.Errorf("got %+v", w)
	}
	u, err := b.WorkspaceUsage(ctx, w.WorkspaceID)
	if err != nil || u.UsedBytes != 0 || u.QuotaBytes == nil || *u.QuotaBytes != quota || u.Enforcement != "soft" {
		t.Errorf("got %+v, %v", u, err)
	}
	_, err = b.as(t, blue, 0).Workspace(ctx, w.WorkspaceID)
	wantCode(t, err, "workspace_not_found")
	_, err = b.WorkspaceUsage(ctx, "3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7")
	wantCode(t, err, "workspace_not_found")
	_, err = b.EnsureWorkspace(ctx, strings.Repeat("u", 256))
	wantCode(t, err, "validation")
}

func TestChats(t *testing.T) {
	t.Parallel()
	b, w := newChat(t)
	ctx := t.Context()
	want := []string{"c-1", "c-2", "k"}
	for _, id := range want[:2] {
		if _, err := b.EnsureChat(ctx, id, w.WorkspaceID); err != nil {
			t.Fatal(err)
		}
	}
	for _, size := range []int{0, 1, 2} {
		seq := b.Chats(ctx, w.WorkspaceID, size)
		for range 2 {
			var got []string
			for c, err := range seq {
				must(t, err)
				got = append(got, c.ChatID)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("by %d: %s", size, diff)
			}
		}
	}
	for _, err := range b.Chats(ctx, "3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7", 0) {
		wantCode(t, err, "workspace_not_found")
	}
	if c, err := b.Chat(ctx, "k"); err != nil || c.WorkspaceID != w.WorkspaceID {
		t.Errorf("got %+v, %v", c, err)
	}
	_, err := b.as(t, blue, 0).Chat(ctx, "k")
	wantCode(t, err, "chat_not_found")
	other, err := b.EnsureWorkspace(ctx, "another")
	must(t, err)
	_, err = b.EnsureChat(ctx, "k", other.WorkspaceID)
	wantCode(t, err, "chat_conflict")

	if _, err := b.Create(ctx, "k", apitype.SandboxRequest{}); err != nil {
		t.Fatal(err)
	}
	wantCode(t, b.DeleteChat(ctx, "k"), "chat_has_active_sandbox")
	if _, err := b.Delete(ctx, "k"); err != nil {
		t.Fatal(err)
	}
	if err := b.DeleteChat(ctx, "k"); err != nil {
		t.Error(err)
	}
	wantCode(t, b.DeleteChat(ctx, "k"), "chat_not_found")
}

func TestHistory(t *testing.T) {
	t.Parallel()
	b, _ := newChat(t)
	ctx := t.Context()
	r, err := b.History(ctx, "k", 0, 0)
	if got := all(t, r, err); got != "" {
		t.Errorf("a new one has %q", got)
	}
	if h, err := b.PutHistory(ctx, "k", strings.NewReader("# one\n")); err != nil || h.SizeBytes != 6 || h.ModifiedAt.IsZero() {
		t.Errorf("got %+v, %v", h, err)
	}
	if h, err := b.AppendHistory(ctx, "k", io.LimitReader(strings.NewReader("two\nthree"), 4)); err != nil || h.SizeBytes != 10 {
		t.Errorf("got %+v, %v", h, err)
	}
	for _, part := range []struct {
		offset, length int64
		want           string
	}{{0, 0, "# one\ntwo\n"}, {6, 0, "two\n"}, {2, 3, "one"}} {
		r, err := b.History(ctx, "k", part.offset, part.length)
		if got := all(t, r, err); got != part.want {
			t.Errorf("from %d: %q", part.offset, got)
		}
	}
	_, err = b.History(ctx, "none", 0, 0)
	wantCode(t, err, "chat_not_found")
	_, err = b.AppendHistory(ctx, "none", strings.NewReader("x"))
	wantCode(t, err, "chat_not_found")
	_, err = b.PutHistory(ctx, "k", strings.NewReader(strings.Repeat("x", quota+1)))
	wantCode(t, err, "workspace_quota_exceeded")
}

// packed makes an archive of files, and of directories, whose names end in a slash.
func packed(t *testing.T, files ...[2]string) io.Reader {
	t.Helper()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, f := range files {
		must(t, errors.Join(w.WriteHeader(&tar.Header{Name: f[0], Mode: 0o755, Size: int64(len(f[1]))}), second(io.WriteString(w, f[1]))))
	}
	must(t, w.Close())
	return &archive
}

// untar returns the files of an archive, and closes it.
func untar(t *testing.T, r io.ReadCloser) map[string]string {
	t.Helper()
	files := map[string]string{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			_ = r.Close()
			return files
		}
		must(t, err)
		files[strings.TrimPrefix(h.Name, "./")] = all(t, io.NopCloser(tr), nil)
	}
}

func TestChatTar(t *testing.T) {
	t.Parallel()
	b, w := newChat(t)
	ctx := t.Context()
	archive := packed(t, [2]string{"notes/", ""}, [2]string{"notes/in.txt", "hi"}, [2]string{"top.txt", "top"})
	must(t, b.WriteChatTar(ctx, "k", archive))
	if f, err := b.ChatFileNamed(ctx, "k", "top.txt"); err != nil || f.SizeBytes != 3 {
		t.Errorf("got %+v, %v", f, err)
	}
	// What one chat gives, another takes.
	if _, err := b.EnsureChat(ctx, "copy", w.WorkspaceID); err != nil {
		t.Fatal(err)
	}
	r, err := b.ReadChatTar(ctx, "k")
	must(t, err)
	must(t, b.WriteChatTar(ctx, "copy", r))
	r, err = b.ReadChatTar(ctx, "copy")
	must(t, err)
	got := untar(t, r)
	delete(got, "")
	if diff := cmp.Diff(map[string]string{"history.md": "", "notes/": "", "notes/in.txt": "hi", "top.txt": "top"}, got); diff != "" {
		t.Error(diff)
	}
	wantCode(t, b.WriteChatTar(ctx, "none", strings.NewReader("")), "chat_not_found")
	_, err = b.ReadChatTar(ctx, "none")
	wantCode(t, err, "chat_not_found")
}

// What would change where a path leads isn't sent.
func TestOddPaths(t *testing.T) {
	t.Parallel()
	c, err := client.New(client.Options{BaseURL: "http://127.0.0.1:1"}) // where nobody is
	must(t, err)
	ctx := t.Context()
	for _, name := range []string{".", "..", "../x", "a/../b", `..\x`, `a\.`, "/.."} {
		for _, err := range []error{
			c.DeleteChat(ctx, name), c.DeleteChatFile(ctx, "k", name), c.DeleteChatFileID(ctx, name), second(c.Workspace(ctx, name)),
			second(c.PutChatFile(ctx, "k", name, strings.NewReader("x"), client.PutChatFileOptions{})),
			second(c.EnsureWorkspace(ctx, name)), second(c.PutHistory(ctx, name, strings.NewReader("x"))), second(c.Delete(ctx, name)),
			second(c.PutChatFiles(ctx, name, parts(client.NewChatFile{Name: "a", Content: strings.NewReader("x")}))),
		} {
			if !errors.Is(err, client.ErrDotSegment) {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
	for i, err := range []error{
		c.DeleteChatFile(ctx, "k", ""), c.DeleteChatFile(ctx, "", "a"), c.DeleteChat(ctx, ""), second(c.Get(ctx, "")),
	} {
		if err == nil || !strings.Contains(err.Error(), "is empty") {
			t.Errorf("%d: %v", i, err)
		}
	}
	for _, name := range []string{"...", "a..b", ".a", "%2e%2e", "a b", "é"} {
		if err := c.DeleteChatFile(ctx, "k", name); err == nil || errors.Is(err, client.ErrDotSegment) {
			t.Errorf("%q: %v", name, err)
		}
	}
	// It is refused in the client, whatever a server would say.
	if _, err := c.Chat(ctx, ".."); err == nil || err.Error() != fmt.Sprintf("/api/v1/chats/..: %v", client.ErrDotSegment) {
		t.Errorf("got %v", err)
	}
}
