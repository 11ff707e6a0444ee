package engineapi

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/distribution/reference"
	"github.com/docker/docker/api/types/registry"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// pullImage pulls an image that the policy allows.
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
	run, err := runRef(c, ref)
	if err != nil {
		return err
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

// runRef judges an image's reference, and returns the reference to run, which may be a pinned one.
func runRef(c *call, ref string) (string, error) {
	run, _, err := c.rules.ImageRef(c.caller.Profile, ref)
	return cmp.Or(run, ref), c.judged(err) // run may be empty in mode audit
}

// pullQuery returns the query for a pull of one image. Without a tag, the engine would pull all of a
// repository.
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

// distribution looks an image up at its registry, as a pull does.
func distribution(c *call) error {
	run, err := runRef(c, c.name)
	if err != nil {
		return err
	}
	named, err := reference.ParseNormalizedNamed(run)
	if err != nil {
		return proxy.Malformed("invalid reference format")
	}
	auth, err := registryAuth(c.r.Header)
	if err != nil {
		return err
	}
	return c.forward(upstream.Ask{Path: "/distribution/" + reference.TagNameOnly(named).String() + "/json", Header: auth}, false)
}

// pushImage pushes an image to its registry. It locks the name, by which the engine finds the image,
// until the push ends.
func pushImage(c *call) error {
	ref := withTag(c.name, c.query.Get("tag"))
	named, err := reference.ParseNormalizedNamed(c.name)
	_, digested := named.(reference.Digested)
	switch {
	case err != nil || digested || ref != c.name && !reference.IsNameOnly(named):
		return proxy.Malformed("invalid reference format")
	case ref == c.name && reference.IsNameOnly(named):
		return denied("images.push", "tag", "a push of all tags of a repository is refused", "one tag")
	}
	name, err := judgedName(c, c.rules.PushRef, ref)
	if err != nil {
		return err
	}
	auth, err := pushAuth(c.r.Header, name)
	if err != nil {
		return err
	}
	if err := c.untilEnd(lockName(c, name.String())); err != nil {
		return err
	}
	img, err := visibleImage(c, name.String())
	if err != nil {
		return err
	}
	if _, _, ok := listedImage(c, []string{name.String()}, nil, img.Config.Labels); !ok { // it may be seen by another name
		return noImage(name.String())
	}
	c.closeMessage = &closeMessage{form: jsonLines}
	return transferArchive(c, time.Now().Add(saveTime), func(context.CancelCauseFunc, io.Reader) error { // or a caller that doesn't read would keep the name locked
		return c.forward(upstream.Ask{Path: "/images/" + name.Name() + "/push", Query: url.Values{"tag": {name.Tag()}}, Header: auth}, true)
	})
}

// pushAuth is registryAuth for a push. It always returns the header, which engines require, and refuses
// credentials for another registry than the image's.
func pushAuth(h http.Header, name reference.Named) (http.Header, error) {
	auth, err := registryHeader[credentials](h, authHeader)
	if err != nil {
		return nil, err
	}
	if domain := reference.Domain(name); auth.ServerAddress != "" && registryName(auth.ServerAddress) != domain {
		return nil, denied("images.push", authHeader, "the credentials are those of another registry than the image's", domain)
	}
	return encodedAuth(auth)
}

// dockerHub is the name of the registry docker.io in credentials.
const dockerHub = "https://index.docker.io/v1/"

// registryName returns the name that images have for a registry, from its address in credentials.
func registryName(address string) string {
	switch address {
	case dockerHub, "index.docker.io":
		return "docker.io"
	}
	return strings.TrimSuffix(strings.TrimPrefix(address, "https://"), "/")
}

// credentials are a client's credentials for a registry.
type credentials = registry.AuthConfig

const maxLogins = 4 // of a tenant at once

// login makes the engine check a caller's credentials. The engine connects to the registry that they
// name, and to the token server that the registry names.
func login(c *call, asked *credentials) error {
	name := registryName(cmp.Or(asked.ServerAddress, dockerHub))
	asked.ServerAddress = name
	if name == "docker.io" {
		asked.ServerAddress = dockerHub
	}
	if err := c.judged(c.rules.Login(c.caller.Profile, name)); err != nil {
		return err
	}
	if err := c.untilEnd(c.enter("logins", maxLogins)); err != nil {
		return err
	}
	return c.forward(upstream.Ask{Path: "/auth", JSON: asked}, false)
}

const (
	maxRegistryAuth = 32 << 10
	authHeader      = "X-Registry-Auth"
)

// registryAuth checks the header with a client's credentials for a registry, a JSON object in base64, and
// writes it anew. Without the header, it returns nil.
func registryAuth(h http.Header) (http.Header, error) {
	auth, err := registryHeader[map[string]json.RawMessage](h, authHeader)
	if err != nil || auth == nil {
		return nil, err
	}
	return encodedAuth(auth)
}

// encodedAuth returns credentials as the engine gets them.
func encodedAuth(auth any) (http.Header, error) {
	text, err := json.Marshal(auth)
	return http.Header{authHeader: {base64.URLEncoding.EncodeToString(text)}}, err
}

// registryHeader decodes a header with credentials: those of one registry, or of several by their
// names, for a build.
func registryHeader[T any](h http.Header, name string) (auth T, err error) {
	text := h.Get(name)
	if text == "" {
		return auth, nil
	}
	decoded, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(text, "="))
	bad := err != nil || len(text) > maxRegistryAuth || len(h.Values(name)) > 1
	if !bad && string(decoded) != "null" { // some clients send null for none
		bad = proxy.DecodeJSON(decoded, &auth) != nil
	}
	if bad {
		return auth, proxy.Malformed("the header " + name + " is not a JSON object in base64")
	}
	return auth, nil
}

// registryOf returns an image's registry, as clients name it in a build's credentials.
func registryOf(ref string) string {
	named, err := reference.ParseNormalizedNamed(ref)
	switch {
	case err != nil:
		return ""
	case reference.Domain(named) == "docker.io":
		return dockerHub
	}
	return reference.Domain(named)
}
