package engineapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	jsonv2 "github.com/go-json-experiment/json"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime"
)

// owners is a cache of facts about the engine's objects, which forgets everything once it is
// full. It is safe for many goroutines. The fields of Proxy say what its keys and values are.
type owners struct {
	mu   sync.Mutex
	byID map[string]string
}

const maxOwners = 16 << 10

func (o *owners) get(id string) (owner string, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	owner, ok = o.byID[id]
	return owner, ok
}

func (o *owners) put(id, owner string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byID == nil || len(o.byID) >= maxOwners {
		o.byID = map[string]string{}
	}
	o.byID[id] = owner
}

func (o *owners) drop(id string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.byID, id)
}

// own reports whether an object is the caller's: its labels name the caller's tenant, and their
// seal is valid. The ID of a volume is its name. For containers, use ownContainer.
func (c *call) own(kind lifecycle.ObjectKind, id string, labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngine && c.tenants(labels) && c.opts.Sealer.Valid(kind, id, labels)
}

// ownContainer reports whether a container is the caller's: its labels are sealed, and it was
// the first with its session.
func (c *call) ownContainer(id string, labels map[string]string) (bool, error) {
	if !c.own(lifecycle.ObjectContainer, id, labels) {
		return false, nil
	}
	session := labels[lifecycle.LabelSessionID]
	first, ok := c.firsts.get(session)
	if !ok {
		if err := surveyContainers(c); err != nil {
			return false, err
		}
		first, _ = c.firsts.get(session)
	}
	return first == id, nil
}

// surveyContainers finds the container of each of the tenant's sessions, and adds it to firsts.
func surveyContainers(c *call) error {
	var list []runtime.Container
	err := c.eachContainer(c.ctx, c.version, func(ct *listed) {
		if c.opts.Sealer.Valid(lifecycle.ObjectContainer, ct.ID, ct.Labels) {
			session := map[string]string{lifecycle.LabelSessionID: ct.Labels[lifecycle.LabelSessionID]} // saves memory
			list = append(list, runtime.Container{ID: ct.ID, Labels: session, CreatedAt: time.Unix(ct.Created, 0)})
		}
	}, c.ownLabels()...)
	if err != nil {
		return err
	}
	note := func(session, id string) {
		if _, ok := c.firsts.get(session); !ok {
			c.firsts.put(session, id)
		}
	}
	for _, ct := range c.opts.Sealer.Firsts(list, func(id string) bool { _, ok := c.known.get(id); return ok }) {
		note(ct.Labels[lifecycle.LabelSessionID], ct.ID)
	}
	for _, ct := range list {
		note(ct.Labels[lifecycle.LabelSessionID], "") // two containers of one second have the same session
	}
	return nil
}

// claimsImage reports whether labels say that an image is the caller's. It doesn't check their
// seal, so any image can have such labels.
func claimsImage(c *call, labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngineImage && c.tenants(labels)
}

// ownImage reports whether labels are the sealed ones of an image of the caller's. A copy of
// the image from a registry has them too.
func ownImage(c *call, labels map[string]string) bool {
	return claimsImage(c, labels) && c.opts.Sealer.Valid(lifecycle.ObjectImage, "", labels)
}

// policyOwn reports whether a network is one of the policy's. Either Berm made it, or the policy
// declares it external, so that an operator makes it.
func policyOwn(c *call, n *network.Inspect) bool {
	rules := c.rules.Networks()
	i := slices.IndexFunc(rules, func(r policy.NetworkRule) bool { return r.EngineNetwork == n.Name })
	if i < 0 || n.Labels[lifecycle.LabelDoor] != "" || n.Driver != "bridge" || n.Scope != "local" {
		return false
	}
	return n.Internal == rules[i].Internal && (rules[i].External || c.opts.Sealer.Valid(lifecycle.ObjectNetwork, n.ID, n.Labels))
}

func (c *call) tenants(labels map[string]string) bool {
	return labels[lifecycle.LabelOwner] == c.opts.Owner && labels[lifecycle.LabelTenant] == c.caller.Tenant && c.caller.Tenant != ""
}

// others reports whether labels say that an object was made through the engine proxy, though
// it isn't the caller's.
func (c *call) others(kind lifecycle.ObjectKind, id string, labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngine && !c.own(kind, id, labels)
}

// othersImage is others for an image.
func othersImage(c *call, labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngineImage && !ownImage(c, labels)
}

// proxyLabels are label filters that select objects made through the engine proxy.
func (d *Proxy) proxyLabels() []string {
	return []string{lifecycle.LabelOwner + "=" + d.opts.Owner, lifecycle.LabelDoor + "=" + lifecycle.DoorEngine}
}

// ownLabels are proxyLabels and the label of the caller's tenant.
func (c *call) ownLabels() []string {
	return append(c.proxyLabels(), lifecycle.LabelTenant+"="+c.caller.Tenant)
}

var (
	fullID     = regexp.MustCompile(`^[0-9a-f]{64}$`)
	objectName = regexp.MustCompile(`^/?[a-zA-Z0-9][a-zA-Z0-9_.-]{0,254}$`)
)

// containerID returns the full ID of a container of the caller's by its ID, a prefix of the ID,
// or its name. It answers the same error for another caller's container as for a missing one.
func (c *call) containerID(ref string) (string, error) {
	if tenant, ok := c.known.get(ref); ok && fullID.MatchString(ref) {
		if tenant != c.caller.Tenant {
			return "", noContainer(ref)
		}
		c.about(ref)
		c.unconfined = false
		return ref, nil
	}
	ct, _, err := c.container(ref)
	if err != nil {
		return "", err
	}
	return ct.ID, nil
}

// seen is the part of an inspected container that calls use.
type seen struct {
	ID      string `json:"Id"`
	Name    string
	ExecIDs []string
	Config  *struct {
		Hostname string
		Env      []string
		Labels   map[string]string
	}
	HostConfig struct {
		NetworkMode container.NetworkMode
		AutoRemove  bool
		LogConfig   container.LogConfig
	}
	State           *struct{ Running bool }
	Mounts          []container.MountPoint
	NetworkSettings struct {
		Networks map[string]*struct{ NetworkID string }
	}
}

// container inspects a container of the caller's. It also returns the engine's answer,
// without Berm's seccomp profile, which is most of it.
func (c *call) container(ref string) (*seen, json.RawMessage, error) {
	if !objectName.MatchString(ref) {
		return nil, nil, noContainer(ref)
	}
	var raw json.RawMessage
	err := c.engine.Get(c.ctx, c.version, "/containers/"+strings.TrimPrefix(ref, "/")+"/json", nil, &raw)
	if upstream.StatusOf(err) == http.StatusNotFound {
		return nil, nil, noContainer(ref)
	}
	if upstream.StatusOf(err) != 0 && idStart.MatchString(ref) { // an ambiguous prefix: its status varies
		return shadowed(c, ref)
	}
	if err != nil {
		return nil, nil, err
	}
	raw = c.engine.WithoutProfile(raw)
	var ct seen
	if err := jsonv2.Unmarshal(raw, &ct); err != nil || ct.Config == nil || !fullID.MatchString(ct.ID) {
		return nil, nil, fmt.Errorf("inspect container: the engine's answer can't be read: %w", err)
	}
	if own, err := c.ownContainer(ct.ID, ct.Config.Labels); err != nil {
		return nil, nil, err
	} else if !own {
		return shadowed(c, ref)
	}
	c.unconfined = false
	if _, open := c.known.get(ct.ID); !open {
		if c.unconfined, open = bars(c, ct.Config.Labels); open {
			c.known.put(ct.ID, c.caller.Tenant) // other containers must be inspected by every call
		}
	}
	c.ends.put(ct.ID, ct.Config.Labels[lifecycle.LabelExpiresAt])
	c.about(ct.ID)
	return &ct, raw, nil
}

var idStart = regexp.MustCompile(`^[0-9a-f]{1,63}$`)

// shadowed is container for a prefix of an ID that the engine doesn't resolve to a container of
// the caller's. Another caller's container may have that name, or an ID with that prefix.
func shadowed(c *call, ref string) (*seen, json.RawMessage, error) {
	id, err := startOf(c, lifecycle.ObjectContainer, ref)
	if err != nil {
		return nil, nil, err
	}
	if id == "" {
		return nil, nil, noContainer(ref)
	}
	return c.container(id)
}

// startOf returns the ID of the caller's one container or network whose ID begins with ref.
// It is empty if there is none, or several.
func startOf(c *call, kind lifecycle.ObjectKind, ref string) (id string, err error) {
	if !idStart.MatchString(ref) {
		return "", nil
	}
	var ids []string
	err = eachOwn(c, kind, filters{"id": {ref}}, func(o *labelled) {
		if fullID.MatchString(o.ID) && strings.HasPrefix(o.ID, ref) {
			ids = append(ids, o.ID)
		}
	})
	if err != nil || len(ids) != 1 {
		return "", err
	}
	return ids[0], nil
}

func noContainer(ref string) error { return notFound("No such container: " + body.Shorten(ref)) }

// ownExec fails unless an exec belongs to a container of the caller's.
func ownExec(c *call, id string) error {
	missing := notFound("No such exec instance: " + body.Shorten(id))
	if !fullID.MatchString(id) {
		return missing // the engine takes no prefixes of exec IDs
	}
	of, ok := c.execs.get(id)
	if !ok {
		var ex struct{ ContainerID string }
		err := c.engine.Get(c.ctx, c.version, "/exec/"+id+"/json", nil, &ex)
		if upstream.StatusOf(err) != 0 {
			return missing
		}
		if err != nil {
			return err
		}
		of = ex.ContainerID
	}
	if _, err := c.containerID(of); err != nil {
		return missing
	}
	c.execs.put(id, of)
	c.about(id)
	return nil
}

const (
	labelPrefix = lifecycle.LabelPrefix
	labelTTL    = "berm.ttl" // a caller's TTL for an object, in place of its profile's

	maxLabels     = 512
	maxLabelBytes = 32 << 10 // of a caller's own labels, as JSON in the engine's lists and events

	// Bounds of a container's other parts in the engine's lists and events.
	maxImageLabelBytes = 256 << 10
	maxEffectiveBytes  = 256 << 10
	maxCommandBytes    = 512 << 10
)

// encodedBytes returns the length of v as JSON, as in the engine's answers. One byte of a text
// may take six.
func encodedBytes(v any) int {
	b, err := json.Marshal(v)
	if err != nil {
		return math.MaxInt // it can't be encoded
	}
	return len(b)
}

// callersLabels checks the labels that a caller gives, and returns the TTL among them, or nil.
// A caller that sees Berm's own labels may have copied them from another object. callersLabels
// removes those from the map.
func (c *call) callersLabels(labels map[string]string) (ttl *time.Duration, err error) {
	if showsLabels(c) {
		maps.DeleteFunc(labels, func(name, _ string) bool { return stamped(name) })
	}
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
		case c.opts.Labels[name] != "" && c.opts.Labels[name] == value:
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

// imageFilters select the images that claim to be the caller's.
func imageFilters(c *call) filters {
	f := filters{}
	for name, value := range imageOwner(c) {
		f["label"] = append(f["label"], name+"="+value)
	}
	return f
}

// stampLabels judges the caller's own labels for a new object. It returns them with the labels of the
// owner and the expiry, and the seal. For an image, it also overrides labels that the base image may
// have.
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

// unsealedLabels returns the labels of a new object without a seal: the caller's own, and those
// of the owner and the expiry.
func unsealedLabels(c *call, own map[string]string, ttl, maxLifetime time.Duration) map[string]string {
	labels := map[string]string{}
	maps.Copy(labels, own)
	now := time.Now().UTC()
	maps.Copy(labels, map[string]string{
		lifecycle.LabelOwner:     c.opts.Owner,
		lifecycle.LabelDoor:      lifecycle.DoorEngine,
		lifecycle.LabelTenant:    c.caller.Tenant,
		lifecycle.LabelCaller:    c.caller.Name,
		lifecycle.LabelProfile:   cmp.Or(c.caller.Profile, "default"),
		lifecycle.LabelSessionID: uuid.NewString(),
		lifecycle.LabelCreatedAt: now.Format(time.RFC3339Nano),
		lifecycle.LabelExpiresAt: now.Add(ttl).Format(time.RFC3339Nano),
		lifecycle.LabelDeadline:  now.Add(maxLifetime).Format(time.RFC3339Nano),
	})
	return labels
}
