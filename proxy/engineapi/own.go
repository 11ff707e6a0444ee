package engineapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
)

// owners remembers what never changes, by full ID: whose a container or a network is,
// or which container an exec is in.
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

// own tells whether labels are those of a container, a network or a volume of the caller's.
func (c *call) own(labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngine && c.tenants(labels)
}

// ownImage tells whether labels are those of an image of the caller's. What is made of one
// past this door has them too.
func (c *call) ownImage(labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngineImage && c.tenants(labels)
}

func (c *call) tenants(labels map[string]string) bool {
	return labels[lifecycle.LabelOwner] == c.opts.Owner && labels[lifecycle.LabelTenant] == c.caller.Tenant && c.caller.Tenant != ""
}

// others tells whether labels are those of something that another caller made.
func (c *call) others(labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngine && !c.own(labels)
}

// othersImage is others for an image.
func (c *call) othersImage(labels map[string]string) bool {
	return labels[lifecycle.LabelDoor] == lifecycle.DoorEngineImage && !c.ownImage(labels)
}

// ownLabels select what is the caller's in the filters of lists.
func (c *call) ownLabels() []string {
	return []string{
		lifecycle.LabelOwner + "=" + c.opts.Owner, lifecycle.LabelDoor + "=" + lifecycle.DoorEngine,
		lifecycle.LabelTenant + "=" + c.caller.Tenant,
	}
}

var (
	fullID     = regexp.MustCompile(`^[0-9a-f]{64}$`)
	objectName = regexp.MustCompile(`^/?[a-zA-Z0-9][a-zA-Z0-9_.-]{0,254}$`)
)

// containerID gives the full ID of a container of the caller's, by its ID, a prefix of it, or its name.
// What isn't there and what is somebody else's is not found, in the same words.
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

// container inspects a container of the caller's, and gives the engine's own words as well.
func (c *call) container(ref string) (*container.InspectResponse, json.RawMessage, error) {
	if !objectName.MatchString(ref) {
		return nil, nil, noContainer(ref)
	}
	var raw json.RawMessage
	err := c.engine.get(c.ctx, c.version, "/containers/"+strings.TrimPrefix(ref, "/")+"/json", nil, &raw)
	if statusOf(err) == http.StatusNotFound {
		return nil, nil, noContainer(ref)
	}
	if statusOf(err) != 0 && idStart.MatchString(ref) { // several have it; engines differ in how they say so
		return c.shadowed(ref)
	}
	if err != nil {
		return nil, nil, err
	}
	var ct container.InspectResponse
	if err := json.Unmarshal(raw, &ct); err != nil || ct.ContainerJSONBase == nil || ct.Config == nil || !fullID.MatchString(ct.ID) {
		return nil, nil, fmt.Errorf("inspect container: the engine's answer can't be read: %w", err)
	}
	if !c.own(ct.Config.Labels) {
		return c.shadowed(ref)
	}
	if c.unconfined = auditMade(ct.Config.Labels); !c.unconfined {
		c.known.put(ct.ID, c.caller.Tenant) // of the others every call has to know
	}
	c.ends.put(ct.ID, ct.Config.Labels[lifecycle.LabelExpiresAt])
	c.about(ct.ID)
	return &ct, raw, nil
}

var idStart = regexp.MustCompile(`^[0-9a-f]{1,63}$`)

// shadowed is container for the start of an ID that is another caller's container's too,
// or its name: others' names and IDs are not to be in the way.
func (c *call) shadowed(ref string) (*container.InspectResponse, json.RawMessage, error) {
	id, err := c.startOf("/containers/json", ref)
	if err != nil {
		return nil, nil, err
	}
	if id == "" {
		return nil, nil, noContainer(ref)
	}
	return c.container(id)
}

// startOf finds the one object of the caller's in one of the engine's lists whose ID begins
// with ref. It is empty if there is none, or several.
func (c *call) startOf(list, ref string) (id string, err error) {
	if !idStart.MatchString(ref) {
		return "", nil
	}
	var ids []string
	query := url.Values{"all": {"1"}, "filters": {c.onlyOwn(filters{"id": {ref}}).String()}}
	err = c.engine.each(c.ctx, c.version, list, query, func(_ string, entry json.RawMessage) error {
		var o struct {
			ID string `json:"Id"`
		}
		if err := json.Unmarshal(entry, &o); err != nil {
			return err
		}
		if fullID.MatchString(o.ID) && strings.HasPrefix(o.ID, ref) {
			ids = append(ids, o.ID)
		}
		return nil
	})
	if err != nil || len(ids) != 1 {
		return "", err
	}
	return ids[0], nil
}

func noContainer(ref string) error { return notFound("No such container: " + shorten(ref)) }

// execID checks that an exec is of a container of the caller's, and gives that container's ID.
func (c *call) execID(id string) (exec, containerID string, err error) {
	missing := notFound("No such exec instance: " + shorten(id))
	if !fullID.MatchString(id) {
		return "", "", missing // the engine takes no prefixes of these
	}
	if known, ok := c.execs.get(id); ok {
		if _, err := c.containerID(known); err != nil {
			return "", "", missing
		}
		c.about(id)
		return id, known, nil
	}
	var ex struct{ ContainerID string }
	err = c.engine.get(c.ctx, c.version, "/exec/"+id+"/json", nil, &ex)
	if statusOf(err) != 0 {
		return "", "", missing
	}
	if err != nil {
		return "", "", err
	}
	if _, err := c.containerID(ex.ContainerID); err != nil {
		return "", "", missing
	}
	c.execs.put(id, ex.ContainerID)
	c.about(id)
	return id, ex.ContainerID, nil
}
