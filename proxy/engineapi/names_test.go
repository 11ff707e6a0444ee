package engineapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

const namesPolicy = "version: 1\nimages: {allow: [\"berm.local/*\", busybox, cafe]}\nprofiles: {default: {engine_api: {commit: \"on\", tags: [\"*\", cafe]}}}\n"

// TestNamesOfHexDigits has objects whose names could be the starts of IDs.
func TestNamesOfHexDigits(t *testing.T) {
	d, direct := engineDoor(t, namesPolicy)
	c, ctx := d.client("mine"), t.Context()
	const name = "0123456789ab"
	n := check.Value(c.NetworkCreate(ctx, name, network.CreateOptions{}))(t)
	if got, err := c.NetworkInspect(ctx, name, network.InspectOptions{}); err != nil || got.ID != n.ID {
		t.Errorf("network: %s, %v", got.ID, err)
	}
	ct := check.Value(c.ContainerCreate(ctx, sleeper, &container.HostConfig{NetworkMode: name}, nil, nil, name))(t)
	report(t, c.ContainerStart(ctx, name, container.StartOptions{}))
	if got := inspect(t, direct, ct.ID); !got.State.Running || got.NetworkSettings.Networks[name] == nil || got.NetworkSettings.Networks[name].NetworkID != n.ID {
		t.Errorf("container: %+v", got.NetworkSettings.Networks)
	}
	report(t, c.ContainerRename(ctx, name, "ba9876543210"))
	report(t, restartIt(t, c, "ba9876543210"))
	theirs := check.Value(d.client("other").NetworkCreate(ctx, "names-theirs", network.CreateOptions{}))(t)
	victim := d.made(direct, "other", "names-victim", container.Config{})
	img := check.Value(direct.ImageInspect(ctx, testImage))(t)
	for _, id := range []string{ct.ID, victim} {
		for _, start := range []string{id, id[:63], id[:12]} {
			deniedBy(t, errOf(c.ContainerCreate(ctx, sleeper, nil, nil, nil, start)), "request.name")
			deniedBy(t, c.ContainerRename(ctx, ct.ID, start), "request.name")
		}
	}
	for _, start := range []string{n.ID[:12], theirs.ID[:12], theirs.ID[:63]} {
		deniedBy(t, errOf(c.NetworkCreate(ctx, start, network.CreateOptions{})), "networks.name")
	}
	deniedBy(t, c.ImageTag(ctx, testImage, img.ID[7:19]+":1"), "images.tags")
	owned := check.Value(c.ContainerCommit(ctx, ct.ID, container.CommitOptions{Reference: "cafe"}))(t)
	if err := c.ImageTag(ctx, owned.ID, img.ID[7:19]); err == nil || !strings.Contains(err.Error(), "reads as an ID") {
		t.Errorf("tag: %v", err)
	}
	made, err := c.ContainerCreate(ctx, &container.Config{Image: "cafe"}, nil, nil, nil, "")
	if err != nil || inspect(t, direct, made.ID).Image != owned.ID {
		t.Errorf("image: %v", err)
	}
	report(t, c.ContainerRemove(ctx, made.ID, forced))
}

// TestImagesByStartsOfIDs looks at what the engine is told when a name may be an ID.
func TestImagesByStartsOfIDs(t *testing.T) {
	hex := strings.Repeat("ada0", 16)
	for _, tt := range []struct {
		name, asked, tags string // of the image that the engine gives for it
		told              string // empty: there is no such image
	}{
		{"a name", "cafe", "cafe:latest", "cafe:latest"},
		{"a visible one by its ID", "ada", "berm.local/busybox:latest", "sha256:" + hex},
		{"a visible one by its long ID", hex[:12], "berm.local/busybox:latest", "sha256:" + hex},
		{"one that isn't to be seen", "ada", "secret.local/x:1", ""},
		{"one whose name the policy allows isn't to be seen", "cafe", "secret.local/x:1", ""},
		{"a digest", "busybox@sha256:" + hex, "busybox:latest", "busybox@sha256:" + hex},
		{"a digest and a tag", "busybox:1@sha256:" + hex, "busybox:latest", "busybox:1@sha256:" + hex},
		{"a name in full", "docker.io/library/cafe", "cafe:latest", "docker.io/library/cafe"},
	} {
		_, s, address := scripted(t, "1.41", namesPolicy)
		text := fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":[%q],"RepoDigests":[],"Config":{}}`, hex, tt.tags)
		s.answers["GET /images/"+tt.asked+"/json"], s.answers["GET /images/"+tt.tags+"/json"] = text, text
		s.answers["GET /images/json"] = "[" + text + "]"
		s.answers["GET /containers/json"] = "[]"
		status, told := say(t, address, "POST", "/v1.41/containers/create", `{"Image":"`+tt.asked+`","HostConfig":{"NetworkMode":"none"}}`)
		got := s.said("POST /containers/create")
		if tt.told == "" {
			if len(got) > 0 || status != 404 && status != 403 || strings.Contains(told, "secret") || strings.Contains(told, hex[:12]) {
				t.Errorf("%s: %d %s, the engine got %q", tt.name, status, told, got)
			}
			continue
		}
		if len(got) == 0 {
			t.Errorf("%s: %d %s", tt.name, status, told)
			continue
		}
		var body struct{ Image string }
		if _, text, _ := strings.Cut(got[0], " {"); json.Unmarshal([]byte("{"+text), &body) != nil || body.Image != tt.told {
			t.Errorf("%s: the engine got %s, want %s", tt.name, body.Image, tt.told)
		}
	}
}

// TestVolumeOfMovedName removes a volume twice at once, while another tenant waits for its name.
func TestVolumeOfMovedName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // of has
		has := map[string]json.RawMessage{}
		hold := make(chan struct{})
		d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodDelete {
				<-hold
			}
			mu.Lock()
			defer mu.Unlock()
			var asked struct {
				Name   string
				Labels json.RawMessage
			}
			name := path.Base(r.URL.Path)
			switch r.Method {
			case http.MethodPost:
				report(t, json.NewDecoder(r.Body).Decode(&asked))
				if name = asked.Name; has[name] == nil {
					has[name] = asked.Labels
				}
			case http.MethodDelete:
				delete(has, name)
				w.WriteHeader(http.StatusNoContent)
				return
			}
			if name == "volumes" {
				_, _ = fmt.Fprint(w, "{}")
				return
			}
			if has[name] == nil {
				http.Error(w, `{"message":"no such volume"}`, http.StatusNotFound)
				return
			}
			_, _ = fmt.Fprintf(w, `{"Name":%q,"Driver":"local","Labels":%s}`, name, has[name])
		}, "red", "blue")
		has["v"] = check.Value(json.Marshal(d.labels(lifecycle.ObjectVolume, "red")))(t)
		var all sync.WaitGroup
		ask := func(l *pipes.Listener, line, body string, want int) {
			all.Go(func() {
				head := fmt.Sprintf("%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", line, len(body))
				if got, text := exchange(l, head, strings.NewReader(body)); got != want {
					t.Errorf("%s: %d %s", line, got, text)
				}
			})
			synctest.Wait()
		}
		ask(l[0], "DELETE /v1.41/volumes/v", "", 204)
		ask(l[0], "DELETE /v1.41/volumes/v", "", 404)
		hold <- struct{}{} // for the first
		synctest.Wait()
		ask(l[1], "POST /v1.41/volumes/create", `{"Name":"v"}`, 201)
		close(hold)
		all.Wait()
		if mu.Lock(); !strings.Contains(string(has["v"]), `"berm.tenant":"blue"`) {
			t.Errorf("the engine has %s", has)
		}
		mu.Unlock()
	})
}
