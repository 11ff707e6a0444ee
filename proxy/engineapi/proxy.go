// Package engineapi serves the Docker Engine API to existing clients, judged by the same policy as the
// sandbox API.
//
// It forwards no request. It matches each request with a table of routes, and decodes path, query and
// body strictly. It replaces names by IDs of the caller's own objects, and judges what would be created.
// Then it writes a new request for the engine, and verifies the result before it answers the caller.
package engineapi

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/lifecycle/restart"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime/keylock"
)

// Options of New.
type Options struct {
	Dial   func(ctx context.Context) (net.Conn, error) // to the engine; mandatory
	Engine string                                      // the engine's name in messages to callers; may be empty
	Policy func() *policy.Policy                       // the policy in force; mandatory
	Owner  string                                      // ID of this instance, on all that it makes; mandatory
	Sealer *lifecycle.Sealer                           // seals and verifies labels; nil: a new one with its own key
	// Pins holds the sources of binds while the engine mounts them. Nil: binds are refused.
	Pins lifecycle.Holder
	// Unheld judges the binds of containers that were created while Berm couldn't hold mounts.
	// The engine mounts their sources directly. Nil: these containers don't start.
	Unheld lifecycle.Holder
	// Sockets returns the path of the socket that serves under a caller's name, or "" if there
	// is none. The caller's containers may mount it. The profile's name is never empty. Nil: no
	// caller has a socket.
	Sockets func(name, tenant, profile string) (path string)
	// Claims keeps starts and archive calls apart, those of sandboxes too. Nil: its own.
	Claims *mountpin.Claims
	// Mounts returns the mounts of all sandboxes, those that are being created included. A
	// sandbox is among them before it claims its mounts. Nil is none.
	Mounts func() []policy.Mount
	// EnsureNetwork makes one of the policy's networks, by the engine's name, unless it is
	// there. Nil: a network that isn't there is refused.
	EnsureNetwork func(ctx context.Context, name string) error
	// Labels are further labels of every container, unless its caller sets one of these names.
	// A caller can't set one to the value here. Nil is none.
	Labels map[string]string
	// Restarts keeps the restart policies of containers with binds, which Run carries out.
	// Nil: changes since a container's creation are lost with the process.
	Restarts restart.Store
	// ArchiveFixed says that the engine has the fixes of ArchiveFixed, whatever its release.
	ArchiveFixed bool
	Hosts        []string // further names that the Host header may carry over TCP, without port
	Audit        *Audit   // where decisions are written; nil is nowhere
	// SpoolDir is the directory for the files of builds under way. New removes files there that
	// a crash has left. Empty is the system's directory for temporary files.
	SpoolDir   string
	SpoolBytes int64         // of builds' files, at most half of it for one tenant; 0 is 2 GiB
	Bodies     *proxy.Bodies // memory for bodies, shared with other APIs; nil: its own

	Logger   *slog.Logger          // nil discards
	Registry prometheus.Registerer // nil: metrics are kept but not exported
	Tracer   trace.TracerProvider  // nil: no spans
}

// Proxy serves the Docker Engine API. It is safe for many goroutines.
type Proxy struct {
	opts       Options
	log        *slog.Logger
	gate       *proxy.Gate
	engine     *upstream.Engine
	metrics    *metrics
	known      owners // the tenant of a sealed container or network, by its full ID
	firsts     owners // the ID of the first container of a session, by the session; empty if several may be the first
	execs      owners // the ID of an exec's container, by the exec's ID
	ends       owners // the value of a container's expiry label, by its full ID
	limits     limits
	running    execCounts
	startLocks keylock.Map[string] // by container ID, and one for a tenant's count of execs

	restarts *restart.Supervisor

	transfers transfers
	spooled   *proxy.Budget
	usage     usage
	builds    builds
	names     keylock.Map[string] // held while an image is tagged or pushed, or a volume created or removed

	hangupGrace time.Duration // as the constant
}

// New makes a Proxy. The engine needn't be up.
func New(opts Options) (*Proxy, error) {
	switch {
	case opts.Dial == nil:
		return nil, errors.New("engineapi: Dial is mandatory")
	case opts.Policy == nil:
		return nil, errors.New("engineapi: Policy is mandatory")
	case opts.Owner == "":
		return nil, errors.New("engineapi: Owner is mandatory")
	}
	var err error
	if opts.Sealer == nil {
		if opts.Sealer, err = lifecycle.NewSealer(context.Background(), lifecycle.SealerOptions{Owner: opts.Owner, Logger: opts.Logger}); err != nil {
			return nil, err
		}
	}
	if opts.Claims == nil {
		opts.Claims = &mountpin.Claims{}
	}
	if opts.Mounts == nil {
		opts.Mounts = func() []policy.Mount { return nil }
	}
	if opts.Sockets == nil {
		opts.Sockets = func(_, _, _ string) string { return "" }
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	d := &Proxy{
		opts: opts, log: opts.Logger, engine: upstream.New(opts.Engine, opts.Dial), hangupGrace: hangupGrace,
		limits: limits{making: map[string]int64{}}, running: execCounts{seen: map[execsOf]int64{}}, usage: usage{walking: make(chan struct{}, 1)},
	}
	d.transfers.stall, d.transfers.most = transferStall, transferTime
	most := cmp.Or(opts.SpoolBytes, 2*maxContext)
	d.spooled = proxy.NewBudget("disk for build files", most, most/2)
	if err = cleanSpool(opts.SpoolDir); err != nil {
		return nil, err
	}
	if d.metrics, err = newMetrics(opts.Registry); err != nil {
		return nil, err
	}
	if err = newBuilds(d); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), upstream.AskTimeout)
	defer cancel()
	d.restarts, err = restart.New(ctx, restart.Options{Engine: restartEngine{d}, Store: opts.Restarts, Logger: opts.Logger, Registry: opts.Registry})
	if err != nil {
		return nil, err
	}
	d.gate, err = proxy.NewGate(proxy.GateOptions{
		Hosts: opts.Hosts, Fail: fail, Bodies: opts.Bodies, Logger: opts.Logger, Registry: opts.Registry, Tracer: opts.Tracer,
	})
	return d, err
}

// Close closes idle connections to the engine, and that of BuildKit.
func (d *Proxy) Close() error {
	d.engine.Transport.CloseIdleConnections()
	return d.builds.server.Close()
}

// Handler serves the requests of one listener, whose callers it tells apart by callers. The http.Server
// of the listener needs ConnContext.
func (d *Proxy) Handler(callers Callers) http.Handler {
	return d.gate.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.serve(w, r, callers)
	}))
}

// serve serves one request, and writes the decision about it into the audit log.
func (d *Proxy) serve(w http.ResponseWriter, r *http.Request, callers Callers) {
	c := &call{Proxy: d, w: w, r: r, ctx: r.Context(), rules: d.opts.Policy(), socket: callers.Socket}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // of the last answer
	rt, err := c.admit(callers)
	d.gate.Handle(proxy.Route{Name: rt.template, Quiet: true}, func(http.ResponseWriter, *http.Request) error {
		defer func() { // also of an answer that is broken off
			for _, leave := range slices.Backward(c.leaves) {
				leave()
			}
			c.writeAudit(err)
		}()
		if err == nil {
			err = concealPaths(c, rt.run(c))
		}
		return err
	}).ServeHTTP(w, r)
}

// admit identifies the caller and the route, and parses the request. The route is never nil.
func (c *call) admit(callers Callers) (*route, error) {
	caller, ok := callers.of(c.r)
	if !ok {
		return unmatched, denied("callers.unknown", "", "this connection is none of the configured callers'", "the users and certificates of the listener's callers")
	}
	c.caller = caller
	ex := proxy.ExchangeOf(c.ctx)
	ex.Caller = proxy.Caller{Name: caller.Name, Tenant: caller.Tenant}
	if caller.Socket { // the policy may have changed since it was mounted
		if err := c.rules.Operation(caller.Profile, policy.OpDockerSocket); err != nil {
			return unmatched, err
		}
	}
	rt, err := c.match()
	if err != nil {
		return unmatched, err
	}
	c.route = rt
	if err := c.parse(); err != nil {
		return rt, err
	}
	if rt.change && !c.opts.Audit.ok() {
		return rt, errAudit
	}
	return rt, nil
}

var errAudit = &proxy.Fault{
	Status: http.StatusServiceUnavailable, Code: "audit_unavailable", Title: "No audit log",
	Detail: "Berm can't write its audit log, and so refuses what would change anything",
}

// Caller is the caller that a connection belongs to.
type Caller struct {
	Name    string // as the audit log has it
	Tenant  string // the owner of all objects that it creates
	Profile string // of the policy; empty is "default"
	Audit   bool   // mode audit: a call that the policy denies goes through, and is logged
	Socket  bool   // it calls from a container, by the socket of Options.Sockets
}

// Callers identify the connections of one listener. A connection that is none of theirs is refused.
type Callers struct {
	UIDs  map[uint32]Caller // by the user at the other end of a unix socket
	Certs map[string]Caller // by the client certificate: its common name, or "sha256:" and the hex digest of it
	Any   *Caller           // everybody else who can reach the listener; nil is nobody
	// Socket is the clean path of the listener's unix socket. A bind of this path stands for one of the
	// engine's socket. Empty: no bind does.
	Socket string
}

// peerKey is the context's key of the unix.Ucred at the other end of a unix socket's connection,
// as the kernel says.
type peerKey struct{}

// ConnContext adds the user and process at the other end of a unix socket to the context of the
// connection. It is for http.Server.
func ConnContext(ctx context.Context, conn net.Conn) context.Context {
	if cred, ok := proxy.PeerOf(conn); ok {
		ctx = context.WithValue(ctx, peerKey{}, cred)
	}
	return ctx
}

func (c Callers) of(r *http.Request) (Caller, bool) {
	if cred, ok := r.Context().Value(peerKey{}).(unix.Ucred); ok {
		if caller, ok := c.UIDs[cred.Uid]; ok {
			return caller, true
		}
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		cert := r.TLS.PeerCertificates[0]
		sum := sha256.Sum256(cert.Raw)
		if caller, ok := c.Certs["sha256:"+hex.EncodeToString(sum[:])]; ok {
			return caller, true
		}
		name := cert.Subject.CommonName
		if caller, ok := c.Certs[name]; ok && name != "" && !strings.HasPrefix(name, "sha256:") { // a name can't pose as a digest
			return caller, true
		}
	}
	if c.Any == nil {
		return Caller{}, false
	}
	return *c.Any, true
}

// peerName describes the other end of the connection, for the audit log.
func peerName(c *call) string {
	r := c.r
	if cred, ok := r.Context().Value(peerKey{}).(unix.Ucred); ok {
		name := fmt.Sprintf("uid=%d pid=%d", cred.Uid, cred.Pid)
		if c.caller.Socket {
			name = "socket " + name
		}
		return name
	}
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		return r.RemoteAddr + " cn=" + r.TLS.PeerCertificates[0].Subject.CommonName
	}
	return r.RemoteAddr
}
