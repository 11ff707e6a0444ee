package sandboxapi_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

func ptr[T any](v T) *T { return &v }

func TestPutTranslates(t *testing.T) {
	d := newDoor(t)
	d.want(201, "", "PUT", "/api/v1/sandboxes/K1", `{
		"profile":"p","image":"i","network":"on","host_path":"/h","host_path_mode":"ro","mount_path":"/m",
		"extra_mounts":[{"host_path":"/a","mount_path":"/b","mode":"rw"}],"cpus":0.5,"memory_mb":64,"pids_limit":10,
		"read_only_rootfs":false,"workspace_quota_mb":5,"env":{"A":"b"},"ttl":90,"idle_ttl":"10m","metadata":{"team":"t"},
		"agent_id":"ag","volume_host_path":"/w"}`)
	want := lifecycle.CreateRequest{
		Tenant: "red", Key: "K1", Metadata: map[string]string{"team": "t"}, AgentID: "ag", VolumePath: "/w", MaxSandboxes: 7,
		Request: policy.Request{
			Profile: "p", Image: ptr("i"), Network: ptr("on"), HostPath: ptr("/h"), HostPathMode: ptr("ro"), MountPath: ptr("/m"),
			ExtraMounts: []policy.MountRequest{{HostPath: "/a", MountPath: "/b", Mode: "rw"}},
			CPUs:        ptr(0.5), MemoryMB: ptr[int64](64), PidsLimit: ptr[int64](10), ReadOnlyRootfs: ptr(false), WorkspaceQuotaMB: ptr[int64](5),
			Env: map[string]string{"A": "b"}, TTL: ptr(90 * time.Second), IdleTTL: ptr(10 * time.Minute),
		},
	}
	if diff := cmp.Diff(want, d.manager.created); diff != "" {
		t.Error(diff)
	}
	d.want(201, "", "PUT", "/api/v1/sandboxes/"+strings.ToUpper(chatID), "")
	if diff := cmp.Diff(lifecycle.CreateRequest{Tenant: "red", Key: chatID, MaxSandboxes: 7}, d.manager.created); diff != "" {
		t.Errorf("without a body: %s", diff)
	}
}

func TestSandboxAnswer(t *testing.T) {
	d := newDoor(t)
	a := d.want(201, "", "PUT", "/api/v1/sandboxes/a:b", "")
	if got := a.Header.Get("Location"); got != "/api/v1/sandboxes/a:b" {
		t.Errorf("Location is %q", got)
	}
	for _, secret := range []string{"secret-a", "secret-b", "/resolved", "/local"} {
		if strings.Contains(a.body, secret) {
			t.Errorf("it shows %s: %s", secret, a.body)
		}
	}
	var sb apitype.Sandbox
	a.decode(t, &sb)
	if diff := cmp.Diff([]string{"A", "B"}, sb.Spec.EnvNames); diff != "" {
		t.Error(diff)
	}
	if sb.Result != "created" || sb.IdleExpiresAt != nil || sb.Endpoint == nil || sb.Metadata == nil || sb.CreatedAt.Location() != time.UTC {
		t.Errorf("got %+v", sb)
	}
	if sb.Overridden[0].Rule != "resources.over_max" || sb.Enforcement.Mounts != "held" {
		t.Errorf("got %+v", sb)
	}

	d.manager.sandbox.Endpoint = lifecycle.Endpoint{Port: 80}
	d.manager.sandbox.IdleExpiresAt = time.Now()
	d.manager.sandbox.Status, d.manager.sandbox.Error = lifecycle.StatusFailed, "dial /run/engine.sock"
	d.manager.sandbox.Pull = &runtime.PullProgress{Status: "pulling", CurrentBytes: 1, TotalBytes: 2}
	sb = apitype.Sandbox{}
	d.want(200, "", "GET", "/api/v1/sandboxes/k", "").decode(t, &sb)
	if sb.Error == "" || strings.Contains(sb.Error, "engine.sock") {
		t.Errorf("the error is %q", sb.Error)
	}
	if sb.Endpoint != nil || sb.IdleExpiresAt == nil || sb.Pull == nil || sb.Pull.TotalBytes != 2 {
		t.Errorf("got %+v", sb)
	}
}

func TestProblemsCarryWhatTheyAreAbout(t *testing.T) {
	d := newDoor(t)
	d.manager.err = conflict.err
	p := d.want(409, "sandbox_conflict", "PUT", "/api/v1/sandboxes/k", "", withHeader("X-Request-Id", "req-9")).problem(t)
	if len(p.Differences) != 1 || p.Differences[0].Field != "memory_mb" || p.RequestID != "req-9" || p.Instance != "/api/v1/sandboxes/k" {
		t.Errorf("got %+v", p)
	}
	d.manager.err = denied.err
	p = d.want(403, "policy_denied", "PUT", "/api/v1/sandboxes/k", "").problem(t)
	if len(p.Reasons) != 1 || p.Reasons[0].Allowed != "below /srv" {
		t.Errorf("got %+v", p)
	}
	d.manager.err = capacity.err
	if a := d.want(429, "capacity", "PUT", "/api/v1/sandboxes/k", ""); a.Header.Get("Retry-After") != "5" {
		t.Errorf("Retry-After is %q", a.Header.Get("Retry-After"))
	}
}

func TestRenew(t *testing.T) {
	d := newDoor(t)
	for body, want := range map[string]time.Duration{``: 0, `{}`: 0, `{"ttl":null}`: 0, `{"ttl":60}`: time.Minute, `{"ttl":"1h"}`: time.Hour} {
		d.want(200, "", "POST", "/api/v1/sandboxes/k/renew", body)
		if d.manager.renewed != want {
			t.Errorf("%s: renewed by %v", body, d.manager.renewed)
		}
	}
	for _, body := range []string{`{"ttl":0}`, `{"ttl":"-1s"}`, `{"ttl":1.5}`, `{"ttl":"soon"}`} {
		d.want(422, "validation", "POST", "/api/v1/sandboxes/k/renew", body)
	}
}

func TestList(t *testing.T) {
	d := newDoor(t)
	var page apitype.SandboxList
	d.want(200, "", "GET", "/api/v1/sandboxes?status=running&limit=5&metadata.team=a%26b&metadata.x.y=", "").decode(t, &page)
	want := lifecycle.ListOptions{Status: lifecycle.StatusRunning, Limit: 5, Metadata: map[string]string{"team": "a&b", "x.y": ""}}
	if diff := cmp.Diff(want, d.manager.listed); diff != "" {
		t.Error(diff)
	}
	if len(page.Sandboxes) != 1 || page.NextCursor != "" {
		t.Errorf("got %+v", page)
	}

	d.manager.more = "key-9"
	d.want(200, "", "GET", "/api/v1/sandboxes", "").decode(t, &page)
	d.want(200, "", "GET", "/api/v1/sandboxes?cursor="+page.NextCursor, "")
	if d.manager.listed.After != "key-9" || d.manager.listed.Limit != 100 {
		t.Errorf("got %+v", d.manager.listed)
	}

	for _, q := range []string{
		"limit=0", "limit=101", "limit=x", "limit=", "limit=1.0", "status=alive", "status=", "cursor=", "cursor=x", "metadata.=x",
		"cursor=eyJ0IjoiYmx1ZSIsImEiOiJrIn0",        // another tenant's
		"cursor=eyJ0IjoicmVkIiwiYSI6Ii4uL2sifQ",     // of an impossible key
		"cursor=eyJ0IjoicmVkIiwiYSI6ImsiLCJ4IjoxfQ", // with more than there should be
		"cursor=" + page.NextCursor + "A",
	} {
		d.want(422, "validation", "GET", "/api/v1/sandboxes?"+q, "")
	}
	for _, q := range []string{"limit=1&limit=2", "metadata=x", "Limit=1", "%zz", "a;b", "tenant=blue"} {
		d.want(400, "malformed", "GET", "/api/v1/sandboxes?"+q, "")
	}
}

func TestServiceCalls(t *testing.T) {
	d := newDoor(t)
	d.want(422, "validation", "GET", "/api/v1/sandboxes/-", "")
	d.manager.err = missing.err
	d.want(404, "not_found", "GET", "/api/v1/sandboxes/gone", "", withHeader("X-Request-Id", "req-1"))

	var list apitype.ErrorList
	d.want(200, "", "GET", "/api/v1/errors", "").decode(t, &list)
	if len(list.Errors) != 2 {
		t.Fatalf("got %+v", list)
	}
	e := list.Errors[0]
	if e.Type != "not_found" || e.RequestID != "req-1" || e.Key != "gone" || e.Status != 404 || e.Route != "/api/v1/sandboxes/{key}" {
		t.Errorf("got %+v", e)
	}

	var status apitype.Status
	d.want(200, "", "GET", "/api/v1/status", "").decode(t, &status)
	if status.RecentErrors != 2 || status.Version != "1.2.3" || status.Tenant != "red" || status.MaxSandboxes != 7 ||
		status.Profile != "default" || status.Limits.MemoryMB != 512 || len(status.Profiles) != 4 {
		t.Errorf("got %+v", status)
	}

	for _, path := range []string{"/healthz", "/api/v1/health"} {
		if a := d.want(200, "", "GET", path, "", withToken("")); strings.TrimSpace(a.body) != `{"status":"ok","version":"1.2.3"}` {
			t.Errorf("%s: %s", path, a.body)
		}
	}
	d.want(503, "backend_unavailable", "GET", "/readyz", "", withToken(""))
}
