package quota

import (
	"context"
	"sync"

	"github.com/containerd/errdefs"
)

// maxOwners is of how many keys it is remembered whose they are.
const maxOwners = 10_000

// owners remembers which workspace a key's chat belongs to, or that there is no such chat,
// so that the commands of sandboxes ask the store but once. It is safe for concurrent use.
type owners struct {
	mu    sync.Mutex
	known map[ownedKey]Workspace // without an ID: the key is of no chat
	turn  int                    // goes up with each change
}

type ownedKey struct{ tenant, chatID string }

// changed has the store asked again about a key.
func (o *owners) changed(tenant, chatID string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.turn++
	delete(o.known, ownedKey{tenant, chatID})
}

func (o *owners) get(key ownedKey) (w Workspace, known bool, turn int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	w, known = o.known[key]
	return w, known, o.turn
}

// put remembers what the store said, unless something has changed since.
func (o *owners) put(key ownedKey, w Workspace, turn int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.turn != turn:
		return
	case o.known == nil || len(o.known) >= maxOwners:
		o.known = map[ownedKey]Workspace{}
	}
	o.known[key] = w
}

// owner returns the workspace of a key's chat; false if the key is of no chat.
func (s *Service) owner(ctx context.Context, tenant, chatID string) (Workspace, bool, error) {
	key := ownedKey{tenant, chatID}
	w, known, turn := s.owners.get(key)
	if known {
		return w, w.ID != "", nil
	}
	w, err := s.opts.Store.WorkspaceOf(ctx, tenant, chatID)
	if err != nil && !errdefs.IsNotFound(err) {
		return Workspace{}, false, Unavailable(ctx, err)
	}
	if err != nil {
		w = Workspace{}
	}
	s.owners.put(key, w, turn)
	return w, w.ID != "", nil
}

// Changed must be called whenever a chat may have been put into the store, or removed
// from it.
func (s *Service) Changed(tenant, chatID string) { s.owners.changed(tenant, chatID) }
