package engineapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
)

const (
	labelPrefix = lifecycle.LabelPrefix
	labelTTL    = "berm.ttl" // by which a caller asks for a life other than its profile's

	maxLabels     = 512
	maxLabelBytes = 32 << 10 // of a caller's own, as the engine's lists and events have them

	// What else is in lists and events of every container.
	maxImageLabelBytes = 256 << 10
	maxEffectiveBytes  = 256 << 10
	maxCommandBytes    = 512 << 10
)

// encodedBytes is how much room something takes in the engine's answers, where what is a
// byte here may be six.
func encodedBytes(v any) int {
	b, err := json.Marshal(v)
	if err != nil {
		return math.MaxInt // it can't be encoded
	}
	return len(b)
}

// callersLabels checks the labels that a caller gives, and takes out the TTL that it asks
// for; nil if it doesn't.
func (d *Proxy) callersLabels(labels map[string]string) (ttl *time.Duration, err error) {
	for name, value := range labels {
		switch {
		case name == labelTTL:
			d, err := time.ParseDuration(value)
			if err != nil || d <= 0 {
				return nil, proxy.Malformed("label " + labelTTL + " is not a duration such as 90m")
			}
			ttl = &d
		case lifecycle.IsOwnLabel(name):
			return nil, denied("labels.reserved", "Labels", fmt.Sprintf("label %q is refused: labels that begin with %s are Berm's own", body.Shorten(name), labelPrefix),
				"other labels, and "+labelTTL)
		case d.opts.Labels[name] != "" && d.opts.Labels[name] == value:
			return nil, denied("labels.reserved", "Labels", fmt.Sprintf("label %q is refused with this value: it says what belongs to Berm's own stack", body.Shorten(name)),
				"another value")
		}
	}
	if len(labels) > maxLabels || encodedBytes(labels) > maxLabelBytes {
		return nil, proxy.Malformed(fmt.Sprintf("there are more than %d labels, or more than %d bytes of them, as JSON", maxLabels, maxLabelBytes))
	}
	return ttl, nil
}

// imageOwner are the labels that say whose an image is, as ownImage reads them.
func imageOwner(c *call) map[string]string {
	return map[string]string{lifecycle.LabelOwner: c.opts.Owner, lifecycle.LabelDoor: lifecycle.DoorEngineImage, lifecycle.LabelTenant: c.caller.Tenant}
}

// stampLabels returns the labels of an object that the caller makes now: its own, which are
// judged, those that say whose it is and when it ends, and their seal. What the image that an
// image is made of may have is made empty.
func stampLabels(c *call, kind lifecycle.ObjectKind, own map[string]string) (map[string]string, error) {
	ttl, err := c.callersLabels(own)
	if err != nil {
		return nil, err
	}
	life, most, err := c.rules.ObjectTTL(c.caller.Profile, ttl)
	if err := c.judged(err); err != nil {
		return nil, err
	}
	labels := unsealedLabels(c, own, life, most)
	if kind == lifecycle.ObjectImage {
		maps.Copy(labels, imageOwner(c))
		labels[labelTTL], labels[lifecycle.LabelEffective] = own[labelTTL], ""
	}
	return c.opts.Sealer.Seal(kind, labels), nil
}

// unsealedLabels is stamp without the seal.
func unsealedLabels(c *call, own map[string]string, ttl, maxLifetime time.Duration) map[string]string {
	labels := maps.Clone(own)
	if labels == nil {
		labels = map[string]string{}
	}
	now := time.Now().UTC()
	profile := c.caller.Profile
	if profile == "" {
		profile = "default"
	}
	for name, value := range map[string]string{
		lifecycle.LabelOwner:     c.opts.Owner,
		lifecycle.LabelDoor:      lifecycle.DoorEngine,
		lifecycle.LabelTenant:    c.caller.Tenant,
		lifecycle.LabelCaller:    c.caller.Name,
		lifecycle.LabelProfile:   profile,
		lifecycle.LabelSessionID: uuid.NewString(),
		lifecycle.LabelCreatedAt: now.Format(time.RFC3339Nano),
		lifecycle.LabelExpiresAt: now.Add(ttl).Format(time.RFC3339Nano),
		lifecycle.LabelDeadline:  now.Add(maxLifetime).Format(time.RFC3339Nano),
	} {
		labels[name] = value
	}
	return labels
}
