package engineapi

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
)

// reads are the calls that are about one object, by what kind of object it is. A "!"
// says that the call would change it, so that it isn't tried on the engine itself.
var reads = map[string][]string{
	"container": {
		"GET /containers/{ref}/json", "GET /containers/{ref}/json?size=1", "GET /containers/{ref}/top", "GET /containers/{ref}/top?ps_args=axewww",
		"GET /containers/{ref}/logs?stdout=1&stderr=1", "GET /containers/{ref}/changes", "GET /containers/{ref}/export", "GET /containers/{ref}/stats?stream=0",
		"GET /containers/{ref}/archive?path=/v/secret", "HEAD /containers/{ref}/archive?path=/v/secret", "GET /containers/{ref}/attach/ws?logs=1&stdout=1",
		"!POST /containers/{ref}/attach?logs=1&stdout=1&stderr=1", "!POST /containers/{ref}/wait?condition=next-exit", "!POST /containers/{ref}/resize?h=1&w=1",
		"!POST /containers/{ref}/exec {\"Cmd\":[\"env\"],\"AttachStdout\":true}", "!POST /containers/{ref}/start", "!POST /containers/{ref}/stop?t=0", "!POST /containers/{ref}/restart?t=0",
		"!POST /containers/{ref}/kill?signal=KILL", "!POST /containers/{ref}/pause", "!POST /containers/{ref}/unpause", "!POST /containers/{ref}/rename?name=siege-x",
		"!POST /containers/{ref}/update {\"Memory\":67108864}", "!DELETE /containers/{ref}?force=1&v=1", "!POST /commit?container={ref}",
		"!POST /networks/siege-own-net/connect {\"Container\":\"{ref}\"}", "!POST /networks/siege-own-net/disconnect {\"Container\":\"{ref}\",\"Force\":true}",
		"!POST /containers/create {\"Image\":\"" + testImage + "\",\"HostConfig\":{\"NetworkMode\":\"container:{ref}\"}}",
		"GET /containers/json?before={ref}", "GET /containers/json?since={ref}&all=1",
	},
	"exec":    {"GET /exec/{ref}/json", "!POST /exec/{ref}/start {}", "!POST /exec/{ref}/start {\"Detach\":true}", "!POST /exec/{ref}/resize?h=1&w=1"},
	"network": {"GET /networks/{ref}", "GET /networks/{ref}?verbose=1", "!DELETE /networks/{ref}", "!POST /networks/{ref}/connect {\"Container\":\"siege-own\"}", "!POST /networks/{ref}/disconnect {\"Container\":\"siege-own\"}"},
	"volume":  {"GET /volumes/{ref}", "!DELETE /volumes/{ref}?force=1"},
	"image": {
		"GET /images/{ref}/json", "GET /images/{ref}/history", "GET /images/{ref}/get", "GET /images/get?names={ref}", "!DELETE /images/{ref}", "!DELETE /images/{ref}?noprune=1",
		"!POST /images/{ref}/tag?repo=siege.local/x&tag=1",
	},
}

// TestAttackReads reaches for what is another's, by every kind of name.
func TestAttackReads(t *testing.T) {
	s := startSiege(t)
	refs := map[string][]string{
		"container": {"{victim}", "{victim12}", "{victim4}", "siege-v-one", "{operator}", "siege-v-operator"},
		"exec":      {"{victimexec}"},
		"network":   {"{victimnet}", "{victimnet12}", "siege-v-net"},
		"volume":    {"siege-v-vol"},
		"image":     {"{victimimage}", "siege-v.local/image:1", strings.TrimPrefix(s.victmg, "sha256:")[:12]},
	}
	var vectors []vector
	for kind, calls := range reads {
		for _, call := range calls {
			for i, ref := range refs[kind] {
				harmless := strings.TrimPrefix(call, "!")
				words := strings.SplitN(strings.ReplaceAll(harmless, "{ref}", ref), " ", 3)
				body, contentType := "", ""
				if len(words) == 3 {
					body, contentType = words[2], "application/json"
				}
				text := request(words[0], "/v1.41"+words[1], contentType, body)
				if strings.Contains(call, "/ws") {
					text = strings.Replace(text, "Connection: close", "Connection: Upgrade\r\nUpgrade: websocket\r\nOrigin: http://docker\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", 1)
				}
				vectors = append(vectors, vector{name: words[0] + words[1], act: func(s *siege, address string) bool {
					r := s.say(address, s.expand(text))
					for _, f := range s.tells(s.expand(text), r) {
						s.Error(f)
					}
					// By force, what isn't there is removed without a word.
					gone := r.status == http.StatusNoContent && words[0] == http.MethodDelete && kind == "volume"
					if r.status != http.StatusNotFound && r.status != http.StatusForbidden && !gone {
						s.Errorf("%d, as if it were there: %s", r.status, r.body)
					}
					if harmless == call && i == 0 {
						if r := s.say(s.host, s.expand(text)); r.status >= 300 || r.status == 0 {
							s.Logf("the engine itself: %d", r.status)
						}
					}
					return true
				}})
			}
		}
	}
	s.attack(vectors)
}

// lists are the calls that are about many objects.
var lists = []string{
	"/containers/json?all=1", "/containers/json?all=1&size=1", "/containers/json?all=1&limit=100",
	`/containers/json?all=1&filters={"name":["siege"]}`, `/containers/json?all=1&filters={"id":["{victim12}"]}`, `/containers/json?all=1&filters={"label":["berm.tenant"]}`,
	`/containers/json?all=1&filters={"label":{"berm.tenant=victim":true}}`, `/containers/json?all=1&filters={"label":{"x":false}}`, `/containers/json?all=1&filters={"network":["siege-v-net"]}`,
	`/containers/json?all=1&filters={"volume":["siege-v-vol"]}`, `/containers/json?all=1&filters={"ancestor":["siege-v.local/image:1"]}`, `/containers/json?all=1&filters={"label":["a"],"label":["b"]}`,
	`/containers/json?all=1&filters={"LABEL":["berm.tenant=victim"]}`, `/containers/json?all=1&filters={}&filters={}`, `/containers/json?all=1&filters={"before":["siege-v-one"]}`,
	"/networks", `/networks?filters={"name":["siege"]}`, `/networks?filters={"driver":["bridge"]}`, `/networks?filters={"type":["custom"]}`, `/networks?filters={"id":["{victimnet12}"]}`,
	"/volumes", `/volumes?filters={"name":["siege-v"]}`, `/volumes?filters={"dangling":["false"]}`, `/volumes?filters={"label":["berm.owner"]}`,
	"/images/json", "/images/json?all=1&digests=1", `/images/json?filters={"reference":["*/*"]}`, `/images/json?filters={"label":["berm.tenant=victim"]}`, `/images/json?filters={"since":["{image}"]}`,
	`/images/json?filters={"before":["siege-v.local/image:1"]}`, "/images/{image}/history", "/images/{image}/json",
	"/events?since=1&until={now}", `/events?since=1&until={now}&filters={"type":["container"]}`, `/events?since=1&until={now}&filters={"container":["siege-v-one"]}`,
	`/events?since=1&until={now}&filters={"type":["network","volume","image"]}`, `/events?since=1&until={now}&filters={"label":["berm.tenant=victim"]}`,
	"/info", "/version", "/system/df", "/system/df?type=volume", "/networks/siege-own-net", "/containers/siege-own/json", "/containers/siege-own/top?ps_args=axewww",
	"/containers/siege-own/top?ps_args=-ef+e", "/containers/siege-own/logs?stdout=1&details=1", "/plugins", "/swarm", "/nodes", "/services", "/tasks", "/secrets", "/configs",
	"/distribution/{image}/json", "/debug/pprof/cmdline", "/debug/vars", "/metrics", "/images/search?term=x", "/containers/siege-own/checkpoints", "/containers/ps",
}

// TestAttackLists asks for what there is, and finds nothing of others'.
func TestAttackLists(t *testing.T) {
	s := startSiege(t)
	if err := s.direct.ContainerExecStart(t.Context(), s.victimEx, container.ExecStartOptions{Detach: true}); err != nil { // for an event
		t.Fatal(err)
	}
	eventually(t, func() bool { return len(s.inspect(s.victim).ExecIDs) == 0 }) // it is over
	s.calm = s.look()
	told := 0
	var vectors []vector
	for _, path := range lists {
		text := request("GET", "/v1.41"+escapeQuery(strings.ReplaceAll(path, "{now}", now())), "", "")
		vectors = append(vectors, vector{name: path, neutral: true, act: func(s *siege, address string) bool {
			asked := s.expand(text)
			for _, f := range s.tells(asked, s.say(address, asked)) {
				s.Error(f)
			}
			if len(s.tells(asked, s.say(s.host, asked))) > 0 {
				told++
			}
			return false
		}})
	}
	for _, kind := range []string{"containers", "networks", "volumes", "images", "build"} {
		for _, query := range []string{"", `?filters={"label":["berm.tenant=victim"]}`, `?filters={"label!":["berm.tenant"]}`, `?filters={"until":["1s"]}`, `?filters={"all":["true"]}`} {
			path := "/v1.41/" + kind + "/prune" + escapeQuery(query)
			vectors = append(vectors, vector{name: kind + "/prune" + query, neutral: true, request: request("POST", path, "", "")},
				vector{name: kind + "/prune by a form" + query, request: request("POST", path, "application/x-www-form-urlencoded", `filters={"label!":["x"]}`)})
		}
	}
	s.attack(vectors)
	if told < 20 {
		t.Errorf("the engine itself tells of others in %d answers only", told)
	}
}

// escapeQuery writes the characters of a query that HTTP doesn't take.
func escapeQuery(path string) string {
	before, query, ok := strings.Cut(path, "?")
	if !ok {
		return path
	}
	parts := strings.Split(query, "&")
	for i, part := range parts {
		name, value, _ := strings.Cut(part, "=")
		parts[i] = name + "=" + strings.NewReplacer("%7B", "{", "%7D", "}", "%2B", "+").Replace(url.QueryEscape(value))
	}
	return before + "?" + strings.Join(parts, "&")
}
