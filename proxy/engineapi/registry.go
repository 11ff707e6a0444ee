package engineapi

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"

	"github.com/distribution/reference"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// pullImage has the engine bring an image that the policy allows from its registry.
func pullImage(c *call) error {
	ref := c.query.Get("fromImage")
	if tag := c.query.Get("tag"); tag != "" {
		sep := ":"
		if strings.HasPrefix(tag, "sha256:") {
			sep = "@"
		}
		ref += sep + tag
	}
	if strings.Contains(familiar(ref), "moby/buildkit:buildx-") { // buildx's own, for its privileged container
		if err := c.judged(noBuildKit("fromImage")); err != nil {
			return err
		}
	}
	run, _, err := c.rules.ImageRef(c.caller.Profile, ref)
	if err := c.judged(err); err != nil {
		return err
	}
	if run == "" {
		run = ref // of mode audit
	}
	query, err := pullQuery(c, run)
	if err != nil {
		return err
	}
	auth, err := registryAuth(c.r.Header)
	if err != nil {
		return err
	}
	c.closeMessage = &closeMessage{form: jsonLines}
	return c.forward(upstream.Ask{Path: "/images/create", Query: query, Header: auth}, true)
}

// pullQuery asks the engine for one image: without a tag it would bring all of the repository.
func pullQuery(c *call, ref string) (url.Values, error) {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return nil, proxy.Malformed("invalid reference format")
	}
	query := url.Values{"fromImage": {named.Name()}}
	switch n := reference.TagNameOnly(named).(type) {
	case reference.Digested:
		query.Set("tag", n.Digest().String())
	case reference.Tagged:
		query.Set("tag", n.Tag())
	}
	if of := c.passed.Get("platform"); of != "" {
		query.Set("platform", of)
	}
	return query, nil
}

const maxRegistryAuth = 32 << 10

// registryAuth takes the header with which a client gives its credentials of a registry
// to the engine: a JSON object in base64. The header may be missing.
func registryAuth(h http.Header) (http.Header, error) {
	const name = "X-Registry-Auth"
	var auth map[string]json.RawMessage
	if err := registryHeader(h, name, &auth); err != nil || auth == nil {
		return nil, err
	}
	text, err := json.Marshal(auth)
	if err != nil {
		return nil, err
	}
	return http.Header{name: {base64.URLEncoding.EncodeToString(text)}}, nil
}

// registryAuths takes the header with which a client gives a build its credentials of
// registries, by their names.
func registryAuths(h http.Header) (map[string]json.RawMessage, error) {
	var auths map[string]json.RawMessage
	return auths, registryHeader(h, "X-Registry-Config", &auths)
}

func registryHeader(h http.Header, name string, into *map[string]json.RawMessage) error {
	text := h.Get(name)
	if text == "" {
		return nil
	}
	bad := proxy.Malformed("the header " + name + " is not a JSON object in base64")
	if len(text) > maxRegistryAuth || len(h.Values(name)) > 1 {
		return bad
	}
	decoded, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(text, "="))
	if err != nil {
		return bad
	}
	if string(decoded) == "null" { // some clients' way of having none
		return nil
	}
	if proxy.DecodeJSON(decoded, into) != nil {
		return bad
	}
	return nil
}

// registryOf is an image's registry, as clients name it in a build's credentials.
func registryOf(ref string) string {
	named, err := reference.ParseNormalizedNamed(ref)
	switch {
	case err != nil:
		return ""
	case reference.Domain(named) == "docker.io":
		return "https://index.docker.io/v1/"
	}
	return reference.Domain(named)
}
