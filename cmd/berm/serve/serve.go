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
	"github.com/bermhq/berm/lifecycle/reaper"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi"
	"github.com/bermhq/berm/runtime"
)

// flushTimeout bounds the sending of the last telemetry.
const flushTimeout = 5 * time.Second

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
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.FromFlags(cmd)
			if err != nil {
				return err
			}
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

// cleanup undoes, in reverse order, what was done. It also rolls back a start that
// got only half way.
type cleanup []func() error

func (c *cleanup) add(f func() error) { *c = append(*c, f) }

func (c *cleanup) run() error {
	var errs []error
	for i := len(*c) - 1; i >= 0; i-- {
		errs = append(errs, (*c)[i]())
	}
	return errors.Join(errs...)
}

// runServer puts everything together and runs it until ctx ends. Read gives the settings anew.
func runServer(ctx context.Context, asRead *config.Config, read func() (*config.Config, error), stderr io.Writer) (err error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50) // a sidecar's memory counts for more than its garbage collector's time
	}
	var undo cleanup
	starting := true
	defer func() {
		if starting && ctx.Err() != nil && errors.Is(err, context.Canceled) {
			err = nil // told to end before it served
		}
		err = errors.Join(err, undo.run())
	}()

	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	undo.add(func() error { signal.Stop(hup); return nil })

	sockets, cfg, err := takeSockets(asRead)
	if err != nil {
		return err
	}
	undo.add(sockets.Close)
	tokens, err := LoadTokens(cfg.Security)
	if err != nil {
		return err
	}
	if err := CheckExposure(cfg.HTTP, tokens.Len()); err != nil {
		return err
	}
	signingKey, err := LoadSigningKey(cfg.Security)
	if err != nil {
		return err
	}
	st, err := openState(cfg.StateDir)
	if err != nil {
		return err
	}
	undo.add(st.Close)
	owner, err := st.owner(cfg.Engine.Instance)
	if err != nil {
		return err
	}

	tel, err := newTelemetry(ctx, cfg, owner, stderr)
	if err != nil {
		return err
	}
	undo.add(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
		defer cancel()
		if err := tel.Close(ctx); err != nil { // the collector's trouble, not the server's
			tel.logger.WarnContext(ctx, "telemetry_failed", "error", err.Error())
		}
		return nil
	})
	log := tel.logger
	if st.replaced != "" {
		log.InfoContext(ctx, "restore_finished", "replaced", st.replaced)
	}
	systemd, err := newNotifier(log)
	if err != nil {
		return err
	}
	undo.add(systemd.Close)
	kept, err := newSettingsKeeper(asRead, read, tel, tel.registry)
	if err != nil {
		return err
	}

	shared := EngineView(ctx, cfg.Engine)
	if err := shared.Suits(cfg.Engine.Kind); err != nil {
		return err
	}
	here, err := Locate(ctx, cfg, shared, log)
	if err != nil {
		return err
	}
	var (
		manager  *lifecycle.Manager // these three exist before the first hold
		door     *engineapi.Door
		policies *policyKeeper
	)
	inUse := func(ctx context.Context) ([]policy.Mount, error) {
		mounts := manager.MountsInUse()
		if door == nil { // an engine that doesn't speak its API
			return mounts, nil
		}
		binds, err := door.Binds(ctx)
		return append(mounts, binds...), err
	}
	unheld := NewTrusted(cfg.StateDir, func() *policy.Policy { return policies.Policy() }, inUse)
	holder, why := NewHolder(cfg.StateDir, shared, unheld)
	if why != nil {
		log.WarnContext(ctx, "mounts_not_held", "error", why.Error())
	}
	policies, err = newPolicyKeeper(policyKeeperOptions{
		Path: cfg.PolicyFile, Parse: policyOptions(cfg, shared, here), Check: AllOf(Holdable(why), HasProfiles(cfg.EngineAPI)), Logger: log, Registry: tel.registry,
		OnSignal: func(ctx context.Context, reload func()) {
			systemd.reloading(ctx, func() {
				reload()
				kept.reload(ctx)
			})
		},
	})
	if err != nil {
		return err
	}
	sandboxes := settings(cfg.Sandbox, policies)
	if cfg.Sandbox.CreateRoots {
		if err := sandboxes.MakeRoots(); err != nil {
			return err
		}
	}
	db, err := store.Open(ctx, store.Options{Path: filepath.Join(cfg.StateDir, StateStore)})
	if err != nil {
		return err
	}
	undo.add(db.Close)
	engine, err := OpenRuntime(cfg.Engine, cfg.StateDir, log)
	if err != nil {
		return err
	}
	undo.add(func() error { CloseRuntime(engine); return nil })
	rt, err := WithAgent(engine, cfg.Engine, cfg.StateDir, shared, log)
	if err != nil {
		return err
	}
	collector, _ := engine.(runtime.Collector) // the agent's part hides it
	lasting, err := openWorkspaces(cfg, db, func() *lifecycle.Manager { return manager }, log)
	if err != nil {
		return err
	}
	ceilings, err := openCeilings(ctx, cfg, db, log)
	if err != nil {
		return err
	}
	sealKey, err := st.sealKey()
	if err != nil {
		return err
	}
	sealer, err := lifecycle.NewSealer(ctx, lifecycle.SealerOptions{Key: sealKey, Owner: owner, Store: db, Logger: log})
	if err != nil {
		return err
	}
	managed := lifecycle.Options{
		Runtime: rt, Sealer: sealer, Ceilings: ceilings, Collector: collector, Policy: policies.Policy, Store: db, Holder: holder, Claim: unheld.Claims.Start, Owner: owner, Settings: sandboxes, Labels: here.Labels(),
		Logger: log, Registry: tel.registry, Tracer: tel.tracer,
	}
	if lasting != nil {
		managed.Workspaces = lasting
	}
	manager, err = lifecycle.New(managed)
	if err != nil {
		return err
	}
	chats, err := openChats(ctx, cfg, db, lasting, manager, log, tel.registry)
	if err != nil {
		return err
	}
	undo.add(func() error {
		if err := closeChats(ctx, chats); err != nil { // the next start goes on with it
			log.WarnContext(ctx, "staging_not_removed", "error", err.Error())
		}
		return nil
	})
	sweeper, err := reaper.New(reaper.Options{
		Manager: manager, Interval: cfg.Sandbox.CleanupInterval, Logger: log, Registry: tel.registry, Tracer: tel.tracer,
	})
	if err != nil {
		return err
	}
	parts := doorParts{
		cfg: cfg, manager: manager, db: db, engine: engine, policies: policies, tokens: tokens, signingKey: signingKey, owner: owner, sealer: sealer, log: log, tel: tel, holder: holder, unheld: unheld, labels: here.Labels(),
		workspaces: lasting, chats: chats, sockets: sockets, bodies: proxy.NewBodies(),
	}
	undo.add(st.withdraw)
	if door, err = parts.engineDoor(&undo); err != nil {
		return err
	}
	fronts, address, err := parts.engineAPI(ctx, door, &undo)
	if err != nil {
		return err
	}
	if address != "" {
		if err := st.announce(stateEngineAddress, address); err != nil {
			return err
		}
	}
	if cfg.HTTP.Listen != config.ListenNone {
		f, address, err := parts.sandboxAPI(ctx, &undo)
		if err != nil {
			return err
		}
		fronts = append(fronts, f)
		if err := st.announce(StateAddress, address); err != nil {
			return err
		}
		log.InfoContext(ctx, "serving", "address", address, "version", config.Version, "engine", cfg.Engine.Kind,
			"instance", owner, "state_dir", cfg.StateDir, "policy_file", cfg.PolicyFile, "tokens", tokens.Len())
	}

	// What the requests in flight need goes on until they are done.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, background := errgroup.WithContext(background)
	group.Go(func() error { return manager.Run(background) })
	group.Go(func() error { return sweeper.Run(background) })
	group.Go(func() error { return policies.Run(background, hup) })
	group.Go(func() error { return trimLoop(background, log) })
	group.Go(func() error { return checkChats(background, chats, log) })
	if door != nil {
		group.Go(func() error { return door.Run(background) })
	}
	open, closeFronts := context.WithCancel(ctx)
	defer closeFronts()
	context.AfterFunc(background, closeFronts) // one of them failed
	group.Go(func() error { return systemd.Run(open, "serving", parts.works(fronts)) })

	starting = false
	err = serveFronts(open, fronts)
	stop()
	err = errors.Join(err, group.Wait())
	log.InfoContext(ctx, "stopped")
	return err
}

// newTelemetry makes what a server tells of itself with.
func newTelemetry(ctx context.Context, cfg *config.Config, instance string, stderr io.Writer) (*telemetry, error) {
	level, err := cfg.Logging.SlogLevel()
	if err != nil {
		return nil, err
	}
	t := &telemetry{level: new(slog.LevelVar), registry: prometheus.NewRegistry()}
	t.level.Set(level)
	t.logger = localLogger(stderr, cfg.Logging.Format, t.level)
	t.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if cfg.Otel.Endpoint == "" {
		return t, nil
	}
	return t, t.connect(ctx, cfg, instance)
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
