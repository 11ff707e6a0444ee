package engineapi

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestBuiltinNetworks asks for what every engine has.
func TestBuiltinNetworks(t *testing.T) {
	d, s, address := scripted(t, "1.41", basePolicy+"networks: {team: {engine_network: shared}}\nprofiles: {default: {network: team}}\n")
	sealed := string(check.Value(json.Marshal(d.policyNetworkLabels()))(t))
	policys := `{"Id":"` + mineID + `","Name":"shared","Driver":"bridge","Scope":"local","Internal":%t,"IPAM":{"Config":[{"Subnet":"10.9.0.0/24","Gateway":"10.9.0.1","IPRange":"x"}]},"Labels":%s,` +
		`"Containers":{"` + theirsID + `":{"Name":"victim"}},"Options":{"a":"b"}}`
	s.answers["GET /networks/shared"] = fmt.Sprintf(policys, false, sealed)
	s.answers["GET /networks/bridge"] = `{"Id":"` + theirsID + `","Name":"bridge","Driver":"bridge","IPAM":{"Config":[{"Gateway":"172.17.0.1"}]},"Labels":{}}`
	s.answers["GET /networks"] = "[]"
	get := func(ref string) (n network.Inspect) {
		t.Helper()
		status, told := say(t, address, "GET", "/networks/"+ref+"?verbose=true&scope=local", "")
		must(t, json.Unmarshal([]byte(told), &n))
		if status != 200 || strings.Contains(told, theirsID) || strings.Contains(told, "172.17") || len(n.Containers)+len(n.Options)+len(n.Labels) > 0 {
			t.Errorf("%s: %d %s", ref, status, told)
		}
		return n
	}
	bridge := get("bridge")
	if len(bridge.IPAM.Config) != 1 || bridge.IPAM.Config[0].Gateway != "10.9.0.1" || bridge.IPAM.Config[0].IPRange != "" {
		t.Errorf("bridge: %+v", bridge.IPAM)
	}
	if got := get(bridge.ID[:12]); got.Name != "bridge" {
		t.Errorf("by its ID: %+v", got)
	}
	if n := get("host"); n.Driver != "host" || len(n.IPAM.Config) > 0 {
		t.Errorf("host: %+v", n)
	}
	if n := get("none"); n.Driver != "null" {
		t.Errorf("none: %+v", n)
	}
	s.ownContainerOf(d, "mine", strings.Repeat("c3", 32), "c")
	s.answers["POST /networks/"+mineID+"/connect"], s.answers["POST /networks/"+mineID+"/disconnect"] = "{}", "{}"
	s.answers["GET /containers/c/json"] = strings.Replace(s.answers["GET /containers/c/json"], `"NetworkSettings":{}`, `"NetworkSettings":{"Networks":{"shared":{"NetworkID":"`+mineID+`"}}}`, 1)
	for _, verb := range []string{"connect", "disconnect"} {
		status, told := say(t, address, "POST", "/networks/bridge/"+verb, `{"Container":"c"}`)
		if asked := s.said("POST /networks/" + mineID + "/" + verb); status != 200 || len(asked) != 1 {
			t.Errorf("%s: %d %s, the engine was asked %q", verb, status, told, asked)
		}
	}
	// One that isn't the policy's by its seal has no addresses to show.
	s.answers["GET /networks/shared"] = fmt.Sprintf(policys, false, "{}")
	if n := get("bridge"); len(n.IPAM.Config) > 0 {
		t.Errorf("of a network that others made: %+v", n.IPAM)
	}
	for filters, want := range map[string]string{
		``: "bridge host none", `{"driver":["bridge"]}`: "bridge", `{"name":["o"]}`: "host none", `{"type":["custom"]}`: "", `{"type":["builtin"]}`: "bridge host none",
		`{"label":["a"]}`: "", `{"dangling":["true"]}`: "", `{"id":["` + bridge.ID[:12] + `"]}`: "bridge", `{"scope":["swarm"]}`: "",
	} {
		_, told := say(t, address, "GET", "/networks?filters="+url.QueryEscape(filters), "")
		var list []network.Inspect
		must(t, json.Unmarshal([]byte(told), &list))
		var names []string
		for _, n := range list {
			names = append(names, n.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: %q, want %q", filters, got, want)
		}
	}
	for _, call := range []string{"DELETE /networks/bridge", "DELETE /networks/" + bridge.ID, "POST /networks/" + bridge.ID + "/connect"} {
		method, path, _ := strings.Cut(call, " ")
		if status, told := say(t, address, method, path, map[string]string{"POST": `{"Container":"c"}`}[method]); status != 404 {
			t.Errorf("%s: %d %s", call, status, told)
		}
	}
}

// TestAbsent asks for what isn't there, in the order in which docker inspect does.
func TestAbsent(t *testing.T) {
	_, s, address := scripted(t, "1.41", "")
	s.answers["GET /images/json"], s.answers["GET /containers/json"], s.answers["GET /networks"] = "[]", "[]", "[]"
	const swarm = "This node is not a swarm manager"
	for path, want := range map[string]string{
		"/containers/gone/json": "404 No such container: gone", "/containers/a/b:c/json": "404 No such container: a/b:c", "/networks/a/b:c": "404 network a/b:c not found",
		"/volumes/a/b:c": "404 get a/b:c: no such volume", "/images/gone/json": "404 No such image: gone:latest", "/networks/gone": "404 network gone not found",
		"/volumes/gone": "404 get gone: no such volume", "/plugins/gone/json": `404 plugin "gone" not found`, "/plugins/a/b:c/json": `404 plugin "a/b:c" not found`,
		"/swarm": "503 " + swarm, "/nodes": "503 " + swarm, "/nodes/gone": "503 " + swarm, "/services/gone": "503 " + swarm, "/services/gone/logs": "503 " + swarm,
		"/tasks/gone": "503 " + swarm, "/secrets/gone": "503 " + swarm, "/configs/gone": "503 " + swarm, "/plugins": "200 []", "/plugins?filters=%7B%7D": "200 []",
		"/plugins/privileges": "403 denied", "/swarmx": "403 denied", "/distribution/x/json": "403 denied", "/v1.41/plugins": "200 []",
	} {
		status, told := say(t, address, "GET", path, "")
		var message struct{ Message string }
		if told != "[]" {
			must(t, json.Unmarshal([]byte(told), &message))
			told = message.Message
		}
		if got := fmt.Sprint(status, " ", told); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	for _, path := range []string{"/swarm/init", "/services/create", "/plugins/pull?remote=x", "/plugins/x/enable", "/secrets/create"} {
		if status, told := say(t, address, "POST", path, "{}"); status != 403 {
			t.Errorf("%s: %d %s", path, status, told)
		}
	}
	if status, told := say(t, address, "POST", "/v1.41/swarm/leave?force=1", ""); status != 503 || !strings.Contains(told, "not part of a swarm") {
		t.Errorf("leave: %d %s", status, told)
	}
	if got := s.said("GET /swarm"); len(got) > 0 {
		t.Errorf("the engine was asked %q", got)
	}
}

// TestNoBuildKit has each way to BuildKit say what to do, and buildx start no builder.
func TestNoBuildKit(t *testing.T) {
	_, s, address := scripted(t, "1.41", basePolicy+"profiles: {default: {engine_api: {build: \"on\"}}}\n")
	s.answers["POST /images/create"], s.answers["POST /containers/create"] = "{}", `{"Id":"x"}`
	for _, call := range []string{
		"/session", "/v1.41/grpc", "/build?version=2", "/images/create?fromImage=moby%2Fbuildkit&tag=buildx-stable-1", "/images/create?fromImage=docker.io/moby/buildkit:buildx-stable-1",
		"/containers/create?name=buildx_buildkit_default0",
	} {
		body := ""
		if strings.Contains(call, "containers") {
			body = `{"Image":"` + testImage + `"}`
		}
		status, told := say(t, address, "POST", call, body)
		if status != 403 || !strings.Contains(told, "BuildKit isn't offered here; set DOCKER_BUILDKIT=0") {
			t.Errorf("%s: %d %s", call, status, told)
		}
	}
	if got := s.said("POST"); len(got) > 0 {
		t.Errorf("the engine was asked %q", got)
	}
}

// TestMinAPIVersion: clients go by it when they choose a version.
func TestMinAPIVersion(t *testing.T) {
	for told, want := range map[string]string{"1.12": "1.24", "1.40": "1.40", "": "1.24", "1.44": "1.44"} {
		_, s, address := scripted(t, "1.51", "")
		s.answers["GET /version"] = fmt.Sprintf(`{"MinAPIVersion":%q,"Components":[{"Name":"Engine","Details":{"ApiVersion":"1.56","MinAPIVersion":%q}}]}`, told, told)
		if _, got := say(t, address, "GET", "/version", ""); strings.Count(got, `"MinAPIVersion":"`+want+`"`)+strings.Count(got, `"MinApiVersion":"`+want+`"`) < 1 || strings.Contains(got, "1.12") {
			t.Errorf("%q: %s", told, got)
		}
	}
}
