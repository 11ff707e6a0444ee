package engineapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sync"

	"github.com/bermhq/berm/proxy"
)

// rooms counts what callers are making now, by tenant and kind.
type rooms struct {
	mu     sync.Mutex
	making map[string]int64
}

// enter counts one more, and gives how many there are with it.
func (r *rooms) enter(key string) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.making == nil {
		r.making = map[string]int64{}
	}
	r.making[key]++
	return r.making[key]
}

func (r *rooms) leave(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.making[key]--; r.making[key] == 0 {
		delete(r.making, key)
	}
}

// room makes sure that the caller may have one more container, network or volume, also
// if others of its tenant are being made. The caller calls leave once it is made. One that
// is just being finished may count twice, so that the last place can be refused for a moment.
func (c *call) room(kind string) (leave func(), err error) {
	p, err := c.profile()
	if err != nil || p.EngineAPI.MaxObjects == 0 {
		return func() {}, err
	}
	key := kind + " " + c.caller.Tenant
	making := c.rooms.enter(key)
	leave = func() { c.rooms.leave(key) }
	there, err := c.count(kind)
	if err == nil && there+making > p.EngineAPI.MaxObjects {
		err = &proxy.Fault{Status: http.StatusTooManyRequests, Code: "capacity", Title: "At capacity",
			Detail: fmt.Sprintf("there are %d %s, and %d being made; profile %s allows %d (engine_api.max_objects)", there, kind, making, p.Name, p.EngineAPI.MaxObjects)}
	}
	if err != nil {
		leave()
		return nil, err
	}
	return leave, nil
}

// count asks the engine how many of its objects are the caller's.
func (c *call) count(kind string) (int64, error) {
	query := url.Values{"filters": {c.onlyOwn(filters{}).String()}}
	var list []json.RawMessage
	switch kind {
	case "containers":
		query.Set("all", "1")
		err := c.engine.get(c.ctx, c.version, "/containers/json", query, &list)
		return int64(len(list)), err
	case "networks":
		err := c.engine.get(c.ctx, c.version, "/networks", query, &list)
		return int64(len(list)), err
	}
	var volumes struct{ Volumes []json.RawMessage }
	err := c.engine.get(c.ctx, c.version, "/volumes", query, &volumes)
	return int64(len(volumes.Volumes)), err
}

// undo removes what the door made and the caller must not have. It doesn't end with the
// call. A failure is logged: the sweep removes by the labels what can't be removed now.
func (c *call) undo(kind, id, path string, query url.Values) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), undoTimeout)
	defer cancel()
	err := c.engine.do(ctx, ask{method: http.MethodDelete, version: c.version, path: path, query: query}, nil)
	if err != nil && statusOf(err) != http.StatusNotFound {
		c.log.ErrorContext(ctx, "engine_api_undo_failed", "kind", kind, "id", id, "error", err.Error())
	}
}
