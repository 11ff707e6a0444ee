package engineapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/build"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	timetypes "github.com/docker/docker/api/types/time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// filters are the values of a list's filters, by name.
type filters map[string][]string

// maxFilters bounds the values of all filters together.
const maxFilters = 256

// parseFilters parses the parameter filters. It refuses unknown names. Clients send the values of a name
// as a list, or as a map of values to true.
func parseFilters(text string, known []string) (filters, error) {
	out := filters{}
	if text == "" {
		return out, nil
	}
	var names map[string]json.RawMessage
	if err := proxy.DecodeJSON([]byte(text), &names); err != nil {
		return nil, proxy.Malformed("the filters are not one JSON object")
	}
	total := 0
	for name, raw := range names {
		if !slices.Contains(known, name) {
			return nil, denied("endpoints.filter", name, fmt.Sprintf("the filter %q is not known", body.Shorten(name)), "one of: "+strings.Join(known, ", "))
		}
		values, err := filterValues(raw)
		if err != nil {
			return nil, proxy.Malformed(fmt.Sprintf("the filter %q is neither a list of texts nor a map of them to true", name))
		}
		if total += len(values); total > maxFilters {
			return nil, proxy.Malformed(fmt.Sprintf("there are more than %d filters", maxFilters))
		}
		out[name] = values
	}
	return out, nil
}

func filterValues(raw json.RawMessage) ([]string, error) {
	var list []string
	if len(raw) > 0 && raw[0] == '[' {
		return list, proxy.DecodeJSON(raw, &list)
	}
	var set map[string]bool
	if err := proxy.DecodeJSON(raw, &set); err != nil {
		return nil, err
	}
	for value, on := range set {
		if !on {
			return nil, fmt.Errorf("%q is false", value)
		}
	}
	return slices.Sorted(maps.Keys(set)), nil
}

// String returns the filters as JSON, as the engine takes them in a query.
func (f filters) String() string {
	sets := make(map[string]map[string]bool, len(f))
	for name, values := range f {
		sets[name] = make(map[string]bool, len(values))
		for _, v := range values {
			sets[name][v] = true
		}
	}
	text, _ := json.Marshal(sets) // maps of texts can be encoded
	return string(text)
}

// listOwn relays a list of the caller's own objects, after the entries in first. The engine selects by
// labels, which anybody can forge, so listOwn checks each entry's seal.
func listOwn(c *call, kind lifecycle.ObjectKind, query url.Values, first ...json.RawMessage) error {
	begin, end := "[", "]\n"
	if kind == lifecycle.ObjectVolume {
		begin, end = `{"Volumes":[`, "],\"Warnings\":null}\n"
	}
	restarting, visible := c.restarts.Waiting() > 0, showsLabels(c)
	return relayEntries(c, upstream.Ask{Path: listPaths[kind], Query: query}, begin, end, first, func(list string, entry json.RawMessage) (json.RawMessage, error) {
		own, err := ownEntry(c, kind, list, entry)
		if own == nil || err != nil {
			return nil, err
		}
		if kind == lifecycle.ObjectContainer {
			entry = shownEntry(entry)
			if restarting {
				entry, err = showRestarts(c, entry)
			}
		}
		if err == nil && !visible {
			entry, err = withoutLabels(entry, "Labels")
		}
		return entry, err
	})
}

// relayEntries relays a list after the first entries. It relays one entry at a time, so that no
// list is held in memory while the caller reads. Show returns an entry as the caller may see it,
// or nil to leave it out.
func relayEntries(c *call, a upstream.Ask, begin, end string, first []json.RawMessage, show func(list string, entry json.RawMessage) (json.RawMessage, error)) error {
	resp, err := c.open(a)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	resp.Header.Del("Content-Length")
	defer c.hurry()()
	conn, begun, next := http.NewResponseController(c.w), false, ""
	write := func(text string) {
		if !begun {
			begun, text = true, begin+text
			c.writeAudit(nil)
			c.head(resp)
		}
		if c.ctx.Err() == nil { // after ctx ends, the deadline is that of hurry
			_ = conn.SetWriteDeadline(time.Now().Add(answerTime))
		}
		if _, err := io.WriteString(c.w, text); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	for _, entry := range first {
		write(next + string(entry))
		next = ","
	}
	err = c.engine.EachEntry(c.ctx, a.Path, resp.Body, func(list string, entry json.RawMessage) error {
		entry, err := show(list, entry)
		if entry != nil && err == nil {
			write(next + string(entry))
			next = ","
		}
		return err
	})
	switch {
	case err == nil:
		write(end)
	case begun:
		panic(http.ErrAbortHandler) // so that the caller doesn't take a part for the whole
	}
	return err
}

// labelled is the part of a list's entry that shows its owner.
type labelled struct {
	ID      string `json:"Id"`
	Name    string // of a volume
	ImageID string // of a container
	Labels  map[string]string
}

// listed is the part of a container or an image in a list that the proxy uses.
type listed struct {
	labelled
	Created int64 // seconds since 1970

	State  string // of a container, as are the next
	Mounts []container.MountPoint
	SizeRw int64 // bytes

	RepoTags, RepoDigests []string // of an image, as are the next
	Size, SharedSize      int64    // bytes
}

// named reports whether the image has a name. A build's leftovers have neither a name nor a seal.
func (l *listed) named() bool {
	return len(l.RepoTags) > 0 && !strings.HasPrefix(l.RepoTags[0], "<none>")
}

// ownEntry returns an entry of a list if it is the caller's, and nil otherwise.
func ownEntry(c *call, kind lifecycle.ObjectKind, list string, entry json.RawMessage) (*labelled, error) {
	var is labelled
	if list == "Warnings" {
		return nil, nil
	}
	if err := json.Unmarshal(entry, &is); err != nil {
		return nil, err
	}
	var own bool
	var err error
	switch kind {
	case lifecycle.ObjectContainer:
		own, err = c.ownContainer(is.ID, is.Labels)
	case lifecycle.ObjectImage:
		own = ownImage(c, is.Labels)
	default:
		own = c.own(kind, cmp.Or(is.ID, is.Name), is.Labels)
	}
	if err != nil || !own {
		return nil, err
	}
	return &is, nil
}

// listPaths are the paths of the engine's lists.
var listPaths = map[lifecycle.ObjectKind]string{
	lifecycle.ObjectContainer: "/containers/json", lifecycle.ObjectNetwork: "/networks", lifecycle.ObjectVolume: "/volumes",
	lifecycle.ObjectImage: "/images/json",
}

// each calls f with the entries of the engine's list of containers, networks or images.
func each[T any](ctx context.Context, d *Proxy, v upstream.Version, kind lifecycle.ObjectKind, query url.Values, f func(*T)) error {
	return d.engine.Each(ctx, upstream.Ask{Version: v, Path: listPaths[kind], Query: query}, func(_ string, raw json.RawMessage) error {
		var entry T
		err := json.Unmarshal(raw, &entry)
		if err == nil {
			f(&entry)
		}
		return err
	})
}

// eachOwn calls do with the caller's own containers, networks or volumes that match the filters.
func eachOwn(c *call, kind lifecycle.ObjectKind, f filters, do func(*labelled)) error {
	query := url.Values{"all": {"1"}, "filters": {c.onlyOwn(f).String()}}
	return c.engine.Each(c.ctx, upstream.Ask{Version: c.version, Path: listPaths[kind], Query: query}, func(list string, entry json.RawMessage) error {
		own, err := ownEntry(c, kind, list, entry)
		if own != nil {
			do(own)
		}
		return err
	})
}

// onlyOwn adds filters for the caller's own objects. They don't replace the caller's own filters
// for labels, as all labels must match.
func (c *call) onlyOwn(f filters) filters {
	f["label"] = append(f["label"], c.ownLabels()...)
	return f
}

// pruneBuilds does nothing. Records in the engine's build cache have no owner.
func pruneBuilds(c *call) error {
	return c.answer(http.StatusOK, build.CachePruneReport{CachesDeleted: []string{}})
}

// pruneContainers removes the caller's stopped containers one by one. The engine's own prune would
// wait for the locks of all containers, those of other tenants included.
func pruneContainers(c *call) error {
	leave, err := c.enter("prunes", maxPrunes)
	if err != nil {
		return err
	}
	defer leave()
	before, err := c.filter.before()
	if err != nil {
		return err
	}
	query := url.Values{"all": {"1"}, "size": {"1"}}
	query.Set("filters", c.onlyOwn(filters{"label": slices.Clone(c.filter["label"]), "status": {"created", "exited", "dead"}}).String())
	var list []listed
	if err := c.engine.Get(c.ctx, c.version, "/containers/json", query, &list); err != nil {
		return err
	}
	told := container.PruneReport{ContainersDeleted: []string{}}
	for _, ct := range list {
		if row, _ := c.restarts.Row(ct.ID); !row.Next.IsZero() {
			continue // Berm will restart it; an engine keeps such containers
		}
		if own, err := c.ownContainer(ct.ID, ct.Labels); err != nil {
			return err
		} else if !own {
			continue
		}
		if !fullID.MatchString(ct.ID) || ct.Created > before || hasLabel(ct.Labels, c.filter["label!"]) {
			continue
		}
		err := c.engine.Do(c.ctx, upstream.Ask{Method: http.MethodDelete, Version: c.version, Path: "/containers/" + ct.ID}, nil)
		if s := upstream.StatusOf(err); s == http.StatusConflict || s == http.StatusNotFound {
			continue // it runs by now, or is gone
		}
		if err != nil {
			return err
		}
		c.known.drop(ct.ID)
		c.about(ct.ID)
		told.ContainersDeleted = append(told.ContainersDeleted, ct.ID)
		told.SpaceReclaimed += uint64(max(ct.SizeRw, 0))
	}
	return c.answer(http.StatusOK, told)
}

// before returns the time of the until filters in seconds since 1970. A prune keeps objects that
// were made later.
func (f filters) before() (int64, error) {
	before := time.Now().Unix()
	for _, until := range f["until"] {
		stamp, err := timetypes.GetTimestamp(until, time.Now())
		if err != nil {
			return 0, proxy.Malformed("the filter \"until\" is not a time")
		}
		seconds, _, err := timetypes.ParseTimestamps(stamp, 0)
		if err != nil {
			return 0, proxy.Malformed("the filter \"until\" is not a time")
		}
		before = min(before, seconds)
	}
	return before, nil
}

// pruneImages removes the caller's own unused images one by one. The engine's prune would take all images
// that were made without a configuration, those of other callers included.
func pruneImages(c *call) error {
	leave, err := c.enter("prunes", maxPrunes)
	if err != nil {
		return err
	}
	defer leave()
	list, err := prunableImages(c, c.filter)
	if err != nil {
		return err
	}
	told := image.PruneReport{ImagesDeleted: []image.DeleteResponse{}}
	for _, img := range list {
		refs := []string{img.ID}
		if img.named() {
			refs, _, _ = listedImage(c, img.RepoTags, nil, img.Labels) // without the pins of builds
		}
		for _, ref := range refs {
			gone, err := pruneImage(c, img.ID, ref)
			if err != nil {
				return err
			}
			told.ImagesDeleted = append(told.ImagesDeleted, goneOf(c, img.ID, img.Labels, gone)...)
			if slices.ContainsFunc(gone, func(d image.DeleteResponse) bool { return d.Deleted == img.ID }) {
				told.SpaceReclaimed += uint64(max(img.Size-img.SharedSize, 0))
				c.about(img.ID)
			}
		}
	}
	return c.answer(http.StatusOK, told)
}

// pruneImage removes an image by its ID or a name. It keeps an image in use, and a name that means
// another image by now: the list is older than the engine's walk through all layers.
func pruneImage(c *call, id, ref string) (gone []image.DeleteResponse, err error) {
	unlock, err := lockNames(c, ref)
	if err != nil { // somebody is pushing it
		return nil, c.ctx.Err()
	}
	defer unlock()
	if now, err := lookUpImage(c, ref); err != nil || now == nil || now.ID != id {
		return nil, err
	}
	err = c.engine.Do(c.ctx, upstream.Ask{Method: http.MethodDelete, Version: c.version, Path: "/images/" + ref}, &gone)
	if s := upstream.StatusOf(err); s == http.StatusConflict || s == http.StatusNotFound {
		return nil, nil // it is in use, or gone
	}
	return gone, err
}

// prunableImages lists the caller's own images that match the filters. SharedSize is that of the disk
// usage, or all of Size if the image is missing there.
func prunableImages(c *call, f filters) ([]listed, error) {
	before, err := f.before()
	if err != nil {
		return nil, err
	}
	all := slices.ContainsFunc(f["dangling"], func(s string) bool { return s == "false" || s == "0" })
	ask := imageFilters(c)
	ask["label"] = append(ask["label"], f["label"]...)
	if !all {
		ask["dangling"] = []string{"true"}
	}
	var list []listed
	if err := c.engine.Get(c.ctx, c.version, "/images/json", url.Values{"filters": {ask.String()}}, &list); err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(img listed) bool {
		return !builtID.MatchString(img.ID) || !ownImage(c, img.Labels) && (img.named() || !claimsImage(c, img.Labels)) || img.Created > before || hasLabel(img.Labels, f["label!"])
	})
	if len(list) == 0 {
		return nil, nil
	}
	usage, err := c.usage.of(c)
	if err != nil {
		return nil, err
	}
	shared := map[string]int64{}
	for _, e := range usage {
		var img listed
		if e.list == "Images" && json.Unmarshal(e.raw, &img) == nil {
			shared[img.ID] = max(img.SharedSize, 0)
		}
	}
	for i := range list {
		list[i].SharedSize = list[i].Size
		if size, ok := shared[list[i].ID]; ok {
			list[i].SharedSize = size
		}
	}
	return list, nil
}

// hasLabel reports whether labels has one of the given labels, each as "name" or "name=value".
func hasLabel(labels map[string]string, any []string) bool {
	return slices.ContainsFunc(any, func(s string) bool {
		name, want, valued := strings.Cut(s, "=")
		got, ok := labels[name]
		return ok && (!valued || got == want)
	})
}
