package lifecycle_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// What a container carries tells all that a start must know of it.
func TestMadeContainer(t *testing.T) {
	volume := t.TempDir()
	w := newWorld(t, setup{
		policy: "version: 1\nmounts: {allowed_roots: [" + volume + "]}\n",
		settings: lifecycle.Settings{
			Env: map[string]string{"A": "operator's", "B": "operator's"}, AgentPort: 8080, AdoptLegacy: true,
		},
	})
	req := request("6F9619FF-8B86-D011-B42D-00C04FC964FF")
	req.AgentID, req.VolumePath = "agent", volume+"/x/.."
	req.Request.Env = map[string]string{"B": "caller's"}
	sb := w.create(req).Sandbox
	c := w.fake.Containers()[0]
	if got := strings.Join(c.Env, " "); !strings.HasSuffix(got, "A=operator's B=caller's AGENT_ID=agent") {
		t.Errorf("environment: %s", got)
	}
	for name, want := range map[string]string{
		lifecycle.LabelOwner: "owner", lifecycle.LabelTenant: "a", lifecycle.LabelKey: "6f9619ff-8b86-d011-b42d-00c04fc964ff",
		lifecycle.LabelSessionID: sb.SessionID, lifecycle.LabelProfile: "default", lifecycle.LabelSpec: sb.Spec.Digest(),
		lifecycle.LabelExpiresAt: sb.ExpiresAt.Format(time.RFC3339Nano), lifecycle.LabelDeadline: sb.Deadline.Format(time.RFC3339Nano),
		lifecycle.LabelAgentID: "agent", lifecycle.LabelVolume: volume, lifecycle.LabelEnv: "B",
		"session_id": sb.SessionID, "chat_id": sb.Key, "expires_at": sb.ExpiresAt.Format(time.RFC3339Nano),
		"agent_id": "agent", "volume_host_path": volume, "endpoint_port": "8080",
	} {
		if got := c.Labels[name]; got != want {
			t.Errorf("label %s is %q, want %q", name, got, want)
		}
	}
	if want := (policy.Mount{HostPath: volume, Source: volume, Local: volume, MountPath: "/volume", Mode: "rw"}); !slices.Contains(sb.Spec.Mounts, want) {
		t.Errorf("mounts: %+v", sb.Spec.Mounts)
	}
}
