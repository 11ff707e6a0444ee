package chat_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
)

func TestPut(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	put := chat.PutFile{Name: "ä b.txt", ContentType: "text/plain", Size: 3}
	first, made, err := w.Put(ctx, tenant, chatID, put, strings.NewReader("one"))
	if err != nil || !made || first.Size != 3 || first.ContentType != "text/plain" || first.ID == "" || first.ChatID != chatID {
		t.Fatalf("made %+v, %v, %v", first, made, err)
	}
	content, err := w.Content(ctx, tenant, chatID, put.Name)
	must(t, err)
	_ = content.Close()
	if diff := cmp.Diff(first, content.Info); diff != "" {
		t.Error(diff)
	}
	put.ContentType, put.Size = "", -1
	second, made, err := w.Put(ctx, tenant, chatID, put, strings.NewReader("two, longer"))
	if err != nil || made || second.Size != 11 || second.ContentType != "" {
		t.Fatalf("replaced %+v, %v, %v", second, made, err)
	}
	if second.ID != first.ID || !second.CreatedAt.Equal(first.CreatedAt) {
		t.Errorf("another identity: %+v, then %+v", first, second)
	}
	for what, get := range map[string]func() (chat.File, error){
		"named": func() (chat.File, error) { return w.FileNamed(ctx, tenant, chatID, put.Name) },
		"by ID": func() (chat.File, error) { return w.File(ctx, tenant, first.ID) },
	} {
		got, err := get()
		if diff := cmp.Diff(second, got); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", what, err, diff)
		}
	}
	again, err := w.Content(ctx, tenant, chatID, put.Name)
	must(t, err)
	defer again.Close()
	if !strings.HasPrefix(again.ETag, `W/"`) || again.ETag == content.ETag {
		t.Errorf("ETags %s, then %s", content.ETag, again.ETag)
	}
	put.NoClash = true
	if _, _, err := w.Put(ctx, tenant, chatID, put, strings.NewReader("three")); !errdefs.IsAlreadyExists(err) {
		t.Errorf("with NoClash: %v", err)
	}
	w.wantFile(put.Name, "two, longer")
	w.checkSound()
}

func TestPutRefused(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 1000)
	w.put("there", "there")
	cancelled, cancel := context.WithCancel(ctx)
	broken := errors.New("broken")
	body := func(n int, f func() error) io.Reader { return reading{strings.NewReader(strings.Repeat("x", n)), f} }
	for _, tt := range []struct {
		name string
		ctx  context.Context
		file chat.PutFile
		body io.Reader
		want func(error) bool
	}{
		{"no name", ctx, chat.PutFile{Size: -1}, body(1, nil), errorIs[*lifecycle.InvalidError]},
		{"history", ctx, chat.PutFile{Name: "history.md", Size: -1}, body(1, nil), errorIs[*lifecycle.InvalidError]},
		{"path", ctx, chat.PutFile{Name: "../other", Size: -1}, body(1, nil), errorIs[*lifecycle.InvalidError]},
		{"shorter", ctx, chat.PutFile{Name: "a", Size: 11}, body(10, nil), errorIs[*lifecycle.InvalidError]},
		{"longer", ctx, chat.PutFile{Name: "a", Size: 9}, body(10, nil), errorIs[*lifecycle.InvalidError]},
		{"longer than nothing", ctx, chat.PutFile{Name: "a"}, body(10, nil), errorIs[*lifecycle.InvalidError]},
		{"quota at once", ctx, chat.PutFile{Name: "a", Size: 996}, body(0, func() error { return errors.New("was read") }), errorIs[*quota.FullError]},
		{"quota on the way", ctx, chat.PutFile{Name: "a", Size: -1}, body(996, nil), errorIs[*quota.FullError]},
		{"broken", ctx, chat.PutFile{Name: "a", Size: -1}, body(10, func() error { return broken }), func(err error) bool { return errors.Is(err, broken) }},
		{"cut off", ctx, chat.PutFile{Name: "a", Size: -1}, body(10, func() error { return io.ErrUnexpectedEOF }), func(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) }},
		{"cancelled", cancelled, chat.PutFile{Name: "a", Size: -1}, body(10, func() error { cancel(); return nil }), func(err error) bool { return errors.Is(err, context.Canceled) }},
		{"over another", ctx, chat.PutFile{Name: "there", Size: -1}, body(10, func() error { return broken }), func(err error) bool { return errors.Is(err, broken) }},
	} {
		_, _, err := w.Put(tt.ctx, tenant, chatID, tt.file, tt.body)
		if !tt.want(err) {
			t.Errorf("%s: %v", tt.name, err)
		}
		if got := w.names(10); !slices.Equal(got, []string{"there"}) || w.read("there") != "there" {
			t.Errorf("%s: left %q", tt.name, got)
		}
		w.checkSound()
	}
	// All that was reserved has been given back, and what makes way counts.
	w.put("a", strings.Repeat("x", 995))
	w.put("a", strings.Repeat("y", 995))
	wantError[*quota.FullError](t, "beyond the quota", third(w.Put(ctx, tenant, chatID, chat.PutFile{Name: "b", Size: 1}, body(1, nil))))
	wantError[*chat.NotFoundError](t, "no chat", third(w.Put(ctx, tenant, "none", chat.PutFile{Name: "b", Size: 1}, body(1, nil))))
	w.checkSound()
}

// NoClash is decided when the file takes its place.
func TestNoClashMeanwhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	_, _, err := w.Put(context.Background(), tenant, chatID, chat.PutFile{Name: "a", Size: -1, NoClash: true},
		reading{strings.NewReader("late"), func() error { w.put("a", "early"); return nil }})
	if !errdefs.IsAlreadyExists(err) || w.read("a") != "early" {
		t.Errorf("error %v, content %q", err, w.read("a"))
	}
	w.checkSound()
}

// A chat that is deleted while an upload streams doesn't come back, also if one of its ID
// is made again.
func TestPutIntoDeleted(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, again := range []bool{false, true} {
		w := newWorld(t, 0)
		_, _, err := w.Put(ctx, tenant, chatID, chat.PutFile{Name: "a", Size: -1}, reading{strings.NewReader("late"), func() error {
			err := w.Delete(ctx, tenant, chatID)
			if again {
				w.ensure(tenant, chatID)
			}
			return err
		}})
		if !errorIs[*chat.NotFoundError](err) {
			t.Errorf("error %v", err)
		}
		if again {
			w.wantFiles()
		} else if _, err := os.Stat(w.path()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("its directory: %v", err)
		}
		w.checkSound()
	}
}

// several is the next of PutAll.
func several(files ...string) func() (chat.PutFile, io.Reader, error) {
	return func() (chat.PutFile, io.Reader, error) {
		if len(files) == 0 {
			return chat.PutFile{}, nil, io.EOF
		}
		name, content, _ := strings.Cut(files[0], "=")
		files = files[1:]
		return chat.PutFile{Name: name, Size: -1}, strings.NewReader(content), nil
	}
}

func TestPutAll(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 100)
	w.put("b", strings.Repeat("b", 90))
	must(t, os.Mkdir(w.path("dir"), 0o755))
	for name, tt := range map[string]struct {
		files []string
		want  func(error) bool
	}{
		"quota":     {[]string{"a=aaaaaa", "c=cccccc"}, errorIs[*quota.FullError]},
		"directory": {[]string{"a=a", "dir=c"}, errdefs.IsFailedPrecondition},
		"name":      {[]string{"a=a", "/=c"}, errorIs[*lifecycle.InvalidError]},
		"twice":     {[]string{"a=a", "a=c"}, errorIs[*lifecycle.InvalidError]},
	} {
		if _, err := w.PutAll(ctx, tenant, chatID, several(tt.files...)); !tt.want(err) {
			t.Errorf("%s: %v", name, err)
		}
		w.wantFiles("b")
	}
	must(t, os.Remove(w.path("dir")))
	w.checkSound()
	files, err := w.PutAll(ctx, tenant, chatID, several("a=1", "b="+strings.Repeat("B", 80), "c="+strings.Repeat("c", 19)))
	if err != nil || len(files) != 3 || files[1].Name != "b" || files[1].Size != 80 {
		t.Fatalf("%+v, %v", files, err)
	}
	w.checkSound()
	if files, err := w.PutAll(ctx, tenant, chatID, several()); err != nil || len(files) > 0 {
		t.Errorf("nothing: %+v, %v", files, err)
	}
}

func TestPaging(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	w.write("f00000", "")
	want := []string{"f00000"}
	for i := range 1_999 { // names of one file are made faster than files
		want = append(want, fmt.Sprintf("f%05d", i+1))
		must(t, os.Link(w.path("f00000"), w.path(want[i+1])))
	}
	for _, limit := range []int{397, 10_000, 1 << 30} { // the first makes the records
		if got := w.names(limit); !slices.Equal(got, want) {
			t.Errorf("by %d: listed %d, want %d", limit, len(got), len(want))
		}
	}
	l, err := w.Files(ctx, tenant, chatID, "f00010", 2)
	if err != nil || len(l.Files) != 2 || l.Files[0].Name != "f00011" || !l.More || l.Beyond {
		t.Errorf("%+v, %v", l, err)
	}
	again, err := w.Files(ctx, tenant, chatID, "f00010", 0)
	if err != nil || len(again.Files) != 1 || again.Files[0].ID != l.Files[0].ID {
		t.Errorf("%+v, %v", again, err)
	}
	w.checkSound()
	n, err := w.DeleteFiles(ctx, tenant, chatID)
	if err != nil || n != 2_000 || len(w.names(10)) != 0 {
		t.Errorf("deleted %d, %v", n, err)
	}
	w.checkSound()
}

func TestDeleteFile(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 100)
	file := w.put("a", strings.Repeat("a", 60))
	w.put("b", strings.Repeat("b", 40))
	must(t, w.DeleteFile(ctx, tenant, chatID, "a"))
	w.checkSound()
	wantError[*chat.FileNotFoundError](t, "again", w.DeleteFile(ctx, tenant, chatID, "a"))
	wantError[*chat.FileNotFoundError](t, "by ID", second(w.File(ctx, tenant, file.ID)))
	wantError[*chat.FileNotFoundError](t, "its content", second(w.Content(ctx, tenant, chatID, "a")))
	if again := w.put("a", strings.Repeat("a", 60)); again.ID == file.ID {
		t.Error("another file has the ID of one that was deleted")
	}
	// One that a sandbox deletes is gone as well.
	must(t, os.Remove(w.path("a")))
	wantError[*chat.FileNotFoundError](t, "of a sandbox", w.DeleteFile(ctx, tenant, chatID, "a"))
	wantError[*lifecycle.InvalidError](t, "the history", w.DeleteFile(ctx, tenant, chatID, "history.md"))
	if n, err := w.DeleteFiles(ctx, tenant, chatID); n != 1 || err != nil {
		t.Errorf("the others: %d, %v", n, err)
	}
	if got := w.history(); got != "" {
		t.Errorf("the history has %q", got)
	}
}

func TestTar(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 10_000)
	file := w.put("a", "old")
	must(t, second(w.PutHistory(ctx, tenant, chatID, -1, strings.NewReader("said"))))
	must(t, os.Mkdir(w.path("d"), 0o755))
	w.write("d/deep", "deep")
	var archive strings.Builder
	must(t, w.ReadTar(ctx, tenant, chatID, &archive))
	w.put("a", "new, and longer")
	w.put("b", "stays")
	w.write("d/other", "stays")
	must(t, second(w.AppendHistory(ctx, tenant, chatID, -1, strings.NewReader(" more"))))
	if err := w.WriteTar(ctx, tenant, chatID, strings.NewReader(archive.String()[:archive.Len()/2])); err == nil {
		t.Error("half an archive was taken")
	}
	if got := w.read("a"); got != "new, and longer" {
		t.Errorf("after half an archive: %q", got)
	}
	must(t, w.WriteTar(ctx, tenant, chatID, strings.NewReader(archive.String())))
	for name, want := range map[string]string{"a": "old", "b": "stays", "d/deep": "deep", "d/other": "stays", "history.md": "said"} {
		if b, err := os.ReadFile(w.path(name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	if got, err := w.FileNamed(ctx, tenant, chatID, "a"); err != nil || got.ID != file.ID {
		t.Errorf("%+v, %v", got, err)
	}
	l, err := w.Files(ctx, tenant, chatID, "", 10)
	if err != nil || len(l.Files) != 2 {
		t.Errorf("%+v, %v", l, err)
	}
	w.put("a", "again")
	must(t, os.RemoveAll(w.path("d")), os.WriteFile(w.path("d"), nil, 0o644))
	if err := w.WriteTar(ctx, tenant, chatID, strings.NewReader(archive.String())); !errdefs.IsFailedPrecondition(err) || w.read("a") != "again" {
		t.Errorf("with a file in the way of a directory: %v, %q", err, w.read("a"))
	}
	w.put("big", strings.Repeat("x", 9_970))
	wantError[*quota.FullError](t, "beyond the quota", w.WriteTar(ctx, tenant, chatID, strings.NewReader(archive.String())))
	must(t, w.DeleteFile(ctx, tenant, chatID, "big"))
	if n, err := w.DeleteFiles(ctx, tenant, chatID); n != 3 || err != nil {
		t.Errorf("deleted %d, %v", n, err)
	}
	w.checkSound()
}

// An archive may have a name twice, and then the last one counts, also if it is smaller.
func TestTarOfOneNameTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1000)
	var archive bytes.Buffer
	tw := tar.NewWriter(&archive)
	for _, size := range []int{600, 10, 700, 20} {
		err := errors.Join(tw.WriteHeader(&tar.Header{Name: "a", Typeflag: tar.TypeReg, Size: int64(size), Mode: 0o644}),
			second(tw.Write(bytes.Repeat([]byte("x"), size))))
		must(t, err)
	}
	must(t, tw.Close())
	must(t, w.WriteTar(context.Background(), tenant, chatID, &archive))
	if got := w.read("a"); len(got) != 20 {
		t.Errorf("%d bytes", len(got))
	}
	w.checkSound()
}

// How large an archive may be has nothing to do with other chats, and is bounded without a
// quota, too.
func TestTarIsOfOneChat(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, quota := range []int64{0, 1000} {
		w := newWorld(t, quota)
		w.write("a", strings.Repeat("a", 10_000)) // by a sandbox, beyond the quota
		other := filepath.Join(w.root, "other")
		w.ensure(tenant, "other")
		if err := errors.Join(os.RemoveAll(other), os.Symlink(chatID, other)); err != nil { // which can't be measured
			t.Fatal(err)
		}
		if err := w.ReadTar(ctx, tenant, chatID, io.Discard); err != nil {
			t.Errorf("quota %d: %v", quota, err)
		}
		w.write("sparse", "")
		if err := os.Truncate(w.path("sparse"), 1<<40); err != nil {
			t.Skip(err)
		}
		if err := w.ReadTar(ctx, tenant, chatID, io.Discard); !errorIs[*chat.TooLargeError](err) || errdefs.IsResourceExhausted(err) {
			t.Errorf("quota %d: %v", quota, err)
		}
	}
}

// swapping is a store where something happens once a file was looked up.
type swapping struct {
	chat.Store
	then func()
}

func (s swapping) RecordOf(ctx context.Context, tenant, id string) (string, chat.Record, error) {
	chatID, r, err := s.Store.RecordOf(ctx, tenant, id)
	s.then()
	return chatID, r, err
}

// A file that takes the name of one that is deleted by its ID meanwhile stays.
func TestDeleteFileID(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, 0)
	w.put("a", "old")
	old, err := w.FileNamed(ctx, tenant, chatID, "a")
	must(t, err)
	other, err := chat.New(ctx, chat.Options{
		Root: w.root, Quotas: w.quotas, Sandboxes: w.boxes,
		Store: swapping{w.db, func() {
			if err := w.DeleteFile(ctx, tenant, chatID, "a"); err != nil {
				t.Error(err)
			}
			w.put("a", "new")
		}},
	})
	must(t, err)
	defer func() { _ = other.Close(ctx) }()
	wantError[*chat.FileNotFoundError](t, "the old one", other.DeleteFileID(ctx, tenant, old.ID))
	now, err := w.FileNamed(ctx, tenant, chatID, "a")
	if err != nil || now.ID == old.ID {
		t.Fatalf("there is %+v, %v", now, err)
	}
	if err := w.DeleteFileID(ctx, tenant, now.ID); err != nil {
		t.Error(err)
	}
	wantError[*chat.FileNotFoundError](t, "the new one", second(w.FileNamed(ctx, tenant, chatID, "a")))
	w.checkSound()
}
