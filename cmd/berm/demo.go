package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
)

func newDemoCommand() *cobra.Command {
	var opts demoOptions
	var kind, address string
	var keepUp bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Start a server on a real engine and show what it does, call by call",
		Long: `Start berm serve with a state directory, a port and a token of its own, and show
each call and its answer: sandboxes made, reused, refused, used and collected, and
a server that is killed and knows its sandboxes when it is back. Every answer is
checked; the exit code is 1 if one isn't as promised. Nothing is left behind.

The engine's further settings come from the environment: BERM_ENGINE_NAMESPACE (or
CONTAINERD_NAMESPACE) and its like.`,
		Example: "  berm demo --image busybox\n  DOCKER_HOST=unix:///run/docker.sock berm demo\n  BERM_ENGINE_NAMESPACE=demo berm demo --engine containerd",
		Args:    cobra.NoArgs,
		RunE: action(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			var err error
			if opts.engine, err = demoEngine(kind, address, os.Environ()); err != nil {
				return err
			}
			return runDemo(ctx, opts, keepUp, cmd.OutOrStdout())
		}),
	}
	cmd.Flags().StringVar(&opts.image, "image", os.Getenv("BERM_DEMO_IMAGE"), "image of the sandboxes, with a shell (default $BERM_DEMO_IMAGE, else the policy's, pulled if missing)")
	cmd.Flags().StringVar(&kind, "engine", "docker", "docker or containerd")
	cmd.Flags().StringVar(&address, "engine-address", "", "the engine's address (default $DOCKER_HOST or $CONTAINERD_ADDRESS, else the engine's own)")
	cmd.Flags().StringVar(&opts.listen, "listen", "127.0.0.1:0", "address of the server")
	cmd.Flags().BoolVar(&keepUp, "keep-up", false, "show nothing: print how to call the server, and keep it up until Ctrl-C")
	return cmd
}

type demoOptions struct {
	engine        config.Engine
	image, listen string
}

// demoEngine reads the settings of the engine as a server would, but from flags and
// the environment only.
func demoEngine(kind, address string, environ []string) (config.Engine, error) {
	opts := config.Options{Flags: map[string]string{"engine.kind": kind, "engine.instance": ""}}
	if address != "" {
		opts.Flags["engine.address"] = address
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case strings.HasPrefix(name, "BERM_ENGINE_"):
			opts.Environ = append(opts.Environ, kv)
		case name == "CONTAINERD_NAMESPACE" && kind == "containerd": // the last of a name counts
			opts.Environ = append([]string{"BERM_ENGINE_NAMESPACE=" + value}, opts.Environ...)
		}
	}
	cfg, err := config.Load(opts)
	if err != nil {
		return config.Engine{}, err
	}
	return cfg.Engine, nil
}

// demoPolicy has sandboxes run as a user that isn't Berm's, as the stacks in compose have.
const demoPolicy = `version: 1
profiles: {default: {user: "1000:1000"}}
mounts: {owner: "1000:1000"}
`

// runDemo sets the stage, plays, and clears it again, whatever happens.
func runDemo(ctx context.Context, opts demoOptions, keepUp bool, out io.Writer) (err error) {
	// A child's parent-death signal is tied to the thread that started it.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()

	dir, err := os.MkdirTemp("", "berm-demo-")
	if err != nil {
		return err
	}
	if err := ask(ctx, opts.engine, filepath.Join(dir, "ask")); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	srv := newDemoServer(dir, opts)
	file := filepath.Join(dir, "policy.yaml")
	srv.env = append(srv.env, "BERM_POLICY_FILE="+file)
	if err := os.WriteFile(file, []byte(demoPolicy), 0o600); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	defer func() {
		failed := err != nil && ctx.Err() == nil
		if failed {
			_, _ = fmt.Fprintf(out, "\nThe server's log ends with:\n%s\n", indent(srv.logTail()))
		}
		if ctx.Err() != nil {
			err = errors.New("interrupted; everything was removed")
			if keepUp {
				err = nil
			}
		}
		err = errors.Join(err, clearStage(context.WithoutCancel(ctx), srv), os.RemoveAll(dir))
	}()
	if err := srv.start(ctx); err != nil {
		return err
	}
	d := &demo{out: out, server: srv}
	if keepUp {
		return d.keepUp(ctx)
	}
	return d.play(ctx)
}

// ask finds out whether the engine is there, before a server waits for it.
func ask(ctx context.Context, cfg config.Engine, stateDir string) error {
	rt, err := openRuntime(cfg, stateDir, nil)
	if err != nil {
		return err
	}
	defer closeRuntime(rt)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := rt.Info(ctx); err != nil {
		return fmt.Errorf("the %s engine isn't there; start it, or say where it is with --engine-address: %w", cfg.Kind, err)
	}
	return nil
}

// clearStage stops the server and removes what it made, by label and without it.
func clearStage(ctx context.Context, srv *demoServer) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	srv.stop()
	rt, err := srv.openRuntime()
	if err != nil {
		return err
	}
	defer func() { closeRuntime(rt) }()
	cfg := srv.opts.engine
	if rt, err = withAgent(rt, cfg, srv.stateDir(), engineView(ctx, cfg), slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	owned := map[string]string{lifecycle.LabelOwner: srv.instance}
	containers, err := rt.List(ctx, owned)
	if err != nil {
		return fmt.Errorf("look for what the demo left: %w", err)
	}
	var errs []error
	for _, c := range containers {
		errs = append(errs, rt.Remove(ctx, c.ID))
	}
	if s, ok := rt.(runtime.Sweeper); ok {
		errs = append(errs, s.Sweep(ctx)) // a server that was killed may have left parts
	}
	if n, ok := rt.(runtime.Networker); ok {
		errs = append(errs, n.RemoveNetwork(ctx, srv.network))
	}
	for _, left := range agentDirs(srv.stateDir()) {
		errs = append(errs, fmt.Errorf("%s is left of a sandbox", left))
	}
	return errors.Join(errs...)
}

// keepUp tells how to call the server, and waits.
func (d *demo) keepUp(ctx context.Context) error {
	binary, err := os.Executable()
	if err != nil {
		binary = "berm"
	}
	if wd, err := os.Getwd(); err == nil {
		if rel, err := filepath.Rel(wd, binary); err == nil && !strings.HasPrefix(rel, "..") {
			binary = rel
		}
	}
	d.printf(`
Berm is up.

  export BERM_URL=%s BERM_TOKEN=%s

  curl -X PUT -H "X-API-Token: $BERM_TOKEN" $BERM_URL/api/v1/sandboxes/mine
  %[3]s sandbox exec mine -- echo hello
  %[3]s sandbox ls

What it can do: %[1]s/docs. Its log: %[4]s
Ctrl-C stops it and removes its sandboxes.
`, d.server.url, d.server.token, binary, d.server.logPath())
	return d.server.wait(ctx)
}

func (d *demo) printf(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format, args...) }

func indent(text string) string {
	return "     " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n     ")
}
