package engineapi

import (
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	timetypes "github.com/docker/docker/api/types/time"
)

func pruneRoutes() []route {
	return []route{
		{method: http.MethodPost, template: "/images/prune", change: true, since: 25, filters: []string{"dangling", "until", "label", "label!"}, serve: pruneImages},
		{method: http.MethodPost, template: "/build/prune", change: true, since: 31, serve: pruneBuilds,
			query: params{"filters": nil, "all": nil, "keep-storage": nil, "reserved-space": nil, "max-used-space": nil, "min-free-space": nil}},
	}
}

// pruneBuilds does nothing: what builds leave in the engine's cache is nobody's to see,
// and the builder of that cache is not behind this proxy.
func pruneBuilds(c *call) error {
	return c.answer(http.StatusOK, struct {
		CachesDeleted  []string
		SpaceReclaimed int64
	}{CachesDeleted: []string{}})
}

// pruneContainers removes the caller's containers that don't run, one by one: the engine's
// own way waits for every container's lock, another tenant's too.
func pruneContainers(c *call) error {
	before, err := c.filter.before()
	if err != nil {
		return err
	}
	query := url.Values{"all": {"1"}, "size": {"1"}}
	query.Set("filters", c.onlyOwn(filters{"label": slices.Clone(c.filter["label"]), "status": {"created", "exited", "dead"}}).String())
	var list []struct {
		ID      string `json:"Id"`
		Labels  map[string]string
		Created int64 // seconds since 1970
		SizeRw  int64 // bytes
	}
	if err := c.engine.Get(c.ctx, c.version, "/containers/json", query, &list); err != nil {
		return err
	}
	told := struct {
		ContainersDeleted []string
		SpaceReclaimed    int64
	}{ContainersDeleted: []string{}}
	for _, ct := range list {
		if row, _ := c.restarts.Row(ct.ID); !row.Next.IsZero() {
			continue // the engine would have it restarting, and keep it
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
		told.SpaceReclaimed += ct.SizeRw
	}
	return c.answer(http.StatusOK, told)
}

// before is the second since 1970 after which what was made isn't to be pruned.
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

// prunable is an image of a list, or of what takes the disk's space.
type prunable struct {
	ID               string `json:"Id"`
	RepoTags         []string
	Labels           map[string]string
	Created          int64 // seconds since 1970
	Size, SharedSize int64 // bytes
}

// named reports whether the image has a name. What a build leaves behind has none, and no seal.
func (p *prunable) named() bool {
	return len(p.RepoTags) > 0 && !strings.HasPrefix(p.RepoTags[0], "<none>")
}

// pruneImages removes the images that the caller built and nobody uses: one by one, as
// the engine's own way takes every image that was made without a configuration.
func pruneImages(c *call) error {
	list, err := prunableImages(c, c.filter)
	if err != nil {
		return err
	}
	told := struct {
		ImagesDeleted  []map[string]string
		SpaceReclaimed int64
	}{ImagesDeleted: []map[string]string{}}
	for _, img := range list {
		refs := []string{img.ID}
		if img.named() {
			refs = img.RepoTags
		}
		for _, ref := range refs {
			var gone []map[string]string
			err := c.engine.Do(c.ctx, upstream.Ask{Method: http.MethodDelete, Version: c.version, Path: "/images/" + ref}, &gone)
			if s := upstream.StatusOf(err); s == http.StatusConflict || s == http.StatusNotFound {
				continue // it is in use, or gone
			}
			if err != nil {
				return err
			}
			told.ImagesDeleted = append(told.ImagesDeleted, goneOf(c, &imageInfo{ID: img.ID, Config: imageConfig{Labels: img.Labels}}, gone)...)
			if slices.ContainsFunc(gone, func(m map[string]string) bool { return m["Deleted"] == img.ID }) {
				told.SpaceReclaimed += img.Size - img.SharedSize
				c.about(img.ID)
			}
		}
	}
	return c.answer(http.StatusOK, told)
}

// prunableImages lists those of the caller's own images that the filters leave, with what
// would be free without them.
func prunableImages(c *call, f filters) ([]prunable, error) {
	before, err := f.before()
	if err != nil {
		return nil, err
	}
	all := slices.ContainsFunc(f["dangling"], func(s string) bool { return s == "false" || s == "0" })
	ask := filters{"label": slices.Clone(f["label"])}
	for name, value := range imageOwner(c) {
		ask["label"] = append(ask["label"], name+"="+value)
	}
	if !all {
		ask["dangling"] = []string{"true"}
	}
	var list []prunable
	if err := c.engine.Get(c.ctx, c.version, "/images/json", url.Values{"filters": {ask.String()}}, &list); err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(img prunable) bool {
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
		var img prunable
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

// hasLabel tells whether one of the labels is there, each "name" or "name=value".
func hasLabel(labels map[string]string, any []string) bool {
	return slices.ContainsFunc(any, func(s string) bool {
		name, want, valued := strings.Cut(s, "=")
		got, ok := labels[name]
		return ok && (!valued || got == want)
	})
}
