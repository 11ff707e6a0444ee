package engineapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
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
	if err := c.untilEnd(c.room("images", 1)); err != nil {
		return err
	}
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
		return err
	}
	return c.answer(http.StatusCreated, made)
}

// configChanges writes the configuration in a commit's body as instructions, which are judged
// like a caller's. Ok is false if it has fields that none of them sets.
func configChanges(config *body.Config) (changes []string, ok bool) {
	if config == nil {
		return nil, true
	}
	left := *config
	for _, set := range []struct {
		name  string
		words []string
	}{{"ENTRYPOINT", left.Entrypoint}, {"CMD", left.Cmd}, {"VOLUME", slices.Sorted(maps.Keys(left.Volumes))}} { // in this order: ENTRYPOINT takes CMD away
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

// committed looks at a new image before it gets its name. It removes one that isn't as it was
// asked for, or can't get the name.
func committed(c *call, id string, labels map[string]string, target url.Values) error {
	c.about(id)
	img, err := lookUpImage(c, id)
	if err == nil && (img == nil || !ownImage(c, img.Config.Labels)) {
		err = denied("verify.commit", "", "the image lacks the labels that it was made with", "none")
	}
	for name, value := range labels {
		if err == nil && img.Config.Labels[name] != value {
			err = denied("verify.commit", "", "the image has other labels than it was made with", "none")
		}
	}
	if err == nil && target != nil {
		err = tagAs(c, id, target)
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
