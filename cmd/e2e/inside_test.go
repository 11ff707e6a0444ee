package e2e

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// TestAgent works in sandboxes through the agent, over both of its carriers, also after
// the server was killed. A server without an agent runs nothing. No directory is left.
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
	runs := func(key string) {
		t.Helper()
		res, err := c.Exec(t.Context(), key, apitype.ExecRequest{Command: apitype.Command{"cat", "/proc/1/cmdline"}})
		if err != nil || res.ExitCode == nil || *res.ExitCode != 0 || !strings.HasPrefix(res.Stdout, "/sbin/berm-init\x00") || res.PeakMemoryBytes == 0 {
			t.Errorf("%s: %+v, %v", key, res, err)
		}
	}
	create := func(key, profile string) {
		t.Helper()
		must(t, second(c.Create(t.Context(), key, apitype.SandboxRequest{Profile: &profile})))
	}

	start()
	create("with", "default")
	create("without", "plain")
	runs("with")
	runs("without")
	if got := agentDirs(server.stateDir()); len(got) != 1 {
		t.Errorf("directories: %v", got)
	}

	server.Kill()
	start()
	runs("with")
	runs("without")

	server.stop()
	start("BERM_ENGINE_AGENT_DIR=none")
	runs("with")
	runs("without")
	if kind == "docker" { // the engine keeps a copy of the program
		create("stored", "default")
		runs("stored")
	}
	if log := server.log.String(); !strings.Contains(log, "agent_off") {
		t.Errorf("the log doesn't say that the agent is off: %s", log)
	}
	server.stop()
	server.env = slices.DeleteFunc(server.env, func(v string) bool { return v == "BERM_ENGINE_AGENT_DIR=none" })
	start()
	for _, key := range []string{"with", "without", "stored"} {
		if _, err := c.Delete(t.Context(), key); err != nil && (key != "stored" || kind == "docker") {
			t.Error(errors.Join(err, errors.New(key)))
		}
	}
	if got := agentDirs(server.stateDir()); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}
