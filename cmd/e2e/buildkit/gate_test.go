package buildkit

import (
	"strings"
	"testing"

	control "github.com/moby/buildkit/api/services/control"
	spb "github.com/moby/buildkit/sourcepolicy/pb"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// TestBuildKitGate has an engine whose BuildKit ignores source policies. Newer ones are those
// of TestSoakBuildKitAttacks.
func TestBuildKitGate(t *testing.T) {
	engine.Require(t, "docker")
	r := newRig(t, nil)
	ctx := t.Context()
	v, err := r.docker.ServerVersion(ctx)
	must(t, err)
	if !strings.HasPrefix(v.Version, "20.") {
		t.Skipf("Docker Engine %s has source policies", v.Version)
	}
	r.serve(t)
	sides := r.sides(t)
	denyAll := &spb.Policy{Version: 1, Rules: []*spb.Rule{{Action: spb.PolicyAction_DENY, Selector: &spb.Selector{Identifier: ".*", MatchType: spb.MatchType_REGEX}}}}
	foreigns := build{dockerfile: "FROM " + foreign + "\nRUN echo $SECRET", change: func(req *control.SolveRequest) {
		req.SourcePolicy = denyAll
		req.Cache = nil
	}}
	if err := sides[0].leaks(ctx, foreigns); err != nil {
		t.Errorf("the engine itself obeys a policy: %v", err)
	}
	const says = "this engine's BuildKit has no source policy"
	for _, path := range []string{"/grpc", "/session"} {
		conn, err := sides[1].bob.upgrade(ctx, path, map[string][]string{"X-Docker-Expose-Session-Uuid": {newRef()}})
		if err == nil {
			_ = conn.Close()
			t.Errorf("%s is served", path)
		} else if !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "DOCKER_BUILDKIT=0, or a newer engine") {
			t.Errorf("%s: %v", path, err)
		}
	}
	resp, err := sides[1].bob.http.Get("http://docker/_ping")
	must(t, err)
	_ = resp.Body.Close()
	if got := resp.Header.Get("Builder-Version"); got != "1" {
		t.Errorf("ping names builder %q", got)
	}
}
