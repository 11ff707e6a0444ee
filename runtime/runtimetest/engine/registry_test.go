package engine

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestRegistry(t *testing.T) {
	if _, err := findBusybox(); err != nil {
		Lacking(t, "containerd", err)
	}
	r, err := StartRegistry(t.Context(), RegistryOptions{User: "somebody", Password: "secret"})
	must(t, err)
	must(t, r.Push(t.Context(), "team/tool:1"))
	if err := r.Push(t.Context(), "team/tool"); err == nil {
		t.Error("a push without a tag succeeded")
	}
	for _, tt := range []struct {
		name, path, user, password string
		want                       int
	}{
		{"known", "team/tool/manifests/1", "somebody", "secret", http.StatusOK},
		{"wrong password", "team/tool/manifests/1", "somebody", "else", http.StatusUnauthorized},
		{"no user", "team/tool/manifests/1", "", "", http.StatusUnauthorized},
		{"unknown tag", "team/tool/manifests/2", "somebody", "secret", http.StatusNotFound},
		{"unknown image", "team/else/manifests/1", "somebody", "secret", http.StatusNotFound},
		{"tags", "team/tool/tags/list", "somebody", "secret", http.StatusOK},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.Host()+"/v2/"+tt.path, nil)
		must(t, err)
		if tt.user != "" {
			req.SetBasicAuth(tt.user, tt.password)
		}
		resp, err := http.DefaultClient.Do(req)
		must(t, err)
		_ = resp.Body.Close()
		if resp.StatusCode != tt.want {
			t.Errorf("%s: status %d, want %d", tt.name, resp.StatusCode, tt.want)
		}
		if got := resp.Header.Get("Content-Type"); tt.want != http.StatusOK && got != "application/json" {
			t.Errorf("%s: an error of the type %s", tt.name, got)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	must(t, r.Close())
	if _, err := http.Get("http://" + r.Host() + "/v2/"); err == nil {
		t.Error("a closed registry answers")
	}
}

// Engines send a blob in pieces.
func TestRegistryUpload(t *testing.T) {
	s := new(RegistryStore)
	ask := func(method, path, body string) *httptest.ResponseRecorder {
		reply := httptest.NewRecorder()
		s.ServeHTTP(reply, httptest.NewRequest(method, path, strings.NewReader(body)))
		return reply
	}
	at := ask(http.MethodPost, "/v2/team/tool/blobs/uploads/", "").Header().Get("Location")
	at = ask(http.MethodPatch, at, "one ").Header().Get("Location")
	at = ask(http.MethodPatch, at, "two").Header().Get("Location")
	if reply := ask(http.MethodPut, at+"?digest=sha256:0", ""); reply.Code != http.StatusBadRequest {
		t.Errorf("a wrong digest: status %d", reply.Code)
	}
	digest := digestOf([]byte("one two"))
	if reply := ask(http.MethodPut, at+"?digest="+digest, ""); reply.Code != http.StatusCreated {
		t.Errorf("the last piece: status %d", reply.Code)
	}
	if got := ask(http.MethodGet, "/v2/team/tool/blobs/"+digest, "").Body.String(); got != "one two" {
		t.Errorf("got %q", got)
	}
}
