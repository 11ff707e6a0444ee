package serve

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi"
	"github.com/bermhq/berm/runtime"
)

// flushTimeout bounds the sending of the last telemetry.
const flushTimeout = 5 * time.Second

// NewCommand makes the command serve.
func NewCommand() *cobra.Command {
	var enter bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve sandboxes over HTTP",
		Long: `Serve sandboxes over HTTP until SIGTERM or SIGINT, then let the requests in flight
finish. Sandboxes outlive the server; the next one on the same state directory
knows them. SIGHUP reloads the policy, as a change of its file does, and reads the
log's level again.

Of systemd it takes sockets, where an address says systemd:NAME, and tells it when it
is ready, reloads, still works (WatchdogSec=) and goes down.

Flags go over environment variables, those over the configuration file. Without
tokens, only a loopback address or a unix socket may be listened on.`,
		Example: `  berm serve
  berm serve --config berm.yaml --policy policy.yaml
  berm serve --listen 0.0.0.0:7070 --token-file tokens.yaml
  berm serve --listen unix:///run/berm.sock --state-dir /var/lib/berm
  BERM_ENGINE_KIND=containerd berm serve --enter-engine`,
		Args: cobra.NoArgs,
		RunE: config.Configured(func(cmd *cobra.Command, cfg *config.Config, _ []string) error {
			if enter {
				if os.Getenv("LISTEN_FDS") != "" {
					return errors.New("--enter-engine: sockets of systemd can't be taken along")
				}
				if done, err := EnterEngine(cmd.Context(), cfg.Engine); done || err != nil {
					return err
				}
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends the process at once
			return runServer(ctx, cfg, func() (*config.Config, error) { return config.FromFlags(cmd) }, cmd.ErrOrStderr())
		}),
	}
	config.AddFlags(cmd)
	cmd.Flags().BoolVar(&enter, "enter-engine", false, "from a container: serve in the mount namespace of the engine's process, as containerd needs it")
	return cmd
}

// cleanup holds functions that undo the steps of a start. It runs them in reverse order, at the
// end of the server or after a step that failed.
type cleanup []func() error

func (c *cleanup) add(f func() error) { *c = append(*c, f) }

func (c *cleanup) run() error {
	var errs []error
	for i := len(*c) - 1; i >= 0; i-- {
		errs = append(errs, (*c)[i]())
	}
	return errors.Join(errs...)
}

// server is what runs. Its parts are made in the order of load, connect, manage and listen.
type server struct {
	cfg    *config.Config
	asRead *config.Config                 // cfg before systemd's sockets replaced their addresses
	read   func() (*config.Config, error) // reads the settings again
	undo   cleanup
	hup    chan os.Signal

	inputs  *Inputs
	sockets passedSockets
	state   *state
	owner   string
	tel     *telemetry
	log     *slog.Logger
	systemd *notifier

	settingsReloads *prometheus.CounterVec

	view      View
	self      Self
	unheld    *mountpin.Trusted
	holder    lifecycle.Holder
	policies  *policyKeeper
	db        *store.Store
	engine    Engine // without the agent
	quotas    *quota.Service
	chats     *chat.Service // nil without a root for chats
	sealer    *lifecycle.Sealer
	manager   *lifecycle.Service
	mounted   map[engineapi.Caller]string // paths of the sockets that a caller's containers may mount
	proxy     *engineapi.Proxy            // nil for an engine that doesn't speak its API
	bodies    *proxy.Bodies
	listeners []listener
}

// runServer puts everything together and runs it until ctx ends. Read reads the settings
// again.
func runServer(ctx context.Context, asRead *config.Config, read func() (*config.Config, error), stderr io.Writer) (err error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50) // a sidecar's memory counts for more than its garbage collector's time
	}
	s := &server{asRead: asRead, read: read, hup: make(chan os.Signal, 1), bodies: proxy.NewBodies()}
	defer func() { err = errors.Join(err, s.undo.run()) }()
	signal.Notify(s.hup, syscall.SIGHUP)
	s.undo.add(func() error { signal.Stop(s.hup); return nil })
	err = s.load(ctx, stderr)
	for _, step := range []func(context.Context) error{s.connect, s.manage, s.listen} {
		if err == nil {
			err = step(ctx)
		}
	}
	if err == nil {
		return s.run(ctx)
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil // cancelled before it served
	}
	return err
}

// load reads the inputs, locks the state directory, and starts the log.
func (s *server) load(ctx context.Context, stderr io.Writer) (err error) {
	if s.sockets, s.cfg, err = takeSockets(s.asRead); err != nil {
		return err
	}
	s.undo.add(s.sockets.Close)
	if s.inputs, err = loadInputs(s.cfg); err != nil {
		return err
	}
	if s.state, err = openState(s.cfg.StateDir); err != nil {
		return err
	}
	s.undo.add(s.state.Close)
	if s.owner, err = s.state.owner(s.cfg.Engine.Instance); err != nil {
		return err
	}
	if s.tel, err = newTelemetry(ctx, s.cfg, s.inputs.Headers, s.owner, stderr); err != nil {
		return err
	}
	s.log = s.tel.logger
	s.undo.add(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
		defer cancel()
		if err := s.tel.Close(ctx); err != nil { // a failing collector is no error of the server
			s.log.WarnContext(ctx, "telemetry_failed", "error", err.Error())
		}
		return nil
	})
	if s.state.replaced != "" {
		s.log.InfoContext(ctx, "restore_finished", "replaced", s.state.replaced)
	}
	if s.systemd, err = newNotifier(s.log); err != nil {
		return err
	}
	s.undo.add(s.systemd.Close)
	s.settingsReloads = countReloads(s.tel.registry, "settings")
	return nil
}

// connect finds out what the engine shares with this process, and loads the policy.
func (s *server) connect(ctx context.Context) (err error) {
	s.view = EngineView(ctx, s.cfg.Engine)
	if err := s.view.Suits(s.cfg.Engine.Kind); err != nil {
		return err
	}
	if s.self, err = Locate(ctx, s.cfg, s.view, s.log); err != nil {
		return err
	}
	inUse := func(ctx context.Context) ([]policy.Mount, error) {
		mounts := s.manager.MountsInUse()
		if s.proxy == nil {
			return mounts, nil
		}
		binds, err := s.proxy.Binds(ctx)
		return append(mounts, binds...), err
	}
	s.unheld = NewTrusted(s.cfg.StateDir, func() *policy.Policy { return s.policies.Policy() }, inUse)
	holder, why := NewHolder(s.cfg.StateDir, s.view, s.unheld)
	if s.holder = holder; why != nil {
		s.log.WarnContext(ctx, "mounts_not_held", "error", why.Error())
	}
	s.policies, err = newPolicyKeeper(policyKeeperOptions{
		Path: s.cfg.PolicyFile, Parse: policyOptions(s.cfg, s.view, s.self), Check: CheckPolicy(s.cfg, why), Logger: s.log, Registry: s.tel.registry,
	})
	return err
}

// manage opens the store and the engine, and makes the services of sandboxes, quotas and chats.
func (s *server) manage(ctx context.Context) (err error) {
	sandboxes := settings(s.cfg.Sandbox, s.policies)
	if s.cfg.Sandbox.CreateRoots {
		if err := sandboxes.MakeRoots(); err != nil {
			return err
		}
	}
	if s.db, err = store.Open(ctx, store.Options{Path: filepath.Join(s.cfg.StateDir, StateStore)}); err != nil {
		return err
	}
	s.undo.add(s.db.Close)
	if s.engine, err = OpenRuntime(s.cfg.Engine, s.cfg.StateDir, s.log); err != nil {
		return err
	}
	s.undo.add(func() error { _ = s.engine.Close(); return nil })
	rt, err := WithAgent(s.engine, s.cfg.Engine, s.cfg.StateDir, s.view, s.log)
	if err != nil {
		return err
	}
	if s.quotas, err = openQuotas(ctx, s.cfg, s.db, s.log); err != nil {
		return err
	}
	sealKey, err := s.state.sealKey()
	if err != nil {
		return err
	}
	if s.sealer, err = lifecycle.NewSealer(ctx, lifecycle.SealerOptions{Key: sealKey, Owner: s.owner, Store: s.db, Logger: s.log}); err != nil {
		return err
	}
	collector, _ := s.engine.(runtime.Collector) // rt doesn't have its methods
	s.manager, err = lifecycle.New(lifecycle.Options{
		Runtime: rt, Sealer: s.sealer, Quotas: s.quotas, Collector: collector, Policy: s.policies.Policy, Store: s.db,
		Engine: EngineName(s.cfg.Engine), Holder: s.holder, Claim: s.unheld.Claims.Start, Owner: s.owner, Settings: sandboxes, Labels: s.self.Labels(),
		Logger: s.log, Registry: s.tel.registry, Tracer: s.tel.tracer, SweepEvery: s.cfg.Sandbox.CleanupInterval,
	})
	if err != nil {
		return err
	}
	if s.cfg.Sandbox.ChatsRoot != "" {
		return s.openChats(ctx)
	}
	return nil
}

// run serves until ctx ends, or a part fails.
func (s *server) run(ctx context.Context) error {
	// The background tasks go on until the requests in flight are done.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, background := errgroup.WithContext(background)
	group.Go(func() error { return s.manager.Run(background) })
	group.Go(func() error { return s.manager.Collect(background) })
	group.Go(func() error { return s.reload(background) })
	group.Go(func() error { return trimLoop(background, s.log) })
	if s.chats != nil {
		group.Go(func() error { return checkChats(background, s.chats, s.log) })
	}
	if s.proxy != nil {
		group.Go(func() error { return s.proxy.Run(background) })
	}
	open, closeListeners := context.WithCancel(ctx)
	defer closeListeners()
	context.AfterFunc(background, closeListeners) // one of them failed
	group.Go(func() error { return s.systemd.Run(open, "serving", s.works) })
	serving, serveCtx := errgroup.WithContext(open)
	for _, l := range s.listeners {
		serving.Go(func() error { return proxy.Serve(serveCtx, l.Listener, l.handler, l.opts) })
	}
	err := serving.Wait()
	stop()
	err = errors.Join(err, group.Wait())
	s.log.InfoContext(ctx, "stopped")
	return err
}

// works returns once the manager answers, for systemd's watchdog. It blocks while the manager is
// stuck. The engine needn't be up. It calls no listener: otherwise a client that fills one up
// could make systemd kill the server.
func (s *server) works(ctx context.Context) error {
	s.manager.Status(ctx, "")
	return nil
}

// newTelemetry makes the log, the metrics and the exporters of a server.
func newTelemetry(ctx context.Context, cfg *config.Config, headers map[string]string, instance string, stderr io.Writer) (*telemetry, error) {
	t := &telemetry{level: new(slog.LevelVar), registry: prometheus.NewRegistry()}
	t.level.Set(cfg.Logging.SlogLevel())
	t.logger = localLogger(stderr, cfg.Logging.Format, t.level)
	t.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if cfg.Otel.Endpoint == "" {
		return t, nil
	}
	return t, t.connect(ctx, cfg, headers, instance)
}

func settings(s config.Sandbox, policies *policyKeeper) lifecycle.Settings {
	out := lifecycle.Settings{
		AgentPort: s.Port, Env: s.Env, Command: s.Command, MaxSandboxes: s.MaxSandboxes, AdoptLegacy: s.AdoptLegacy,
		MaxCommands: s.MaxCommands, MaxProcesses: s.MaxProcesses,
		ChatsRoot: s.ChatsRoot, ChatMountPath: s.ChatMountPath,
		DependenciesRoot: s.DependenciesRoot, DependenciesPath: s.DependenciesMountPath,
		ToolsRoot: s.LambdaToolsRoot, ToolsPath: s.LambdaToolsMountPath,
		VolumePath: s.VolumeMountPath,
		EnginePath: func(local string) (string, error) { return policies.Policy().EnginePath(local) },
	}
	if len(s.Command) == 0 {
		out.Command = nil // the image's own
	}
	return out
}
