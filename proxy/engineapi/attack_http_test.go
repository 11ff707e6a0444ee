package engineapi

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func now() string { return strconv.FormatInt(time.Now().Unix(), 10) }

const privileged = `{"Image":"` + testImage + `","HostConfig":{"Privileged":true}}`

// paths are spellings of paths, and endpoints, none of which is to be answered as one
// that may be used.
var paths = []string{
	"//containers/json", "/v1.41//containers/json", "/v1.41/./containers/json", "/v1.41/x/../containers/json", "/v1.41/containers/%2e%2e/containers/json", "/v1.41/containers/{own}/..%2f{victim}/json",
	"/v1.41/containers%2Fjson", "/v1.41/%63ontainers/json", "/v1.41/containers/json/", "/v1.41/Containers/json", "/v1.41/containers/JSON", "/V1.41/containers/json", "/v1.41/containers/json%00",
	"/v1.41/containers/{victim}%2Fjson", "/v1.41/containers/{own}%252F..%252F{victim}/json", "/v1.41/containers/{own}/json%3Fx", "/v1.41/containers/%2F{victim}/json", "/v1.41/containers/fixture%2Down/json/",
	"/v01.41/containers/json", "/v1.41.0/containers/json", "/v1.041/containers/json", "/v1./containers/json", "/v./containers/json", "/v1.23/containers/json", "/v1.12/containers/json", "/v0.1/containers/json",
	"/v9.99/containers/json", "/v1.52/containers/json", "/v1.999999999999999999999/containers/json", "/v1.41/v1.41/containers/json", "/v1.41/v1.24/containers/json", "/v2.0/containers/json",
	"http://docker/v1.41/containers/json", "https://docker/containers/json", "http:/v1.41/containers/json", "*", "containers/json", "/v1.41/containers/json#x", "/v1.41/containers/json?all=1;size=1", "/v1.41/containers/json?all=1&all=0",
	"/v1.41/containers/json?ALL=1", "/v1.41/containers/json?%61ll=1&all=1", "/v1.41/containers/json?x", "/v1.41/containers/json?all=%zz", "/v1.41", "/", "", "/v1.41/", "/v1.41/_ping/", "/_ping/..",
	"/debug/pprof/", "/debug/pprof/cmdline", "/v1.41/swarm", "/v1.41/nodes", "/v1.41/services", "/v1.41/tasks", "/v1.41/secrets", "/v1.41/configs", "/v1.41/plugins", "/v1.41/plugins/privileges?remote=x",
	"/v1.41/distribution/x/json", "/v1.41/images/search?term=x", "/v1.41/containers/{own}/checkpoints", "/v1.41/images/../containers/{victim}/json", "/v1.41/images/%2e%2e/containers/{victim}/json",
	"/v1.41/images/get?names=../containers/{victim}", "/v1.41/images/get?names=..%2fcontainers%2f{victim}%3f", "/v1.41/images/x%2f..%2f..%2fcontainers%2f{victim}/json", "/v1.41/volumes/..%2fcontainers%2f{victim}%2fjson",
	"/v1.41/networks/..%2fcontainers%2f{victim}%2fjson", "/v1.41/exec/..%2fcontainers%2f{victim}/json", "/v1.41/volumes/../containers/{victim}/json",
}

// posts are calls that no version of the API that the door speaks has, or that no policy allows.
var posts = []string{
	"/session", "/grpc", "/v1.41/session", "/v1.41/grpc", "/auth", "/v1.41/auth", "/v1.41/build/prune", "/v1.41/build/cancel?id=x", "/v1.41/images/load", "/v1.41/images/{image}/push", "/v1.41/swarm/init", "/v1.41/swarm/join",
	"/v1.41/services/create", "/v1.41/secrets/create", "/v1.41/configs/create", "/v1.41/plugins/pull?remote=x", "/v1.41/plugins/create?name=x", "/v1.41/containers/{own}/checkpoints",
	"/v1.41/containers/{own}/start?checkpoint=x&checkpoint-dir=/etc", "/v1.41/containers/{own}/start?checkpoint-dir=/", "/v1.23/containers/{own}/copy", "/v1.41/containers/{own}/copy", "/v1.12/containers/{own}/start",
	"/v1.23/containers/{own}/start", "/v1.41/containers/{own}/start", "/v1.41/containers/{own}/restart", "/v1.41/containers/{own}/exec/start", "/v1.41/commit?container={own}&config=x", "/v1.41/containers/create?checkpoint=x",
	"/containers/create?name=a&name=b", "/v1.41/containers/create?name=..%2fx", "/v1.41/containers/create?name=aaaaaaaaaaaa", "/v1.41/containers/create?platform=linux%2famd64%00",
}

// attackHTTP plays on how a request is read.
func attackHTTP(s *fixture) {
	var vectors []vector
	add := func(name, text string, neutral bool) {
		vectors = append(vectors, vector{name: name, request: text, neutral: neutral})
	}
	for _, path := range paths {
		add("path "+path, "GET "+path+" HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n\r\n", strings.HasPrefix(path, "/v1.41/containers/json?") || path == "/v1.41/plugins")
	}
	for _, path := range posts {
		add("post "+path, request("POST", path, "application/json", privileged), false)
		add("upgrade "+path, strings.Replace(request("POST", path, "application/json", privileged), "Connection: close", "Connection: Upgrade\r\nUpgrade: h2c", 1), false)
	}
	head := "POST /v1.41/containers/create HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n"
	for _, contentType := range []string{"", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "application/json, text/plain", "multipart/form-data; boundary=x", "application/x-tar", "application/json+x"} {
		add("type "+contentType, request("POST", "/v1.41/containers/create", contentType, privileged), false)
		add("type of a good one "+contentType, request("POST", "/v1.41/containers/create", contentType, `{"Image":"`+testImage+`"}`), strings.HasPrefix(contentType, "application/json;"))
	}
	json := head + "Content-Type: application/json\r\n"
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(privileged), privileged)
	good := `{"Image":"` + testImage + `"}`
	add("chunked", json+"Transfer-Encoding: chunked\r\n\r\n"+chunked, false)
	add("chunked and a length", json+"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n"+chunked, false)
	add("a length and chunked", json+"Content-Length: "+strconv.Itoa(len(good))+"\r\nTransfer-Encoding: chunked\r\n\r\n"+chunked, false)
	add("chunked twice", json+"Transfer-Encoding: chunked, chunked\r\n\r\n"+chunked, false)
	add("chunked in capitals", json+"Transfer-Encoding: CHUNKED\r\n\r\n"+chunked, false)
	add("chunked by a tab", json+"Transfer-Encoding:\tchunked\r\n\r\n"+chunked, false)
	add("chunked with a space", json+"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n"+chunked, false)
	add("gzip", json+"Content-Encoding: gzip\r\nContent-Length: {length}\r\n\r\n"+privileged, false)
	add("two lengths", json+"Content-Length: 2\r\nContent-Length: {length}\r\n\r\n"+privileged, false)
	add("no length", json+"\r\n"+privileged, false)
	add("length of 0", json+"Content-Length: 0\r\n\r\n"+privileged, false)
	add("negative length", json+"Content-Length: -1\r\n\r\n"+privileged, false)
	add("two types", json+"Content-Type: text/plain\r\nContent-Length: {length}\r\n\r\n"+privileged, false)
	add("folded header", head+"X-A: a\r\n Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"+privileged, false)
	add("method override", strings.Replace(request("POST", "/v1.41/containers/{victim}/wait", "", ""), "Connection", "X-HTTP-Method-Override: DELETE\r\nConnection", 1), false)
	add("HTTP/1.0", strings.Replace(json, "HTTP/1.1", "HTTP/1.0", 1)+"Content-Length: {length}\r\n\r\n"+privileged, false)
	add("HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", false)
	add("no host", strings.Replace(json, "Host: docker\r\n", "", 1)+"Content-Length: {length}\r\n\r\n"+privileged, false)
	add("two requests", strings.Replace(request("GET", "/_ping", "", ""), "close", "keep-alive", 1)+request("DELETE", "/v1.41/containers/{victim}?force=1", "", ""), true)
	add("one within another", strings.Replace(request("GET", "/v1.41/containers/json", "", request("DELETE", "/v1.41/containers/{victim}?force=1", "", "")), "close", "keep-alive", 1), false)
	for name, body := range map[string]string{
		"second document": privileged + good, "good, then bad": good + privileged, "rubbish": good + "x", "BOM": "\ufeff" + privileged, "BOM of a good one": "\ufeff" + good, "array": "[" + privileged + "]",
		"text": strconv.Quote(privileged), "null": "null", "nothing": "", "comment": "/*x*/" + privileged, "NaN": `{"Image":"` + testImage + `","HostConfig":{"Memory":NaN}}`, "UTF-16": "\xfe\xff\x00{\x00}",
		"not UTF-8": `{"Image":"` + testImage + `","Env":["A=` + "\xff" + `"]}`, "deep": `{"Image":"` + testImage + `","X":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + "}", "huge number": `{"Image":"` + testImage + `","HostConfig":{"Memory":1e400}}`,
		"over the most": `{"Image":"` + testImage + `","Labels":{"a":"` + strings.Repeat("x", 1<<20) + `"},"HostConfig":{"Privileged":true}}`, "good, over the most": `{"Image":"` + testImage + `"` + strings.Repeat(" ", 1<<20) + `}`,
		"keys in each other": `{"Image":"` + testImage + `","HostConfig":{"Mounts":[{"Type":"volume","Source":"a","Target":"/x"}],"Mounts":[{"Type":"bind","Source":"/etc"}]}}`,
		"elements merged":    `{"Image":"` + testImage + `","HostConfig":{"Mounts":[{"Type":"bind","Source":"{dir}/share","Target":"/x"}],"mounts":[{"Source":"/etc"}]}}`,
		"surrogates":         `{"Image":"` + testImage + `","\ud800HostConfig":{"Privileged":true}}`, "NUL key": `{"Image":"` + testImage + `","HostConfig\u0000":{"Privileged":true}}`, "text for a flag": `{"Image":"` + testImage + `","HostConfig":{"Privileged":"true"}}`,
	} {
		add("body "+name, request("POST", "/v1.41/containers/create", "application/json", body), false)
	}
	s.attack(vectors)
}

// attackTCP is what a page in somebody's browser could have it send.
func attackTCP(s *fixture) {
	l := check.Value(proxy.Listen(s.Context(), "127.0.0.1:0", 0))(s)
	s.d.serve(l, Callers{Any: &Caller{Name: "tcp", Tenant: "attacker"}}, time.Second)
	unix := s.door
	defer func() { s.door = unix }()
	s.door = "tcp://" + l.Addr().String()
	_, port, err := net.SplitHostPort(l.Addr().String())
	must(s, err)
	local := "Host: 127.0.0.1:" + port
	if r := s.say(s.door, strings.Replace(request("GET", "/_ping", "", ""), "Host: docker", local, 1)); r.status != 200 {
		s.Errorf("ping: %+v", r)
	}
	var vectors []vector
	for name, header := range map[string]string{
		"host": "Host: attacker.example", "host by port": "Host: attacker.example:" + port, "rebound": "Host: 127.0.0.1.attacker.example", "user": "Host: a@127.0.0.1", "two hosts": local + "\r\nHost: 127.0.0.1", "no host": "X: y", "empty host": "Host: ",
		"origin": local + "\r\nOrigin: http://attacker.example", "origin null": local + "\r\nOrigin: null", "origin of its own": local + "\r\nOrigin: http://127.0.0.1:" + port,
	} {
		for _, text := range []string{request("POST", "/v1.41/containers/attack-own/stop?t=0", "", ""), request("POST", "/v1.41/containers/prune", "text/plain", ""), request("GET", "/v1.41/containers/json", "", "")} {
			vectors = append(vectors, vector{name: name + " " + strings.Fields(text)[1], request: strings.Replace(text, "Host: docker", header, 1)})
		}
	}
	vectors = append(vectors, vector{name: "absolute", request: strings.Replace(request("GET", "http://attacker.example/containers/json", "", ""), "Host: docker", local, 1)},
		vector{name: "connect", request: "CONNECT 192.0.2.1:80 HTTP/1.1\r\n" + local + "\r\n\r\n"},
		vector{name: "options", request: strings.Replace(request("OPTIONS", "/v1.41/containers/json", "", ""), "Host: docker", local+"\r\nOrigin: http://attacker.example\r\nAccess-Control-Request-Method: DELETE", 1)})
	s.attack(vectors)
	if ct := s.inspect(s.own); !ct.State.Running {
		s.Error("a page has stopped a container")
	}
}

// reads are the calls that are about one object, by what kind of object it is. A "!"
// says that the call would change it, so that it isn't tried on the engine itself.
var reads = map[string][]string{
	"container": {
		"GET /containers/{ref}/json", "GET /containers/{ref}/json?size=1", "GET /containers/{ref}/top", "GET /containers/{ref}/top?ps_args=axewww",
		"GET /containers/{ref}/logs?stdout=1&stderr=1", "GET /containers/{ref}/changes", "GET /containers/{ref}/export", "GET /containers/{ref}/stats?stream=0",
		"GET /containers/{ref}/archive?path=/v/secret", "HEAD /containers/{ref}/archive?path=/v/secret", "GET /containers/{ref}/attach/ws?logs=1&stdout=1", "!PUT /containers/{ref}/archive?path=/ " + strings.Repeat("\x00", 1024),
		"!POST /containers/{ref}/attach?logs=1&stdout=1&stderr=1", "!POST /containers/{ref}/wait?condition=next-exit", "!POST /containers/{ref}/resize?h=1&w=1",
		"!POST /containers/{ref}/exec {\"Cmd\":[\"env\"],\"AttachStdout\":true}", "!POST /containers/{ref}/start", "!POST /containers/{ref}/stop?t=0", "!POST /containers/{ref}/restart?t=0",
		"!POST /containers/{ref}/kill?signal=KILL", "!POST /containers/{ref}/pause", "!POST /containers/{ref}/unpause", "!POST /containers/{ref}/rename?name=attack-x",
		"!POST /containers/{ref}/update {\"Memory\":67108864}", "!DELETE /containers/{ref}?force=1&v=1", "!POST /commit?container={ref}",
		"!POST /networks/attack-own-net/connect {\"Container\":\"{ref}\"}", "!POST /networks/attack-own-net/disconnect {\"Container\":\"{ref}\",\"Force\":true}",
		"!POST /containers/create {\"Image\":\"" + testImage + "\",\"HostConfig\":{\"NetworkMode\":\"container:{ref}\"}}",
		"GET /containers/json?before={ref}", "GET /containers/json?since={ref}&all=1",
	},
	"exec":    {"GET /exec/{ref}/json", "!POST /exec/{ref}/start {}", "!POST /exec/{ref}/start {\"Detach\":true}", "!POST /exec/{ref}/resize?h=1&w=1"},
	"network": {"GET /networks/{ref}", "GET /networks/{ref}?verbose=1", "!DELETE /networks/{ref}", "!POST /networks/{ref}/connect {\"Container\":\"attack-own\"}", "!POST /networks/{ref}/disconnect {\"Container\":\"attack-own\"}"},
	"volume":  {"GET /volumes/{ref}", "!DELETE /volumes/{ref}?force=1"},
	"image": {
		"GET /images/{ref}/json", "GET /images/{ref}/history", "GET /images/{ref}/get", "GET /images/get?names={ref}", "!DELETE /images/{ref}", "!DELETE /images/{ref}?noprune=1",
		"!POST /images/{ref}/tag?repo=fixture.local/x&tag=1",
	},
}

// attackReads reaches for what is another's, by every kind of name.
func attackReads(s *fixture) {
	refs := map[string][]string{
		"container": {"{victim}", "{victim12}", "{victim4}", "attack-v-one", "{operator}", "attack-v-operator"},
		"exec":      {"{victimexec}", s.victimEx[:12]},
		"network":   {"{victimnet}", "{victimnet12}", "attack-v-net"},
		"volume":    {"attack-v-vol"},
		"image":     {"{victimimage}", "attack-v.local/image:1", strings.TrimPrefix(s.victmg, "sha256:")[:12]},
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
				if words[0] == http.MethodPut {
					contentType = "application/x-tar"
				}
				text := request(words[0], "/v1.41"+words[1], contentType, body)
				if strings.Contains(call, "/ws") {
					text = strings.Replace(text, "Connection: close", "Connection: Upgrade\r\nUpgrade: websocket\r\nOrigin: http://docker\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", 1)
				}
				foreign := s.words.Replace(ref)
				missing := renamed(foreign)
				ofMissing := strings.ReplaceAll(text, ref, missing)
				vectors = append(vectors, vector{name: words[0] + words[1], act: func(s *fixture, address string) bool {
					r, none := s.say(address, s.expand(text)), s.say(address, s.expand(ofMissing))
					for _, f := range s.tells(s.expand(text), r) {
						s.Error(f)
					}
					if strings.ReplaceAll(r.body, foreign, "REF") != strings.ReplaceAll(none.body, missing, "REF") || r.status != none.status {
						s.Errorf("%d %s, and of what isn't there %d %s", r.status, r.body, none.status, none.body)
					}
					// Where it is known for a verb, the engine says which.
					if verb := strings.Contains(call, " /containers/{ref}") || strings.Contains(call, " /exec/{ref}"); verb && i == 0 && !strings.Contains(call, "/ws") {
						if is, want := none.message(), s.say(s.host, s.expand(ofMissing)).message(); none.status == http.StatusNotFound && is != want && !strings.HasSuffix(want, ": "+is) {
							s.Errorf("of what isn't there the engine says %s, the door %s", want, is)
						}
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

// renamed gives a reference like another one, of what isn't there.
func renamed(ref string) string {
	digest, name := "", ref
	if hex, ok := strings.CutPrefix(ref, "sha256:"); ok {
		digest, name = "sha256:", hex
	}
	const digits = "0123456789abcdef"
	return digest + strings.Map(func(r rune) rune {
		if i := strings.IndexRune(digits, r); i >= 0 {
			return rune(digits[(i+1)%len(digits)])
		}
		return r
	}, name)
}

// lists are the calls that are about many objects.
var lists = []string{
	"/containers/json?all=1", "/containers/json?all=1&size=1", "/containers/json?all=1&limit=100",
	`/containers/json?all=1&filters={"name":["fixture"]}`, `/containers/json?all=1&filters={"id":["{victim12}"]}`, `/containers/json?all=1&filters={"label":["berm.tenant"]}`,
	`/containers/json?all=1&filters={"label":{"berm.tenant=victim":true}}`, `/containers/json?all=1&filters={"label":{"x":false}}`, `/containers/json?all=1&filters={"network":["attack-v-net"]}`,
	`/containers/json?all=1&filters={"volume":["attack-v-vol"]}`, `/containers/json?all=1&filters={"ancestor":["attack-v.local/image:1"]}`, `/containers/json?all=1&filters={"label":["a"],"label":["b"]}`,
	`/containers/json?all=1&filters={"LABEL":["berm.tenant=victim"]}`, `/containers/json?all=1&filters={}&filters={}`, `/containers/json?all=1&filters={"before":["attack-v-one"]}`,
	"/networks", `/networks?filters={"name":["fixture"]}`, `/networks?filters={"driver":["bridge"]}`, `/networks?filters={"type":["custom"]}`, `/networks?filters={"id":["{victimnet12}"]}`,
	"/volumes", `/volumes?filters={"name":["attack-v"]}`, `/volumes?filters={"dangling":["false"]}`, `/volumes?filters={"label":["berm.owner"]}`,
	"/images/json", "/images/json?all=1&digests=1", `/images/json?filters={"reference":["*/*"]}`, `/images/json?filters={"label":["berm.tenant=victim"]}`, `/images/json?filters={"since":["{image}"]}`,
	`/images/json?filters={"before":["attack-v.local/image:1"]}`, "/images/{image}/history", "/images/{image}/json",
	"/events?since=1&until={now}", `/events?since=1&until={now}&filters={"type":["container"]}`, `/events?since=1&until={now}&filters={"container":["attack-v-one"]}`,
	`/events?since=1&until={now}&filters={"type":["network","volume","image"]}`, `/events?since=1&until={now}&filters={"label":["berm.tenant=victim"]}`,
	"/info", "/version", "/system/df", "/system/df?type=volume", "/networks/attack-own-net", "/containers/attack-own/json", "/containers/attack-own/top?ps_args=axewww",
	"/containers/attack-own/top?ps_args=-ef+e", "/containers/attack-own/logs?stdout=1&details=1", "/plugins", "/swarm", "/nodes", "/services", "/tasks", "/secrets", "/configs",
	"/distribution/{image}/json", "/debug/pprof/cmdline", "/debug/vars", "/metrics", "/images/search?term=x", "/containers/attack-own/checkpoints", "/containers/ps",
}

// attackLists asks for what there is, and finds nothing of others'.
func attackLists(s *fixture) {
	must(s, s.direct.ContainerExecStart(s.Context(), s.victimEx, container.ExecStartOptions{Detach: true})) // for an event
	eventually(s.T, func() bool { return len(s.inspect(s.victim).ExecIDs) == 0 })                           // it is over
	s.calm = s.look()
	told := 0
	var vectors []vector
	for _, path := range lists {
		text := request("GET", "/v1.41"+escapeQuery(strings.ReplaceAll(path, "{now}", now())), "", "")
		vectors = append(vectors, vector{name: path, neutral: true, act: func(s *fixture, address string) bool {
			asked := s.expand(text)
			for _, f := range s.tells(asked, s.say(address, asked)) {
				s.Error(f)
			}
			if len(s.tells(asked, s.say(s.host, asked))) > 0 {
				told++
			}
			return true // or it changes something, which is seen after all of them
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
		s.Errorf("the engine itself tells of others in %d answers only", told)
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
