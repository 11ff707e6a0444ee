package engineapi

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// call is one request on its way. It belongs to its goroutine.
type call struct {
	*Proxy
	w   http.ResponseWriter
	r   *http.Request
	ctx context.Context

	caller  Caller
	rules   *policy.Policy
	route   *route
	version upstream.Version // what the engine is spoken to in
	name    string           // the name in the path, as the client has it
	query   url.Values       // only parameters that the route knows
	passed  url.Values       // those of them that were checked, as the engine gets them
	filter  filters          // empty without any

	objects      []string        // IDs of what the call was about, for the audit log
	reasons      []policy.Reason // what the policy denied, in mode audit as well
	written      bool            // the decision is in the audit log already
	closeMessage *closeMessage   // what is said when the server's end breaks the answer off; nil is nothing

	concealed *strings.Replacer // of the paths at which binds are held; nil is none

	unconfined bool // the container that was looked up last was denied, and made in mode audit
}

// untilDrain has a call that its caller can make again end as soon as the server takes no
// more calls, rather than hold that up.
func (c *call) untilDrain() (stop context.CancelFunc) {
	c.ctx, stop = proxy.UntilDrain(c.ctx)
	return stop
}

// about notes which object a call works on.
func (c *call) about(ids ...string) { c.objects = append(c.objects, ids...) }

// allow asks whether what the policy says lets the call go on. In mode audit it always
// does, and what would have been denied is written down.
func (c *call) allow(reasons []policy.Reason) error {
	if len(reasons) == 0 {
		return nil
	}
	c.reasons = append(c.reasons, reasons...)
	if c.caller.Audit {
		return nil
	}
	return &policy.DeniedError{Reasons: reasons}
}

// profile is what the policy says of the caller in particular.
func (c *call) profile() (policy.Profile, error) {
	p, ok := c.rules.Profile(c.caller.Profile)
	if !ok {
		return p, denied("profiles.unknown", "", "the caller's profile is not in the policy", "one of the policy's profiles")
	}
	return p, nil
}

// judged is allow for an error of the policy's; others are given back.
func (c *call) judged(err error) error {
	var d *policy.DeniedError
	if errors.As(err, &d) {
		return c.allow(d.Reasons)
	}
	return err
}

// operation asks whether the caller's profile allows one of the things that can be
// switched off.
func (c *call) operation(op string) error { return c.judged(c.rules.Operation(c.caller.Profile, op)) }

// strictJSON reads one JSON value, as strictly as a body.
func strictJSON(data []byte, v any) error { return proxy.DecodeJSON(data, v) }
