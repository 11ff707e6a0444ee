package engineapi

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/distribution/reference"

	"github.com/bermhq/berm/policy"
)

func imageRoutes() []route {
	const one = "/images/{image}"
	return []route{
		{method: http.MethodGet, template: "/images/json", query: []string{"all", "filters", "digests", "shared-size"}, serve: (*call).listImages},
		{method: http.MethodPost, template: "/images/create", query: []string{"fromImage", "tag", "platform"}, change: true, serve: (*call).pullImage},
		{method: http.MethodGet, template: one + "/json", serve: (*call).inspectImage},
		{method: http.MethodGet, template: one + "/history", serve: (*call).imageHistory},
		{method: http.MethodPost, template: one + "/tag", query: []string{"repo", "tag"}, change: true, serve: (*call).tagImage},
		{method: http.MethodDelete, template: one, query: []string{"force", "noprune"}, change: true, serve: (*call).removeImage},
		{method: http.MethodPost, template: "/images/prune", query: []string{"filters"}, change: true, since: 25, serve: (*call).pruneImages},
		{method: http.MethodGet, template: one + "/get", serve: (*call).saveImage},
		{method: http.MethodGet, template: "/images/get", query: []string{"names*"}, serve: (*call).saveImages},
	}
}

func noImage(ref string) error { return notFound("No such image: " + familiar(ref)) }

// listed says which of an image's names the caller may see; not at all if nothing of it
// is the caller's business.
func (c *call) listed(tags, digests []string, labels map[string]string) (shownTags, shownDigests []string, ok bool) {
	own := c.own(labels)
	visible := func(names []string) []string {
		return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
			return !own && !c.rules.ListsImage(c.caller.Profile, []string{name})
		})
	}
	shownTags, shownDigests = visible(tags), visible(digests)
	return shownTags, shownDigests, own || len(shownTags) > 0 || len(shownDigests) > 0
}

// visibleImage gives an image that the caller may see, by a name, its ID or a prefix of it.
func (c *call) visibleImage(ref string) (*imageInfo, error) {
	if len(ref) > maxName || !printable(ref) {
		return nil, noImage(ref)
	}
	img, err := c.lookUpImage(ref)
	if err != nil {
		return nil, err
	}
	if img == nil {
		return nil, noImage(ref)
	}
	if _, _, ok := c.listed(img.RepoTags, img.RepoDigests, img.Config.Labels); !ok {
		return nil, noImage(ref)
	}
	c.about(img.ID)
	return img, nil
}

// listImages leaves out the images that the caller may not see, and the names of those
// that it may.
func (c *call) listImages() error {
	f, err := c.filters("before", "dangling", "label", "reference", "since", "until")
	if err != nil {
		return err
	}
	for _, name := range []string{"before", "since"} {
		for i, ref := range f[name] { // or it would tell whether it is there
			img, err := c.visibleImage(ref)
			if err != nil {
				return err
			}
			f[name][i] = img.ID
		}
	}
	query := url.Values{}
	for _, name := range []string{"all", "digests", "shared-size"} {
		if c.flag(name) {
			query.Set(name, "1")
		}
	}
	if len(f) > 0 {
		query.Set("filters", f.String())
	}
	var all []map[string]json.RawMessage
	if err := c.engine.get(c.ctx, c.version, "/images/json", query, &all); err != nil {
		return err
	}
	shown := []map[string]json.RawMessage{}
	for _, entry := range all {
		ok, err := c.trim(entry)
		if err != nil {
			return err
		}
		if ok {
			shown = append(shown, entry)
		}
	}
	return c.answer(http.StatusOK, shown)
}

// trim takes the names from an image's description that the caller may not see, and tells
// whether it may see it at all.
func (c *call) trim(entry map[string]json.RawMessage) (bool, error) {
	var img struct {
		RepoTags, RepoDigests []string
		Labels                map[string]string
		Config                struct{ Labels map[string]string }
	}
	for name, into := range map[string]any{"RepoTags": &img.RepoTags, "RepoDigests": &img.RepoDigests, "Labels": &img.Labels, "Config": &img.Config} {
		if raw, ok := entry[name]; ok {
			if err := json.Unmarshal(raw, into); err != nil {
				return false, fmt.Errorf("the engine's description of an image can't be read: %w", err)
			}
		}
	}
	if img.Labels == nil {
		img.Labels = img.Config.Labels
	}
	tags, digests, ok := c.listed(img.RepoTags, img.RepoDigests, img.Labels)
	var err error
	if entry["RepoTags"], err = json.Marshal(tags); err != nil {
		return false, err
	}
	if entry["RepoDigests"], err = json.Marshal(digests); err != nil {
		return false, err
	}
	return ok, nil
}

func (c *call) inspectImage() error {
	img, err := c.visibleImage(c.name)
	if err != nil {
		return err
	}
	var told map[string]json.RawMessage
	if err := c.engine.get(c.ctx, c.version, "/images/"+img.ID+"/json", nil, &told); err != nil {
		return err
	}
	if ok, err := c.trim(told); err != nil || !ok {
		return noImage(c.name)
	}
	return c.answer(http.StatusOK, told)
}

// imageHistory tells how an image was built, and no other images' names.
func (c *call) imageHistory() error {
	img, err := c.visibleImage(c.name)
	if err != nil {
		return err
	}
	var layers []map[string]json.RawMessage
	if err := c.engine.get(c.ctx, c.version, "/images/"+img.ID+"/history", nil, &layers); err != nil {
		return err
	}
	for _, layer := range layers {
		var tags []string
		if err := json.Unmarshal(layer["Tags"], &tags); err != nil {
			return fmt.Errorf("the engine's history of an image can't be read: %w", err)
		}
		tags, _, _ = c.listed(tags, nil, nil)
		if layer["Tags"], err = json.Marshal(tags); err != nil {
			return err
		}
	}
	return c.answer(http.StatusOK, layers)
}

// pullImage has the engine bring an image that the policy allows from its registry.
func (c *call) pullImage() error {
	if err := c.operation(policy.OpPull); err != nil {
		return err
	}
	ref := c.query.Get("fromImage")
	if tag := c.query.Get("tag"); tag != "" {
		sep := ":"
		if strings.HasPrefix(tag, "sha256:") {
			sep = "@"
		}
		ref += sep + tag
	}
	run, _, err := c.rules.ImageRef(c.caller.Profile, ref)
	if err := c.judged(err); err != nil {
		return err
	}
	if run == "" {
		run = ref // of mode audit
	}
	named, err := reference.ParseNormalizedNamed(run)
	if err != nil {
		return malformed("invalid reference format")
	}
	named = reference.TagNameOnly(named)
	query := url.Values{"fromImage": {named.Name()}}
	switch n := named.(type) {
	case reference.Digested:
		query.Set("tag", n.Digest().String())
	case reference.Tagged:
		query.Set("tag", n.Tag())
	}
	if p := c.query.Get("platform"); p != "" {
		if !platform.MatchString(p) {
			return malformed("the platform is none")
		}
		query.Set("platform", p)
	}
	auth, err := registryAuth(c.r.Header, "X-Registry-Auth")
	if err != nil {
		return err
	}
	return c.forward(ask{path: "/images/create", query: query, header: auth}, true)
}

const maxRegistryAuth = 32 << 10

// registryAuth takes the header with which a client gives its credentials of a registry
// to the engine: a JSON object in base64. The header may be missing.
func registryAuth(h http.Header, name string) (http.Header, error) {
	text := h.Get(name)
	if text == "" {
		return nil, nil
	}
	bad := malformed("the header " + name + " is not a JSON object in base64")
	if len(text) > maxRegistryAuth || len(h.Values(name)) > 1 {
		return nil, bad
	}
	decoded, err := base64.URLEncoding.DecodeString(text)
	if err != nil {
		if decoded, err = base64.RawURLEncoding.DecodeString(text); err != nil {
			return nil, bad
		}
	}
	var object map[string]json.RawMessage
	if strictJSON(decoded, &object) != nil {
		return nil, bad
	}
	return http.Header{name: {base64.URLEncoding.EncodeToString(decoded)}}, nil
}

// tagImage gives a name of the caller's to an image that it may see.
func (c *call) tagImage() error {
	img, err := c.visibleImage(c.name)
	if err != nil {
		return err
	}
	target, err := c.target(c.query.Get("repo"), c.query.Get("tag"))
	if err != nil {
		return err
	}
	err = c.engine.post(c.ctx, c.version, "/images/"+img.ID+"/tag", target, nil, nil)
	if err != nil {
		return err
	}
	c.w.Header().Set("Api-Version", c.version.String())
	c.w.WriteHeader(http.StatusCreated)
	return nil
}

// target judges a name that the caller wants to give to an image, and gives it as the
// parameters of a call.
func (c *call) target(repo, tag string) (url.Values, error) {
	ref := repo
	if tag != "" {
		ref += ":" + tag
	}
	name, err := c.rules.TagRef(c.caller.Profile, ref)
	if err := c.judged(err); err != nil {
		return nil, err
	}
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return nil, malformed("invalid reference format")
	}
	tagged, ok := reference.TagNameOnly(named).(reference.NamedTagged)
	if !ok {
		return nil, malformed("refusing to create a tag with a digest reference")
	}
	return url.Values{"repo": {tagged.Name()}, "tag": {tagged.Tag()}}, nil
}

// removeImage takes a name from an image, and the image away with its last one. By its ID
// only an image goes of which every name is the caller's to take.
func (c *call) removeImage() error {
	if c.flag("force") {
		return denied("images.force", "force", "an image can't be removed by force, as others may be using it", "no force")
	}
	img, err := c.visibleImage(c.name)
	if err != nil {
		return err
	}
	ref := img.ID
	named, err := reference.ParseNormalizedNamed(c.name)
	byName := err == nil && slices.ContainsFunc(slices.Concat(img.RepoTags, img.RepoDigests), func(name string) bool { return sameImage(name, c.name) })
	switch {
	case byName:
		ref = reference.FamiliarString(reference.TagNameOnly(named))
		if _, _, ok := c.listed([]string{ref}, nil, img.Config.Labels); !ok {
			return noImage(c.name)
		}
	case !c.own(img.Config.Labels):
		tags, _, _ := c.listed(img.RepoTags, nil, nil)
		if len(tags) != len(img.RepoTags) {
			return conflict("the image has further names, which are not the caller's to take: remove it by name")
		}
	}
	query := url.Values{}
	if c.flag("noprune") {
		query.Set("noprune", "1")
	}
	return c.forward(ask{path: "/images/" + ref, query: query}, false)
}

// pruneImages removes the images that the caller built and nobody uses.
func (c *call) pruneImages() error {
	f, err := c.filters("dangling", "until", "label", "label!")
	if err != nil {
		return err
	}
	return c.forward(ask{path: "/images/prune", query: url.Values{"filters": {c.onlyOwn(f).String()}}}, false)
}

func (c *call) saveImage() error { return c.save([]string{c.name}) }

func (c *call) saveImages() error { return c.save(c.query["names"]) }

const maxSaved = 64

// save gives images as an archive, by names that the caller may see.
func (c *call) save(refs []string) error {
	if len(refs) == 0 || len(refs) > maxSaved {
		return malformed(fmt.Sprintf("the names of 1 to %d images are needed", maxSaved))
	}
	if err := c.operation(policy.OpArchive); err != nil {
		return err
	}
	query := url.Values{}
	for _, ref := range refs {
		img, err := c.visibleImage(ref)
		if err != nil {
			return err
		}
		name := img.ID
		if slices.ContainsFunc(img.RepoTags, func(tag string) bool { return sameImage(tag, ref) }) {
			if _, _, ok := c.listed([]string{ref}, nil, img.Config.Labels); ok {
				name = familiar(ref)
			}
		}
		query.Add("names", name)
	}
	return c.forward(ask{path: "/images/get", query: query}, false)
}
