package engineapi

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.yaml.in/yaml/v3"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/engineapi/buildkit"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// script is an engine of version 1.41 that answers by the request's method and path, and
// notes what it was asked.
type script struct {
	t       testing.TB
	answers map[string]string // by "GET /info"; one that begins with a number is an error, {body} what was sent
	version string

	mu    sync.Mutex
	asked []string // with queries and bodies
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil { // in FuzzCreate report itself would be a fault
		s.t.Error(err)
	}
	_, path, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if !strings.HasPrefix(r.URL.Path, "/v") {
		path = strings.TrimPrefix(r.URL.Path, "/")
	}
	call := r.Method + " /" + path
	s.mu.Lock()
	s.asked = append(s.asked, strings.TrimSpace(call+"?"+r.URL.RawQuery+" "+string(body)))
	answer, ok := s.answers[call]
	s.mu.Unlock()
	w.Header().Set("Api-Version", s.version)
	if call == "GET /_ping" {
		return
	}
	answer = strings.ReplaceAll(answer, "{body}", string(body))
	var status int
	if n, _ := fmt.Sscanf(answer, "%3d ", &status); n == 1 {
		answer = answer[4:]
	} else if status = http.StatusOK; !ok {
		status, answer = http.StatusNotFound, "not here: "+call
	}
	if status >= 300 {
		answer = fmt.Sprintf(`{"message":%q}`, answer)
	}
	w.WriteHeader(status)
	_, _ = io.WriteString(w, answer)
}

// said returns what the engine was asked that begins so.
func (s *script) said(begin string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.asked), func(a string) bool { return !strings.HasPrefix(a, begin) })
}

// forget drops what the engine was asked.
func (s *script) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = nil
}

// scripted is a door before such an engine, and the address of the caller "mine".
func scripted(t testing.TB, version, rules string) (d *testDoor, s *script, address string) {
	t.Helper()
	s = &script{t: t, version: version, answers: map[string]string{"GET /info": `{"NCPU":2,"Architecture":"x86_64"}`}}
	d = doorTo(t, serveEngine(t, s.ServeHTTP), rules)
	return d, s, d.listen(Caller{Name: "mine", Tenant: "mine"})
}

// ownContainerOf has the engine have a container of a tenant's.
func (s *script) ownContainerOf(d *testDoor, tenant, id, name string) {
	labels := d.sealed(lifecycle.ObjectContainer, tenant)
	s.mu.Lock()
	defer s.mu.Unlock()
	inspected := fmt.Sprintf(`{"Id":%q,"Name":"/%s","State":{},"HostConfig":{},"Config":{"Labels":%s},"NetworkSettings":{}}`, id, name, labels)
	s.answers["GET /containers/"+id+"/json"], s.answers["GET /containers/"+name+"/json"] = inspected, inspected
	list := strings.Trim(s.answers["GET /containers/json"], "[]")
	if list != "" {
		list += ","
	}
	s.answers["GET /containers/json"] = fmt.Sprintf(`[%s{"Id":%q,"Labels":%s,"Names":["/%s"],"State":"running"}]`, list, id, labels, name)
}

var (
	mineID   = strings.Repeat("a1", 32)
	theirsID = strings.Repeat("b2", 32)
)

// TestQuery sends what real clients and attackers put into queries and bodies.
func TestQuery(t *testing.T) {
	d, s, address := scripted(t, "1.51", basePolicy+"profiles: {default: {engine_api: {commit: \"on\"}}}\n")
	s.ownContainerOf(d, "mine", mineID, "c")
	const img = "sha256:cafe"
	s.answers["GET /images/berm.local/busybox:latest/json"] = `{"Id":"` + img + `","RepoTags":["berm.local/busybox:latest"],"Config":{}}`
	s.answers["GET /images/"+img+"/json"] = s.answers["GET /images/berm.local/busybox:latest/json"]
	s.answers["GET /images/json"] = "[]"
	for _, call := range []string{"POST stop", "POST start", "POST restart", "POST kill", "POST wait", "POST resize", "GET stats", "GET logs", "GET changes"} {
		method, verb, _ := strings.Cut(call, " ")
		s.answers[method+" /containers/"+mineID+"/"+verb] = "{}"
	}
	const own = "/containers/c/"
	asked := "/containers/" + mineID + "/"
	s.answers["POST /images/create"] = `{"status":"x"}`
	s.answers["DELETE /images/berm.local/busybox:latest"] = "[]"
	for _, tt := range []struct {
		name, method, target, body string
		status                     int
		asked                      string // what the engine is asked, in place of the call
	}{
		{"python's images", "GET", "/images/json?only_ids=0&all=0", "", 200, "GET /images/json?"},
		{"CLI 29's images", "GET", "/images/json?manifests=1&identity=1", "", 200, "GET /images/json?manifests=1"},
		{"Compose 5's inspect", "GET", "/images/berm.local/busybox:latest/json?manifests=1", "", 200, "GET /images/" + img + "/json?manifests=1"},
		{"a platform", "GET", "/images/berm.local/busybox:latest/json?platform=%7B%22os%22%3A%22linux%22%2C%22architecture%22%3A%22arm64%22%7D", "", 200,
			"GET /images/" + img + "/json?platform=%7B%22architecture%22%3A%22arm64%22%2C%22os%22%3A%22linux%22%7D"},
		{"a platform that is none", "GET", "/images/berm.local/busybox:latest/json?platform=linux", "", 400, ""},
		{"the first counts", "GET", "/images/json?all=1&all=0", "", 200, "GET /images/json?all=1"},
		{"the first counts when it is empty", "POST", "/containers/c/stop?t=&t=7", "", 200, "POST /containers/" + mineID + "/stop?"},
		{"python's tag", "POST", "/containers/c/kill?force=0&signal=HUP", "", 200, "POST /containers/" + mineID + "/kill?signal=HUP"},
		{"another case", "POST", "/containers/c/stop?T=7&t=3", "", 200, "POST /containers/" + mineID + "/stop?t=3"},
		{"too long a wait", "POST", "/containers/c/stop?t=3601", "", 400, ""},
		{"less than any wait", "POST", "/containers/c/stop?t=-2", "", 400, ""},
		{"as long as it takes", "POST", "/containers/c/stop?t=-1", "", 200, "POST /containers/" + mineID + "/stop?t=3600"},
		{"no, as engines read it", "GET", "/images/json?all=+No+&digests=FALSE", "", 200, "GET /images/json?"},
		{"a semicolon", "POST", "/containers/c/stop?t=1;t=2", "", 400, ""},
		{"too long", "POST", "/containers/c/stop?x=" + strings.Repeat("x", 64<<10), "", 400, ""},
		{"no wait", "POST", own + "stop?t=x", "", 400, ""},
		{"no signal", "POST", own + "stop?t=1&signal=a%20b", "", 400, ""},
		{"a signal", "POST", own + "stop?t=0&signal=INT", "", 200, "POST " + asked + "stop?signal=INT&t=0"},
		{"stats, once", "GET", "/v1.41" + own + "stats?one-shot=1&stream=no", "", 200, "GET " + asked + "stats?one-shot=1&stream=0"},
		{"stats, once, by an older version", "GET", "/v1.40" + own + "stats?one-shot=1&stream=0", "", 200, "GET " + asked + "stats?stream=0"},
		{"a whole log", "GET", "/v1.24" + own + "logs?stdout=1&tail=all", "", 200, "GET " + asked + "logs?stdout=1&tail=all"},
		{"no moment", "GET", own + "logs?stdout=1&since=a%20b", "", 400, ""},
		{"unknown", "GET", own + "changes?x=1", "", 200, "GET " + asked + "changes?"},
		{"no condition", "POST", own + "wait?condition=other", "", 400, ""},
		{"a condition", "POST", "/v1.30" + own + "wait?condition=not-running", "", 200, "POST " + asked + "wait?condition=not-running"},
		{"a condition, by an older version", "POST", "/v1.29" + own + "wait?condition=not-running", "", 200, "POST " + asked + "wait?"},
		{"a size", "POST", own + "resize?h=1&w=1&h=2", "", 200, "POST " + asked + "resize?h=1&w=1"},
		{"a large size", "POST", own + "resize?h=65536&w=1", "", 400, ""},
		{"a negative size", "POST", own + "resize?h=-1&w=1", "", 400, ""},
		{"no keys", "POST", own + "attach?detachKeys=a+b", "", 400, ""},
		{"narrower", "DELETE", "/images/berm.local/busybox:latest?platforms=%7B%22os%22%3A%22linux%22%7D", "", 403, ""},
		{"narrower after nothing", "DELETE", "/images/berm.local/busybox:latest?platforms=&platforms=x", "", 403, ""},
		{"a checkpoint", "POST", "/containers/c/start?checkpoint=x", "", 403, ""},
		{"a checkpoint's place", "POST", own + "start?checkpoint-dir=/etc", "", 403, ""},
		{"an old start's body", "POST", "/v1.24" + own + "start", `{"Privileged":true}`, 400, ""},
		{"an import", "POST", "/images/create?fromSrc=-&repo=x", "", 403, ""},
		{"changes of an import", "POST", "/images/create?fromImage=berm.local/busybox&changes=&changes=CMD+x", "", 403, ""},
		{"dockerode's stop", "POST", "/containers/c/stop?t=5", `{"t":5}`, 200, "POST /containers/" + mineID + "/stop?t=5"},
		{"dockerode's pull", "POST", "/images/create?fromImage=berm.local%2Fbusybox&tag=latest", `{"fromImage":"berm.local/busybox","tag":"latest"}`, 200,
			"POST /images/create?fromImage=berm.local%2Fbusybox&tag=latest"},
		{"null", "POST", "/containers/c/kill", `null`, 200, "POST /containers/" + mineID + "/kill?"},
		{"an empty object", "POST", "/containers/c/kill", `{}`, 200, "POST /containers/" + mineID + "/kill?"},
		{"a body of another's", "POST", "/containers/c/restart", `{"HostConfig":{"Privileged":true}}`, 400, ""},
		{"a body beside the query", "POST", "/containers/c/stop?t=5", `{"t":5,"signal":"KILL"}`, 400, ""},
		{"two objects", "POST", "/containers/c/stop?t=5", `{"t":5}{"t":6}`, 400, ""},
		{"a body that is too large", "POST", "/containers/c/stop?t=5", `{"t":"` + strings.Repeat("5", maxFormBody) + `"}`, 400, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s.forget()
			status, told := say(t, address, tt.method, tt.target, tt.body)
			if status != tt.status {
				t.Fatalf("%d: %s", status, told)
			}
			if got := s.said(tt.asked); tt.asked != "" && !slices.Contains(got, tt.asked) {
				t.Errorf("the engine was asked %q, want %q", s.said(""), tt.asked)
			}
			if got := slices.Concat(s.said("POST"), s.said("DELETE")); tt.asked == "" && len(got) > 0 {
				t.Errorf("the engine was asked %q", got)
			}
		})
	}
	if n := testutil.ToFloat64(d.metrics.dropped.WithLabelValues("/images/json")); n != 2 {
		t.Errorf("%v parameters were dropped of /images/json", n)
	}
}

// TestSwitchedOff asks for what a profile switches off, and for an exec that was made before.
func TestSwitchedOff(t *testing.T) {
	d, s, address := scripted(t, "1.41", basePolicy+"profiles: {default: {engine_api: {archive: \"off\", exec: \"off\"}}}\n")
	s.ownContainerOf(d, "mine", mineID, "c")
	exec := "/exec/" + strings.Repeat("e3", 32)
	s.answers["GET "+exec+"/json"] = `{"ContainerID":"` + mineID + `"}`
	auditor := d.listen(Caller{Name: "auditor", Tenant: "mine", Audit: true})
	for call, tt := range map[string]struct{ body, asked, key string }{
		"GET /containers/c/archive?path=/etc": {"", "GET /containers/" + mineID + "/archive", "archive"},
		"GET /containers/c/export":            {"", "GET /containers/" + mineID + "/export", "archive"},
		"POST /containers/c/exec":             {`{"Cmd":["true"]}`, "POST /containers/" + mineID + "/exec", "exec"},
		"POST " + exec + "/start":             {`{"Detach":true}`, "POST " + exec + "/start", "exec"},
	} {
		method, path, _ := strings.Cut(call, " ")
		s.answers[tt.asked] = "{}"
		if status, told := say(t, address, method, path, tt.body); status != 403 || !strings.Contains(told, "engine_api."+tt.key) || len(s.said(tt.asked)) > 0 {
			t.Errorf("%s: %d %s, the engine was asked %q", call, status, told, s.said(tt.asked))
		}
		if status, told := say(t, auditor, method, path, tt.body); status >= 300 || len(s.said(tt.asked)) != 1 {
			t.Errorf("%s in mode audit: %d %s", call, status, told)
		}
	}
}

// TestRedactedEnv inspects a container with a variable that the policy hides.
func TestRedactedEnv(t *testing.T) {
	d, s, address := scripted(t, "1.41", basePolicy+"profiles: {default: {engine_api: {redact_env: [\"*_TOKEN\"]}}}\n")
	s.ownContainerOf(d, "mine", mineID, "c")
	s.answers["GET /containers/"+mineID+"/json"] = strings.Replace(s.answers["GET /containers/c/json"], `"Config":{`, `"SizeRootFs":7,"Config":{"Image":"i","Env":["API_TOKEN=hunter2","PLAIN=seen"],`, 1)
	s.answers["GET /containers/c/json"] = s.answers["GET /containers/"+mineID+"/json"]
	_, told := say(t, address, "GET", "/containers/c/json?size=1", "")
	for _, want := range []string{`"Env":["API_TOKEN=[redacted]","PLAIN=seen"]`, `"SizeRootFs":7`, `"Image":"i"`, mineID} {
		if !strings.Contains(told, want) {
			t.Errorf("no %s in %s", want, told)
		}
	}
}

// TestQueryOfEngines has each parameter of the API's description that changes something be known.
func TestQueryOfEngines(t *testing.T) {
	dir := strings.TrimSpace(string(check.Value(exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/docker/docker").Output())(t)))
	var api struct {
		Paths map[string]map[string]struct{ Parameters []struct{ In, Name string } }
	}
	must(t, yaml.Unmarshal(check.Value(os.ReadFile(filepath.Join(dir, "api/swagger.yaml")))(t), &api))
	checked := 0
	for path, methods := range api.Paths {
		for method, op := range methods {
			_, segments, err := splitPath(strings.NewReplacer("{", "", "}", "").Replace(path))
			if err != nil {
				continue
			}
			rt, _ := lookup(strings.ToUpper(method), segments)
			if rt == nil || !rt.change {
				continue
			}
			for _, p := range op.Parameters {
				_, one := rt.query[p.Name]
				_, many := rt.query[p.Name+"*"]
				if p.In == "query" && !one && !many {
					t.Errorf("%s %s has %s", method, path, p.Name)
				}
				checked++
			}
		}
	}
	if checked < 50 {
		t.Errorf("%d parameters are too few", checked)
	}
}

// TestManifests has an engine tell which containers use an image.
func TestManifests(t *testing.T) {
	d, s, address := scripted(t, "1.51", "")
	s.ownContainerOf(d, "mine", mineID, "c")
	s.ownContainerOf(d, "theirs", theirsID, "victim")
	image := fmt.Sprintf(`{"Id":"sha256:cafe","RepoTags":["berm.local/busybox:latest"],"Config":{},"Manifests":[{"ID":"sha256:1","Kind":"image","Size":{"Total":12345678901},"ImageData":{"Containers":[%q,%q]}},{"ID":"sha256:2","Kind":"attestation"}]}`, mineID, theirsID)
	s.answers["GET /images/json"] = "[" + image + "," + image + "]"
	s.answers["GET /images/berm.local/busybox:latest/json"], s.answers["GET /images/sha256:cafe/json"] = image, image
	for _, path := range []string{"/images/json?manifests=1", "/images/berm.local/busybox:latest/json?manifests=1"} {
		status, told := say(t, address, "GET", path, "")
		if status != 200 || strings.Contains(told, theirsID) || !strings.Contains(told, mineID) || !strings.Contains(told, `"Total":12345678901`) {
			t.Errorf("%s: %d %s", path, status, told)
		}
	}
}

// TestContainerConfig is of the field by which Compose 1 finds an image's volumes.
func TestContainerConfig(t *testing.T) {
	_, s, address := scripted(t, "1.51", "")
	s.answers["GET /images/berm.local/busybox:latest/json"] = `{"Id":"sha256:cafe","RepoTags":["berm.local/busybox:latest"],"Config":{"Volumes":{"/data":{}}},"ContainerConfig":{"Env":["BUILD_SECRET=x"]}}`
	s.answers["GET /images/sha256:cafe/json"] = s.answers["GET /images/berm.local/busybox:latest/json"]
	for version, want := range map[string]string{"/v1.44": `"ContainerConfig":{"Volumes":{"/data":{}}}`, "/v1.45": ""} {
		status, told := say(t, address, "GET", version+"/images/berm.local/busybox:latest/json", "")
		if status != 200 || strings.Contains(told, "SECRET") || strings.Contains(told, "ContainerConfig") != (want != "") || !strings.Contains(told, want) {
			t.Errorf("%s: %d %s", version, status, told)
		}
	}
}

// TestRepeatedBody has a client send one object as query and body, as the Node.js client does.
func TestRepeatedBody(t *testing.T) {
	d, s, address := scripted(t, "1.41", basePolicy+"profiles: {default: {engine_api: {commit: \"on\"}}}\n")
	s.ownContainerOf(d, "mine", mineID, "c")
	for query, body := range map[string]string{
		"name=x&Image=&Dns=":           `{"name":"x","Image":"","Dns":null}`,
		"name=x&Image=&VolumesFrom=[]": `{"name":"x","Image":"","VolumesFrom":[]}`,
		"Image=":                       `{"Image":"","VolumesFrom":[],"HostConfig":{"LxcConf":[]}}`,
	} {
		// The body is read: the image, which it lacks, is what is refused.
		if status, told := say(t, address, "POST", "/containers/create?"+query, body); status != 400 || !strings.Contains(told, "invalid reference format") {
			t.Errorf("%s: %d %s", body, status, told)
		}
	}
	for query, body := range map[string]string{
		"Dns=x":       `{"Image":"","Dns":["1.1.1.1"]}`,
		"":            `{"Image":"","Dns":null}`,
		"HostConfig=": `{"Image":"","HostConfig":{"Privileged":true,"Dnsx":null}}`,
		"hostConfig=": `{"Image":"","hostConfig":{"Privileged":true},"Foo":1}`,
	} {
		if status, told := say(t, address, "POST", "/containers/create?"+query, body); status != 400 || !strings.Contains(told, "unknown field") {
			t.Errorf("%s: %d %s", body, status, told)
		}
	}
	if status, told := say(t, address, "POST", "/commit?container=c&comment=x", `{"container":"c","comment":"x","Hostname":"x"}`); status != 403 || !strings.Contains(told, "commit.config") {
		t.Errorf("commit with a host name: %d %s", status, told)
	}
	s.answers["GET /images/json"] = "[]"
	_, _ = say(t, address, "POST", "/commit?container=c&comment=x", `{"container":"c","comment":"x"}`)
	if got := s.said("POST /commit"); len(got) != 1 || !strings.Contains(got[0], "comment=x") {
		t.Errorf("commit: the engine was asked %q", got)
	}
	ex := strings.Repeat("e3", 32)
	s.answers["GET /exec/"+ex+"/json"] = `{"ContainerID":"` + mineID + `"}`
	_, _ = say(t, address, "POST", "/exec/"+ex+"/start", `{"Detach":true,"hijack":true,"stdin":true}`)
	if got := s.said("POST /exec"); len(got) != 1 || strings.Contains(got[0], "hijack") {
		t.Errorf("exec: the engine was asked %q", got)
	}
}

// TestOddHeaders sends a body that another reader could take for something else.
func TestOddHeaders(t *testing.T) {
	d, s, address := scripted(t, "1.41", "")
	s.ownContainerOf(d, "mine", mineID, "c")
	const wrongType, encoded, read = "must be application/json", "the body is encoded, or has several types", "Image"
	for want, all := range map[string][]http.Header{
		read:      {{"Content-Type": {"application/json"}}, {"Content-Type": {"application/json; charset=UTF-8"}}},
		encoded:   {{"Content-Type": {"application/json"}, "Content-Encoding": {"gzip"}}, {"Content-Type": {"application/json", "text/plain"}}},
		wrongType: {{"Content-Type": {"text/plain"}}, {"Content-Type": {"application/x-www-form-urlencoded"}}, {"Content-Type": {"application/json; charset=latin1"}}, {}},
	} {
		for _, headers := range all {
			resp, text := sayWith(t, address, http.MethodPost, "/containers/create", headers, `{"Image":1}`)
			if status := map[bool]int{true: 415, false: 400}[want == wrongType]; resp.StatusCode != status || !strings.Contains(text, want) {
				t.Errorf("%v: %s %s", headers, resp.Status, text)
			}
		}
	}
	s.answers["GET /containers/"+mineID+"/stats"] = "{}"
	for _, query := range []string{"", "?stream=1", "?stream=0"} {
		_, _ = say(t, address, "GET", "/containers/c/stats"+query, "")
	}
	stats := "GET /containers/" + mineID + "/stats?stream="
	if got := s.said(stats); !slices.Equal(got, []string{stats + "1", stats + "1", stats + "0"}) {
		t.Errorf("the engine was asked %q", got)
	}
}

// TestLogDetails asks for the details of a log that has variables, and of one that has none.
func TestLogDetails(t *testing.T) {
	d, s, address := scripted(t, "1.51", "")
	s.ownContainerOf(d, "mine", mineID, "c")
	s.answers["GET /containers/"+mineID+"/logs"] = "said"
	plain := s.answers["GET /containers/c/json"]
	for config, want := range map[string]int{"{}": 200, `{"labels":"a"}`: 200, `{"env":"A"}`: 403, `{"labels":"a","env-regex":"A"}`: 403} {
		s.answers["GET /containers/c/json"] = strings.Replace(plain, `"HostConfig":{}`, `"HostConfig":{"LogConfig":{"Type":"json-file","Config":`+config+`}}`, 1)
		s.answers["GET /containers/"+mineID+"/json"] = s.answers["GET /containers/c/json"]
		if status, told := say(t, address, "GET", "/containers/c/logs?stdout=1&details=1", ""); status != want {
			t.Errorf("%s: %d %s", config, status, told)
		}
		if status, told := say(t, address, "GET", "/containers/c/logs?stdout=1&details=0", ""); status != 200 {
			t.Errorf("%s without details: %d %s", config, status, told)
		}
	}
}

// TestPruneOfMovedNames prunes an image whose names have changed hands since it was listed, and
// leaves one that is nobody's.
func TestPruneOfMovedNames(t *testing.T) {
	d, s, address := scripted(t, "1.51", "")
	const mine, theirs = "sha256:a1a1", "sha256:b2b2"
	full := func(id string) string { return id + strings.Repeat(id[len(id)-4:], 15) }
	labels := d.sealed(lifecycle.ObjectImage, "mine")
	pin := buildkit.Pin(d.opts.Owner, "theirs", full(mine)) + ":1"
	s.answers["GET /images/json"] = fmt.Sprintf(`[{"Id":%q,"RepoTags":["x.local/kept:1","x.local/moved:1",%q],"Labels":%s},{"Id":%q,"RepoTags":["bare.local/x:1"],"Labels":null}]`, full(mine), pin, labels, full("sha256:c3c3"))
	s.answers["GET /system/df"] = "{}"
	for name, id := range map[string]string{"x.local/kept:1": mine, "x.local/moved:1": theirs, pin: mine, "bare.local/x:1": "sha256:c3c3"} {
		s.answers["GET /images/"+name+"/json"] = fmt.Sprintf(`{"Id":%q,"Config":null}`, full(id))
		s.answers["DELETE /images/"+name] = "[]"
	}
	status, told := say(t, address, http.MethodPost, "/images/prune?filters="+url.QueryEscape(`{"dangling":{"false":true}}`), "")
	if got := s.said("DELETE "); status != http.StatusOK || !slices.Equal(got, []string{"DELETE /images/x.local/kept:1?"}) {
		t.Errorf("%d %s: %v", status, told, got)
	}
}
