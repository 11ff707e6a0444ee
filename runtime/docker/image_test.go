package docker

import (
	"bytes"
	"context"
	"encoding/base64"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

func TestPull(t *testing.T) {
	d := shared.Get(t)
	registry, err := engine.StartRegistry(t.Context(), engine.RegistryOptions{Netns: d.Netns()})
	must(t, err)
	closeRegistry := sync.OnceValue(registry.Close)
	defer func() { _ = closeRegistry() }()
	must(t, registry.Push(t.Context(), "some/image:v1"))
	repo := registry.Host() + "/some/image"
	var asked []string
	r := newRuntimeWith(t, Options{Host: d.Host(), RegistryAuth: func(_ context.Context, host string) (user, secret string, err error) {
		asked = append(asked, host)
		return "", "", nil
	}})
	want := []string{repo + ":v1"}
	for i := 0; i < len(want); i++ {
		var last runtime.PullProgress
		got, err := r.Pull(t.Context(), want[i], func(p runtime.PullProgress) { last = p })
		must(t, err)
		if !strings.HasPrefix(got.ID, "sha256:") || len(got.Digests) != 1 || !strings.HasPrefix(got.Digests[0], repo+"@sha256:") {
			t.Fatalf("%s: %+v", want[i], got)
		}
		if last.Status == "" || last.CurrentBytes != last.TotalBytes {
			t.Errorf("%s: progress ended with %+v", want[i], last)
		}
		if i == 0 {
			want = append(want, got.Digests...)
		}
	}
	if d := cmp.Diff([]string{registry.Host(), registry.Host()}, asked); d != "" {
		t.Error(d)
	}
	must(t, closeRegistry())
	if _, err := r.Pull(t.Context(), repo+":v3", nil); err == nil || errdefs.IsNotFound(err) {
		t.Errorf("a registry that is away: %v", err)
	}
}

func TestEncodeAuth(t *testing.T) {
	for _, tt := range []struct{ user, secret, want string }{
		{"hub", "pass:word", `{"username":"hub","password":"pass:word"}`}, {"", "identity", `{"identitytoken":"identity"}`}, {"", "", ""}, {"me", "", ""},
	} {
		encoded, err := encodeAuth(tt.user, tt.secret)
		must(t, err)
		plain, err := base64.URLEncoding.DecodeString(encoded)
		if err != nil || string(plain) != tt.want {
			t.Errorf("%q, %q: %s, %v", tt.user, tt.secret, plain, err)
		}
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
		{"registry away", `{"errorDetail":{"code":503,"message":"away"},"error":"away"}`, nil, errdefs.IsUnknown},
		{"registry slow", `{"errorDetail":{"code":504,"message":"away"},"error":"away"}`, nil, errdefs.IsUnknown},
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
