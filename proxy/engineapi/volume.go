package engineapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

var volumeName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,254}$`)

func noVolume(name string) error { return notFound("get " + body.Shorten(name) + ": no such volume") }

// ownVolumeOf returns a volume of the caller's by its name. Another volume may have the name later.
func ownVolumeOf(c *call, name string) (*volume.Volume, json.RawMessage, error) {
	v, raw, err := anyVolume(c, name)
	if err == nil && !c.own(lifecycle.ObjectVolume, v.Name, v.Labels) {
		err = noVolume(name)
	}
	if err != nil {
		return nil, nil, err
	}
	c.about(v.Name)
	return v, raw, nil
}

// anyVolume is ownVolumeOf for a volume of any owner.
func anyVolume(c *call, name string) (*volume.Volume, json.RawMessage, error) {
	return anyObject(c, lifecycle.ObjectVolume, name, noVolume, func(v *volume.Volume) bool { return v.Name == name })
}

func listVolumes(c *call) error {
	return listOwn(c, lifecycle.ObjectVolume, url.Values{"filters": {c.onlyOwn(c.filter).String()}})
}

func inspectVolume(c *call) error {
	_, raw, err := ownVolumeOf(c, c.name)
	if err != nil {
		return err
	}
	return answerShown(c, http.StatusOK, raw, "Labels")
}

// volumeBody is the body of a volume's creation.
type volumeBody struct {
	ClusterVolumeSpec json.RawMessage // hides the embedded field
	volume.CreateOptions
}

// createVolume creates a volume, or answers the caller's existing one of that name, as the engine does.
func createVolume(c *call, body *volumeBody) error {
	req := policy.VolumeCreateRequest{Name: body.Name, Driver: body.Driver, Options: body.DriverOpts}
	if body.ClusterVolumeSpec != nil {
		req.Other = append(req.Other, policy.OtherField{Field: "ClusterVolumeSpec", Value: "{…}"})
	}
	if err := c.judged(c.rules.VolumeCreate(c.caller.Profile, req)); err != nil {
		return err
	}
	if body.Name != "" {
		switch v, raw, err := anyVolume(c, body.Name); {
		case err == nil && c.own(lifecycle.ObjectVolume, v.Name, v.Labels):
			return answerShown(c, http.StatusCreated, raw, "Labels")
		case err == nil:
			return volumeTaken(body.Name)
		case isMissing(err):
		default:
			return err
		}
	}
	_, raw, err := makeVolume(c, body.Name, body.Driver, body.DriverOpts, body.Labels)
	if err != nil {
		return err
	}
	return answerShown(c, http.StatusCreated, raw, "Labels")
}

func volumeTaken(name string) error {
	return conflict(fmt.Sprintf("the volume name %q is taken", body.Shorten(name)))
}

// makeVolume creates a volume of the caller's. Only a caller in mode audit can ask for options, or for a
// driver other than the local one.
func makeVolume(c *call, name, driver string, options, own map[string]string) (*volume.Volume, json.RawMessage, error) {
	labels, err := stampLabels(c, lifecycle.ObjectVolume, own)
	if err != nil {
		return nil, nil, err
	}
	leave, err := c.room("volumes", 1)
	if err != nil {
		return nil, nil, err
	}
	defer leave()
	unlock, err := lockVolume(c.ctx, c, name)
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	var raw json.RawMessage
	create := volume.CreateOptions{Name: name, Driver: cmp.Or(driver, "local"), DriverOpts: options, Labels: labels}
	if err := c.engine.Post(c.ctx, c.version, "/volumes/create", nil, create, &raw); err != nil {
		return nil, nil, err
	}
	var made volume.Volume
	if err := json.Unmarshal(raw, &made); err != nil {
		return nil, nil, fmt.Errorf("create volume: the engine's answer can't be read: %w", err)
	}
	// The engine answers with an existing volume of that name, which another caller may just have created.
	if made.Labels[lifecycle.LabelSessionID] != labels[lifecycle.LabelSessionID] {
		return nil, nil, volumeTaken(made.Name)
	}
	if !c.caller.Audit && (made.Driver != "local" || len(made.Options) > 0) {
		removeUnwanted(c, "/volumes/"+made.Name, url.Values{"force": {"1"}})
		return nil, nil, denied("verify.create", "Driver", "the engine made another volume than it was asked for", "a local volume without options")
	}
	c.about(made.Name)
	return &made, raw, nil
}

// lockVolume keeps others from creating or removing a volume of that name until unlock. The engine
// removes volumes by name, and after a check the name may mean another volume.
func lockVolume(ctx context.Context, c *call, name string) (unlock func(), err error) {
	return c.names.Lock(ctx, "volume "+name)
}

func removeVolume(c *call) error {
	if err := c.untilEnd(lockVolume(c.ctx, c, c.name)); err != nil {
		return err
	}
	v, _, err := ownVolumeOf(c, c.name)
	if isMissing(err) && c.flag("force") {
		return c.status(http.StatusNoContent) // the engine's answer for a missing volume
	}
	if err != nil {
		return err
	}
	return c.forward(c.askFor(v.Name), false)
}

func pruneVolumes(c *call) error {
	if c.version < 42 {
		delete(c.filter, "all") // older engines always prune all
	}
	return c.forward(upstream.Ask{Path: "/volumes/prune", Query: url.Values{"filters": {c.onlyOwn(c.filter).String()}}}, false)
}

// lookUpVolumes sets Own for the volumes in list, and returns the names of those that are missing.
func lookUpVolumes(c *call, list []body.Mounted) (missing []string, err error) {
	for i := range list {
		m := &list[i]
		if m.Type != "volume" || !volumeName.MatchString(m.Source) {
			continue // the policy refuses a malformed name
		}
		v, _, err := anyVolume(c, m.Source)
		switch {
		case isMissing(err):
			if !slices.Contains(missing, m.Source) {
				missing = append(missing, m.Source)
			}
		case err != nil:
			return nil, err
		case c.caller.Audit && c.others(lifecycle.ObjectVolume, v.Name, v.Labels):
			return nil, noVolume(m.Source)
		default:
			m.Own = ownVolume(c, v)
		}
		if !fullID.MatchString(m.Source) { // it isn't an anonymous volume
			continue
		}
		if held, err := holdsMounts(c, m.Source); err != nil {
			return nil, err
		} else if held {
			err := denied("mounts.target_overlap", m.Field, fmt.Sprintf("volume %q is another container's, which has a mount in it", m.Source), "volumes in which nothing else is mounted")
			if err := c.judged(err); err != nil {
				return nil, err
			}
		}
	}
	return missing, nil
}

// ownVolume reports whether a volume is the caller's, local, and without options.
func ownVolume(c *call, v *volume.Volume) bool {
	return c.own(lifecycle.ObjectVolume, v.Name, v.Labels) && v.Driver == "local" && len(v.Options) == 0
}
