package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// An engine that stops: both APIs report which one doesn't answer and for how long, and
// serve again once it runs.
func testStoppedEngine(t *testing.T, e *testEngine) {
	dir, kind := e.dir(t), e.config.Kind
	s := newServer(t, e, dir, testImage)
	name, door := "containerd at ", "unix://"+filepath.Join(dir, "docker.sock")
	if kind == "docker" {
		name = "the Docker Engine at "
		s.env = append(s.env, "BERM_ENGINE_API_LISTENERS=[{address: '"+door+"', callers: [{name: ci, tenant: ci}]}]")
	}
	s.start(t)
	// put makes a sandbox, or returns why it can't be made.
	put := func() (reason string, err error) {
		resp, body, err := exchange(t.Context(), http.DefaultClient, http.MethodPut, s.url+"/api/v1/sandboxes/k", "{}", "X-API-Token", s.token)
		if err != nil || resp.StatusCode < 300 {
			return "", err
		}
		var p apitype.Problem
		if err := json.Unmarshal([]byte(body), &p); err != nil || p.Code != "backend_unavailable" || resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
			return "", errors.Join(err, errors.New(resp.Status+" "+body))
		}
		return p.Detail, nil
	}
	if reason, err := put(); reason != "" || err != nil {
		t.Fatal(reason, err)
	}
	e.Kill()
	told := regexp.QuoteMeta(name+e.config.Address) + ` has not answered for [0-9]+s \((connection refused|connection closed|no such socket)\); requests are refused until it does`
	rest := regexp.MustCompile("^" + told + "$")
	until(t, "the outage to be reported", func() bool {
		return rest.MatchString(check.Value(put())(t))
	})
	if kind == "docker" {
		for _, cli := range clis(t) {
			for _, args := range [][]string{{"ps"}, {"version"}, {"run", testImage, "true"}} {
				out, err := command(t.Context(), dir, dockerEnv(door, dir), cli, args...)
				if err == nil || !regexp.MustCompile("Error response from daemon: berm: "+told+`\.?(\n|$)`).MatchString(out+err.Error()) {
					t.Errorf("%s %s: %v\n%s", cli, args[0], err, out)
				}
			}
		}
	}
	must(t, e.Start(t.Context()))
	until(t, "the engine is back", func() bool { return check.Value(put())(t) == "" })
	if kind == "docker" {
		for _, cli := range clis(t) {
			if out, err := command(t.Context(), dir, dockerEnv(door, dir), cli, "ps"); err != nil {
				t.Errorf("afterwards: %v\n%s", err, out)
			}
		}
	}
}
