// Package docker runs sandboxes on a Docker Engine of version 20.10 (API 1.41) or newer. The
// engine need not be up when the Runtime is made. It may be restarted, or replaced by another
// version, at any time.
package docker

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/docker/docker/api"
	"github.com/docker/docker/api/types/versions"
	"github.com/docker/docker/client"
	"golang.org/x/sync/singleflight"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/keylock"
)

const (
	// minAPIVersion is that of Docker 20.10, the first with private cgroup namespaces, which
	// Spec promises.
	minAPIVersion = "1.41"

	// cleanupTimeout bounds the removal of what a failed call made.
	cleanupTimeout = 5 * time.Second
)

// Options of New.
type Options struct {
	// Host is the engine's address, "unix:///path" or "tcp://host:port". Empty is the environment's
	// DOCKER_HOST, or else unix:///var/run/docker.sock. With DOCKER_CERT_PATH set, calls use TLS and
	// always verify the engine's certificate.
	Host string
	// CallTimeout is how long the engine may take to answer one call. 0 is 30 seconds.
	CallTimeout time.Duration
	// RegistryAuth returns the credentials for a registry by its host name and port;
	// an empty user with a secret is an identity token. Nil, and empty strings, send none.
	RegistryAuth func(ctx context.Context, host string) (user, secret string, err error)
	// Program reads Berm's program, for sandboxes on engines that don't see this host's
	// files: see runtime.Agent. Nil is none.
	Program func() ([]byte, error)
	// Logger logs failures that no error reports. Nil discards.
	Logger *slog.Logger
}

// Runtime is a runtime.Runtime on a Docker Engine. It may be used by many goroutines at once.
type Runtime struct {
	host      string
	url       *url.URL // of host, as the transport takes it
	transport *http.Transport
	timeout   time.Duration
	auth      func(ctx context.Context, host string) (user, secret string, err error)
	log       *slog.Logger

	session     atomic.Pointer[session] // nil until connected
	connecting  singleflight.Group
	networks    singleflight.Group
	readProgram func() ([]byte, error)
	programName func() (string, error) // returns the name of the program's volume
	stored      atomic.Bool            // this process has put the program into the engine's volume
	starts      keylock.Map[string]    // held for starts of programs, and for pauses; by the container's id
}

var (
	_ runtime.Runtime = (*Runtime)(nil)
	_ runtime.Starter = (*Runtime)(nil)
)

// New makes a Runtime. It doesn't talk to the engine; it fails when the address or
// the TLS files are unusable.
func New(opts Options) (*Runtime, error) {
	host := cmp.Or(opts.Host, os.Getenv(client.EnvOverrideHost), client.DefaultDockerHost)
	u, err := client.ParseHostURL(host)
	if err != nil {
		return nil, fmt.Errorf("engine address: %w", err)
	}
	if !slices.Contains([]string{"unix", "tcp", "http", "https"}, u.Scheme) {
		return nil, fmt.Errorf("engine address %q: only unix:// and tcp:// can be used", host)
	}
	if opts.CallTimeout < 0 {
		return nil, errors.New("the call timeout is negative")
	}
	r := &Runtime{
		host:        host,
		url:         &url.URL{Scheme: "http", Host: u.Host, Path: u.Path},
		transport:   &http.Transport{MaxIdleConns: 16, MaxIdleConnsPerHost: 16, IdleConnTimeout: 30 * time.Second},
		timeout:     cmp.Or(opts.CallTimeout, 30*time.Second),
		auth:        opts.RegistryAuth,
		log:         opts.Logger,
		readProgram: opts.Program,
		programName: sync.OnceValues(func() (string, error) { return nameProgram(opts.Program) }),
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	if u.Scheme == "unix" {
		r.url.Host, r.url.Path = client.DummyHost, ""
	}
	// The client's options set up the transport in place; the client itself isn't needed.
	configure := []client.Opt{client.WithHTTPClient(&http.Client{Transport: r.transport}), client.WithHost(host)}
	if dir := os.Getenv(client.EnvOverrideCertPath); dir != "" && u.Scheme != "unix" {
		r.url.Scheme = "https"
		configure = append(configure, client.WithTLSClientConfig(
			filepath.Join(dir, "ca.pem"), filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")))
	}
	if _, err := client.NewClientWithOpts(configure...); err != nil {
		return nil, fmt.Errorf("engine address %q: %w", host, err)
	}
	return r, nil
}

// Close closes idle connections. Calls that are under way go on.
func (r *Runtime) Close() error {
	r.transport.CloseIdleConnections()
	return nil
}

// session holds a client and the engine's properties when it was first reached. It ends when the engine
// can't be reached, or has another version.
type session struct {
	*client.Client
	http    http.RoundTripper
	info    runtime.Info
	seccomp string                          // SecurityOpt value
	root    string                          // the engine's own directory
	skew    time.Duration                   // how far the engine's clock is ahead
	images  runtime.Cache[string, declared] // by image ID
}

// now returns the time of the engine's clock.
func (s *session) now() time.Time { return time.Now().Add(s.skew) }

// connect returns the session, and makes one if there is none. It asks the engine once for all
// callers that wait.
func (r *Runtime) connect(ctx context.Context) (*session, error) {
	if s := r.session.Load(); s != nil {
		return s, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return runtime.Together(ctx, &r.connecting, "", r.timeout, func(ctx context.Context) (*session, error) {
		s, err := r.negotiate(ctx)
		if err != nil {
			return nil, runtime.Unavailable(fmt.Errorf("engine at %s: %w", r.host, err))
		}
		r.session.Store(s)
		return s, nil
	})
}

func (r *Runtime) negotiate(ctx context.Context) (*session, error) {
	s := &session{}
	s.http = &roundTripper{base: r.transport, changed: func() { r.session.CompareAndSwap(s, nil) }}
	first := &keeper{RoundTripper: s.http}
	unversioned, err := r.client(first, api.DefaultVersion)
	if err != nil {
		return nil, err
	}
	ping, err := unversioned.Ping(ctx)
	if err != nil && first.err != nil {
		return nil, fmt.Errorf("%w: %w", err, first.err)
	}
	if err != nil {
		return nil, err
	}
	version := api.DefaultVersion
	if versions.LessThan(ping.APIVersion, version) {
		version = ping.APIVersion
	}
	if versions.LessThan(version, minAPIVersion) {
		return nil, fmt.Errorf("its API version is %q, at least %s is needed (Docker 20.10)", ping.APIVersion, minAPIVersion)
	}
	if s.Client, err = r.client(s.http, version); err != nil {
		return nil, err
	}
	before := time.Now()
	info, err := s.Info(ctx)
	if err != nil {
		return nil, err
	}
	if t, err := time.Parse(time.RFC3339Nano, info.SystemTime); err == nil {
		// Assume that the engine reads its clock in the middle of the call. Up to a second
		// counts as noise: on one machine, both clocks are the same.
		if skew := t.Sub(before.Add(time.Since(before) / 2)); skew.Abs() > time.Second {
			s.skew = skew
		}
	}
	s.info = runtime.Info{
		Backend:       "docker",
		Version:       info.ServerVersion,
		APIVersion:    version,
		OS:            info.OSType,
		Architecture:  runtime.GoArch(info.Architecture),
		CPUs:          info.NCPU,
		MemoryBytes:   info.MemTotal,
		CgroupVersion: info.CgroupVersion,
	}
	s.root = info.DockerRootDir
	if s.seccomp, err = runtime.SeccompOption(s.info.Architecture); err != nil {
		return nil, err
	}
	return s, nil
}

func (r *Runtime) client(rt http.RoundTripper, version string) (*client.Client, error) {
	return client.NewClientWithOpts(
		client.WithHost(r.host),
		client.WithHTTPClient(&http.Client{Transport: rt, CheckRedirect: client.CheckRedirect}),
		client.WithScheme(r.url.Scheme),
		client.WithVersion(version),
	)
}

// call runs f with a session, within the call timeout, and classes its error.
func (r *Runtime) call(ctx context.Context, op string, f func(context.Context, *session) error) error {
	callCtx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	s, err := r.connect(callCtx)
	if err == nil {
		err = f(callCtx, s)
	}
	return r.failure(ctx, s, op, err)
}

// Sweep does nothing: the engine lists all parts of its containers.
func (r *Runtime) Sweep(context.Context) error { return nil }

// Info asks the engine for its version and its host's size.
func (r *Runtime) Info(ctx context.Context) (runtime.Info, error) {
	var out runtime.Info
	err := r.call(ctx, "ask the engine who it is", func(ctx context.Context, s *session) error {
		// The session's values may be out of date.
		info, err := s.Info(ctx)
		if err != nil {
			return err
		}
		out = s.info
		out.Version, out.CPUs, out.MemoryBytes = info.ServerVersion, info.NCPU, info.MemTotal
		return nil
	})
	return out, err
}

// Dial connects to the engine as every call does, with TLS if configured. It is for clients of
// the parts of the engine's API that Runtime doesn't use.
func (r *Runtime) Dial(ctx context.Context) (net.Conn, error) {
	address := r.url.Host
	if r.url.Port() == "" { // for a unix socket, the dialler ignores the address
		address = net.JoinHostPort(r.url.Hostname(), r.url.Scheme)
	}
	conn, err := r.transport.DialContext(ctx, "tcp", address)
	if err != nil || r.url.Scheme != "https" {
		return conn, err
	}
	cfg := r.transport.TLSClientConfig.Clone()
	if cfg.ServerName == "" {
		cfg.ServerName = r.url.Hostname()
	}
	secured := tls.Client(conn, cfg)
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("engine at %s: %w", r.host, err)
	}
	return secured, nil
}
