package engineapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/buildkit"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// Pin tags an image. Builds that need the same image share the tag.
func (j *buildJudge) Pin(id string) (ref string, release func(), err error) {
	name := buildkit.Pin(j.opts.Owner, j.caller.Tenant, id)
	unlock, err := lockName(j.call, name)
	if err != nil {
		return "", nil, err
	}
	j.builds.count(name, 1)
	err = j.engine.Post(j.ctx, j.version, "/images/"+id+"/tag", url.Values{"repo": {name}, "tag": {"1"}}, nil, nil)
	unlock()
	if err != nil { // it may be there all the same
		j.unpin(name)
		return "", nil, err
	}
	return name + ":1", func() { j.unpin(name) }, nil
}

func (j *buildJudge) unpin(name string) {
	undo{func(ctx context.Context) error {
		return removePin(buildCaller{j.call}.fresh(ctx), name, -1)
	}}.run(j.ctx, j.log)
}

// sweepPins removes Berm's own pins that no build uses, such as those of a process that was
// killed.
func (d *Proxy) sweepPins(ctx context.Context) error {
	version, err := d.engine.Max(ctx)
	if err != nil {
		return err
	}
	c := &call{Proxy: d, ctx: ctx, version: version}
	var unused []string
	own := buildkit.Pins(d.opts.Owner)
	query := url.Values{"filters": {filters{"reference": {own + "*"}}.String()}}
	err = d.engine.Each(ctx, upstream.Ask{Version: version, Path: "/images/json", Query: query}, func(_ string, entry json.RawMessage) error {
		var img struct{ RepoTags []string }
		if err := json.Unmarshal(entry, &img); err != nil {
			return err
		}
		for _, tag := range img.RepoTags {
			if name, ok := strings.CutSuffix(tag, ":1"); ok && strings.HasPrefix(name, own) {
				unused = append(unused, name)
			}
		}
		return nil
	})
	for _, name := range unused {
		err = errors.Join(err, removePin(c, name, 0))
	}
	return err
}

// removePin adds to the number of builds that use a pin, and removes it if none is left.
func removePin(c *call, name string, n int) error {
	unlock, err := lockName(c, name)
	if err != nil {
		return err
	}
	defer unlock()
	if c.builds.count(name, n) > 0 {
		return nil
	}
	return remove(c.ctx, c, c.version, "/images/"+name+":1", url.Values{"noprune": {"1"}})
}

// count adds to the number of builds that use a pin.
func (b *builds) count(name string, n int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pins[name] += n
	left := b.pins[name]
	if left == 0 {
		delete(b.pins, name)
	}
	return left
}
