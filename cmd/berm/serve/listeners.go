package serve

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

// listener is a listener with what serves it.
type listener struct {
	net.Listener
	handler http.Handler
	opts    proxy.ServeOptions
}

// listen opens all listeners, and writes down the addresses.
func (s *server) listen(ctx context.Context) (err error) {
	s.undo.add(s.state.withdraw)
	if s.proxy, err = s.newProxy(); err != nil {
		return err
	}
	address, err := s.listenProxy(ctx)
	if err == nil {
		err = s.listenSockets(ctx)
	}
	if err == nil && address != "" {
		err = s.state.put(stateEngineAddress, address)
	}
	if err != nil || s.cfg.HTTP.Listen == config.ListenNone {
		return err
	}
	if address, err = s.listenAPI(ctx); err != nil {
		return err
	}
	if err := s.state.put(StateAddress, address); err != nil {
		return err
	}
	s.log.InfoContext(ctx, "serving", "address", address, "version", config.Version, "engine", s.cfg.Engine.Kind,
		"instance", s.owner, "state_dir", s.cfg.StateDir, "policy_file", s.cfg.PolicyFile, "tokens", s.inputs.Tokens.Len())
	return nil
}

// open adds a listener: the socket that systemd has passed, or a new one.
func (s *server) open(address string, listen func() (net.Listener, error), secured *tls.Config, handler http.Handler, opts proxy.ServeOptions) (net.Listener, error) {
	l, passed := s.sockets[address]
	if !passed {
		var err error
		if l, err = listen(); err != nil {
			return nil, err
		}
	}
	if secured != nil {
		l = tls.NewListener(l, secured)
	}
	s.undo.add(func() error { _ = l.Close(); return nil }) // closed already if it was served
	opts.DrainTimeout, opts.Logger = s.cfg.HTTP.DrainTimeout, s.log
	s.listeners = append(s.listeners, listener{l, handler, opts})
	return l, nil
}

// listenAPI opens the listener of the sandbox API, and returns its address.
func (s *server) listenAPI(ctx context.Context) (string, error) {
	cfg := s.cfg.HTTP
	api := sandboxapi.Options{
		Manager: s.manager, Policy: s.policies.Policy, Version: config.Version, SigningKey: s.inputs.SigningKey, Gatherer: s.tel.registry,
		Gate: proxy.GateOptions{
			Tokens: s.inputs.Tokens, TokenHeader: s.cfg.Security.TokenHeader, Hosts: cfg.AllowedHosts, Origins: cfg.AllowedOrigins,
			Bodies: s.bodies, Logger: s.log, Registry: s.tel.registry, Tracer: s.tel.tracer,
		},
	}
	if s.chats != nil {
		api.Workspaces, api.Chats = s.quotas, s.chats
	}
	handler, err := sandboxapi.New(api)
	if err != nil {
		return "", err
	}
	mode := cfg.FileMode()
	l, err := s.open(cfg.Listen, func() (net.Listener, error) { return proxy.Listen(ctx, cfg.Listen, mode) }, nil, handler, proxy.ServeOptions{})
	if err != nil {
		return "", err
	}
	if s.inputs.Tokens.Len() == 0 && WorldWritable(cfg.Listen, mode) {
		s.log.WarnContext(ctx, "sandbox_api_open", "address", cfg.Listen,
			"error", "every user of this machine may do everything: configure tokens, or an http.socket_mode of 0660")
	}
	if strings.HasPrefix(cfg.Listen, "unix://") {
		return cfg.Listen, nil
	}
	return l.Addr().String(), nil
}

// newProxy returns the engine proxy, or nil for an engine that doesn't speak the Docker
// Engine API. It needs no listeners: containers of earlier runs may still exist.
func (s *server) newProxy() (*engineapi.Proxy, error) {
	cfg := s.cfg.EngineAPI
	dialer, ok := s.engine.(interface {
		Dial(ctx context.Context) (net.Conn, error)
	})
	if !ok {
		if len(cfg.Listeners) > 0 {
			return nil, errors.New("engine_api.listeners need an engine that speaks the Docker Engine API")
		}
		return nil, nil
	}
	opts := engineapi.Options{
		Dial: func(ctx context.Context) (net.Conn, error) {
			// Nobody gets to the engine before it is known what sandboxes have mounted.
			if err := s.manager.Ready(ctx); err != nil {
				return nil, err
			}
			conn, err := dialer.Dial(ctx)
			if err != nil {
				return nil, s.manager.Unreachable(err)
			}
			return conn, nil
		},
		Engine: EngineName(s.cfg.Engine), Policy: s.policies.Policy, Owner: s.owner, Sealer: s.sealer, Hosts: cfg.AllowedHosts,
		Sockets: func(name, tenant, profile string) string {
			return s.mounted[engineapi.Caller{Name: name, Tenant: tenant, Profile: profile, Socket: true}]
		},
		Pins: s.holder, Unheld: s.unheld, Claims: &s.unheld.Claims, Mounts: s.manager.MountsInUse, ArchiveFixed: cfg.ArchiveFixed,
		EnsureNetwork: s.manager.EnsureNetwork, Labels: s.self.Labels(), Restarts: s.db,
		SpoolDir: s.cfg.SpoolDir(), SpoolBytes: cfg.SpoolMB << 20,
		Bodies: s.bodies, Logger: s.log, Registry: s.tel.registry, Tracer: s.tel.tracer,
	}
	if len(cfg.Listeners) == 0 {
		opts.Registry, opts.SpoolDir = nil, "" // nobody calls it
	} else if cfg.AuditLog != "" {
		audit, err := engineapi.OpenAudit(cfg.AuditLog)
		if err != nil {
			return nil, err
		}
		s.undo.add(audit.Close)
		opts.Audit = audit
	}
	door, err := engineapi.New(opts)
	if err != nil {
		return nil, err
	}
	s.undo.add(door.Close)
	return door, nil
}

// listenProxy opens all listeners of the engine proxy, and returns the address of the
// first; empty without one.
func (s *server) listenProxy(ctx context.Context) (first string, err error) {
	for i, cfg := range s.cfg.EngineAPI.Listeners {
		mode := cfg.FileMode()
		uid, gid := cfg.Owners()
		address := strings.TrimPrefix(cfg.Address, "tcp://")
		listen := func() (net.Listener, error) { return proxy.ListenOwned(ctx, address, mode, uid, gid) }
		l, err := s.open(address, listen, s.inputs.TLS[i], s.proxy.Handler(callersOf(cfg)), proxy.ServeOptions{ConnContext: engineapi.ConnContext})
		if err != nil {
			return "", err
		}
		address = cfg.Address
		if strings.HasPrefix(address, "tcp://") { // the port may have been left to the system
			address = "tcp://" + l.Addr().String()
		}
		first = cmp.Or(first, address)
		s.log.InfoContext(ctx, "serving_engine_api", "address", address, "tls", cfg.TLSCertFile != "", "callers", len(cfg.Callers))
		if cfg.AllowPlain && cfg.ClientCAFile == "" || cfg.ForEverybody() && WorldWritable(cfg.Address, mode) {
			s.log.WarnContext(ctx, "engine_api_open", "address", cfg.Address,
				"error", "everybody who reaches this address is its caller: keep it in a network of those who may")
		}
	}
	return first, nil
}

// listenSockets opens a socket for each caller, which the caller's containers may mount in place of
// the engine's. The sockets can be reached only by such a mount.
func (s *server) listenSockets(ctx context.Context) error {
	if len(s.cfg.EngineAPI.Listeners) == 0 || s.holder.Mode() != mountpin.ModeHeld {
		return nil
	}
	dir := filepath.Join(s.cfg.StateDir, "sockets")
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil {
		return fmt.Errorf("sockets for containers: %w", err)
	}
	s.mounted = map[engineapi.Caller]string{}
	for _, cfg := range s.cfg.EngineAPI.Listeners {
		for _, c := range cfg.Callers {
			// Mode audit isn't for those who can enter a container.
			caller := engineapi.Caller{Name: c.Name, Tenant: c.Tenant, Profile: cmp.Or(c.Profile, "default"), Socket: true}
			if s.mounted[caller] != "" {
				continue
			}
			path := filepath.Join(dir, strconv.Itoa(len(s.mounted)))
			listen := func() (net.Listener, error) { return proxy.Listen(ctx, "unix://"+path, 0o666) }
			opts := proxy.ServeOptions{ConnContext: engineapi.ConnContext, OneClient: true}
			if _, err := s.open("", listen, nil, s.proxy.Handler(engineapi.Callers{Any: &caller}), opts); err != nil {
				return err
			}
			s.mounted[caller] = path
		}
	}
	return nil
}

// listenerTLS returns a listener's TLS configuration, or nil for a listener without TLS.
func listenerTLS(l config.Listener) (*tls.Config, error) {
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

// callersOf returns a listener's callers in the form of the engine proxy.
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
	if path, ok := strings.CutPrefix(l.Address, "unix://"); ok {
		out.Socket = filepath.Clean(path)
	}
	return out
}

// WorldWritable reports whether every user of the machine can connect to a unix socket.
func WorldWritable(address string, mode fs.FileMode) bool {
	return strings.HasPrefix(address, "unix://") && mode&0o002 != 0
}
