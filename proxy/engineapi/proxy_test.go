package engineapi

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

var update = flag.Bool("update", false, "write the tables of endpoints into docs/engine-proxy.md")

// judgedBy says what of the policy an endpoint is bound by, beside the caller's seeing
// its own objects only. What isn't in here is always allowed.
var judgedBy = map[string]string{
	"POST /containers/create":        "all of it, as for a sandbox; `engine_api`",
	"POST /containers/{id}/start":    "what was allowed at the create has to be what is there, and not to have ended",
	"POST /containers/{id}/restart":  "as start",
	"POST /containers/{id}/update":   "limits, `restart`",
	"POST /containers/{id}/exec":     "`exec`, `users`, `env`; never privileged",
	"POST /exec/{id}/start":          "`exec`",
	"HEAD /containers/{id}/archive":  "`archive`",
	"GET /containers/{id}/archive":   "`archive`",
	"PUT /containers/{id}/archive":   "`archive`; tar, plain or compressed",
	"GET /containers/{id}/export":    "`archive`",
	"GET /containers/{id}/json":      "`redact_env`",
	"POST /commit":                   "`commit`, `tags`",
	"POST /build":                    "`build`, `build_add_url`, `tags`, images, limits, `networks`; classic builds of a context that is sent along",
	"GET /images/json":               "images that the policy allows, and the caller's own",
	"GET /images/{image}/json":       "images that the policy allows, and the caller's own",
	"GET /images/{image}/history":    "images that the policy allows, and the caller's own",
	"GET /images/{image}/get":        "images that the policy allows, and the caller's own",
	"GET /images/get":                "images that the policy allows, and the caller's own",
	"POST /images/create":            "`pull`, images; from a registry, or with `load` and `tags` of an archive that is sent along",
	"POST /images/{image}/push":      "`push`, images; one tag, with credentials of that registry",
	"GET /distribution/{image}/json": "`pull`, images",
	"POST /images/load":              "`load`, `tags`, `max_objects`",
	"POST /auth":                     "`login`",
	"POST /images/{image}/tag":       "images, `tags`",
	"DELETE /images/{image}":         "the caller's own, and by name what the policy allows, with `pull`",
	"POST /networks/create":          "`networks`, `max_objects`; bridge; addresses of `subnets`",
	"POST /networks/{id}/connect":    "networks of the policy, and the caller's own",
	"POST /grpc":                     "`build`, `buildkit`; [each field](engine-differences.md#buildkit)",
	"POST /session":                  "`build`, `buildkit`",
	"POST /volumes/create":           "`volumes`, `max_objects`; local, without options",
}

// refused are endpoints of the Engine API that nobody may use, whatever the policy.
var refused = [][3]string{
	{"GET", "/images/search", "the engine connects where the caller says"},
	{"POST", "/build/cancel", "builds are ended by leaving them"},
	{"POST", "/containers/{id}/copy", "old, and reads files by another way (to 1.23)"},
	{"GET", "/containers/{id}/checkpoints", "experimental"},
	{"POST", "/containers/{id}/checkpoints", "likewise"},
	{"DELETE", "/containers/{id}/checkpoints/{checkpoint}", "likewise"},
	{"PUT", "/volumes/{name}", "cluster volumes only"},
	{"GET", "/swarm", "answered as outside of a swarm; likewise the rest of `/swarm`, `/nodes`, `/services`, `/tasks`, `/secrets`, `/configs`"},
	{"GET", "/nodes", ""},
	{"GET", "/services", ""},
	{"GET", "/tasks", ""},
	{"GET", "/secrets", ""},
	{"GET", "/configs", ""},
	{"GET", "/plugins/privileges", "code in the engine; likewise the rest of `/plugins`"},
	{"GET", "/debug/pprof", "the engine's own"},
}

// endpoints is the table of what may be used.
func endpoints(t *testing.T) string {
	t.Helper()
	var b, allowed strings.Builder
	b.WriteString("| by policy | bound by |\n| --- | --- |\n")
	seen := map[string]bool{}
	for _, rt := range routes {
		name := rt.method + " " + rt.template
		seen[name] = true
		switch by := judgedBy[name]; {
		case by != "":
			fmt.Fprintf(&b, "| `%s` | %s |\n", name, by)
		case rt.since > upstream.Oldest:
			fmt.Fprintf(&allowed, ",\n`%s` (since %s)", name, rt.since)
		default:
			fmt.Fprintf(&allowed, ",\n`%s`", name)
		}
	}
	for name := range judgedBy {
		if !seen[name] {
			t.Errorf("%s is no endpoint", name)
		}
	}
	b.WriteString("\nAlways allowed:" + strings.TrimPrefix(allowed.String(), ",") + ".\n")
	b.WriteString("\n| never | why |\n| --- | --- |\n")
	for _, r := range refused {
		if r[2] != "" {
			fmt.Fprintf(&b, "| `%s %s` | %s |\n", r[0], r[1], r[2])
		}
	}
	return b.String()
}

func TestRefusedEndpointsAreNone(t *testing.T) {
	for _, r := range refused {
		path := strings.NewReplacer("{id}", "x", "{name}", "x", "{checkpoint}", "x").Replace(r[1])
		_, segments, err := splitPath(path)
		if err != nil {
			t.Fatal(err)
		}
		if rt, _ := lookup(r[0], segments); rt != nil {
			t.Errorf("%s %s is %s", r[0], r[1], rt.template)
		}
	}
}

const docsFile = "../../docs/engine-proxy.md"

func TestDocsListTheEndpoints(t *testing.T) {
	data := check.Value(os.ReadFile(docsFile))(t)
	const begin, end = "<!-- endpoints: go test ./proxy/engineapi -run DocsList -update -->\n", "<!-- end of endpoints -->"
	before, rest, ok := strings.Cut(string(data), begin)
	table, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has lost the marks around the tables of endpoints", docsFile)
	}
	want := endpoints(t)
	if *update {
		must(t, os.WriteFile(docsFile, []byte(before+begin+want+end+after), 0o644))
		return
	}
	if d := cmp.Diff(want, table); d != "" {
		t.Errorf("the tables of endpoints are stale; run go test ./proxy/engineapi -run DocsList -update (-want +got):\n%s", d)
	}
}

// TestCallerOfCertificate: who has a certificate of the authority chooses its common name,
// but not its digest.
func TestCallerOfCertificate(t *testing.T) {
	sum := sha256.Sum256([]byte("admin's"))
	digest := "sha256:" + hex.EncodeToString(sum[:])
	callers := Callers{Certs: map[string]Caller{digest: {Name: "admin"}, "ci": {Name: "ci"}}}
	for name, c := range map[string]struct{ raw, cn, want string }{
		"by digest":       {"admin's", "x", "admin"},
		"by name":         {"other's", "ci", "ci"},
		"digest as name":  {"other's", digest, ""},
		"neither":         {"other's", "x", ""},
		"without a name":  {"other's", "", ""},
		"digest and name": {"admin's", "ci", "admin"},
	} {
		r := httptest.NewRequest("GET", "/_ping", nil)
		cert := &x509.Certificate{Raw: []byte(c.raw), Subject: pkix.Name{CommonName: c.cn}}
		r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}, VerifiedChains: [][]*x509.Certificate{{cert}}}
		got, ok := callers.of(r)
		if got.Name != c.want || ok != (c.want != "") {
			t.Errorf("%s: %+v, %v", name, got, ok)
		}
	}
}

// The engine is told which trace a caller's request belongs to, and nothing else of it.
func TestTraceGoesToTheEngine(t *testing.T) {
	const parent, state = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01", "a=1"
	var mu sync.Mutex
	got := map[string][]string{} // both headers by path
	engine := serveEngine(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path] = append(got[r.URL.Path], r.Header.Get("Traceparent")+" "+r.Header.Get("Tracestate")+" "+r.Header.Get("Baggage"))
		w.Header().Set("Api-Version", "1.41")
		_, _ = io.WriteString(w, `{"ApiVersion": "1.41"}`)
	})
	c := raw(doorTo(t, engine, "").listen(Caller{Name: "a", Tenant: "a"}))
	for _, traced := range []bool{true, false} {
		req := check.Value(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/v1.41/info", nil))(t)
		if traced {
			req.Header.Set("Traceparent", parent)
			req.Header.Set("Tracestate", state)
			req.Header.Set("Baggage", "secret=1")
		}
		resp := check.Value(c.Do(req))(t)
		_ = resp.Body.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	if told := got["/v1.41/info"]; len(told) != 2 || told[0] != parent+" "+state+" " || strings.TrimSpace(told[1]) != "" {
		t.Errorf("the engine was told %q", got)
	}
}

// TestForeignIsNotThere has an engine's answers tell of what is another tenant's, beside those of
// attackReads.
func TestForeignIsNotThere(t *testing.T) {
	const (
		ownID     = "ab11111111111111111111111111111111111111111111111111111111111111"
		foreignID = "ab22222222222222222222222222222222222222222222222222222222222222"
	)
	var d *testDoor
	labels := func(kind lifecycle.ObjectKind, id, tenant string) string {
		return d.sealed(kind, tenant, lifecycle.LabelSessionID, id)
	}
	container := func(id, tenant string) string {
		return fmt.Sprintf(`{"Id":%q,"Name":"/n","State":{},"HostConfig":{},"Config":{"Labels":%s},"NetworkSettings":{}}`, id, labels(lifecycle.ObjectContainer, id, tenant))
	}
	network := func(id, tenant string) string {
		return fmt.Sprintf(`{"Id":%q,"Name":"net","Driver":"bridge","Labels":%s}`, id, labels(lifecycle.ObjectNetwork, id, tenant))
	}
	image := func(id, tenant, tag string) string {
		l := labels(lifecycle.ObjectImage, id, tenant)
		return fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":[%q],"Labels":%s,"Config":{"Labels":%s}}`, id, tag, l, l)
	}
	var mu sync.Mutex
	var ancestors string
	deleted := func(w http.ResponseWriter) {
		_, _ = fmt.Fprintf(w, `[{"Untagged":"own.local/x:1"},{"Deleted":"sha256:%s"},{"Deleted":"sha256:%s"},{"Untagged":"theirs.local/x:1"}]`, ownID, foreignID)
	}
	engine := serveEngine(t, func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/v1.41")
		fail := func(status int, message string) {
			w.WriteHeader(status)
			_, _ = fmt.Fprintf(w, `{"message":%q}`, message)
		}
		told := map[string]string{
			"/containers/" + ownID + "/json": container(ownID, "mine"), "/networks/" + ownID: network(ownID, "mine"),
			"/networks":                         "[" + network(ownID, "mine") + "]",
			"/images/sha256:" + ownID + "/json": image(ownID, "mine", "own.local/x:1"), "/images/own.local/x:1/json": image(ownID, "mine", "own.local/x:1"), "/images/ab2/json": image(foreignID, "theirs", "theirs.local/x:1"),
			"/images/" + foreignID + "/json": image(foreignID, "theirs", "theirs.local/x:1"),
			"/images/forged.local/x:1/json":  strings.ReplaceAll(image(ownID, "mine", "forged.local/x:1"), `"berm.seal":"`, `"berm.seal":"0`),
			"/images/theirs.local/x:1/json":  image(foreignID, "theirs", "theirs.local/x:1"),
			"/images/json":                   "[" + image(ownID, "mine", "own.local/x:1") + "," + image(foreignID, "theirs", "theirs.local/x:1") + "]",
		}
		switch answer := told[path]; {
		case path == "/_ping":
			w.Header().Set("Api-Version", "1.41")
		case r.Method == http.MethodDelete && path == "/images/own.local/x:1":
			deleted(w)
		case r.Method == http.MethodDelete:
			fail(http.StatusConflict, "conflict: unable to delete ab1111111111 (must be forced) - image is being used by stopped container "+foreignID[:12])
		case path == "/containers/json":
			mu.Lock()
			var f struct{ Ancestor map[string]bool }
			_ = json.Unmarshal([]byte(r.URL.Query().Get("filters")), &f)
			ancestors = fmt.Sprint(sortedKeys(f.Ancestor))
			mu.Unlock()
			_, _ = fmt.Fprintf(w, `[{"Id":%q,"Labels":%s}]`, ownID, labels(lifecycle.ObjectContainer, ownID, "mine"))
		case answer != "":
			_, _ = io.WriteString(w, answer)
		case path == "/containers/ab/json":
			fail(http.StatusInternalServerError, "Multiple IDs found with provided prefix: ab")
		case path == "/networks/ab":
			fail(http.StatusBadRequest, "network ab is ambiguous (2 matches found based on ID prefix)")
		default:
			fail(http.StatusNotFound, "No such thing: "+path)
		}
	})
	d = doorTo(t, engine, "")
	address := d.listen(Caller{Name: "mine", Tenant: "mine"})
	say := func(method, target string) (int, string) {
		t.Helper()
		return say(t, address, method, "/v1.41"+target, "")
	}
	for _, kind := range []string{"/containers/%s/json", "/networks/%s", "/images/%s/json"} {
		if status, body := say("GET", fmt.Sprintf(kind, "ab")); status != http.StatusOK || !strings.Contains(body, ownID) {
			t.Errorf("%s: the caller's own by a start of its ID: %d %s", kind, status, body)
		}
	}
	// One that was pulled says what it likes, but has no seal of an image.
	if status, body := say("GET", "/images/forged.local/x:1/json"); status != http.StatusNotFound {
		t.Errorf("a forged image: %d %s", status, body)
	}
	for ancestor, want := range map[string]string{"own.local/x:1": "[sha256:" + ownID + "]", "ab": "[sha256:" + ownID + "]", "theirs.local/x:1": "[" + noImageID + "]", "ab2": "[" + noImageID + "]", "none": "[" + noImageID + "]"} {
		status, body := say("GET", "/containers/json?filters="+url.QueryEscape(fmt.Sprintf(`{"ancestor":[%q]}`, ancestor)))
		if mu.Lock(); status != http.StatusOK || ancestors != want {
			t.Errorf("ancestor %s: the engine is asked for %s, want %s: %d %s", ancestor, ancestors, want, status, body)
		}
		mu.Unlock()
	}
	if status, body := say("DELETE", "/images/own.local/x:1"); status != http.StatusOK || strings.Contains(body, foreignID) || !strings.Contains(body, ownID) || !strings.Contains(body, "own.local/x:1") {
		t.Errorf("what was deleted: %d %s", status, body)
	}
	if status, body := say("DELETE", "/images/sha256:"+ownID); status != http.StatusConflict || strings.Contains(body, foreignID[:12]) {
		t.Errorf("the engine's refusal: %d %s", status, body)
	}
}
