package lifecycle

import (
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
