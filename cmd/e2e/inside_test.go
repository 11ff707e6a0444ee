package e2e

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// A server works in sandboxes through the agent, also after it was killed, and not
// where the policy or the configuration says so; and leaves no directory behind.
func TestAgent(t *testing.T) { onEachEngine(t, testAgent) }

func testAgent(t *testing.T, kind string) {
	t.Parallel()
	e := commonEngine(t, kind)
	server := newServer(t, e, e.dir(t), testImage)
	server.policy(t, "profiles: {plain: {agent: off}}\n")
	var c *client.Client
	start := func(more ...string) {
		t.Helper()
		server.env = append(server.env, more...)
		c = server.start(t)
	}
	path := func(key string) string {
		t.Helper()
		res, err := c.Exec(t.Context(), key, apitype.ExecRequest{Command: apitype.Command{"cat", "/proc/1/cmdline"}})
		if err != nil || res.ExitCode == nil || *res.ExitCode != 0 || !strings.HasPrefix(res.Stdout, "/sbin/berm-init\x00") {
			t.Fatalf("%s: %+v, %v", key, res, err)
		}
		if res.ExecPath == "agent" && res.PeakMemoryBytes == 0 {
			t.Errorf("%s: %+v", key, res)
		}
		return res.ExecPath
	}
	create := func(key, profile string) {
		t.Helper()
		if _, err := c.Create(t.Context(), key, apitype.SandboxRequest{Profile: &profile}); err != nil {
			t.Fatal(err)
		}
	}

	start()
	create("with", "default")
	create("without", "plain")
	if got := path("with"); got != "agent" {
		t.Errorf("the command went through the %s", got)
	}
	if got := path("without"); got != "engine" {
		t.Errorf("without the agent, the command went through the %s", got)
	}
	if got := agentDirs(server.stateDir()); len(got) != 1 {
		t.Errorf("directories: %v", got)
	}

	if err := server.kill(); err != nil {
		t.Fatal(err)
	}
	start()
	for deadline := time.Now().Add(30 * time.Second); path("with") != "agent"; { // it dials again in its own time
		if time.Now().After(deadline) {
			t.Fatal("the agent didn't find the next server")
		}
		time.Sleep(50 * time.Millisecond)
	}

	server.stop()
	start("BERM_ENGINE_AGENT_DIR=none")
	if got := path("with"); got != "engine" {
		t.Errorf("with the agent turned off, the command went through the %s", got)
	}
	log, err := os.ReadFile(server.logPath())
	if err != nil || !strings.Contains(string(log), "agent_off") {
		t.Errorf("the log doesn't say that the agent is off: %v", err)
	}
	server.stop()
	server.env = slices.DeleteFunc(server.env, func(v string) bool { return v == "BERM_ENGINE_AGENT_DIR=none" })
	start()
	for _, key := range []string{"with", "without"} {
		if _, err := c.Delete(t.Context(), key); err != nil {
			t.Error(errors.Join(err, errors.New(key)))
		}
	}
	if got := agentDirs(server.stateDir()); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}
