package engineapi

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/bermhq/berm/lifecycle"
)

// TestForeignIsNotThere has an engine's answers tell of what is another tenant's.
func TestForeignIsNotThere(t *testing.T) {
	const (
		ownID     = "ab11111111111111111111111111111111111111111111111111111111111111"
		foreignID = "ab22222222222222222222222222222222222222222222222222222222222222"
	)
	var d *testDoor
	labels := func(kind lifecycle.ObjectKind, id, tenant string) string {
		text, err := json.Marshal(d.labels(kind, tenant, lifecycle.LabelSessionID, id))
		if err != nil {
			t.Error(err)
		}
		return string(text)
	}
	container := func(id, tenant string) string {
		return fmt.Sprintf(`{"Id":%q,"Name":"/n","State":{},"HostConfig":{},"Config":{"Labels":%s},"NetworkSettings":{}}`, id, labels(lifecycle.ObjectContainer, id, tenant))
	}
	network := func(id, tenant string) string {
		return fmt.Sprintf(`{"Id":%q,"Name":"net","Driver":"bridge","Labels":%s}`, id, labels(lifecycle.ObjectNetwork, id, tenant))
	}
	image := func(id, tenant, tag string) string {
		l := labels(lifecycle.ObjectImage, id, tenant)
		return fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":[%q],"Labels":%s,"Config":{"Labels":%s}}`, id, tag, l, l)
	}
	var mu sync.Mutex
	var ancestors string
	deleted := func(w http.ResponseWriter) {
		_, _ = fmt.Fprintf(w, `[{"Untagged":"own.local/x:1"},{"Deleted":"sha256:%s"},{"Deleted":"sha256:%s"},{"Untagged":"theirs.local/x:1"}]`, ownID, foreignID)
	}
	engine := serveEngine(t, func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/v1.41")
		fail := func(status int, message string) {
			w.WriteHeader(status)
			_, _ = fmt.Fprintf(w, `{"message":%q}`, message)
		}
		told := map[string]string{
			"/containers/" + ownID + "/json": container(ownID, "mine"), "/containers/" + foreignID + "/json": container(foreignID, "theirs"), "/containers/ab2/json": container(foreignID, "theirs"),
			"/networks/" + ownID: network(ownID, "mine"), "/networks/" + foreignID: network(foreignID, "theirs"), "/networks/ab2": network(foreignID, "theirs"),
			"/networks":                         "[" + network(ownID, "mine") + "]",
			"/images/sha256:" + ownID + "/json": image(ownID, "mine", "own.local/x:1"), "/images/own.local/x:1/json": image(ownID, "mine", "own.local/x:1"), "/images/ab2/json": image(foreignID, "theirs", "theirs.local/x:1"),
			"/images/" + foreignID + "/json": image(foreignID, "theirs", "theirs.local/x:1"),
			"/images/forged.local/x:1/json":  strings.ReplaceAll(image(ownID, "mine", "forged.local/x:1"), `"berm.seal":"`, `"berm.seal":"0`),
			"/images/theirs.local/x:1/json":  image(foreignID, "theirs", "theirs.local/x:1"),
			"/images/json":                   "[" + image(ownID, "mine", "own.local/x:1") + "," + image(foreignID, "theirs", "theirs.local/x:1") + "]",
		}
		switch answer := told[path]; {
		case path == "/_ping":
			w.Header().Set("Api-Version", "1.41")
		case r.Method == http.MethodDelete && path == "/images/own.local/x:1":
			deleted(w)
		case r.Method == http.MethodDelete:
			fail(http.StatusConflict, "conflict: unable to delete ab1111111111 (must be forced) - image is being used by stopped container "+foreignID[:12])
		case path == "/containers/json":
			mu.Lock()
			var f struct{ Ancestor map[string]bool }
			_ = json.Unmarshal([]byte(r.URL.Query().Get("filters")), &f)
			ancestors = fmt.Sprint(sortedKeys(f.Ancestor))
			mu.Unlock()
			_, _ = fmt.Fprintf(w, `[{"Id":%q,"Labels":%s}]`, ownID, labels(lifecycle.ObjectContainer, ownID, "mine"))
		case answer != "":
			_, _ = io.WriteString(w, answer)
		case path == "/containers/ab/json":
			fail(http.StatusInternalServerError, "Multiple IDs found with provided prefix: ab")
		case path == "/networks/ab":
			fail(http.StatusBadRequest, "network ab is ambiguous (2 matches found based on ID prefix)")
		default:
			fail(http.StatusNotFound, "No such thing: "+path)
		}
	})
	d = doorTo(t, engine, "")
	address := d.listen(Caller{Name: "mine", Tenant: "mine"})
	say := func(method, target string) (int, string) {
		t.Helper()
		return say(t, address, method, "/v1.41"+target, "")
	}
	for _, kind := range []string{"/containers/%s/json", "/networks/%s", "/images/%s/json"} {
		if status, body := say("GET", fmt.Sprintf(kind, "ab")); status != http.StatusOK || !strings.Contains(body, ownID) {
			t.Errorf("%s: the caller's own by a start of its ID: %d %s", kind, status, body)
		}
		for ref, missing := range map[string]string{"ab2": "ab3", foreignID: strings.Repeat("e", 64)} {
			_, want := say("GET", fmt.Sprintf(kind, missing))
			status, body := say("GET", fmt.Sprintf(kind, ref))
			if status != http.StatusNotFound || body != strings.ReplaceAll(want, missing, ref) {
				t.Errorf("%s: %s: %d %s, want it as if it weren't there: %s", kind, ref, status, body, want)
			}
		}
	}
	// One that was pulled says what it likes, but has no seal of an image.
	if status, body := say("GET", "/images/forged.local/x:1/json"); status != http.StatusNotFound {
		t.Errorf("a forged image: %d %s", status, body)
	}
	for ancestor, want := range map[string]string{"own.local/x:1": "[sha256:" + ownID + "]", "ab": "[sha256:" + ownID + "]", "theirs.local/x:1": "[" + noImageID + "]", "ab2": "[" + noImageID + "]", "none": "[" + noImageID + "]"} {
		status, body := say("GET", "/containers/json?filters="+url.QueryEscape(fmt.Sprintf(`{"ancestor":[%q]}`, ancestor)))
		if mu.Lock(); status != http.StatusOK || ancestors != want {
			t.Errorf("ancestor %s: the engine is asked for %s, want %s: %d %s", ancestor, ancestors, want, status, body)
		}
		mu.Unlock()
	}
	if status, body := say("DELETE", "/images/own.local/x:1"); status != http.StatusOK || strings.Contains(body, foreignID) || !strings.Contains(body, ownID) || !strings.Contains(body, "own.local/x:1") {
		t.Errorf("what was deleted: %d %s", status, body)
	}
	if status, body := say("DELETE", "/images/sha256:"+ownID); status != http.StatusConflict || strings.Contains(body, foreignID[:12]) {
		t.Errorf("the engine's refusal: %d %s", status, body)
	}
}
