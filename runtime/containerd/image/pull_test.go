package image

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/bermhq/berm/runtime"
)

func TestRegistryFailure(t *testing.T) {
	err := registryFailure(fmt.Errorf("failed to do request: %w", &url.Error{Op: "Get", URL: "https://u:hush@x.test/a?b=hush#hush", Err: os.ErrDeadlineExceeded}))
	if got, want := err.Error(), "Get https://x.test/a: i/o timeout"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if !errors.Is(registryFailure(io.EOF), io.EOF) {
		t.Error("the end of a body is an error")
	}
}

func TestFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []runtime.PullProgress
		f := newFollower(func(p runtime.PullProgress) { told = append(told, p) }, "begun")
		one := ocispec.Descriptor{Digest: digest.FromString("1"), Size: 10}
		two := ocispec.Descriptor{Digest: digest.FromString("2"), Size: 5}
		for _, step := range []func(){
			func() { f.layer(one, false); f.layer(two, true) },
			func() { f.reached(one, 4) },
			func() {}, // nothing new isn't told
			func() { f.reached(one, 2) },
			func() { f.reached(one, 11) },
		} {
			step()
			time.Sleep(progressInterval)
			synctest.Wait()
		}
		f.end(true)
		a, b := short(one), short(two)
		want := []runtime.PullProgress{
			{Status: "begun"},
			{Status: b + " Download complete", CurrentBytes: 5, TotalBytes: 15},
			{Status: a + " Downloading", CurrentBytes: 9, TotalBytes: 15},
			{Status: a + " Downloading", CurrentBytes: 15, TotalBytes: 15},
			{Status: "Pull complete", CurrentBytes: 15, TotalBytes: 15},
		}
		if d := cmp.Diff(want, told); d != "" {
			t.Error(d)
		}
	})
}
