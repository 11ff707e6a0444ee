package runtimetest

import (
	"context"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
)

// fakeEngine takes a Fake down and brings it back.
type fakeEngine struct{ *Fake }

func (e fakeEngine) Kill() { e.SetDown(true) }

func (e fakeEngine) Start(context.Context) error {
	e.SetDown(false)
	return nil
}

func TestFakeContract(t *testing.T) {
	f := NewFake(FakeOptions{
		Files: t.TempDir(),
		Images: map[string]runtime.Image{
			DefaultImage:            {},
			"berm.local/configured": {Env: []string{"FROM_IMAGE=yes"}, User: "nobody", Command: []string{"sleep", "200000"}},
		},
		Registry: map[string]runtime.Image{"registry.test/contract:latest": {}},
	})
	Run(t, Harness{
		New: func(*testing.T) runtime.AgentRuntime { return f }, Collector: f,
		Image: DefaultImage, Configured: "berm.local/configured", Agent: "/berm-agent",
		Engine: fakeEngine{f}, Registry: "registry.test",
		MakeVolume: func(t *testing.T, name string, labels map[string]string, used bool) {
			user := ""
			if used {
				c, err := f.Create(t.Context(), runtime.Spec{Name: name, Image: DefaultImage, Labels: labels})
				must(t, err)
				user = c.ID
			}
			f.AddVolume(runtime.Volume{Name: name, Labels: labels, CreatedAt: time.Now()}, user)
		},
	})
	if cs := f.Containers(); len(cs) != 0 {
		t.Errorf("the suite left %d containers", len(cs))
	}
}
