package engineapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/distribution/reference"
	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

const maxComment = 4 << 10

// short passes on a text of at most maxComment bytes.
func short(name, value string) (string, error) {
	if len(value) > maxComment {
		return "", proxy.Malformed(fmt.Sprintf("the %s is over %d bytes", name, maxComment))
	}
	return value, nil
}

// commit creates an image of the caller's from one of its containers. It refuses a container with
// variables that the policy redacts: the engine copies the container's whole configuration into the
// image, even if the request replaces it.
func commit(c *call) error {
	var config *body.Config
	if c.r.ContentLength != 0 {
		if err := decode(c, &config); err != nil {
			return err
		}
	}
	configured, ok := configChanges(config)
	if !ok {
		return denied("commit.config", "", "an image can't be given this configuration", "Cmd, Entrypoint, Env, ExposedPorts, Labels, User, Volumes and WorkingDir")
	}
	changes, labels, err := imageChanges(c, configured)
	if err != nil {
		return err
	}
	ct, _, err := c.container(c.query.Get("container"))
	if err != nil {
		return err
	}
	if err := refuseUnconfined(c); err != nil {
		return err
	}
	names, err := askedName(c, c.rules.TagRef)
	if err != nil {
		return err
	}
	query := c.passed
	query.Set("container", ct.ID)
	query.Set("pause", "1")
	if c.query.Get("pause") != "" && !c.flag("pause") {
		query.Set("pause", "0")
	}
	query["changes"] = changes
	for _, e := range ct.Config.Env {
		if name, _, _ := strings.Cut(e, "="); c.rules.Redacted(c.caller.Profile, name) {
			return denied("commit.env", "", fmt.Sprintf("the variable %q is kept back from the caller, and the engine would keep it in the image", body.Shorten(name)), "containers without such variables")
		}
	}
	if err := c.untilEnd(c.room("images", 1)); err != nil {
		return err
	}
	var made container.CommitResponse
	if err := c.engine.Post(c.ctx, c.version, "/commit", query, nil, &made); err != nil {
		return err
	}
	if !builtID.MatchString(made.ID) {
		return fmt.Errorf("commit: the engine's answer has no ID")
	}
	if err := committed(c, made.ID, labels, names); err != nil {
		return err
	}
	return c.answer(http.StatusCreated, made)
}

// configChanges translates the configuration in a commit's body into Dockerfile instructions, to be
// judged like a caller's. Ok is false if the body has a field that no instruction sets.
func configChanges(config *body.Config) (changes []string, ok bool) {
	if config == nil {
		return nil, true
	}
	left := *config
	for _, set := range []struct {
		name  string
		words []string
	}{{"ENTRYPOINT", left.Entrypoint}, {"CMD", left.Cmd}, {"VOLUME", slices.Sorted(maps.Keys(left.Volumes))}} { // in this order: ENTRYPOINT resets CMD
		if text, err := json.Marshal(set.words); err == nil && len(set.words) > 0 {
			changes = append(changes, set.name+" "+string(text))
		}
	}
	for _, variable := range left.Env {
		name, value, _ := strings.Cut(variable, "=")
		changes = append(changes, "ENV "+name+"="+dockerfileQuote(value))
	}
	for _, name := range slices.Sorted(maps.Keys(left.Labels)) {
		changes = append(changes, "LABEL "+name+"="+dockerfileQuote(left.Labels[name]))
	}
	for port := range left.ExposedPorts {
		changes = append(changes, "EXPOSE "+string(port))
	}
	for name, value := range map[string]string{"USER": left.User, "WORKDIR": left.WorkingDir} {
		if value != "" {
			changes = append(changes, name+" "+dockerfileQuote(value))
		}
	}
	left.Entrypoint, left.Cmd, left.Env, left.Labels, left.User, left.WorkingDir = nil, nil, nil, nil, "", ""
	left.Volumes, left.ExposedPorts = nil, nil
	return changes, reflect.ValueOf(left).IsZero()
}

// askedName judges the name for a new image in the query. It returns none if the query has none.
func askedName(c *call, rule func(profile, ref string) (string, error)) ([]reference.NamedTagged, error) {
	if c.query.Get("repo") == "" {
		return nil, nil
	}
	name, err := judgedName(c, rule, withTag(c.query.Get("repo"), c.query.Get("tag")))
	return []reference.NamedTagged{name}, err
}

// committed verifies a new image, and then names it. If that fails, it removes the image.
func committed(c *call, id string, labels map[string]string, names []reference.NamedTagged) error {
	c.about(id)
	img, err := lookUpImage(c, id)
	if err == nil {
		_, err = verifyImage(c, img, "verify.commit", labels)
	}
	if err == nil {
		err = nameImage(c, img, names, func(string) {})
	}
	if err != nil {
		removeUnwanted(c, "/images/"+id, nil)
	}
	return err
}

// dockerfileQuote writes a text as one word of a Dockerfile.
func dockerfileQuote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`).Replace(s) + `"`
}

// createImage pulls an image, or imports one from the files in the body.
func createImage(c *call) error {
	if c.query.Get("fromImage") == "" && c.query.Get("fromSrc") == "-" {
		return importImage(c)
	}
	for _, name := range []string{"fromSrc", "repo", "message", "changes"} {
		for _, value := range c.query[name] {
			if _, err := unoffered(name, value); err != nil {
				return err
			}
		}
	}
	if err := c.operation(policy.OpPull); err != nil {
		return err
	}
	if c.r.ContentLength != 0 {
		if err := dropBody(c); err != nil {
			return err
		}
	}
	return pullImage(c)
}

// importImage makes the engine create an image of one layer from an archive of files. The image gets its
// name once it is verified.
func importImage(c *call) error {
	if err := c.operation(policy.OpLoad); err != nil {
		return err
	}
	changes, labels, err := imageChanges(c, nil)
	if err != nil {
		return err
	}
	names, err := askedName(c, c.rules.LoadRef)
	if err != nil {
		return err
	}
	if err := c.untilEnd(c.enter("loads of images", maxLoads)); err != nil {
		return err
	}
	if err := c.untilEnd(c.room("images", 1)); err != nil {
		return err
	}
	query := c.passed
	query.Set("fromSrc", "-")
	query["changes"] = changes
	return transferArchive(c, time.Now().Add(saveTime), func(_ context.CancelCauseFunc, r io.Reader) error {
		files, err := openTar(r, maxLoaded)
		if err != nil {
			return err
		}
		id, err := sendImport(c, query, files)
		if err != nil {
			return err
		}
		if err := committed(c, id, labels, names); err != nil {
			return err
		}
		return c.answer(http.StatusOK, map[string]string{"status": id})
	})
}

// sendImport makes the engine import the files, and returns the image's ID.
func sendImport(c *call, query url.Values, files io.Reader) (id string, err error) {
	ask := upstream.Ask{Path: "/images/create", Query: query, Header: http.Header{"Content-Type": {"application/x-tar"}}, Body: files, Length: -1}
	err = eachMessage(c, ask, http.StatusInternalServerError, func(m buildMessage) { id = m.Status })
	if err == nil && !builtID.MatchString(id) {
		err = errors.New("import: the engine's answer has no ID")
	}
	return id, err
}

// imageChanges judges the changes to an image's configuration, and adds the labels of the owner. The
// changes in configured, from a body, come before those of the query.
func imageChanges(c *call, configured []string) (changes []string, labels map[string]string, err error) {
	if changes, err = readChanges(append(configured, c.query["changes"]...)); err != nil {
		return nil, nil, denied("commit.config", "changes", "the changes are refused: "+err.Error(), strings.Join(commitInstructions, ", "))
	}
	if labels, err = stampLabels(c, lifecycle.ObjectImage, nil); err != nil {
		return nil, nil, err
	}
	for _, name := range sortedKeys(labels) { // last, or a change could replace them
		changes = append(changes, "LABEL "+name+"="+dockerfileQuote(labels[name]))
	}
	return changes, labels, nil
}
