package engineapi

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
)

// recountTime bounds a walk over all of a tenant's containers.
const recountTime = 5 * time.Second

const (
	maxActs  = 64 // starts, restarts and stops of one tenant at a time
	maxStops = 8  // stops of one container at a time

	// Calls of one tenant at a time. Each holds whole lists while the engine walks all layers.
	maxUsages = 32
	maxPrunes = 4

	maxSizes = 8 // requests for sizes of one tenant at a time, for which the engine walks all files
)

// limits counts objects that are being created and calls under way, by kind and tenant.
type limits struct {
	mu     sync.Mutex
	making map[string]int64
}

// enter counts n more until leave is called, and returns how many there are with them.
func (l *limits) enter(key string, n int64) (all int64, leave func()) {
	add := func(n int64) int64 {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.making[key] += n
		all := l.making[key]
		if all == 0 {
			delete(l.making, key)
		}
		return all
	}
	return add(n), func() { add(-n) }
}

// full returns the fault for a limit that is reached.
func full(format string, args ...any) error {
	return &proxy.Fault{Status: http.StatusTooManyRequests, Code: "capacity", Title: "At capacity", Detail: fmt.Sprintf(format, args...)}
}

// enter counts a call of a kind until leave is called. It fails if the tenant already has most
// of that kind under way.
func (c *call) enter(kind string, most int64) (leave func(), err error) {
	all, leave := c.limits.enter(kind+" "+c.caller.Tenant, 1)
	if all > most {
		leave()
		return nil, full("%d %s go on, which is the most that one tenant may have", most, kind)
	}
	return leave, nil
}

// room fails unless the tenant may have n more containers, networks, volumes or images, in
// addition to those that are being created. The caller calls leave once the objects exist. An
// object that is just being finished may count twice, so room may refuse the last place for a
// moment.
func (c *call) room(kind string, n int64) (leave func(), err error) {
	p, err := c.profile()
	if err != nil || p.EngineAPI.MaxObjects == 0 || n == 0 {
		return func() {}, err
	}
	making, leave := c.limits.enter(kind+" "+c.caller.Tenant, n)
	there, err := countObjects(c, kind)
	if err == nil && there+making > p.EngineAPI.MaxObjects {
		err = full("there are %d %s, and %d being made; profile %s allows %d (engine_api.max_objects)", there, kind, making, p.Name, p.EngineAPI.MaxObjects)
	}
	if err != nil {
		leave()
		return nil, err
	}
	return leave, nil
}

// execCounts holds the number of execs of containers, as they were last counted.
type execCounts struct {
	mu   sync.Mutex
	seen map[execsOf]int64 // none is 0
}

type execsOf struct{ tenant, container string }

// see notes how many execs a container has, and returns how many its tenant has.
func (e *execCounts) see(tenant, id string, n int64) (all int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.seen[execsOf{tenant, id}] = n; n == 0 {
		delete(e.seen, execsOf{tenant, id})
	}
	for of, n := range e.seen {
		if of.tenant == tenant {
			all += n
		}
	}
	return all
}

// containers returns which of the tenant's containers had execs.
func (e *execCounts) containers(tenant string) (ids []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for of := range e.seen {
		if of.tenant == tenant {
			ids = append(ids, of.container)
		}
	}
	return ids
}

// execRoom fails unless the caller may have one more exec in this container, and in all of its tenant's.
// Execs count that run or were never started. The caller calls leave once the exec exists. The new exec
// counts before the container is inspected, or execs made meanwhile would count nowhere.
func execRoom(c *call, ref string) (ct *seen, leave func(), err error) {
	p, err := c.profile()
	if err != nil {
		return nil, nil, err
	}
	id, err := c.containerID(ref)
	if err != nil {
		return nil, nil, err
	}
	making, leave := c.limits.enter("execs "+id, 1)
	if ct, _, err = c.container(id); err != nil {
		leave()
		return nil, nil, err
	}
	most, there := p.EngineAPI.MaxExecs, int64(len(ct.ExecIDs))
	if there+making > maxExecs {
		leave()
		return nil, nil, full("the container has %d execs that run or were never started, which is the most that one may have", there)
	}
	if most > 0 && c.running.see(c.caller.Tenant, id, there+making) > most && recountExecs(c, id, there+making, most) > most {
		leave()
		all := c.running.see(c.caller.Tenant, id, there+making-1)
		return nil, nil, full("there are %d execs that run or were never started; profile %s allows %d (engine_api.max_execs)", all, p.Name, most)
	}
	return ct, leave, nil
}

// recountExecs inspects the tenant's containers that had execs, all but one, and returns how many execs
// the tenant has. A tenant has one recount at a time. Calls that waited for a recount make another one
// only if that found no room.
func recountExecs(c *call, but string, n, most int64) (all int64) {
	tenant := c.caller.Tenant
	ctx, cancel := context.WithTimeout(c.ctx, recountTime) // an archive makes the engine wait
	defer cancel()
	if over, err := c.startLocks.Lock(ctx, "execs of "+tenant); err == nil {
		defer over()
		if all = c.running.see(tenant, but, n); all <= most {
			return all
		}
		for _, id := range c.running.containers(tenant) {
			var ct struct{ ExecIDs []string }
			err := c.engine.Get(ctx, c.version, "/containers/"+id+"/json", nil, &ct)
			if id != but && (err == nil || upstream.StatusOf(err) == http.StatusNotFound) {
				making, _ := c.limits.enter("execs "+id, 0)
				c.running.see(tenant, id, int64(len(ct.ExecIDs))+making)
			}
		}
	}
	return c.running.see(tenant, but, n)
}

// countObjects asks the engine how many of its objects are the caller's.
func countObjects(c *call, kind string) (n int64, err error) {
	if kind == "images" { // also those that a build leaves behind, which have no seal
		query := url.Values{"filters": {imageFilters(c).String()}}
		err = each(c.ctx, c.Proxy, c.version, lifecycle.ObjectImage, query, func(*listed) { n++ })
		return n, err
	}
	err = eachOwn(c, lifecycle.ObjectKind(strings.TrimSuffix(kind, "s")), filters{}, func(*labelled) { n++ })
	return n, err
}
