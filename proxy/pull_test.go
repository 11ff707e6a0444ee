package proxy_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
)

// Callers read why an image can't be pulled, and nothing that is secret.
func TestPullReason(t *testing.T) {
	const ref = "reg.example.com/team/tool:1"
	for said, want := range map[string]string{
		`pull image "reg.example.com/team/tool:1": Error response from daemon: pull access denied for tool, repository does not exist or may require 'docker login': denied: requested access to the resource is denied`: "pull access denied for tool, repository does not exist or may require 'docker login': denied: requested access to the resource is denied",
		"Error response from daemon: manifest for reg.example.com/team/tool:1 not found: manifest unknown: manifest unknown":                                                                                             "manifest for reg.example.com/team/tool:1 not found: manifest unknown: manifest unknown",
		`Get "https://reg.example.com/v2/": dial tcp: lookup reg.example.com: no such host`:                                                                                                                              `Get "https://reg.example.com/v2/": dial tcp: lookup reg.example.com: no such host`,
		`Get "https://reg.example.com/v2/": tls: failed to verify certificate: x509: certificate signed by unknown authority`:                                                                                            `Get "https://reg.example.com/v2/": tls: failed to verify certificate: x509: certificate signed by unknown authority`,
		"toomanyrequests: You have reached your pull rate limit":                                                                                                                                                         "toomanyrequests: You have reached your pull rate limit",
		`failed to resolve reference "reg.example.com/team/tool:1": HEAD https://reg.example.com/v2/team/tool/manifests/1: 503`:                                                                                          "HEAD https://reg.example.com/v2/team/tool/manifests/1: 503",
		"failed to register layer: write /var/lib/docker/overlay2/x/hunter2: no space left on device":                                                                                                                    "the engine's disk is full",
		"failed to register layer: open /var/lib/hunter2/x: permission denied":                                                                                                                                           "failed to register layer: open …: permission denied",
		`Get "https://user:hunter2@reg.example.com/v2/": EOF`:                                                                                                                                                            `Get "https://reg.example.com/v2/": EOF`,
		"Get https://user:p@hunter2@reg.example.com/v2/: EOF":                                                                                                                                                            "Get https://reg.example.com/v2/: EOF",
		`Get "https://cdn.example.com/blob?X-Amz-Signature=hunter2&b=c": 403`:                                                                                                                                            `Get "https://cdn.example.com/blob": 403`,
		`token failed: {"password": "hunter2", "user":"x"}`:                                                                                                                                                              `token failed: {"password": "…", "user":"x"}`,
		"Authorization: Bearer hunter2.x.y was refused":                                                                                                                                                                  "Authorization: Bearer … was refused",
		"Head \"https://reg.example.com/v2/\": no basic auth credentials":                                                                                                                                                "Head \"https://reg.example.com/v2/\": no basic auth credentials",
		"sent Basic hunter2": "sent Basic …",
		"refused eyJhbGciOiJSUzI1NiIsInR5cCIhunter2.eyJhdWQiOiJyZWdpc3RyeS5kb2NrZXhunter2":         "refused ….…",
		"refused 0123456789abcdef0123456789abcdef":                                                 "refused …",
		"manifest sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef unknown": "manifest sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef unknown",
		"two\r\nlines\x1b[31m and \xff":                                                            "two lines [31m and ",
		strings.Repeat("a b ", 10_000):                                                             "the registry's answer is too long to show",
	} {
		for _, class := range []error{errdefs.ErrNotFound, errdefs.ErrUnknown} {
			err := &lifecycle.StartError{Err: fmt.Errorf("create: %w", &lifecycle.PullError{Image: ref, Err: told{class, said}})}
			f := proxy.FaultOf(err)
			if got := "the image " + ref + " can't be pulled: " + strings.TrimSpace(want); strings.TrimSpace(f.Detail) != got || f.Code != "sandbox_start_failed" || f.Status != 503 {
				t.Errorf("%d %s: %s\nwant %s", f.Status, f.Code, f.Detail, got)
			}
		}
	}
	long := &lifecycle.StartError{Err: &lifecycle.PullError{Image: ref, Err: errors.New(strings.Repeat("a b ", 1000))}}
	if f := proxy.FaultOf(long); len(f.Detail) > 500 {
		t.Errorf("%d bytes: %s", len(f.Detail), f.Detail)
	}
}

// told is an error of a class with a text of its own.
type told struct {
	error
	text string
}

func (e told) Error() string { return e.text }
func (e told) Unwrap() error { return e.error }
