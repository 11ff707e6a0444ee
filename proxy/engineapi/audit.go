package engineapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// The verdicts of a Record.
const (
	VerdictAllowed   = "allowed"
	VerdictDenied    = "denied"
	VerdictWouldDeny = "would_deny" // let through in mode audit
	VerdictFailed    = "failed"     // neither allowed nor denied: the engine answered an error, or nothing
)

// Record is one decision in the audit log.
type Record struct {
	Time      time.Time       `json:"time"`
	RequestID string          `json:"request_id"`
	Caller    string          `json:"caller,omitempty"`
	Tenant    string          `json:"tenant,omitempty"`
	Profile   string          `json:"profile,omitempty"`
	Peer      string          `json:"peer"` // the user and process, the certificate or the address at the other end
	Method    string          `json:"method"`
	Route     string          `json:"route"` // the template
	Version   string          `json:"api_version,omitempty"`
	Verdict   string          `json:"verdict"`
	Rule      string          `json:"rule,omitempty"`    // the first that denied
	Reasons   []policy.Reason `json:"reasons,omitempty"` // why; never with a secret
	Objects   []string        `json:"objects,omitempty"` // IDs of the objects that the call worked on
	Error     string          `json:"error,omitempty"`   // the error that the caller got, if neither allowed nor denied
}

// Audit is the audit log, a file with one JSON object per line. If the file is moved away, Audit
// makes it again. It is safe for many goroutines. A nil Audit writes nothing.
type Audit struct {
	path string

	mu     sync.Mutex
	file   *os.File
	looked time.Time // when rotated last looked at the path
	broken error     // of the last write
}

// OpenAudit opens a log at an absolute path for appending. It creates a missing file with mode 0600.
func OpenAudit(path string) (*Audit, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("audit log %q: the path must be absolute", path)
	}
	a := &Audit{path: path}
	return a, a.open()
}

func (a *Audit) open() error {
	f, err := os.OpenFile(a.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	if a.file != nil {
		_ = a.file.Close()
	}
	a.file, a.looked = f, time.Now()
	return nil
}

// rotated reports whether the path leads to another file, or to none. It checks once a second.
func (a *Audit) rotated() bool {
	if time.Since(a.looked) < time.Second {
		return false
	}
	a.looked = time.Now()
	here, err := a.file.Stat()
	if err != nil {
		return true
	}
	there, err := os.Stat(a.path)
	return err != nil || !os.SameFile(here, there)
}

// write appends a record. After a failed write, ok returns false until one succeeds.
func (a *Audit) write(r Record) {
	if a == nil {
		return
	}
	line, err := json.Marshal(r)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && (a.broken != nil || a.rotated()) {
		err = a.open()
	}
	if err == nil {
		_, err = a.file.Write(append(line, '\n'))
	}
	a.broken = err
}

// ok reports whether the last record could be written. If not, the next write opens the file again.
func (a *Audit) ok() bool {
	if a == nil {
		return true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.broken == nil
}

// Close closes the file.
func (a *Audit) Close() error {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.file.Close()
}

// writeAudit writes the decision about the call into the audit log, once.
func (c *call) writeAudit(err error) {
	if c.written {
		return
	}
	c.written = true
	r := record(c, err)
	r.RequestID, r.Peer, r.Method, r.Objects = proxy.ExchangeOf(c.ctx).RequestID, peerName(c), method(c.r), slices.Compact(c.objects) // an object may be looked up twice
	c.opts.Audit.write(r)
	c.metrics.requests.WithLabelValues(r.Route, r.Verdict).Inc()
}

// record returns the Record of a call that ended with err.
func record(c *call, err error) Record {
	r := Record{
		Time: time.Now().UTC(), Caller: c.caller.Name, Tenant: c.caller.Tenant, Profile: c.caller.Profile,
		Route: unmatched.template, Verdict: VerdictAllowed,
	}
	if c.route != nil {
		r.Route = c.route.template
	}
	if c.version != 0 {
		r.Version = c.version.String()
	}
	var d *policy.DeniedError
	switch {
	case errors.As(err, &d):
		r.Verdict, r.Reasons = VerdictDenied, d.Reasons
	case err != nil:
		f := proxy.FaultOf(err)
		r.Verdict, r.Error = VerdictFailed, f.Detail
		if f.Status == http.StatusBadRequest && upstream.StatusOf(err) == 0 {
			r.Verdict, r.Rule = VerdictDenied, "request."+f.Code // by the proxy itself
		}
	case len(c.reasons) > 0:
		r.Verdict, r.Reasons = VerdictWouldDeny, c.reasons
	}
	if len(r.Reasons) > 0 {
		r.Rule = r.Reasons[0].Rule
	}
	return r
}

type metrics struct {
	requests   *prometheus.CounterVec
	dropped    *prometheus.CounterVec
	mismatches prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{requests: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berm_engine_api_requests_total", Help: "Requests to the Docker Engine API, by the route's template and what was decided.",
	}, []string{"route", "verdict"}), dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berm_engine_api_dropped_parameters_total", Help: "Query parameters that no engine knows, or a read doesn't need, by the route's template.",
	}, []string{"route"}), mismatches: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berm_engine_api_bind_mismatches_total", Help: "Containers that were removed because they had another directory mounted than was held.",
	})}
	if reg == nil {
		return m, nil
	}
	return m, errors.Join(reg.Register(m.requests), reg.Register(m.dropped), reg.Register(m.mismatches))
}
