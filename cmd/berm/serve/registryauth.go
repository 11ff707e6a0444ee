package serve

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/bermhq/berm/cmd/berm/config"
)

// maxRegistryAuth bounds the file of credentials; a real one is a few kilobytes.
const maxRegistryAuth = 1 << 20

// dockerHub is the host under which a Docker config.json keeps the credentials of
// Docker Hub, whose other names lead there.
const dockerHub = "index.docker.io"

// registryAuth returns the credentials for a registry, as the backends' options ask for them.
type registryAuth func(ctx context.Context, host string) (user, secret string, err error)

// openRegistryAuth returns a function that reads credentials from a file; nil without a file. The
// function reads the file at each call, since tokens in it may be short-lived.
func openRegistryAuth(path string) (registryAuth, error) {
	if path == "" {
		return nil, nil
	}
	auth := func(_ context.Context, host string) (user, secret string, err error) {
		all, err := readRegistryAuth(path)
		if err != nil {
			return "", "", fmt.Errorf("engine.registry_auth_file: %w", err)
		}
		c := all[registryHost(host)]
		if c.IdentityToken != "" {
			return "", c.IdentityToken, nil
		}
		return c.User, c.Password, nil
	}
	_, _, err := auth(context.Background(), "") // it is of use
	return auth, err
}

type registryCredentials struct {
	User          string `json:"username"`
	Password      string `json:"password"`
	IdentityToken string `json:"identitytoken"`
}

// readRegistryAuth gives the credentials by host. Its errors quote nothing of the file but the
// names of registries.
func readRegistryAuth(path string) (map[string]registryCredentials, error) {
	data, err := config.ReadFile(path, maxRegistryAuth)
	if err != nil {
		return nil, err
	}
	var file struct {
		Auths map[string]struct {
			registryCredentials
			Auth          string `json:"auth"`
			RegistryToken string `json:"registrytoken"`
		} `json:"auths"`
		CredsStore  string            `json:"credsStore"`
		CredHelpers map[string]string `json:"credHelpers"`
	}
	if json.Unmarshal(data, &file) != nil { // the parser's message may quote a value
		return nil, fmt.Errorf("%s is no Docker config.json", path)
	}
	if file.CredsStore != "" || len(file.CredHelpers) > 0 {
		return nil, fmt.Errorf("%s names credential helpers, which Berm doesn't run; put the credentials into its auths", path)
	}
	out := map[string]registryCredentials{}
	for key, auth := range file.Auths {
		host := registryHost(key)
		c := auth.registryCredentials
		if auth.Auth != "" {
			if c.User, c.Password, err = decodeAuth(auth.Auth); err != nil {
				return nil, fmt.Errorf("%s: the auth of %q: %w", path, key, err)
			}
		}
		_, twice := out[host]
		switch {
		case strings.Contains(host, "/"):
			return nil, fmt.Errorf("%s: %q: credentials are for a whole registry, not for a part of it", path, key)
		case twice:
			return nil, fmt.Errorf("%s: %q: there are credentials for %s already", path, key, host)
		case auth.RegistryToken != "":
			return nil, fmt.Errorf("%s: %q: a registrytoken can't be used; give a user and a password, or an identitytoken", path, key)
		case c.IdentityToken == "" && (c.User == "" || c.Password == ""):
			return nil, fmt.Errorf("%s: %q: neither a user with a password nor an identitytoken", path, key)
		}
		out[host] = c
	}
	return out, nil
}

func decodeAuth(text string) (user, password string, err error) {
	plain, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return "", "", errors.New("not base64")
	}
	user, password, found := strings.Cut(strings.TrimRight(string(plain), "\x00"), ":")
	if !found {
		return "", "", errors.New("no user and password with a colon in between")
	}
	return user, password, nil
}

// registryHost is the host and port of a key of a config.json, or of a registry as
// an engine knows it. A path that isn't an API's version stays.
func registryHost(name string) string {
	name = strings.TrimPrefix(strings.TrimPrefix(name, "https://"), "http://")
	name = strings.TrimSuffix(name, "/")
	for _, version := range []string{"/v1", "/v2"} {
		name = strings.TrimSuffix(name, version)
	}
	if name == "docker.io" || name == "registry-1.docker.io" {
		return dockerHub
	}
	return name
}
