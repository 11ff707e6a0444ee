package engineapi

import (
	"context"
	"math/rand/v2"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// engineRoutes are the endpoints of an engine in the order in which its router tries
// them, with the expressions that it has for names.
var engineRoutes = compileEngine(`
HEAD /containers/{.*}/archive
GET /containers/json
GET /containers/{.*}/export
GET /containers/{.*}/changes
GET /containers/{.*}/json
GET /containers/{.*}/top
GET /containers/{.*}/logs
GET /containers/{.*}/stats
GET /containers/{.*}/attach/ws
GET /exec/{.*}/json
GET /containers/{.*}/archive
GET /containers/{.*}/checkpoints
POST /containers/create
POST /containers/{.*}/kill
POST /containers/{.*}/pause
POST /containers/{.*}/unpause
POST /containers/{.*}/restart
POST /containers/{.*}/start
POST /containers/{.*}/stop
POST /containers/{.*}/wait
POST /containers/{.*}/resize
POST /containers/{.*}/attach
POST /containers/{.*}/copy
POST /containers/{.*}/exec
POST /exec/{.*}/start
POST /exec/{.*}/resize
POST /containers/{.*}/rename
POST /containers/{.*}/update
POST /containers/prune
POST /commit
PUT /containers/{.*}/archive
DELETE /containers/{.*}
GET /images/json
GET /images/search
GET /images/get
GET /images/{.*}/get
GET /images/{.*}/history
GET /images/{.*}/json
POST /images/load
POST /images/create
POST /images/{.*}/push
POST /images/{.*}/tag
POST /images/prune
DELETE /images/{.*}
GET /_ping
HEAD /_ping
GET /events
GET /info
GET /version
GET /system/df
POST /auth
GET /volumes
GET /volumes/{.*}
POST /volumes/create
POST /volumes/prune
DELETE /volumes/{.*}
POST /build
POST /build/prune
POST /build/cancel
POST /grpc
POST /session
GET /distribution/{.*}/json
GET /plugins
GET /plugins/{.*}/json
GET /networks
GET /networks/
GET /networks/{.+}
POST /networks/create
POST /networks/{.*}/connect
POST /networks/{.*}/disconnect
POST /networks/prune
DELETE /networks/{.*}
`)

// engineRoute is an endpoint as an engine's router has it, with a version before it or not.
type engineRoute struct {
	method, template string
	pattern          *regexp.Regexp
}

var (
	inBraces   = regexp.MustCompile(`\{([^}]*)\}`)
	anyVersion = `^(?:/v(?P<version>[0-9.]+))?`
)

func compileEngine(table string) []engineRoute {
	var list []engineRoute
	for line := range strings.Lines(strings.TrimSpace(table)) {
		method, template, _ := strings.Cut(strings.TrimSpace(line), " ")
		pattern := anyVersion + inBraces.ReplaceAllString(regexp.QuoteMeta(template), "X") + "$"
		if of := inBraces.FindStringSubmatch(template); of != nil {
			before, after, _ := strings.Cut(template, of[0])
			pattern = anyVersion + regexp.QuoteMeta(before) + "(?P<name>" + of[1] + ")" + regexp.QuoteMeta(after) + "$"
		}
		list = append(list, engineRoute{method, inBraces.ReplaceAllString(template, "{}"), regexp.MustCompile(pattern)})
	}
	return list
}

// engineRouted gives what an engine makes of a request: the endpoint, the version and the
// name. It answers with a redirection where the path isn't clean, whatever is there.
func engineRouted(method, decoded string) (template, version, name string, redirected bool) {
	clean := path.Clean("/" + strings.TrimPrefix(decoded, "/"))
	if strings.HasSuffix(decoded, "/") && clean != "/" {
		clean += "/"
	}
	if decoded != clean {
		return "", "", "", true
	}
	for _, rt := range engineRoutes {
		if rt.method != method {
			continue
		}
		if m := rt.pattern.FindStringSubmatch(decoded); m != nil {
			if i := rt.pattern.SubexpIndex("name"); i >= 0 {
				name = m[i]
			}
			return rt.template, m[rt.pattern.SubexpIndex("version")], name, false
		}
	}
	return "", "", "", false
}

// engine41 is an engine of version 1.41.
var engine41 = sync.OnceValue(func() *upstream.Engine {
	e := upstream.New("", nil)
	e.Transport.RegisterProtocol("http", answering(func(*http.Request) string { return "" }))
	return e
})

// doorRouted gives what the door makes of a request line.
func doorRouted(method, target string) (c *call, ok bool) {
	u, err := url.ParseRequestURI(target)
	if err != nil {
		return nil, false
	}
	c = &call{Proxy: &Proxy{engine: engine41()}, r: &http.Request{Method: method, URL: u, RequestURI: target}, ctx: context.Background()}
	rt, err := c.match()
	c.route = rt
	return c, err == nil
}

var (
	routeMethods  = []string{"GET", "POST", "DELETE", "HEAD", "PUT", "get", "OPTIONS", "CONNECT"}
	routeSegments = []string{
		"containers", "images", "networks", "volumes", "exec", "json", "create", "prune", "archive", "start", "a", "a.b", "sha256:" + strings.Repeat("a", 64), "history", "get", "tag", "attach", "ws", "_ping", "version", "info", "events", "system", "df",
		"commit", "build", "v1.41", "v1.24", "v1.12", "v1.41.0", "v01.41", "v1.", "v1.99", "", ".", "..", "%2e%2e", "%2E", "a%2Fb", "%63ontainers", "a%00", "a%25", "Containers", "JSON", "x%20y", "a:b", "a@b", "%2F", "connect", "logs", "localhost:5000", "top", "kill",
	}
)

// drawPath draws a path of the engine's words.
func drawPath(d *dice) string {
	p := ""
	if d.below(2) == 1 {
		p = "/" + d.of("v1.41", "v1.24", "v1.40", "v1.23", "v1.41.0")
	}
	for range 1 + d.below(4) {
		p += d.of("/", "/", "/", "//") + d.of(routeSegments...)
	}
	return p + d.of("", "", "/")
}

// FuzzRoute asks both routers. What the door takes for one endpoint, an engine takes for
// the same, with the same name in it and in the same version.
func FuzzRoute(f *testing.F) {
	for _, p := range paths {
		f.Add(uint8(0), p)
	}
	for _, p := range posts {
		f.Add(uint8(1), p)
	}
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		data := make([]byte, 24)
		for i := range data {
			data[i] = byte(r.UintN(256))
		}
		f.Add(data[0], drawPath(&dice{data[1:]}))
	}
	f.Fuzz(func(t *testing.T, m uint8, target string) {
		method := routeMethods[int(m)%len(routeMethods)]
		c, ok := doorRouted(method, target)
		if !ok {
			return
		}
		template, version, name, redirected := engineRouted(method, c.r.URL.Path)
		if mine := inBraces.ReplaceAllString(c.route.template, "{}"); redirected || template != mine || name != c.name {
			t.Errorf("%s %q: the door takes it for %s of %q, the engine for %q of %q (%t)", method, target, mine, c.name, template, name, redirected)
		}
		if version != "" && version != c.version.String() {
			t.Errorf("%s %q: the door takes it for version %s, the engine for %s", method, target, c.version, version)
		}
	})
}

// TestEngineRoutes has a real engine tell whether FuzzRoute's router is like its own.
func TestEngineRoutes(t *testing.T) {
	host, _ := testEngine(t)
	s := &fixture{T: t, host: host, words: strings.NewReplacer()}
	r := rand.New(rand.NewPCG(5, 6))
	found, none := 0, 0
	targets := paths
	for range 300 {
		data := make([]byte, 24)
		for i := range data {
			data[i] = byte(r.UintN(256))
		}
		targets = append(targets, drawPath(&dice{data}))
	}
	for _, target := range targets {
		u, err := url.ParseRequestURI(target)
		if err != nil || u.Path == "" || strings.ContainsAny(target, "?#{ ") || u.Host != "" {
			continue
		}
		template, _, _, redirected := engineRouted(http.MethodGet, u.Path)
		if strings.HasSuffix(template, "/logs") || strings.HasSuffix(template, "/events") || strings.HasPrefix(u.Path, "/debug") || strings.Contains(u.Path, "swarm") || notHere.MatchString(u.Path) {
			continue
		}
		got := s.ask(host, http.MethodGet, target, "", "")
		nowhere := got.status == http.StatusNotFound && strings.Contains(got.body, "page not found")
		switch {
		case redirected != (got.status == http.StatusMovedPermanently):
			t.Errorf("%s: redirected %t, the engine says %d", target, redirected, got.status)
		case !redirected && nowhere != (template == ""):
			t.Errorf("%s: %q, the engine says %d: %s", target, template, got.status, got.body)
		}
		if nowhere {
			none++
		} else {
			found++
		}
	}
	if found < 50 || none < 50 {
		t.Errorf("%d paths led somewhere, %d nowhere: that's too few", found, none)
	}
}

// notHere are endpoints that no door has, and the table of routes neither.
var notHere = regexp.MustCompile(`/(nodes|services|tasks|secrets|configs|plugins)(/|$)`)
