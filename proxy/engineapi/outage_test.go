package engineapi

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// An engine that goes away in the middle of a request is named, and what it was asked isn't
// taken for done.
func TestEngineLost(t *testing.T) {
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		switch strings.TrimPrefix(r.URL.Path, "/v1.41") {
		case "/images/json":
			_, _ = io.WriteString(w, `[{"Id":`)
		case "/system/df":
			_, _ = io.WriteString(w, `{"Images":[{"Id":"x"},{`)
		case "/images/create":
			_, _ = io.WriteString(w, `{"status":"Downloading"}`+"\n")
		}
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}})
	address := d.listen(Caller{Name: "a", Tenant: standInTenant})
	const gone = "berm: the container engine gave no answer (connection closed); what was asked for may be done or not"
	for _, path := range []string{"/version", "/v1.41/info", "/v1.41/images/json", "/v1.41/system/df"} {
		if status, body := say(t, address, http.MethodGet, path, ""); status != http.StatusServiceUnavailable || body != `{"message":"`+gone+`"}` {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	resp := check.Value(raw(address).Post("http://docker/v1.41/images/create?fromImage=berm.local/busybox&tag=latest", "", nil))(t)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if want := `{"error":"` + gone + `","errorDetail":{"message":"` + gone + `"}}`; err == nil || !strings.Contains(string(body), want) {
		t.Errorf("a pull: %v\n%s", err, body)
	}
}

// An engine that can't be reached is named without the error of the connection.
func TestEngineAway(t *testing.T) {
	d := doorTo(t, "unix:///hunter2/docker.sock", "")
	address := d.listen(Caller{Name: "a", Tenant: "a"})
	for _, path := range []string{"/_ping", "/v1.41/info", "/version", "/v1.41/containers/json"} {
		resp, body := sayWith(t, address, http.MethodGet, path, nil, "")
		if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "2" ||
			!strings.HasPrefix(body, `{"message":"berm: the container engine gave no answer (no such socket); `) {
			t.Errorf("%s: %s %s", path, resp.Status, body)
		}
	}
}
