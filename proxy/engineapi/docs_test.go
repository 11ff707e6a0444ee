package engineapi

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the tables of endpoints into docs/engine-proxy.md")

// judgedBy says what of the policy an endpoint is bound by, beside the caller's seeing
// its own objects only. What isn't in here is always allowed.
var judgedBy = map[string]string{
	"POST /containers/create":       "all of it, as for a sandbox; `engine_api`",
	"POST /containers/{id}/start":   "what was allowed at the create has to be what is there, and not to have ended",
	"POST /containers/{id}/restart": "as start",
	"POST /containers/{id}/update":  "limits, `restart`",
	"POST /containers/{id}/exec":    "`exec`, `users`, `env`; never privileged",
	"POST /exec/{id}/start":         "`exec`",
	"HEAD /containers/{id}/archive": "`archive`",
	"GET /containers/{id}/archive":  "`archive`",
	"PUT /containers/{id}/archive":  "`archive`; plain tar only",
	"GET /containers/{id}/export":   "`archive`",
	"GET /containers/{id}/json":     "`redact_env`",
	"POST /commit":                  "`commit`, `tags`",
	"POST /build":                   "`build`, `build_add_url`, `tags`, images, limits, `networks`; classic builds of a context that is sent along",
	"GET /images/json":              "images that the policy allows, and the caller's own",
	"GET /images/{image}/json":      "images that the policy allows, and the caller's own",
	"GET /images/{image}/history":   "images that the policy allows, and the caller's own",
	"GET /images/{image}/get":       "images that the policy allows, and the caller's own",
	"GET /images/get":               "images that the policy allows, and the caller's own",
	"POST /images/create":           "`pull`, images; from a registry only",
	"POST /images/{image}/tag":      "images, `tags`",
	"DELETE /images/{image}":        "the caller's own, and by name what the policy allows, with `pull`",
	"POST /networks/create":         "`networks`, `max_objects`; bridge, without addresses or options",
	"POST /networks/{id}/connect":   "networks of the policy, and the caller's own",
	"POST /volumes/create":          "`volumes`, `max_objects`; local, without options",
}

// refused are endpoints of the Engine API that nobody may use, whatever the policy.
var refused = [][3]string{
	{"POST", "/auth", "the engine connects where the caller says"},
	{"GET", "/distribution/{name}/json", "likewise"},
	{"GET", "/images/search", "likewise"},
	{"POST", "/images/{name}/push", "what is in an image leaves the host"},
	{"POST", "/images/load", "an archive can give an allowed image's name to another"},
	{"POST", "/session", "a tunnel that can't be looked into (BuildKit)"},
	{"POST", "/grpc", "likewise"},
	{"POST", "/build/cancel", "builds are ended by leaving them"},
	{"POST", "/containers/{id}/copy", "old, and reads files by another way (to 1.23)"},
	{"GET", "/containers/{id}/checkpoints", "experimental"},
	{"POST", "/containers/{id}/checkpoints", "likewise"},
	{"DELETE", "/containers/{id}/checkpoints/{checkpoint}", "likewise"},
	{"PUT", "/volumes/{name}", "cluster volumes only"},
	{"GET", "/swarm", "the whole host's, and beyond; likewise the rest of `/swarm`, `/nodes`, `/services`, `/tasks`, `/secrets`, `/configs`"},
	{"GET", "/nodes", ""},
	{"GET", "/services", ""},
	{"GET", "/tasks", ""},
	{"GET", "/secrets", ""},
	{"GET", "/configs", ""},
	{"GET", "/plugins", "code in the engine; likewise the rest of `/plugins`"},
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
		case rt.until != 0:
			t.Errorf("%s ends with API %s, which the page doesn't say", name, rt.until)
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
	data := must(os.ReadFile(docsFile))(t)
	const begin, end = "<!-- endpoints: go test ./proxy/engineapi -run DocsList -update -->\n", "<!-- end of endpoints -->"
	before, rest, ok := strings.Cut(string(data), begin)
	table, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has lost the marks around the tables of endpoints", docsFile)
	}
	want := endpoints(t)
	if *update {
		noError(t, os.WriteFile(docsFile, []byte(before+begin+want+end+after), 0o644))
		return
	}
	if d := cmp.Diff(want, table); d != "" {
		t.Errorf("the tables of endpoints are stale; run go test ./proxy/engineapi -run DocsList -update (-want +got):\n%s", d)
	}
}
