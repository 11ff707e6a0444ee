package docker

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// push puts an image of one layer into a repository, and gives its digest.
func push(t *testing.T, repo, tag string) string {
	t.Helper()
	put := func(method, path, contentType string, body []byte) string {
		t.Helper()
		sum := fmt.Sprintf("sha256:%x", sha256.Sum256(body))
		req, err := http.NewRequestWithContext(t.Context(), method, repo+strings.ReplaceAll(path, "DIGEST", sum), bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", contentType)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusCreated {
			t.Fatalf("%s %s: %s", method, path, resp.Status)
		}
		return fmt.Sprintf(`"size":%d,"digest":%q`, len(body), sum)
	}
	content := make([]byte, 300_000)
	_, _ = rand.Read(content)
	var layer bytes.Buffer
	diff := sha256.New()
	zip := gzip.NewWriter(&layer)
	w := tar.NewWriter(io.MultiWriter(zip, diff))
	for _, err := range []error{
		w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(content))}),
		func() error { _, err := w.Write(content); return err }(),
		w.Close(), zip.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	const upload, docker = "blobs/uploads/?digest=DIGEST", "application/vnd.docker."
	blob := put(http.MethodPost, upload, "application/octet-stream", layer.Bytes())
	config := put(http.MethodPost, upload, "application/octet-stream", fmt.Appendf(nil,
		`{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, diff.Sum(nil)))
	manifest := fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":"%[1]sdistribution.manifest.v2+json",
		"config":{"mediaType":"%[1]scontainer.image.v1+json",%[2]s},
		"layers":[{"mediaType":"%[1]simage.rootfs.diff.tar.gzip",%[3]s}]}`, docker, config, blob)
	put(http.MethodPut, "manifests/"+tag, docker+"distribution.manifest.v2+json", manifest)
	return fmt.Sprintf("sha256:%x", sha256.Sum256(manifest))
}

func TestPull(t *testing.T) {
	engine.Require(t, "docker")
	// Only in this network namespace does the daemon reach the registry.
	d, err := engine.StartDocker(t.Context(), engine.Options{NoNetns: true})
	if err != nil {
		engine.Lacking(t, "docker", err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	srv := httptest.NewServer(new(engine.RegistryStore))
	defer srv.Close()
	repo := strings.TrimPrefix(srv.URL, "http://") + "/some/image"
	digest := push(t, srv.URL+"/v2/some/image/", "v1")

	var asked []string
	r, err := New(Options{Host: d.Host(), RegistryAuth: func(_ context.Context, ref string) (string, error) {
		asked = append(asked, ref)
		return "", nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	for _, ref := range []string{repo + ":v1", repo + "@" + digest} {
		var last runtime.PullProgress
		got, err := r.Pull(t.Context(), ref, func(p runtime.PullProgress) { last = p })
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(got.ID, "sha256:") || len(got.Digests) != 1 || got.Digests[0] != repo+"@"+digest {
			t.Errorf("%s: %+v", ref, got)
		}
		if last.Status == "" || last.CurrentBytes != last.TotalBytes {
			t.Errorf("%s: progress ended with %+v", ref, last)
		}
	}
	if d := cmp.Diff([]string{repo + ":v1", repo + "@" + digest}, asked); d != "" {
		t.Error(d)
	}
	if _, err := r.Pull(t.Context(), repo+":v2", nil); !errdefs.IsNotFound(err) {
		t.Errorf("a tag that isn't there: %v", err)
	}
	if _, err := r.Pull(t.Context(), "Not A Reference", nil); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a malformed reference: %v", err)
	}
	srv.Close()
	if _, err := r.Pull(t.Context(), repo+":v3", nil); err == nil || errdefs.IsNotFound(err) {
		t.Errorf("a registry that is away: %v", err)
	}
}

func TestReadPull(t *testing.T) {
	cases := []struct {
		name, stream string
		want         []runtime.PullProgress
		is           func(error) bool
	}{
		{"layers", `{"status":"Pulling from x","id":"v1"}
			{"status":"Pulling fs layer","progressDetail":{},"id":"a"}
			{"status":"Downloading","progressDetail":{"current":5,"total":10},"id":"a"}
			{"status":"Downloading","progressDetail":{"current":1,"total":7},"id":"b"}
			{"status":"Verifying Checksum","progressDetail":{},"id":"a"}
			{"status":"Extracting","progressDetail":{"current":3,"total":10},"id":"a"}
			{"status":"Digest: sha256:0"}`,
			[]runtime.PullProgress{
				{Status: "v1 Pulling from x"},
				{Status: "a Pulling fs layer"},
				{Status: "a Downloading", CurrentBytes: 5, TotalBytes: 10},
				{Status: "b Downloading", CurrentBytes: 6, TotalBytes: 17},
				{Status: "a Verifying Checksum", CurrentBytes: 11, TotalBytes: 17},
				{Status: "a Extracting", CurrentBytes: 11, TotalBytes: 17},
				{Status: "Digest: sha256:0", CurrentBytes: 11, TotalBytes: 17},
			}, nil},
		{"error", `{"errorDetail":{"message":"no space"},"error":"no space"}`, nil, errdefs.IsUnknown},
		{"coded error", `{"errorDetail":{"code":404,"message":"gone"},"error":"gone"}`, nil, errdefs.IsNotFound},
		{"cut", `{"status":`, nil, func(err error) bool { return errdefs.IsUnavailable(classify(context.Background(), err)) }},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			var got []runtime.PullProgress
			err := readPull(strings.NewReader(tc.stream), func(p runtime.PullProgress) { got = append(got, p) })
			if tc.is == nil && err != nil || tc.is != nil && !tc.is(err) {
				t.Errorf("error %v", err)
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func FuzzReadPull(f *testing.F) {
	f.Add([]byte(`{"status":"Downloading","progressDetail":{"current":5,"total":10},"id":"a"}`))
	f.Add([]byte(`{"errorDetail":{"message":"no space"},"error":"no space"}{`))
	f.Fuzz(func(t *testing.T, stream []byte) {
		_ = readPull(bytes.NewReader(stream), func(p runtime.PullProgress) {
			if p.CurrentBytes > p.TotalBytes && p.TotalBytes > 0 {
				t.Errorf("%+v", p)
			}
		})
	})
}
