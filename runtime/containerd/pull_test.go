package containerd

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// shop is a registry on loopback. What it does with a request can be changed.
type shop struct {
	*httptest.Server
	host  string
	inner http.Handler
	serve atomic.Pointer[http.HandlerFunc]
}

func newShop(t *testing.T) *shop {
	t.Helper()
	s := &shop{inner: new(engine.RegistryStore)}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := s.serve.Load(); f != nil {
			(*f)(w, r)
			return
		}
		s.inner.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	s.host = strings.TrimPrefix(s.URL, "http://")
	return s
}

func (s *shop) change(f http.HandlerFunc) {
	if f == nil {
		s.serve.Store(nil)
		return
	}
	s.serve.Store(&f)
}

func (s *shop) put(t *testing.T, method, path, mediaType string, body []byte) {
	t.Helper()
	req := httptest.NewRequestWithContext(t.Context(), method, "/v2/"+path, bytes.NewReader(body))
	req.Header.Set("Content-Type", mediaType)
	reply := httptest.NewRecorder()
	if s.inner.ServeHTTP(reply, req); reply.Code != http.StatusCreated {
		t.Fatalf("%s %s: %d", method, path, reply.Code)
	}
}

// push puts an image into a repository, and gives its reference.
func (s *shop) push(t *testing.T, img *madeImage, repo, tag string) string {
	t.Helper()
	for d, blob := range img.blobs {
		if d == img.manifest.Digest {
			s.put(t, http.MethodPut, repo+"/manifests/"+tag, img.manifest.MediaType, blob)
			s.put(t, http.MethodPut, repo+"/manifests/"+d.String(), img.manifest.MediaType, blob)
			continue
		}
		s.put(t, http.MethodPost, repo+"/blobs/uploads/?digest="+d.String(), "application/octet-stream", blob)
	}
	return s.host + "/" + repo + ":" + tag
}

// pushIndex puts an index of images for platforms into a repository.
func (s *shop) pushIndex(t *testing.T, repo, tag string, manifests ...ocispec.Descriptor) (string, digest.Digest) {
	t.Helper()
	blob, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": ocispec.MediaTypeImageIndex, "manifests": manifests})
	must(t, err)
	s.put(t, http.MethodPut, repo+"/manifests/"+tag, ocispec.MediaTypeImageIndex, blob)
	return s.host + "/" + repo + ":" + tag, digest.FromBytes(blob)
}

func bulk(size int) string {
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(rand.Uint32()) //nolint:gosec // only mustn't compress
	}
	return string(b)
}

func TestPull(t *testing.T) {
	r := imageRuntime(t, nil)
	s := newShop(t)
	img := (&madeImage{config: ocispec.ImageConfig{User: "7"}, layers: [][]tar.Header{{file("one", bulk(3<<20))}, {file("two", bulk(2<<20))}}}).build(t)
	ref := s.push(t, img, "some/image", "v1")
	id := img.manifest.Digest
	repo := s.host + "/some/image"
	want := runtime.Image{ID: id.String(), Digests: []string{repo + "@" + id.String()}, User: "7"}
	for _, ref := range []string{ref, repo + "@" + id.String(), ref} {
		var told []runtime.PullProgress
		got, err := r.Pull(t.Context(), ref, func(p runtime.PullProgress) { told = append(told, p) })
		must(t, err)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", ref, d)
		}
		var last runtime.PullProgress
		for _, p := range told {
			if p.CurrentBytes < last.CurrentBytes || p.TotalBytes < last.TotalBytes || p.CurrentBytes > p.TotalBytes || p.Status == "" {
				t.Errorf("%s: progress %+v after %+v", ref, p, last)
			}
			last = p
		}
		if last.CurrentBytes < 5<<20 || last.CurrentBytes != last.TotalBytes {
			t.Errorf("%s: progress ended with %+v", ref, last)
		}
	}
	if unpacked, err := r.images.Unpacked(r.namespaced(t.Context()), ref); err != nil || len(r.snapshots(t)) != 2 {
		t.Errorf("unpacked: %+v, %v, %q", unpacked, err, r.snapshots(t))
	}

	// A tag that moved.
	other := (&madeImage{layers: [][]tar.Header{{file("one", "other")}}}).build(t)
	s.push(t, other, "some/image", "v1")
	if got, err := r.Pull(t.Context(), ref, nil); err != nil || got.ID != other.manifest.Digest.String() {
		t.Errorf("after the tag moved: %+v, %v", got, err)
	}
	if got, err := r.Image(t.Context(), repo+"@"+id.String()); err != nil || got.ID != id.String() {
		t.Errorf("what was pulled by digest: %+v, %v", got, err)
	}

	for ref, is := range map[string]func(error) bool{
		repo + "@sha256:abc":                        errdefs.IsInvalidArgument,
		repo + "@" + digest.FromString("").String(): errdefs.IsNotFound,
	} {
		if _, err := r.Pull(t.Context(), ref, nil); !is(err) {
			t.Errorf("%s: %v", ref, err)
		}
	}
	s.Close()
	if _, err := r.Pull(t.Context(), repo+":v3", nil); !errdefs.IsUnknown(err) {
		t.Errorf("a registry that is away: %v", err)
	}
}

// What a registry may send that can't be used, and what it may answer, are never
// taken for the engine's.
func TestPullRefused(t *testing.T) {
	r := imageRuntime(t, nil)
	s := newShop(t)
	ours := (&madeImage{layers: [][]tar.Header{{file("one", bulk(64<<10))}}}).build(t)
	foreign := (&madeImage{platform: ocispec.Platform{OS: "linux", Architecture: "s390x"}, layers: [][]tar.Header{{file("one", bulk(64<<10))}}}).build(t)
	older := (&madeImage{platform: ocispec.Platform{OS: "linux", Architecture: "386"}, layers: ours.layers}).build(t)
	liar := (&madeImage{layers: ours.layers}).build(t)
	liar.rewrite(`"diff_ids":["sha256:`, `"diff_ids":["sha256:00000000`)
	liar.rewrite(`00000000`+digest.FromBytes(liar.tars[0]).Encoded(), strings.Repeat("0", 64))
	large := (&madeImage{layers: ours.layers}).build(t)
	large.rewrite(`"os":"linux"`, `"os":"linux","x":"`+strings.Repeat("x", 4<<20)+`"`)
	wordy := (&madeImage{layers: ours.layers}).build(t)
	wordy.remake(func(m *ocispec.Manifest) { m.Annotations = map[string]string{"x": strings.Repeat("x", 4<<20)} })
	chart := (&madeImage{layers: ours.layers}).build(t)
	chart.remake(func(m *ocispec.Manifest) { m.Config.MediaType = "application/vnd.cncf.helm.config.v1+json" })

	ref := s.push(t, ours, "image", "ours")
	s.push(t, foreign, "image", "foreign")
	m := foreign.manifest
	m.Platform = &foreign.platform
	foreignIndex, _ := s.pushIndex(t, "image", "index", m)
	s.push(t, wordy, "image", "wordy")
	wordyIndex, _ := s.pushIndex(t, "image", "wordy-index", wordy.manifest)
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
	}
	blobs := func(f http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
				f(w, r)
				return
			}
			s.inner.ServeHTTP(w, r)
		}
	}
	var strangers atomic.Int32
	stranger := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { strangers.Add(1) }))
	defer stranger.Close()
	away := httptest.NewServer(nil)
	away.Close()
	cases := []struct {
		name, ref string
		serve     http.HandlerFunc
		is        func(error) bool
	}{
		{"foreign", s.host + "/image:foreign", nil, errdefs.IsNotFound},
		{"foreign index", foreignIndex, nil, errdefs.IsNotFound},
		{"32 bits", s.push(t, older, "image", "older"), nil, errdefs.IsNotFound},
		{"lying about layers", s.push(t, liar, "image", "liar"), nil, errdefs.IsUnknown},
		{"large configuration", s.push(t, large, "image", "large"), nil, errdefs.IsUnknown},
		{"large manifest", wordyIndex, nil, errdefs.IsUnknown},
		{"no image", s.push(t, chart, "image", "chart"), nil, errdefs.IsNotFound},
		{"unauthorized", ref, status(http.StatusUnauthorized), errdefs.IsNotFound},
		{"forbidden", ref, status(http.StatusForbidden), errdefs.IsNotFound},
		{"not found", ref, status(http.StatusNotFound), errdefs.IsNotFound},
		{"broken", ref, status(http.StatusInternalServerError), errdefs.IsUnknown},
		{"busy", ref, status(http.StatusTooManyRequests), errdefs.IsUnknown},
		{"unavailable", ref, status(http.StatusServiceUnavailable), errdefs.IsUnknown},
		{"not HTTP", ref, func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				_, _ = io.WriteString(conn, "hello")
				_ = conn.Close()
			}
		}, errdefs.IsUnknown},
		{"blobs forbidden", ref, blobs(status(http.StatusForbidden)), errdefs.IsNotFound},
		{"blobs missing", ref, blobs(status(http.StatusNotFound)), errdefs.IsNotFound},
		{"blobs cut", ref, blobs(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000000")
			_, _ = w.Write([]byte("half"))
			panic(http.ErrAbortHandler)
		}), errdefs.IsUnknown},
		{"blobs of other content", ref, blobs(func(w http.ResponseWriter, r *http.Request) {
			d := digest.Digest(r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:])
			_, _ = w.Write(bytes.Repeat([]byte("x"), len(ours.blobs[d])))
		}), errdefs.IsUnknown},
		{"blobs elsewhere, away", ref, blobs(func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, away.URL+"/blob?signature=hush", http.StatusTemporaryRedirect)
		}), errdefs.IsUnknown},
		{"blobs elsewhere, forbidden", ref, blobs(func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, s.URL+"/nowhere?signature=hush", http.StatusTemporaryRedirect)
		}), errdefs.IsNotFound},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			s.change(tc.serve)
			defer s.change(nil)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := r.Pull(ctx, tc.ref, nil)
			if !tc.is(err) || errdefs.IsUnavailable(err) {
				t.Errorf("%T: %v", errors.Unwrap(err), err)
			}
			if err != nil && strings.Contains(err.Error(), "hush") {
				t.Errorf("a secret is told: %v", err)
			}
			if left := r.leftOver(t); left != nil {
				t.Errorf("left over: %q", left)
			}
		})
	}

	// An address that the image names is not asked.
	astray := (&madeImage{layers: ours.layers}).build(t)
	astray.remake(func(m *ocispec.Manifest) {
		urls := []string{stranger.URL + "/metadata"}
		for i := range m.Layers {
			m.Layers[i].URLs = urls
		}
		m.Config.URLs = urls
	})
	if _, err := r.Pull(t.Context(), s.push(t, astray, "image", "astray"), nil); err != nil || strangers.Load() > 0 {
		t.Errorf("%v; an address of the image's was asked %d times", err, strangers.Load())
	}
}

func TestPullIndex(t *testing.T) {
	r := imageRuntime(t, nil)
	s := newShop(t)
	var manifests []ocispec.Descriptor
	var ours *madeImage
	for i, arch := range []string{"s390x", "386", "amd64", "arm64"} {
		img := (&madeImage{platform: ocispec.Platform{OS: "linux", Architecture: arch}, config: ocispec.ImageConfig{User: fmt.Sprint(i)}, layers: [][]tar.Header{{file("arch", arch)}}}).build(t)
		s.push(t, img, "multi", arch)
		m := img.manifest
		m.Platform = &img.platform
		manifests = append(manifests, m)
		if arch == "amd64" {
			ours = img
		}
	}
	ref, id := s.pushIndex(t, "multi", "latest", manifests...)
	got, err := r.Pull(t.Context(), ref, nil)
	if err != nil || got.ID != id.String() || got.User != "2" || len(got.Digests) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	img, err := r.images.Unpacked(r.namespaced(t.Context()), got.ID)
	if err != nil || img.ChainID != digest.FromBytes(ours.tars[0]).String() {
		t.Errorf("%+v, %v", img, err)
	}
}

func TestPullCredentials(t *testing.T) {
	const user, password = "berm", "correct horse"
	var mu sync.Mutex
	secret := password
	var asked []string
	r := imageRuntime(t, func(o *Options) {
		o.RegistryAuth = func(_ context.Context, host string) (string, string, error) {
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, host)
			return user, secret, nil
		}
	})
	s := newShop(t)
	img := (&madeImage{layers: [][]tar.Header{{file("one", "1")}}}).build(t)
	ref := s.push(t, img, "private", "v1")
	s.change(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); u == user && p == password {
			s.inner.ServeHTTP(w, r)
			return
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="shop"`)
		w.WriteHeader(http.StatusUnauthorized)
	})
	if _, err := r.Pull(t.Context(), ref, nil); err != nil {
		t.Errorf("with credentials: %v", err)
	}
	if len(asked) == 0 || asked[0] != s.host {
		t.Errorf("asked for %q", asked)
	}
	for _, wrong := range []string{"wrong horse", ""} {
		mu.Lock()
		secret = wrong
		mu.Unlock()
		if _, err := r.Pull(t.Context(), ref, nil); !errdefs.IsNotFound(err) || wrong != "" && strings.Contains(err.Error(), wrong) {
			t.Errorf("with credentials %q: %v", wrong, err)
		}
	}
}

// A pull that ends in the middle of a layer leaves nothing that stays, and none
// after it stumbles.
func TestPullCutShort(t *testing.T) {
	r := imageRuntime(t, nil)
	s := newShop(t)
	img := (&madeImage{layers: [][]tar.Header{{file("one", bulk(2<<20))}}}).build(t)
	ref := s.push(t, img, "slow", "v1")
	half := make(chan struct{}, 10)
	hold := make(chan struct{})
	s.change(func(w http.ResponseWriter, req *http.Request) {
		d := digest.Digest(req.URL.Path[strings.LastIndex(req.URL.Path, "/")+1:])
		blob := img.blobs[d]
		if req.Method != http.MethodGet || len(blob) < 1<<20 {
			s.inner.ServeHTTP(w, req)
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(blob)))
		_, _ = w.Write(blob[:len(blob)/2])
		_ = http.NewResponseController(w).Flush()
		half <- struct{}{}
		select {
		case <-hold:
		case <-req.Context().Done():
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	var last atomic.Pointer[runtime.PullProgress]
	go func() {
		_, err := r.Pull(ctx, ref, func(p runtime.PullProgress) { last.Store(&p) })
		done <- err
	}()
	<-half
	for p := last.Load(); p == nil || p.CurrentBytes < 1<<20; p = last.Load() {
		select {
		case err := <-done:
			t.Fatal(err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	if p := last.Load(); !strings.HasSuffix(p.Status, " Downloading") || p.TotalBytes < 2<<20 {
		t.Errorf("halfway: %+v", p)
	}
	cancel()
	begun := time.Now()
	if err := <-done; !errdefs.IsCanceled(err) {
		t.Error(err)
	}
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("it ended %s after its context", took)
	}
	if left := r.leftOver(t); left != nil {
		t.Errorf("left over: %q", left)
	}
	close(hold)
	s.change(nil)

	errs := make(chan error)
	for range 3 {
		go func() {
			_, err := r.Pull(t.Context(), ref, nil)
			errs <- err
		}()
	}
	for range 3 {
		must(t, <-errs)
	}
	if _, err := r.images.Unpacked(r.namespaced(t.Context()), ref); err != nil {
		t.Error(err)
	}
	if held, err := r.client.LeasesService().List(r.namespaced(t.Context())); err != nil || len(held) > 0 {
		t.Errorf("leases %+v, %v", held, err)
	}
	must(t, r.client.ImageService().Delete(r.namespaced(t.Context()), ref, images.SynchronousDelete()))
	if left := r.leftOver(t); left != nil {
		t.Errorf("left over: %q", left)
	}
}
