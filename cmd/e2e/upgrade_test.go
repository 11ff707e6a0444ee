package e2e

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// oldService is what the old sandbox service left on an engine, and a server in its place.
type oldService struct {
	*contained // has the engine
	dir        string
	server     *server
}

const (
	oldChat, oldSession = "6f9619ff-8b86-d011-b42d-00c04fc964ff", "0f9619ff-8b86-d011-b42d-00c04fc964ff"
	oldEnding           = "6f9619ff-8b86-d011-b42d-00c04fc964fe"
)

// run makes a chat's container as the old service did, but for what is changed.
func (o *oldService) run(chat string, change func(labels map[string]string)) (id string) {
	o.t.Helper()
	labels := map[string]string{
		lifecycle.LegacySessionID: oldSession, lifecycle.LegacyChatID: chat, lifecycle.LegacyAgentID: "agent-7",
		lifecycle.LegacyExpiresAt: time.Now().UTC().Add(time.Hour).Format(time.RFC3339),
		lifecycle.LegacyVolume:    o.dir + "/volume", lifecycle.LegacyPort: "8080",
	}
	change(labels)
	args := []string{
		"run", "--detach", "--name", "sandbox-" + chat, "--network", "old-sandboxes", "--env", "AGENT_ID=agent-7",
		"--volume", o.dir + "/chats/" + chat + ":/chat", "--volume", o.dir + "/deps:/dependencies:ro",
		"--volume", o.dir + "/tools:/lambda-tools:ro", "--volume", o.dir + "/volume:/volume",
	}
	for name, value := range labels {
		args = append(args, "--label", name+"="+value)
	}
	return o.must(append(args, testImage, "httpd", "-f", "-p", "8080", "-h", "/chat")...)
}

// there are the containers that the old service made, and still are.
func (o *oldService) there(ids ...string) (left []string) {
	o.t.Helper()
	all := strings.Fields(o.must("ps", "--quiet", "--no-trunc"))
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return !slices.Contains(all, id) })
}

// call makes one of the old service's calls.
func (o *oldService) call(method, path string, body, out any) int {
	o.t.Helper()
	data := check.Value(json.Marshal(body))(o.t)
	resp, answer, err := exchange(o.t.Context(), http.DefaultClient, method, o.server.url+"/api/v1/"+path, string(data), "X-API-Token", o.server.token)
	if err == nil {
		err = json.Unmarshal([]byte(answer), out)
	}
	if err != nil {
		o.t.Fatalf("%s %s: %s: %v", method, path, answer, err)
	}
	return resp.StatusCode
}

func newOldService(t *testing.T) *oldService {
	t.Helper()
	e := commonEngine(t, "docker")
	o := &oldService{contained: &contained{t: t, engine: e, dir: t.TempDir()}, dir: e.dir(t)}
	for _, name := range []string{"chats/" + oldChat, "chats/" + oldEnding, "deps", "tools", "volume"} {
		makeDir(t, o.dir, name)
	}
	write(t, filepath.Join(o.dir, "chats", oldChat, "notes.txt"), "of the old service\n")
	o.must("network", "create", "old-sandboxes")
	t.Cleanup(func() { o.must("network", "rm", "old-sandboxes") })
	o.server = newServer(t, e, o.dir, testImage)
	o.server.policy(t, "networks: {\"on\": {external: true}}\nmounts: {allowed_roots: ["+o.dir+"/volume]}\nprofiles: {default: {network: \"on\"}}\n")
	o.server.env = append(o.server.env, "BERM_SANDBOX_NETWORK=old-sandboxes", "BERM_SANDBOX_PORT=8080",
		"BERM_SANDBOX_COMMAND=httpd,-f,-p,8080,-h,/chat",
		"BERM_SANDBOX_CHATS_ROOT="+o.dir+"/chats", "BERM_SANDBOX_DEPENDENCIES_ROOT="+o.dir+"/deps", "BERM_SANDBOX_LAMBDA_TOOLS_ROOT="+o.dir+"/tools")
	return o
}

func (o *oldService) start(env ...string) *client.Client {
	o.t.Helper()
	o.server.env = append(o.server.env, env...)
	return o.server.start(o.t)
}

// What the old service made is left alone until it is to be adopted, and then it is a
// sandbox like others, for callers of the old API and of the new one.
func TestUpgradeFromOldService(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	o := newOldService(t)
	live := o.run(oldChat, func(map[string]string) {})
	expired := o.run(oldEnding, func(l map[string]string) {
		l[lifecycle.LegacyExpiresAt] = time.Now().UTC().Add(-time.Minute).Format(time.RFC3339)
	})

	c := o.start()
	for sb, err := range c.List(ctx, client.ListOptions{}) {
		t.Errorf("without adopt_legacy, it took %+v, %v", sb, err)
	}
	if got := o.there(live, expired); len(got) != 2 {
		t.Errorf("of two there are %q", got)
	}
	o.server.stop()

	c = o.start("BERM_SANDBOX_ADOPT_LEGACY=true")
	until(t, "what has expired is collected", func() bool { return len(o.there(expired)) == 0 })

	// The old API.
	ask := apitype.LegacyCreateRequest{ChatID: strings.ToUpper(oldChat), AgentID: "agent-7", VolumeHostPath: o.dir + "/x/../volume"}
	var sb apitype.LegacySandbox
	if status := o.call("POST", "create", ask, &sb); status != http.StatusOK || sb.SessionID != oldSession || sb.ContainerID != live || sb.Endpoint == nil || sb.Endpoint.Port != 8080 {
		t.Fatalf("create: %d %+v", status, sb)
	}
	if got := o.must("exec", live, "wget", "-qO-", "http://"+sb.Endpoint.IP+":8080/notes.txt"); got != "of the old service" {
		t.Errorf("its endpoint answers %q", got)
	}

	// The new one. No agent is in there, so commands wait until the sandbox is made again.
	wantCode(t, second(c.Exec(ctx, oldChat, apitype.ExecRequest{Command: apitype.Command{"true"}})), "not_supported")
	wantCode(t, second(all(c.ReadFile(ctx, oldChat, "/chat/notes.txt", 0, 0))), "not_supported")
	w, err := c.EnsureWorkspace(ctx, "user")
	if err == nil {
		_, err = c.EnsureChat(ctx, oldChat, w.WorkspaceID)
	}
	must(t, err)
	if got, err := all(c.ReadChatFile(ctx, oldChat, "notes.txt", 0, 0)); err != nil || got != "of the old service\n" {
		t.Errorf("the chat's file is %q, %v", got, err)
	}
	renewed, err := c.Renew(ctx, oldChat, 2*time.Second)
	if err != nil || renewed.SessionID != oldSession {
		t.Errorf("renewed: %+v, %v", renewed, err)
	}
	until(t, "what ends is collected", func() bool { return len(o.there(live)) == 0 })

	// The next one is Berm's, and the old service would know it again.
	if status := o.call("POST", "create", ask, &sb); status != http.StatusOK || sb.SessionID == oldSession || sb.ContainerID == live {
		t.Fatalf("create: %d %+v", status, sb)
	}
	var labels map[string]string
	must(t, json.Unmarshal([]byte(o.must("inspect", "--format", "{{json .Config.Labels}}", sb.ContainerID)), &labels))
	if labels[lifecycle.LegacyChatID] != oldChat || labels[lifecycle.LegacySessionID] != sb.SessionID || labels[lifecycle.LegacyPort] != "8080" || labels[lifecycle.LabelOwner] != o.server.instance {
		t.Errorf("its labels are %v", labels)
	}
	var deleted struct{ Result string }
	if status := o.call("DELETE", "sandboxes/"+oldChat, nil, &deleted); status != http.StatusOK || deleted.Result != "deleted" {
		t.Errorf("delete: %d %+v", status, deleted)
	}
	o.server.stop()
	wantNothing(t, o.engine, o.server)
}
