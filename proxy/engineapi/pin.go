package engineapi

import (
	"context"
	"errors"
	"net/url"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/engineapi/buildkit"
)

// Pin tags an image. Builds that need the same image share the tag.
func (j *buildJudge) Pin(id string) (ref string, release func(), err error) {
	name := buildkit.Pin(j.opts.Owner, j.caller.Tenant, id)
	unlock, err := lockName(j.call, name)
	if err != nil {
		return "", nil, err
	}
	_, leave := j.limits.enter(name, 1)
	err = j.engine.Post(j.ctx, j.version, "/images/"+id+"/tag", url.Values{"repo": {name}, "tag": {"1"}}, nil, nil)
	unlock()
	release = func() {
		undo{func(ctx context.Context) error {
			return removePin(buildCaller{j.call}.fresh(ctx), name, leave)
		}}.run(j.ctx, j.log)
	}
	if err != nil { // the tag may exist all the same
		release()
		return "", nil, err
	}
	return name + ":1", release, nil
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
	err = each(ctx, d, version, lifecycle.ObjectImage, query, func(img *listed) {
		for _, tag := range img.RepoTags {
			if name, ok := strings.CutSuffix(tag, ":1"); ok && strings.HasPrefix(name, own) {
				unused = append(unused, name)
			}
		}
	})
	for _, name := range unused {
		err = errors.Join(err, removePin(c, name, func() {}))
	}
	return err
}

// removePin calls leave, and removes the pin unless another build uses it.
func removePin(c *call, name string, leave func()) error {
	unlock, err := lockName(c, name)
	if err != nil {
		return err
	}
	defer unlock()
	leave()
	if using, _ := c.limits.enter(name, 0); using > 0 {
		return nil
	}
	return remove(c.ctx, c, c.version, "/images/"+name+":1", url.Values{"noprune": {"1"}})
}
