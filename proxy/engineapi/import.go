package engineapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// createImage pulls an image, or makes one of the files that come along.
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

// importImage has the engine make an image of the caller's of one layer, whose files come as
// an archive. The image gets its name only when it has been looked at.
func importImage(c *call) error {
	if err := c.operation(policy.OpLoad); err != nil {
		return err
	}
	changes, labels, err := imageChanges(c, nil)
	if err != nil {
		return err
	}
	var target url.Values
	if ref := c.query.Get("repo"); ref != "" {
		if tag := c.query.Get("tag"); tag != "" {
			ref += ":" + tag
		}
		if target, err = loadTarget(c, ref); err != nil {
			return err
		}
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
		if err := committed(c, id, labels, target); err != nil {
			return err
		}
		return c.answer(http.StatusOK, map[string]string{"status": id})
	})
}

// sendImport has the engine import the files, and returns the image's ID.
func sendImport(c *call, query url.Values, files io.Reader) (id string, err error) {
	ask := upstream.Ask{Path: "/images/create", Query: query, Header: http.Header{"Content-Type": {"application/x-tar"}}, Body: files, Length: -1}
	err = eachMessage(c, ask, http.StatusInternalServerError, func(m buildMessage) { id = m.Status })
	if err == nil && !builtID.MatchString(id) {
		err = errors.New("import: the engine's answer has no ID")
	}
	return id, err
}

// imageChanges judges the changes that are asked for of an image's configuration, and adds the
// labels of what the caller owns. Those of a body come first.
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
