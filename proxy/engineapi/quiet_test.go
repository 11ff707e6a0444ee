package engineapi

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestSafeReleases(t *testing.T) {
	for _, tt := range []struct {
		safe      func(release string) bool
		yes, none []string
	}{
		{SafeArchives, []string{"29.5.1", "29.5.2", "29.10.0", "30.0.0-rc.1", "v29.5.1+dfsg1"},
			[]string{"29.5.0", "29.5.1-rc.1", "28.9.9", "20.10.24+dfsg1", "9.9.9", "", "dev", "library-import", "99999999999.0.0"}},
		{safeRunc, []string{"1.2.8", "1.2.10", "1.3.3", "1.4.0", "1.5.2", "2.0.0", "1.20.0"},
			[]string{"1.1.5", "1.1.5+ds1", "1.1.14", "1.2.7", "1.3.0", "1.3.3-rc.1", "1.4.0-rc.3", "", "unknown", "1.0.0-rc95"}},
	} {
		for _, release := range slices.Concat(tt.yes, tt.none) {
			if tt.safe(release) != slices.Contains(tt.yes, release) {
				t.Errorf("%q: %v", release, tt.safe(release))
			}
		}
	}
}

// archives tries the three archive calls, and gives what they came to.
func archives(t *testing.T, c *client.Client, id, path string, body []byte) (stat, get, put error) {
	t.Helper()
	_, stat = c.ContainerStatPath(t.Context(), id, path)
	r, _, get := c.CopyFromContainer(t.Context(), id, path)
	if get == nil {
		_ = r.Close()
	}
	return stat, get, c.CopyToContainer(t.Context(), id, path, bytes.NewReader(body), container.CopyToContainerOptions{})
}

// TestArchivesOnOldEngine goes through who could lead an old engine's mounts elsewhere.
func TestArchivesOnOldEngine(t *testing.T) {
	d, direct := engineDoor(t, "")
	v := check.Value(direct.ServerVersion(t.Context()))(t)
	if SafeArchives(v.Version) {
		t.Skip("the engine has the fixes")
	}
	d.opts.ArchiveFixed = false
	clients := map[string]*client.Client{"mine": d.client("mine"), "idle": d.client("idle")} // idle has nothing that runs
	tenant := "mine"
	made := func(start, readOnly bool, from string, mounts ...mount.Mount) string {
		t.Helper()
		labels := d.labels(lifecycle.ObjectContainer, tenant)
		ct := check.Value(direct.ContainerCreate(t.Context(), &container.Config{Image: from, Cmd: []string{"sleep", "1000"}, Labels: labels},
			&container.HostConfig{NetworkMode: "none", ReadonlyRootfs: readOnly, Mounts: mounts}, nil, nil, ""))(t)
		t.Cleanup(func() {
			report(t, direct.ContainerRemove(context.Background(), ct.ID, forced))
		})
		if start {
			must(t, direct.ContainerStart(t.Context(), ct.ID, container.StartOptions{}))
		}
		return ct.ID
	}
	volume := func(name, target string, readOnly bool) mount.Mount {
		return mount.Mount{Type: mount.TypeVolume, Source: name, Target: target, ReadOnly: readOnly}
	}
	names := make([]string, 5)
	for i := range names {
		names[i] = fmt.Sprintf("quiet-%d-%s", i, d.opts.Owner)
		t.Cleanup(func() { _ = direct.VolumeRemove(context.Background(), names[i], true) })
	}
	crafted := made(false, false, testImage)
	must(t, direct.CopyToContainer(t.Context(), crafted, "/", bytes.NewReader(tarOf(t, "v/x", "", "link", "->v")), container.CopyToContainerOptions{}))
	linked := check.Value(direct.ContainerCommit(t.Context(), crafted, container.CommitOptions{}))(t)
	t.Cleanup(func() { _, _ = direct.ImageRemove(context.Background(), linked.ID, image.RemoveOptions{Force: true}) })

	made(true, false, testImage, volume(names[0], "/v", false))
	made(true, false, testImage, volume(names[1], "/v", true))
	file := written(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5})
	const allowed = ""
	idle := func(readOnly bool, m mount.Mount) string {
		tenant = "idle"
		defer func() { tenant = "mine" }()
		return made(false, readOnly, testImage, m)
	}
	for name, tt := range map[string]struct {
		id, path       string
		stat, get, put string
		tenant         string // "mine" if left out
	}{
		"running, without mounts of its own": {made(true, false, testImage), "/tmp", "archive.engine", "archive.engine", "archive.engine", ""},
		"running, with a volume":             {made(true, false, testImage, volume(names[2], "/v", false)), "/v", "archive.engine", "archive.engine", "archive.engine", ""},
		"read-only root":                     {made(true, true, testImage, volume(names[2], "/v", false)), "/v", allowed, allowed, "archive.read_only", ""},
		"read-only root, nested":             {made(true, true, testImage, volume(names[2], "/v", false), volume(names[3], "/v/w", false)), "/v", "archive.engine", "archive.engine", "archive.engine", ""},
		"read-only root, through a link":     {made(true, true, linked.ID, volume(names[2], "/v", false), volume(names[3], "/link/w", false)), "/v", "archive.engine", "archive.engine", "archive.engine", ""},
		"stopped":                            {idle(false, volume(names[4], "/v", false)), "/v", allowed, allowed, allowed, "idle"},
		"stopped, another writes":            {idle(false, volume(names[0], "/v", true)), "/v", "archive.engine", "archive.engine", "archive.engine", "idle"},
		"stopped, another reads":             {idle(false, volume(names[1], "/v", false)), "/v", allowed, allowed, allowed, "idle"},
		"stopped, read-only root":            {idle(true, volume(names[4], "/v", false)), "/v", allowed, allowed, allowed, "idle"},
		"stopped, read-only root, shared":    {idle(true, volume(names[0], "/v", false)), "/v", "archive.engine", "archive.engine", "archive.engine", "idle"},
		"stopped, with others that run":      {id: made(false, false, testImage, volume(names[4], "/v", false)), path: "/v", stat: "archive.engine", get: "archive.engine", put: "archive.engine"},
		"stopped, without mounts":            {id: made(false, false, testImage), path: "/tmp"},
	} {
		stat, get, put := archives(t, clients[cmp.Or(tt.tenant, "mine")], tt.id, tt.path, file)
		for call, got := range map[string]struct {
			err  error
			rule string
		}{"stat": {stat, tt.stat}, "get": {get, tt.get}, "put": {put, tt.put}} {
			switch {
			case got.rule == allowed && got.err != nil:
				t.Errorf("%s: %s: %v", name, call, got.err)
			case got.rule != allowed && (got.err == nil || call != "stat" && !strings.Contains(got.err.Error(), got.rule)):
				t.Errorf("%s: %s: %v, want it denied by %s", name, call, got.err, got.rule)
			}
		}
		if tt.get == "archive.engine" && (!strings.Contains(get.Error(), v.Version) || !strings.Contains(get.Error(), ArchiveFixed)) {
			t.Errorf("%s: the error lacks a release: %v", name, get)
		}
	}
}

// TestStartWaitsForArchive has a container start while an archive call has its volume.
func TestStartWaitsForArchive(t *testing.T) {
	d, _, l := lyingDoor(t, "")
	c := d.client("waits")
	id := makeOne(t, c, nil, "")
	u := useOf(id, nil, nil)
	u.Archive = true
	leave := check.Value(d.opts.Claims.Use(t.Context(), u))(t)
	var over, early atomic.Bool
	l.at("/start", func() { early.CompareAndSwap(false, !over.Load()) })
	started := make(chan error, 1)
	go func() { started <- startIt(t, c, id) }()
	eventually(t, func() bool {
		free, ok := d.startLocks.TryLock(id)
		if ok {
			free()
		}
		return !ok || early.Load()
	})
	over.Store(true)
	leave()
	if err := <-started; err != nil || early.Load() {
		t.Errorf("it started: %v, before the archive was over: %v", err, early.Load())
	}
}

// answering answers the engine's requests.
type answering func(r *http.Request) string

func (a answering) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Api-Version": {"1.41"}}, Body: io.NopCloser(strings.NewReader(a(r))), Request: r}, nil
}

// TestArchiveWaitsForSandbox has an archive call of a stopped container come while a sandbox
// is created that can write to its bind.
func TestArchiveWaitsForSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := doorTo(t, "unix:///nowhere", "")
		d.opts.ArchiveFixed = false
		d.engine.Transport.RegisterProtocol("http", answering(func(*http.Request) string {
			return `{"Version":"20.10.24","HostConfig":{},"Config":{},"State":{}}`
		}))
		bind := policy.Mount{Source: "/srv/shared", Mode: "rw"}
		var asked atomic.Bool
		d.opts.Mounts = func() []policy.Mount {
			asked.Store(true)
			return []policy.Mount{bind}
		}
		leave := check.Value(d.opts.Claims.Start(t.Context(), "session", []policy.Mount{bind}))(t)
		ct := &container.InspectResponse{
			ContainerJSONBase: &container.ContainerJSONBase{ID: standInID}, Config: &container.Config{},
			Mounts: []container.MountPoint{{Type: mount.TypeBind, Source: bind.Source}},
		}
		ct.HostConfig = &container.HostConfig{}
		c := &call{Proxy: d.Proxy, ctx: t.Context(), rules: d.opts.Policy(), route: &route{}, version: 41}
		archived := make(chan error, 1)
		go func() {
			archived <- quietly(c, ct, func(*container.InspectResponse) error { return errors.New("served") })
		}()
		if synctest.Wait(); asked.Load() {
			t.Error("it didn't wait for the create")
		}
		leave()
		var denied *policy.DeniedError
		if err := <-archived; !errors.As(err, &denied) || denied.Reasons[0].Rule != "archive.engine" {
			t.Errorf("beside the sandbox: %v", err)
		}
	})
}
