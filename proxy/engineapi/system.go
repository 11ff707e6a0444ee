package engineapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/events"
	"golang.org/x/sync/singleflight"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// pingEngine answers a ping, with the API version and the builder for the client.
func pingEngine(c *call) error {
	resp, err := c.open(upstream.Ask{Path: "/_ping"})
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, upstream.BufferSize))
	_ = resp.Body.Close()
	most, err := c.engine.Max(c.ctx)
	if err != nil {
		return err
	}
	h := c.w.Header()
	for _, name := range []string{"Docker-Experimental", "Ostype", "Server"} {
		if values := resp.Header[name]; len(values) > 0 {
			h[name] = values
		}
	}
	h.Set("Builder-Version", builderVersion(c))
	h.Set("Api-Version", most.String())
	h.Set("Content-Type", "text/plain; charset=utf-8")
	if c.r.Method == http.MethodGet {
		_, _ = io.WriteString(c.w, "OK")
	}
	return nil
}

// engineVersions answers the engine's versions, with the API versions of the proxy.
func engineVersions(c *call) error {
	var told types.Version
	if err := c.engine.Get(c.ctx, c.version, "/version", nil, &told); err != nil {
		return err
	}
	most, err := c.engine.Max(c.ctx)
	if err != nil {
		return err
	}
	told.APIVersion = most.String()
	if least, ok := upstream.ParseVersion("v" + told.MinAPIVersion); !ok || least < upstream.Oldest {
		told.MinAPIVersion = upstream.Oldest.String()
	}
	for i := range told.Components {
		part := &told.Components[i]
		if part.Details == nil {
			part.Details = map[string]string{}
		}
		maps.DeleteFunc(part.Details, func(_, value string) bool { return strings.HasPrefix(value, "/") }) // a path of the host
		if part.Name == "Engine" {
			part.Details["ApiVersion"], part.Details["MinAPIVersion"] = told.APIVersion, told.MinAPIVersion
		}
	}
	return c.answer(http.StatusOK, told)
}

// diskUsage answers the disk usage of the caller's own containers and volumes, and of the images
// that it may see.
func diskUsage(c *call) error {
	for _, kind := range c.query["type"] {
		if !slices.Contains([]string{"container", "image", "volume", "build-cache"}, kind) {
			return proxy.Malformed("unknown object type: " + body.Shorten(kind))
		}
	}
	if err := c.untilEnd(c.enter("disk usages", maxUsages)); err != nil {
		return err
	}
	all := c.version < 42 || len(c.query["type"]) == 0
	kinds := map[string]lifecycle.ObjectKind{"Images": lifecycle.ObjectImage, "Containers": lifecycle.ObjectContainer, "Volumes": lifecycle.ObjectVolume}
	lists := map[string][]json.RawMessage{"Containers": {}, "Volumes": {}}
	images := imageUsage{list: []json.RawMessage{}}
	entries, err := c.usage.of(c)
	if err != nil {
		return err
	}
	for _, e := range entries {
		kind, ok := kinds[e.list]
		if !ok || !all && !slices.Contains(c.query["type"], string(kind)) {
			continue
		}
		if kind == lifecycle.ObjectImage {
			if err := images.add(c, e.raw); err != nil {
				return err
			}
			continue
		}
		own, err := ownEntry(c, kind, e.list, e.raw)
		if err != nil {
			return err
		}
		if own == nil {
			continue
		}
		entry, err := hideLabels(c, shownEntry(e.raw), "Labels")
		if err != nil {
			return err
		}
		lists[e.list] = append(lists[e.list], entry)
	}
	size, err := images.size()
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, struct {
		LayersSize                              int64
		Images, Containers, Volumes, BuildCache []json.RawMessage
		BuilderSize                             int64
	}{LayersSize: size, Images: images.list, Containers: lists["Containers"], Volumes: lists["Volumes"], BuildCache: []json.RawMessage{}})
}

// usageTime bounds a walk of the engine through all volumes and layers.
const usageTime = 10 * time.Minute

// usage asks the engine for its disk usage, once for all callers that ask at the same time. After
// each walk, it lets the engine rest for as long as the walk took.
type usage struct {
	group   singleflight.Group
	walking chan struct{} // holds one value during a walk: engines refuse a second walk
	after   time.Time     // the earliest begin of the next walk; guarded by walking
}

// usageEntry is an entry of one of the answer's lists.
type usageEntry struct {
	list string
	raw  json.RawMessage
}

// of returns the entries of all callers. It fails if the call's context ends first. A walk is of all
// types, and there is at most one for each API version, so that no caller can queue many.
func (u *usage) of(c *call) ([]usageEntry, error) {
	walk := u.group.DoChan(c.version.String(), func() (any, error) {
		u.walking <- struct{}{}
		defer func() { <-u.walking }()
		time.Sleep(time.Until(u.after))
		begun := time.Now()
		defer func() { u.after = time.Now().Add(min(time.Since(begun), time.Minute)) }()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), usageTime)
		defer cancel()
		var all []usageEntry
		size := 0
		err := c.engine.Each(ctx, upstream.Ask{Version: c.version, Path: "/system/df", Long: true}, func(list string, entry json.RawMessage) error {
			if list == "" || list == "BuildCache" {
				return nil
			}
			if size += len(entry); size > upstream.MaxAnswer {
				return fmt.Errorf("the engine's answer is over %d bytes", upstream.MaxAnswer)
			}
			all = append(all, usageEntry{list, entry})
			return nil
		})
		return all, err
	})
	select {
	case r := <-walk:
		all, _ := r.Val.([]usageEntry)
		return all, r.Err
	case <-c.ctx.Done():
		return nil, context.Cause(c.ctx)
	}
}

// maxEvent bounds one event, in bytes.
const maxEvent = 1 << 20

// streamEvents streams the events of the caller's own containers, networks, volumes and images.
func streamEvents(c *call) error {
	query := c.passed
	if len(c.filter) > 0 {
		query.Set("filters", c.filter.String())
	}
	if err := c.untilEnd(c.enter("streams", maxStreams)); err != nil {
		return err
	}
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
	c.writeAudit(nil)                 // before the stream, which may go on for days
	resp.Header.Del("Content-Length") // it counts all callers' events
	c.head(resp)
	_ = http.NewResponseController(c.w).Flush()
	defer c.hurry()()
	visible := showsLabels(c)
	lines := bufio.NewReaderSize(resp.Body, upstream.BufferSize)
	for {
		raw, err := nextEvent(lines)
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			panic(http.ErrAbortHandler) // so that the caller doesn't take a part for the whole
		}
		var e events.Message
		if json.Unmarshal(raw, &e) != nil || !mine.sees(e) {
			continue
		}
		if !visible {
			if raw, err = withoutLabels(raw, "Actor", "Attributes"); err != nil {
				panic(http.ErrAbortHandler)
			}
		}
		c.say(raw)
	}
}

// nextEvent reads the next event, which is a line. It skips events that are too long. The caller's
// own are never that long, and an event of others must not end the stream.
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
	// since has the creation times of the caller's networks and volumes as last seen, in
	// nanoseconds since 1970; 0 is long ago.
	since map[string]int64
	past  bool // the caller asks for past events too, when a volume's name may have been another's
}

const maxWitnessed = 16 << 10

// seed notes the caller's networks and volumes at the start of the stream. Without that, the caller
// wouldn't see the events of their removal.
func (s *witness) seed() error {
	if err := surveyContainers(s.call); err != nil {
		return err
	}
	networks := eachOwn(s.call, lifecycle.ObjectNetwork, filters{}, func(n *labelled) { s.since["network "+n.ID] = 0 })
	volumes := eachOwn(s.call, lifecycle.ObjectVolume, filters{}, func(v *labelled) { s.since["volume "+v.Name] = madeAt(v.Labels) })
	return errors.Join(networks, volumes)
}

// madeAt returns a volume's creation time from its labels. Before that time, the name may have been
// that of another caller's volume.
func madeAt(labels map[string]string) int64 {
	at, err := time.Parse(time.RFC3339Nano, labels[lifecycle.LabelCreatedAt])
	if err != nil {
		return 0
	}
	return at.UnixNano()
}

// sees reports whether an event is about an object of the caller's. Events of networks and volumes
// don't have the labels, so sees inspects these objects. For a removed one, it uses what it has
// seen before.
func (s *witness) sees(e events.Message) bool {
	attributes := e.Actor.Attributes
	switch e.Type {
	case events.ContainerEventType:
		first, known := s.firsts.get(attributes[lifecycle.LabelSessionID])
		return s.own(lifecycle.ObjectContainer, e.Actor.ID, attributes) && (!known || first == e.Actor.ID)
	case events.NetworkEventType:
		if tenant, ok := s.known.get(attributes["container"]); ok && tenant == s.caller.Tenant {
			return true // the caller's container joins or leaves a network, maybe one of the policy's
		}
		if tenant, ok := s.known.get(e.Actor.ID); ok {
			return tenant == s.caller.Tenant
		}
		_, own := s.look(lifecycle.ObjectNetwork, e.Actor.ID)
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
		since, own := s.look(lifecycle.ObjectVolume, e.Actor.ID)
		return own && s.current(since, e)
	case events.ImageEventType:
		return ownImage(s.call, attributes)
	}
	return false
}

// current reports whether an event is about the volume that has the name now. It compares times
// only for past events: the engine's clock may differ from that of the labels.
func (s *witness) current(since int64, e events.Message) bool {
	return !s.past || since <= e.TimeNano
}

// look reports whether a network or a volume is the caller's, and since when. If the object can't
// be inspected, look uses what it has seen before.
func (s *witness) look(kind lifecycle.ObjectKind, id string) (since int64, own bool) {
	key := string(kind) + " " + id
	var is labelled
	if !volumeName.MatchString(id) || s.engine.Get(s.ctx, s.version, listPaths[kind]+"/"+id, nil, &is) != nil {
		since, own = s.since[key]
		return since, own
	}
	if len(s.since) >= maxWitnessed {
		clear(s.since)
	}
	delete(s.since, key)
	if own = s.own(kind, id, is.Labels); own {
		since = madeAt(is.Labels)
		s.since[key] = since
	}
	return since, own
}
