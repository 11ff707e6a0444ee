package engineapi

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/buildkit"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const buildKitPolicy = `version: 1
images: {allow: ["registry.test/*"]}
profiles: {default: {memory_mb: 256, cpus: 0.5, engine_api: {tmpfs_mb: 32, build: "on", tags: ["mine/*"], buildkit: {enabled: true}}}}
`

// fakeImages is an engine that has images and nothing else.
type fakeImages struct {
	mu      sync.Mutex
	release string
	labels  map[string]map[string]string // of images, by ID
	names   map[string]string            // IDs, by name
	pulled  []string                     // the registry's credentials, as JSON
}

func startImages(t *testing.T, rules string) (*fakeImages, *testDoor) {
	t.Helper()
	e := &fakeImages{release: "29.1.0", labels: map[string]map[string]string{}, names: map[string]string{}}
	d := doorTo(t, serveEngine(t, e.ServeHTTP), rules)
	d.builds.checked.Store(e.release, nil) // its BuildKit enforces policies
	return e, d
}

func (e *fakeImages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, path, _ := strings.Cut(r.URL.Path, "/images/")
	name, inspect := strings.CutSuffix(path, "/json")
	id := name
	if of, ok := e.names[name]; ok {
		id = of
	}
	w.Header().Set("Api-Version", "1.51")
	var answer any
	switch {
	case strings.HasSuffix(r.URL.Path, "/_ping"):
	case r.URL.Path == "/version":
		answer = map[string]string{"Version": e.release}
	case path == "json":
		all := []imageInfo{}
		var asked struct{ Label map[string]bool }
		_ = json.Unmarshal([]byte(r.URL.Query().Get("filters")), &asked)
		for id, labels := range e.labels {
			if !slices.ContainsFunc(slices.Collect(maps.Keys(asked.Label)), func(l string) bool { k, v, _ := strings.Cut(l, "="); return labels[k] != v }) {
				all = append(all, e.image(id))
			}
		}
		answer = all
	case path == "create":
		auth, _ := base64.URLEncoding.DecodeString(r.Header.Get("X-Registry-Auth"))
		e.pulled = append(e.pulled, string(auth))
		e.add("sha256:pulled", r.URL.Query().Get("fromImage")+":"+r.URL.Query().Get("tag"), nil)
	case r.Method == http.MethodPost: // tag
		e.names[r.URL.Query().Get("repo")+":"+r.URL.Query().Get("tag")] = strings.TrimSuffix(path, "/tag")
	case r.Method == http.MethodDelete:
		delete(e.names, path)
		delete(e.labels, path)
	case inspect && e.labels[id] != nil:
		answer = e.image(id)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
	if answer != nil {
		_ = json.NewEncoder(w).Encode(answer)
	}
}

func (e *fakeImages) image(id string) imageInfo {
	img := imageInfo{ID: id, Config: imageConfig{Labels: e.labels[id]}}
	for name, of := range e.names {
		if of == id {
			img.RepoTags = append(img.RepoTags, name)
		}
	}
	return img
}

// add adds an image. Its labels are never nil.
func (e *fakeImages) add(id, name string, labels map[string]string) {
	if labels == nil {
		labels = map[string]string{}
	}
	if e.labels[id] = labels; name != "" {
		e.names[name] = id
	}
}

// set changes what the engine has.
func (e *fakeImages) set(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

// named returns the names of images.
func (e *fakeImages) named() (names []string) {
	e.set(func() { names = slices.Sorted(maps.Keys(e.names)) })
	return names
}

func (d *testDoor) begin(tenant string) (*buildJudge, error) {
	r := httptest.NewRequest(http.MethodPost, "/grpc", nil)
	c := &call{Proxy: d.Proxy, r: r, ctx: d.t.Context(), caller: Caller{Name: tenant, Tenant: tenant}, rules: d.opts.Policy(), version: upstream.Newest}
	b, err := buildCaller{c}.Begin(d.t.Context())
	if err != nil {
		return nil, err
	}
	return b.(*buildJudge), nil
}

// mustBegin begins a build that ends with the test.
func (d *testDoor) mustBegin(tenant string) *buildJudge {
	d.t.Helper()
	j := check.Value(d.begin(tenant))(d.t)
	d.t.Cleanup(func() { j.End(nil) })
	return j
}

// TestBuildLimitsOfSteps has a build's commands get the profile's limits and network.
func TestBuildLimitsOfSteps(t *testing.T) {
	limited := map[string]string{"memory": "268435456", "memswap": "268435456", "cpuperiod": "100000", "cpuquota": "50000"}
	for name, tt := range map[string]struct {
		release     string
		from, to    string // in the policy
		want        map[string]string
		none, fails bool
	}{
		"limits":                               {"29.1.0", "", "", limited, true, false},
		"old":                                  {"28.5.2", "", "", nil, true, true},
		"odd":                                  {"unknown", "", "", nil, true, true},
		"cgroup":                               {"28.5.2", "enabled: true", "enabled: true, cgroup_parent: /builds", map[string]string{"cgroup-parent": "/builds"}, true, false},
		"bridge without the profile's network": {"29.1.0", "enabled: true", "enabled: true, network: bridge", limited, true, false},
		"the profile's network, no bridge":     {"29.1.0", "memory_mb", "network: \"on\", memory_mb", limited, true, false},
		"bridge":                               {"29.1.0", "{memory_mb: 256, cpus: 0.5, engine_api: {tmpfs_mb: 32, build: \"on\", tags: [\"mine/*\"], buildkit: {enabled: true", "{network: \"on\", memory_mb: 256, cpus: 0.5, engine_api: {tmpfs_mb: 32, build: \"on\", tags: [\"mine/*\"], buildkit: {enabled: true, network: bridge", limited, false, false},
		"not enabled":                          {"29.1.0", "enabled: true", "enabled: false", nil, true, true},
		"no build":                             {"29.1.0", `build: "on"`, `build: "off"`, nil, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			e, d := startImages(t, strings.Replace(buildKitPolicy, tt.from, tt.to, 1))
			e.set(func() { e.release = tt.release })
			d.builds.checked.Store(tt.release, nil)
			j, err := d.begin("t")
			if tt.fails {
				if status.Code(buildStatus(err)) != codes.PermissionDenied {
					t.Error(err)
				}
				return
			}
			must(t, err)
			defer j.End(nil)
			got, want := check.Value(j.Limits())(t), maps.Clone(tt.want)
			want["shm-size"] = "33554432"
			if tt.none {
				want["force-network-mode"] = "none"
			}
			if !maps.Equal(got, want) {
				t.Errorf("%v, not %v", got, want)
			}
		})
	}
}

// TestBuilderVersion tells clients which builder to use.
func TestBuilderVersion(t *testing.T) {
	_, d := startImages(t, buildKitPolicy)
	address := d.listen(Caller{Name: "a", Tenant: "a"})
	for agent, want := range map[string]string{
		"Docker-Client/29.9.1 (linux)": "2", "Docker-Client/23.0.0 (linux)": "2", "": "2",
		"Docker-Client/20.10.24+dfsg1 (linux)": "1", "Docker-Client/18.09.1 (linux)": "1",
	} {
		resp, text := sayWith(t, address, http.MethodGet, "/_ping", http.Header{"User-Agent": {agent}}, "")
		if got := resp.Header.Get("Builder-Version"); got != want {
			t.Errorf("%q: builder %s, %s", agent, got, text)
		}
	}
	d.builds.checked.Clear() // it can't be asked, and so may not enforce policies
	if resp, _ := sayWith(t, address, http.MethodGet, "/_ping", nil, ""); resp.Header.Get("Builder-Version") != "1" {
		t.Error("BuildKit is offered by an engine that wasn't checked")
	}
	if status, told := say(t, address, http.MethodPost, "/build?version=2&remote=client-session", ""); status != http.StatusForbidden || !strings.Contains(told, "DOCKER_BUILDKIT=0") {
		t.Errorf("%d: %s", status, told)
	}
}

// TestBuildTurns has a tenant's builds wait for their turn, of which it may have so many.
func TestBuildTurns(t *testing.T) {
	_, d := startImages(t, buildKitPolicy)
	first := d.mustBegin("t")
	for range maxBuilds - 1 {
		d.mustBegin("t")
	}
	waiting := func() int64 { n, _ := d.limits.enter("waiting builds t", 0); return n }
	begun := make(chan *buildJudge, maxWaiting)
	for range maxWaiting {
		go func() {
			j, err := d.begin("t")
			report(t, err)
			begun <- j
		}()
	}
	eventually(t, func() bool { return waiting() == maxWaiting })
	_, err := d.begin("t")
	if status.Code(buildStatus(err)) != codes.ResourceExhausted {
		t.Error(err)
	}
	d.mustBegin("u")
	if len(begun) > 0 {
		t.Error("a build didn't wait")
	}
	first.End(nil)
	for range maxWaiting {
		(<-begun).End(nil)
	}
}

// TestFinish has only the image that a build made get its names.
func TestFinish(t *testing.T) {
	const made, name = "sha256:made", "docker.io/mine/app:1"
	for what, tt := range map[string]struct {
		change func(e *fakeImages, labels map[string]string) // of the image
		ids    []string
		named  bool
		stays  bool // though the build fails
	}{
		"made":                   {nil, []string{made}, true, true},
		"known by its second ID": {nil, []string{"sha256:other", made}, true, true},
		"known by its labels":    {nil, []string{"sha256:other"}, true, true},
		"gone":                   {func(e *fakeImages, _ map[string]string) { clear(e.labels) }, []string{made}, false, false},
		"another build's":        {func(_ *fakeImages, l map[string]string) { l[lifecycle.LabelSessionID] = "other" }, []string{made}, false, true},
		"another's":              {func(_ *fakeImages, l map[string]string) { l[lifecycle.LabelTenant] = "u" }, []string{made}, false, true},
		"nobody's":               {func(_ *fakeImages, l map[string]string) { clear(l) }, []string{made}, false, true},
		"longer life":            {func(_ *fakeImages, l map[string]string) { l[lifecycle.LabelExpiresAt] = "2999-01-01T00:00:00Z" }, []string{made}, false, false},
		"without a seal":         {func(_ *fakeImages, l map[string]string) { delete(l, "berm.seal") }, []string{made}, false, false},
		"name of another's": {func(e *fakeImages, l map[string]string) {
			theirs := maps.Clone(l)
			theirs[lifecycle.LabelTenant] = "u"
			e.add("sha256:theirs", name, theirs)
		}, []string{made}, false, true},
	} {
		t.Run(what, func(t *testing.T) {
			e, d := startImages(t, buildKitPolicy)
			j := d.mustBegin("t")
			labels := check.Value(j.Labels(map[string]string{"a": "b"}))(t)
			if again := check.Value(j.Labels(nil))(t); again[lifecycle.LabelSessionID] != labels[lifecycle.LabelSessionID] {
				t.Error("the parts of a build have different labels")
			}
			if full := check.Value(j.Target("mine/app:1"))(t); full != name {
				t.Error(full)
			}
			if _, err := j.Target("registry.test/app:1"); err == nil {
				t.Error("a name of the policy's is free")
			}
			e.set(func() {
				if e.add(made, "", labels); tt.change != nil {
					tt.change(e, labels)
				}
			})
			err := j.Finish(tt.ids, []string{name})
			e.set(func() {
				if named := e.names[name] == made; named != tt.named || (err == nil) != tt.named {
					t.Errorf("named: %v, %v", named, err)
				}
				if stays := e.labels[made] != nil; stays != tt.stays {
					t.Errorf("there: %v", stays)
				}
			})
		})
	}
}

// TestPins has builds share a pin, and a sweep remove those that nobody uses.
func TestPins(t *testing.T) {
	e, d := startImages(t, buildKitPolicy)
	const id = "sha256:base"
	e.set(func() { e.add(id, "registry.test/base:1", nil) })
	mine := buildkit.Pin(d.opts.Owner, "t", id) + ":1"
	first, second := d.mustBegin("t"), d.mustBegin("t")
	ref, release, err := first.Pin(id)
	must(t, err)
	_, releaseOther, err := second.Pin(id)
	must(t, err)
	_, releaseTheirs, err := d.mustBegin("u").Pin(id)
	must(t, err)
	if theirs := buildkit.Pin(d.opts.Owner, "u", id) + ":1"; ref != mine || !slices.Contains(e.named(), theirs) || theirs == mine {
		t.Error(ref, e.named())
	}
	left := buildkit.Pins(d.opts.Owner) + "left:1" // by a process that was killed
	another := buildkit.Pin("another", "t", id) + ":1"
	e.set(func() { e.names[left], e.names[another] = id, id })
	for _, tt := range []struct {
		step string
		do   func() error
		want bool
	}{
		{"sweep", func() error { return d.sweepPins(context.Background()) }, true},
		{"first", func() error { release(); return nil }, true},
		{"second", func() error { releaseOther(); return nil }, false},
	} {
		report(t, tt.do())
		if got := slices.Contains(e.named(), mine); got != tt.want || slices.Contains(e.named(), left) {
			t.Errorf("%s: %v", tt.step, e.named())
		}
	}
	releaseTheirs()
	if got := e.named(); !slices.Equal(got, []string{another, "registry.test/base:1"}) {
		t.Error(got)
	}
}

// TestBaseCredentials has a registry get the credentials for it, once the policy has judged
// the image.
func TestBaseCredentials(t *testing.T) {
	for name, tt := range map[string]struct {
		ref, user string
		asked     []string
		want      credentials
	}{
		"allowed":      {"registry.test/app:1", "me", []string{"registry.test"}, credentials{Username: "me", Password: "secret", ServerAddress: "registry.test"}},
		"a token":      {"registry.test/app:1", "", []string{"registry.test"}, credentials{IdentityToken: "secret", ServerAddress: "registry.test"}},
		"hostile":      {"evil.test/app:1", "me", nil, credentials{}},
		"as a path":    {"evil.test/registry.test/app:1", "me", nil, credentials{}},
		"as a user":    {"registry.test@evil.test/app:1", "me", nil, credentials{}},
		"another port": {"registry.test:5000/app:1", "me", nil, credentials{}},
	} {
		t.Run(name, func(t *testing.T) {
			e, d := startImages(t, buildKitPolicy)
			var asked []string
			id, err := d.mustBegin("t").Base(tt.ref, false, func(_ context.Context, registry string) (string, string, error) {
				asked = append(asked, registry)
				return tt.user, "secret", nil
			})
			if !slices.Equal(asked, tt.asked) || len(e.pulled) != len(tt.asked) {
				t.Fatalf("asked for %q, pulled %q, %v", asked, e.pulled, err)
			}
			if len(tt.asked) == 0 {
				if err == nil {
					t.Error("it is allowed")
				}
				return
			}
			var got credentials
			if must(t, json.Unmarshal([]byte(e.pulled[0]), &got)); err != nil || id != "sha256:pulled" || got != tt.want {
				t.Errorf("%+v, %q, %v", got, id, err)
			}
		})
	}
}

// TestBuildStatus has a build's client read the class of an error, and no cause.
func TestBuildStatus(t *testing.T) {
	secret := errors.New("secret")
	for _, tt := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{denied("r", "F", "refused", "this"), codes.PermissionDenied, "denied by policy: F: refused; allowed: this (rule r)"},
		{full("no room"), codes.ResourceExhausted, "no room"}, {noImage("x"), codes.NotFound, "No such image: x:latest"}, {proxy.Unreadable("odd", secret), codes.InvalidArgument, "odd"},
		{&upstream.Error{Status: http.StatusNotFound, Message: "none"}, codes.NotFound, "none"}, {&upstream.Error{Status: http.StatusInternalServerError, Message: "broken"}, codes.Unknown, "broken"},
	} {
		if s := status.Convert(buildStatus(tt.err)); s.Code() != tt.code || s.Message() != tt.text {
			t.Errorf("%v: %v", tt.err, s)
		}
	}
	if s := status.Convert(buildStatus(secret)); s.Message() == secret.Error() {
		t.Error(s)
	}
}
