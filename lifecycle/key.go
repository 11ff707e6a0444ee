package lifecycle

import (
	"context"
	"regexp"
	"strings"

	"github.com/google/uuid"
)

var keyPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$`)

// ParseKey checks a key and returns its canonical form: trimmed, and in lower case if it is a
// UUID of 36 characters.
func ParseKey(s string) (string, error) {
	s = strings.TrimSpace(s)
	if !keyPattern.MatchString(s) {
		return "", &InvalidError{Field: "key", Message: "must match [A-Za-z0-9][A-Za-z0-9_.:-]{0,127}"}
	}
	if len(s) == 36 {
		if id, err := uuid.Parse(s); err == nil {
			return id.String(), nil
		}
	}
	return s, nil
}

// keyID names a key of a tenant: two tenants may use the same key.
type keyID struct{ tenant, key string }

func (s Sandbox) keyID() keyID { return keyID{s.Tenant, s.Key} }

// parseID checks a key.
func parseID(tenant, key string) (keyID, error) {
	key, err := ParseKey(key)
	return keyID{tenant, key}, err
}

// lockKey acquires a key for one operation that changes it. With join, it returns the create
// that holds the key, or comes to hold it, instead of waiting for that to end. The caller
// must call unlock if it gets neither a create nor an error.
func (r *Registry) lockKey(ctx context.Context, id keyID, join bool) (unlock func(), p *pendingCreate, err error) {
	if !join {
		unlock, err = r.keys.Lock(ctx, id)
		return unlock, nil, err
	}
	for {
		wait, wake := context.WithCancel(ctx)
		unlock, p, err = r.lockOrJoin(wait, wake, id)
		wake()
		if err == nil || ctx.Err() != nil { // else a create began, and may have ended since
			return unlock, p, err
		}
	}
}

// lockOrJoin locks a key, or returns the create that holds it. Launch calls wake, which must
// end ctx.
func (r *Registry) lockOrJoin(ctx context.Context, wake func(), id keyID) (unlock func(), p *pendingCreate, err error) {
	r.mu.Lock()
	s := r.slotLocked(id)
	if s.pending != nil {
		defer r.mu.Unlock()
		return nil, s.pending, nil
	}
	if s.joining == nil {
		s.joining = map[context.Context]func(){}
	}
	s.joining[ctx] = wake
	r.mu.Unlock()
	unlock, err = r.keys.Lock(ctx, id)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(s.joining, ctx)
	r.freeLocked(id, s)
	return unlock, nil, err
}
