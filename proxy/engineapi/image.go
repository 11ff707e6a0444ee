package engineapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/buildkit"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/distribution/reference"
	"github.com/docker/docker/api/types/image"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

func noImage(ref string) error { return notFound("No such image: " + familiar(ref)) }

// listedImage returns the names of an image that the caller may see. Ok is false if the caller may
// not see the image at all.
func listedImage(c *call, tags, digests []string, labels map[string]string) (shownTags, shownDigests []string, ok bool) {
	own := ownImage(c, labels)
	visible := func(names []string) []string {
		return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
			return strings.HasPrefix(name, buildkit.PinHost) || !own && !c.rules.ListsImage(c.caller.Profile, []string{name})
		})
	}
	shownTags, shownDigests = visible(tags), visible(digests)
	return shownTags, shownDigests, own || len(shownTags) > 0 || len(shownDigests) > 0
}

// visibleImage returns an image that the caller may see, by a name, its ID or a prefix of the ID.
func visibleImage(c *call, ref string) (*imageInfo, error) {
	if len(ref) > maxName || !printable(ref) {
		return nil, noImage(ref)
	}
	img, err := seenImage(c, ref)
	if err != nil {
		return nil, err
	}
	if img == nil {
		return nil, noImage(ref)
	}
	c.about(img.ID)
	return img, nil
}

// seenImage is lookUpImage among the images that the caller may see. If ref is a prefix of several
// IDs, images that the caller may not see don't count.
func seenImage(c *call, ref string) (*imageInfo, error) {
	img, err := lookUpImage(c, ref)
	if err != nil || img != nil && seesImage(c, img) {
		return img, err
	}
	start, ok := strings.CutPrefix(ref, "sha256:")
	if !idStart.MatchString(start) || !ok && strings.Contains(ref, ":") {
		return nil, nil
	}
	var found []string
	err = each(c.ctx, c.Proxy, c.version, lifecycle.ObjectImage, url.Values{"all": {"1"}}, func(o *listed) {
		if _, _, ok := listedImage(c, o.RepoTags, o.RepoDigests, o.Labels); ok && strings.HasPrefix(o.ID, "sha256:"+start) {
			found = append(found, o.ID)
		}
	})
	if err != nil || len(found) != 1 {
		return nil, err
	}
	return lookUpImage(c, found[0])
}

func seesImage(c *call, img *imageInfo) bool {
	_, _, ok := listedImage(c, img.RepoTags, img.RepoDigests, img.Config.Labels)
	return ok
}

// listImages lists the images that the caller may see, each with only the names that it may see.
func listImages(c *call) error {
	for _, name := range []string{"before", "since"} {
		for i, ref := range c.filter[name] { // an unseen image would show its existence
			img, err := visibleImage(c, ref)
			if err != nil {
				return err
			}
			c.filter[name][i] = img.ID
		}
	}
	names := c.filter["reference"]
	delete(c.filter, "reference") // the engine would also match names that the caller may not see
	if len(c.filter) > 0 {
		c.passed.Set("filters", c.filter.String())
	}
	for _, pattern := range names {
		if _, err := path.Match(pattern, ""); err != nil {
			return proxy.Malformed("the filter \"reference\" has a pattern that is none")
		}
	}
	return relayEntries(c, upstream.Ask{Path: "/images/json", Query: c.passed}, "[", "]\n", nil, func(_ string, entry json.RawMessage) (json.RawMessage, error) {
		return trimImage(c, entry, names)
	})
}

// trimImage removes from an image's description what the caller may not see: names, Berm's labels,
// and other callers' containers. If there are patterns, it also removes names that match none. It
// returns nil if the caller may not see the image.
func trimImage(c *call, entry json.RawMessage, patterns []string) (json.RawMessage, error) {
	var img struct {
		imageInfo
		Labels map[string]string // in a list
	}
	if err := json.Unmarshal(entry, &img); err != nil {
		return nil, fmt.Errorf("the engine's description of an image can't be read: %w", err)
	}
	if img.Labels == nil {
		img.Labels = img.Config.Labels
	}
	tags, digests, ok := listedImage(c, img.RepoTags, img.RepoDigests, img.Labels)
	var err error
	if len(patterns) > 0 {
		if tags, err = matching(tags, patterns); err != nil {
			return nil, err
		}
		if digests, err = matching(digests, patterns); err != nil {
			return nil, err
		}
		ok = ok && len(tags)+len(digests) > 0
	}
	if !ok {
		return nil, nil
	}
	if entry, err = trimContainers(c, entry, img.ID); err != nil {
		return nil, err
	}
	for _, path := range [][]string{{"Labels"}, {"Config", "Labels"}} {
		if entry, err = hideLabels(c, entry, path...); err != nil {
			return nil, err
		}
	}
	for name, shown := range map[string][]string{"RepoTags": tags, "RepoDigests": digests} {
		if entry, err = edit(entry, func(names *[]string) { *names = shown }, name); err != nil {
			return nil, err
		}
	}
	return entry, nil
}

// matching returns the names that match one of the patterns by the engine's rules.
func matching(names, patterns []string) ([]string, error) {
	out := []string{}
	for _, name := range names {
		ref, err := reference.ParseDockerRef(name)
		if err != nil {
			continue // such as "<none>:<none>"
		}
		for _, pattern := range patterns {
			ok, err := reference.FamiliarMatch(pattern, ref)
			if err != nil {
				return nil, proxy.Malformed("the filter \"reference\" has a pattern that is none")
			}
			if ok {
				out = append(out, name)
				break
			}
		}
	}
	return out, nil
}

func inspectImage(c *call) error {
	img, err := visibleImage(c, c.name)
	if err != nil {
		return err
	}
	var raw json.RawMessage
	if err := c.engine.Get(c.ctx, c.version, "/images/"+img.ID+"/json", c.passed, &raw); err != nil {
		return err
	}
	if raw, err = trimImage(c, raw, nil); err != nil || raw == nil {
		return noImage(c.name)
	}
	// The values are paths of layers on the host. Newer engines' image stores have none.
	raw, err = edit(raw, func(data *map[string]string) {
		for name := range *data {
			(*data)[name] = redacted
		}
	}, "GraphDriver", "Data")
	if err != nil {
		return err
	}
	var told map[string]json.RawMessage
	if err := json.Unmarshal(raw, &told); err != nil {
		return fmt.Errorf("the engine's description of an image can't be read: %w", err)
	}
	// The engine's ContainerConfig has the environment of the container that the image was made from.
	if delete(told, "ContainerConfig"); told["Config"] != nil && c.version < 45 {
		told["ContainerConfig"] = told["Config"]
	}
	return c.answer(http.StatusOK, told)
}

// imageHistory answers how an image was built, without names that the caller may not see.
func imageHistory(c *call) error {
	img, err := visibleImage(c, c.name)
	if err != nil {
		return err
	}
	var layers []json.RawMessage
	if err := c.engine.Get(c.ctx, c.version, "/images/"+img.ID+"/history", c.passed, &layers); err != nil {
		return err
	}
	labels := img.Config.Labels // the first entry is the image itself
	for i := range layers {
		layers[i], err = edit(layers[i], func(tags *[]string) { *tags, _, _ = listedImage(c, *tags, nil, labels) }, "Tags")
		if err != nil {
			return err
		}
		labels = nil
	}
	return c.answer(http.StatusOK, layers)
}

// tagImage tags an image that the caller may see, if the policy allows the name.
func tagImage(c *call) error {
	img, err := visibleImage(c, c.name)
	if err != nil {
		return err
	}
	name, err := judgedName(c, c.rules.TagRef, withTag(c.query.Get("repo"), c.query.Get("tag")))
	if err != nil {
		return err
	}
	if !ownImage(c, img.Config.Labels) && !c.rules.ListsImage(c.caller.Profile, []string{name.String()}) {
		err := c.allow([]policy.Reason{{Rule: "images.tags", Field: "repo", Allowed: "names that are on the policy's allow-list, or images of one's own",
			Message: fmt.Sprintf("the image isn't the caller's own, and so would not be found by the name %q", body.Shorten(name.String()))}})
		if err != nil {
			return err
		}
	}
	if err := tagAs(c, img.ID, name); err != nil {
		return err
	}
	return c.status(http.StatusCreated)
}

// lockName keeps an image's name from being moved until unlock. It waits up to AskTimeout for a
// name in use, such as one that is being pushed.
func lockName(c *call, name string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeoutCause(c.ctx, upstream.AskTimeout, conflict(fmt.Sprintf("the image name %q is in use", familiar(name))))
	defer cancel()
	return c.names.Lock(ctx, name)
}

// lockNames is lockName for references. It ignores those that aren't tags. Without the lock, a judged
// name could move to another image before the engine uses it.
func lockNames(c *call, refs ...string) (unlock func(), err error) {
	names := map[string]bool{}
	for _, ref := range refs {
		if name, err := taggedName(ref); err == nil {
			names[name.String()] = true
		}
	}
	var unlocks []func()
	unlock = func() {
		for _, f := range unlocks {
			f()
		}
	}
	for _, name := range sortedKeys(names) { // in one order, so that no two callers wait for each other
		f, err := lockName(c, name)
		if err != nil {
			unlock()
			return nil, err
		}
		unlocks = append(unlocks, f)
	}
	return unlock, nil
}

// tagAs gives an image a judged name, unless an image of another caller has it. It locks the name,
// since otherwise two calls could find it free.
func tagAs(c *call, id string, name reference.NamedTagged) error {
	unlock, err := lockName(c, name.String())
	if err != nil {
		return err
	}
	defer unlock()
	there, err := lookUpImage(c, name.String())
	if err != nil {
		return err
	}
	if there != nil && othersImage(c, there.Config.Labels) {
		return conflict(fmt.Sprintf("the image name %q is taken", reference.FamiliarString(name)))
	}
	if short, ok := strings.CutSuffix(reference.FamiliarString(name), ":latest"); ok {
		if err := checkIDName(c, lifecycle.ObjectImage, short); err != nil {
			return err
		}
	}
	return c.engine.Post(c.ctx, c.version, "/images/"+id+"/tag", url.Values{"repo": {name.Name()}, "tag": {name.Tag()}}, nil, nil)
}

// withTag joins a repository and a tag, which may be empty.
func withTag(repo, tag string) string {
	if tag == "" {
		return repo
	}
	return repo + ":" + tag
}

// judgedName judges, by a rule of the policy, a name for an image to be tagged or pushed.
func judgedName(c *call, rule func(profile, ref string) (string, error), ref string) (reference.NamedTagged, error) {
	name, err := rule(c.caller.Profile, ref)
	if err := c.judged(err); err != nil {
		return nil, err
	}
	return taggedName(cmp.Or(name, ref)) // name may be empty in mode audit
}

// taggedName returns an image's full name.
func taggedName(name string) (reference.NamedTagged, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return nil, proxy.Malformed("invalid reference format")
	}
	tagged, ok := reference.TagNameOnly(named).(reference.NamedTagged)
	if _, digested := named.(reference.Digested); !ok || digested {
		return nil, proxy.Malformed("refusing to create a tag with a digest reference")
	}
	return tagged, nil
}

// verifyImage fails unless a new image has exactly the labels of Berm's that it was made with. Claims
// reports whether img has the caller's labels and the session ID in want. If not, it may be any image.
func verifyImage(c *call, img *imageInfo, rule string, want map[string]string) (claims bool, err error) {
	if img == nil {
		return false, errors.New("the image is gone")
	}
	c.about(img.ID)
	has := img.Config.Labels
	if !claimsImage(c, has) || has[lifecycle.LabelSessionID] != want[lifecycle.LabelSessionID] {
		return false, denied(rule, "", "the image lacks the labels that it was made with", "none")
	}
	for _, name := range slices.Concat(sortedKeys(has), sortedKeys(want)) { // the seal is among them
		if lifecycle.IsOwnLabel(name) && has[name] != want[name] {
			return true, denied(rule, "", "the image has other labels of Berm's than it was made with", "none")
		}
	}
	return true, nil
}

// nameVerified gives a new image its names once verifyImage accepts it. It removes an image that
// verifyImage refuses although it claims to be the new one.
func nameVerified(c *call, img *imageInfo, rule string, want map[string]string, names []reference.NamedTagged, named func(name string)) error {
	claims, err := verifyImage(c, img, rule, want)
	if err == nil {
		return nameImage(c, img, names, named)
	}
	if claims {
		removeUnwanted(c, "/images/"+img.ID, nil)
	}
	return err
}

// nameImage gives an image its names, and calls named after each.
func nameImage(c *call, img *imageInfo, names []reference.NamedTagged, named func(name string)) error {
	for _, name := range names {
		if err := tagAs(c, img.ID, name); err != nil {
			return err
		}
		named(reference.FamiliarString(name))
	}
	return nil
}

// replaceable refuses to remove names that the caller couldn't restore from an image that isn't its own.
// It can restore a name that it may give to images, and an image from a registry if it may pull.
func replaceable(c *call, img *imageInfo, names []string) error {
	if othersImage(c, img.Config.Labels) {
		return denied("images.foreign", "", "the image isn't the caller's own", "images of one's own")
	}
	var pulled []string
	for _, digest := range img.RepoDigests {
		repo, _, _ := strings.Cut(digest, "@")
		pulled = append(pulled, repo)
	}
	for _, name := range names {
		if _, err := c.rules.TagRef(c.caller.Profile, name); err == nil {
			continue
		}
		if err := c.operation(policy.OpPull); err != nil {
			return err
		}
		named, err := reference.ParseNormalizedNamed(name)
		if err != nil || !slices.Contains(pulled, reference.FamiliarName(named)) && !slices.Contains(pulled, named.Name()) {
			return denied("images.foreign", "", fmt.Sprintf("the image %q isn't the caller's own, and came from no registry", body.Shorten(name)), "images of one's own, and those that can be pulled again")
		}
	}
	return nil
}

// removeImage removes a name of an image, and the image with its last name. Given an ID, it removes the
// image only if the caller may remove all of its names.
func removeImage(c *call) error {
	if err := c.untilEnd(lockNames(c, c.name)); err != nil {
		return err
	}
	img, err := visibleImage(c, c.name)
	if err != nil {
		return err
	}
	own := ownImage(c, img.Config.Labels)
	if c.flag("force") && !own {
		return denied("images.force", "force", "an image that isn't the caller's own can't be removed by force, as others may be using it", "no force")
	}
	ref := img.ID
	names := slices.Concat(img.RepoTags, img.RepoDigests)
	taken := names
	if slices.ContainsFunc(names, func(name string) bool { return sameImage(name, c.name) }) {
		ref = familiar(c.name)
		if _, _, ok := listedImage(c, []string{ref}, nil, img.Config.Labels); !ok {
			return noImage(c.name)
		}
		taken = []string{ref}
	} else if tags, digests, _ := listedImage(c, img.RepoTags, img.RepoDigests, img.Config.Labels); len(tags)+len(digests) != len(names) {
		return conflict("the image has further names, which are not the caller's to take: remove it by name")
	}
	if !own {
		if err := replaceable(c, img, taken); err != nil {
			return err
		}
	}
	var gone []image.DeleteResponse
	err = c.engine.Do(c.ctx, upstream.Ask{Method: http.MethodDelete, Version: c.version, Path: "/images/" + ref, Query: c.passed, Long: true}, &gone)
	if upstream.StatusOf(err) == http.StatusConflict { // the engine names the container, whosever it is
		return conflict(fmt.Sprintf("conflict: unable to remove image %q: a container is using it, or it has further names or images made of it", familiar(c.name)))
	}
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, goneOf(c, img.ID, img.Config.Labels, gone))
}

// goneOf returns what the caller may know of a removal: names that it may see, and the image
// itself. The engine also lists the IDs of images that the image was made from.
func goneOf(c *call, id string, labels map[string]string, gone []image.DeleteResponse) []image.DeleteResponse {
	return slices.DeleteFunc(append([]image.DeleteResponse{}, gone...), func(d image.DeleteResponse) bool {
		_, _, ok := listedImage(c, []string{d.Untagged}, nil, labels)
		return (d.Untagged == "" || !ok) && d.Deleted != id
	})
}

func saveImage(c *call) error { return saveNamed(c, []string{c.name}) }

func saveImages(c *call) error { return saveNamed(c, c.query["names"]) }

const maxSaved = 64

// saveNamed answers an archive of images, with only those names that the caller may see.
func saveNamed(c *call, refs []string) error {
	if len(refs) == 0 || len(refs) > maxSaved {
		return proxy.Malformed(fmt.Sprintf("the names of 1 to %d images are needed", maxSaved))
	}
	unlock, err := lockNames(c, refs...)
	if err != nil {
		return err
	}
	defer unlock()
	query := c.passed
	for _, ref := range refs {
		img, err := visibleImage(c, ref)
		if err != nil {
			return err
		}
		name := img.ID // saved by its ID, an image has no name in the archive
		if slices.ContainsFunc(img.RepoTags, func(tag string) bool { return sameImage(tag, ref) }) {
			if _, _, ok := listedImage(c, []string{ref}, nil, img.Config.Labels); ok {
				name = familiar(ref)
			}
		}
		query.Add("names", name)
	}
	if err := c.untilEnd(c.enter("saves of images", maxSaves)); err != nil {
		return err
	}
	return transferArchive(c, time.Now().Add(saveTime), func(context.CancelCauseFunc, io.Reader) error {
		resp, err := c.ask(upstream.Ask{Path: "/images/get", Query: query}) //nolint:bodyclose // relay closes it
		if err != nil {
			return err
		}
		unlock() // the engine looks up all names before it answers
		return c.relay(resp, false)
	})
}
