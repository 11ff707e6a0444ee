package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

func TestFiles(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	if _, err := b.Create(ctx, "k", apitype.SandboxRequest{}); err != nil {
		t.Fatal(err)
	}
	const odd = "/d/\xff+ &"
	for _, name := range []string{"/d/a.txt", odd} {
		info, err := b.WriteFile(ctx, "k", name, strings.NewReader("0123456789\nneedle"), client.WriteOptions{Mode: 0o600, Mkdir: true, NoClash: true})
		if err != nil || info.Size != 17 || info.Mode != "0600" {
			t.Fatalf("%q: %+v, %v", name, info, err)
		}
		_, err = b.WriteFile(ctx, "k", name, strings.NewReader(""), client.WriteOptions{NoClash: true})
		wantCode(t, err, "precondition_failed")
		for _, part := range []struct {
			offset, length int64
			want           string
		}{{0, 0, "0123456789\nneedle"}, {11, 0, "needle"}, {2, 3, "234"}, {0, 1, "0"}} {
			r, err := b.ReadFile(ctx, "k", name, part.offset, part.length)
			if got := all(t, r, err); got != part.want {
				t.Errorf("%q from %d: %q", name, part.offset, got)
			}
		}
		_, err = b.ReadFile(ctx, "k", name, 100, 0)
		wantCode(t, err, "range")
		stat, err := b.StatFile(ctx, "k", name)
		if err != nil || stat.Type != "file" || name == odd && string(stat.PathBase64) != odd {
			t.Errorf("got %+v, %v", stat, err)
		}
	}
	if _, err := b.WriteFile(ctx, "k", "/d/a.txt", strings.NewReader("!"), client.WriteOptions{Append: true}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(b.Mkdir(ctx, "k", "/d/e/f", 0o700, true), b.Mkdir(ctx, "k", "/d/g", 0, false)); err != nil {
		t.Error(err)
	}
	wantCode(t, b.Mkdir(ctx, "k", "/d/g", 0, false), "file_exists")
	if err := errors.Join(b.CopyFile(ctx, "k", odd, "/d/e/copy", false), b.MoveFile(ctx, "k", "/d/e/copy", "/d/e/\xfe", false)); err != nil {
		t.Error(err)
	}
	wantCode(t, b.MoveFile(ctx, "k", "/d/a.txt", odd, false), "file_exists")
	var names []string
	for info, err := range b.ListFiles(ctx, "k", "/d", 3) {
		must(t, err)
		names = append(names, info.Path)
	}
	if diff := cmp.Diff([]string{"/d/a.txt", "/d/e", "/d/e/f", "/d/e/\ufffd", "/d/g", "/d/\ufffd+ &"}, names); diff != "" {
		t.Error(diff)
	}
	for info, err := range b.ListFiles(ctx, "k", "/d", 0) {
		if err != nil || info.Path != "/d/a.txt" {
			t.Errorf("got %+v, %v", info, err)
		}
		break
	}
	for _, err := range b.ListFiles(ctx, "k", "/none", 0) {
		wantCode(t, err, "file_not_found")
	}
	list, err := b.GlobFiles(ctx, "k", "/d", "*", 2)
	if err != nil || len(list.Files) != 2 || !list.Truncated {
		t.Errorf("got %+v, %v", list, err)
	}
	found, err := b.SearchFiles(ctx, "k", "/d", client.SearchOptions{Pattern: "NEEDLE", Literal: true, IgnoreCase: true, Include: "a.*", Limit: 5})
	if err != nil || len(found.Matches) != 1 || found.Matches[0].Path != "/d/a.txt" || found.Matches[0].Line != 2 || found.Matches[0].Text != "needle!" {
		t.Errorf("got %+v, %v", found, err)
	}

	if err := b.WriteTar(ctx, "k", "/d/g", packed(t, [2]string{"in.txt", "hi"})); err != nil {
		t.Error(err)
	}
	r, err := b.ReadTar(ctx, "k", "/d/g")
	must(t, err)
	if diff := cmp.Diff(map[string]string{"g/": "", "g/in.txt": "hi"}, untar(t, r)); diff != "" {
		t.Error(diff)
	}
	wantCode(t, b.RemoveFile(ctx, "k", "/d", false), "file_wrong_kind")
	if err := b.RemoveFile(ctx, "k", "/d", true); err != nil {
		t.Error(err)
	}
	_, err = b.StatFile(ctx, "k", "/d")
	wantCode(t, err, "file_not_found")
	_, err = b.as(t, blue, 0).StatFile(ctx, "k", "/")
	wantCode(t, err, "not_found")
}

func second[T any](_ T, err error) error { return err }

func TestWatchFiles(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := b.Create(ctx, "k", apitype.SandboxRequest{}); err != nil {
		t.Fatal(err)
	}
	var types []string
	for e, err := range b.WatchFiles(ctx, "k", "/tmp", true) {
		must(t, err)
		types = append(types, e.Type)
		if e.Type == "ready" {
			if _, err := b.WriteFile(ctx, "k", "/tmp/x", strings.NewReader("x"), client.WriteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if e.Path == "/tmp/x" {
			break
		}
	}
	if len(types) < 2 || types[0] != "ready" {
		t.Errorf("got %q", types)
	}
	for _, err := range b.WatchFiles(ctx, "k", "/none", false) {
		wantCode(t, err, "file_not_found")
	}
	// The sandbox's end is an error, the caller's own isn't.
	for e, err := range b.WatchFiles(ctx, "k", "/tmp", false) {
		if e.Type == "ready" {
			if _, err := b.Delete(ctx, "k"); err != nil {
				t.Fatal(err)
			}
		} else if err == nil {
			t.Errorf("got %+v", e)
		}
	}
	if _, err := b.Create(ctx, "k", apitype.SandboxRequest{}); err != nil {
		t.Fatal(err)
	}
	for e, err := range b.WatchFiles(ctx, "k", "/tmp", false) {
		if cancel(); err != nil || e.Type != "ready" {
			t.Errorf("got %+v, %v", e, err)
		}
	}
}

func TestPort(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	if _, err := b.Create(ctx, "k", apitype.SandboxRequest{}); err != nil {
		t.Fatal(err)
	}
	l := pipes.Listen()
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(w, "%s %s %s %s %q", r.Method, r.Host, r.RequestURI, body, r.Header.Get("Authorization"))
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(l) })
	b.fake.Listen(8000, func(c net.Conn) { l.Hand(c) })
	defer func() {
		_ = srv.Close()
		wg.Wait()
	}()
	// What a port answers isn't documented.
	c, err := client.New(client.Options{BaseURL: b.url, Token: red})
	must(t, err)
	resp, err := c.Port("k", 8000).Post("http://whatever/a%2Fb?q=1;2", "text/plain", strings.NewReader("body"))
	must(t, err)
	if got, want := all(t, resp.Body, nil), `POST localhost:8000 /a%2Fb?q=1;2 body ""`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, tail := range []string{"../x", "a/..", ".", "%2e%2e%2fx", "%2E", `..%5cx`} {
		if resp, err := c.Port("k", 8000).Get("http://whatever/" + tail); !errors.Is(err, client.ErrDotSegment) {
			t.Errorf("%s: %v, %v", tail, resp, err)
		}
	}
	u, err := b.PortURL(ctx, "k", 8000, time.Minute)
	if err != nil || time.Until(u.ExpiresAt) > 62*time.Second || u.URL != b.url+u.Path {
		t.Fatalf("got %+v, %v", u, err)
	}
	resp, err = http.Get(u.URL + "x")
	must(t, err)
	if got, want := all(t, resp.Body, nil), `GET localhost:8000 /x  ""`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	_, err = b.PortURL(ctx, "k", 0, 0)
	wantCode(t, err, "validation")
}
