package engineapi

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const registryPolicy = `version: 1
images: {allow: ["reg.local:5000/team/*"]}
profiles: {default: {engine_api: {push: ["reg.local:5000/*", "docker.io/mine/*"], login: ["reg.local:5000", "docker.io"]}}}
`

// TestRegistryCalls looks at what the engine gets of calls that have it connect to a registry.
func TestRegistryCalls(t *testing.T) {
	var d *testDoor
	var got string
	d = doorBefore(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/v1.41")
		owner := map[string]string{"reg.local:5000/ci/own:1": standInTenant, "docker.io/mine/own:1": standInTenant, "reg.local:5000/ci/theirs:1": "other"}
		if name, ok := strings.CutPrefix(path, "/images/"); ok && strings.HasSuffix(name, "/json") {
			name = strings.TrimSuffix(name, "/json")
			labels := map[string]string{}
			if tenant, ok := owner[name]; ok {
				labels = d.labels(lifecycle.ObjectImage, tenant)
			} else if name != "reg.local:5000/team/base:1" && name != "reg.local:5000/other/base:1" && name != "reg.local:5000/private/base:1" {
				http.NotFound(w, r)
				return
			}
			names := []string{name}
			if name == "reg.local:5000/other/base:1" {
				names = append(names, "reg.local:5000/team/base:1")
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"Id": "sha256:" + standInID, "RepoTags": names, "Config": map[string]any{"Labels": labels}})
			return
		}
		text, _ := io.ReadAll(r.Body)
		auth, _ := base64.URLEncoding.DecodeString(r.Header.Get("X-Registry-Auth"))
		got = strings.TrimSuffix(fmt.Sprintf("%s?%s %s%s", path, r.URL.RawQuery, auth, text), "\n")
		_, _ = io.WriteString(w, "{}")
	}}, registryPolicy)
	address := d.listen(Caller{Name: "r", Tenant: standInTenant})
	for name, tt := range map[string]struct {
		call, body, auth string
		want             string // what the engine gets, or a part of the refusal after a "!"
	}{
		"login":                    {"POST /auth", `{"username":"a","password":"b","serveraddress":"https://reg.local:5000/"}`, "", `/auth? {"username":"a","password":"b","serveraddress":"reg.local:5000"}`},
		"login to the hub":         {"POST /auth", `{"username":"a","password":"b","serveraddress":""}`, "", `/auth? {"username":"a","password":"b","serveraddress":"https://index.docker.io/v1/"}`},
		"login elsewhere":          {"POST /auth", `{"username":"a","password":"b","serveraddress":"evil.local"}`, "", "!registries.login"},
		"login by a path":          {"POST /auth", `{"serveraddress":"https://reg.local:5000/x@evil.local"}`, "", "!registries.login"},
		"login by a user":          {"POST /auth", `{"serveraddress":"https://reg.local:5000@evil.local"}`, "", "!registries.login"},
		"login by http":            {"POST /auth", `{"serveraddress":"http://reg.local:5000"}`, "", "!registries.login"},
		"login by a query":         {"POST /auth", `{"serveraddress":"reg.local:5000?x"}`, "", "!registries.login"},
		"login in other case":      {"POST /auth", `{"serveraddress":"reg.local:5000","ServerAddress":"evil.local"}`, "", "!ServerAddress"},
		"login twice":              {"POST /auth", `{"serveraddress":"reg.local:5000","serveraddress":"evil.local"}`, "", "!twice"},
		"push":                     {"POST /images/reg.local:5000/ci/own/push?tag=1", "", `{"username":"a","serveraddress":"reg.local:5000"}`, `/images/reg.local:5000/ci/own/push?tag=1 {"username":"a","serveraddress":"reg.local:5000"}`},
		"push to the hub":          {"POST /images/mine/own/push?tag=1", "{}", `{"serveraddress":"https://index.docker.io/v1/"}`, `/images/docker.io/mine/own/push?tag=1 {"serveraddress":"https://index.docker.io/v1/"}`},
		"push what may be seen":    {"POST /images/reg.local:5000/team/base/push?tag=1", "", "", `/images/reg.local:5000/team/base/push?tag=1 {}`},
		"push another's":           {"POST /images/reg.local:5000/ci/theirs/push?tag=1", "", "", "!No such image"},
		"push what isn't listed":   {"POST /images/reg.local:5000/private/base/push?tag=1", "", "", "!No such image"},
		"push by a hidden name":    {"POST /images/reg.local:5000/other/base/push?tag=1", "", "", "!No such image"},
		"push elsewhere":           {"POST /images/evil.local/ci/own/push?tag=1", "", "", "!images.push"},
		"push by ID":               {"POST /images/" + standInID + "/push?tag=1", "", "", "!"},
		"push by tag":              {"POST /images/reg.local:5000/ci/own:1/push", "", "", `/images/reg.local:5000/ci/own/push?tag=1 {}`}, // as dockerode does
		"push by two tags":         {"POST /images/reg.local:5000/ci/own:1/push?tag=1", "", "", "!invalid reference"},
		"push by a digest":         {"POST /images/reg.local:5000/ci/own:1@sha256:" + standInID + "/push", "", "", "!invalid reference"},
		"push elsewhere by tag":    {"POST /images/evil.local/ci/own:1/push", "", "", "!images.push"},
		"push all tags":            {"POST /images/reg.local:5000/ci/own/push", "", "", "!all tags"},
		"push by a tag's digest":   {"POST /images/reg.local:5000/ci/own/push?tag=1@sha256:" + standInID, "", "", "!images.syntax"},
		"push with another's auth": {"POST /images/reg.local:5000/ci/own/push?tag=1", "", `{"serveraddress":"evil.local"}`, "!another registry"},
		"push with more":           {"POST /images/reg.local:5000/ci/own/push?tag=1", "", `{"serveraddress":"reg.local:5000","x":1}`, "!X-Registry-Auth"},
		"distribution":             {"GET /distribution/reg.local:5000/team/base/json", "", `{"username":"a"}`, `/distribution/reg.local:5000/team/base:latest/json? {"username":"a"}`},
		"distribution elsewhere":   {"GET /distribution/evil.local/base/json", "", "", "!images.allow"},
	} {
		method, path, _ := strings.Cut(tt.call, " ")
		header := http.Header{}
		if method == http.MethodPost {
			header.Set("Content-Type", "application/json")
		}
		if tt.auth != "" {
			header.Set("X-Registry-Auth", base64.URLEncoding.EncodeToString([]byte(tt.auth)))
		}
		got = ""
		resp, text := sayWith(t, address, method, "/v1.41"+path, header, tt.body)
		refusal, refused := strings.CutPrefix(tt.want, "!")
		switch {
		case refused && (got != "" || resp.StatusCode/100 != 4 || !strings.Contains(text, refusal)):
			t.Errorf("%s: %s %s, the engine got %q", name, resp.Status, text, got)
		case !refused && got != tt.want:
			t.Errorf("%s: the engine got %q, %s", name, got, text)
		}
	}
	large := base64.URLEncoding.EncodeToString([]byte(`{"username":"` + strings.Repeat("a", maxRegistryAuth) + `"}`))
	for _, auths := range [][]string{{"e30", "e30"}, {large}} {
		got = ""
		resp, text := sayWith(t, address, http.MethodGet, "/v1.41/distribution/reg.local:5000/team/base/json", http.Header{"X-Registry-Auth": auths}, "")
		if got != "" || resp.StatusCode != http.StatusBadRequest {
			t.Errorf("%d credentials: %s %s, the engine got %q", len(auths), resp.Status, text, got)
		}
	}
	_, leave := d.limits.enter("logins "+standInTenant, maxLogins)
	if status, told := say(t, address, "POST", "/auth", `{"serveraddress":"reg.local:5000"}`); status != http.StatusTooManyRequests {
		t.Errorf("one more login: %d %s", status, told)
	}
	leave()
	if log := string(readFile(t, d.audit)); strings.Contains(log, "password") || strings.Contains(log, `"b"`) {
		t.Errorf("the audit log has a body: %s", log)
	}
}

// No other image gets a name while it is pushed, saved or removed.
func TestNameIsKept(t *testing.T) {
	const image = "reg.local:5000/ci/own"
	for _, tt := range []struct{ method, path string }{
		{http.MethodPost, "/images/" + image + "/push?tag=1"}, {http.MethodGet, "/images/get?names=" + image + ":1"}, {http.MethodDelete, "/images/" + image + ":1"},
	} {
		began, end := make(chan struct{}), make(chan struct{})
		var d *testDoor
		d = doorBefore(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasSuffix(r.URL.Path, "/json") {
				close(began)
				<-end
				_, _ = w.Write([]byte("[]"))
				return
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"Id": "sha256:" + standInID, "RepoTags": []string{image + ":1"}, "Config": map[string]any{"Labels": d.labels(lifecycle.ObjectImage, standInTenant)}})
		}}, registryPolicy)
		address, done := d.listen(Caller{Name: "r", Tenant: standInTenant}), make(chan string, 1)
		go func() {
			status, text := say(t, address, tt.method, "/v1.41"+tt.path, "")
			done <- fmt.Sprint(status, text)
		}()
		select {
		case <-began:
		case answer := <-done:
			t.Fatalf("%s %s: %s", tt.method, tt.path, answer)
		}
		if unlock, ok := d.names.TryLock(image + ":1"); ok {
			unlock()
			t.Errorf("%s %s: the name could be given to another image meanwhile", tt.method, tt.path)
		}
		close(end)
		<-done
	}
}

func TestCommitChanges(t *testing.T) {
	for name, tt := range map[string]struct {
		changes []string
		want    string // lines, or a part of the refusal after a "!"
	}{
		"none":         {[]string{"", " "}, ""},
		"all":          {[]string{"cmd [\"a\", \"b\"]", "ENV A=b C=\"d e\"\nEXPOSE 80", "LABEL x=y", "WORKDIR /a", "USER 1"}, "CMD [\"a\",\"b\"]\nENV A=b C=\"d e\"\nEXPOSE 80\nLABEL x=y\nWORKDIR /a\nUSER 1"},
		"labels":       {[]string{"LABEL a=b berm.tenant=victim"}, "!reserved"},
		"expanded":     {[]string{"LABEL $X=victim"}, "!refused"},
		"trigger":      {[]string{"ONBUILD USER 0"}, "!configuration"},
		"a base":       {[]string{"CMD a\nFROM evil.local/x"}, "!configuration"},
		"files":        {[]string{"ADD http://192.0.2.1/x /"}, "!configuration"},
		"a command":    {[]string{"RUN id"}, "!configuration"},
		"an argument":  {[]string{"ARG a=b"}, "!configuration"},
		"continued":    {[]string{"ENV A=b \\", "ONBUILD RUN id"}, "!"},
		"here":         {[]string{"CMD <<EOF\nx\nEOF"}, "!"},
		"the kernel's": {[]string{"WORKDIR /proc/self/fd/8"}, "!kernel"},
		"escape":       {[]string{"# escape=`", "ENV A=b\\", "LABEL berm.tenant=x"}, "!"},
		"too many":     {[]string{strings.Repeat("ENV A=b\n", maxInstructions+1)}, "!more than"},
		"a space":      {[]string{"ENV A=\u2028LABEL"}, "!"},
	} {
		lines, err := readChanges(tt.changes)
		got := strings.Join(lines, "\n")
		if err != nil {
			got = "!" + err.Error()
		}
		if refusal, refused := strings.CutPrefix(tt.want, "!"); got != tt.want && !(refused && err != nil && strings.Contains(got, refusal)) {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// TestCacheFromNames has the engine take layers only of images that the caller may see.
func TestCacheFromNames(t *testing.T) {
	d, s, _ := scripted(t, "1.41", registryPolicy)
	for _, name := range []string{"reg.local:5000/team/base", "reg.local:5000/private/base"} {
		s.answers["GET /images/"+name+"/json"] = fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":[%q],"Config":{}}`, standInID, name+":latest")
	}
	for refs, want := range map[string]string{
		`["reg.local:5000/team/base"]`:                            `["sha256:` + standInID + `"]`,
		`["reg.local:5000/team/base","reg.local:5000/team/none"]`: `["sha256:` + standInID + `"]`,
		`["reg.local:5000/team/none"]`:                            "",
		`["reg.local:5000/private/base"]`:                         "!images.allow",
		`["reg.local:5000/private/none"]`:                         "!images.allow",
		`["reg.local:5000/team/base"`:                             "!JSON list",
		"[" + strings.Repeat(`"a",`, maxBases) + `"a"]`:           "!JSON list",
	} {
		c := &call{Proxy: d.Proxy, ctx: t.Context(), rules: d.opts.Policy(), caller: Caller{Name: "r", Tenant: "mine"}, version: 41, query: url.Values{"cachefrom": {refs}}}
		query := url.Values{}
		err := cacheFrom(c, query)
		if refusal, refused := strings.CutPrefix(want, "!"); refused != (err != nil) || refused && !strings.Contains(fmt.Sprint(err, proxy.FaultOf(err).Detail, proxy.FaultOf(err).Reasons), refusal) || !refused && query.Get("cachefrom") != want {
			t.Errorf("%s: %q, %v", refs, query.Get("cachefrom"), err)
		}
	}
}

// TestCommitVerified has an engine get the changes of a commit as Berm writes them, and commit to
// another image than it was asked for, which is removed once.
func TestCommitVerified(t *testing.T) {
	var change func(labels map[string]string)
	labels, removed := map[string]string{}, 0
	d := doorBefore(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/commit"):
			changes := r.URL.Query()["changes"]
			if changes[0] != `CMD ["a"]` || changes[1] != `ENV A b c` {
				t.Errorf("changes: %q", changes)
			}
			for _, line := range changes[2:] {
				name, value, _ := strings.Cut(strings.TrimPrefix(line, "LABEL "), "=")
				labels[name] = check.Value(strconv.Unquote(value))(t)
			}
			change(labels)
			_, _ = fmt.Fprintf(w, `{"Id":"sha256:%s"}`, standInID)
		case r.Method == http.MethodDelete:
			removed++
		case strings.HasSuffix(r.URL.Path, "/images/json"):
			_, _ = io.WriteString(w, "[]")
		default:
			_, _ = fmt.Fprintf(w, `{"Id":"sha256:%s","Config":{"Labels":%s}}`, standInID, labelsJSON(labels))
		}
	}}, basePolicy+"profiles: {default: {engine_api: {commit: \"on\"}}}\n")
	address := d.listen(Caller{Name: "c", Tenant: standInTenant})
	for name, tt := range map[string]struct {
		change func(labels map[string]string)
		want   int
	}{
		"as asked":    {func(map[string]string) {}, 0},
		"longer life": {func(l map[string]string) { l[lifecycle.LabelExpiresAt] = "2999-01-01T00:00:00Z" }, 1},
		"nobody's":    {func(l map[string]string) { clear(l) }, 1},
	} {
		change, removed = tt.change, 0
		status, told := say(t, address, http.MethodPost, "/v1.41/commit?container="+standInID+"&changes="+url.QueryEscape("cmd  [ \"a\" ]\nenv A b c"), "")
		if ok := status == http.StatusCreated; ok != (tt.want == 0) || removed != tt.want {
			t.Errorf("%s: %d %s, removed %d times", name, status, told, removed)
		}
	}
}
