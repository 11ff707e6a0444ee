package engineapi

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/lifecycle"
)

func eventRoutes() []route {
	return []route{{method: http.MethodGet, template: "/events", query: params{"since": moment, "until": moment}, filters: []string{"config", "container", "daemon", "event", "image", "label", "network", "plugin", "scope", "type", "volume"}, serve: streamEvents}}
}

// maxEvent bounds one event, in bytes.
const maxEvent = 1 << 20

// streamEvents tells what happens to the caller's own containers, networks, volumes and images.
func streamEvents(c *call) error {
	query := c.passed
	if len(c.filter) > 0 {
		query.Set("filters", c.filter.String())
	}
	leave, err := c.enter("streams", maxStreams)
	if err != nil {
		return err
	}
	defer leave()
	defer c.untilDrain()()
	mine := witness{call: c, since: map[string]int64{}, past: query.Has("since")}
	if err := mine.seed(); err != nil {
		return err
	}
	resp, err := c.open(upstream.Ask{Path: "/events", Query: query})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	c.close(nil) // now, as it may go on for days
	c.head(resp)
	_ = http.NewResponseController(c.w).Flush()
	defer c.hurry()()
	lines := bufio.NewReaderSize(resp.Body, upstream.BufferSize)
	for {
		raw, err := nextEvent(lines)
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			panic(http.ErrAbortHandler) // or a part would be taken for the whole
		}
		var e events.Message
		if json.Unmarshal(raw, &e) != nil || !mine.sees(e) {
			continue
		}
		c.say(raw)
	}
}

// nextEvent reads the next line, each of which is an event. One that is too long is left
// out: no caller's is, and what others have made of theirs must not end the stream.
func nextEvent(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for long := false; ; {
		part, err := r.ReadSlice('\n')
		if long = long || len(line)+len(part) > maxEvent; !long {
			line = append(line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && (long || len(line) > 0):
			return nil, io.ErrUnexpectedEOF
		case err != nil:
			return nil, err
		case !long:
			return line, nil
		default:
			line, long = nil, false
		}
	}
}

// witness decides which events a caller gets to see.
type witness struct {
	*call
	// since tells when the networks and volumes that are the caller's were made, in
	// nanoseconds, as last seen; 0 is long ago.
	since map[string]int64
	past  bool // it asks for what was before as well, when a volume's name may have been another's
}

const maxWitnessed = 16 << 10

// seed notes the networks and volumes that are the caller's when it begins to look, or it
// would not hear of their end.
func (s *witness) seed() error {
	query := url.Values{"filters": {s.onlyOwn(filters{}).String()}}
	if err := surveyContainers(s.call); err != nil {
		return err
	}
	var networks []labelled
	if err := s.engine.Get(s.ctx, s.version, "/networks", query, &networks); err != nil {
		return err
	}
	for _, n := range networks {
		if s.own(lifecycle.ObjectNetwork, n.ID, n.Labels) {
			s.since["network "+n.ID] = 0
		}
	}
	return s.engine.Each(s.ctx, s.version, "/volumes", query, func(list string, entry json.RawMessage) error {
		var v labelled
		if list != "Volumes" {
			return nil
		}
		if err := json.Unmarshal(entry, &v); err != nil || !s.own(lifecycle.ObjectVolume, v.Name, v.Labels) {
			return err
		}
		s.since["volume "+v.Name] = madeAt(v.Labels)
		return nil
	})
}

// madeAt is when labels say that a volume was made, before which its name was another's.
func madeAt(labels map[string]string) int64 {
	at, err := time.Parse(time.RFC3339Nano, labels[lifecycle.LabelCreatedAt])
	if err != nil {
		return 0
	}
	return at.UnixNano()
}

// sees tells whether an event is about something of the caller's. Of networks and volumes
// events don't carry the labels, so that it looks; of those that are gone by then it goes
// by what it saw before.
func (s *witness) sees(e events.Message) bool {
	attributes := e.Actor.Attributes
	switch e.Type {
	case events.ContainerEventType:
		first, known := s.firsts.get(attributes[lifecycle.LabelSessionID])
		return s.own(lifecycle.ObjectContainer, e.Actor.ID, attributes) && (!known || first == e.Actor.ID)
	case events.NetworkEventType:
		if tenant, ok := s.known.get(attributes["container"]); ok && tenant == s.caller.Tenant {
			return true // it joins or leaves, be it a network of the policy's
		}
		if tenant, ok := s.known.get(e.Actor.ID); ok {
			return tenant == s.caller.Tenant
		}
		n, _, err := anyNetwork(s.call, e.Actor.ID)
		if err != nil {
			n = &network.Inspect{}
		}
		_, own := s.look("network "+e.Actor.ID, n.Labels, err)
		return own
	case events.VolumeEventType:
		key := "volume " + e.Actor.ID
		if e.Action == events.ActionDestroy {
			since, was := s.since[key]
			if was = was && s.current(since, e); was {
				delete(s.since, key)
			}
			return was
		}
		v, _, err := anyVolume(s.call, e.Actor.ID)
		if err != nil {
			v = &volume.Volume{}
		}
		since, own := s.look(key, v.Labels, err)
		return own && s.current(since, e)
	case events.ImageEventType:
		return ownImage(s.call, attributes)
	}
	return false
}

// current tells whether a volume was the one that it is now when an event came. The clocks
// of the engine and of the labels needn't be one, so that it matters only for the past.
func (s *witness) current(since int64, e events.Message) bool {
	return !s.past || since <= e.TimeNano
}

// look tells whether something with the labels is the caller's, and since when. With an error
// it goes by what was seen before.
func (s *witness) look(key string, got map[string]string, err error) (since int64, own bool) {
	if err != nil {
		since, own = s.since[key]
		return since, own
	}
	if len(s.since) >= maxWitnessed {
		clear(s.since)
	}
	delete(s.since, key)
	kind, id, _ := strings.Cut(key, " ")
	if own = s.own(lifecycle.ObjectKind(kind), id, got); own {
		since = madeAt(got)
		s.since[key] = since
	}
	return since, own
}
