package engineapi

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// denied is a refusal that isn't the policy's but the proxy's own.
func denied(rule, field, message, allowed string) error {
	return &policy.DeniedError{Reasons: []policy.Reason{{Rule: rule, Field: field, Allowed: allowed, Message: message}}}
}

// notFound is what the engine says of what isn't there, and the proxy of what is
// somebody else's.
func notFound(message string) error {
	return &proxy.Fault{Status: http.StatusNotFound, Code: codeMissing, Title: "Not found", Detail: message}
}

const codeMissing = "not_found"

// isMissing reports whether an error is one of notFound.
func isMissing(err error) bool {
	f, ok := errors.AsType[*proxy.Fault](err)
	return ok && f.Code == codeMissing
}

func conflict(message string) error {
	return &proxy.Fault{Status: http.StatusConflict, Code: "conflict", Title: "Conflict", Detail: message}
}

// fail answers an error as the engine does.
func fail(w http.ResponseWriter, _ *http.Request, f proxy.Fault) {
	message := f.Detail
	if len(f.Reasons) > 0 {
		message = denial(f.Reasons)
	}
	if f.Code == "policy_denied" || f.Status == http.StatusMisdirectedRequest {
		f.Status = http.StatusForbidden
	}
	if f.Status == http.StatusUnprocessableEntity {
		f.Status = http.StatusBadRequest
	}
	body, _ := json.Marshal(map[string]string{"message": message}) // a text can be encoded
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(f.Status)
	_, _ = w.Write(append(body, '\n'))
}

// denial says in one line what was refused, by which rule, and what would be allowed.
func denial(reasons []policy.Reason) string {
	parts := make([]string, len(reasons))
	for i, r := range reasons {
		part := r.Message
		if r.Field != "" {
			part = r.Field + ": " + part
		}
		if r.Allowed != "" && !strings.Contains(r.Message, r.Allowed) {
			part += "; allowed: " + r.Allowed
		}
		parts[i] = part + " (rule " + r.Rule + ")"
	}
	return "denied by policy: " + strings.Join(parts, "; ")
}
