package main

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/image"
	docker "github.com/docker/docker/client"
	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// A create that has to pull is answered 202, and made in the end; from a real
// registry, by a real engine.
func TestCreateThatPulls(t *testing.T) {
	ctx := t.Context()
	shop := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(shop.Close)
	ref := strings.TrimPrefix(shop.URL, "http://") + "/team/tool:1"

	d := startEngineWith(t, engine.Options{NoNetns: true}) // so that it reaches our loopback
	raw, err := docker.NewClientWithOpts(docker.WithHost(d.Host()), docker.WithAPIVersionNegotiation())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = raw.Close() }()
	if err := d.ImportBusybox(ctx, ref); err != nil {
		t.Fatal(err)
	}
	pushed, err := raw.ImagePush(ctx, ref, image.PushOptions{RegistryAuth: "e30="})
	if err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(pushed)
	if err != nil || strings.Contains(string(answer), "error") {
		t.Fatalf("push: %s, %v", answer, err)
	}
	if _, err := raw.ImageRemove(ctx, ref, image.RemoveOptions{Force: true, PruneChildren: true}); err != nil {
		t.Fatal(err)
	}

	s, server := newStorm(t, d.Host())
	if err := os.WriteFile(filepath.Join(server.dir, "policy.yaml"), []byte("version: 1\nimages: {allow: ["+strings.TrimSuffix(ref, ":1")+"]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	server.stop()
	s.start(server)
	hc := &http.Client{Transport: s.checker.Transport(nil)}
	began := time.Now()
	for calls := 0; ; calls++ {
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, server.url+"/api/v1/sandboxes/puller", strings.NewReader(`{"image":"`+ref+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-API-Token", server.token)
		resp, err := hc.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if calls > 0 && (resp.StatusCode == http.StatusCreated || resp.StatusCode == http.StatusOK) {
			break
		}
		if resp.StatusCode != http.StatusAccepted || resp.Header.Get("Location") != "/api/v1/sandboxes/puller" {
			t.Fatalf("call %d: %s, Location %q\n%s", calls, resp.Status, resp.Header.Get("Location"), body)
		}
		wait, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		if err != nil || wait < 1 {
			t.Fatalf("Retry-After %q", resp.Header.Get("Retry-After"))
		}
		if time.Since(began) > time.Minute {
			t.Fatal("it never got there")
		}
		time.Sleep(time.Duration(wait) * time.Second) // as the server says
	}
	if _, err := s.client.Delete(ctx, "puller"); err != nil {
		t.Error(err)
	}
	server.stop()
	wantEmpty(t, d)
}
