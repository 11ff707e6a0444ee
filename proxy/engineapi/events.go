package engineapi

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"

	"github.com/docker/docker/api/types/events"
)

func eventRoutes() []route {
	return []route{{method: http.MethodGet, template: "/events", query: []string{"since", "until", "filters"}, serve: (*call).events}}
}

// maxEvent bounds one event, in bytes.
const maxEvent = 1 << 20

// events tells what happens to the caller's own containers, networks, volumes and images.
func (c *call) events() error {
	f, err := c.filters("config", "container", "daemon", "event", "image", "label", "network", "plugin", "scope", "type", "volume")
	if err != nil {
		return err
	}
	query := url.Values{}
	for _, name := range []string{"since", "until"} {
		if v := c.query.Get(name); v != "" {
			if !instant.MatchString(v) {
				return malformed("the query parameter " + name + " is not a time")
			}
			query.Set(name, v)
		}
	}
	if len(f) > 0 {
		query.Set("filters", f.String())
	}
	leave, err := c.stream()
	if err != nil {
		return err
	}
	defer leave()
	mine := witness{call: c, objects: map[string]bool{}}
	if err := mine.seed(); err != nil {
		return err
	}
	resp, err := c.ask(ask{path: "/events", query: query})
	if err != nil {
		return err
	}
	if resp.StatusCode >= 400 {
		return failure(resp)
	}
	defer func() { _ = resp.Body.Close() }()
	c.head(resp)
	flusher := http.NewResponseController(c.w)
	_ = flusher.Flush()
	bounded := &io.LimitedReader{R: resp.Body}
	dec := json.NewDecoder(bounded)
	for {
		bounded.N = maxEvent
		var raw json.RawMessage
		if err := dec.Decode(&raw); errors.Is(err, io.EOF) && bounded.N > 0 {
			return nil
		} else if err != nil {
			panic(http.ErrAbortHandler) // or a part would be taken for the whole
		}
		var e events.Message
		if json.Unmarshal(raw, &e) != nil || !mine.sees(e) {
			continue
		}
		if _, err := c.w.Write(append(raw, '\n')); err != nil {
			panic(http.ErrAbortHandler)
		}
		_ = flusher.Flush()
	}
}

// witness decides which events a caller gets to see.
type witness struct {
	*call
	objects map[string]bool // whether networks and volumes are the caller's, as last seen
}

const maxWitnessed = 16 << 10

// seed notes the networks and volumes that are the caller's when it begins to look, or it
// would not hear of their end.
func (s *witness) seed() error {
	query := url.Values{"filters": {s.onlyOwn(filters{}).String()}}
	var networks []struct {
		ID string `json:"Id"`
	}
	if err := s.engine.get(s.ctx, s.version, "/networks", query, &networks); err != nil {
		return err
	}
	for _, n := range networks {
		s.objects["network "+n.ID] = true
	}
	var volumes struct{ Volumes []struct{ Name string } }
	if err := s.engine.get(s.ctx, s.version, "/volumes", query, &volumes); err != nil {
		return err
	}
	for _, v := range volumes.Volumes {
		s.objects["volume "+v.Name] = true
	}
	return nil
}

// sees tells whether an event is about something of the caller's. Of networks and volumes
// events don't carry the labels, so that it looks; of those that are gone by then it goes
// by what it saw before.
func (s *witness) sees(e events.Message) bool {
	attributes := e.Actor.Attributes
	switch e.Type {
	case events.ContainerEventType:
		return s.own(attributes)
	case events.NetworkEventType:
		if tenant, ok := s.known.get(attributes["container"]); ok && tenant == s.caller.Tenant {
			return true // it joins or leaves, be it a network of the policy's
		}
		if tenant, ok := s.known.get(e.Actor.ID); ok {
			return tenant == s.caller.Tenant
		}
		return s.look("network "+e.Actor.ID, func() (map[string]string, error) {
			n, _, err := s.anyNetwork(e.Actor.ID)
			if err != nil {
				return nil, err
			}
			return n.Labels, nil
		})
	case events.VolumeEventType:
		key := "volume " + e.Actor.ID
		if e.Action == events.ActionDestroy {
			was := s.objects[key]
			delete(s.objects, key)
			return was
		}
		return s.look(key, func() (map[string]string, error) {
			v, _, err := s.anyVolume(e.Actor.ID)
			if err != nil {
				return nil, err
			}
			return v.Labels, nil
		})
	case events.ImageEventType:
		return s.ownImage(attributes)
	}
	return false
}

func (s *witness) look(key string, labels func() (map[string]string, error)) bool {
	got, err := labels()
	if err != nil {
		return s.objects[key]
	}
	if len(s.objects) >= maxWitnessed {
		clear(s.objects)
	}
	s.objects[key] = s.own(got)
	return s.objects[key]
}
