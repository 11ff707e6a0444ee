package serve

import (
	"encoding/base64"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestRegistryAuth(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	write(t, file, `{"auths": {
		"https://index.docker.io/v1/": {"auth": "`+base64.StdEncoding.EncodeToString([]byte("hub:pass:word"))+`"},
		"ghcr.io": {"username": "me", "password": "token"},
		"http://127.0.0.1:5000/v2/": {"identitytoken": "identity"}
	}, "HttpHeaders": {"User-Agent": "other"}}`)
	auth := check.Value(openRegistryAuth(file))(t)
	for _, tt := range []struct{ host, user, secret string }{
		{"registry-1.docker.io", "hub", "pass:word"},
		{"docker.io", "hub", "pass:word"},
		{"ghcr.io", "me", "token"},
		{"127.0.0.1:5000", "", "identity"},
		{"quay.io", "", ""},
		{"evil.example", "", ""},
	} {
		user, secret, err := auth(t.Context(), tt.host)
		if err != nil || user != tt.user || secret != tt.secret {
			t.Errorf("%s: %q, %q, %v", tt.host, user, secret, err)
		}
	}

	// Credentials that change are the next pull's.
	write(t, file, `{"auths": {"ghcr.io": {"username": "me", "password": "another"}}}`)
	if _, secret, err := auth(t.Context(), "ghcr.io"); err != nil || secret != "another" {
		t.Errorf("after a change: %q, %v", secret, err)
	}
	if none, err := openRegistryAuth(""); err != nil || none != nil {
		t.Errorf("without a file: %v", err)
	}
}

func TestRegistryAuthErrors(t *testing.T) {
	hush := base64.StdEncoding.EncodeToString([]byte("hush"))
	for name, tt := range map[string]struct{ content, want string }{
		"no json":     {`hush`, "is no Docker config.json"},
		"other type":  {`{"auths": {"a": {"password": 4711}}}`, "is no Docker config.json"},
		"helper":      {`{"credsStore": "desktop"}`, "credential helpers"},
		"helpers":     {`{"credHelpers": {"a": "ecr-login"}}`, "credential helpers"},
		"empty":       {`{"auths": {"a": {}}}`, `"a": neither`},
		"half":        {`{"auths": {"a": {"password": "hush"}}}`, `"a": neither`},
		"no base64":   {`{"auths": {"a": {"auth": "hush!"}}}`, `"a": not base64`},
		"no colon":    {`{"auths": {"a": {"auth": "` + hush + `"}}}`, `"a": no user and password`},
		"part":        {`{"auths": {"a/team": {"username": "u", "password": "hush"}}}`, "for a whole registry"},
		"bearer":      {`{"auths": {"a": {"registrytoken": "hush"}}}`, "a registrytoken can't be used"},
		"twice":       {`{"auths": {"a": {"identitytoken": "hush"}, "https://a": {"identitytoken": "hush"}}}`, "credentials for a already"},
		"larger than": {strings.Repeat(" ", maxRegistryAuth+1), "larger than"},
	} {
		file := filepath.Join(t.TempDir(), "config.json")
		write(t, file, tt.content)
		_, err := openRegistryAuth(file)
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "engine.registry_auth_file: ") {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, secret := range []string{"hush", "4711", hush} {
			if strings.Contains(strings.ReplaceAll(err.Error(), file, ""), secret) {
				t.Errorf("%s: the error tells a secret: %v", name, err)
			}
		}
	}
	if _, err := openRegistryAuth("/none"); err == nil {
		t.Error("a missing file gives no error")
	}
}
