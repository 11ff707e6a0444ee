package lifecycle_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
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

// crippledEngine makes containers that lack something.
type crippledEngine struct {
	*runtimetest.Fake
	cripple func(*runtime.Container)
}

func (e crippledEngine) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	c, err := e.Fake.Create(ctx, spec)
	e.cripple(&c)
	return c, err
}

func TestMadeContainerLacksSomething(t *testing.T) {
	for _, tt := range []struct {
		name    string
		cripple func(*runtime.Container)
		left    int // without its id, only the sweep can remove it
	}{
		{"id", func(c *runtime.Container) { c.ID = "" }, 1},
		{"address", func(c *runtime.Container) { c.IP = "" }, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return crippledEngine{f, tt.cripple} }})
			req := request("k")
			req.Request.Network = ptr("on")
			if _, err := w.Create(t.Context(), req); !errorIs[*lifecycle.StartError](err) {
				t.Errorf("create: %v", err)
			}
			if _, err := w.Get(t.Context(), "a", "k"); err == nil {
				t.Error("it is on record")
			}
			if n := len(w.fake.Containers()); n != tt.left {
				t.Errorf("%d containers are left", n)
			}
			w.eventually("nothing is left", func() bool { w.sweep(); return len(w.fake.Containers()) == 0 })
		})
	}
}
