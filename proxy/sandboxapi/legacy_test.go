package sandboxapi_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

const (
	legacyPath = "/api/v1/create"
	chatID     = "6d4b2f0e-7c1a-4b9e-8a55-3f1f2d0c9b7a"
	legacyBody = `{"chat_id":"` + chatID + `","agent_id":"agent-7","volume_host_path":"/srv/b"}`
)

// wantLegacy sends a create of the old service and checks the error's body, which
// has a detail and nothing else.
func (d *door) wantLegacy(status int, detail, body string) answer {
	d.t.Helper()
	a := d.send("POST", legacyPath, body)
	var got map[string]string
	a.decode(d.t, &got)
	if a.StatusCode != status || len(got) != 1 || !strings.Contains(got["detail"], detail) || a.Header.Get("Content-Type") != "application/json" {
		d.t.Errorf("%s: got %d %s, want %d %q", body, a.StatusCode, a.body, status, detail)
	}
	return a
}

// legacyAnswers goes through every status of the old service's create.
func legacyAnswers(d *door) {
	d.calm()
	d.manager.sandbox.Key = chatID
	d.send("POST", legacyPath, legacyBody)
	d.send("POST", legacyPath, legacyBody, withToken(""))
	d.send("POST", legacyPath, legacyBody, withToken(powerless))
	d.send("POST", legacyPath, legacyBody, withHost("evil.example"))
	d.wantLegacy(422, "", "{}")
	d.manager.err = errors.New("boo")
	d.wantLegacy(500, "", legacyBody)
	d.manager.err = away.err
	d.wantLegacy(503, "", legacyBody)
	d.manager.err = conflict.err
	d.wantLegacy(409, "", legacyBody)
}

func TestLegacyCreate(t *testing.T) {
	d := newDoor(t)
	d.manager.sandbox.Key, d.manager.sandbox.AgentID, d.manager.sandbox.VolumePath = chatID, "agent-7", "/srv/b"
	for _, sent := range []string{chatID, strings.ToUpper(chatID), "{" + chatID + "}", strings.ReplaceAll(chatID, "-", "")} {
		body := strings.Replace(legacyBody, chatID, sent, 1)
		a := d.want(200, "", "POST", legacyPath, body)
		var got map[string]any
		a.decode(t, &got)
		delete(got, "expires_at")
		want := map[string]any{
			"session_id": sessionID, "chat_id": chatID, "agent_id": "agent-7", "volume_host_path": "/srv/b", "container_id": "c0ffee",
			"endpoint": map[string]any{"ip": "10.0.0.2", "port": 80.0}, "status": "running",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		wantReq := lifecycle.CreateRequest{Tenant: "red", Key: chatID, AgentID: "agent-7", VolumePath: "/srv/b", MaxSandboxes: 7}
		if diff := cmp.Diff(wantReq, d.manager.created); diff != "" {
			t.Error(diff)
		}
	}
}

func TestLegacyCreateInvalid(t *testing.T) {
	d := newDoor(t)
	for name, body := range map[string]string{
		"empty":             ``,
		"not JSON":          `{`,
		"list":              `[]`,
		"unknown field":     strings.Replace(legacyBody, "}", `,"x":1}`, 1),
		"repeated field":    strings.Replace(legacyBody, "}", `,"agent_id":"b"}`, 1),
		"no chat id":        `{"agent_id":"a","volume_host_path":"/srv/b"}`,
		"chat id":           strings.Replace(legacyBody, chatID, "chat-1", 1),
		"chat id, cut":      strings.Replace(legacyBody, chatID, chatID[1:], 1),
		"chat id of number": `{"chat_id":1,"agent_id":"a","volume_host_path":"/srv/b"}`,
		"chat id of null":   `{"chat_id":null,"agent_id":"a","volume_host_path":"/srv/b"}`,
		"no agent":          `{"chat_id":"` + chatID + `","volume_host_path":"/srv/b"}`,
		"blank agent":       strings.Replace(legacyBody, "agent-7", " \\t", 1),
		"no volume":         `{"chat_id":"` + chatID + `","agent_id":"a"}`,
		"too large":         `{"chat_id":"` + strings.Repeat("x", 2<<20) + `"}`,
	} {
		t.Run(name, func(*testing.T) { d.wantLegacy(422, "", body) })
	}
	t.Run("media type", func(t *testing.T) {
		if a := d.send("POST", legacyPath, legacyBody, withHeader("Content-Type", "text/plain")); a.StatusCode != 422 {
			t.Errorf("got %d", a.StatusCode)
		}
	})
	if d.manager.created.Key != "" {
		t.Error("one of them reached the manager")
	}
}

func TestLegacyCreateFails(t *testing.T) {
	d := newDoor(t)
	for name, tt := range map[string]struct {
		err    error
		status int
		detail string
		retry  bool
	}{
		"conflict":    {conflict.err, 409, "sandbox_conflict", false},
		"start":       {&lifecycle.StartError{Err: errors.New("password=hunter2")}, 503, "sandbox_start_failed: the container engine could not start", false},
		"unavailable": {away.err, 503, "sandbox_start_failed: the container engine can't be reached", true},
		"pulling":     {&lifecycle.PullingError{Sandbox: lifecycle.Sandbox{Key: chatID}}, 503, "sandbox_start_failed: sandbox", true},
		"capacity":    {capacity.err, 503, "sandbox_start_failed: full", true},
		"denied":      {denied.err, 503, "sandbox_start_failed: /etc is always refused", false},
		"invalid":     {&policy.DeniedError{Reasons: []policy.Reason{{Invalid: true, Message: "bad path"}}}, 422, "bad path", false},
		"anything":    {errors.New("password=hunter2"), 500, "something went wrong", false},
	} {
		t.Run(name, func(t *testing.T) {
			d.manager.err = tt.err
			a := d.wantLegacy(tt.status, tt.detail, legacyBody)
			if (a.Header.Get("Retry-After") != "") != tt.retry {
				t.Errorf("Retry-After is %q", a.Header.Get("Retry-After"))
			}
			if strings.Contains(a.body, "hunter2") {
				t.Errorf("it tells too much: %s", a.body)
			}
		})
	}
}

func TestLegacyDelete(t *testing.T) {
	d := newDoor(t)
	a := d.want(200, "", "DELETE", "/api/v1/sandboxes/"+strings.ToUpper(chatID), "")
	if want := `{"chat_id":"` + chatID + `","result":"deleted","session_id":"` + sessionID + `","container_id":"c0ffee"}`; strings.TrimSpace(a.body) != want {
		t.Errorf("got %s, want %s", a.body, want)
	}
	d.manager.delete = lifecycle.DeleteResult{Result: lifecycle.ResultNotFound}
	a = d.want(200, "", "DELETE", "/api/v1/sandboxes/"+chatID, "")
	if want := `{"chat_id":"` + chatID + `","result":"not_found","session_id":null,"container_id":null}`; strings.TrimSpace(a.body) != want {
		t.Errorf("got %s, want %s", a.body, want)
	}
}
