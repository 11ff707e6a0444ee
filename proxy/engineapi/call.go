package engineapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// call is one request on its way. It belongs to its goroutine.
type call struct {
	*Proxy
	w   http.ResponseWriter
	r   *http.Request
	ctx context.Context

	caller  Caller
	socket  string // the path at which it came in; empty over TCP
	rules   *policy.Policy
	route   *route
	version upstream.Version // of the API, for requests to the engine
	name    string           // the name in the path, as the client sent it
	query   url.Values       // only parameters that the route knows
	passed  url.Values       // the checked ones of them, as the engine gets them
	filter  filters          // empty without any

	objects      []string        // IDs of what the call was about, for the audit log
	reasons      []policy.Reason // what the policy denied, in mode audit as well
	written      bool            // the decision is in the audit log already
	closeMessage *closeMessage   // sent when the server breaks the answer off; nil sends nothing

	concealed *strings.Replacer // replaces paths of held binds in errors; nil is none

	mine map[string]string // the images of the caller's containers, by ID; nil until they are looked up

	leaves []func() // called at the call's end, the last first

	unconfined bool // the caller may not work in the container that was looked up last; see bars
}

// untilDrain makes the call end as soon as the server begins to drain. It is for calls that the
// client can repeat.
func (c *call) untilDrain() (stop context.CancelFunc) {
	c.ctx, stop = proxy.UntilDrain(c.ctx)
	return stop
}

// untilEnd calls leave at the call's end, if err is nil. It returns err.
func (c *call) untilEnd(leave func(), err error) error {
	if err == nil {
		c.leaves = append(c.leaves, leave)
	}
	return err
}

// about adds the IDs of objects that the call works on.
func (c *call) about(ids ...string) { c.objects = append(c.objects, ids...) }

// allow denies the call if there are reasons against it. In mode audit it always lets the call
// go on, and only keeps the reasons for the audit log.
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

// profile returns the caller's profile.
func (c *call) profile() (policy.Profile, error) {
	p, ok := c.rules.Profile(c.caller.Profile)
	if !ok {
		return p, denied("profiles.unknown", "", "the caller's profile is not in the policy", "one of the policy's profiles")
	}
	return p, nil
}

// judged is allow for a denial of the policy. It returns any other error as it is.
func (c *call) judged(err error) error {
	if d, ok := errors.AsType[*policy.DeniedError](err); ok {
		return c.allow(d.Reasons)
	}
	return err
}

// operation fails unless the caller's profile allows an operation that it can switch off.
func (c *call) operation(op string) error { return c.judged(c.rules.Operation(c.caller.Profile, op)) }

// passed are the headers of the engine's answers that callers get to see.
var passed = []string{
	"Content-Type", "Content-Length", "Docker-Experimental", "Ostype", "Builder-Version", "Server",
	"X-Docker-Container-Path-Stat", "Pragma", "Last-Modified",
}

// answerTime is how long a caller may take to read an answer of Berm's own.
const answerTime = 2 * time.Minute

var buffers = sync.Pool{New: func() any { b := make([]byte, upstream.BufferSize); return &b }}

// ask sends a request to the engine and returns the answer. A request without a method or a
// version takes those of the call.
func (c *call) ask(a upstream.Ask) (*http.Response, error) {
	return c.engine.Send(c.ctx, c.completed(a))
}

// open is ask, except that a status of 300 or more is an error.
func (c *call) open(a upstream.Ask) (*http.Response, error) {
	return c.engine.Open(c.ctx, c.completed(a))
}

func (c *call) completed(a upstream.Ask) upstream.Ask {
	if a.Method == "" {
		a.Method = c.r.Method // there is no request in StartContainer
	}
	a.Version = cmp.Or(a.Version, c.version)
	return a
}

// forward asks the engine and relays its answer. With stream, it flushes each piece at once, and
// the answer may take any time.
func (c *call) forward(a upstream.Ask, stream bool) error {
	if stream {
		if err := c.untilEnd(c.enter("streams", maxStreams)); err != nil {
			return err
		}
	}
	resp, err := c.ask(a) //nolint:bodyclose // relay closes it
	if err != nil {
		return err
	}
	return c.relay(resp, stream)
}

// relay copies the engine's answer to the caller. It returns an *upstream.Error for a status from 400 on.
func (c *call) relay(resp *http.Response, stream bool) error {
	if resp.StatusCode >= 400 {
		return upstream.Failure(resp)
	}
	defer func() { _ = resp.Body.Close() }()
	c.writeAudit(nil) // before the answer, which may go on for days
	c.head(resp)
	if stream {
		_ = http.NewResponseController(c.w).Flush()
	}
	c.closeMessage.begin(resp.Header.Get("Content-Type"))
	c.copy(resp.Body, stream)
	return nil
}

// head answers with the engine's status and headers.
func (c *call) head(resp *http.Response) {
	h := c.w.Header()
	for _, name := range passed {
		if values := resp.Header[name]; len(values) > 0 {
			h[name] = values
		}
	}
	h.Set("Api-Version", c.version.String())
	c.w.WriteHeader(resp.StatusCode)
}

// copy copies a body to the caller. If the engine or the server's drain breaks the answer off,
// copy breaks it off for the caller too, so that nobody takes a part for the whole. Before that,
// it sends the reason if the stream's format allows one.
func (c *call) copy(body io.Reader, stream bool) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	flusher := http.NewResponseController(c.w)
	defer c.hurry()()
	for {
		n, err := body.Read(*buf)
		if n > 0 {
			if !stream && c.ctx.Err() == nil { // after ctx ends, the deadline is that of hurry
				_ = flusher.SetWriteDeadline(time.Now().Add(answerTime))
			}
			if _, werr := c.w.Write((*buf)[:n]); werr != nil {
				panic(http.ErrAbortHandler)
			}
			_, _ = c.closeMessage.Write((*buf)[:n])
			if stream {
				_ = flusher.Flush()
			}
		}
		switch {
		case err == io.EOF:
			return
		case err != nil:
			switch {
			case proxy.GoingDown(c.ctx):
				_, _ = c.w.Write(c.closeMessage.word(farewell))
			case c.ctx.Err() == nil:
				_, _ = c.w.Write(c.closeMessage.word("berm: " + proxy.FaultOf(c.engine.Unavailable(c.ctx, err)).Detail))
			}
			_ = flusher.Flush()
			panic(http.ErrAbortHandler)
		}
	}
}

// hurry makes writes to a caller that doesn't read fail a moment after the call's context ends,
// until stop is called.
func (c *call) hurry() (stop func() bool) {
	conn, grace := http.NewResponseController(c.w), c.hangupGrace
	return context.AfterFunc(c.ctx, func() {
		_ = conn.SetWriteDeadline(time.Now().Add(grace)) // an in-process writer has none
	})
}

// answer answers v as JSON.
func (c *call) answer(status int, v any) error {
	body, ok := v.(json.RawMessage)
	if !ok {
		var err error
		if body, err = json.Marshal(v); err != nil {
			return err
		}
	}
	keep, release := proxy.ExchangeOf(c.ctx).LeaseOutput(c.ctx) // body stays in memory until it is read
	defer release()
	if err := keep(len(body)); err != nil {
		return err
	}
	h := c.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Api-Version", c.version.String())
	h.Set("Content-Length", strconv.Itoa(len(body)+1))
	_ = http.NewResponseController(c.w).SetWriteDeadline(time.Now().Add(answerTime)) // an in-process writer has none
	c.w.WriteHeader(status)
	_, _ = c.w.Write(append(body, '\n'))
	return nil
}

// status answers without a body.
func (c *call) status(status int) error {
	c.w.Header().Set("Api-Version", c.version.String())
	c.w.WriteHeader(status)
	return nil
}

// say writes and flushes a part of an answer. It aborts the call if the write fails.
func (c *call) say(part []byte) {
	if _, err := c.w.Write(part); err != nil {
		panic(http.ErrAbortHandler)
	}
	_ = http.NewResponseController(c.w).Flush()
}

// denied returns a denial by a rule of the proxy's own.
func denied(rule, field, message, allowed string) error {
	return &policy.DeniedError{Reasons: []policy.Reason{{Rule: rule, Field: field, Allowed: allowed, Message: message}}}
}

// notFound returns the fault of a missing object. The proxy also answers it for an object of
// another caller.
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
	message := cmp.Or(denial(f.Reasons), f.Detail)
	if f.Code == "backend_unavailable" { // clients would take the message for the engine's
		message = "berm: " + message
	}
	if f.Code == "policy_denied" || f.Status == http.StatusMisdirectedRequest {
		f.Status = http.StatusForbidden
	}
	if f.Status == http.StatusUnprocessableEntity {
		f.Status = http.StatusBadRequest
	}
	_ = proxy.WriteJSON(w, f.Status, "application/json", map[string]string{"message": message}) // a text can be encoded
}

// denial writes the reasons in one line: what was refused, by which rule, and what would be
// allowed. It returns "" without reasons.
func denial(reasons []policy.Reason) string {
	if len(reasons) == 0 {
		return ""
	}
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
