package serve

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/lifecycle/workspace"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime"
)

// front is a listener of a door, ready to be served.
type front struct {
	listener net.Listener
	handler  http.Handler
	opts     proxy.ServeOptions
}

// serveFronts serves all of them until ctx ends, or one of them fails.
func serveFronts(ctx context.Context, fronts []front) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, f := range fronts {
		group.Go(func() error { return proxy.Serve(ctx, f.listener, f.handler, f.opts) })
	}
	return group.Wait()
}

// doorParts are what the doors are made of.
type doorParts struct {
	cfg        *config.Config
	manager    *lifecycle.Manager
	db         *store.Store
	engine     runtime.Runtime // without the agent
	policies   *policyKeeper
	tokens     *proxy.Tokens
	signingKey []byte
	sealer     *lifecycle.Sealer
	owner      string
	log        *slog.Logger
	tel        *telemetry
	holder     lifecycle.Holder
	unheld     *mountpin.Trusted  // see engineapi.Options.Unheld
	labels     map[string]string  // see engineapi.Options.Labels
	workspaces *workspace.Service // nil without a root for chats, as chats
	chats      *chat.Service
	sockets    passedSockets
	bodies     *proxy.Bodies
}

// sandboxAPI opens the door of the sandbox API, and tells its address.
func (d *doorParts) sandboxAPI(ctx context.Context, undo *cleanup) (front, string, error) {
	cfg := d.cfg.HTTP
	api := sandboxapi.Options{
		Manager: d.manager, Policy: d.policies.Policy, Tokens: d.tokens, TokenHeader: d.cfg.Security.TokenHeader,
		Hosts: cfg.AllowedHosts, Origins: cfg.AllowedOrigins, Version: config.Version, SigningKey: d.signingKey,
		Bodies: d.bodies, Logger: d.log, Registry: d.tel.registry, Gatherer: d.tel.registry, Tracer: d.tel.tracer,
	}
	if d.chats != nil {
		api.Workspaces, api.Chats = d.workspaces, d.chats
	}
	handler, err := sandboxapi.New(api)
	if err != nil {
		return front{}, "", err
	}
	mode, err := cfg.FileMode()
	if err != nil {
		return front{}, "", err
	}
	listener, passed := d.sockets[cfg.Listen]
	if !passed {
		listener, err = proxy.Listen(ctx, cfg.Listen, mode)
	}
	if err != nil {
		return front{}, "", err
	}
	undo.add(func() error { _ = listener.Close(); return nil }) // closed already if it was served
	if d.tokens.Len() == 0 && WorldWritable(cfg.Listen, mode) {
		d.log.WarnContext(ctx, "sandbox_api_open", "address", cfg.Listen,
			"error", "every user of this machine may do everything: configure tokens, or an http.socket_mode of 0660")
	}
	address := cfg.Listen
	if !strings.HasPrefix(address, "unix://") {
		address = listener.Addr().String()
	}
	return front{listener, handler, proxy.ServeOptions{DrainTimeout: cfg.DrainTimeout, Logger: d.log}}, address, nil
}

// engineDoor returns the engine proxy, or nil for an engine that doesn't speak the Docker
// Engine API. It needs no listeners: containers of earlier runs may still exist.
func (d *doorParts) engineDoor(undo *cleanup) (*engineapi.Door, error) {
	dialer, ok := d.engine.(interface {
		Dial(ctx context.Context) (net.Conn, error)
	})
	if !ok {
		return nil, nil
	}
	opts := engineapi.Options{
		Dial: func(ctx context.Context) (net.Conn, error) {
			// Nobody gets to the engine before it is known what sandboxes have mounted.
			if err := d.manager.Ready(ctx); err != nil {
				return nil, err
			}
			return dialer.Dial(ctx)
		},
		Policy: d.policies.Policy, Owner: d.owner, Sealer: d.sealer, Hosts: d.cfg.EngineAPI.AllowedHosts,
		Pins: d.holder, Unheld: d.unheld, Claims: &d.unheld.Claims, Mounts: d.manager.MountsInUse, ArchiveFixed: d.cfg.EngineAPI.ArchiveFixed,
		EnsureNetwork: d.manager.EnsureNetwork, Labels: d.labels, Restarts: d.db,
		SpoolDir: d.cfg.SpoolDir(), SpoolBytes: d.cfg.EngineAPI.SpoolMB << 20,
		Bodies: d.bodies, Logger: d.log, Registry: d.tel.registry, Tracer: d.tel.tracer,
	}
	if path := d.cfg.EngineAPI.AuditLog; path != "" && len(d.cfg.EngineAPI.Listeners) > 0 {
		audit, err := engineapi.OpenAudit(path)
		if err != nil {
			return nil, err
		}
		undo.add(audit.Close)
		opts.Audit = audit
	}
	if len(d.cfg.EngineAPI.Listeners) == 0 {
		opts.Registry, opts.SpoolDir = nil, "" // nobody calls it
	}
	door, err := engineapi.New(opts)
	if err != nil {
		return nil, err
	}
	undo.add(door.Close)
	return door, nil
}

// engineAPI opens all listeners of the engine proxy, and returns the address of the
// first; empty without one.
func (d *doorParts) engineAPI(ctx context.Context, door *engineapi.Door, undo *cleanup) (fronts []front, first string, err error) {
	if door == nil && len(d.cfg.EngineAPI.Listeners) > 0 {
		return nil, "", errors.New("engine_api.listeners need an engine that speaks the Docker Engine API")
	}
	for _, l := range d.cfg.EngineAPI.Listeners {
		listener, err := d.listenEngineAPI(ctx, l)
		if err != nil {
			return nil, "", err
		}
		undo.add(func() error { _ = listener.Close(); return nil }) // closed already if it was served
		fronts = append(fronts, front{listener, door.Handler(callersOf(l)), proxy.ServeOptions{
			DrainTimeout: d.cfg.HTTP.DrainTimeout, Logger: d.log, ConnContext: engineapi.ConnContext,
		}})
		address := l.Address
		if strings.HasPrefix(address, "tcp://") { // the port may have been left to the system
			address = "tcp://" + listener.Addr().String()
		}
		first = cmp.Or(first, address)
		d.log.InfoContext(ctx, "serving_engine_api", "address", address, "tls", l.TLSCertFile != "", "callers", len(l.Callers))
		mode, _ := l.FileMode() // which has listened
		if l.AllowPlain && l.ClientCAFile == "" || Anybody(l) && WorldWritable(l.Address, mode) {
			d.log.WarnContext(ctx, "engine_api_open", "address", l.Address,
				"error", "whoever reaches this address is its caller: keep it in a network of those who may")
		}
	}
	return fronts, first, nil
}

func (d *doorParts) listenEngineAPI(ctx context.Context, l config.Listener) (net.Listener, error) {
	secured, err := ListenerTLS(l)
	if err != nil {
		return nil, err
	}
	mode, err := l.FileMode()
	if err != nil {
		return nil, err
	}
	uid, gid, err := l.Owners()
	if err != nil {
		return nil, err
	}
	address := strings.TrimPrefix(l.Address, "tcp://")
	listener, passed := d.sockets[address]
	if !passed {
		listener, err = proxy.ListenOwned(ctx, address, mode, uid, gid)
	}
	if err != nil || secured == nil {
		return listener, err
	}
	return tls.NewListener(listener, secured), nil
}

// listenerTLS is nil for a listener without TLS.
func ListenerTLS(l config.Listener) (*tls.Config, error) {
	if l.TLSCertFile == "" {
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(l.TLSCertFile, l.TLSKeyFile)
	if err != nil {
		return nil, fmt.Errorf("engine_api: certificate of %s: %w", l.Address, err)
	}
	// A hijacked connection can't be one of several streams.
	secured := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}}
	if l.ClientCAFile == "" {
		return secured, nil
	}
	pem, err := os.ReadFile(l.ClientCAFile)
	if err != nil {
		return nil, fmt.Errorf("engine_api: client certificates of %s: %w", l.Address, err)
	}
	secured.ClientCAs, secured.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !secured.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("engine_api: client certificates of %s: %s has no certificate", l.Address, l.ClientCAFile)
	}
	return secured, nil
}

// callersOf are a listener's callers as the door knows them.
func callersOf(l config.Listener) engineapi.Callers {
	out := engineapi.Callers{UIDs: map[uint32]engineapi.Caller{}, Certs: map[string]engineapi.Caller{}}
	for _, c := range l.Callers {
		caller := engineapi.Caller{Name: c.Name, Tenant: c.Tenant, Profile: c.Profile, Audit: c.Mode == config.ModeAudit}
		for _, uid := range c.UIDs {
			out.UIDs[uid] = caller
		}
		for _, cert := range c.Certs {
			out.Certs[cert] = caller
		}
		if c.Anybody() {
			out.Any = &caller
		}
	}
	return out
}

// worldWritable tells whether every user of the machine can connect to a unix socket.
func WorldWritable(address string, mode fs.FileMode) bool {
	return strings.HasPrefix(address, "unix://") && mode&0o002 != 0
}

// checkExposure refuses a sandbox API that strangers can reach, as far as it can be known.
func CheckExposure(cfg config.HTTP, tokens int) error {
	if cfg.Listen == config.ListenNone || config.Passed(cfg.Listen) { // what is passed has an address once it is there
		return nil
	}
	return proxy.CheckExposure(cfg.Listen, tokens)
}

// hasProfiles refuses a policy that lacks a profile of a configured caller.
func HasProfiles(cfg config.EngineAPI) func(*policy.Policy) error {
	return func(p *policy.Policy) error {
		for _, l := range cfg.Listeners {
			for _, c := range l.Callers {
				if _, ok := p.Profile(c.Profile); !ok {
					return fmt.Errorf("policy: there is no profile %q, which caller %s of %s has", c.Profile, c.Name, l.Address)
				}
			}
		}
		return nil
	}
}

// allOf joins checks of a policy.
func AllOf(checks ...func(*policy.Policy) error) func(*policy.Policy) error {
	return func(p *policy.Policy) error {
		for _, check := range checks {
			if err := check(p); err != nil {
				return err
			}
		}
		return nil
	}
}

func Anybody(l config.Listener) bool {
	for _, c := range l.Callers {
		if c.Anybody() {
			return true
		}
	}
	return false
}
