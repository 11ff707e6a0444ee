package engineapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// liar is an engine that isn't quite what it seems: the real one behind a stand-in that
// changes or loses answers.
type liar struct {
	host string

	mu     sync.Mutex
	change func(told map[string]any)             // what a container's inspect tells, and info
	lose   func(method, path string) (lose bool) // asked after the engine has done its part
	refuse func(method, path string) bool        // asked before
}

func (l *liar) set(f func(*liar)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.change, l.lose, l.refuse = nil, nil, nil
	f(l)
}

// at does something whenever the engine is about to get a request whose path ends so.
func (l *liar) at(end string, do func()) {
	l.set(func(l *liar) {
		l.refuse = func(_, path string) bool {
			if strings.HasSuffix(path, end) {
				do()
			}
			return false
		}
	})
}

// honest ends all lies.
func (l *liar) honest() { l.set(func(*liar) {}) }

func (l *liar) now() (func(map[string]any), func(method, path string) bool, func(method, path string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.change, l.lose, l.refuse
}

// changed are the answers that a liar changes.
var changed = regexp.MustCompile(`^/v[0-9.]+/(containers/[0-9a-f]{64}/json|info)$`)

// engineOf passes requests on to an engine.
func engineOf(host string) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: "docker"}) },
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(host, "unix://"))
		}, DisableKeepAlives: true},
	}
}

func startLiar(t *testing.T, host string) *liar {
	t.Helper()
	l := &liar{}
	rp := engineOf(host)
	rp.ModifyResponse = func(r *http.Response) error {
		change, _, _ := l.now()
		if change == nil || !changed.MatchString(r.Request.URL.Path) || r.StatusCode != http.StatusOK {
			return nil
		}
		var told map[string]any
		if err := json.NewDecoder(r.Body).Decode(&told); err != nil {
			return err
		}
		_ = r.Body.Close()
		change(told)
		b, err := json.Marshal(told)
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
		r.Header.Set("Content-Length", strconv.Itoa(len(b)))
		return err
	}
	l.host = serveEngine(t, func(w http.ResponseWriter, r *http.Request) {
		_, lose, refuse := l.now()
		if refuse != nil && refuse(r.Method, r.URL.Path) {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = io.WriteString(w, `{"message":"no"}`)
			return
		}
		if lose != nil && lose(r.Method, r.URL.Path) {
			rp.ServeHTTP(&nowhere{header: http.Header{}}, r)
			panic(http.ErrAbortHandler)
		}
		rp.ServeHTTP(w, r)
	})
	return l
}

// nowhere is where lost answers go.
type nowhere struct{ header http.Header }

func (n *nowhere) Header() http.Header         { return n.header }
func (n *nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (n *nowhere) WriteHeader(int)             {}

// put sets what a path such as "HostConfig.Privileged" leads to.
func put(path string, value any) func(map[string]any) {
	return func(m map[string]any) {
		names := strings.SplitN(path, ".", 3)
		for _, name := range names[:len(names)-1] {
			inner, ok := m[name].(map[string]any)
			if !ok {
				return // of another answer
			}
			m = inner
		}
		m[names[len(names)-1]] = value
	}
}

// lies are what an engine could make of a container instead.
var lies = map[string]func(map[string]any){
	"privileged":        put("HostConfig.Privileged", true),
	"capability":        put("HostConfig.CapAdd", []string{"SYS_ADMIN"}),
	"no drop":           put("HostConfig.CapDrop", nil),
	"privileges":        put("HostConfig.SecurityOpt", nil),
	"seccomp":           put("HostConfig.SecurityOpt", []string{"no-new-privileges", "seccomp=unconfined"}),
	"other profile":     put("HostConfig.SecurityOpt", []string{"no-new-privileges", "seccomp={}"}),
	"engine's profile":  put("HostConfig.SecurityOpt", []string{"no-new-privileges"}),
	"unmasked":          put("HostConfig.MaskedPaths", []string{}),
	"writable proc":     put("HostConfig.ReadonlyPaths", []string{}),
	"host pids":         put("HostConfig.PidMode", "host"),
	"shareable ipc":     put("HostConfig.IpcMode", "shareable"),
	"host uts":          put("HostConfig.UTSMode", "host"),
	"host users":        put("HostConfig.UsernsMode", "host"),
	"host cgroups":      put("HostConfig.CgroupnsMode", "host"),
	"cgroup parent":     put("HostConfig.CgroupParent", "/x"),
	"host network":      put("HostConfig.NetworkMode", "host"),
	"bridge":            put("NetworkSettings.Networks", map[string]any{"bridge": map[string]any{}}),
	"device":            put("HostConfig.Devices", []any{map[string]any{"PathOnHost": "/dev/sda"}}),
	"device rule":       put("HostConfig.DeviceCgroupRules", []string{"a *:* rwm"}),
	"bind":              put("HostConfig.Binds", []string{"/:/x"}),
	"mount":             put("Mounts", []any{map[string]any{"Type": "bind", "Source": "/", "Destination": "/x", "RW": true}}),
	"host config mount": put("HostConfig.Mounts", []any{map[string]any{"Type": "bind", "Source": "/", "Target": "/x"}}),
	"tmpfs":             put("HostConfig.Tmpfs", map[string]any{"/x": ""}),
	"volumes from":      put("HostConfig.VolumesFrom", []string{"x"}),
	"links":             put("HostConfig.Links", []string{"x:y"}),
	"memory":            put("HostConfig.Memory", 0),
	"swap":              put("HostConfig.MemorySwap", 1<<40),
	"pids":              put("HostConfig.PidsLimit", 0),
	"pids gone":         put("HostConfig.PidsLimit", nil),
	"cpus":              put("HostConfig.NanoCpus", 0),
	"shm":               put("HostConfig.ShmSize", 1<<40),
	"no oom":            put("HostConfig.OomKillDisable", true),
	"oom score":         put("HostConfig.OomScoreAdj", -1000),
	"restart":           put("HostConfig.RestartPolicy.Name", "always"),
	"log driver":        put("HostConfig.LogConfig.Type", "syslog"),
	"log options":       put("HostConfig.LogConfig.Config", map[string]any{}),
	"sysctl":            put("HostConfig.Sysctls", map[string]any{"kernel.x": "1"}),
	"group":             put("HostConfig.GroupAdd", []string{"0"}),
	"ports":             put("HostConfig.PortBindings", map[string]any{"80/tcp": []any{map[string]any{"HostIp": "", "HostPort": "80"}}}),
	"all ports":         put("HostConfig.PublishAllPorts", true),
	"writable root":     put("HostConfig.ReadonlyRootfs", false),
	"user":              put("Config.User", "0"),
	"image":             put("Image", "sha256:"+strings.Repeat("0", 64)),
	"owner":             put("Config.Labels.berm.owner", "x"),
	"label":             put("Config.Labels.berm.key", "x"),
	"environment":       put("Config.Env", []string{"A=2"}),
	"environment twice": put("Config.Env", []string{"A=1", "A=2"}),
	"id":                put("Id", strings.Repeat("0", 64)),
	"health check":      put("Config.Healthcheck", map[string]any{"Test": []string{"CMD", "x"}, "Interval": 1000000}),
	"annotations":       put("HostConfig.Annotations", map[string]any{"a": "b"}),
}

// TestVerifyCreate has an engine make of each container what a real one made of the first, and
// tell a lie of it.
func TestVerifyCreate(t *testing.T) {
	d, direct := engineDoor(t, "")
	create := func(c *client.Client) error {
		_, err := c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Env: []string{"A=1"}, User: "1000"}, &container.HostConfig{ReadonlyRootfs: true}, nil, nil, "verify")
		return err
	}
	must(t, create(d.client("verify")))
	_, recorded, err := direct.ContainerInspectWithRaw(t.Context(), "verify", false)
	must(t, err)
	var is struct{ ID string }
	must(t, json.Unmarshal(recorded, &is))
	var labels any
	var lie func(map[string]any)
	there := false
	engine := engineOf(d.host)
	again := doorTo(t, serveEngine(t, func(w http.ResponseWriter, r *http.Request) {
		_, path, _ := strings.Cut(r.URL.Path, "/containers/")
		switch {
		case path == "create":
			var asked struct{ Labels any }
			must(t, json.NewDecoder(r.Body).Decode(&asked))
			labels, there = asked.Labels, true
			w.WriteHeader(http.StatusCreated)
			_, _ = fmt.Fprintf(w, `{"Id":%q}`, is.ID)
		case path == "json" && there:
			_, _ = fmt.Fprintf(w, `[{"Id":%q,"Labels":%s}]`, is.ID, check.Value(json.Marshal(labels))(t))
		case path == "json":
			_, _ = io.WriteString(w, "[]")
		case path == is.ID+"/json" && !there:
			http.NotFound(w, r)
		case path == is.ID+"/json":
			var told map[string]any
			must(t, json.Unmarshal(recorded, &told))
			put("Config.Labels", labels)(told)
			lie(told)
			_ = json.NewEncoder(w).Encode(told)
		case strings.HasPrefix(path, is.ID) && r.Method == http.MethodDelete:
			there = false
			w.WriteHeader(http.StatusNoContent)
		default:
			engine.ServeHTTP(w, r)
		}
	}), "")
	c := again.client("verify")
	lie = func(map[string]any) {}
	if err := create(c); err != nil || !there {
		t.Fatalf("without a lie: %v", err)
	}
	for name, l := range lies {
		t.Run(name, func(t *testing.T) {
			lie = l
			if err := create(c); err == nil || !strings.Contains(err.Error(), "verify.create") || there {
				t.Errorf("create: %v, it is there: %v", err, there)
			}
		})
	}
}

func TestCreateUndone(t *testing.T) {
	d, direct, l := lyingDoor(t, "")
	c := d.client("undone")
	is := func(method, path string) func(string, string) bool {
		re := regexp.MustCompile(path)
		return func(m, p string) bool { return m == method && re.MatchString(p) }
	}
	for name, set := range map[string]func(*liar){
		"image refused":           func(l *liar) { l.refuse = is(http.MethodGet, "/images/") },
		"volume refused":          func(l *liar) { l.refuse = is(http.MethodPost, "/volumes/create$") },
		"create refused":          func(l *liar) { l.refuse = is(http.MethodPost, "/containers/create$") },
		"create's answer lost":    func(l *liar) { l.lose = is(http.MethodPost, "/containers/create$") },
		"inspect refused":         func(l *liar) { l.refuse = is(http.MethodGet, "/containers/[0-9a-f]{64}/json$") },
		"inspect's answer lost":   func(l *liar) { l.lose = is(http.MethodGet, "/containers/[0-9a-f]{64}/json$") },
		"network lookup refused":  func(l *liar) { l.refuse = is(http.MethodGet, "/networks/") },
		"container count refused": func(l *liar) { l.refuse = is(http.MethodGet, "/containers/json$") },
	} {
		t.Run(name, func(t *testing.T) {
			l.set(set)
			defer l.honest()
			_, err := c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Volumes: map[string]struct{}{"/a": {}}},
				&container.HostConfig{Binds: []string{"undone-vol:/v"}, NetworkMode: "undone-none"}, nil, nil, "undone")
			if name == "network lookup refused" {
				if err == nil {
					t.Error("no error")
				}
			} else if _, err = c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Volumes: map[string]struct{}{"/a": {}}},
				&container.HostConfig{Binds: []string{"undone-vol:/v"}}, nil, nil, "undone"); err == nil {
				t.Error("no error")
			}
			if all := d.left(); len(all) != 0 {
				t.Errorf("left: %v", all)
			}
		})
	}
	// The client leaves while the engine makes it.
	ctx, cancel := context.WithCancel(t.Context())
	l.at("/containers/create", func() { cancel(); <-ctx.Done() })
	if _, err := c.ContainerCreate(ctx, &container.Config{Image: testImage}, &container.HostConfig{Binds: []string{"undone-vol:/v"}}, nil, nil, "undone"); err == nil {
		t.Error("the client wasn't told that it had left")
	}
	l.honest()
	eventually(t, func() bool { return len(d.left()) == 0 })
	wantErr(t, errdefs.IsNotFound, errOf(direct.ContainerInspect(t.Context(), "undone")), "it is there")
}
