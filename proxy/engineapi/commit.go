package engineapi

import (
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy"
)

const maxComment = 4 << 10

// short passes on a text that isn't long.
func short(name, value string) (string, error) {
	if len(value) > maxComment {
		return "", proxy.Malformed(fmt.Sprintf("the %s is over %d bytes", name, maxComment))
	}
	return value, nil
}

// commit makes an image of the caller's of one of its containers. A container with variables
// that the policy keeps back is refused, as the engine notes all of its configuration in
// the image, whatever that is given instead.
func commit(c *call) error {
	if c.r.ContentLength != 0 {
		var config *body.Config
		if err := decode(c, &config); err != nil {
			return err
		}
		if config != nil && !reflect.ValueOf(*config).IsZero() {
			return denied("commit.config", "", "an image can't be given another configuration than the container's", "none")
		}
	}
	changes, labels, err := imageChanges(c)
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
	var target url.Values
	if c.query.Get("repo") != "" {
		if target, err = tagTarget(c, c.query.Get("repo"), c.query.Get("tag")); err != nil {
			return err
		}
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
	leave, err := c.room("images", 1)
	if err != nil {
		return err
	}
	defer leave()
	var made struct {
		ID string `json:"Id"`
	}
	if err := c.engine.Post(c.ctx, c.version, "/commit", query, nil, &made); err != nil {
		return err
	}
	if !builtID.MatchString(made.ID) {
		return fmt.Errorf("commit: the engine's answer has no ID")
	}
	if err := committed(c, made.ID, labels, target); err != nil {
		removeUnwanted(c, "/images/"+made.ID, nil)
		return err
	}
	return c.answer(http.StatusCreated, made)
}

// committed looks at a new image before it gets its name.
func committed(c *call, id string, labels map[string]string, target url.Values) error {
	c.about(id)
	img, err := lookUpImage(c, id)
	if err != nil {
		return err
	}
	if img == nil || !ownImage(c, img.Config.Labels) {
		return denied("verify.commit", "", "the image lacks the labels that it was made with", "none")
	}
	for name, value := range labels {
		if img.Config.Labels[name] != value {
			return denied("verify.commit", "", "the image has other labels than it was made with", "none")
		}
	}
	if target == nil {
		return nil
	}
	return tagAs(c, id, target)
}

// dockerfileQuote writes a text as one word of a Dockerfile.
func dockerfileQuote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`).Replace(s) + `"`
}
