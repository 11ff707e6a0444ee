package engineapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

// boundedDoor is a door before a handler that stands for the engine. Its callers are
// tenants by their listener.
func boundedDoor(t *testing.T, opts Options, engine http.HandlerFunc, tenants ...string) (*Proxy, []*pipes.Listener) {
	t.Helper()
	const rules = basePolicy + "profiles: {default: {engine_api: {build: \"on\", tags: [\"built.local/*\"]}}}\n"
	p := check.Value(policy.Parse([]byte(rules), policy.Options{DefaultImage: testImage}))(t)
	behind := pipes.Listen()
	ends := []*pipes.Listener{behind}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Api-Version", "1.41")
		engine(w, r)
	})}
	var serving sync.WaitGroup
	serving.Go(func() { _ = srv.Serve(behind) })
	opts.Dial = func(context.Context) (net.Conn, error) { return behind.Dial(), nil }
	opts.Policy, opts.Owner = func() *policy.Policy { return p }, "test"
	d := check.Value(New(opts))(t)
	ctx, cancel := context.WithCancel(context.Background())
	for _, tenant := range tenants {
		l := pipes.Listen()
		ends = append(ends, l)
		serving.Go(func() {
			_ = proxy.Serve(ctx, l, d.Handler(Callers{Any: &Caller{Name: tenant, Tenant: tenant}}), proxy.ServeOptions{DrainTimeout: time.Second})
		})
	}
	t.Cleanup(func() {
		cancel()
		_ = d.Close()
		_ = srv.Close()
		for _, l := range ends {
			_ = l.Close()
		}
		serving.Wait()
	})
	return d, ends[1:]
}

// exchange sends a request over a connection of its own, and gives the answer's status and body.
func exchange(l *pipes.Listener, head string, body io.Reader) (int, string) {
	conn := l.Dial()
	defer func() { _ = conn.Close() }()
	go func() { _, _ = io.Copy(conn, io.MultiReader(strings.NewReader(head), body)) }()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err.Error()
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20)) // one that should have been refused may have no end
	return resp.StatusCode, string(text)
}

const getRequest = "GET /v1.41%s HTTP/1.1\r\nHost: localhost\r\n\r\n"

// TestRefusedBodiesAreCut sends requests that are refused, and then nothing of their bodies.
func TestRefusedBodiesAreCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }, "red")
		for _, tt := range []struct {
			line, length string
			status       int
		}{
			{"POST /nowhere", "Content-Length: 100", 403},
			{"POST /nowhere", "Transfer-Encoding: chunked", 403},
			{"PUT /containers/x/archive", "Transfer-Encoding: chunked", 404},
			{"POST /containers/x/start", "Content-Length: 100", 400},
			{"GET /info", "Content-Length: 100", 400},
			{"POST /containers/x/exec", "Content-Type: application/json\r\nContent-Length: 100", 400},
			{"POST /containers/create?name=1", "Content-Length: 1000000", 400},
		} {
			conn := l[0].Dial()
			begun := time.Now()
			check.Value(io.WriteString(conn, tt.line+" HTTP/1.1\r\nHost: localhost\r\n"+tt.length+"\r\n\r\n"))(t)
			from := bufio.NewReader(conn)
			resp, err := http.ReadResponse(from, nil)
			if err != nil || resp.StatusCode != tt.status {
				t.Errorf("%s, %s: %+v, %v", tt.line, tt.length, resp, err)
			}
			_, _ = io.Copy(io.Discard, from)
			if took := time.Since(begun); took > 11*time.Second {
				t.Errorf("%s, %s: its connection was open for %s", tt.line, tt.length, took)
			}
			_ = conn.Close()
		}
	})
}

// TestSavesOfATenant has callers ask for images and not read them.
func TestSavesOfATenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var saving atomic.Int64
		d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			switch {
			case strings.HasSuffix(r.URL.Path, "/images/get"):
				saving.Add(1)
				defer saving.Add(-1)
				for {
					if _, err := w.Write(make([]byte, 64<<10)); err != nil {
						return
					}
				}
			case strings.HasSuffix(r.URL.Path, "/json"):
				_, _ = io.WriteString(w, `{"Id":"sha256:`+strings.Repeat("a", 64)+`","RepoTags":["berm.local/busybox:latest"],"Config":{}}`)
			}
		}, "red", "blue")
		get := fmt.Sprintf(getRequest, "/images/berm.local/busybox:latest/get")
		save := func(l *pipes.Listener) net.Conn {
			conn := l.Dial()
			check.Value(io.WriteString(conn, get))(t)
			return conn
		}
		conns := []net.Conn{save(l[0]), save(l[0])}
		synctest.Wait()
		if status, text := exchange(l[0], get, strings.NewReader("")); status != 429 || saving.Load() != maxSaves {
			t.Errorf("one more: %d %s, with %d going on", status, text, saving.Load())
		}
		conns = append(conns, save(l[1])) // which is another's
		synctest.Wait()
		if saving.Load() != maxSaves+1 {
			t.Errorf("another tenant's: %d go on", saving.Load())
		}
		time.Sleep(transferStall + time.Second)
		synctest.Wait()
		d.limits.mu.Lock()
		if saving.Load() != 0 || len(d.limits.making) != 0 {
			t.Errorf("%d go on that nobody reads, %v", saving.Load(), d.limits.making)
		}
		d.limits.mu.Unlock()
		for _, conn := range conns {
			_ = conn.Close()
		}
	})
}

// TestDiskUsageIsSharedOut has two tenants ask for it in a loop, as often as they can, by
// prunes of images too.
func TestDiskUsageIsSharedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const walk = 10 * time.Second
		var now, most, walks atomic.Int64
		var d *Proxy
		d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			image := func(tenant, id string) string {
				return fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":["%s.local/a:b"],"Labels":%s,"Size":7,"SharedSize":3}`, strings.Repeat(id, 64), tenant, d.sealed(lifecycle.ObjectImage, tenant))
			}
			images := "[" + image("red", "a") + "," + image("blue", "b") + "]"
			switch {
			case strings.HasSuffix(r.URL.Path, "/images/json"):
				_, _ = io.WriteString(w, images)
				return
			case strings.HasSuffix(r.URL.Path, "/red.local/a:b/json"):
				_, _ = io.WriteString(w, image("red", "a"))
				return
			case strings.HasSuffix(r.URL.Path, "/blue.local/a:b/json"):
				_, _ = io.WriteString(w, image("blue", "b"))
				return
			case r.Method == http.MethodDelete:
				id := map[bool]string{true: "a", false: "b"}[strings.Contains(r.URL.Path, "/red.")]
				_, _ = fmt.Fprintf(w, `[{"Deleted":"sha256:%s"}]`, strings.Repeat(id, 64))
				return
			case !strings.HasSuffix(r.URL.Path, "/system/df"):
				return
			}
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			walks.Add(1)
			time.Sleep(walk)
			volume := func(tenant string) string {
				return fmt.Sprintf(`{"Name":%q,"Labels":%s}`, tenant, d.sealed(lifecycle.ObjectVolume, tenant))
			}
			_, _ = fmt.Fprintf(w, `{"LayersSize":1000,"Images":%s,"Volumes":[%s,%s],"BuildCache":[{}]}`, images, volume("red"), volume("blue"))
		}, "red", "blue")
		prune := "POST /v1.41/images/prune?filters=" + url.QueryEscape(`{"dangling":{"false":true}}`) + " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
		begun := time.Now()
		var all sync.WaitGroup
		for i := range 40 {
			tenant := i % 2
			get := fmt.Sprintf(getRequest, "/system/df")
			if i/2%2 == 0 {
				get = strings.Replace(get, "v1.41", "v1.40", 1) // whose answer may be another
			}
			all.Go(func() {
				for range 3 {
					if i >= 36 {
						status, text := exchange(l[tenant], prune, strings.NewReader(""))
						if status != 200 || !strings.Contains(text, `"SpaceReclaimed":4`) {
							t.Errorf("prune: %d %s", status, text)
						}
						continue
					}
					status, text := exchange(l[tenant], get, strings.NewReader(""))
					var got struct {
						LayersSize int64
						Volumes    []struct{ Name string }
						BuildCache []any
					}
					err := json.Unmarshal([]byte(text), &got)
					if status != 200 || err != nil || len(got.Volumes) != 1 || got.Volumes[0].Name != []string{"red", "blue"}[tenant] || got.LayersSize != 7 || len(got.BuildCache) != 0 {
						t.Errorf("%d %s", status, text)
					}
				}
			})
		}
		all.Wait()
		took := time.Since(begun)
		if most.Load() != 1 || walks.Load() > 8 || took < time.Duration(2*walks.Load()-1)*walk || took > 3*time.Minute {
			t.Errorf("%d walks, %d at once, in %s", walks.Load(), most.Load(), took)
		}
	})
}

// execsAtOnce has so many callers make an exec in one container each. Inspected and making are
// called before the engine's answers. It returns how many were made, and the callers' answers by
// status.
func execsAtOnce(t *testing.T, callers int, inspected, making func()) (d *Proxy, made int64, got map[int]int) {
	var all sync.WaitGroup
	var mu sync.Mutex // guards made and got
	var labels string
	got = map[int]int{}
	d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/containers/json"):
			_, _ = fmt.Fprintf(w, `[{"Id":%q,"Labels":%s}]`, standInID, labels)
		case strings.HasSuffix(r.URL.Path, "/json"):
			mu.Lock()
			ids, _ := json.Marshal(slices.Repeat([]string{standInID}, int(made)))
			mu.Unlock()
			inspected()
			_, _ = fmt.Fprintf(w, `{"Id":%q,"ExecIDs":%s,"Config":{"Labels":%s}}`, standInID, ids, labels)
		case strings.HasSuffix(r.URL.Path, "/exec"):
			making()
			mu.Lock()
			made++
			mu.Unlock()
			w.WriteHeader(201)
			_, _ = fmt.Fprintf(w, `{"Id":%q}`, standInID)
		}
	}, "red")
	labels = d.sealed(lifecycle.ObjectContainer, "red")
	const body = `{"Cmd":["true"]}`
	head := fmt.Sprintf("POST /v1.41/containers/%s/exec HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", standInID, len(body))
	for range callers {
		all.Go(func() {
			status, _ := exchange(l[0], head, strings.NewReader(body))
			mu.Lock()
			defer mu.Unlock()
			got[status]++
		})
	}
	all.Wait()
	return d, made, got
}

// TestExecsOfAContainer makes execs and starts none.
func TestExecsOfAContainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, made, got := execsAtOnce(t, maxExecs+50, func() {}, func() { time.Sleep(time.Second) })
		if got[201] != maxExecs || got[429] != 50 || made != maxExecs {
			t.Errorf("%d were made, %d refused", got[201], got[429])
		}
		if len(d.limits.making) != 0 {
			t.Errorf("%v is kept", d.limits.making)
		}
	})
}

// TestExecsMeanwhile makes execs while the engine's answers take their time to arrive.
func TestExecsMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inspects atomic.Int64
		_, made, _ := execsAtOnce(t, maxExecs+maxExecs/4, func() { time.Sleep(time.Duration(inspects.Add(1)) * time.Millisecond) }, func() {})
		if made < 1 || made > maxExecs {
			t.Errorf("%d were made", made)
		}
	})
}

// TestExecsOfATenant makes execs in several containers, of which some end.
func TestExecsOfATenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d *Proxy
		var mu sync.Mutex
		execs := map[string]int{} // by container; -1 was removed
		of := map[string]string{"red": strings.Repeat("a", 63), "blue": strings.Repeat("b", 63)}
		d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			labels := func(id string) string {
				return d.sealed(lifecycle.ObjectContainer, map[byte]string{'a': "red", 'b': "blue"}[id[0]], lifecycle.LabelSessionID, id)
			}
			_, rest, _ := strings.Cut(r.URL.Path, "/containers/")
			switch id, what, _ := strings.Cut(rest, "/"); {
			case id == "json":
				var list []string
				for _, id := range []string{of["red"] + "0", of["red"] + "1", of["red"] + "2", of["red"] + "3", of["blue"] + "0"} {
					list = append(list, fmt.Sprintf(`{"Id":%q,"Labels":%s}`, id, labels(id)))
				}
				_, _ = io.WriteString(w, "["+strings.Join(list, ",")+"]")
			case execs[id] < 0:
				w.WriteHeader(404)
			case what == "json":
				ids, _ := json.Marshal(slices.Repeat([]string{standInID}, execs[id]))
				_, _ = fmt.Fprintf(w, `{"Id":%q,"ExecIDs":%s,"Config":{"Labels":%s}}`, id, ids, labels(id))
			case what == "exec":
				execs[id]++
				w.WriteHeader(201)
				_, _ = fmt.Fprintf(w, `{"Id":%q}`, standInID)
			}
		}, "red", "blue")
		p := check.Value(policy.Parse([]byte(basePolicy+"profiles: {default: {engine_api: {max_execs: 4}}}\n"), policy.Options{DefaultImage: testImage}))(t)
		d.opts.Policy = func() *policy.Policy { return p }
		const body = `{"Cmd":["true"]}`
		exec := func(tenant, container string) (int, string) {
			head := fmt.Sprintf("POST /v1.41/containers/%s/exec HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", of[tenant]+container, len(body))
			return exchange(l[map[string]int{"red": 0, "blue": 1}[tenant]], head, strings.NewReader(body))
		}
		set := func(container string, n int) {
			mu.Lock()
			defer mu.Unlock()
			execs[of["red"]+container] = n
		}
		want := func(tenant, container string, status int) {
			t.Helper()
			if got, text := exec(tenant, container); got != status || status == 429 && !strings.Contains(text, "engine_api.max_execs") {
				t.Errorf("an exec in %s%s: %d %s, want %d", tenant, container, got, text, status)
			}
		}
		for _, container := range []string{"0", "0", "1", "2"} {
			want("red", container, 201)
		}
		want("red", "3", 429)
		want("red", "0", 429)
		want("blue", "0", 201)
		set("0", 1) // one has ended
		want("red", "3", 201)
		want("red", "3", 429)
		set("1", -1) // it was removed with its exec
		want("red", "2", 201)
		want("red", "2", 429)
		for _, container := range []string{"0", "2", "3"} {
			set(container, 0)
		}
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() { want("red", "3", 201) }) // there is room for each, as it turns out
		}
		all.Wait()
		if _, ok := d.startLocks.TryLock("execs of red"); !ok {
			t.Error("the lock of the execs' count is held")
		}
		if len(d.limits.making) != 0 {
			t.Errorf("%v is kept", d.limits.making)
		}
	})
}

// TestSlowBuilds sends the files of builds slowly: what goes on may take its time, what only
// drips is broken off.
func TestSlowBuilds(t *testing.T) {
	files := tarOf(t, "big", strings.Repeat("x", 1<<20))
	head := fmt.Sprintf("POST /v1.41/build HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-tar\r\nContent-Length: %d\r\n\r\n", len(files))
	for name, tt := range map[string]struct {
		piece  int
		every  time.Duration
		status int
		says   string
		most   time.Duration
	}{
		"it flows": {upstream.BufferSize, transferStall - time.Second, 400, "Cannot locate specified Dockerfile", time.Hour},
		"it drips": {1 << 10, time.Second, 408, "it doesn't go on", 2 * transferStall},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, l := boundedDoor(t, Options{SpoolDir: t.TempDir()}, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "[]") }, "red")
				conn, begun := l[0].Dial(), time.Now()
				var sending sync.WaitGroup
				defer sending.Wait()
				defer func() { _ = conn.Close() }()
				sending.Go(func() {
					_, _ = io.WriteString(conn, head)
					for piece := range slices.Chunk(files, tt.piece) {
						time.Sleep(tt.every)
						if _, err := conn.Write(piece); err != nil {
							return
						}
					}
				})
				resp := check.Value(http.ReadResponse(bufio.NewReader(conn), nil))(t)
				text, _ := io.ReadAll(resp.Body)
				if took := time.Since(begun); resp.StatusCode != tt.status || !strings.Contains(string(text), tt.says) || took > tt.most {
					t.Errorf("%d %s after %s", resp.StatusCode, text, took)
				}
			})
		})
	}
}

// TestSpoolIsBounded sends builds that take more disk than there is for them, and ones that stop.
func TestSpoolIsBounded(t *testing.T) {
	const mib = 1 << 20
	files := tarOf(t, "big", strings.Repeat("x", 9*mib))
	dir := filepath.Join(t.TempDir(), "spool")
	must(t, os.Mkdir(dir, 0o700))
	for _, name := range []string{"berm-build-1", "other"} {
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	synctest.Test(t, func(t *testing.T) {
		d, l := boundedDoor(t, Options{SpoolDir: dir, SpoolBytes: 32 * mib}, func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/images/json") {
				_, _ = io.WriteString(w, "[]")
			}
		}, "red", "blue")
		left, err := os.ReadDir(dir)
		if err != nil || len(left) != 1 || left[0].Name() != "other" {
			t.Errorf("after a crash: %v, %v", left, err)
		}
		head := "POST /v1.41/build HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\n\r\n"
		chunk := fmt.Sprintf("%x\r\n%s\r\n", len(files)-1024, files[:len(files)-1024])
		stalled := make(chan string)
		go func() {
			_, text := exchange(l[0], head, strings.NewReader(chunk))
			stalled <- text
		}()
		time.Sleep(time.Second)
		if status, text := exchange(l[0], head, strings.NewReader(chunk)); status != 429 || !strings.Contains(text, "disk for build files") {
			t.Errorf("more than one tenant may have: %d %s", status, text)
		}
		whole := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(files), files)
		if status, text := exchange(l[1], head, strings.NewReader(whole)); status != 400 || !strings.Contains(text, "Cannot locate specified Dockerfile") {
			t.Errorf("another tenant: %d %s", status, text)
		}
		if text := <-stalled; !strings.Contains(text, "it doesn't go on") {
			t.Errorf("one that stops: %s", text)
		}
		if status, text := exchange(l[0], head, strings.NewReader(whole)); status != 400 || !strings.Contains(text, "Cannot locate specified Dockerfile") {
			t.Errorf("afterwards: %d %s", status, text)
		}
		d.limits.mu.Lock()
		defer d.limits.mu.Unlock()
		if len(d.limits.making) != 0 {
			t.Errorf("%v is kept", d.limits.making)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
			t.Errorf("%v, %v", left, err)
		}
	})
}

// TestObjectsAreCounted asks for images and volumes where a tenant has as many as it may, with
// or without names and containers.
func TestObjectsAreCounted(t *testing.T) {
	d, s, address := scripted(t, "1.41", basePolicy+"profiles: {default: {engine_api: {commit: \"on\", build: \"on\", max_objects: 3}}}\n")
	s.ownContainerOf(d, "mine", mineID, "c")
	s.answers["GET /images/berm.local/busybox:latest/json"] = fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":[%q],"Config":{}}`, standInID, testImage)
	list := func(kind lifecycle.ObjectKind, n int) string {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprintf(`{"Id":"sha256:%d","Name":"v%d","Labels":%s}`, i, i, d.sealed(kind, "mine")))
		}
		return "[" + strings.Join(all, ",") + "]"
	}
	create := func(volumes string) string { return `{"Image":"` + testImage + `","Volumes":{` + volumes + `}}` }
	build := string(check.Value(io.ReadAll(contextOf(t, "FROM "+testImage+"\n")))(t))
	for _, tt := range []struct {
		have       int
		call, body string
		full       bool
	}{
		{2, "/commit?container=c", "", false}, {3, "/commit?container=c", "", true}, {2, "/build?version=1", build, false}, {3, "/build?version=1", build, true},
		{0, "/containers/create", create(`"/a":{},"/b":{},"/c":{},"/d":{}`), true}, {2, "/containers/create", create(`"/a":{}`), false},
		{3, "/containers/create", create(`"/a":{}`), true}, {3, "/containers/create", create(""), false},
	} {
		s.answers["GET /images/json"], s.answers["GET /volumes"] = list(lifecycle.ObjectImage, tt.have), `{"Volumes":`+list(lifecycle.ObjectVolume, tt.have)+`}`
		header := map[bool]http.Header{true: asTar, false: {"Content-Type": {"application/json"}}}[tt.body == build]
		if resp, told := sayWith(t, address, http.MethodPost, tt.call, header, tt.body); strings.Contains(told, "max_objects") != tt.full {
			t.Errorf("%s %s with %d: %s %s", tt.call, tt.body, tt.have, resp.Status, told)
		}
	}
}

// TestBuildsEnd: one that hangs, and one whose files don't come, last no longer than what
// they make is to live.
func TestBuildsEnd(t *testing.T) {
	files := tarOf(t, "Dockerfile", "FROM "+testImage+"\nRUN sleep 1000\n")
	for name, tt := range map[string]struct {
		sent int
		says string
		most time.Duration
	}{"it hangs": {len(files), "the build was ended", 6 * time.Second}, "its files don't come": {1, `{"message":`, transferStall / 2}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var building atomic.Int64
				_, l := boundedDoor(t, Options{SpoolDir: t.TempDir()}, func(w http.ResponseWriter, r *http.Request) {
					switch base := path.Base(r.URL.Path); {
					case base == "build":
						building.Add(1)
						defer building.Add(-1)
						_, _ = io.Copy(io.Discard, r.Body)
						_ = http.NewResponseController(w).Flush()
						<-r.Context().Done()
					case strings.Contains(r.URL.Path, "busybox"):
						_, _ = fmt.Fprintf(w, `{"Id":"sha256:%s","RepoTags":[%q],"Config":{}}`, standInID, testImage)
					default:
						_, _ = io.WriteString(w, "[]")
					}
				}, "red")
				labels := url.QueryEscape(`{"` + labelTTL + `":"5s"}`)
				head := fmt.Sprintf("POST /v1.41/build?version=1&labels=%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-tar\r\nContent-Length: %d\r\n\r\n", labels, len(files))
				begun := time.Now()
				_, text := exchange(l[0], head, bytes.NewReader(files[:tt.sent]))
				if took := time.Since(begun); !strings.Contains(text, tt.says) || took > tt.most {
					t.Errorf("after %s: %s", took, text)
				}
				if synctest.Wait(); building.Load() != 0 {
					t.Error("the engine goes on")
				}
			})
		})
	}
}
